"""The mean of pieces in C (`kernels.c`), where it was built when the package was installed."""

import ctypes
import functools
import os
import sys
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from torch_lawa.core.coefficients import Weights
from torch_lawa.core.dtypes import DTYPES
from torch_lawa.core.float8 import FLOAT8, float8_codes, float8_keys, float8_values
from torch_lawa.core.pieces import PIECE, Bytes, Doubles, Pieces, Windows, exact_factor, real

__all__ = ["CompiledPieces", "library_name"]

_FOLDER = Path(__file__).parent
_KINDS = {"F64": 0, "F32": 1, "F16": 2, "BF16": 3}  # as in kernels.c; float8 goes by a table
_TABLE = 4
_NOT_FINITE = 4


def library_name() -> str:
    """The file that holds the loops, by their source: an outdated one is never loaded.

    The build hook, which must not import the package, computes the same.
    """
    source = (_FOLDER / "kernels.c").read_bytes()
    return f"_kernels_{zlib.crc32(source):08x}{'.dll' if sys.platform == 'win32' else '.so'}"


@functools.cache
def _library() -> Any:
    """The loops, or None where they were not built or are not wanted (LAWA_KERNELS=numpy)."""
    if os.environ.get("LAWA_KERNELS", "") == "numpy" or sys.byteorder != "little":
        return None
    try:
        library = ctypes.CDLL(str(_FOLDER / library_name()))
    except OSError:
        return None
    address, size, number, real_number = (
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_double,
    )
    library.lawa_add.argtypes = [address, address, size, number, address, real_number, number]
    library.lawa_add.restype = None
    library.lawa_finish.argtypes = [address, size, real_number, real_number, number, address]
    library.lawa_mean.argtypes = [
        *(address, address, size, size, number, size, address),
        *(real_number, real_number, number, size, address),
    ]
    library.lawa_prefix.argtypes = [address, address, address, size, number, address, address]
    library.lawa_window.argtypes = [address, address, address, size]
    return library


class CompiledPieces(Pieces):
    """A loop for every dtype, several times faster than NumPy for the narrow ones."""

    @staticmethod
    def available() -> bool:
        """Whether the loops are here."""
        return _library() is not None

    def __init__(self, length: int = PIECE) -> None:
        super().__init__(length)
        self._library = _library()
        self._sum: Doubles = np.empty(self.length)
        self._scratch: Doubles = np.empty(0)
        self._out = np.empty(self.length * 8, np.uint8)
        self._count = 0
        self._prefixes: Doubles = np.empty((0, self.length))

    def decode(self, raw: Bytes, code: str, out: Doubles) -> Doubles:
        """Values as float64 into `out`, in their order."""
        raw, out = self._align(raw, code), out[: len(raw) // DTYPES[code].itemsize]
        self._library.lawa_add(_at(out), _at(raw), len(out), *_kind(code), 1.0, 1)
        return out

    def mean(self, pieces: Iterable[Bytes], weights: Weights, source: str, target: str) -> Bytes:
        """The mean of a piece; where all are at hand, in blocks that stay in the first cache."""
        code, kind = real(source), _KINDS.get(real(target))
        if not isinstance(pieces, list) or kind is None:
            return super().mean(pieces, weights, source, target)
        places = [_at(raw) for raw in pieces]
        width, target_width = DTYPES[code].itemsize, DTYPES[real(target)].itemsize
        if any(place % width for place in places):
            return super().mean(pieces, weights, source, target)
        k, count = len(pieces), len(pieces[0]) // width
        flags = self._library.lawa_mean(
            (ctypes.c_void_p * k)(*places),
            (ctypes.c_double * k)(*weights.numerators),
            *(k, count, _kind(code)[0], width, _kind(code)[1]),
            *(weights.divisor, exact_factor(weights.divisor), kind, target_width, _at(self._out)),
        )
        self.finite = not flags & _NOT_FINITE
        return self._out[: count * target_width]

    def _add(self, raw: Bytes, code: str, weight: float, first: bool) -> None:
        self._count = len(raw) // DTYPES[code].itemsize
        sums, raws = _at(self._sum), _at(raw)
        self._library.lawa_add(sums, raws, self._count, *_kind(code), weight, first)

    def _finish(self, divisor: float, target: str) -> Bytes:
        kind = _KINDS.get(target, _TABLE)
        flags = self._library.lawa_finish(
            _at(self._sum), self._count, divisor, exact_factor(divisor), kind, _at(self._out)
        )
        self.finite = not flags & _NOT_FINITE
        out = self._out[: self._count * DTYPES[target].itemsize]
        if kind == _TABLE:
            np.take(float8_codes(target), float8_keys(self._sum[: self._count]), out=out)
        return out

    def means(
        self, pieces: Iterable[Bytes], windows: Windows, source: str, target: str
    ) -> Iterator[Bytes]:
        """The mean of each window.

        Uniform ones are the difference of two sums from the start, as long as every addition was
        exact: the processor notes when one was not. Then order and route do not matter, and the
        result is the one of the definition. Otherwise the window is added up by itself.
        """
        code, raws = real(source), list(pieces)
        prefixes = self._prefix_sums(raws, code)
        for positions, weights in windows:
            start = prefixes[positions[0] - 1] if positions[0] else None
            exact = weights.uniform and prefixes[positions[-1]] is not None
            if not (exact and self._subtract(prefixes[positions[-1]], start, positions[0] == 0)):
                self._add_up([raws[at] for at in positions], weights, code)
            yield self._finish(weights.divisor, real(target))

    def _prefix_sums(self, raws: list[Bytes], code: str) -> list[int | None]:
        """Addresses of the sums of the first 1, 2, ... pieces; None from the first inexact on."""
        if len(self._prefixes) < len(raws):
            self._prefixes = np.empty((len(raws), self.length))
            self._scratch = np.empty(self.length)
        count, before, found = len(raws[0]) // DTYPES[code].itemsize, None, []
        self._count, clean = count, True
        for i, raw in enumerate(raws):
            here = _at(self._prefixes[i])
            clean = clean and not self._library.lawa_prefix(
                here, before, _at(self._align(raw, code)), count, *_kind(code), _at(self._scratch)
            )
            before = here
            found.append(here if clean else None)
        return found

    def _subtract(self, end: int | None, start: int | None, from_first: bool) -> bool:
        if end is None or (start is None and not from_first):
            return False
        return not self._library.lawa_window(_at(self._sum), end, start, self._count)

    def _add_up(self, raws: list[Bytes], weights: Weights, code: str) -> None:
        used = [(r, w) for r, w in zip(raws, weights.numerators, strict=True) if w != 0.0]
        for i, (raw, weight) in enumerate(used):
            self._add(self._align(raw, code), code, weight, i == 0)


def _at(array: np.ndarray[Any, Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _kind(code: str) -> tuple[int, int | None]:
    """The number of a dtype's loop, and the table that it looks values up in."""
    if code in FLOAT8:
        return _TABLE, _at(float8_values(code))
    return _KINDS[code], None
