"""Average pieces of tensors in a few threads; every input byte is read once.

A thread takes the next piece when it has finished one, so files are read and written front to back.
The result does not depend on which thread computes a piece.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, TypeAlias

from torch_lawa.checkpoints.formats.base import Checkpoint
from torch_lawa.coefficients import Uniform, Weights
from torch_lawa.errors import FormatError
from torch_lawa.mean.dtypes import DTYPES
from torch_lawa.mean.kernels import PIECE, Bytes, Pieces, all_finite, make_pieces, piece_length
from torch_lawa.offline.matching import PlannedTensor
from torch_lawa.offline.threads import Meter, in_threads

__all__ = [
    "Span",
    "average_spans",
    "batched",
    "cut_spans",
    "read_piece",
    "value_width",
    "whole_tensors",
]

Span: TypeAlias = tuple[PlannedTensor, int, int]  # a tensor, its first value, one past its last
_REMOTE_PIECE = 1 << 19  # one request per piece


class Sink(Protocol):
    """Receives finished bytes of tensors, from any thread, in any order."""

    def write(self, name: str, begin: int, piece: Bytes) -> None:
        """Write bytes of the tensor `name` at offset `begin`; `piece` is reused after the call."""
        ...

    def write_all(self, parts: Sequence[tuple[str, int]], piece: Bytes) -> None:
        """Write several whole tensors, (name, bytes) each, whose bytes follow each other."""
        ...


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


def whole_tensors(tensors: Iterable[PlannedTensor]) -> Iterator[Span]:
    """Every tensor from its first value to its last."""
    for tensor in tensors:
        yield tensor, 0, tensor.source.nbytes // value_width(tensor.source.dtype)


def cut_spans(spans: Iterable[Span], length: int | None) -> Iterator[Span]:
    """Cut spans into pieces of at most `length` values; None: a length that fits the cache."""
    for tensor, first, last in spans:
        piece = length or piece_length(tensor.source.dtype, tensor.target.dtype)
        for start in range(first, last, piece):
            yield tensor, start, min(start + piece, last)


def average_spans(
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
