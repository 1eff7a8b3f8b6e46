"""Tensors stored in chunks, each a box of the whole, in the files of several ranks."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch_lawa.checkpoints.formats.base import TensorSpec
from torch_lawa.checkpoints.formats.torch_pickle.strided import gather_bytes
from torch_lawa.checkpoints.formats.torch_pickle.tensors import StoredTensor
from torch_lawa.mean.dtypes import DTYPES

if TYPE_CHECKING:
    from torch_lawa.checkpoints.formats.torch_pickle.strided import Values
    from torch_lawa.mean.kernels import Bytes

__all__ = ["Chunk", "ChunkedTensor", "find_problem"]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor (its start and sizes), and where its values are stored."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    offset: int
    length: int


@dataclass(frozen=True, eq=False, slots=True)
class ChunkedTensor:
    """A whole tensor; `load` opens one of its chunks."""

    spec: TensorSpec
    chunks: tuple[Chunk, ...]
    load: Callable[[Chunk], StoredTensor]

    def read(self, begin: int, end: int) -> "Bytes":
        """Bytes `begin` to `end`: a view if one chunk has them in order, else a copy."""
        item = DTYPES[self.spec.dtype].itemsize
        for chunk in self.chunks if begin < end else ():
            first = _flat_begin(chunk, self.spec.shape)
            if first is None or not first * item <= begin:
                continue
            if end <= (first + math.prod(chunk.sizes)) * item:
                return self.load(chunk).read(begin - first * item, end - first * item)
        return gather_bytes(self.spec, self.fill, begin, end)

    def fill(self, out: "Values", starts: tuple[int, ...]) -> None:
        """Fill `out` with the box of its shape that begins at `starts`."""
        for chunk in self.chunks:
            # From `low` to `high`: the intersection of the chunk and the box.
            low = tuple(map(max, starts, chunk.starts))
            high = map(min, _ends(starts, out.shape), _ends(chunk.starts, chunk.sizes))
            within = [slice(a - s, b - s) for a, b, s in zip(low, high, starts, strict=True)]
            if all(cut.start < cut.stop for cut in within):
                index: tuple[Any, ...] = (*within, ...)  # a view also for scalars
                first = tuple(a - s for a, s in zip(low, chunk.starts, strict=True))
                self.load(chunk).fill(out[index], first)


def _ends(starts: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(a + n for a, n in zip(starts, sizes, strict=True))


def _flat_begin(chunk: Chunk, shape: tuple[int, ...]) -> int | None:
    """Where the chunk begins in the row-major whole, if it is contiguous there."""
    cut = next((i for i, n in enumerate(chunk.sizes) if n != 1), len(shape))
    if chunk.sizes[cut + 1 :] != shape[cut + 1 :]:
        return None
    begin = 0
    for start, size in zip(chunk.starts, shape, strict=True):
        begin = begin * size + start
    return begin


def find_problem(shape: tuple[int, ...], chunks: Sequence[Chunk]) -> str | None:
    """Why chunks do not cover a tensor exactly once; None if they do.

    >>> halves = [Chunk((0, 0), (2, 2), "a", 0, 9), Chunk((2, 0), (1, 2), "b", 0, 9)]
    >>> find_problem((3, 2), halves), find_problem((4, 2), halves)
    (None, '2 of its 8 values are in no chunk')
    """
    for chunk in chunks:
        if len(chunk.starts) != len(shape) or len(chunk.sizes) != len(shape):
            return f"the chunk at {chunk.starts} has the wrong number of dimensions"
        if any(e > n for e, n in zip(_ends(chunk.starts, chunk.sizes), shape, strict=True)):
            return f"the chunk at {chunk.starts} of {chunk.sizes} exceeds {shape}"
    overlap = _find_overlap(shape, chunks)
    if overlap:
        return "the chunks at {} and {} overlap".format(*(c.starts for c in overlap))
    missing = math.prod(shape) - sum(math.prod(chunk.sizes) for chunk in chunks)
    return f"{missing} of its {math.prod(shape)} values are in no chunk" if missing else None


def _find_overlap(shape: tuple[int, ...], chunks: Sequence[Chunk]) -> tuple[Chunk, Chunk] | None:
    """Sweep along the dimension with most cuts, comparing with chunks that have not ended."""
    filled = [chunk for chunk in chunks if math.prod(chunk.sizes)]
    if not shape:
        return (filled[0], filled[1]) if len(filled) > 1 else None
    axis = max(range(len(shape)), key=lambda i: len({chunk.starts[i] for chunk in filled}))
    active: list[Chunk] = []
    for chunk in sorted(filled, key=lambda c: c.starts[axis]):
        begin = chunk.starts[axis]
        active = [other for other in active if other.starts[axis] + other.sizes[axis] > begin]
        for other in active:
            if all(
                a < b + m and b < a + n
                for a, n, b, m in zip(
                    chunk.starts, chunk.sizes, other.starts, other.sizes, strict=True
                )
            ):
                return other, chunk
        active.append(chunk)
    return None
