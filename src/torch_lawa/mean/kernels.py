"""The mean of raw bytes, one piece at a time: what `mean/blocks.py` is for tensors.

The same definition (float64 sums, oldest first, one division, one rounding) and the same bits, but
directly from the bytes of files and without importing PyTorch. A piece stays in cache while k
checkpoints are added to it. Each thread has its own `Pieces`.

There are two implementations, equal bit for bit: `CompiledPieces` (loops in C, if the package was
built with a compiler) and `NumpyPieces`, which is always available.
"""

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from torch_lawa.coefficients import Weights
from torch_lawa.mean.dtypes import DTYPES

__all__ = [
    "PIECE",
    "Bytes",
    "Doubles",
    "Pieces",
    "Windows",
    "all_finite",
    "exact_factor",
    "make_pieces",
    "piece_length",
    "real",
]

Bytes: TypeAlias = NDArray[np.uint8]
Doubles: TypeAlias = NDArray[np.float64]
Windows: TypeAlias = Sequence[tuple[range, Weights]]

# Size of a piece in values and in bytes: long enough to hide the cost of a call, short enough for
# the cache (see docs/decisions/0009).
PIECE = 1 << 18
_PIECE_BYTES = 1 << 19

# The bits that are all set in NaN and Inf, per float dtype.
_NOT_FINITE = {
    "F64": 0x7FF0000000000000,
    "F32": 0x7F800000,
    "F16": 0x7C00,
    "BF16": 0x7F80,
    "F8_E4M3": 0x7F,
    "F8_E5M2": 0x7C,
}


class Pieces(ABC):
    """Averages pieces of up to `length` values; scratch memory is allocated once.

    >>> from torch_lawa.coefficients import Uniform
    >>> pieces = make_pieces(2)
    >>> old, new = (np.array([x, 1.0], np.float32).view(np.uint8) for x in (1.0, 4.0))
    >>> pieces.mean([old, new], Uniform().weights(2), "F32", "F32").view(np.float32)
    array([2.5, 1. ], dtype=float32)
    """

    def __init__(self, length: int = PIECE) -> None:
        length += length % 2  # NumPy reads bfloat16 in pairs
        self.length = length
        self.finite = True  # whether the last mean was finite
        self._aligned = np.empty(length * 8, np.uint8)

    def mean(self, pieces: Iterable[Bytes], weights: Weights, source: str, target: str) -> Bytes:
        """The mean of the same piece of every checkpoint, oldest first.

        Pieces are a list, or an iterator that reads one after the other. Pieces with weight 0 must
        be left out, together with their weight. The result is scratch memory.
        """
        source, first = real(source), True
        for raw, weight in zip(pieces, weights.numerators, strict=True):
            self._add(self._align(raw, source), source, weight, first)
            first = False
        return self._finish(weights.divisor, real(target))

    @abstractmethod
    def means(
        self, pieces: Iterable[Bytes], windows: Windows, source: str, target: str
    ) -> Iterator[Bytes]:
        """The mean of each window (positions of its checkpoints, oldest first), in scratch memory.

        Every piece is decoded once for any number of windows.
        """

    @abstractmethod
    def _add(self, raw: Bytes, code: str, weight: float, first: bool) -> None:
        """Start the sum, or add to it."""

    @abstractmethod
    def _finish(self, divisor: float, target: str) -> Bytes:
        """Divide the sum and round it; sets `finite`."""

    def _align(self, raw: Bytes, code: str) -> Bytes:
        """A copy if `raw` is unaligned: arithmetic on it would be several times slower."""
        width = max(4, DTYPES[code].itemsize)
        if raw.__array_interface__["data"][0] % width == 0 and raw.flags.c_contiguous:
            return raw
        copy = self._aligned[: len(raw)]
        np.copyto(copy, raw)
        return copy


def make_pieces(length: int = PIECE) -> Pieces:
    """The fastest implementation that is available."""
    from torch_lawa.mean.kernels_native import CompiledPieces
    from torch_lawa.mean.kernels_numpy import NumpyPieces

    return CompiledPieces(length) if CompiledPieces.available() else NumpyPieces(length)


@functools.cache
def piece_length(source: str, target: str) -> int:
    """How many values of a dtype to average at a time.

    >>> piece_length("F32", "F32"), piece_length("BF16", "BF16")
    (131072, 262144)
    """
    width = max(DTYPES[real(source)].itemsize, DTYPES[real(target)].itemsize)
    return min(PIECE, _PIECE_BYTES // width)


def real(code: str) -> str:
    """Complex numbers are averaged as pairs of real ones."""
    return "F32" if code == "C64" else code


def all_finite(raw: Bytes, code: str) -> bool:
    """Whether no value of a float dtype is NaN or Inf.

    >>> all_finite(np.array([1.0, 6e4], np.float16).view(np.uint8), "F16")
    True
    >>> all_finite(np.array([1.0, np.inf], np.float16).view(np.uint8), "F16")
    False
    """
    code = real(code)
    values, mask = raw.view(f"u{DTYPES[code].itemsize}"), _NOT_FINITE[code]
    return not bool(((values & mask) == mask).any())


def exact_factor(divisor: float) -> float:
    """The factor to multiply by instead of dividing, if that gives the same bits; else 0.

    >>> exact_factor(8.0), exact_factor(6.0)
    (0.125, 0.0)
    """
    return 1.0 / divisor if math.frexp(divisor)[0] == 0.5 else 0.0
