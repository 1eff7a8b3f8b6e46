"""Tensors whose values are ranges of flat vectors: how ZeRO stores parameters.

A flat vector is cut into one part per rank, each in a file of its own. Nothing is copied until a
range is read, and then only where the range crosses the end of a part.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Protocol

import numpy as np

from torch_lawa.checkpoints.formats.base import TensorSpec
from torch_lawa.mean.dtypes import DTYPES

if TYPE_CHECKING:
    from torch_lawa.checkpoints.storage.paths import Location
    from torch_lawa.mean.kernels import Bytes

__all__ = ["FlatTensor", "FlatVector", "Part", "PartitionedVector", "read_flat"]


class Readable(Protocol):
    """A tensor of which bytes can be read, such as a `StoredTensor`."""

    @property
    def spec(self) -> TensorSpec:
        """Its dtype and shape."""
        ...

    def read(self, begin: int, end: int) -> "Bytes":
        """Bytes `begin` to `end` in row-major order."""
        ...


@dataclass(frozen=True, eq=False, slots=True)
class Part:
    """A stored tensor, and the file that contains it."""

    tensor: Readable
    file: "Location"

    @property
    def numel(self) -> int:
        """Number of values."""
        return self.tensor.spec.numel


_Range = tuple[Part, int, int]  # a part, its first value, one past its last


class FlatVector:
    """Parts of one dtype, one after the other."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = parts
        self.dtype = parts[0].tensor.spec.dtype

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(part.numel for part in self.parts))

    @property
    def numel(self) -> int:
        """Number of values in all parts."""
        return self._ends[-1]

    def part_at(self, index: int) -> Part:
        """The part that has the value at `index`."""
        return self.parts[min(bisect_right(self._ends, index), len(self.parts) - 1)]

    def ranges(self, begin: int, end: int) -> Iterator[_Range]:
        """Where the values `begin` to `end` are stored, in order."""
        at = bisect_right(self._ends, begin)
        while begin < end:
            part, stop = self.parts[at], self._ends[at]
            start = stop - part.numel
            if begin < stop:
                yield part, begin - start, min(end, stop) - start
            begin, at = max(begin, min(end, stop)), at + 1


class PartitionedVector:
    """A parameter of ZeRO-3: every rank has `size` values of it, at the same offset."""

    def __init__(self, ranks: Sequence[FlatVector], offset: int, size: int) -> None:
        self.ranks, self.offset, self.size = ranks, offset, size
        self.dtype = ranks[0].dtype

    def part_at(self, index: int) -> Part:
        """The part that has the value at `index`."""
        rank = min(index // max(self.size, 1), len(self.ranks) - 1)
        return self.ranks[rank].part_at(self.offset + index - rank * self.size)

    def ranges(self, begin: int, end: int) -> Iterator[_Range]:
        """Where the values `begin` to `end` are stored, in order."""
        while begin < end:
            rank = begin // self.size
            start = rank * self.size
            stop = min(end, start + self.size)
            first = self.offset - start
            yield from self.ranks[rank].ranges(first + begin, first + stop)
            begin = stop


@dataclass(frozen=True, slots=True)
class FlatTensor:
    """A tensor of this dtype and shape: the values of a vector from `offset` on."""

    spec: TensorSpec
    vector: FlatVector | PartitionedVector
    offset: int = 0

    @property
    def file(self) -> "Location":
        """The file that contains its first value."""
        return self.vector.part_at(self.offset).file

    def read(self, begin: int, end: int) -> "Bytes":
        """Bytes `begin` to `end`: a view of the file where one part has them as they are."""
        item = DTYPES[self.spec.dtype].itemsize
        first, last = begin // item, -(-end // item)
        found = read_flat(self.vector, self.spec.dtype, self.offset + first, self.offset + last)
        return found[begin - first * item : end - first * item]


def read_flat(vector: FlatVector | PartitionedVector, dtype: str, begin: int, end: int) -> "Bytes":
    """Bytes of the values `begin` to `end` of a vector, as `dtype`."""
    item = DTYPES[vector.dtype].itemsize
    found = [
        part.tensor.read(first * item, last * item)
        for part, first, last in vector.ranges(begin, end)
    ]
    raw = found[0] if len(found) == 1 else np.concatenate([np.empty(0, np.uint8), *found])
    return raw if dtype == vector.dtype else _to_float32(raw, vector.dtype)


_NUMPY = {"F16": np.float16, "F64": np.float64}


def _to_float32(raw: "Bytes", dtype: str) -> "Bytes":
    """The same values in float32, as `Tensor.float()` converts them."""
    if dtype == "BF16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.uint8)
    with np.errstate(over="ignore"):
        return raw.view(_NUMPY[dtype]).astype(np.float32).view(np.uint8)
