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

from torch_lawa.checkpoints.find.select import Found
from torch_lawa.checkpoints.formats.base import Checkpoint
from torch_lawa.checkpoints.formats.huggingface import find_weights
from torch_lawa.checkpoints.formats.opening import open_checkpoint
from torch_lawa.checkpoints.storage.atomic import replacing, sync_folder
from torch_lawa.checkpoints.storage.paths import LocalPlace, Place, RemotePlace
from torch_lawa.checkpoints.storage.remote_errors import telling
from torch_lawa.errors import FormatError
from torch_lawa.offline.engine import Stopped
from torch_lawa.offline.output import side_files

__all__ = ["Source", "digest", "inspect", "keep_files", "signature_of", "stamps_of"]

_COPIED_AT_ONCE = 1 << 24
Stopping = Callable[[], bool]


@dataclass(frozen=True)
class Source:
    """A checkpoint of the run that opened without an error, and what is to be kept of it."""

    found: Found
    signature: str
    weights: tuple[Place, ...]
    beside: tuple[Place, ...]
    stamps: dict[str, str]  # of the weights
    written: float | None  # when the last of them was; None where that is not known

    @property
    def file(self) -> str:
        """The name of the file that it is; empty where it is a folder."""
        return "" if self.found.place.is_folder() else self.found.place.name


def inspect(found: Found, signature: str, key: str | None) -> Source:
    """Open a checkpoint to see that it is whole, and which files it needs."""
    with open_checkpoint(found.place, key=key) as checkpoint:
        weights = tuple(checkpoint.files)
        beside = tuple(p for p in _beside(checkpoint) if p not in weights)
    stamps = stamps_of(weights)
    if len(stamps) < len(weights):
        raise FormatError(f"{found.place}: two of its files have the same name; not supported.")
    times = [_written(place) for place in weights]
    written = None if None in times else max(t for t in times if t is not None)
    return Source(found, signature, weights, beside, stamps, written)


def keep_files(source: Source, folder: Path, stopped: Stopping) -> bool:
    """Have the files of a checkpoint in `folder`; False where some had to be copied."""
    linked = True
    for place in source.weights:
        if not _link(place, folder / place.name):
            linked = False
            _copy(place, folder / place.name, stopped)
    for place in source.beside:
        _copy(place, folder / place.name, stopped)
    sync_folder(folder)
    return linked


def signature_of(place: Place) -> str:
    """Changes when any file of a checkpoint does, or one is added."""
    files = [p for p in place.children() if p.is_file()] if place.is_folder() else [place]
    return digest(stamps_of(files))


def stamps_of(places: Iterable[Place]) -> dict[str, str]:
    """The stamps of files, by their names."""
    return {place.name: str(place.stamp()) for place in places}


def digest(value: object) -> str:
    """A short name for a value that can be written as JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:24]


def _beside(checkpoint: Checkpoint) -> Iterator[Place]:
    """Small files that reading the weights takes, or that go with a result."""
    yield from side_files(checkpoint)
    folder = checkpoint.place
    if folder.is_folder():
        index = find_weights(folder)
        others = (folder.child(name) for name in (".metadata", "trainer_state.json"))
        yield from (p for p in (index, *others) if p is not None and p.is_file())


def _written(place: Place) -> float | None:
    if isinstance(place, LocalPlace):
        return place.path.stat().st_mtime
    assert isinstance(place, RemotePlace)
    with telling(str(place)):
        try:
            return float(place.fs.modified(place.path).timestamp())
        except (NotImplementedError, KeyError, AttributeError):  # a file system without times
            return None


def _link(place: Place, path: Path) -> bool:
    if not isinstance(place, LocalPlace):
        return False
    try:
        os.link(os.path.realpath(place.path), path)
    except FileNotFoundError:
        raise
    except OSError:  # another file system, or one without links, or not our file
        return False
    return True


def _copy(place: Place, path: Path, stopped: Stopping) -> None:
    with replacing(path) as out:
        for piece in _pieces(place):
            if stopped():
                raise Stopped
            out.write(piece)
    if isinstance(place, LocalPlace):
        shutil.copymode(place.path, path)


def _pieces(place: Place) -> Iterator[bytes | memoryview]:
    if isinstance(place, LocalPlace):
        with place.path.open("rb") as file:  # not mapped: it may be cut off while it is read
            while piece := file.read(_COPIED_AT_ONCE):
                yield piece
        return
    source = place.open()
    for begin in range(0, source.size, _COPIED_AT_ONCE):
        yield source.view(begin, min(begin + _COPIED_AT_ONCE, source.size)).data
    source.close()
