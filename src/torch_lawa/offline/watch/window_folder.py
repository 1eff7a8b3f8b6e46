"""The window of a watched run on disk, independent of what the trainer deletes.

It has one folder per checkpoint, mostly hard links, and a manifest that lists them. The manifest is
replaced atomically, so a killed process leaves the window before or after a change; folders that
the manifest does not name are removed at the next start.
"""

import contextlib
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from torch_lawa.checkpoints.find.discovery import FoundCheckpoint
from torch_lawa.checkpoints.formats.registry import open_checkpoint
from torch_lawa.checkpoints.storage.atomic import TEMPORARY, remove, replacing, sync_folder
from torch_lawa.checkpoints.storage.folder_lock import LOCK, FolderLock
from torch_lawa.checkpoints.storage.paths import LocalPath, parse_location
from torch_lawa.errors import LawaError, StoreError
from torch_lawa.offline.watch.checkpoint_files import (
    LiveCheckpoint,
    keep_files,
    signature_of,
    stamps_of,
)
from torch_lawa.offline.watch.window_manifest import (
    KEPT_FOLDER,
    KeptCheckpoint,
    WindowManifest,
    WindowState,
)

__all__ = ["WindowFolder"]

_MANIFEST, _MADE = "window.json", "made"
_UNFINISHED = rf"{re.escape(_MANIFEST)}\.[0-9a-f]+{re.escape(TEMPORARY)}"
_OURS = re.compile(rf"{KEPT_FOLDER}|{_MADE}|{_UNFINISHED}")


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
        """Release the lock. A window that was never used leaves no folder."""
        if not (self.folder / _MANIFEST).exists():
            with contextlib.suppress(OSError):
                (self.folder / LOCK).unlink()
                self.folder.rmdir()
        self._lock.release()

    def discard(self) -> None:
        """Remove what the window holds, unless a checkpoint exists only here by now."""
        with contextlib.suppress(OSError, LawaError):
            if all(parse_location(s.source).exists() for s in self.state.snapshots):
                (self.folder / _MANIFEST).unlink(missing_ok=True)
                self.state = WindowState()
                self._clean_up()

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
        if not (self.folder / _MANIFEST).exists():
            self.commit(self.state)  # from here on this is known to be a window
        try:
            path.mkdir()
            linked = keep_files(source, path, stopped)
            if signature_of(found.location) != source.signature:
                remove(path)
                return None
            with open_checkpoint(self._location(folder, source.file), key=key) as checkpoint:
                kept = stamps_of(checkpoint.files, LocalPath(path))
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
        with replacing(self.folder / _MANIFEST) as out:
            out.write(WindowManifest(self._run, self._k, state).text().encode())
        old, self.state = self.state, state
        for folder in {s.folder for s in old.snapshots} - {s.folder for s in state.snapshots}:
            with contextlib.suppress(OSError):  # removed at the next start
                remove(self.folder / folder)

    def _load(self) -> None:
        path = self.folder / _MANIFEST
        try:
            found = WindowManifest.read(path)
        except ValueError as error:
            raise StoreError(
                f"{path}: the manifest of the window is damaged ({error}). Restore it, or "
                f"remove {self.folder} to start a new window."
            ) from None
        state = found.state
        if found.run != self._run:
            raise StoreError(
                f"{self.folder}: this is the window of {found.run}, not of {self._run}. Write "
                "elsewhere, or remove this folder to start a new window."
            )
        if found.k != self._k:  # checkpoints that were too old may be needed now
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
            kept = [folder.child(name) for name in snapshot.kept]
            return stamps_of(kept, folder) == snapshot.kept
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
            first = {name for name in names if name == LOCK or re.fullmatch(_UNFINISHED, name)}
            if _MANIFEST not in names and names - first:
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
