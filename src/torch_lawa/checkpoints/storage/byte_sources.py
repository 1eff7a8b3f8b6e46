"""Ranges of bytes of open files: memory-mapped if local, otherwise fetched.

A file may be truncated while it is read. A plain mapping of it would end the process with SIGBUS,
so local files are mapped by the compiled library, which guards its mappings, or read with `pread`
where that library was not built.
"""

import contextlib
import ctypes
import errno
import io
import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from torch_lawa.checkpoints.storage.remote_errors import translated_errors
from torch_lawa.errors import FormatError
from torch_lawa.mean.kernels_native import native_library
from torch_lawa.system_errors import named_errors

if TYPE_CHECKING:
    from torch_lawa.mean.kernels import Bytes

__all__ = [
    "ByteSource",
    "GuardedSource",
    "ReadSource",
    "RemoteSource",
    "SourceFile",
    "find_damaged",
    "open_file",
    "open_guarded",
]

_mapped: dict[int, Path] = {}  # the files that are mapped, by their slots in the compiled library


class ByteSource(ABC):
    """An open file: its size, and any range of its bytes."""

    size: int

    @abstractmethod
    def view(self, begin: int, end: int) -> "Bytes":
        """Bytes `begin` to `end`, which the caller has checked against `size`."""

    @abstractmethod
    def close(self) -> None:
        """Close the file; existing views stay valid."""


def open_file(path: Path) -> ByteSource:
    """Open a local file in the fastest way that survives its truncation."""
    return open_guarded(path) or ReadSource(path)


def open_guarded(path: Path) -> "GuardedSource | None":
    """Map a local file; None where the compiled library was not built, or it cannot be mapped."""
    library = native_library()
    if library is not None:
        with contextlib.suppress(_NotMappable):
            return GuardedSource(path, library)
    return None


def find_damaged(paths: Iterable[Path]) -> list[Path]:
    """Those of these files that were truncated since they were opened, and read beyond their end.

    Only files that are still open are found.
    """
    wanted, library = set(paths), native_library()
    open_now = [(slot, path) for slot, path in list(_mapped.items()) if path in wanted]
    return [path for slot, path in open_now if library.lawa_damaged(slot)]


class _NotMappable(Exception):
    """The file system cannot map files, or too many are mapped."""


class GuardedSource(ByteSource):
    """A local file in a guarded memory map: pages that the file loses are read as zeros.

    Readers check for it at the end, with `find_damaged`: no other check is free of a race.
    """

    def __init__(self, path: Path, library: Any) -> None:
        with path.open("rb") as file:
            self.size = os.fstat(file.fileno()).st_size
            self._bytes: Bytes = np.empty(0, dtype=np.uint8)
            self.buffer: Any = self._bytes  # for PyTorch; writing to it ends the process
            self._damaged: Callable[[], bool] = bool
            if not self.size:
                return
            address = ctypes.c_void_p()
            slot = library.lawa_map(file.fileno(), self.size, ctypes.byref(address))
            if slot < 0 or address.value is None:
                raise _NotMappable
        memory = (ctypes.c_uint8 * self.size).from_address(address.value)
        _mapped[slot] = path
        self.buffer, self._damaged = memory, lambda: bool(library.lawa_damaged(slot))
        # Not on exit: a daemon thread may still be reading.
        weakref.finalize(memory, _unmap, library, slot).atexit = False
        self._bytes = np.frombuffer(memoryview(memory), dtype=np.uint8)
        self._bytes.flags.writeable = False

    def view(self, begin: int, end: int) -> "Bytes":
        return self._bytes[begin:end]

    @property
    def damaged(self) -> bool:
        """Whether pages were read that the file had lost; False once it is closed."""
        return self._damaged()

    def close(self) -> None:
        # The mapping is released with its last view.
        self.buffer = self._bytes = np.empty(0, dtype=np.uint8)
        self._damaged = bool


def _unmap(library: Any, slot: int) -> None:
    del _mapped[slot]  # before the slot is free again
    library.lawa_unmap(slot)


class ReadSource(ByteSource):
    """A local file, read with `pread`: slower than a mapping, but always available."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        self._lock = threading.Lock()
        self._close = weakref.finalize(self, os.close, self._file)
        self.size = os.fstat(self._file).st_size

    def view(self, begin: int, end: int) -> "Bytes":
        try:
            found = np.empty(end - begin, dtype=np.uint8)
        except MemoryError:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM), str(self._path)) from None
        done = 0
        while done < end - begin:
            with named_errors(self._path):
                count = self._read_into(found.data[done:], begin + done)
            if not count:
                raise FormatError(
                    f"{self._path}: was truncated while it was read. Try again when it is complete."
                )
            done += count
        return found

    def _read_into(self, room: memoryview, at: int) -> int:
        if hasattr(os, "preadv"):
            return os.preadv(self._file, [room], at)
        with self._lock:  # Windows has no such call
            os.lseek(self._file, at, os.SEEK_SET)
            got = os.read(self._file, len(room))
        room[: len(got)] = got
        return len(got)

    def close(self) -> None:
        self._close()


class RemoteSource(ByteSource):
    """A remote file; `url` is its name in messages."""

    def __init__(self, fs: Any, path: str, url: str, size: int) -> None:
        self._fs, self._path, self._url = fs, path, url
        self.size = size

    def view(self, begin: int, end: int) -> "Bytes":
        if begin == end:
            return np.empty(0, dtype=np.uint8)
        try:
            with translated_errors(self._url):
                found = self._fs.cat_file(self._path, start=begin, end=end)
        except FileNotFoundError:
            raise FormatError(f"{self._url}: was removed while it was read.") from None
        if len(found) != end - begin:
            raise FormatError(
                f"{self._url}: requested {end - begin} bytes at {begin} and got {len(found)}: the "
                "file changed while it was read."
            )
        return np.frombuffer(found, dtype=np.uint8)

    def close(self) -> None:
        pass  # nothing is open between requests


class SourceFile(io.RawIOBase):
    """A source as a seekable file object, for `zipfile`."""

    def __init__(self, source: ByteSource) -> None:
        self._source, self._at = source, 0

    def readable(self) -> bool:
        """Always true."""
        return True

    def seekable(self) -> bool:
        """Always true."""
        return True

    def tell(self) -> int:
        """The current position."""
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        """Move to `offset` from the start, from here, or from the end."""
        base = (0, self._at, self._source.size)[whence]
        if base + offset < 0:
            raise ValueError("seek before the start of the file")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Read into `buffer`, up to the end."""
        n = max(0, min(len(buffer), self._source.size - self._at))
        memoryview(buffer).cast("B")[:n] = self._source.view(self._at, self._at + n).data
        self._at += n
        return n
