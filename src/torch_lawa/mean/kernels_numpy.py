"""The mean of pieces in NumPy.

NumPy has no bfloat16 and no float8. A bfloat16 is the upper half of a float32, so a 32-bit word
holds two: a shift gives the float32 of the even one, a mask that of the odd one. Sums are kept in
that order, evens first ("planes"), until they are written. float8 values are looked up in a table.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torch_lawa.coefficients import Weights
from torch_lawa.errors import ConfigError
from torch_lawa.mean.dtypes import DTYPES
from torch_lawa.mean.float8 import float8_codes, float8_keys, float8_values
from torch_lawa.mean.kernels import PIECE, Bytes, Doubles, Pieces, Windows, exact_factor, real

__all__ = ["NumpyPieces"]

_SIMPLE: dict[str, Any] = {"F64": np.float64, "F32": np.float32, "F16": np.float16}


class NumpyPieces(Pieces):
    """Always available; the reference for `CompiledPieces`."""

    def __init__(self, length: int = PIECE) -> None:
        super().__init__(length)
        _refuse_flushing()
        self._sum: Doubles = np.empty(self.length)
        self._term: Doubles = np.empty(self.length)
        self._words = np.empty(self.length, np.uint32)
        self._out = np.empty(self.length * 8, np.uint8)
        self._total = self._sum  # the part of it that is in use
        self._count, self._source = 0, ""
        self._rows: list[Doubles] = []

    def _add(self, raw: Bytes, code: str, weight: float, first: bool) -> None:
        with np.errstate(all="ignore"):  # NaN and Inf are ordinary values here
            term = self._decode(raw, code, self._sum if first else self._term)
            if weight != 1.0:
                np.multiply(term, weight, out=term)
            if first:
                self._total, self._source = term, code
                self._count = len(raw) // DTYPES[code].itemsize
            else:
                np.add(self._total, term, out=self._total)

    def _finish(self, divisor: float, target: str) -> Bytes:
        with np.errstate(all="ignore"):
            factor = exact_factor(divisor)
            if factor == 0.0:
                np.divide(self._total, divisor, out=self._total)
            elif factor != 1.0:
                np.multiply(self._total, factor, out=self._total)
            # The sum is quick, and finite if all values are, unless it overflows.
            self.finite = bool(np.isfinite(self._total.sum()) or np.isfinite(self._total).all())
            return self._encode(self._total, target)

    def means(
        self, pieces: Iterable[Bytes], windows: Windows, source: str, target: str
    ) -> Iterator[Bytes]:
        """The mean of each window; every piece is decoded once."""
        code, used = real(source), []
        for i, raw in enumerate(pieces):
            if i == len(self._rows):
                self._rows.append(np.empty(self.length))
            with np.errstate(all="ignore"):
                used.append(self._decode(self._align(raw, code), code, self._rows[i]))
            self._count, self._source = len(raw) // DTYPES[code].itemsize, code
        for positions, weights in windows:
            with np.errstate(all="ignore"):
                self._add_up([used[at] for at in positions], weights)
            yield self._finish(weights.divisor, real(target))

    def _add_up(self, rows: Sequence[Doubles], weights: Weights) -> None:
        self._total, first = self._sum[: len(rows[0])], True
        for row, weight in zip(rows, weights.numerators, strict=True):
            if weight == 0.0:
                continue
            if weight != 1.0:
                row = np.multiply(row, weight, out=self._term[: len(row)])
            if first:
                np.copyto(self._total, row)
            else:
                np.add(self._total, row, out=self._total)
            first = False

    def _decode(self, raw: Bytes, code: str, out: Doubles) -> Doubles:
        """Values as float64 into `out`, bfloat16 in planes."""
        if code in _SIMPLE:
            values = raw.view(_SIMPLE[code])
            out = out[: len(values)]
            np.copyto(out, values)
        elif code == "BF16":
            pairs = (len(raw) + 2) // 4
            if len(raw) % 4:  # an odd number of values: pad with zero
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
            np.take(float8_values(code), raw, out=out)
        return out

    def _encode(self, values: Doubles, target: str) -> Bytes:
        """The values, in the order of `_decode`, as bytes of `target`."""
        count, planes = self._count, self._source == "BF16"
        if target == "BF16":
            return self._to_bfloat16(values, planes=planes)
        if planes:
            pairs = len(values) // 2
            self._term[: 2 * pairs : 2] = values[:pairs]
            self._term[1 : 2 * pairs : 2] = values[pairs:]
            values = self._term
        values = values[:count]
        out = self._out[: count * DTYPES[target].itemsize]
        if target in _SIMPLE:
            np.copyto(out.view(_SIMPLE[target]), values, casting="same_kind")
        else:
            np.take(float8_codes(target), float8_keys(values), out=out)
        return out

    def _to_bfloat16(self, values: Doubles, *, planes: bool) -> Bytes:
        if planes:
            pairs = len(values) // 2
            low = self._round_words(values[:pairs], 0)
            high = self._round_words(values[pairs:], pairs)
            np.right_shift(low, 16, out=low)
            np.bitwise_and(high, 0xFFFF0000, out=high)
            np.bitwise_or(low, high, out=low)
            return low.view(np.uint8)[: self._count * 2]
        words = self._round_words(values[: self._count], 0)
        out = self._out[: self._count * 2]
        np.right_shift(words, 16, out=words)
        np.copyto(out.view(np.uint16), words, casting="unsafe")
        return out

    def _round_words(self, values: Doubles, start: int) -> NDArray[np.uint32]:
        """float32 words whose upper halves are the nearest bfloat16 values.

        Rounding to float32 first causes double rounding only if the result is exactly between two
        bfloat16 values; those few are moved back to the side they came from.
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


def _refuse_flushing() -> None:
    """Raise if this thread flushes subnormal numbers to zero. The C kernels turn that off."""
    smallest = np.array([2.0**-149]).astype(np.float32)
    if smallest.astype(np.float64)[0] == 0.0:
        raise ConfigError(
            "this process flushes subnormal numbers to zero (torch.set_flush_denormal, or a "
            "library built with -ffast-math), and NumPy would lose every value below 1.2e-38. Call "
            "torch.set_flush_denormal(False), or install torch-lawa where there is a C compiler."
        )
