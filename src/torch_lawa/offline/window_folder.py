"""The window of a watched run on disk: checkpoints that stay when the trainer deletes its own.

A folder for each snapshot, mostly hard links, and a manifest that says which count. The manifest
is replaced in one step, so a process that is killed leaves the window before or the window after;
what the manifest does not name is swept up.
"""

import contextlib
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from torch_lawa.checkpoints.find.select import FoundCheckpoint
from torch_lawa.checkpoints.formats.registry import open_checkpoint
from torch_lawa.checkpoints.storage.atomic import remove, replacing, sync_folder
from torch_lawa.checkpoints.storage.paths import LocalPath
from torch_lawa.errors import StoreError
from torch_lawa.offline.snapshots import Source, keep_files, signature_of, stamps_of

__all__ = ["Snapshot", "State", "WindowFolder"]

_MANIFEST, _LOCK, _MADE = "window.json", "lock", "made"
_OURS = re.compile(rf"(step|epoch)-\d+(\.\d+)?|{_MADE}|{re.escape(_MANIFEST)}\..*\.partial")


@dataclass(frozen=True)
class Snapshot:
    """A checkpoint that was taken: what the run had, and what we have of it."""

    number: int  # its step or epoch, whichever the run is ordered by
    step: int | None
    epoch: int | None
    folder: str  # in the window's folder
    file: str  # in that folder; empty where the folder is the checkpoint
    source: str  # where the run had it
    signature: str  # of all files it had there
    weights: dict[str, str]  # stamps of its weights there, by file
    kept: dict[str, str]  # and of ours
    written: float | None  # when the last of them was written
    copied: bool  # rather than linked

    @property
    def label(self) -> str:
        """What to call it."""
        return FoundCheckpoint(LocalPath(self.source), self.step, self.epoch).label


@dataclass(frozen=True)
class State:
    """What survives the process. Numbers are steps or epochs, with signatures where they key."""

    snapshots: tuple[Snapshot, ...] = ()  # oldest first
    by: str = ""  # "step" or "epoch"
    filled: bool = False  # whether it was full: then all lower numbers are in `passed`
    passed: Mapping[int, str] = field(default_factory=dict)  # too old for the window
    abandoned: Mapping[int, str] = field(default_factory=dict)  # of branches the run went back from
    left_at: int = -1  # the greatest number of such a branch: averages up to it are out of date
    averaged: str = ""  # of what the last average was made


class WindowFolder:
    """The folder, locked for this process; what changes in it changes through `commit`.

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
        self.state = State()
        try:
            if not self.is_new:
                self._load()
            self._sweep()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "WindowFolder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let another process have it."""
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1

    def found(self, snapshot: Snapshot) -> FoundCheckpoint:
        """A snapshot as something that can be planned with."""
        return FoundCheckpoint(
            self._location(snapshot.folder, snapshot.file), snapshot.step, snapshot.epoch
        )

    def changed(self) -> list[Snapshot]:
        """Snapshots whose files are not as they were taken, or not there."""
        return [s for s in self.state.snapshots if not self._is_intact(s)]

    def take(
        self,
        source: Source,
        number: int,
        by: str,
        *,
        key: str | None,
        stopped: Callable[[], bool],
    ) -> Snapshot | None:
        """Keep a checkpoint; it counts once it is committed. None where it changed meanwhile."""
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
        return Snapshot(
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

    def commit(self, state: State) -> None:
        """Make `state` the window; then remove what only the one before it needed."""
        rows = {**asdict(state), "format": 1, "run": self._run, "k": self._k}
        with replacing(self.folder / _MANIFEST) as out:
            out.write(json.dumps(rows, indent=1).encode())
        old, self.state = self.state, state
        for folder in {s.folder for s in old.snapshots} - {s.folder for s in state.snapshots}:
            with contextlib.suppress(OSError):  # the next start sweeps it up
                remove(self.folder / folder)

    def _load(self) -> None:
        path = self.folder / _MANIFEST
        try:
            rows = json.loads(path.read_text())
            run, k, form = rows.pop("run"), rows.pop("k"), rows.pop("format")
            rows["snapshots"] = tuple(Snapshot(**row) for row in rows["snapshots"])
            for name in ("passed", "abandoned"):
                rows[name] = {int(n): str(signature) for n, signature in rows[name].items()}
            state = State(**rows)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise StoreError(
                f"{path}: the manifest of the window is damaged ({error!r}). Restore it, or "
                f"remove {self.folder} to begin a new window."
            ) from None
        if (run, form) != (self._run, 1):
            raise StoreError(
                f"{self.folder}: holds the window of {run}, not of {self._run}. Write elsewhere, "
                "or remove that folder to begin a new window."
            )
        if k != self._k:  # what was too old may not be now
            kept = state.snapshots[-self._k :]
            self.commit(replace(state, snapshots=kept, filled=False, passed={}))
        else:
            self.state = state

    def _location(self, folder: str, file: str) -> LocalPath:
        # A link to a file that the trainer may rewrite, and so cut off, while it is read.
        location = LocalPath(self.folder / folder, mapped=False)
        return location.child(file) if file else location

    def _is_intact(self, snapshot: Snapshot) -> bool:
        folder = self._location(snapshot.folder, "")
        try:
            return stamps_of(folder.child(name) for name in snapshot.kept) == snapshot.kept
        except OSError:
            return False

    def _free_name(self, name: str) -> str:
        names = [name, *(f"{name}.{i}" for i in range(2, self._k + 3))]
        used = {s.folder for s in self.state.snapshots}
        free = next(n for n in names if n not in used)
        remove(self.folder / free)  # half-taken by an attempt that failed
        return free

    def _acquire(self) -> int:
        """One process at a time: the lock goes with the process, however it ends."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            names = {path.name for path in self.folder.iterdir()}
            if names and not names & {_LOCK, _MANIFEST}:
                raise StoreError(
                    f"{self.folder}: the window would be kept here, and there is something else. "
                    "Write elsewhere, or move it away."
                )
            lock = os.open(self.folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise StoreError(f"{self.folder}: cannot be used for a window ({error}).") from error
        with contextlib.suppress(ImportError):
            import fcntl

            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(lock)
                raise StoreError(
                    f"{self.folder}: another `lawa watch` is writing to the same output. Stop "
                    "that one, or give this one an output of its own."
                ) from None
        return lock

    def _sweep(self) -> None:
        """Remove what a killed process left half-done."""
        used = {s.folder for s in self.state.snapshots}
        for path in self.folder.iterdir():
            if _OURS.fullmatch(path.name) and path.name not in used:
                remove(path)
