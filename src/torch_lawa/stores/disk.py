"""Snapshots on disk: crash-safe, bounded, and taken over by a later process.

Each snapshot is a plain safetensors file. `manifest.json` names the files of the window; it is
replaced atomically after those files are on disk, and only then are old files removed. So a
process that is killed at any moment leaves either the window before the snapshot or the one after
it. With several ranks, each in a folder of its own, ranks that are ahead can go back.
"""

import contextlib
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from torch_lawa.checkpoints.formats.safetensors import Header, read_header
from torch_lawa.checkpoints.formats.safetensors_torch import map_flat, spec_of, write_flat
from torch_lawa.checkpoints.storage.atomic import TEMPORARY, replacing
from torch_lawa.checkpoints.storage.folder_lock import FolderLock
from torch_lawa.errors import StoreError
from torch_lawa.stores.base import (
    Buffer,
    Content,
    FlatLayout,
    FoundWindow,
    Notes,
    Snapshot,
    Store,
)
from torch_lawa.stores.disk_manifest import MANIFEST, Manifest, ManifestRow, entries
from torch_lawa.stores.disk_ranks import SPARE, RankContents, Ranks, agree
from torch_lawa.stores.memory import Stage, idle_memory

__all__ = ["DiskStore"]

_SUFFIX = ".safetensors"

_BUSY = (
    "another averager, in this process or another one, is using this snapshot folder. Give each "
    "run a folder of its own. If several ranks share one, initialise torch.distributed before "
    "making the averager."
)


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
        self.folder = self._root = Path(folder)
        self.per_process = per_process
        self._ranks = Ranks(0, 1)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="lawa-disk")
        self._pending: Future[None] | None = None
        self._rows: dict[int, ManifestRow] = {}  # by snapshot index: the window and the spare ones
        self._surplus: set[str] = set()  # in the manifest, to be removed with the next put
        self._serial = self._run = self._began = self._age = 0
        self._maps: dict[str, list[Tensor]] = {}
        self._lock: FolderLock | None = None

    def find(self, k: int) -> FoundWindow | None:
        """Lock the folder, take over the window its manifest names, and remove other files.

        Ranks keep only the snapshots that all of them have: this is a collective call.
        """
        try:
            manifest = self._look()
        except Exception as error:
            self._ranks.exchange(str(error) or repr(error))  # the other ranks wait for this one
            raise
        agreed = agree(self._ranks.exchange(RankContents.of(manifest)), self._root)
        rows = [row for row in manifest.rows if row.mark in agreed.snapshots]
        self._serial, self._run = manifest.serial, agreed.run
        self._began, self._age = manifest.began, manifest.age
        self._averaged, self._kept, self._k = manifest.averaged, manifest.kept, k
        self._rows = {row.snapshot.index: row for row in rows}
        self.snapshots = [row.snapshot for row in rows[-k:]]
        self._surplus = {name for row in manifest.rows for name in row.files} - self._used()
        self.retarget(manifest.averaged, manifest.kept)
        self._sweep()
        if not rows or rows[-1].notes is None:
            return None
        return FoundWindow(manifest.averaged, manifest.kept, rows[-1].notes)

    def open(self, averaged: FlatLayout, kept: FlatLayout, k: int) -> None:
        """Begin a new window; the files of the old one are removed."""
        self._settle()
        self._averaged, self._kept, self._k = averaged, kept, k
        self._begin()
        self.retarget(averaged, kept)

    def retarget(self, averaged: FlatLayout, kept: FlatLayout) -> bool:
        """Copy later snapshots from the devices of these layouts."""
        self.wait()  # the thread may still be writing from the old stages
        self._averaged, self._kept = averaged, kept
        self._stages = [Stage(averaged), Stage(kept)]
        self._staged: list[list[Buffer]] | None = None
        return True

    def put(self, content: Content, notes: Notes) -> None:
        """Copy the snapshot to host memory and let the thread write it."""
        self._put(content, notes, self._run, num_ends=1 + self._spare, commit=True)

    def refill(
        self,
        averaged: FlatLayout,
        kept: FlatLayout,
        k: int,
        contents: list[Content],
        notes: Notes,
        *,
        relaid: bool = False,
    ) -> None:
        """Write the whole new window first; then one new manifest makes it the window."""
        self._settle()
        self.wait()
        self._run += not relaid
        old_names, before = self._used() | self._surplus, dict(vars(self))
        rows: dict[int, ManifestRow] = {}
        ends: dict[int, Mapping[str, Tensor]] = {}
        if relaid:
            # The notes of each snapshot, and its kept tensors if it can be the newest.
            rows = self._rows
            ends = {
                index: self._kept.views(self._mapped(row.kept_file, self._kept))
                for index, row in rows.items()
                if row.kept_file is not None
            }
            self._age -= len(contents)
        else:
            self._began, self._age = self._run, -len(contents)
        num_ends = max(1, sum(content.snapshot.index in ends for content in contents))
        self._averaged, self._kept, self._k = averaged, kept, k
        self._forget()
        self.retarget(averaged, kept)
        try:
            while contents:
                content = contents.pop(0)
                index, run = content.snapshot.index, self._run
                if index in rows:
                    run, notes = rows[index].run, rows[index].notes or notes
                if index in ends:
                    own = {name: ends[index][name] for name in content.kept}
                    content = replace(content, kept=own)
                self._put(content, notes, run, num_ends=num_ends, commit=not contents)
            self.wait()
        except BaseException:
            with contextlib.suppress(Exception):
                self.wait()  # after an interrupt the thread may still be working
            self._remove(self._used() - old_names)
            vars(self).update(before, _serial=self._serial)
            raise
        self._remove(old_names - self._used())

    def flats(self, snapshot: Snapshot) -> list[Tensor]:
        """The snapshot's file, memory-mapped."""
        self.wait()
        return self._mapped(self._rows[snapshot.index].file, self._averaged)

    def kept_flats(self) -> list[Tensor]:
        """The kept tensors' file, memory-mapped."""
        self.wait()
        kept_file = self._rows[self.snapshots[-1].index].kept_file
        assert kept_file is not None
        return self._mapped(kept_file, self._kept)

    def wait(self) -> None:
        """Return when the last snapshot is on disk; raise if it could not be written."""
        if self._pending is not None:
            self._settle()
        pending, self._pending = self._pending, None
        if pending is not None:
            try:
                pending.result()
            except OSError as error:
                raise StoreError(
                    f"{self.folder}: the last snapshot could not be written ({error}). The window "
                    "before it is intact. Free space or repair the folder, then collect again."
                ) from error
            finally:
                del (
                    pending
                )  # it refers to the error and so to this frame: the lock would not be freed

    def idle_memory(self) -> AbstractContextManager[Mapping[str, Tensor]]:
        """The staging buffers."""
        return idle_memory(self._stages)

    def clear(self) -> None:
        """Drop every snapshot and its file."""
        self._run += 1
        self._begin()

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
        self._settle()
        manifest = Manifest.read(self.folder)
        for row in manifest.rows:
            self._verify(row.file, manifest.averaged)
            if row.kept_file is not None:
                self._verify(row.kept_file, manifest.kept)
        return manifest

    def _begin(self) -> None:
        """An empty window, in memory and on disk."""
        self._settle()
        self.wait()
        self._began, self._age = self._run, 0
        self._forget()
        if self._ranks.size > 1:
            # Written, not removed: ranks that were killed before they did the same must see it.
            self._write_manifest(self._manifest(()))
        else:
            (self.folder / MANIFEST).unlink(missing_ok=True)
        self._sweep()

    def _forget(self) -> None:
        self.snapshots, self.evicted = [], None
        self._rows, self._maps, self._surplus = {}, {}, set()

    def _put(
        self, content: Content, notes: Notes, run: int, *, num_ends: int, commit: bool
    ) -> None:
        self._settle()
        self.wait()
        if self._staged is None:
            self._staged = [stage.allocate() for stage in self._stages]
        for stage, buffers, tensors in zip(
            self._stages, self._staged, (content.averaged, content.kept), strict=True
        ):
            stage.copy(buffers, tensors)
        before = {
            name: vars(self)[name] for name in ("snapshots", "evicted", "_rows", "_surplus", "_age")
        }
        old_names = self._used() | self._surplus
        self._serial += 1
        self._age += 1
        row = ManifestRow(
            content.snapshot,
            run,
            f"window-{self._serial:08d}{_SUFFIX}",
            f"kept-{self._serial:08d}{_SUFFIX}",
            notes,
        )
        leaving = self.snapshots[0] if len(self.snapshots) == self._k else None
        self.evicted = leaving if self.keep_evicted else None
        self.snapshots = [*self.snapshots, content.snapshot][-self._k :]
        rows = [*self._rows.values(), row][-(self._k + self._spare) :]
        for i, older in enumerate(rows[:-num_ends]):
            rows[i] = replace(older, kept_file=None, notes=None)
        manifest = self._manifest(rows) if commit else None
        if self.evicted is not None and self.evicted not in [r.snapshot for r in rows]:
            rows.insert(0, replace(self._rows[self.evicted.index], kept_file=None, notes=None))
        self._rows, self._surplus = {r.snapshot.index: r for r in rows}, set()
        gone = old_names - self._used()
        self._pending = self._writer.submit(self._write, row, manifest, gone, before)

    def _write(
        self, row: ManifestRow, manifest: Manifest | None, gone: set[str], before: dict[str, Any]
    ) -> None:
        """In the thread: write the files, then the manifest, then remove old files."""
        assert self._staged is not None
        try:
            labels = {"index": str(row.snapshot.index), "step": str(row.snapshot.step)}
            for stage, buffers, layout, file in zip(
                self._stages, self._staged, (self._averaged, self._kept), row.files, strict=True
            ):
                stage.wait()
                flats = [buffer.flat for buffer in buffers]
                write_flat(self.folder / file, entries(layout), flats, labels)
            if manifest is not None:
                self._write_manifest(manifest)
        except BaseException:
            vars(self).update(before)
            self._remove(set(row.files))
            raise
        self._remove(gone)

    def _write_manifest(self, manifest: Manifest) -> None:
        with replacing(self.folder / MANIFEST) as out:
            out.write(manifest.text().encode())

    def _remove(self, names: set[str]) -> None:
        for name in names:
            self._maps.pop(name, None)
            with contextlib.suppress(OSError):
                (self.folder / name).unlink()

    def _manifest(self, rows: Sequence[ManifestRow]) -> Manifest:
        return Manifest(
            serial=self._serial,
            run=self._run,
            began=self._began,
            age=self._age,
            rows=tuple(rows),
            averaged=self._averaged,
            kept=self._kept,
        )

    def _used(self) -> set[str]:
        return {name for row in self._rows.values() for name in row.files}

    def _mapped(self, name: str, layout: FlatLayout) -> list[Tensor]:
        if name not in self._maps:
            path, flats, begin = self.folder / name, [], 0
            header = self._verify(name, layout)
            for group in layout.groups:
                flats.append(map_flat(path, header, group.stored, begin, group.numel))
                begin += group.numel * group.stored.itemsize
            self._maps[name] = flats
        return self._maps[name]

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

    def _settle(self) -> None:
        """Choose this rank's folder and lock it until the process ends."""
        if self._lock is not None:
            self._lock.check()
            return
        if not self.per_process:
            self._ranks = Ranks.now()
        self.folder = self._ranks.folder(self._root)
        self._ranks.refuse_other_windows(self._root)
        self._lock = FolderLock(self.folder, _BUSY)

    def _sweep(self) -> None:
        """Remove files that a killed process left half-written, and files outside the window."""
        used = self._used() | self._surplus
        for path in self.folder.iterdir():
            ours = path.name.startswith(("window-", "kept-", MANIFEST))
            stray = path.name.endswith(TEMPORARY) or path.name.endswith(_SUFFIX)
            if ours and stray and path.name not in used:
                path.unlink(missing_ok=True)
