"""A file (or, of a sharded model, a folder) beside a checkpoint: whole, or not there.

Names have no digits of their own: Lightning numbers the checkpoints of SLURM jobs by all digits in
the names of files it finds.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from torch_lawa.averager import LatestWeightAverager
from torch_lawa.checkpoints.storage.atomic import publish, remove, sync_file, sync_folder
from torch_lawa.errors import StateError

__all__ = ["PENDING", "SUFFIX", "SideFile"]

SUFFIX = ".lawa"
PENDING = ".new"  # complete, but its checkpoint may not be
_UNFINISHED = ".partial"
_NOTES = "callback.pt"  # in a folder


class SideFile:
    """One window, local or wherever fsspec reaches."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._system, self._location = url_to_fs(path)
        self._is_local = isinstance(self._system, LocalFileSystem)

    @property
    def is_folder(self) -> bool:
        """Whether it holds shards."""
        return self._is_local and Path(self._location).is_dir()

    def exists(self) -> bool:
        """Whether it is there."""
        return bool(self._system.exists(self._location))

    def write(self, state: Mapping[str, Any]) -> None:
        """Write a state under the pending name."""
        if not self._is_local:
            with self._system.open(self._location + PENDING, "wb") as file:
                torch.save(state, file)
            return
        unfinished = Path(self._location + _UNFINISHED)
        unfinished.parent.mkdir(parents=True, exist_ok=True)
        remove(unfinished)
        try:
            torch.save(state, unfinished)
            sync_file(unfinished)
            self.discard_pending()
            os.replace(unfinished, self._location + PENDING)
        except BaseException:
            remove(unfinished)
            raise

    def write_shards(
        self, averagers: Mapping[str, LatestWeightAverager], notes: Mapping[str, Any] | None
    ) -> None:
        """Write what each process holds; `notes` come from one of them. All must call it."""
        from torch.distributed.checkpoint.state_dict_saver import save

        pending = Path(self._location + PENDING)
        pending.parent.mkdir(parents=True, exist_ok=True)
        save(dict(averagers), checkpoint_id=pending)
        if notes is not None:
            torch.save(dict(notes), pending / _NOTES)
            for path in pending.iterdir():
                sync_file(path)

    def publish(self) -> None:
        """Give what was written its name: its checkpoint is there."""
        if self._is_local:
            publish(Path(self._location + PENDING), Path(self._location))
        else:
            self._system.mv(self._location + PENDING, self._location)

    def read(self) -> dict[str, Any]:
        """The state, or of a folder its notes."""
        try:
            if self.is_folder:
                return self._load(Path(self._location) / _NOTES)
            if self._is_local:
                return self._load(self._location, mmap=True)
            with self._system.open(self._location, "rb") as file:
                return self._load(file)
        except Exception as error:
            raise self._unreadable(error) from error

    def read_shards(self, averagers: Mapping[str, LatestWeightAverager]) -> None:
        """Load what this process needs; all must call it."""
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.state_dict_loader import load

        try:
            load(dict(averagers), checkpoint_id=self._location)
        except (Exception, CheckpointException) as error:  # the latter is no Exception
            raise self._unreadable(error) from error

    def discard_pending(self) -> None:
        """Remove what was written and is not wanted."""
        self._remove(self._location + PENDING)

    def remove(self) -> None:
        """Remove it and whatever was being written."""
        self._remove(self._location)
        self._remove(self._location + PENDING)
        if self._is_local:
            self._remove(self._location + _UNFINISHED)
            if Path(self._location).parent.is_dir():
                sync_folder(Path(self._location).parent)

    def _remove(self, location: str) -> None:
        if self._is_local:
            remove(Path(location))
        elif self._system.exists(location):
            self._system.rm(location)

    def _load(self, source: Any, *, mmap: bool = False) -> dict[str, Any]:
        state = torch.load(source, map_location="cpu", weights_only=True, mmap=mmap)
        if not isinstance(state, dict) or state.get("version") != 1:
            raise ValueError("not a window, or one of another version")
        return state

    def _unreadable(self, error: BaseException) -> StateError:
        reason = str(error).partition("\n")[0] or type(error).__name__
        return StateError(
            f"{self.path}: the window cannot be read ({reason}). Resume from another checkpoint, "
            "or remove it to begin a new window."
        )
