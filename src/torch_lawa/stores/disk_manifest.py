"""What `manifest.json` says: the snapshots of a window on disk, their files and their layout."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from torch_lawa.errors import StoreError
from torch_lawa.stores.base import Layout, Snapshot

__all__ = ["MANIFEST", "Manifest", "Mark", "Row", "entries"]

MANIFEST = "manifest.json"


@dataclass(frozen=True, order=True)
class Mark:
    """What makes a snapshot the same one on every rank. `run` sets apart those taken again."""

    run: int
    index: int
    step: int


@dataclass(frozen=True)
class Row:
    """A snapshot on disk; the window can end with it where its kept tensors are there, too."""

    snapshot: Snapshot
    run: int
    file: str
    kept_file: str | None = None
    notes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def mark(self) -> Mark:
        """Its name among ranks."""
        return Mark(self.run, self.snapshot.index, self.snapshot.step)

    @property
    def files(self) -> list[str]:
        """What it needs on disk."""
        return [self.file, *([self.kept_file] if self.kept_file is not None else [])]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """One state of a folder. Rows are oldest first.

    `run` grows with every take-over, load and reset, `began` is what it was when the window was
    begun or loaded, and `age` counts the snapshots since.
    """

    serial: int = 0
    run: int = 0
    began: int = 0
    age: int = 0
    rows: tuple[Row, ...] = ()
    averaged: Layout = field(default_factory=lambda: Layout(()))
    kept: Layout = field(default_factory=lambda: Layout(()))

    def text(self) -> str:
        """As it is written."""
        rows = [
            {
                "index": row.snapshot.index,
                "step": row.snapshot.step,
                "run": row.run,
                "file": row.file,
                "kept_file": row.kept_file,
                "notes": dict(row.notes),
            }
            for row in self.rows
        ]
        head = {"serial": self.serial, "run": self.run, "began": self.began, "age": self.age}
        layouts = {"averaged": _described(self.averaged), "kept": _described(self.kept)}
        return json.dumps({"format": 2, **head, "snapshots": rows, **layouts}, indent=1)

    @staticmethod
    def read(folder: Path) -> "Manifest":
        """That of a folder; an empty one where there is none."""
        path = folder / MANIFEST
        try:
            found = json.loads(path.read_text())
            if found["format"] == 1:
                # One process, before its ranks were kept apart: only the newest row can be last.
                newest = {"kept_file": found["kept_file"], "notes": found["notes"]}
                found |= {"run": 0, "began": 0, "age": len(found["snapshots"])}
                rows = [{"run": 0, "kept_file": None, "notes": {}, **r} for r in found["snapshots"]]
                found["snapshots"] = [*rows[:-1], *({**row, **newest} for row in rows[-1:])]
            return Manifest(
                serial=int(found["serial"]),
                run=int(found["run"]),
                began=int(found["began"]),
                age=int(found["age"]),
                rows=tuple(_row(row) for row in found["snapshots"]),
                averaged=_layout(found["averaged"]),
                kept=_layout(found["kept"]),
            )
        except FileNotFoundError:
            return Manifest()
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise StoreError(
                f"{path}: the manifest of the snapshot folder is damaged ({error!r}). Remove the "
                "folder to begin a new window, or restore the file."
            ) from None


def entries(layout: Layout) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
    """Name, dtype and shape of each tensor as stored, in the order of the file."""
    return [(e.name, g.stored, tuple(e.shape)) for g in layout.groups for e in g.entries]


def _row(row: Mapping[str, Any]) -> Row:
    kept = row["kept_file"]
    return Row(
        Snapshot(int(row["index"]), int(row["step"])),
        int(row["run"]),
        str(row["file"]),
        None if kept is None else str(kept),
        dict(row["notes"]),
    )


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
