"""Snapshots on disk: crash-safe, bounded, and taken over by a later process.

Each snapshot is a plain safetensors file. `manifest.json` names the files of the window; it is
replaced atomically after those files are on disk, and only then are old files removed. So a
process that is killed at any moment leaves either the window before the snapshot or the one after
it. With several ranks, each in a folder of its own, ranks that are ahead can go back.
"""

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from torch_lawa.checkpoints.formats.safetensors import Header, read_header
from torch_lawa.checkpoints.formats.safetensors_torch import spec_of
from torch_lawa.checkpoints.storage.atomic import replacing, target_of
from torch_lawa.checkpoints.storage.folder_lock import FolderLock
from torch_lawa.checkpoints.storage.paths import is_url
from torch_lawa.errors import ConfigError, StoreError
from torch_lawa.ranks.agreement import rank_and_size
from torch_lawa.stores.base import (
    Content,
    FlatLayout,
    Held,
    Notes,
    Snapshot,
    Store,
)
from torch_lawa.stores.disk_files import MappedFile, Staging, map_unguarded
from torch_lawa.stores.disk_manifest import (
    MANIFEST,
    Manifest,
    ManifestRow,
    entries,
    is_snapshot_file,
    snapshot_files,
)
from torch_lawa.stores.disk_ranks import SPARE, RankContents, Ranks, agree
from torch_lawa.stores.disk_writer import Job, WriterThread
from torch_lawa.stores.memory import idle_memory

__all__ = ["DiskStore"]

_BUSY = (
    "another averager, in this process or another one, is using this snapshot folder. Give each "
    "run a folder of its own. If several ranks share one, initialise torch.distributed before "
    "making the averager."
)


@dataclass(frozen=True)
class _OnDisk(Held):
    """The files of a window, and the job that is writing the newest of them."""

    rows: tuple[ManifestRow, ...] = ()  # the window, the spare ones, and the evicted one
    surplus: frozenset[str] = frozenset()  # other files, to be removed with the next put
    run: int = 0
    began: int = 0
    age: int = 0
    staging: tuple[Staging, ...] = ()  # for averaged and kept tensors
    job: Job | None = None

    def row(self, snapshot: Snapshot) -> ManifestRow:
        """The row of a snapshot."""
        return next(row for row in self.rows if row.snapshot.index == snapshot.index)

    def names(self) -> set[str]:
        """The files of all rows."""
        return {name for row in self.rows for name in row.files}


class DiskStore(Store):
    """The window as files in a folder of its own.

    A snapshot is copied to host memory (asynchronously from a GPU) and written from there by a
    thread; the next snapshot waits for it. A failed write raises in the next call. After
    `averager.wait()` the snapshot is on disk.

    If `torch.distributed` is initialised when the averager is made, every rank must make one on the
    same folder (a collective call), and each keeps its files in a sub-folder such as
    `rank-00003-of-00008`. After a crash they resume with the newest snapshots that all of them
    have; for that, each keeps two more than k. With `per_process=True` the averager of this process
    is independent of the other ranks.

    >>> import tempfile, torch
    >>> from torch_lawa import LatestWeightAverager
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     averager = LatestWeightAverager(k=2, store=DiskStore(folder))
    ...     averager.collect({"w": torch.ones(3)})
    ...     averager.wait()
    ...     del averager  # the process ends; a later one takes over
    ...     len(LatestWeightAverager(k=2, store=DiskStore(folder)))
    1
    """

    packed = True

    def __init__(self, folder: str | os.PathLike[str], *, per_process: bool = False) -> None:
        super().__init__()
        if is_url(os.fspath(folder)):
            raise ConfigError(f"{folder}: a DiskStore needs a folder on a local or mounted disk.")
        # Absolute: the process may change its directory.
        self.folder = self._root = Path(folder).absolute()
        self.per_process = per_process
        self._ranks = Ranks(0, 1)
        self._writer = WriterThread()
        self._files = _OnDisk()
        self._serial = 0  # of the newest file; never used twice
        self._maps: dict[str, MappedFile] = {}
        self._lock: FolderLock | None = None

    @property
    def held(self) -> Held:
        """The window on disk, or about to be."""
        return self._files

    def find(self, k: int) -> Notes | None:
        """Lock the folder, take over the window its manifest names, and remove other files.

        Ranks keep only the snapshots that all of them have: this is a collective call.
        """
        try:
            manifest = self._look()
        except Exception as error:
            self._ranks.exchange(str(error) or repr(error))  # the other ranks wait for this one
            raise
        agreed = agree(self._ranks.exchange(RankContents.of(manifest)), self._root)
        rows = tuple(row for row in manifest.rows if row.mark in agreed.snapshots)
        notes = rows[-1].notes if rows else None
        kept = (rows[-1].kept if rows else None) or manifest.kept
        self._serial = manifest.serial
        files = _OnDisk(k=k, run=agreed.run, began=manifest.began, age=manifest.age)
        if rows and notes is not None:
            files = replace(
                files,
                averaged=manifest.averaged,
                kept=kept,
                snapshots=tuple(row.snapshot for row in rows[-k:]),
                notes=notes,
                rows=rows,
                staging=(Staging(manifest.averaged), Staging(kept)),
            )
        surplus = {name for row in manifest.rows for name in row.files} - files.names()
        self._files = replace(files, surplus=frozenset(surplus))
        self._remove_strays()
        return notes

    def open(self, averaged: FlatLayout, kept: FlatLayout, k: int) -> None:
        """Begin a new window; the files of the old one are removed."""
        self._lock_folder()
        self.wait()
        notes, run = self._files.notes, self._files.run
        staging = Staging(averaged), Staging(kept)
        self._begin(_OnDisk(averaged, kept, k, notes=notes, run=run, began=run, staging=staging))

    def retarget(self, averaged: FlatLayout, kept: FlatLayout) -> bool:
        """Copy later snapshots from the devices of these layouts."""
        self.wait()  # the thread may still be writing from the old memory
        staging = Staging(averaged), Staging(kept)
        self._files = replace(self._files, averaged=averaged, kept=kept, staging=staging)
        return True

    def put(self, content: Content, notes: Notes) -> None:
        """Copy the snapshot to host memory and let the thread write it."""
        self._lock_folder()
        self.wait()
        now = self._files
        if content.kept_layout is not None and content.kept_layout != now.kept:
            staging = now.staging[0], Staging(content.kept_layout)
            now = replace(now, kept=content.kept_layout, staging=staging)
        for part, tensors in zip(now.staging, (content.averaged, content.kept), strict=True):
            part.copy(tensors)
        row = self._new_row(content.snapshot, now.run, now.kept, notes)
        leaving = now.snapshots[0] if len(now.snapshots) == now.k else None
        evicted = leaving if self.keep_evicted else None
        spare = self._spare
        rows = [*now.rows, row][-(now.k + spare) :]
        for i, older in enumerate(rows[: -(1 + spare)]):
            rows[i] = older.without_kept()
        listed = tuple(rows)
        if evicted is not None and evicted not in [r.snapshot for r in rows]:
            rows.insert(0, now.row(evicted).without_kept())
        after = replace(
            now,
            snapshots=(*now.snapshots, content.snapshot)[-now.k :],
            evicted=evicted,
            notes=notes,
            rows=tuple(rows),
            surplus=frozenset(),
            age=now.age + 1,
        )
        manifest = self._manifest(after, listed)

        def work() -> None:
            try:
                for part, name in zip(after.staging, row.files, strict=True):
                    part.write(self.folder / name, row.snapshot)
                self._write_manifest(manifest)
            except BaseException:
                if not manifest.is_in(self.folder):
                    self._remove(row.files)
                raise

        self._commit(after, work)

    def refill(
        self,
        averaged: FlatLayout,
        kept: FlatLayout,
        k: int,
        contents: Sequence[Content],
        notes: Notes,
        *,
        relaid: bool = False,
    ) -> None:
        """Write the whole new window first; then one new manifest makes it the window."""
        self._lock_folder()
        self.wait()
        now = self._files
        run = now.run if relaid else now.run + 1
        staging = Staging(averaged), Staging(kept)
        after = _OnDisk(averaged, kept, k, notes=notes, run=run, began=run, staging=staging)
        if relaid:
            after = replace(after, window=now.window, began=now.began, age=now.age)
        if not contents:
            self._begin(after)
            return
        # Of snapshots that are only laid out anew: those that can be the newest, too.
        ends = {row.snapshot: row for row in now.rows if relaid and row.kept is not None}
        runs = {row.snapshot: row.run for row in now.rows if relaid}
        rows, first = [], self._serial + 1
        try:
            for i, content in enumerate(contents, 1):
                snapshot, own, layout = content.snapshot, content.kept, kept
                end = ends.get(snapshot)
                row = self._new_row(snapshot, runs.get(snapshot, run), kept, notes)
                if end is not None and end.kept_file is not None and end.kept is not None:
                    views = end.kept.views(self._mapped(end.kept_file, end.kept))
                    own = {name: views[name] for name in own}
                    layout = kept if i == len(contents) else FlatLayout.of(own, packed=True)
                    row = replace(row, kept=layout, notes=end.notes or notes)
                elif i < len(contents):
                    row = row.without_kept()
                rows.append(row)
                self._write_now(row.file, averaged, content.averaged, snapshot)
                if row.kept_file is not None:
                    self._write_now(row.kept_file, layout, own, snapshot)
        except BaseException as error:
            self._remove(
                name for serial in range(first, self._serial + 1) for name in snapshot_files(serial)
            )
            if isinstance(error, OSError):
                raise self._not_written(error) from error
            raise
        after = replace(
            after,
            snapshots=tuple(content.snapshot for content in contents),
            rows=tuple(rows),
        )
        manifest = self._manifest(after, after.rows)
        self._commit(after, lambda: self._write_manifest(manifest))
        self.wait()

    def flats(self, snapshot: Snapshot) -> list[Tensor]:
        """The snapshot's file, memory-mapped."""
        self.wait()
        return self._mapped(self._files.row(snapshot).file, self._files.averaged)

    def kept_flats(self) -> list[Tensor]:
        """The kept tensors' file, memory-mapped."""
        self.wait()
        return self._mapped(self._kept_file, self._files.kept)

    def shared_flats(self, snapshot: Snapshot) -> list[Tensor]:
        """The snapshot's file, memory-mapped on its own."""
        self.wait()
        return self._map_unguarded(self._files.row(snapshot).file, self._files.averaged)

    def shared_kept_flats(self) -> list[Tensor]:
        """The kept tensors' file, memory-mapped on its own."""
        self.wait()
        return self._map_unguarded(self._kept_file, self._files.kept)

    @property
    def _kept_file(self) -> str:
        found = self._files.row(self._files.snapshots[-1]).kept_file
        assert found is not None
        return found

    def _map_unguarded(self, name: str, layout: FlatLayout) -> list[Tensor]:
        return map_unguarded(self.folder / name, self._verify(name, layout), layout)

    def check_read(self) -> None:
        """Raise if a file that is mapped was truncated."""
        for name in list(self._maps):
            self._require_whole(name)

    def wait(self) -> None:
        """Return when the last snapshot is on disk; raise if it could not be written."""
        job = self._files.job
        if job is None:
            return
        self._lock_folder()
        if not job.done:
            self._writer.submit(job)  # if an interrupt prevented it
            job.wait()
        self._files = replace(self._files, job=None)
        error = job.error
        try:
            if isinstance(error, OSError):
                raise self._not_written(error) from error
            if error is not None:
                raise error
        finally:
            del job, error  # they may refer to this frame: the folder would stay locked

    def idle_memory(self) -> AbstractContextManager[Mapping[str, Tensor]]:
        """The staging buffers."""
        return idle_memory([part.stage for part in self._files.staging])

    def __reduce__(self) -> tuple[Any, ...]:
        """Raises: a folder has one owner."""
        raise StoreError(
            f"{self.folder}: an averager with a window on disk cannot be copied or pickled, since "
            "a folder has one owner. Make another averager with a folder of its own and call "
            "load_state_dict(averager.state_dict()) on it."
        )

    def describe(self) -> str:
        """The folder."""
        return f"files in {self.folder}"

    @property
    def _spare(self) -> int:
        """How many snapshots this rank must be able to go back."""
        return SPARE if self._ranks.size > 1 else 0

    def _look(self) -> Manifest:
        """The manifest of this rank's folder, after checking every file that it names."""
        self._lock_folder()
        self.wait()  # the averager that had this store before may have just collected
        manifest = Manifest.read(self.folder)
        for row in manifest.rows:
            self._verify(row.file, manifest.averaged)
            if row.kept_file is not None:
                self._verify(row.kept_file, row.kept or manifest.kept)
        return manifest

    def _begin(self, after: _OnDisk) -> None:
        """Make an empty window the present one."""
        manifest = self._manifest(after, ())

        def work() -> None:
            if self._ranks.size > 1:
                # Written, not removed: ranks that were killed before they did it must see it.
                self._write_manifest(manifest)
            else:
                (self.folder / MANIFEST).unlink(missing_ok=True)

        self._commit(after, work)
        self.wait()
        self._remove_strays()

    def _commit(self, after: _OnDisk, work: Callable[[], None]) -> None:
        """Make `after` the present window, and let the thread do what makes it so on disk.

        If that fails, the thread puts the window before it back.
        """
        before = self._files
        gone = (before.names() | before.surplus) - after.names()

        def run() -> None:
            try:
                work()
            except BaseException:
                self._files = replace(before, job=job)
                raise
            self._remove(gone)

        job = Job(run)
        self._files = replace(after, job=job)
        self._writer.submit(job)

    def _not_written(self, error: OSError) -> StoreError:
        return StoreError(
            f"{self.folder}: the last snapshot could not be written ({error}). The window before "
            "it is intact. Free space or repair the folder, then try again."
        )

    def _new_row(self, snapshot: Snapshot, run: int, kept: FlatLayout, notes: Notes) -> ManifestRow:
        self._serial += 1
        return ManifestRow(snapshot, run, *snapshot_files(self._serial), kept, notes)

    def _write_now(
        self, name: str, layout: FlatLayout, tensors: Mapping[str, Tensor], snapshot: Snapshot
    ) -> None:
        staging = Staging(layout.on_host())
        staging.copy(tensors)
        staging.write(self.folder / name, snapshot)

    def _write_manifest(self, manifest: Manifest) -> None:
        with replacing(self.folder / MANIFEST) as out:
            out.write(manifest.text().encode())

    def _remove(self, names: Iterable[str]) -> None:
        for name in names:
            self._maps.pop(name, None)
            with contextlib.suppress(OSError):
                (self.folder / name).unlink()

    def _manifest(self, files: _OnDisk, rows: tuple[ManifestRow, ...]) -> Manifest:
        return Manifest(
            serial=self._serial,
            run=files.run,
            began=files.began,
            age=files.age,
            rows=rows,
            averaged=files.averaged,
            kept=files.kept,
        )

    def _mapped(self, name: str, layout: FlatLayout) -> list[Tensor]:
        if name in self._maps:
            self._require_whole(name)
        else:
            path, header = self.folder / name, self._verify(name, layout)
            self._maps[name] = MappedFile(path, header, layout)
        return self._maps[name].flats

    def _require_whole(self, name: str) -> None:
        try:
            self._maps[name].require_whole()
        except StoreError:
            del self._maps[name]  # it is mapped again the next time
            raise

    def _verify(self, name: str, layout: FlatLayout) -> Header:
        path = self.folder / name
        if Path(name).name != name or not path.is_file():
            raise StoreError(
                f"{path}: the manifest of the snapshot folder names this file, but it is missing. "
                "Restore it, or remove the folder to begin a new window."
            )
        header = read_header(path)
        expected = {n: spec_of(n, dtype, shape) for n, dtype, shape in entries(layout)}
        if header.tensors != expected:
            raise StoreError(
                f"{path}: has other tensors than the manifest of the snapshot folder says. Restore "
                "it, or remove the folder to begin a new window."
            )
        return header

    def _lock_folder(self) -> None:
        """Choose this rank's folder and lock it until the process ends."""
        if self._lock is not None:
            self._lock.check()
            return
        if not self.per_process:
            self._ranks = Ranks(*rank_and_size())
        self.folder = self._ranks.folder(self._root)
        self._ranks.refuse_other_windows(self._root)
        self._lock = FolderLock(self.folder, _BUSY)

    def _remove_strays(self) -> None:
        """Remove files that a killed process left half-written, and files outside the window."""
        used = self._files.names() | self._files.surplus
        for path in self.folder.iterdir():
            name, target = path.name, target_of(path.name)
            half_written = target == MANIFEST or (target is not None and is_snapshot_file(target))
            stray = half_written or is_snapshot_file(name)
            if stray and name not in used and not path.is_dir():
                path.unlink(missing_ok=True)
