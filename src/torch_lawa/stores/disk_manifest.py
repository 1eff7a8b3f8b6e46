"""`manifest.json`: the snapshots of a window on disk, their files and their layout."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from torch_lawa.errors import StoreError
from torch_lawa.stores.base import FlatLayout, Notes, Snapshot

__all__ = ["MANIFEST", "Manifest", "ManifestRow", "Mark", "entries"]

MANIFEST = "manifest.json"
_FORMAT = 2


@dataclass(frozen=True, order=True)
class Mark:
    """Identifies a snapshot across ranks. `run` distinguishes snapshots that were taken again."""

    run: int
    index: int
    step: int


@dataclass(frozen=True)
class ManifestRow:
    """A snapshot on disk. It can be the newest of a window if its kept tensors are on disk, too."""

    snapshot: Snapshot
    run: int
    file: str
    kept_file: str | None = None
    kept: FlatLayout | None = None  # the layout of `kept_file`
    notes: Notes | None = None  # of the rows that can be the newest

    @property
    def mark(self) -> Mark:
        """Its identity across ranks."""
        return Mark(self.run, self.snapshot.index, self.snapshot.step)

    @property
    def files(self) -> list[str]:
        """Its files."""
        return [self.file, *([self.kept_file] if self.kept_file is not None else [])]

    def without_kept(self) -> "ManifestRow":
        """The same, but not to be the newest of a window."""
        return replace(self, kept_file=None, kept=None, notes=None)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """One state of a folder. Rows are oldest first.

    `run` increases with every take-over, load and reset; `began` is its value when the window was
    begun or loaded, and `age` counts the snapshots since then.
    """

    serial: int = 0
    run: int = 0
    began: int = 0
    age: int = 0
    rows: tuple[ManifestRow, ...] = ()
    averaged: FlatLayout = field(default_factory=lambda: FlatLayout(()))
    kept: FlatLayout = field(default_factory=lambda: FlatLayout(()))

    def text(self) -> str:
        """The manifest as JSON."""
        rows: list[dict[str, Any]] = [
            {
                "index": row.snapshot.index,
                "step": row.snapshot.step,
                "run": row.run,
                "file": row.file,
                "kept_file": row.kept_file,
                "notes": row.notes or {},
                **self._own_kept(row),
            }
            for row in self.rows
        ]
        head = {"serial": self.serial, "run": self.run, "began": self.began, "age": self.age}
        layouts = {"averaged": _described(self.averaged), "kept": _described(self.kept)}
        return json.dumps({"format": _FORMAT, **head, "snapshots": rows, **layouts}, indent=1)

    def _own_kept(self, row: ManifestRow) -> dict[str, Any]:
        """The layout of a row's kept tensors, if it is not that of the newest."""
        if row.kept is None or _described(row.kept) == _described(self.kept):
            return {}
        return {"kept": _described(row.kept)}

    @staticmethod
    def read(folder: Path) -> "Manifest":
        """The manifest of a folder; an empty one if there is none."""
        path = folder / MANIFEST
        try:
            found = json.loads(path.read_text())
            if found["format"] != _FORMAT:
                raise ValueError(f"format {found['format']!r}, expected {_FORMAT}")
            kept_layout = _layout(found["kept"])
            return Manifest(
                serial=int(found["serial"]),
                run=int(found["run"]),
                began=int(found["began"]),
                age=int(found["age"]),
                rows=tuple(_row(row, kept_layout) for row in found["snapshots"]),
                averaged=_layout(found["averaged"]),
                kept=kept_layout,
            )
        except FileNotFoundError:
            return Manifest()
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise StoreError(
                f"{path}: the manifest of the snapshot folder is damaged ({error!r}). Restore the "
                "file, or remove the folder to begin a new window."
            ) from None


def entries(layout: FlatLayout) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
    """Name, dtype and shape of each tensor as stored, in the order of the file."""
    return [(e.name, g.stored, tuple(e.shape)) for g in layout.groups for e in g.entries]


def _row(row: Mapping[str, Any], kept_layout: FlatLayout) -> ManifestRow:
    kept = row["kept_file"]
    if "kept" in row:
        kept_layout = _layout(row["kept"])
    return ManifestRow(
        Snapshot(int(row["index"]), int(row["step"])),
        int(row["run"]),
        str(row["file"]),
        None if kept is None else str(kept),
        None if kept is None else kept_layout,
        _notes(row["notes"]) if row["notes"] else None,
    )


def _notes(found: Mapping[str, Any]) -> Notes:
    return {
        "num_steps": int(found["num_steps"]),
        "num_collected": int(found["num_collected"]),
        "schedule_kind": str(found["schedule_kind"]),
        "schedule": dict(found["schedule"]),
        "ties": dict(found["ties"]),
        "excluded": list(found.get("excluded", ())),
        "shards": str(found["shards"]),
    }


def _described(layout: FlatLayout) -> list[list[Any]]:
    return [
        [e.name, *(str(d).removeprefix("torch.") for d in (g.dtype, g.stored)), list(e.shape)]
        for g in layout.groups
        for e in g.entries
    ]


def _layout(rows: Sequence[Any]) -> FlatLayout:
    """The layout from its description, without reading any values."""
    tensors = {}
    dtypes = {}
    narrow = None
    for name, dtype, stored, shape in rows:
        dtypes[name] = getattr(torch, dtype)
        if stored != dtype:
            narrow = getattr(torch, stored)
        tensors[name] = torch.zeros((), dtype=dtypes[name], device="cpu").expand(shape)
    return FlatLayout.of(tensors, storage_dtype=narrow, packed=True)
