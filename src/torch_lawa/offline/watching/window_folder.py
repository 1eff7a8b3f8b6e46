"""The window of a watched run on disk, independent of what the trainer deletes.

It has one folder per checkpoint, mostly hard links, and a manifest that lists them. The manifest is
replaced atomically, so a killed process leaves the window before or after a change; folders that
the manifest does not name are removed at the next start.
"""

import contextlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from torch_lawa.checkpoints.find.select import FoundCheckpoint
from torch_lawa.checkpoints.formats.registry import open_checkpoint
from torch_lawa.checkpoints.storage.atomic import remove, replacing, sync_folder
from torch_lawa.checkpoints.storage.folder_lock import LOCK, FolderLock
from torch_lawa.checkpoints.storage.paths import LocalPath
from torch_lawa.errors import StoreError
from torch_lawa.offline.watching.checkpoint_files import (
    LiveCheckpoint,
    keep_files,
    signature_of,
    stamps_of,
)

__all__ = ["KeptCheckpoint", "WindowFolder", "WindowState"]

_MANIFEST, _MADE = "window.json", "made"
_OURS = re.compile(rf"(step|epoch)-\d+(\.\d+)?|{_MADE}|{re.escape(_MANIFEST)}\..*\.partial")


@dataclass(frozen=True)
class KeptCheckpoint:
    """A checkpoint in the window: its files in the run, and ours."""

    number: int  # step or epoch, whichever the run is ordered by
    step: int | None
    epoch: int | None
    folder: str  # name inside the window's folder
    file: str  # name inside `folder`; empty if the folder is the checkpoint
    source: str  # path or URL in the run
    signature: str  # of all its files in the run
    weights: dict[str, str]  # stamps of its weights in the run, by file
    kept: dict[str, str]  # stamps of our links or copies
    written: float | None  # time of the last write
    copied: bool  # instead of linked

    @property
    def label(self) -> str:
        """Its step or epoch in words."""
        return FoundCheckpoint(LocalPath(self.source), self.step, self.epoch).label


@dataclass(frozen=True)
class WindowState:
    """What the manifest stores. Numbers are steps or epochs; they map to signatures."""

    snapshots: tuple[KeptCheckpoint, ...] = ()  # oldest first
    by: str = ""  # "step" or "epoch"
    filled: bool = False  # it was full once: all lower numbers are in `passed`
    passed: Mapping[int, str] = field(default_factory=dict)  # too old for the window
    abandoned: Mapping[int, str] = field(
        default_factory=dict
    )  # on branches that the run left by going back
    left_at: int = -1  # greatest number on such a branch: averages up to it are outdated
    averaged: str = ""  # hash of the window and options of the last average


class WindowFolder:
    """The window's folder, locked for this process; `commit` changes its contents.

    >>> import tempfile
    >>> with WindowFolder(Path(tempfile.mkdtemp()) / "window", run="runs/gpt", k=6) as window:
    ...     window.is_new, len(window.state.snapshots)
    (True, 0)
    """

    def __init__(self, folder: Path, *, run: str, k: int) -> None:
        self.folder, self.made = folder, folder / _MADE
        self._run, self._k = run, k
        self._lock = self._acquire()
        self.is_new = not (folder / _MANIFEST).exists()
        self.state = WindowState()
        try:
            if not self.is_new:
                self._load()
            self._clean_up()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "WindowFolder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the lock."""
        self._lock.release()

    def found(self, snapshot: KeptCheckpoint) -> FoundCheckpoint:
        """The checkpoint in the form that `plan_found` takes."""
        return FoundCheckpoint(
            self._location(snapshot.folder, snapshot.file), snapshot.step, snapshot.epoch
        )

    def changed(self) -> list[KeptCheckpoint]:
        """Checkpoints whose files were changed or removed after they were taken."""
        return [s for s in self.state.snapshots if not self._is_intact(s)]

    def take(
        self,
        source: LiveCheckpoint,
        number: int,
        by: str,
        *,
        key: str | None,
        stopped: Callable[[], bool],
    ) -> KeptCheckpoint | None:
        """Link or copy a checkpoint, to be committed. None if it changed meanwhile."""
        found, folder = source.found, self._free_name(f"{by}-{number}")
        path = self.folder / folder
        try:
            path.mkdir()
            linked = keep_files(source, path, stopped)
            if signature_of(found.location) != source.signature:
                remove(path)
                return None
            with open_checkpoint(self._location(folder, source.file), key=key) as checkpoint:
                kept = stamps_of(checkpoint.files)
            sync_folder(self.folder)
        except BaseException:
            remove(path)
            raise
        return KeptCheckpoint(
            number=number,
            step=found.step,
            epoch=found.epoch,
            folder=folder,
            file=source.file,
            source=str(found.location),
            signature=source.signature,
            weights=source.stamps,
            kept=kept,
            written=source.written,
            copied=not linked,
        )

    def commit(self, state: WindowState) -> None:
        """Make `state` the window, then remove the folders that it no longer needs."""
        rows = {**asdict(state), "format": 1, "run": self._run, "k": self._k}
        with replacing(self.folder / _MANIFEST) as out:
            out.write(json.dumps(rows, indent=1).encode())
        old, self.state = self.state, state
        for folder in {s.folder for s in old.snapshots} - {s.folder for s in state.snapshots}:
            with contextlib.suppress(OSError):  # removed at the next start
                remove(self.folder / folder)

    def _load(self) -> None:
        path = self.folder / _MANIFEST
        try:
            rows = json.loads(path.read_text())
            run, k, form = rows.pop("run"), rows.pop("k"), rows.pop("format")
            rows["snapshots"] = tuple(KeptCheckpoint(**row) for row in rows["snapshots"])
            for name in ("passed", "abandoned"):
                rows[name] = {int(n): str(signature) for n, signature in rows[name].items()}
            state = WindowState(**rows)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise StoreError(
                f"{path}: the manifest of the window is damaged ({error!r}). Restore it, or "
                f"remove {self.folder} to start a new window."
            ) from None
        if (run, form) != (self._run, 1):
            raise StoreError(
                f"{self.folder}: this is the window of {run}, not of {self._run}. Write elsewhere, "
                "or remove this folder to start a new window."
            )
        if k != self._k:  # checkpoints that were too old may be needed now
            kept = state.snapshots[-self._k :]
            self.commit(replace(state, snapshots=kept, filled=False, passed={}))
        else:
            self.state = state

    def _location(self, folder: str, file: str) -> LocalPath:
        location = LocalPath(self.folder / folder)
        return location.child(file) if file else location

    def _is_intact(self, snapshot: KeptCheckpoint) -> bool:
        folder = self._location(snapshot.folder, "")
        try:
            return stamps_of(folder.child(name) for name in snapshot.kept) == snapshot.kept
        except OSError:
            return False

    def _free_name(self, name: str) -> str:
        names = [name, *(f"{name}.{i}" for i in range(2, self._k + 3))]
        used = {s.folder for s in self.state.snapshots}
        free = next(n for n in names if n not in used)
        remove(self.folder / free)  # left by an attempt that failed
        return free

    def _acquire(self) -> FolderLock:
        """Lock the folder; the lock ends with the process, however that ends."""
        if self.folder.is_dir():
            names = {path.name for path in self.folder.iterdir()}
            if names and not names & {LOCK, _MANIFEST}:
                raise StoreError(
                    f"{self.folder}: the window would be stored here, but this folder already "
                    "exists and is not a window. Write elsewhere, or move it away."
                )
        busy = "another `lawa watch` is writing to the same output. Stop it, or use another output."
        return FolderLock(self.folder, busy)

    def _clean_up(self) -> None:
        """Remove what a killed process left unfinished."""
        used = {s.folder for s in self.state.snapshots}
        for path in self.folder.iterdir():
            if _OURS.fullmatch(path.name) and path.name not in used:
                remove(path)
