"""The mean of raw bytes, a piece at a time, in NumPy: what `core/mean.py` is for tensors.

The same definition (float64 sums, oldest first, one division, one rounding) and the same bits, but
straight from the bytes of files and without importing PyTorch. A piece stays in the cache while k
checkpoints are added to it. Each thread has a `PieceMean` of its own.

NumPy has no bfloat16 and no float8. A bfloat16 is the upper half of a float32, so a 32-bit word
holds two: one shift gives the float32 of the even ones, one mask that of the odd ones, and sums are
kept in that order, evens first ("planes"), until they are written. A float8 is looked up.
"""

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from torch_lawa.core.coefficients import Weights
from torch_lawa.core.dtypes import DTYPES

__all__ = ["PIECE", "Bytes", "Doubles", "PieceMean", "PieceWindows"]

Bytes: TypeAlias = NDArray[np.uint8]
Doubles: TypeAlias = NDArray[np.float64]

# Values in a piece: long enough to hide the cost of a call, short enough for the cache (see
# docs/decisions/0009). Even, since bfloat16 is read in pairs.
PIECE = 1 << 17

_SIMPLE: dict[str, Any] = {"F64": np.float64, "F32": np.float32, "F16": np.float16}


class PieceMean:
    """Averages pieces of up to `length` values; the scratch memory is made once.

    >>> from torch_lawa.core.coefficients import Uniform
    >>> piece = PieceMean(2)
    >>> old, new = (np.array([x, 1.0], np.float32).view(np.uint8) for x in (1.0, 4.0))
    >>> piece.mean([old, new], Uniform().weights(2), "F32", "F32").view(np.float32)
    array([2.5, 1. ], dtype=float32)
    """

    def __init__(self, length: int = PIECE) -> None:
        length += length % 2
        self.length = length
        self.finite = True  # whether the last mean was, for certain
        self._total: Doubles = np.empty(length)
        self._term: Doubles = np.empty(length)
        self._words = np.empty(length, np.uint32)
        self._out = np.empty(length * 8, np.uint8)
        self._aligned = np.empty(length * 8, np.uint8)

    def mean(self, pieces: Iterable[Bytes], weights: Weights, source: str, target: str) -> Bytes:
        """The mean of the same piece of every checkpoint, oldest first.

        Pieces are taken one after the other, so an iterator may read them as it goes; those whose
        weight is 0 must be left out, with their weight. The result is scratch.
        """
        source, target = _real(source), _real(target)
        with np.errstate(all="ignore"):  # NaN and Inf are values like others here
            total, count = self._sum(pieces, weights, source)
            divide(total, weights.divisor)
            self.finite = bool(np.isfinite(total.sum()))
            return self.encode(total, count, source, target)

    def _sum(self, pieces: Iterable[Bytes], weights: Weights, source: str) -> tuple[Doubles, int]:
        total: Doubles | None = None
        count = 0
        for raw, weight in zip(pieces, weights.numerators, strict=True):
            if total is None:
                count = len(raw) // DTYPES[source].itemsize
                total = self.decode(raw, source, self._total)
                if weight != 1.0:
                    np.multiply(total, weight, out=total)
                continue
            term = self.decode(raw, source, self._term)
            if weight != 1.0:
                np.multiply(term, weight, out=term)
            np.add(total, term, out=total)
        assert total is not None
        return total, count

    def decode(self, raw: Bytes, code: str, out: Doubles) -> Doubles:
        """Values as float64 into `out`, bfloat16 in planes."""
        raw = self._align(raw)
        if code in _SIMPLE:
            values = raw.view(_SIMPLE[code])
            out = out[: len(values)]
            np.copyto(out, values)
        elif code == "BF16":
            pairs = (len(raw) + 2) // 4
            if len(raw) % 4:  # an odd number of values: a zero makes the pair whole
                self._aligned[: len(raw)] = raw
                self._aligned[len(raw) : pairs * 4] = 0
                raw = self._aligned[: pairs * 4]
            both, words = raw.view(np.uint32), self._words[:pairs]
            out = out[: pairs * 2]
            np.left_shift(both, 16, out=words)
            np.copyto(out[:pairs], words.view(np.float32))
            np.bitwise_and(both, 0xFFFF0000, out=words)
            np.copyto(out[pairs:], words.view(np.float32))
        else:
            out = out[: len(raw)]
            np.take(_float8_values(code), raw, out=out)
        return out

    def encode(self, values: Doubles, count: int, source: str, target: str) -> Bytes:
        """`count` float64 values, in the order of `decode`, as bytes of `target`; scratch."""
        if target == "BF16":
            return self._to_bfloat16(values, count, planes=source == "BF16")
        if source == "BF16":
            pairs = len(values) // 2
            self._term[: 2 * pairs : 2] = values[:pairs]
            self._term[1 : 2 * pairs : 2] = values[pairs:]
            values = self._term
        values = values[:count]
        out = self._out[: count * DTYPES[target].itemsize]
        if target in _SIMPLE:
            np.copyto(out.view(_SIMPLE[target]), values, casting="same_kind")
        else:
            np.take(_float8_codes(target), _float8_keys(values), out=out)
        return out

    def _to_bfloat16(self, values: Doubles, count: int, *, planes: bool) -> Bytes:
        if planes:
            pairs = len(values) // 2
            low, high = (
                self._round_words(values[:pairs], 0),
                self._round_words(values[pairs:], pairs),
            )
            np.right_shift(low, 16, out=low)
            np.bitwise_and(high, 0xFFFF0000, out=high)
            np.bitwise_or(low, high, out=low)
            return low.view(np.uint8)[: count * 2]
        words = self._round_words(values[:count], 0)
        out = self._out[: count * 2]
        np.right_shift(words, 16, out=words)
        np.copyto(out.view(np.uint16), words, casting="unsafe")
        return out

    def _round_words(self, values: Doubles, start: int) -> NDArray[np.uint32]:
        """float32 words whose upper halves are the nearest bfloat16 values.

        Rounding to float32 first is a second rounding only where it lands exactly between two
        bfloat16 values; those few are pushed back to the side they came from.
        """
        words = self._words[start : start + len(values)]
        single = words.view(np.float32)
        np.copyto(single, values, casting="same_kind")
        scratch = self._out.view(np.uint32)[: len(values)]
        np.bitwise_and(words, 0xFFFF, out=scratch)
        between = np.flatnonzero(scratch == 0x8000)
        if len(between):
            wide, exact = np.abs(single[between].astype(np.float64)), np.abs(values[between])
            words[between] += (exact > wide).astype(np.uint32)
            words[between] -= (exact < wide).astype(np.uint32)
        lost = () if self.finite else np.flatnonzero(np.isnan(values))
        np.right_shift(words, 16, out=scratch)
        np.bitwise_and(scratch, 1, out=scratch)
        np.add(words, 0x7FFF, out=words)
        np.add(words, scratch, out=words)
        if len(lost):
            words[lost] = 0x7FC00000
        return words

    def _align(self, raw: Bytes) -> Bytes:
        """Arithmetic on unaligned values is several times slower than copying them first."""
        if raw.__array_interface__["data"][0] % 8 == 0 and raw.flags.c_contiguous:
            return raw
        copy = self._aligned[: len(raw)]
        np.copyto(copy, raw)
        return copy


class PieceWindows(PieceMean):
    """Many windows over the same checkpoints: every piece is decoded once, whatever their number.

    >>> windows = PieceWindows(2, 3)
    >>> raws = [np.array([x], np.float32).view(np.uint8) for x in (1.0, 2.0, 6.0)]
    >>> from torch_lawa.core.coefficients import Uniform
    >>> wanted = [(range(1, 3), Uniform().weights(2)), (range(0, 3), Uniform().weights(3))]
    >>> [float(m.view(np.float32)[0]) for m in windows.means(raws, wanted, "F32", "F32")]
    [4.0, 3.0]
    """

    def __init__(self, length: int, num_checkpoints: int) -> None:
        super().__init__(length)
        self._rows: Doubles = np.empty((num_checkpoints, self.length))

    def means(
        self,
        pieces: Iterable[Bytes],
        windows: Sequence[tuple[range, Weights]],
        source: str,
        target: str,
    ) -> Iterator[Bytes]:
        """The mean of each window (positions of its checkpoints, oldest first); scratch."""
        source, target = _real(source), _real(target)
        rows, count = [], 0
        for raw, row in zip(pieces, self._rows, strict=False):
            count = len(raw) // DTYPES[source].itemsize
            with np.errstate(all="ignore"):
                rows.append(self.decode(raw, source, row))
        for positions, weights in windows:
            with np.errstate(all="ignore"):
                mean = self._window([rows[at] for at in positions], weights)
                self.finite = bool(np.isfinite(mean.sum()))
                made = self.encode(mean, count, source, target)
            yield made

    def _window(self, rows: Sequence[Doubles], weights: Weights) -> Doubles:
        total: Doubles | None = None
        for row, weight in zip(rows, weights.numerators, strict=True):
            if weight == 0.0:
                continue
            if weight != 1.0:
                into = self._total if total is None else self._term
                row = np.multiply(row, weight, out=into[: len(row)])
            total = row if total is None else np.add(total, row, out=self._total[: len(row)])
        assert total is not None
        mean = self._total[: len(total)]
        divide(total, weights.divisor, out=mean)
        return mean


def divide(total: Doubles, divisor: float, out: Doubles | None = None) -> None:
    """`total / divisor`, by multiplication where that has the same bits at half the cost."""
    out = total if out is None else out
    if divisor == 1.0:
        if out is not total:
            np.copyto(out, total)
    elif math.frexp(divisor)[0] == 0.5:  # a power of two
        np.multiply(total, 1.0 / divisor, out=out)
    else:
        np.divide(total, divisor, out=out)


def _real(code: str) -> str:
    """Complex numbers are averaged as pairs of real ones."""
    return "F32" if code == "C64" else code


# float8: (exponent bits, mantissa bits, bias, code of the largest finite value)
_FLOAT8 = {"F8_E4M3": (4, 3, 7, 0x7E), "F8_E5M2": (5, 2, 15, 0x7B)}


@functools.cache
def _float8_values(code: str) -> Doubles:
    """The float64 value of each of the 256 codes."""
    _, mantissa, bias, largest = _FLOAT8[code]
    codes = np.arange(128)
    exponent, fraction = codes >> mantissa, (codes & ((1 << mantissa) - 1)) / (1 << mantissa)
    positive = np.where(
        exponent == 0,
        np.ldexp(fraction, 1 - bias),
        np.ldexp(1 + fraction, exponent - bias),
    )
    positive[largest + 1 :] = np.nan
    if code == "F8_E5M2":
        positive[largest + 1] = np.inf
    return np.concatenate([positive, -positive])


_KEY_BITS = 18  # sign, 11 of exponent, 6 of mantissa: two more than any float8 needs


def _float8_keys(values: Doubles) -> NDArray[np.int64]:
    """The upper bits of a float64, the last one set if any below it was: rounded *to odd*."""
    bits = values.view(np.int64)
    below = (1 << (64 - _KEY_BITS)) - 1
    keys = (bits >> (64 - _KEY_BITS)) & ((1 << _KEY_BITS) - 1)
    keys |= (bits & below) != 0
    return keys


@functools.cache
def _float8_codes(code: str) -> Bytes:
    """The nearest float8 of every key; too large is Inf, or the largest in E4M3, which has none."""
    keys = np.arange(1 << (_KEY_BITS - 1), dtype=np.int64)
    sizes = (keys << (64 - _KEY_BITS)).view(np.float64)
    largest = _FLOAT8[code][3]
    finite = _float8_values(code)[: largest + 1]
    step = finite[-1] - finite[-2]
    between = (np.append(finite[1:], finite[-1] + step) + finite) / 2
    down = np.searchsorted(between, sizes, side="left")
    tied = np.searchsorted(between, sizes, side="right") != down
    codes = down + (tied & (down % 2 == 1))
    if code == "F8_E4M3":
        codes = np.minimum(codes, largest)
    codes[np.isnan(sizes)] = 0x7F
    codes = codes.astype(np.uint8)
    return np.concatenate([codes, codes | 0x80])
