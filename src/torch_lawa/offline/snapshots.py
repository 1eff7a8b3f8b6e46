"""Checkpoints of a live run: whether one changed, whether it is whole, and to keep its files.

Kept are hard links where the file system has them, which cost nothing and outlive the trainer's
own names, else copies.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from torch_lawa.checkpoints.find.select import FoundCheckpoint
from torch_lawa.checkpoints.formats.base import Checkpoint
from torch_lawa.checkpoints.formats.huggingface import find_weights_file
from torch_lawa.checkpoints.formats.registry import open_checkpoint
from torch_lawa.checkpoints.storage.atomic import replacing, sync_folder
from torch_lawa.checkpoints.storage.paths import LocalPath, Location, RemoteURL
from torch_lawa.checkpoints.storage.remote_errors import translated_errors
from torch_lawa.errors import FormatError
from torch_lawa.offline.engine import Stopped
from torch_lawa.offline.output import side_files

__all__ = ["Source", "digest", "inspect", "keep_files", "signature_of", "stamps_of"]

_COPIED_AT_ONCE = 1 << 24
Stopping = Callable[[], bool]


@dataclass(frozen=True)
class Source:
    """A checkpoint of the run that opened without an error, and what is to be kept of it."""

    found: FoundCheckpoint
    signature: str
    weights: tuple[Location, ...]
    beside: tuple[Location, ...]
    stamps: dict[str, str]  # of the weights
    written: float | None  # when the last of them was; None where that is not known

    @property
    def file(self) -> str:
        """The name of the file that it is; empty where it is a folder."""
        return "" if self.found.location.is_folder() else self.found.location.name


def inspect(found: FoundCheckpoint, signature: str, key: str | None) -> Source:
    """Open a checkpoint to see that it is whole, and which files it needs."""
    with open_checkpoint(found.location, key=key) as checkpoint:
        weights = tuple(checkpoint.files)
        beside = tuple(p for p in _beside(checkpoint) if p not in weights)
    stamps = stamps_of(weights)
    if len(stamps) < len(weights):
        raise FormatError(f"{found.location}: two of its files have the same name; not supported.")
    times = [_written(location) for location in weights]
    written = None if None in times else max(t for t in times if t is not None)
    return Source(found, signature, weights, beside, stamps, written)


def keep_files(source: Source, folder: Path, stopped: Stopping) -> bool:
    """Have the files of a checkpoint in `folder`; False where some had to be copied."""
    linked = True
    for location in source.weights:
        if not _link(location, folder / location.name):
            linked = False
            _copy(location, folder / location.name, stopped)
    for location in source.beside:
        _copy(location, folder / location.name, stopped)
    sync_folder(folder)
    return linked


def signature_of(location: Location) -> str:
    """Changes when any file of a checkpoint does, or one is added."""
    files = [p for p in location.children() if p.is_file()] if location.is_folder() else [location]
    return digest(stamps_of(files))


def stamps_of(locations: Iterable[Location]) -> dict[str, str]:
    """The stamps of files, by their names."""
    return {location.name: str(location.stamp()) for location in locations}


def digest(value: object) -> str:
    """A short name for a value that can be written as JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:24]


def _beside(checkpoint: Checkpoint) -> Iterator[Location]:
    """Small files that reading the weights takes, or that go with a result."""
    yield from side_files(checkpoint)
    folder = checkpoint.location
    if folder.is_folder():
        index = find_weights_file(folder)
        others = (folder.child(name) for name in (".metadata", "trainer_state.json"))
        yield from (p for p in (index, *others) if p is not None and p.is_file())


def _written(location: Location) -> float | None:
    if isinstance(location, LocalPath):
        return location.path.stat().st_mtime
    assert isinstance(location, RemoteURL)
    with translated_errors(str(location)):
        try:
            return float(location.fs.modified(location.path).timestamp())
        except (NotImplementedError, KeyError, AttributeError):  # a file system without times
            return None


def _link(location: Location, path: Path) -> bool:
    if not isinstance(location, LocalPath):
        return False
    try:
        os.link(os.path.realpath(location.path), path)
    except FileNotFoundError:
        raise
    except OSError:  # another file system, or one without links, or not our file
        return False
    return True


def _copy(location: Location, path: Path, stopped: Stopping) -> None:
    with replacing(path) as out:
        for piece in _pieces(location):
            if stopped():
                raise Stopped
            out.write(piece)
    if isinstance(location, LocalPath):
        shutil.copymode(location.path, path)


def _pieces(location: Location) -> Iterator[bytes | memoryview]:
    if isinstance(location, LocalPath):
        with location.path.open("rb") as file:  # not mapped: it may be cut off while it is read
            while piece := file.read(_COPIED_AT_ONCE):
                yield piece
        return
    source = location.open()
    for begin in range(0, source.size, _COPIED_AT_ONCE):
        yield source.view(begin, min(begin + _COPIED_AT_ONCE, source.size)).data
    source.close()
