"""float8 by table lookup: NumPy has no float8, and it has only 256 values."""

import functools

import numpy as np

from torch_lawa.mean.kernels import Bytes, Doubles

__all__ = ["FLOAT8", "float8_codes", "float8_keys", "float8_values"]

# float8: (exponent bits, mantissa bits, bias, code of the largest finite value)
FLOAT8 = {"F8_E4M3": (4, 3, 7, 0x7E), "F8_E5M2": (5, 2, 15, 0x7B)}


@functools.cache
def float8_values(code: str) -> Doubles:
    """The float64 value of each of the 256 codes."""
    _, mantissa, bias, largest = FLOAT8[code]
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


def float8_keys(values: Doubles) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    """The upper bits of a float64, the last one set if any below it was: rounded *to odd*."""
    bits = values.view(np.int64)
    below = (1 << (64 - _KEY_BITS)) - 1
    keys = (bits >> (64 - _KEY_BITS)) & ((1 << _KEY_BITS) - 1)
    keys |= (bits & below) != 0
    return keys


@functools.cache
def float8_codes(code: str) -> Bytes:
    """The nearest float8 of every key. Overflow is Inf; in E4M3, which has none, the largest."""
    keys = np.arange(1 << (_KEY_BITS - 1), dtype=np.int64)
    sizes = (keys << (64 - _KEY_BITS)).view(np.float64)
    largest = FLOAT8[code][3]
    finite = float8_values(code)[: largest + 1]
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
