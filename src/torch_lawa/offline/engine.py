"""Average pieces of tensors in a few threads; every input byte is read once.

A thread takes the next piece when it has finished one, so files are read and written front to back.
The result does not depend on which thread computes a piece. Also here: running work in background
threads, its progress meter, and the check that inputs did not change while they were read.
"""

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, Protocol, TypeAlias, TypeVar

from torch_lawa.checkpoints.formats.base import Checkpoint
from torch_lawa.checkpoints.storage.byte_sources import find_damaged
from torch_lawa.checkpoints.storage.paths import LocalPath, Location
from torch_lawa.coefficients import Uniform, Weights
from torch_lawa.errors import FormatError
from torch_lawa.mean.dtypes import DTYPES
from torch_lawa.mean.kernels import PIECE, Bytes, Pieces, all_finite, make_pieces, piece_length
from torch_lawa.offline.matching import PlannedTensor

__all__ = [
    "BackgroundTask",
    "Meter",
    "Span",
    "Stopped",
    "batched",
    "cut_spans",
    "default_threads",
    "in_threads",
    "read_piece",
    "refuse_damaged",
    "refusing_changes",
    "run",
    "value_width",
    "whole",
]

_T = TypeVar("_T")
Span: TypeAlias = tuple[PlannedTensor, int, int]  # a tensor, its first value, one past its last
_LOCAL_THREADS, _REMOTE_THREADS = 8, 16
_REMOTE_PIECE = 1 << 19  # one request per piece


class Sink(Protocol):
    """Receives finished bytes of tensors, from any thread, in any order."""

    def write(self, name: str, begin: int, piece: Bytes) -> None:
        """Write bytes of the tensor `name` at offset `begin`; `piece` is reused after the call."""
        ...

    def write_all(self, parts: Sequence[tuple[str, int]], piece: Bytes) -> None:
        """Write several whole tensors, (name, bytes) each, whose bytes follow each other."""
        ...


class Stopped(Exception):
    """The work was stopped before it was complete."""

    def __str__(self) -> str:
        return "it was stopped by a signal."


class Meter:
    """Bytes done and in total, for a progress bar; also how to stop the work."""

    def __init__(self) -> None:
        self.total = self.done = 0
        self.stopped = False
        self._lock = threading.Lock()

    def add(self, num_bytes: int) -> None:
        """Count `num_bytes` more as done."""
        with self._lock:
            self.done += num_bytes

    def stop(self) -> None:
        """Make every thread end after its current piece."""
        self.stopped = True

    def proceed(self) -> None:
        """Raise `Stopped` once the work is to stop."""
        if self.stopped:
            raise Stopped


def default_threads(checkpoints: Sequence[Checkpoint], processes: int = 1) -> int:
    """One thread per core, shared among the `processes` on this machine; more for remote files.

    Threads that read from a server spend most of their time waiting.
    """
    if not all(c.location.local for c in checkpoints):
        return max(1, _REMOTE_THREADS // processes)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(_LOCAL_THREADS, (cores or 1) // processes))


def drop_zeros(
    checkpoints: Sequence[Checkpoint], weights: Weights
) -> tuple[list[Checkpoint], Weights]:
    """Leave out checkpoints of weight 0, which need not be read."""
    used = [(c, w) for c, w in zip(checkpoints, weights.numerators, strict=True) if w != 0.0]
    return [c for c, _ in used], Weights(tuple(w for _, w in used), weights.divisor)


def value_width(code: str) -> int:
    """Bytes of one real value; a complex number counts as two."""
    dtype = DTYPES[code]
    return dtype.itemsize // 2 if dtype.kind == "complex" else dtype.itemsize


def whole(tensors: Iterable[PlannedTensor]) -> Iterator[Span]:
    """Every tensor from its first value to its last."""
    for tensor in tensors:
        yield tensor, 0, tensor.source.nbytes // value_width(tensor.source.dtype)


def cut_spans(spans: Iterable[Span], length: int | None = None) -> Iterator[Span]:
    """Cut spans into pieces of at most `length` values; the default length fits the cache."""
    for tensor, first, last in spans:
        piece = length or piece_length(tensor.source.dtype, tensor.target.dtype)
        for start in range(first, last, piece):
            yield tensor, start, min(start + piece, last)


def run(
    checkpoints: Sequence[Checkpoint],
    weights: Weights,
    spans: Iterable[Span],
    sink: Sink,
    *,
    threads: int,
    meter: Meter,
    length: int | None = None,
) -> dict[str, str]:
    """Average `spans` of the checkpoints, oldest first, into `sink`.

    Returns the names of tensors whose mean contains NaN or Inf, each with the first checkpoint that
    does; "" if none does.
    """
    local = all(c.location.local for c in checkpoints)
    if not local and length is None:
        length = _REMOTE_PIECE
    used, used_weights = drop_zeros(checkpoints, weights)
    newest = checkpoints[-1]
    alone = Uniform().weights(1)
    not_finite: dict[str, str] = {}

    def sources_of(tensor: PlannedTensor) -> tuple[Sequence[Checkpoint], Weights]:
        return (used, used_weights) if tensor.rule == "average" else ([newest], alone)

    def average(piece: Pieces, tensor: PlannedTensor, read: Callable[[Checkpoint], Bytes]) -> Bytes:
        """The mean, or the newest, of bytes of `tensor`, or of several like it."""
        code, target = tensor.source.dtype, tensor.target.dtype
        if tensor.rule == "newest" and code == target:
            piece.finite = True
            # A copy: the system cannot write from a mapping that has lost its file.
            return read(newest).copy()
        sources, how = sources_of(tensor)
        raws = map(read, sources)
        # Remote pieces one after the other, so that only one is in memory.
        made = piece.mean(list(raws) if local else raws, how, code, target)
        # A mean may overflow an output dtype that is narrower than the inputs'.
        piece.finite = piece.finite and (code == target or all_finite(made, target))
        return made

    def average_span(piece: Pieces, span: Span) -> None:
        tensor, first, last = span
        width = value_width(tensor.source.dtype)
        begin, end = first * width, last * width

        def read(checkpoint: Checkpoint) -> Bytes:
            return read_piece(checkpoint, tensor.name, begin, end)

        made = average(piece, tensor, read)
        if not piece.finite and not not_finite.get(tensor.name):
            sources, _ = sources_of(tensor)
            bad = (c for c in sources if not all_finite(read(c), tensor.source.dtype))
            found = next((str(c.location) for c in bad), "")
            not_finite[tensor.name] = found or not_finite.get(tensor.name, "")
        sink.write(tensor.name, first * value_width(tensor.target.dtype), made)

    def average_small(piece: Pieces, spans: Sequence[Span]) -> None:
        names = [tensor.name for tensor, _, _ in spans]
        size = sum(tensor.source.nbytes for tensor, _, _ in spans)
        made = average(piece, spans[0][0], lambda c: _read_all(c, names, size))
        if piece.finite:
            sink.write_all([(tensor.name, tensor.target.nbytes) for tensor, _, _ in spans], made)
        else:  # one by one, to learn which
            for span in spans:
                average_span(piece, span)

    def work(todo: Iterator[Sequence[Span]]) -> None:
        piece = make_pieces(length or PIECE)
        for spans in todo:
            if len(spans) == 1:
                average_span(piece, spans[0])
            else:
                average_small(piece, spans)
            meter.add(sum(_bytes_read(span, len(used)) for span in spans))

    cut = cut_spans(spans, length)
    # From a server, one request per tensor, all at the same time.
    todo = batched(cut) if local and length is None else ([span] for span in cut)
    in_threads(threads, todo, work, meter)
    return dict(sorted(not_finite.items()))


def _bytes_read(span: Span, num_averaged: int) -> int:
    tensor, first, last = span
    reads = num_averaged if tensor.rule == "average" else 1
    return (last - first) * value_width(tensor.source.dtype) * reads


def batched(spans: Iterable[Span]) -> Iterator[Sequence[Span]]:
    """Gather small whole tensors that are alike, so that they are averaged as one piece.

    Spans that follow each other stay together, since their bytes usually do so in the files.
    """
    batch: list[Span] = []
    kind: tuple[str, str, str] | None = None
    room = 0
    for span in spans:
        tensor, first, last = span
        this = tensor.source.dtype, tensor.target.dtype, tensor.rule
        whole = not first and last * value_width(this[0]) == tensor.source.nbytes
        if batch and (this != kind or last > room or not whole):
            yield batch
            batch = []
        if not whole:
            yield [span]
            continue
        if not batch:
            kind, room = this, piece_length(*this[:2])
        batch.append(span)
        room -= last
    if batch:
        yield batch


def read_piece(checkpoint: Checkpoint, name: str, begin: int, end: int) -> Bytes:
    """Read bytes of a tensor; fewer than asked for are an error."""
    raw = checkpoint.read(name, begin, end)
    if len(raw) != end - begin:
        raise FormatError(
            f"{checkpoint.file_of(name)}: tensor {name!r} ended early: the file changed while it "
            "was being read. Try again when it is complete."
        )
    return raw


def _read_all(checkpoint: Checkpoint, names: Sequence[str], size: int) -> Bytes:
    raw = checkpoint.read_all(names)
    if len(raw) != size:
        raise FormatError(
            f"{checkpoint.location}: tensors from {names[0]!r} on ended early: the file changed "
            "while it was being read. Try again when it is complete."
        )
    return raw


@contextmanager
def refusing_changes(opened: Sequence[Checkpoint]) -> Iterator[None]:
    """Fail if a local input file was written to during the block: the bytes read may be mixed.

    A file that was deleted or replaced by another of its name was read as it had been, so that is
    no error. Remote files are not checked.
    """
    locations = [location for checkpoint in opened for location in checkpoint.files]
    local = [location for location in locations if isinstance(location, LocalPath)]
    before = [(location, _stamp(location)) for location in local]
    yield
    refuse_damaged(local)
    for location, (inode, *stamp) in before:
        try:
            inode_now, *stamp_now = _stamp(location)
        except FileNotFoundError:
            continue
        if inode_now == inode and stamp_now != stamp:
            raise FormatError(
                f"{location}: was written to while it was being read, so nothing was made of it. "
                "Try again when it is complete; `lawa watch` waits for that by itself."
            )


def refuse_damaged(locations: Iterable[Location]) -> None:
    """Fail if one of these files, which are still open, was truncated while it was read."""
    paths = [location.path for location in locations if isinstance(location, LocalPath)]
    for path in find_damaged(paths):
        raise FormatError(
            f"{path}: was truncated while it was being read, so nothing was made of it. Try again "
            "when it is complete; `lawa watch` waits for that by itself."
        )


def _stamp(location: LocalPath) -> tuple[int, int, int]:
    found = location.path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


class BackgroundTask(Generic[_T]):
    """A function that runs in a daemon thread.

    >>> BackgroundTask(lambda: 6 * 7).start().result()
    42
    """

    def __init__(self, act: Callable[[], _T]) -> None:
        self._act = act
        self._made: list[_T] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        # After a Ctrl-C neither `Thread.join` nor `Thread.ident` can tell whether it is running.
        self._begun = threading.Lock()
        self._ended = threading.Event()

    def _run(self) -> None:
        if not self._begun.acquire(blocking=False):
            return
        try:
            self._made.append(self._act())
        except BaseException as error:
            self._error = error
        finally:
            self._ended.set()

    @property
    def succeeded(self) -> bool:
        """Whether the function has returned."""
        return bool(self._made)

    def start(self) -> "BackgroundTask[_T]":
        """Start the thread."""
        self._thread.start()
        return self

    def wait(self, timeout: float) -> bool:
        """Wait for at most `timeout` seconds; whether it has ended."""
        return self._ended.wait(timeout)

    def end(self) -> None:
        """Wait for the end, or keep it from beginning if it has not."""
        if not self._begun.acquire(blocking=False):
            self._ended.wait()

    def result(self) -> _T:
        """Wait for the end; what the function returned, or the error that it raised."""
        while not self._ended.wait(1.0):  # in slices, so that signals are handled meanwhile
            pass
        if self._error is not None:
            raise self._error
        return self._made[0]


def in_threads(
    num_threads: int,
    todo: Iterator[_T],
    work: Callable[[Iterator[_T]], None],
    meter: Meter,
) -> None:
    """Share `todo` among threads; the first error stops all of them and is raised here."""
    lock = threading.Lock()
    errors: list[BaseException] = []

    def share() -> Iterator[_T]:
        while not (meter.stopped or errors):
            with lock:
                item = next(todo, None)
            if item is None:
                return
            yield item

    def guarded() -> None:
        try:
            work(share())
        except BaseException as error:
            errors.append(error)

    tasks = [BackgroundTask(guarded) for _ in range(num_threads)]
    try:
        for task in tasks:
            task.start()
        for task in tasks:
            task.result()
    except BaseException:  # Ctrl-C: let every thread finish its piece
        meter.stop()
        for task in tasks:
            task.wait(10.0)
        raise
    if errors:
        raise errors[0]
    if meter.stopped:
        raise Stopped
