"""`manifest.json`: the snapshots of a window on disk, their files and their layout."""

import json
import math
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from torch_lawa.checkpoints.storage.state_files import (
    StateRow,
    a_list,
    a_text,
    a_whole_number,
    read_state,
)
from torch_lawa.errors import StoreError
from torch_lawa.stores.base import FlatLayout, Notes, Snapshot

__all__ = [
    "MANIFEST",
    "Manifest",
    "ManifestRow",
    "Mark",
    "entries",
    "is_snapshot_file",
    "snapshot_files",
]

MANIFEST = "manifest.json"
_FORMAT = 2
_NUMBER = r"([0-9]{8}|[1-9][0-9]{8,18})"  # of a file, as `snapshot_files` writes it
_WINDOW, _KEPT = (rf"{part}-{_NUMBER}\.safetensors" for part in ("window", "kept"))


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

    def is_in(self, folder: Path) -> bool:
        """Whether it is, or may be, that of the folder: it can be written and then not flushed."""
        try:
            return (folder / MANIFEST).read_bytes() == self.text().encode()
        except FileNotFoundError:
            return False
        except OSError:
            return True

    @staticmethod
    def read(folder: Path) -> "Manifest":
        """The manifest of a folder; an empty one if there is none."""
        path = folder / MANIFEST
        try:
            return read_state(path, _parse)
        except FileNotFoundError:
            return Manifest()
        except ValueError as error:
            raise StoreError(
                f"{path}: the manifest of the snapshot folder is damaged ({error}). Restore the "
                "file, or remove the folder to begin a new window."
            ) from None


def snapshot_files(serial: int) -> tuple[str, str]:
    """The file of a snapshot, and that of the kept tensors.

    >>> snapshot_files(12)
    ('window-00000012.safetensors', 'kept-00000012.safetensors')
    """
    return f"window-{serial:08d}.safetensors", f"kept-{serial:08d}.safetensors"


def is_snapshot_file(name: str) -> bool:
    """Whether a file has a name that `snapshot_files` gives.

    >>> is_snapshot_file("kept-00000012.safetensors"), is_snapshot_file("window-6.safetensors")
    (True, False)
    """
    return re.fullmatch(f"{_WINDOW}|{_KEPT}", name) is not None


def entries(layout: FlatLayout) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
    """Name, dtype and shape of each tensor as stored, in the order of the file."""
    return [(e.name, g.stored, tuple(e.shape)) for g in layout.groups for e in g.entries]


def _parse(row: StateRow) -> Manifest:
    if row.take("format", a_whole_number()) != _FORMAT:
        raise ValueError(f"it has another format than {_FORMAT}")
    kept = row.take("kept", _layout)
    manifest = Manifest(
        serial=row.take("serial", a_whole_number()),
        run=row.take("run", a_whole_number()),
        began=row.take("began", a_whole_number()),
        age=row.take("age", _an_integer),
        rows=tuple(row.take("snapshots", a_list(lambda found: _row(found, kept)))),
        averaged=row.take("averaged", _layout),
        kept=kept,
    )
    row.end()
    indices = [r.snapshot.index for r in manifest.rows]
    files = [name for r in manifest.rows for name in r.files]
    if indices != sorted(set(indices)) or len(set(files)) < len(files):
        raise ValueError("its snapshots are not in order")
    numbers = [int(name.partition("-")[2].partition(".")[0]) for name in files]
    if manifest.serial < max(numbers, default=0):  # the next file would replace one of these
        raise ValueError(f"serial is {manifest.serial}, but it names file {max(numbers)}")
    return manifest


_an_integer = a_whole_number(-(2**63))


def _row(found: Any, newest_kept: FlatLayout) -> ManifestRow:
    row = StateRow(found)
    kept_file = row.take("kept_file", _kept_file)
    kept = row.take("kept", _layout) if "kept" in row else newest_kept
    made = ManifestRow(
        Snapshot(row.take("index", a_whole_number()), row.take("step", _an_integer)),
        row.take("run", a_whole_number()),
        row.take("file", a_text(_WINDOW)),
        kept_file,
        None if kept_file is None else kept,
        row.take("notes", lambda notes: _notes(notes) if notes != {} else None),
    )
    row.end()
    return made


def _kept_file(found: Any) -> str | None:
    return None if found is None else a_text(_KEPT)(found)


def _notes(found: Any) -> Notes:
    row = StateRow(found)
    notes: Notes = {
        "num_steps": row.take("num_steps", a_whole_number()),
        "num_collected": row.take("num_collected", a_whole_number()),
        "schedule_kind": row.take("schedule_kind", a_text()),
        # Its own `load_state_dict` knows what it may hold.
        "schedule": row.take("schedule", lambda s: StateRow(s).take_all(a_text(), lambda v: v)),
        "ties": row.take("ties", lambda ties: StateRow(ties).take_all(a_text(), a_text())),
        "excluded": row.take("excluded", a_list(a_text())),
        "shards": row.take("shards", a_text()),
    }
    row.end()
    return notes


def _described(layout: FlatLayout) -> list[list[Any]]:
    return [
        [e.name, *(str(d).removeprefix("torch.") for d in (g.dtype, g.stored)), list(e.shape)]
        for g in layout.groups
        for e in g.entries
    ]


def _layout(found: Any) -> FlatLayout:
    """The layout from its description, without reading any values."""
    rows = a_list(a_list(lambda value: value))(found)
    specs: dict[str, tuple[torch.dtype, list[int]]] = {}
    narrow = None
    for row in rows:
        if len(row) != 4:
            raise ValueError(f"{row!r:.60}, expected a name, two dtypes and a shape")
        name = a_text()(row[0])
        dtype, stored = (getattr(torch, a_text(r"\w+")(d), None) for d in row[1:3])
        shape = a_list(a_whole_number())(row[3])
        if not isinstance(dtype, torch.dtype) or not isinstance(stored, torch.dtype):
            raise ValueError(f"{row!r:.60}, expected two dtypes of PyTorch")
        if math.prod(shape) >= 2**59:
            raise ValueError(f"{row!r:.60}, which is too large")
        if stored != dtype:
            narrow = stored
        specs[name] = dtype, shape
    try:
        tensors = {
            name: torch.zeros((), dtype=dtype, device="cpu").expand(shape)
            for name, (dtype, shape) in specs.items()
        }
        layout = FlatLayout.of(tensors, storage_dtype=narrow, packed=True)
    except Exception as error:
        raise ValueError(f"not a layout ({error})") from None
    if _described(layout) != rows:
        raise ValueError("not the layout of a snapshot")
    return layout
