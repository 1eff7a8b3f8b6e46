"""Snapshots on disk: crash-safe, bounded, and taken over by a later process.

Each snapshot is a plain safetensors file. `manifest.json` says which files form the window; it is
replaced in one step after the files it names are on disk, and only then are old files removed. So
a process killed at any moment leaves the window before the snapshot or the window after it.
"""

import contextlib
import json
import os
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_lawa.checkpoints.files import TEMPORARY, replacing
from torch_lawa.checkpoints.safetensors import Header, read_header
from torch_lawa.checkpoints.tensors import map_flat, spec_of, write_flat
from torch_lawa.errors import StoreError
from torch_lawa.stores.base import Buffer, Content, Found, Layout, Snapshot, Store
from torch_lawa.stores.memory import Stage

__all__ = ["DiskStore"]

_MANIFEST = "manifest.json"
_SUFFIX = ".safetensors"


class DiskStore(Store):
    """The window as files in a folder of its own.

    A snapshot is copied to host memory (page-locked and behind the caller's back from a GPU) and
    written from there by a thread; the next one waits for it. A failed write is raised by the next
    call. It is on disk for certain after `averager.wait()`.

    >>> import tempfile
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

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        super().__init__()
        self.folder = Path(folder)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="lawa-disk")
        self._pending: Future[None] | None = None
        self._files: dict[int, str] = {}  # snapshot index -> file
        self._kept_file: str | None = None
        self._surplus: set[str] = set()  # in the manifest, but more than k: go with the next put
        self._serial = 0
        self._maps: dict[str, list[Tensor]] = {}
        self._lock: int | None = None

    def find(self, k: int) -> Found | None:
        """Lock the folder, take over the window its manifest names, sweep up the rest."""
        self._acquire()
        path = self.folder / _MANIFEST
        if not path.exists():
            self._sweep()
            return None
        try:
            manifest = json.loads(path.read_text())
            rows = manifest["snapshots"]
            averaged = _layout(manifest["averaged"])
            kept = _layout(manifest["kept"])
            self._serial, self._kept_file = int(manifest["serial"]), str(manifest["kept_file"])
            snapshots = [Snapshot(int(row["index"]), int(row["step"])) for row in rows]
            files = {int(row["index"]): str(row["file"]) for row in rows}
            notes = dict(manifest["notes"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise StoreError(
                f"{path}: the manifest of the snapshot folder is damaged ({error!r}). Remove the "
                "folder to begin a new window, or restore the file."
            ) from None
        for name, layout in [*((f, averaged) for f in files.values()), (self._kept_file, kept)]:
            self._verify(name, layout)
        self._averaged, self._kept, self._k = averaged, kept, k
        self.snapshots = snapshots[-k:]
        self._files = {s.index: files[s.index] for s in self.snapshots}
        self._surplus = {files[s.index] for s in snapshots[:-k]}
        self.retarget(averaged, kept)
        self._sweep()
        return Found(averaged, kept, notes)

    def open(self, averaged: Layout, kept: Layout, k: int) -> None:
        """Begin a new window; what the folder held is removed."""
        self._acquire()
        self._averaged, self._kept, self._k = averaged, kept, k
        self.clear()
        self.retarget(averaged, kept)

    def retarget(self, averaged: Layout, kept: Layout) -> None:
        """Take coming snapshots from the devices of these layouts."""
        self.wait()  # the thread may still be writing from the old stages
        self._averaged, self._kept = averaged, kept
        self._stages = [Stage(averaged), Stage(kept)]
        self._staged: list[list[Buffer]] | None = None

    def put(self, content: Content, notes: Mapping[str, Any]) -> None:
        """Copy the snapshot out of the caller's way and let the thread write it."""
        self._put(content, notes, commit=True)

    def refill(
        self,
        averaged: Layout,
        kept: Layout,
        k: int,
        contents: list[Content],
        notes: Mapping[str, Any],
    ) -> None:
        """Write the whole new window first; then one manifest puts it in place."""
        self._acquire()
        self.wait()
        old_names, before = set(self._used()), dict(vars(self))
        self._averaged, self._kept, self._k = averaged, kept, k
        self.snapshots, self.evicted, self._files, self._kept_file = [], None, {}, None
        self._maps, self._surplus = {}, set()
        self.retarget(averaged, kept)
        try:
            while contents:
                self._put(contents.pop(0), notes, commit=not contents)
            self.wait()
        except BaseException:
            with contextlib.suppress(Exception):
                self.wait()  # an interrupt may have left the thread at work
            self._remove(set(self._used()) - old_names)
            vars(self).update(before, _serial=self._serial)
            raise
        self._remove(old_names - set(self._used()))

    def flats(self, snapshot: Snapshot) -> list[Tensor]:
        """The snapshot's file, memory-mapped."""
        self.wait()
        return self._mapped(self._files[snapshot.index], self._averaged)

    def kept_flats(self) -> list[Tensor]:
        """The kept tensors' file, memory-mapped."""
        self.wait()
        assert self._kept_file is not None
        return self._mapped(self._kept_file, self._kept)

    def wait(self) -> None:
        """Return when the last snapshot is on disk; raise what kept it from getting there."""
        pending, self._pending = self._pending, None
        if pending is not None:
            try:
                pending.result()
            except OSError as error:
                raise StoreError(
                    f"{self.folder}: the last snapshot could not be written ({error}). The window "
                    "before it is intact; make room or mend the folder, then collect again."
                ) from error

    def clear(self) -> None:
        """Drop every snapshot and its file."""
        self.wait()
        with contextlib.suppress(FileNotFoundError):
            (self.folder / _MANIFEST).unlink()
        self.snapshots, self.evicted, self._files, self._kept_file = [], None, {}, None
        self._maps, self._surplus = {}, set()
        self._sweep()

    def describe(self) -> str:
        """Where they are."""
        return f"files in {self.folder}"

    def _put(self, content: Content, notes: Mapping[str, Any], *, commit: bool) -> None:
        self.wait()
        if self._staged is None:
            self._staged = [stage.allocate() for stage in self._stages]
        for stage, buffers, tensors in zip(
            self._stages, self._staged, (content.averaged, content.kept), strict=True
        ):
            stage.copy(buffers, tensors)
        before = {
            "snapshots": list(self.snapshots),
            "evicted": self.evicted,
            "_files": dict(self._files),
            "_kept_file": self._kept_file,
            "_surplus": self._surplus,
        }
        gone, self._surplus = set(self._surplus), set()
        if self.evicted is not None:
            gone.add(self._files.pop(self.evicted.index))
            self.evicted = None
        while len(self.snapshots) >= self._k:
            oldest = self.snapshots.pop(0)
            if self.keep_evicted:
                self.evicted = oldest
            else:
                gone.add(self._files.pop(oldest.index))
        if self._kept_file is not None:
            gone.add(self._kept_file)
        self._serial += 1
        name = f"window-{self._serial:08d}{_SUFFIX}"
        self._kept_file = f"kept-{self._serial:08d}{_SUFFIX}"
        self._files[content.snapshot.index] = name
        self.snapshots.append(content.snapshot)
        manifest = self._manifest(notes) if commit else None
        self._pending = self._writer.submit(
            self._write, name, self._kept_file, content.snapshot, manifest, gone, before
        )

    def _write(
        self,
        name: str,
        kept_name: str,
        snapshot: Snapshot,
        manifest: str | None,
        gone: set[str],
        before: dict[str, Any],
    ) -> None:
        """In the thread: files, then the manifest, then removals."""
        assert self._staged is not None
        try:
            labels = {"index": str(snapshot.index), "step": str(snapshot.step)}
            for stage, buffers, layout, file in zip(
                self._stages,
                self._staged,
                (self._averaged, self._kept),
                (name, kept_name),
                strict=True,
            ):
                stage.wait()
                flats = [buffer.flat for buffer in buffers]
                write_flat(self.folder / file, _entries(layout), flats, labels)
            if manifest is not None:
                with replacing(self.folder / _MANIFEST) as out:
                    out.write(manifest.encode())
        except BaseException:
            vars(self).update(before)
            self._remove({name, kept_name})
            raise
        self._remove(gone)

    def _remove(self, names: set[str]) -> None:
        for name in names:
            self._maps.pop(name, None)
            with contextlib.suppress(OSError):
                (self.folder / name).unlink()

    def _manifest(self, notes: Mapping[str, Any]) -> str:
        rows = [
            {"index": s.index, "step": s.step, "file": self._files[s.index]} for s in self.snapshots
        ]
        return json.dumps(
            {
                "format": 1,
                "serial": self._serial,
                "snapshots": rows,
                "kept_file": self._kept_file,
                "averaged": _described(self._averaged),
                "kept": _described(self._kept),
                "notes": dict(notes),
            },
            indent=1,
        )

    def _used(self) -> list[str]:
        kept = [self._kept_file] if self._kept_file else []
        return [*self._files.values(), *kept, *self._surplus]

    def _mapped(self, name: str, layout: Layout) -> list[Tensor]:
        if name not in self._maps:
            path, flats, begin = self.folder / name, [], 0
            header = self._verify(name, layout)
            for group in layout.groups:
                flats.append(map_flat(path, header, group.stored, begin, group.numel))
                begin += group.numel * group.stored.itemsize
            self._maps[name] = flats
        return self._maps[name]

    def _verify(self, name: str, layout: Layout) -> Header:
        path = self.folder / name
        if Path(name).name != name or not path.is_file():
            raise StoreError(
                f"{path}: the snapshot folder's manifest names this file and it is not there. "
                "Restore it, or remove the folder to begin a new window."
            )
        header = read_header(path)
        expected = {n: spec_of(n, dtype, shape) for n, dtype, shape in _entries(layout)}
        if header.tensors != expected:
            raise StoreError(f"{path}: holds other tensors than its manifest says.")
        return header

    def _acquire(self) -> None:
        """One process at a time: the lock goes with the process, however it ends."""
        if self._lock is not None:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise StoreError(f"{self.folder}: cannot be used for snapshots ({error}).") from error
        closing = weakref.finalize(self, os.close, self._lock)
        with contextlib.suppress(ImportError):
            import fcntl

            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                self._lock = None
                closing()
                raise StoreError(
                    f"{self.folder}: another averager, here or in another process, is using this "
                    "snapshot folder. Give each run a folder of its own."
                ) from None

    def _sweep(self) -> None:
        """Remove what a killed process left half-written, and files outside the window."""
        used = set(self._used())
        for path in self.folder.iterdir():
            ours = path.name.startswith(("window-", "kept-", _MANIFEST))
            stray = path.name.endswith(TEMPORARY) or path.name.endswith(_SUFFIX)
            if ours and stray and path.name not in used:
                path.unlink(missing_ok=True)


def _entries(layout: Layout) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
    return [(e.name, g.stored, tuple(e.shape)) for g in layout.groups for e in g.entries]


def _described(layout: Layout) -> list[list[Any]]:
    return [
        [e.name, *(str(d).removeprefix("torch.") for d in (g.dtype, g.stored)), list(e.shape)]
        for g in layout.groups
        for e in g.entries
    ]


def _layout(rows: Sequence[Any]) -> Layout:
    """The layout again from its description, without touching any values."""
    tensors = {}
    dtypes = {}
    narrow = None
    for name, dtype, stored, shape in rows:
        dtypes[name] = getattr(torch, dtype)
        if stored != dtype:
            narrow = getattr(torch, stored)
        tensors[name] = torch.zeros((), dtype=dtypes[name], device="cpu").expand(shape)
    return Layout.of(tensors, storage_dtype=narrow, packed=True)
