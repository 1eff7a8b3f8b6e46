"""The difference of two pieces of raw bytes: float64 sums for floats, exact for integers.

The sums are over values that are finite on both sides; NaN and Inf are counted instead.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from torch_lawa.mean.dtypes import DTYPES
from torch_lawa.mean.float8 import float8_values
from torch_lawa.mean.kernels import PIECE, Bytes, Doubles

__all__ = ["PieceDifference", "Sums", "comparable"]

_FLOATS: dict[str, Any] = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "C64": np.float32,
}  # fmt: skip
_INTEGERS: dict[str, Any] = {
    "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8,
    "U64": np.uint64, "U32": np.uint32, "U16": np.uint16, "U8": np.uint8, "BOOL": np.uint8,
}  # fmt: skip


@dataclass(frozen=True)
class Sums:
    """Sums over values `a` and `b` and their difference; the sums of parts can be added.

    Values of one dtype differ where their bits do, those of two dtypes where their values do.
    """

    num_differing: int = 0
    largest: float = 0.0  # of |a - b|; an exact int for integers
    aa: float = 0.0  # the sum of a * a, and so on
    bb: float = 0.0
    ab: float = 0.0
    dd: float = 0.0  # the sum of (a - b) squared
    nan: tuple[int, int] = (0, 0)  # in a, in b
    inf: tuple[int, int] = (0, 0)

    @staticmethod
    def total(parts: Sequence["Sums"]) -> "Sums":
        """The sums over all parts; added exactly, so that their order does not matter.

        >>> Sums.total([Sums(1, 2.0, dd=4.0), Sums(2, 1.0, dd=1.0)]).dd
        5.0
        """
        return Sums(
            num_differing=sum(p.num_differing for p in parts),
            largest=max((p.largest for p in parts), default=0.0),
            aa=_sum([p.aa for p in parts]),
            bb=_sum([p.bb for p in parts]),
            ab=_sum([p.ab for p in parts]),
            dd=_sum([p.dd for p in parts]),
            nan=(sum(p.nan[0] for p in parts), sum(p.nan[1] for p in parts)),
            inf=(sum(p.inf[0] for p in parts), sum(p.inf[1] for p in parts)),
        )

    @property
    def relative(self) -> float | None:
        """The L2 norm of the difference over that of `a`; None if `a` is zero and `b` is not."""
        if self.dd == 0.0:
            return 0.0
        found = math.sqrt(self.dd) / math.sqrt(self.aa) if self.aa else math.inf
        return found if math.isfinite(found) else None

    @property
    def cosine(self) -> float | None:
        """The cosine similarity; None if one is zero."""
        size = math.sqrt(self.aa) * math.sqrt(self.bb)
        if not size or not math.isfinite(size):
            return None
        return 1.0 if self.dd == 0.0 else max(-1.0, min(1.0, self.ab / size))


def comparable(a: str, b: str) -> bool:
    """Whether values of these two dtypes can be compared.

    >>> comparable("BF16", "F32"), comparable("I64", "F32")
    (True, False)
    """
    kinds = {DTYPES[a].kind, DTYPES[b].kind}
    return a == b or kinds == {"float"} or (kinds == {"exact"} and "U64" not in (a, b))


class PieceDifference:
    """Compares pieces of up to `length` values; allocates its scratch memory once.

    >>> a, b = (np.array(x, np.float32).view(np.uint8) for x in ([3.0, 4.0], [3.0, 4.5]))
    >>> found = PieceDifference(2).compare(a, "F32", b, "F32")
    >>> found.num_differing, found.largest, found.relative
    (1, 0.5, 0.1)
    """

    def __init__(self, length: int = PIECE) -> None:
        self._a: Doubles = np.empty(length)
        self._b: Doubles = np.empty(length)
        self._scratch: Doubles = np.empty(length)
        self._words = np.empty(length, np.uint32)

    def compare(self, a: Bytes, code_a: str, b: Bytes, code_b: str) -> Sums:
        """The sums over the same piece of two checkpoints, whose dtypes must be `comparable`."""
        kind = DTYPES[code_a].kind
        if kind == "exact":
            return _compare_integers(a.view(_INTEGERS[code_a]), b.view(_INTEGERS[code_b]))
        num_differing = -1
        if code_a == code_b:
            words = f"u{DTYPES[code_a].itemsize}"  # unsigned integers of that size
            num_differing = int(np.count_nonzero(a.view(words) != b.view(words)))
        if kind == "opaque":
            return Sums(num_differing)
        with np.errstate(all="ignore"):  # NaN and Inf are expected here
            x, y = self._decode(a, code_a, self._a), self._decode(b, code_b, self._b)
            if code_a != code_b:
                num_differing = int(np.count_nonzero((x != y) & ~(np.isnan(x) & np.isnan(y))))
            return self._sum(x, y, num_differing, 2 if kind == "complex" else 1)

    def _decode(self, raw: Bytes, code: str, out: Doubles) -> Doubles:
        """The values as float64, so that two dtypes can be compared."""
        if code in _FLOATS:
            values = raw.view(_FLOATS[code])
        elif code == "BF16":  # the upper half of a float32
            words = self._words[: len(raw) // 2]
            np.copyto(words, raw.view(np.uint16))
            np.left_shift(words, 16, out=words)
            values = words.view(np.float32)
        else:
            values = np.take(float8_values(code), raw)
        np.copyto(out[: len(values)], values)
        return out[: len(values)]

    def _sum(self, x: Doubles, y: Doubles, num_differing: int, parts: int) -> Sums:
        """`parts` real numbers make a value: a complex one is finite if both parts are."""
        nan, inf = (0, 0), (0, 0)
        aa, bb = self._dot(x, x), self._dot(y, y)
        if not math.isfinite(aa + bb):
            lost = ~(np.isfinite(x) & np.isfinite(y)).reshape(-1, parts).all(1)
            nans = [np.isnan(v).reshape(-1, parts).any(1) for v in (x, y)]
            infs = [
                np.isinf(v).reshape(-1, parts).any(1) & ~n
                for v, n in zip((x, y), nans, strict=True)
            ]
            nan = (int(nans[0].sum()), int(nans[1].sum()))
            inf = (int(infs[0].sum()), int(infs[1].sum()))
            x.reshape(-1, parts)[lost] = y.reshape(-1, parts)[lost] = 0.0
            aa, bb = self._dot(x, x), self._dot(y, y)
        ab = self._dot(x, y)
        np.subtract(x, y, out=x)
        squares = np.multiply(x, x, out=self._scratch[: len(x)])
        dd = float(squares.sum())
        if parts == 1:
            largest = float(np.abs(x, out=x).max(initial=0.0))
        else:
            largest = math.sqrt(squares.reshape(-1, parts).sum(1).max(initial=0.0))
        return Sums(num_differing, largest, aa, bb, ab, dd, nan, inf)

    def _dot(self, x: Doubles, y: Doubles) -> float:
        return float(np.multiply(x, y, out=self._scratch[: len(x)]).sum())


def _compare_integers(x: Any, y: Any) -> Sums:
    """Exact, also for integers that float64 cannot represent."""
    wide = np.uint64 if x.dtype == np.uint64 else np.int64
    unequal = x != y
    a, b = x[unequal].astype(wide), y[unequal].astype(wide)
    # Unsigned subtraction wraps around to the right result.
    gaps = np.maximum(a, b).astype(np.uint64) - np.minimum(a, b).astype(np.uint64)
    fx, fy, fd = x.astype(np.float64), y.astype(np.float64), gaps.astype(np.float64)
    return Sums(
        num_differing=len(a),
        largest=int(gaps.max(initial=0)),
        aa=float((fx * fx).sum()),
        bb=float((fy * fy).sum()),
        ab=float((fx * fy).sum()),
        dd=float((fd * fd).sum()),
    )


def _sum(values: Sequence[float]) -> float:
    try:
        return math.fsum(values) if all(map(math.isfinite, values)) else math.inf
    except OverflowError:
        return math.inf
