"""A `Location` is a local path, or a URL that fsspec opens; all file access goes through it.

Local files are memory-mapped, guarded against truncation. From remote files only the requested
ranges are fetched, so each piece is one request and the number of threads is the number of requests
in flight.
"""

import contextlib
import errno
import glob
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

from torch_lawa.checkpoints.storage.byte_sources import (
    ByteSource,
    ReadSource,
    RemoteSource,
    open_file,
)
from torch_lawa.checkpoints.storage.remote_errors import package_for, translated_errors
from torch_lawa.errors import ConfigError, FormatError, LawaError, OutputError

__all__ = [
    "LocalPath",
    "Location",
    "RemoteURL",
    "is_url",
    "parse_location",
    "parse_output",
]

_MAX_SMALL = 256 * 1024 * 1024  # bytes of a file that is read as a whole: an index, a configuration
_COPIED = 16 * 1024 * 1024  # bytes at a time


class Location(ABC):
    """A path or URL of a file or folder, which need not exist."""

    local: bool

    @property
    @abstractmethod
    def name(self) -> str:
        """The last component."""

    @abstractmethod
    def child(self, name: str) -> "Location":
        """An entry of this folder."""

    @property
    @abstractmethod
    def parent(self) -> "Location":
        """The folder that contains it."""

    @abstractmethod
    def is_file(self) -> bool:
        """Whether it is a file."""

    @abstractmethod
    def is_folder(self) -> bool:
        """Whether it is a folder."""

    @abstractmethod
    def children(self) -> "list[Location]":
        """The entries of this folder, sorted by name, hidden ones included."""

    def walk(self) -> "list[Location]":
        """Every file in this folder and its sub-folders, those of one folder sorted by name."""
        found: list[Location] = []
        for child in self.children():
            found += child.walk() if child.is_folder() else [child]
        return found

    def below(self, folder: "Location") -> str:
        """Its path within `folder`, such as `d/0`; its name if it is not in there."""
        path, above = str(self), f"{str(folder).rstrip('/')}/"
        return path.removeprefix(above) if path.startswith(above) else self.name

    @abstractmethod
    def glob(self) -> "list[Location]":
        """The locations that match, if this is a pattern."""

    @abstractmethod
    def stamp(self) -> tuple[int, object]:
        """The size, and a value that changes when the file does."""

    @abstractmethod
    def open(self) -> ByteSource:
        """Open the file for reading ranges of bytes."""

    def exists(self) -> bool:
        """Whether it is a file or a folder."""
        return self.is_file() or self.is_folder()

    @property
    def suffix(self) -> str:
        """The suffix in lower case, such as `.pt`; empty if there is none."""
        return PurePosixPath(self.name).suffix.lower()

    @property
    def size(self) -> int:
        """Size of the file in bytes."""
        return self.stamp()[0]

    def _open_plainly(self) -> ByteSource:
        """Open the file for reading it once, without a mapping: truncation is an error at once."""
        return self.open()

    def read_bytes(self) -> bytes:
        """The whole file, which must be small."""
        source = self._open_plainly()
        try:
            self._check_size(source.size)
            return source.view(0, source.size).tobytes()
        finally:
            source.close()

    def read_json(self) -> dict[str, object]:
        """The JSON object in the file, which must be small; errors name the file."""
        try:
            found = json.loads(self.read_bytes())
        except (ValueError, RecursionError) as error:
            raise FormatError(f"{self}: not readable as JSON ({error}).") from None
        if not isinstance(found, dict):
            raise FormatError(f"{self}: contains a JSON {type(found).__name__}, not an object.")
        return found

    def copy_to(self, path: Path) -> None:
        """Copy the file, of any size, to a local path."""
        source = self._open_plainly()
        try:
            with path.open("wb") as file:
                for begin in range(0, source.size, _COPIED):
                    file.write(source.view(begin, min(begin + _COPIED, source.size)).tobytes())
        finally:
            source.close()

    def _check_size(self, size: int) -> None:
        if size > _MAX_SMALL:
            raise FormatError(
                f"{self}: has {size} bytes, and at most {_MAX_SMALL} are read. It does not belong "
                "to a checkpoint, or is damaged."
            )


class LocalPath(Location):
    """A local path."""

    local = True

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

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
        return LocalPath(self.path.parent)

    def child(self, name: str) -> "LocalPath":
        return LocalPath(self.path / name)

    def is_file(self) -> bool:
        return self._is(Path.is_file)

    def is_folder(self) -> bool:
        return self._is(Path.is_dir)

    def _is(self, kind: Callable[[Path], bool]) -> bool:
        try:
            return kind(self.path)
        except OSError as error:
            if error.errno != errno.ENAMETOOLONG:  # nothing can have that name
                raise
            return False

    def children(self) -> "list[Location]":
        return [self.child(p.name) for p in sorted(self.path.iterdir())]

    def glob(self) -> "list[Location]":
        return [LocalPath(p) for p in sorted(glob.glob(os.path.expanduser(self.path)))]

    def stamp(self) -> tuple[int, object]:
        found = self.path.stat()
        return found.st_size, (found.st_mtime_ns, found.st_ino)

    def open(self) -> ByteSource:
        return open_file(self.path)

    def _open_plainly(self) -> ByteSource:
        return ReadSource(self.path)

    def copy_to(self, path: Path) -> None:
        """Copy the file, of any size, to a local path; an error if it changes meanwhile."""
        before = self.stamp()
        super().copy_to(path)
        with contextlib.suppress(FileNotFoundError):  # what was open was copied
            if self.stamp() != before:
                raise FormatError(
                    f"{self}: was written to while it was being copied. Try again when it is "
                    "complete."
                )


class RemoteURL(Location):
    """A URL that fsspec understands: `s3://`, `gs://`, `memory://` and the rest."""

    local = False

    def __init__(self, fs: Any, path: str, protocol: str, behind: "Location | None" = None) -> None:
        self.fs, self._protocol = fs, protocol
        self.path = path.rstrip("/")  # within the file system
        self._behind = behind  # what a chained URL ends with

    def __str__(self) -> str:
        start = f"{self._protocol}://"  # for HTTP, fsspec's paths are whole URLs
        return self.path if self.path.startswith(start) else start + self.path.lstrip("/")

    def __repr__(self) -> str:
        return f"RemoteURL({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemoteURL) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    @property
    def stored_at(self) -> Location:
        """Where its bytes are: behind caches, or the archive (or folder) that contains it."""
        from fsspec.implementations.cached import CachingFileSystem
        from fsspec.implementations.local import LocalFileSystem

        fs = self.fs
        while isinstance(fs, CachingFileSystem):
            fs = fs.fs
        if isinstance(fs, LocalFileSystem):
            return LocalPath(self.path)
        if isinstance(self._behind, RemoteURL) and type(fs) is type(self._behind.fs):
            return RemoteURL(fs, self.path, self._behind._protocol)
        return self._behind or self

    @property
    def name(self) -> str:
        return self.path.rsplit("/", 1)[-1]

    @property
    def parent(self) -> "RemoteURL":
        return self._at(self.path.rsplit("/", 1)[0])

    def child(self, name: str) -> "RemoteURL":
        return self._at(f"{self.path}/{name}")

    def is_file(self) -> bool:
        return self._kind() == "file"

    def is_folder(self) -> bool:
        return self._kind() == "directory"

    def exists(self) -> bool:
        """Whether it exists now, regardless of cached listings."""
        with translated_errors(str(self)):
            self.fs.invalidate_cache(self.path)
        return self._kind() is not None

    def children(self) -> "list[Location]":
        with translated_errors(str(self)):
            self.fs.invalidate_cache()  # a run in progress adds files
            try:
                listed = self.fs.ls(self.path, detail=False)
            except FileNotFoundError as error:
                raise self._missing() from error.__cause__
        found = {p.rstrip("/") for p in listed}
        return [self._at(p) for p in sorted(found - {self.path})]

    def glob(self) -> "list[Location]":
        try:
            with translated_errors(str(self)):
                self.fs.invalidate_cache()
                return [self._at(p) for p in sorted(self.fs.glob(self.path))]
        except FileNotFoundError:
            return []

    def stamp(self) -> tuple[int, object]:
        with translated_errors(str(self)):
            self.fs.invalidate_cache(self.path)
        found = self._info()
        if found is None:
            raise self._missing()
        mark = next((found[k] for k in ("ETag", "etag", "mtime", "created") if k in found), None)
        return int(found["size"]), str(mark)

    def open(self) -> ByteSource:
        found = self._info()  # may be cached: formats check the size against the contents
        if found is None:
            raise self._missing()
        return RemoteSource(self.fs, self.path, str(self), int(found["size"]))

    def read_bytes(self) -> bytes:
        """The whole file, which must be small, as it is now."""
        found = self._info()
        self._check_size(0 if found is None else int(found.get("size") or 0))
        try:
            with translated_errors(str(self)):
                return bytes(self.fs.cat_file(self.path))
        except FileNotFoundError:
            raise self._missing() from None

    def upload(self, path: Path) -> None:
        """Upload a local file; object stores show it only when it is complete."""
        try:
            with translated_errors(str(self)):
                self.fs.put_file(str(path), self.path)
        except (OSError, LawaError) as error:
            raise OutputError(f"{error} The file was not written.") from error

    def remove(self) -> None:
        """Remove the file."""
        try:
            with translated_errors(str(self)):
                self.fs.rm_file(self.path)
        except FileNotFoundError:
            return
        except (OSError, LawaError) as error:
            raise OutputError(f"{error} The file was not removed.") from error

    def _kind(self) -> str | None:
        found = self._info()
        return None if found is None else str(found["type"])

    def _info(self) -> dict[str, Any] | None:
        # Not `fs.isfile`, which treats every failure, such as missing credentials, as "no file".
        try:
            with translated_errors(str(self)):
                found: dict[str, Any] = self.fs.info(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return found

    def _missing(self) -> FileNotFoundError:
        return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self))

    def _at(self, path: str) -> "RemoteURL":
        return RemoteURL(self.fs, path, self._protocol, self._behind)


def is_url(text: str) -> bool:
    """Whether a text is a URL.

    >>> is_url("s3://bucket/run"), is_url("runs/a.pt")
    (True, False)
    """
    return "://" in text


def parse_location(text: str | os.PathLike[str]) -> Location:
    """The location of a path or URL."""
    text = os.fspath(text)
    if "\0" in text:
        raise ConfigError(f"{text!r}: contains a null character. Give a path or a URL.")
    if not is_url(text) or text.startswith("file://"):
        return LocalPath(os.path.expanduser(text.removeprefix("file://")))
    import fsspec
    from fsspec.implementations.local import LocalFileSystem

    protocol = text.split("://", 1)[0]
    try:
        fs, path = fsspec.core.url_to_fs(text)
    except ImportError as error:
        package = package_for(protocol)
        what_next = f"Run `pip install '{package}'`." if package else "Install it."
        raise ConfigError(
            f"{text}: {protocol}:// needs a package that is not installed ({error}). {what_next}"
        ) from None
    except Exception as error:  # each file system checks its URLs in a way of its own
        raise ConfigError(f"{text}: {error}. Give a path or a URL that fsspec supports.") from None
    if isinstance(fs, LocalFileSystem):
        return LocalPath(path)
    fs.invalidate_cache()  # fsspec reuses file systems and their cached listings
    behind = parse_location(text.rsplit("::", 1)[1]) if "::" in text else None
    return RemoteURL(fs, path, protocol, behind)


def parse_output(text: str | os.PathLike[str]) -> Location:
    """The location of a result. Chained URLs are refused: they hide what would be replaced."""
    location = parse_location(text)
    if isinstance(location, RemoteURL) and location.stored_at is not location:
        raise ConfigError(
            f"{os.fspath(text)}: chained URLs and caches can be read, but not written. Write to "
            f"{location.stored_at}."
        )
    return location
