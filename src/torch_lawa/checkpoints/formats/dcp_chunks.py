"""Tensors stored in chunks, each a box of the whole, in the files of several ranks."""

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from torch_lawa.checkpoints.formats.base import TensorSpec
from torch_lawa.checkpoints.formats.torch_pickle.strided import gather_bytes
from torch_lawa.checkpoints.formats.torch_pickle.tensors import StoredTensor
from torch_lawa.mean.dtypes import DTYPES

if TYPE_CHECKING:
    from torch_lawa.checkpoints.formats.torch_pickle.strided import Values
    from torch_lawa.mean.kernels import Bytes

__all__ = ["Chunk", "ChunkedTensor", "find_problem"]

_MAX_AXES = 8  # along which a tensor is cut; meshes of ranks have fewer dimensions
_PATIENCE = 100_000  # comparisons of chunks, for the sake of a message


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor (its start and sizes), and where its values are stored."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    offset: int
    length: int


class ChunkedTensor:
    """A whole tensor; `load` opens one of its chunks."""

    def __init__(
        self, spec: TensorSpec, chunks: tuple[Chunk, ...], load: Callable[[Chunk], StoredTensor]
    ) -> None:
        self.spec, self.chunks, self.load = spec, chunks, load

    @cached_property
    def _in_order(self) -> tuple[list[int], list[Chunk]]:
        """Chunks that are contiguous in the row-major whole, and where they begin in it, sorted."""
        found = [(_flat_begin(chunk, self.spec.shape), chunk) for chunk in self.chunks]
        pairs = sorted(((b, c) for b, c in found if b is not None), key=itemgetter(0))
        return [begin for begin, _ in pairs], [chunk for _, chunk in pairs]

    @cached_property
    def _index(self) -> "_ChunkIndex":
        return _ChunkIndex(self.spec.shape, self.chunks)

    def read(self, begin: int, end: int) -> "Bytes":
        """Bytes `begin` to `end`: a view if one chunk has them in order, else a copy."""
        item = DTYPES[self.spec.dtype].itemsize
        begins, chunks = self._in_order
        at = bisect_right(begins, begin // item) - 1
        if begin < end and at >= 0 and end <= (begins[at] + math.prod(chunks[at].sizes)) * item:
            first = begins[at] * item
            return self.load(chunks[at]).read(begin - first, end - first)
        return gather_bytes(self.spec, self.fill, begin, end)

    def fill(self, out: "Values", starts: tuple[int, ...]) -> None:
        """Fill `out` with the box of its shape that begins at `starts`."""
        ends = _ends(starts, out.shape)
        for chunk in self._index.near(starts, ends):
            # From `low` to `high`: the intersection of the chunk and the box.
            low = tuple(map(max, starts, chunk.starts))
            high = map(min, ends, _ends(chunk.starts, chunk.sizes))
            within = [slice(a - s, b - s) for a, b, s in zip(low, high, starts, strict=True)]
            if all(cut.start < cut.stop for cut in within):
                index: tuple[Any, ...] = (*within, ...)  # a view also for scalars
                first = tuple(a - s for a, s in zip(low, chunk.starts, strict=True))
                self.load(chunk).fill(out[index], first)


class _ChunkIndex:
    """Finds the chunks near a box without looking at all of them."""

    def __init__(self, shape: tuple[int, ...], chunks: Sequence[Chunk]) -> None:
        # In a grid, which is what ranks write, a chunk is found by where it starts.
        self._cuts = [sorted({chunk.starts[i] for chunk in chunks}) for i in range(len(shape))]
        self._grid = {chunk.starts: chunk for chunk in chunks}
        next_cut = [
            dict(zip(cuts, [*cuts[1:], size], strict=True))
            for cuts, size in zip(self._cuts, shape, strict=True)
        ]
        self._is_grid = all(
            cuts[a] == a + n
            for chunk in chunks
            for cuts, a, n in zip(next_cut, chunk.starts, chunk.sizes, strict=True)
        )
        # Otherwise by where it starts along the axis with most cuts.
        self._axis = max(range(len(shape)), key=lambda i: len(self._cuts[i]), default=0)
        self._sorted = [] if self._is_grid else sorted(chunks, key=self._start)
        self._starts = [self._start(chunk) for chunk in self._sorted]
        self._widest = max((chunk.sizes[self._axis] for chunk in self._sorted), default=0)

    def _start(self, chunk: Chunk) -> int:
        return chunk.starts[self._axis]

    def near(self, starts: tuple[int, ...], ends: tuple[int, ...]) -> Iterable[Chunk]:
        """The chunks that a box intersects, and perhaps some more."""
        if not self._is_grid:
            first = bisect_right(self._starts, starts[self._axis] - self._widest)
            return self._sorted[first : bisect_left(self._starts, ends[self._axis])]
        spans = [
            cuts[max(0, bisect_right(cuts, a) - 1) : bisect_left(cuts, b)]
            for cuts, a, b in zip(self._cuts, starts, ends, strict=True)
        ]
        return (self._grid[at] for at in product(*spans) if at in self._grid)


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
    filled = [chunk for chunk in chunks if math.prod(chunk.sizes)]
    axes = [i for i, n in enumerate(shape) if any(c.sizes[i] != n for c in filled)]
    if len(axes) > _MAX_AXES:
        return f"it is cut along {len(axes)} dimensions, and at most {_MAX_AXES} are supported"
    if _cover_exactly(shape, filled, axes):
        return None
    overlap = _find_overlap(shape, filled)
    if overlap:
        return "the chunks at {} and {} overlap".format(*(c.starts for c in overlap))
    missing = math.prod(shape) - sum(math.prod(chunk.sizes) for chunk in chunks)
    if missing > 0:
        return f"{missing} of its {math.prod(shape)} values are in no chunk"
    return "some of its chunks overlap"


def _cover_exactly(shape: tuple[int, ...], chunks: Sequence[Chunk], axes: Sequence[int]) -> bool:
    """Whether the chunks, which are cut along `axes`, contain every value once.

    The number of chunks at each value is determined by the corners of the chunks, counted with
    alternating signs (it is the sum of these numbers over all smaller positions). So chunks cover
    the whole once if and only if their corners add up to those of the whole. That takes a time
    linear in the number of chunks, for any arrangement.
    """
    if not math.prod(shape):
        return not chunks
    corners: Counter[tuple[int, ...]] = Counter()
    signs = [(-1) ** sum(ends) for ends in product((0, 1), repeat=len(axes))]
    for chunk in chunks:
        edges = [(chunk.starts[i], chunk.starts[i] + chunk.sizes[i]) for i in axes]
        for corner, sign in zip(product(*edges), signs, strict=True):
            corners[corner] += sign
    for corner, sign in zip(product(*((0, shape[i]) for i in axes)), signs, strict=True):
        corners[corner] -= sign
    return not any(corners.values())


def _find_overlap(shape: tuple[int, ...], chunks: Sequence[Chunk]) -> tuple[Chunk, Chunk] | None:
    """Two chunks that overlap, for a message; None if they are not found soon.

    Sweeps along the dimension with most cuts, comparing with chunks that have not ended.
    """
    if not shape:
        return (chunks[0], chunks[1]) if len(chunks) > 1 else None
    axis = max(range(len(shape)), key=lambda i: len({chunk.starts[i] for chunk in chunks}))
    active: list[Chunk] = []
    patience = _PATIENCE
    for chunk in sorted(chunks, key=lambda c: c.starts[axis]):
        begin = chunk.starts[axis]
        active = [other for other in active if other.starts[axis] + other.sizes[axis] > begin]
        patience -= len(active)
        if patience < 0:
            return None
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
