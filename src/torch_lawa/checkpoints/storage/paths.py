"""Where bytes lie: a path here, or a URL through fsspec. Everything above asks a `Location`.

Local files are memory-mapped; of remote ones just the asked ranges are fetched, so a piece is one
request and the number of threads is the number of requests in flight.
"""

import errno
import glob
import os
from abc import ABC, abstractmethod
from pathlib import Path, PurePosixPath
from typing import Any

from torch_lawa.checkpoints.storage.byte_sources import (
    ByteSource,
    MappedSource,
    ReadSource,
    RemoteSource,
    SourceFile,
)
from torch_lawa.checkpoints.storage.remote_errors import package_for, translated_errors
from torch_lawa.errors import ConfigError, LawaError, OutputError

__all__ = [
    "ByteSource",
    "LocalPath",
    "Location",
    "RemoteURL",
    "SourceFile",
    "is_url",
    "parse_location",
]


class Location(ABC):
    """A file or folder that may exist."""

    local: bool

    @property
    @abstractmethod
    def name(self) -> str:
        """Its last part."""

    @abstractmethod
    def child(self, name: str) -> "Location":
        """A name inside this folder."""

    @property
    @abstractmethod
    def parent(self) -> "Location":
        """The folder it lies in."""

    @abstractmethod
    def is_file(self) -> bool:
        """Whether there is a file."""

    @abstractmethod
    def is_folder(self) -> bool:
        """Whether there is a folder."""

    @abstractmethod
    def children(self) -> "list[Location]":
        """What lies in this folder, by name; hidden files too."""

    @abstractmethod
    def glob(self) -> "list[Location]":
        """What matches, where the place is a pattern."""

    @abstractmethod
    def stamp(self) -> tuple[int, object]:
        """Size, and something that changes when the file does."""

    @abstractmethod
    def open(self) -> ByteSource:
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


class LocalPath(Location):
    """A path.

    Files are mapped, which is fastest, unless they are ones that somebody may cut off.
    """

    local = True

    def __init__(self, path: Path | str, *, mapped: bool = True) -> None:
        self.path, self.mapped = Path(path), mapped

    def __str__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        return f"LocalPath({str(self.path)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LocalPath) and self.path == other.path

    def __hash__(self) -> int:
        return hash(self.path)

    @property
    def name(self) -> str:
        return self.path.name or self.path.resolve().name

    @property
    def parent(self) -> "LocalPath":
        return LocalPath(self.path.parent, mapped=self.mapped)

    def child(self, name: str) -> "LocalPath":
        return LocalPath(self.path / name, mapped=self.mapped)

    def is_file(self) -> bool:
        return self.path.is_file()

    def is_folder(self) -> bool:
        return self.path.is_dir()

    def children(self) -> "list[Location]":
        return [self.child(p.name) for p in sorted(self.path.iterdir())]

    def glob(self) -> "list[Location]":
        return [LocalPath(p) for p in sorted(glob.glob(os.path.expanduser(self.path)))]

    def stamp(self) -> tuple[int, object]:
        found = self.path.stat()
        return found.st_size, (found.st_mtime_ns, found.st_ino)

    def open(self) -> ByteSource:
        return MappedSource(self.path) if self.mapped else ReadSource(self.path)


class RemoteURL(Location):
    """A URL that fsspec understands: `s3://`, `gs://`, `memory://` and the rest."""

    local = False

    def __init__(self, fs: Any, path: str, protocol: str) -> None:
        self.fs, self._path, self._protocol = fs, path.rstrip("/"), protocol

    def __str__(self) -> str:
        return f"{self._protocol}://{self._path.lstrip('/')}"

    def __repr__(self) -> str:
        return f"RemoteURL({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemoteURL) and str(self) == str(other)

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
    def parent(self) -> "RemoteURL":
        return self._at(self._path.rsplit("/", 1)[0])

    def child(self, name: str) -> "RemoteURL":
        return self._at(f"{self._path}/{name}")

    def is_file(self) -> bool:
        return self._kind() == "file"

    def is_folder(self) -> bool:
        return self._kind() == "directory"

    def exists(self) -> bool:
        """Whether there is one now, whatever was listed before."""
        with translated_errors(str(self)):
            self.fs.invalidate_cache(self._path)
        return self._kind() is not None

    def children(self) -> "list[Location]":
        with translated_errors(str(self)):
            self.fs.invalidate_cache()  # a live run adds files
            try:
                listed = self.fs.ls(self._path, detail=False)
            except FileNotFoundError as error:
                raise self._missing() from error.__cause__
        found = {p.rstrip("/") for p in listed}
        return [self._at(p) for p in sorted(found - {self._path})]

    def glob(self) -> "list[Location]":
        try:
            with translated_errors(str(self)):
                self.fs.invalidate_cache()
                return [self._at(p) for p in sorted(self.fs.glob(self._path))]
        except FileNotFoundError:
            return []

    def stamp(self) -> tuple[int, object]:
        with translated_errors(str(self)):
            self.fs.invalidate_cache(self._path)
        found = self._info()
        if found is None:
            raise self._missing()
        mark = next((found[k] for k in ("ETag", "etag", "mtime", "created") if k in found), None)
        return int(found["size"]), str(mark)

    def open(self) -> ByteSource:
        found = self._info()  # as last listed: formats check their size against their contents
        if found is None:
            raise self._missing()
        return RemoteSource(self.fs, self._path, str(self), int(found["size"]))

    def read_bytes(self) -> bytes:
        """The whole (small) file, as it is now and in one request."""
        try:
            with translated_errors(str(self)):
                return bytes(self.fs.cat_file(self._path))
        except FileNotFoundError:
            raise self._missing() from None

    def upload(self, path: Path) -> None:
        """Become a copy of a local file; object stores show it when it is whole."""
        try:
            with translated_errors(str(self)):
                self.fs.put_file(str(path), self._path)
        except (OSError, LawaError) as error:
            raise OutputError(f"{error} It was not written.") from error

    def remove(self) -> None:
        """Remove the file."""
        try:
            with translated_errors(str(self)):
                self.fs.rm_file(self._path)
        except FileNotFoundError:
            return
        except (OSError, LawaError) as error:
            raise OutputError(f"{error} It was not removed.") from error

    def _kind(self) -> str | None:
        found = self._info()
        return None if found is None else str(found["type"])

    def _info(self) -> dict[str, Any] | None:
        # Not `fs.isfile`: that takes every failure, such as missing credentials, for "no file".
        try:
            with translated_errors(str(self)):
                found: dict[str, Any] = self.fs.info(self._path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return found

    def _missing(self) -> FileNotFoundError:
        return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self))

    def _at(self, path: str) -> "RemoteURL":
        return RemoteURL(self.fs, path, self._protocol)


def is_url(text: str) -> bool:
    """Whether it names a place through fsspec.

    >>> is_url("s3://bucket/run"), is_url("runs/a.pt")
    (True, False)
    """
    return "://" in text


def parse_location(text: str | os.PathLike[str]) -> Location:
    """The place that a path or URL names."""
    text = os.fspath(text)
    if not is_url(text) or text.startswith("file://"):
        return LocalPath(os.path.expanduser(text.removeprefix("file://")))
    import fsspec

    protocol = text.split("://", 1)[0]
    try:
        fs, path = fsspec.core.url_to_fs(text)
    except ImportError as error:
        package = package_for(protocol)
        what_next = f"Run `pip install '{package}'`." if package else "Install it."
        raise ConfigError(
            f"{text}: {protocol}:// needs a package that is not installed ({error}). {what_next}"
        ) from None
    except ValueError as error:
        raise ConfigError(f"{text}: {error}. Give a path or a URL that fsspec knows.") from None
    fs.invalidate_cache()  # file systems live on and remember listings of earlier calls
    return RemoteURL(fs, path, protocol)
