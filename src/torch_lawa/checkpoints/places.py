"""Where bytes lie: a path here, or a URL through fsspec. Everything above asks a `Place`.

Local files are memory-mapped; of remote ones just the asked ranges are fetched, so a piece is one
request and the number of threads is the number of requests in flight.
"""

import glob
import io
import mmap
import os
from abc import ABC, abstractmethod
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import numpy as np

from torch_lawa.errors import ConfigError, FormatError

if TYPE_CHECKING:
    from torch_lawa.checkpoints.base import Bytes

__all__ = ["LocalPlace", "Place", "RemotePlace", "Source", "SourceFile", "is_url", "parse_place"]


class Source(ABC):
    """An open file: its size, and any range of its bytes."""

    size: int

    @abstractmethod
    def view(self, begin: int, end: int) -> "Bytes":
        """Bytes `begin` to `end`; the caller has checked them against `size`."""

    @abstractmethod
    def close(self) -> None:
        """Give back the file; views that were taken stay valid."""


class Place(ABC):
    """A file or folder that may exist."""

    local: bool

    @property
    @abstractmethod
    def name(self) -> str:
        """Its last part."""

    @abstractmethod
    def child(self, name: str) -> "Place":
        """A name inside this folder."""

    @property
    @abstractmethod
    def parent(self) -> "Place":
        """The folder it lies in."""

    @abstractmethod
    def is_file(self) -> bool:
        """Whether there is a file."""

    @abstractmethod
    def is_folder(self) -> bool:
        """Whether there is a folder."""

    @abstractmethod
    def children(self) -> "list[Place]":
        """What lies in this folder, by name; hidden files too."""

    @abstractmethod
    def glob(self) -> "list[Place]":
        """What matches, where the place is a pattern."""

    @abstractmethod
    def stamp(self) -> tuple[int, object]:
        """Size, and something that changes when the file does."""

    @abstractmethod
    def open(self) -> Source:
        """The bytes of the file."""

    def exists(self) -> bool:
        """Whether there is a file or a folder."""
        return self.is_file() or self.is_folder()

    @property
    def suffix(self) -> str:
        """`.safetensors`, `.pt`; empty where there is none."""
        return PurePosixPath(self.name).suffix.lower()

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self.stamp()[0]

    def read_bytes(self) -> bytes:
        """The whole (small) file."""
        source = self.open()
        try:
            return source.view(0, source.size).tobytes()
        finally:
            source.close()


class LocalPlace(Place):
    """A path."""

    local = True

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    def __str__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        return f"LocalPlace({str(self.path)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LocalPlace) and self.path == other.path

    def __hash__(self) -> int:
        return hash(self.path)

    @property
    def name(self) -> str:
        return self.path.name or self.path.resolve().name

    @property
    def parent(self) -> "LocalPlace":
        return LocalPlace(self.path.parent)

    def child(self, name: str) -> "LocalPlace":
        return LocalPlace(self.path / name)

    def is_file(self) -> bool:
        return self.path.is_file()

    def is_folder(self) -> bool:
        return self.path.is_dir()

    def children(self) -> "list[Place]":
        return [LocalPlace(p) for p in sorted(self.path.iterdir())]

    def glob(self) -> "list[Place]":
        return [LocalPlace(p) for p in sorted(glob.glob(os.path.expanduser(self.path)))]

    def stamp(self) -> tuple[int, object]:
        found = self.path.stat()
        return found.st_size, (found.st_mtime_ns, found.st_ino)

    def open(self) -> Source:
        return _MappedSource(self.path)


class RemotePlace(Place):
    """A URL that fsspec understands: `s3://`, `gs://`, `memory://` and the rest."""

    local = False

    def __init__(self, fs: Any, path: str, protocol: str) -> None:
        self.fs, self._path, self._protocol = fs, path.rstrip("/"), protocol

    def __str__(self) -> str:
        return f"{self._protocol}://{self._path.lstrip('/')}"

    def __repr__(self) -> str:
        return f"RemotePlace({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePlace) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    @property
    def path(self) -> str:
        """The path as the file system knows it."""
        return self._path

    @property
    def name(self) -> str:
        return self._path.rsplit("/", 1)[-1]

    @property
    def parent(self) -> "RemotePlace":
        return self._at(self._path.rsplit("/", 1)[0])

    def child(self, name: str) -> "RemotePlace":
        return self._at(f"{self._path}/{name}")

    def is_file(self) -> bool:
        return bool(self.fs.isfile(self._path))

    def is_folder(self) -> bool:
        return bool(self.fs.isdir(self._path))

    def children(self) -> "list[Place]":
        self.fs.invalidate_cache()  # a live run adds files
        found = {p.rstrip("/") for p in self.fs.ls(self._path, detail=False)}
        return [self._at(p) for p in sorted(found - {self._path})]

    def glob(self) -> "list[Place]":
        self.fs.invalidate_cache()
        return [self._at(p) for p in sorted(self.fs.glob(self._path))]

    def stamp(self) -> tuple[int, object]:
        found = self.fs.info(self._path)
        mark = next((found[k] for k in ("ETag", "etag", "mtime", "created") if k in found), None)
        return int(found["size"]), str(mark)

    def open(self) -> Source:
        return _RemoteSource(self.fs, self._path)

    def _at(self, path: str) -> "RemotePlace":
        return RemotePlace(self.fs, path, self._protocol)


def is_url(text: str) -> bool:
    """Whether it names a place through fsspec.

    >>> is_url("s3://bucket/run"), is_url("runs/a.pt")
    (True, False)
    """
    return "://" in text


def parse_place(text: str | os.PathLike[str]) -> Place:
    """The place that a path or URL names."""
    text = os.fspath(text)
    if not is_url(text) or text.startswith("file://"):
        return LocalPlace(os.path.expanduser(text.removeprefix("file://")))
    import fsspec

    protocol = text.split("://", 1)[0]
    try:
        fs, path = fsspec.core.url_to_fs(text)
    except ImportError as error:
        raise ConfigError(
            f"{text}: reading {protocol}:// needs a package that is not installed ({error}). "
            "For s3:// install torch-lawa[s3]."
        ) from None
    except ValueError as error:
        raise ConfigError(f"{text}: {error}. Give a path or a URL that fsspec knows.") from None
    return RemotePlace(fs, path, protocol)


class _MappedSource(Source):
    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self.size = os.fstat(file.fileno()).st_size
            self._bytes: Bytes = np.empty(0, dtype=np.uint8)
            if self.size:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                self._bytes = np.frombuffer(mapped, dtype=np.uint8)

    def view(self, begin: int, end: int) -> "Bytes":
        return self._bytes[begin:end]

    def close(self) -> None:
        # The mapping goes when the last view of it does.
        self._bytes = np.empty(0, dtype=np.uint8)


class _RemoteSource(Source):
    def __init__(self, fs: Any, path: str) -> None:
        self._fs, self._path = fs, path
        self.size = int(fs.info(path)["size"])

    def view(self, begin: int, end: int) -> "Bytes":
        if begin == end:
            return np.empty(0, dtype=np.uint8)
        found = self._fs.cat_file(self._path, start=begin, end=end)
        if len(found) != end - begin:
            raise FormatError(
                f"{self._path}: asked for {end - begin} bytes at {begin} and got {len(found)}: "
                "the file changed while it was read."
            )
        return np.frombuffer(found, dtype=np.uint8)

    def close(self) -> None:
        pass  # nothing is held between requests


class SourceFile(io.RawIOBase):
    """A range of a source as a file that can be read and sought, for `zipfile` and `pickle`."""

    def __init__(self, source: Source, begin: int = 0, end: int | None = None) -> None:
        self._source, self._begin = source, begin
        self._size = (source.size if end is None else end) - begin
        self._at = 0

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def tell(self) -> int:
        """Where the next read begins."""
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        """Move to `offset` from the start, from here, or from the end."""
        base = (0, self._at, self._size)[whence]
        if base + offset < 0:
            raise ValueError("seek before the start of the file")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer` as far as the file goes."""
        n = max(0, min(len(buffer), self._size - self._at))
        start = self._begin + self._at
        memoryview(buffer).cast("B")[:n] = self._source.view(start, start + n).data
        self._at += n
        return n
