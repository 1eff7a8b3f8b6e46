"""The files of a live run's checkpoints: detect changes, check completeness, keep them.

Files are kept as hard links, which take no space and survive the trainer's deletion, or as copies
where the file system has no links.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from torch_lawa.checkpoints.find.discovery import FoundCheckpoint
from torch_lawa.checkpoints.formats.base import Checkpoint
from torch_lawa.checkpoints.formats.huggingface import find_weights_file
from torch_lawa.checkpoints.formats.registry import checkpoint_parts, open_checkpoint
from torch_lawa.checkpoints.storage.atomic import replacing, sync_folder
from torch_lawa.checkpoints.storage.paths import LocalPath, Location, RemoteURL
from torch_lawa.checkpoints.storage.remote_errors import translated_errors
from torch_lawa.errors import FormatError
from torch_lawa.offline.side_files import side_files
from torch_lawa.offline.threads import Stopped
from torch_lawa.system_errors import named_errors

__all__ = ["LiveCheckpoint", "digest", "keep_files", "open_live", "signature_of", "stamps_of"]

Stopping = Callable[[], bool]
_PIECE = 1 << 24  # bytes


@dataclass(frozen=True)
class LiveCheckpoint:
    """A checkpoint of the run that opened without an error, and the files to keep of it."""

    found: FoundCheckpoint
    signature: str
    weights: tuple[Location, ...]
    beside: tuple[Location, ...]
    stamps: dict[str, str]  # of the weights, by their path in the checkpoint
    written: float | None  # time of the last write; None if unknown

    @property
    def file(self) -> str:
        """Its file name; empty if it is a folder."""
        return "" if self.found.location.is_folder() else self.found.location.name


def open_live(found: FoundCheckpoint, signature: str, key: str | None) -> LiveCheckpoint:
    """Open a checkpoint to check that it is complete, and to list the files it needs."""
    with open_checkpoint(found.location, key=key) as checkpoint:
        weights = tuple(checkpoint.files)
        beside = tuple(p for p in _beside(checkpoint) if p not in weights)
    stamps = stamps_of(weights, found.location)
    if len(stamps) < len(weights):
        raise FormatError(
            f"{found.location}: two of its files have the same name, which is not supported."
        )
    times = [_written(location) for location in weights]
    written = None if None in times else max(t for t in times if t is not None)
    return LiveCheckpoint(found, signature, weights, beside, stamps, written)


def keep_files(source: LiveCheckpoint, folder: Path, stopped: Stopping) -> bool:
    """Link or copy the files of a checkpoint into `folder`; False if some were copied."""
    linked = True
    for location in source.weights:
        path = folder / location.below(source.found.location)
        path.parent.mkdir(parents=True, exist_ok=True)
        if not _link(location, path):
            linked = False
            _copy(location, path, stopped)
    for location in source.beside:
        _copy(location, folder / location.name, stopped)
    for inner in (*(path for path in folder.rglob("*") if path.is_dir()), folder):
        sync_folder(inner)
    return linked


def signature_of(location: Location) -> str:
    """A value that changes when a file of the checkpoint changes or is added."""
    if not location.is_folder():
        return digest(stamps_of([location], location))
    children = location.children()
    files = [child for child in children if child.is_file()]
    if len(files) < len(children):
        is_part = checkpoint_parts(location)
        folders = [c for c in children if is_part(c.name) and c.is_folder()]
        files += [file for folder in folders for file in folder.walk()]
    return digest(stamps_of(files, location))


def stamps_of(locations: Iterable[Location], checkpoint: Location) -> dict[str, str]:
    """The stamps (size, time, inode) of files, by their path in the checkpoint."""
    return {location.below(checkpoint): str(location.stamp()) for location in locations}


def digest(value: object) -> str:
    """A short hash of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:24]


def _beside(checkpoint: Checkpoint) -> Iterator[Location]:
    """Small files needed to read the weights, or copied into the output."""
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
    except OSError:  # another file system, one without links, or no permission
        return False
    return True


def _pieces(location: Location) -> Iterator[bytes | memoryview]:
    """The bytes of a file, however large it is."""
    if isinstance(location, LocalPath):
        # Not mapped: it may be truncated meanwhile.
        with named_errors(location.path), location.path.open("rb") as file:
            while piece := file.read(_PIECE):
                yield piece
        return
    source = location.open()
    for begin in range(0, source.size, _PIECE):
        yield source.view(begin, min(begin + _PIECE, source.size)).data
    source.close()


def _copy(location: Location, path: Path, stopped: Stopping) -> None:
    with replacing(path) as out:
        for piece in _pieces(location):
            if stopped():
                raise Stopped
            out.write(piece)
    if isinstance(location, LocalPath):
        shutil.copymode(location.path, path)
