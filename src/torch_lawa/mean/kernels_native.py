"""The mean of pieces in C (`kernels.c`), if it was compiled when the package was built."""

import ctypes
import functools
import os
import sys
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from torch_lawa.coefficients import Weights
from torch_lawa.mean.dtypes import DTYPES
from torch_lawa.mean.float8 import FLOAT8, float8_codes, float8_keys, float8_values
from torch_lawa.mean.kernels import PIECE, Bytes, Doubles, Pieces, Windows, exact_factor, real

__all__ = ["CompiledPieces", "native_library"]

_FOLDER = Path(__file__).parent
_KINDS = {"F64": 0, "F32": 1, "F16": 2, "BF16": 3}  # as in kernels.c; float8 uses a table
_TABLE = 4
_NOT_FINITE, _BLOCK = 4, 512


def library_name() -> str:
    """The file name of the compiled library, with a checksum of its source: never outdated.

    The build hook, which must not import the package, computes the same name.
    """
    source = (_FOLDER / "kernels.c").read_bytes()
    return f"_kernels_{zlib.crc32(source):08x}{'.dll' if sys.platform == 'win32' else '.so'}"


@functools.cache
def native_library() -> Any:
    """The compiled library; None if it was not built."""
    if sys.byteorder != "little":
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
    library.lawa_windows.argtypes = [
        *(address, size, size, number, size, address, size),
        *[address] * 7,
        *(number, size, address, address, address),
    ]
    library.lawa_windows.restype = None
    library.lawa_map.argtypes = [number, size, ctypes.POINTER(address)]
    library.lawa_unmap.restype = None
    return library


class CompiledPieces(Pieces):
    """One loop per dtype; several times faster than NumPy for narrow dtypes."""

    @staticmethod
    def available() -> bool:
        """Whether the compiled library can be loaded, and LAWA_KERNELS=numpy is not set."""
        return os.environ.get("LAWA_KERNELS", "") != "numpy" and native_library() is not None

    def __init__(self, length: int = PIECE) -> None:
        super().__init__(length)
        self._library = native_library()
        self._sum: Doubles = np.empty(self.length)
        self._out = np.empty(self.length * 8, np.uint8)
        self._count = 0
        self._rows: Doubles = np.empty(0)  # sums of a block, one row per checkpoint
        self._many = np.empty(0, np.uint8)  # results of all windows
        self._prepared: _PreparedWindows | None = None  # those of the last call

    def mean(self, pieces: Iterable[Bytes], weights: Weights, source: str, target: str) -> Bytes:
        """The mean of a piece; of a list of pieces, in blocks that stay in the L1 cache."""
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

        A uniform window is the difference of two prefix sums if every addition was exact, which the
        processor's inexact flag shows: then the order of summation does not matter, and the result
        equals the definition. Otherwise the window is summed directly.
        """
        code, final = real(source), real(target)
        width, target_width = DTYPES[code].itemsize, DTYPES[final].itemsize
        raws = list(pieces)
        places = [_at(raw) for raw in raws]
        if any(place % width for place in places):
            raws = [raw.copy() for raw in raws]
            places = [_at(raw) for raw in raws]
        count, num = len(raws[0]) // width, len(windows)
        # float8 values are looked up at the end, from the float64 mean.
        kind = _KINDS.get(final, _KINDS["F64"])
        wide = target_width if final in _KINDS else 8
        outs = self._room(num * count * wide).reshape(num, count * wide)
        at_outs = [_at(outs) + i * count * wide for i in range(num)]
        flags = np.zeros(num, np.int32)
        if self._prepared is None or self._prepared.windows is not windows:
            self._prepared = _PreparedWindows(windows, len(raws))
        if len(self._rows) < len(raws) * _BLOCK + 8:
            self._rows = np.empty(len(raws) * _BLOCK + 8)
        self._library.lawa_windows(
            (ctypes.c_void_p * len(raws))(*places),
            *(len(raws), count, _kind(code)[0], width, _kind(code)[1], num),
            *self._prepared.addresses,
            *(kind, wide, (ctypes.c_void_p * num)(*at_outs), _at(self._rows), _at(flags)),
        )
        for out, flag in zip(outs, flags, strict=True):
            self.finite = not flag & _NOT_FINITE
            if final in _KINDS:
                yield out
            else:
                yield float8_codes(final)[float8_keys(out.view(np.float64))]

    def _room(self, num_bytes: int) -> Bytes:
        if len(self._many) < num_bytes:
            self._many = np.empty(num_bytes, np.uint8)
        return self._many[:num_bytes]


class _PreparedWindows:
    """The arrays that describe windows to `lawa_windows`: the same for every piece of a sweep."""

    def __init__(self, windows: Windows, num: int) -> None:
        self.windows = windows
        places, weights = _weights_of(windows)
        self._arrays = (
            np.array([at[0] for at, _ in windows], np.int64),
            np.array([at[-1] for at, _ in windows], np.int64),
            places,
            weights,
            np.array([w.divisor for _, w in windows]),
            np.array([exact_factor(w.divisor) for _, w in windows]),
            _slots_of(windows, num),
        )
        self.addresses = [_at(array) for array in self._arrays]


def _slots_of(windows: Windows, num: int) -> "np.ndarray[Any, Any]":
    """The row of each checkpoint whose prefix sum is needed; -1 for the others."""
    uniform = [at for at, each in windows if each.uniform]
    wanted = {at[-1] for at in uniform} | {at[0] - 1 for at in uniform if at[0]}
    slots = np.full(num, -1, np.int64)
    slots[sorted(wanted)] = np.arange(len(wanted))
    return slots


def _weights_of(windows: Windows) -> tuple["np.ndarray[Any, Any]", Doubles]:
    """All weights in one array, and where those of each window begin; -1 if all are 1."""
    places, weights = [], [0.0]
    for _, each in windows:
        places.append(-1 if each.uniform else len(weights))
        weights += () if each.uniform else each.numerators
    return np.array(places, np.int64), np.array(weights)


def _at(array: np.ndarray[Any, Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _kind(code: str) -> tuple[int, int | None]:
    """The number of a dtype's loop, and the address of its lookup table."""
    if code in FLOAT8:
        return _TABLE, _at(float8_values(code))
    return _KINDS[code], None
