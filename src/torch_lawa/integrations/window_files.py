"""The window of an averager beside the checkpoint of a framework, and what the files are called.

The framework decides when a checkpoint is written, where, and when it is removed. The whole window
goes with each, so that any one checkpoint is enough to resume exactly. It is one file, or for a
sharded model a folder of `torch.distributed.checkpoint` that every process writes to.

A window is written completely under a pending name and then renamed. A framework whose checkpoint
is a single file renames only when that file is complete, and gives both the same token: whenever a
process is killed, the window that carries the checkpoint's token is there under one of its names.
"""

import contextlib
import os
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from torch import nn

# Not `torch.save`: code that wraps it to watch a framework's writes must not see ours.
from torch.serialization import load, save

from torch_lawa.averager import LatestWeightAverager
from torch_lawa.checkpoints.storage.atomic import publish, remove, sync_file, sync_folder
from torch_lawa.errors import LawaError, StateError, StoreError
from torch_lawa.masters import is_sharded_model
from torch_lawa.ranks.barrier import barrier
from torch_lawa.shards import reshard
from torch_lawa.system_errors import unwrapped_errors
from torch_lawa.validation import DAMAGE

__all__ = [
    "IN_TRAINER_CHECKPOINT",
    "SavedWindows",
    "WindowFile",
    "load_window",
    "save_window",
    "window_beside",
]

IN_TRAINER_CHECKPOINT = Path("averaged", "window")  # of the Transformers Trainer

# No digits in these names: Lightning numbers the checkpoints of SLURM jobs by all the digits in
# the names of the files it finds.
# Hidden, and with a suffix of their own (`rglob` finds hidden files, too), so that code that looks
# for checkpoints does not find windows among them.
_FOLDER = ".lawa"
_SUFFIX = ".window"
_FILE = ".pt"
_PENDING = ".new"  # complete, but its checkpoint may not be
_UNFINISHED = ".partial"
_NOTES = "notes.pt"  # in a folder
_VERSION = 1


def window_beside(checkpoint: str) -> "WindowFile":
    """The window of a checkpoint that is one file: `last.ckpt`, `.lawa/last.ckpt.window`."""
    parent, slash, name = checkpoint.rpartition("/")
    return WindowFile(f"{parent}{slash}{_FOLDER}/{name}{_SUFFIX}")


def window_inside(path: Path) -> "WindowFile":
    """The window in a checkpoint folder: `PATH.pt`, or the folder `PATH` for a sharded model."""
    return WindowFile(str(path), file_suffix=_FILE)


@dataclass(frozen=True)
class SavedWindows:
    """What one file or folder holds: windows by name, and notes for each."""

    path: str
    sharded: bool
    token: str | None
    notes: Mapping[str, Any]
    _ks: Mapping[str, int]
    _states: Mapping[str, Any]

    def load(
        self,
        averagers: Mapping[str, LatestWeightAverager],
        model: nn.Module,
        *,
        sharded: bool | None = None,
        rank: int | None = None,
    ) -> None:
        """Restore the windows of these names; call it in every process, as `WindowFile.write`."""
        if not self.sharded:
            if is_sharded_model(model) if sharded is None else sharded:
                raise self._refused("the model was not sharded when it was saved, and now it is")
            with self.reading():
                for name, averager in averagers.items():
                    averager.load_state_dict(self._states[name])
            return
        for name, averager in averagers.items():
            with self.reading():
                k = self._ks[name]
            if k < averager.k:
                raise self._refused(
                    f"it was saved with k={k}, and the shards of a window load into the same k or "
                    f"a smaller one, not k={averager.k}"
                )
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.state_dict_loader import load as load_shards

        for averager in averagers.values():
            averager.reset()
        try:
            with warnings.catch_warnings():  # about there being only one process
                warnings.filterwarnings("ignore", "torch.distributed is disabled")
                load_shards(_bound(averagers, model, rank), checkpoint_id=self.path)
        except CheckpointException as error:  # not an Exception, and hides the reason
            reason, _ = next(iter(error.failures.values()))
            if "Missing key" in str(reason):
                raise StateError(
                    f"{self.path}: the window was saved with other tensors, or with others frozen "
                    f"({reason}). Before you resume, unfreeze what was unfrozen during the run; "
                    "freeze only afterwards what was frozen. Or remove it to begin a new window."
                ) from error
            raise _unreadable(self.path, reason) from error
        except StateError as error:
            raise StateError(f"{self.path}: {error}") from None
        except Exception as error:
            raise _unreadable(self.path, error) from error

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Inside, whatever is wrong with the windows or their notes is an error with the path."""
        try:
            yield
        except LawaError as error:
            raise StateError(f"{self.path}: {error}") from None
        except DAMAGE as error:
            raise _unreadable(self.path, ValueError(f"damaged ({error!r})")) from None

    def _refused(self, problem: str) -> StateError:
        return StateError(
            f"{self.path}: {problem}. Resume with the options it was saved with, or remove it to "
            "begin a new window."
        )


class WindowFile:
    """The windows of one checkpoint: a file or a folder, local or on any fsspec file system."""

    def __init__(self, path: str, *, file_suffix: str = "") -> None:
        self._system, location = url_to_fs(path)
        self._is_local = isinstance(self._system, LocalFileSystem)
        self._folder, self._file = location, location + file_suffix
        self.path = path + file_suffix  # as messages call it

    def write(
        self,
        averagers: Mapping[str, LatestWeightAverager],
        model: nn.Module,
        *,
        writes: bool,
        notes: Mapping[str, Any] | None = None,
        token: str | None = None,
        sharded: bool | None = None,
        rank: int | None = None,
    ) -> None:
        """Write the windows of `model` under the pending name, for `publish` to rename.

        Call it in every process, with `writes` in one of those that share a disk. `sharded` is
        needed for models that do not show it (FSDP 1), and so is the `rank` whose shards they are.
        """
        if is_sharded_model(model) if sharded is None else sharded:
            self._write_folder(averagers, model, writes, rank, _head(averagers, notes, token))
        elif writes:
            states = {name: averager.state_dict() for name, averager in averagers.items()}
            self._write_file({**_head(averagers, notes, token), "windows": states})

    def publish(self) -> None:
        """Rename what was written, now that its checkpoint is complete; called by the writer."""
        for location, other in ((self._folder, self._file), (self._file, self._folder)):
            if self._exists(location + _PENDING):
                if self._is_local:
                    publish(Path(location + _PENDING), Path(location))
                else:
                    self._system.mv(location + _PENDING, location)
                if other != location:
                    self._remove(other)  # of an earlier run whose model was sharded, or was not
                return

    def discard_pending(self) -> None:
        """Remove what was written, since its checkpoint was not."""
        for location in {self._folder, self._file}:
            self._remove(location + _PENDING)

    def remove(self) -> None:
        """Remove the windows and what remains of an interrupted write."""
        for location in {self._folder, self._file}:
            for suffix in ("", _PENDING, _UNFINISHED):
                self._remove(location + suffix)
        parent = Path(self._file).parent
        if self._is_local and parent.is_dir():
            if parent.name == _FOLDER:
                with contextlib.suppress(OSError):  # there are other windows
                    parent.rmdir()
                    parent = parent.parent
            sync_folder(parent)

    def read(self) -> Iterator[SavedWindows]:
        """What is stored under the final name, then what is still pending."""
        for suffix in ("", _PENDING):
            for location in dict.fromkeys((self._folder, self._file)):
                if self._exists(location + suffix):
                    yield self._read(location + suffix)

    def _write_file(self, state: Mapping[str, Any]) -> None:
        if not self._is_local:
            self._system.makedirs(self._system._parent(self._file), exist_ok=True)
            with self._system.open(self._file + _PENDING, "wb") as file:
                save(state, file)
            return
        unfinished = Path(self._file + _UNFINISHED)
        unfinished.parent.mkdir(parents=True, exist_ok=True)
        remove(unfinished)
        try:
            with unwrapped_errors(unfinished), unfinished.open("wb") as file:
                save(state, file)  # not to the path: PyTorch does not say why that failed
            sync_file(unfinished)
            self.discard_pending()
            os.replace(unfinished, self._file + _PENDING)
        except BaseException:
            remove(unfinished)
            raise

    def _write_folder(
        self,
        averagers: Mapping[str, LatestWeightAverager],
        model: nn.Module,
        writes: bool,
        rank: int | None,
        head: Mapping[str, Any],
    ) -> None:
        from torch.distributed.checkpoint.state_dict_saver import save as save_shards

        if not self._is_local:
            raise StoreError(
                f"{self._folder}: the window of a sharded model can only be saved to a local path. "
                "Write checkpoints to a local or mounted folder, or train without averaging."
            )
        pending = Path(self._folder + _PENDING)
        if writes:
            self.discard_pending()
            pending.parent.mkdir(parents=True, exist_ok=True)
        barrier(f"saving the window {self._folder}")
        with unwrapped_errors(pending):
            save_shards(_bound(averagers, model, rank), checkpoint_id=pending)
        if writes:
            with unwrapped_errors(pending), (pending / _NOTES).open("wb") as file:
                save(dict(head), file)
            for path in pending.iterdir():
                sync_file(path)

    def _read(self, location: str) -> SavedWindows:
        sharded = self._is_local and Path(location).is_dir()
        path = location if self._is_local else self._system.unstrip_protocol(location)
        try:
            if sharded:
                state = _load(Path(location) / _NOTES)
            elif self._is_local:
                state = _load(location, mmap=True)
            else:
                with self._system.open(location, "rb") as file:
                    state = _load(file)
            return SavedWindows(path, sharded, *_checked(state))
        except Exception as error:
            raise _unreadable(path, error) from error

    def _exists(self, location: str) -> bool:
        return bool(self._system.exists(location))

    def _remove(self, location: str) -> None:
        if self._is_local:
            remove(Path(location))
        elif self._exists(location):
            self._system.rm(location)


def save_window(
    averager: LatestWeightAverager,
    model: nn.Module,
    path: Path,
    *,
    writes: bool,
    notes: Mapping[str, Any] | None = None,
) -> None:
    """Write the window of `model` into a checkpoint folder; call it in every process.

    `writes` is true in one of the processes that share a disk.
    """
    window = window_inside(path)
    window.write({"averager": averager}, model, writes=writes, notes=notes)
    if writes:
        window.publish()


def load_window(
    averager: LatestWeightAverager, model: nn.Module, path: Path
) -> SavedWindows | None:
    """Restore a window that `save_window` wrote, and return it with its notes; None without one."""
    saved = next(window_inside(path).read(), None)
    if saved is not None:
        saved.load({"averager": averager}, model)
    return saved


def _head(
    averagers: Mapping[str, LatestWeightAverager],
    notes: Mapping[str, Any] | None,
    token: str | None,
) -> dict[str, Any]:
    ks = {name: averager.k for name, averager in averagers.items()}
    return {"version": _VERSION, "token": token, "notes": dict(notes or {}), "k": ks}


def _bound(
    averagers: Mapping[str, LatestWeightAverager], model: nn.Module, rank: int | None
) -> dict[str, Any]:
    """The averagers by the names that they have in a folder, bound to the model's shards."""
    reshard(model)
    for averager in averagers.values():
        averager.bind(model)  # so that it has its names before the first snapshot, too
    owner = "" if rank is None else f" of rank {rank}"
    return {name + owner: averager for name, averager in averagers.items()}


def _load(source: Any, *, mmap: bool = False) -> dict[str, Any]:
    state = load(source, map_location="cpu", weights_only=True, mmap=mmap)
    if not isinstance(state, dict) or state.get("version") != _VERSION:
        raise ValueError("not a window, or one of another version")
    return state


def _checked(state: Mapping[str, Any]) -> tuple[str | None, Any, Any, Any]:
    """Token, notes, ks and windows; of a folder the windows are elsewhere."""
    token, windows = state["token"], state.get("windows", {})
    parts = state["notes"], state["k"], windows
    if not isinstance(token, str | None) or not all(isinstance(part, dict) for part in parts):
        raise ValueError("the file is damaged")
    if not all(type(k) is int for k in state["k"].values()):
        raise ValueError(f"the file is damaged (k is {state['k']!r:.60})")
    return token, *parts


def _unreadable(path: str, error: BaseException) -> StateError:
    reason = (str(error).partition("\n")[0] or type(error).__name__).removesuffix(".")
    return StateError(
        f"{path}: the window cannot be read: {reason}. Resume from another checkpoint, or remove "
        "it to begin a new window."
    )
