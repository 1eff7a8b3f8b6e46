"""The work itself: pieces of tensors through a few threads, every input byte read once.

Threads take the next piece as they finish one, so the files are read and written front to back.
Which thread makes a piece changes nothing in it.
"""

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, TypeAlias, TypeVar

from torch_lawa.checkpoints.formats.base import Checkpoint
from torch_lawa.coefficients import Uniform, Weights
from torch_lawa.errors import FormatError
from torch_lawa.mean.dtypes import DTYPES
from torch_lawa.mean.kernels import PIECE, Bytes, all_finite, make_pieces, piece_length
from torch_lawa.offline.matching import PlannedTensor

__all__ = [
    "Meter",
    "Sink",
    "Span",
    "Stopped",
    "cut_spans",
    "default_threads",
    "drop_zeros",
    "in_threads",
    "pieces_of",
    "read_piece",
    "run",
    "value_width",
    "whole",
]

_T = TypeVar("_T")
Span: TypeAlias = tuple[PlannedTensor, int, int]  # a tensor, its first value, and after its last
_LOCAL_THREADS, _REMOTE_THREADS = 8, 16
_REMOTE_PIECE = 1 << 19  # a piece is a request


class Sink(Protocol):
    """Takes finished bytes of a tensor, from any thread, in any order."""

    def write(self, name: str, begin: int, piece: Bytes) -> None:
        """Bytes of the tensor `name` from `begin` on; `piece` is scratch after the call."""
        ...


class Stopped(Exception):
    """The work was told to stop and did, unfinished."""


class Meter:
    """Bytes read so far, of how many: for whoever shows progress. Also the way to stop."""

    def __init__(self, total: int = 0) -> None:
        self.total = total
        self.done = 0
        self.stopped = False
        self._lock = threading.Lock()

    def add(self, num_bytes: int) -> None:
        """So many more bytes are done."""
        with self._lock:
            self.done += num_bytes

    def stop(self) -> None:
        """Let every thread end after its piece."""
        self.stopped = True


def default_threads(checkpoints: Sequence[Checkpoint], processes: int = 1) -> int:
    """One a core here; more where each waits for a server most of the time.

    Of several processes on this machine each has its part of them.
    """
    if not all(c.location.local for c in checkpoints):
        return max(1, _REMOTE_THREADS // processes)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(_LOCAL_THREADS, (cores or 1) // processes))


def drop_zeros(
    checkpoints: Sequence[Checkpoint], weights: Weights
) -> tuple[list[Checkpoint], Weights]:
    """Without the checkpoints that do not count: they need not even be read."""
    used = [(c, w) for c, w in zip(checkpoints, weights.numerators, strict=True) if w != 0.0]
    return [c for c, _ in used], Weights(tuple(w for _, w in used), weights.divisor)


def value_width(code: str) -> int:
    """Bytes of one real value; a complex number is two."""
    dtype = DTYPES[code]
    return dtype.itemsize // 2 if dtype.kind == "complex" else dtype.itemsize


def whole(tensors: Iterable[PlannedTensor]) -> Iterator[Span]:
    """Every tensor from its first value to its last."""
    for tensor in tensors:
        yield tensor, 0, tensor.source.nbytes // value_width(tensor.source.dtype)


def cut_spans(spans: Iterable[Span], length: int | None = None) -> Iterator[Span]:
    """Spans cut into those of at most `length` values each.

    The length is the one that suits their dtype, unless it is given.
    """
    for tensor, first, last in spans:
        at_a_time = length or piece_length(tensor.source.dtype, tensor.target.dtype)
        for start in range(first, last, at_a_time):
            yield tensor, start, min(start + at_a_time, last)


def pieces_of(tensors: Sequence[PlannedTensor], length: int | None = None) -> Iterator[Span]:
    """Every tensor cut into `(tensor, first value, last value)`, of at most `length` values each.

    The length is the one that suits their dtype, unless it is given.
    """
    return cut_spans(whole(tensors), length)


def run(
    checkpoints: Sequence[Checkpoint],
    weights: Weights,
    spans: Iterable[Span],
    sink: Sink,
    *,
    threads: int,
    meter: Meter,
    length: int | None = None,
) -> list[str]:
    """Average `spans` of the checkpoints, oldest first, into `sink`.

    Returns the names of tensors whose mean is not finite throughout.
    """
    local = all(c.location.local for c in checkpoints)
    if not local and length is None:
        length = _REMOTE_PIECE
    used, used_weights = drop_zeros(checkpoints, weights)
    newest = checkpoints[-1]
    alone = Uniform().weights(1)
    not_finite: set[str] = set()

    def work(todo: Iterator[Span]) -> None:
        piece = make_pieces(length or PIECE)
        for tensor, first, last in todo:
            code, target = tensor.source.dtype, tensor.target.dtype
            begin, end = first * value_width(code), last * value_width(code)
            if tensor.rule == "newest" and code == target:
                made = read_piece(newest, tensor.name, begin, end)
                meter.add(end - begin)
            else:
                average = tensor.rule == "average"
                sources, how = (used, used_weights) if average else ([newest], alone)
                raws = (read_piece(c, tensor.name, begin, end) for c in sources)
                # From a server one after the other, so that only one is in memory.
                made = piece.mean(list(raws) if local else raws, how, code, target)
                meter.add((end - begin) * len(sources))
                # A mean may be too large for a narrower dtype than that of the inputs.
                if not piece.finite or (code != target and not all_finite(made, target)):
                    not_finite.add(tensor.name)
            sink.write(tensor.name, first * value_width(target), made)

    in_threads(threads, cut_spans(spans, length), work, meter)
    return sorted(not_finite)


def read_piece(checkpoint: Checkpoint, name: str, begin: int, end: int) -> Bytes:
    """Bytes of a tensor, all of them or an error."""
    raw = checkpoint.read(name, begin, end)
    if len(raw) != end - begin:
        raise FormatError(
            f"{checkpoint.file_of(name)}: tensor {name!r} ended early: the file changed while it "
            "was read."
        )
    return raw


def in_threads(
    num_threads: int,
    todo: Iterator[_T],
    work: Callable[[Iterator[_T]], None],
    meter: Meter,
) -> None:
    """Share `todo` among threads; the first error stops them all and is raised here."""
    lock = threading.Lock()
    errors: list[BaseException] = []
    # Counted rather than joined: after a Ctrl-C `join` may take a running thread for ended.
    ended = threading.Semaphore(0)

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
        finally:
            ended.release()

    num_running = 0
    try:
        for _ in range(num_threads):
            num_running += 1
            threading.Thread(target=guarded, daemon=True).start()
        while num_running:
            ended.acquire()
            num_running -= 1
    except BaseException:  # Ctrl-C: let every thread end after its piece
        meter.stop()
        while num_running and ended.acquire(timeout=10.0):
            num_running -= 1
        raise
    if errors:
        raise errors[0]
    if meter.stopped:
        raise Stopped
