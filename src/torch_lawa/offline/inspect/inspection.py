"""What a checkpoint or the folder of a run contains, without reading the values of tensors."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch_lawa.checkpoints.find.discovery import Discovery, FoundCheckpoint, find_checkpoints
from torch_lawa.checkpoints.find.expand import POINTERS
from torch_lawa.checkpoints.find.step_names import parse_name
from torch_lawa.checkpoints.formats.base import (
    Checkpoint,
    CheckpointLayout,
    TensorSpec,
    TrainingProgress,
)
from torch_lawa.checkpoints.formats.registry import open_checkpoint
from torch_lawa.checkpoints.provenance import PROVENANCE
from torch_lawa.checkpoints.storage.paths import Location, parse_location
from torch_lawa.errors import ConfigError, FormatError, LayoutError
from torch_lawa.offline.inspect.text import aligned, labelled, plain, shortened, wrapped
from torch_lawa.offline.threads import Meter, in_threads
from torch_lawa.units import counted, few, format_bytes

__all__ = ["Inspection", "RunInspection", "find_one", "inspect_checkpoint", "inspect_path"]

_LISTED = 100  # files of a checkpoint
_OPENING = 8  # checkpoints of a run that are opened at the same time


@dataclass(frozen=True)
class DTypeCount:
    """The part of a checkpoint that has one dtype."""

    num_tensors: int
    num_values: int
    num_bytes: int


@dataclass(frozen=True)
class Inspection:
    """The format, files, tensors and metadata of one checkpoint."""

    location: Location
    format: str
    layout: CheckpointLayout
    files: dict[str, int]  # name -> bytes
    tensors: dict[str, TensorSpec]
    tied: dict[str, str]  # other names of tied tensors -> the name they are stored under
    progress: TrainingProgress
    metadata: dict[str, str]
    provenance: dict[str, Any] | None  # how it was averaged, if it was
    notes: tuple[str, ...] = ()

    @property
    def num_values(self) -> int:
        """Values of all tensors, tied ones once."""
        return sum(spec.numel for spec in self.tensors.values())

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(spec.nbytes for spec in self.tensors.values())

    @property
    def dtypes(self) -> dict[str, DTypeCount]:
        """The tensors, values and bytes of each dtype, most bytes first."""
        specs: dict[str, list[TensorSpec]] = {}
        for spec in self.tensors.values():
            specs.setdefault(spec.dtype, []).append(spec)
        counts = {
            code: DTypeCount(len(all_), sum(s.numel for s in all_), sum(s.nbytes for s in all_))
            for code, all_ in specs.items()
        }
        return dict(sorted(counts.items(), key=lambda item: (-item[1].num_bytes, item[0])))

    def __str__(self) -> str:
        lines = [plain(str(self.location))]
        lines += labelled("Format", wrapped(self._described()))
        lines += labelled("Progress", [", ".join(self.progress.words)] * self.progress.known)
        names = [(format_bytes(size), plain(name)) for name, size in self.files.items()]
        if len(names) > _LISTED:
            rest = sum(list(self.files.values())[_LISTED:])
            names[_LISTED:] = [(format_bytes(rest), f"in {len(names) - _LISTED} more")]
        lines += labelled("Files", aligned(names, right={0}))
        lines += labelled(
            "Tensors",
            [
                f"{len(self.tensors):,} with {self.num_values:,} values "
                f"(parameters and buffers), {format_bytes(self.num_bytes)}"
            ],
        )
        rows = [
            (code, f"{n.num_tensors:,}", f"{n.num_values:,}", format_bytes(n.num_bytes))
            for code, n in self.dtypes.items()
        ]
        head = ("dtype", "tensors", "values", "bytes")
        lines += labelled("", aligned([head, *rows], right={1, 2, 3}) if rows else [])
        lines += labelled("Tied", [plain(f"{name} = {kept}") for name, kept in self.tied.items()])
        entries = [shortened(f"{name}: {value}") for name, value in sorted(self.metadata.items())]
        lines += labelled("Metadata", entries)
        lines += labelled("Averaged", _provenance_lines(self.provenance))
        lines += [line for note in self.notes for line in labelled("Note", wrapped(note))]
        return "\n".join(lines)

    def list_tensors(self) -> str:
        """One line per tensor."""
        rows = [
            (spec.dtype, str(list(spec.shape)), format_bytes(spec.nbytes), plain(name))
            for name, spec in self.tensors.items()
        ]
        return "\n".join(aligned([("dtype", "shape", "bytes", "name"), *rows], right={2}))

    def to_json(self, *, tensors: bool = False) -> dict[str, Any]:
        """The same as JSON values; with `tensors`, every tensor too."""
        found: dict[str, Any] = {
            "kind": "checkpoint",
            "path": str(self.location),
            "format": self.format,
            "layout": self.layout,
            "step": self.progress.step,
            "epoch": self.progress.epoch,
            "files": self.files,
            "num_tensors": len(self.tensors),
            "num_values": self.num_values,
            "bytes": self.num_bytes,
            "dtypes": {code: vars(count) for code, count in self.dtypes.items()},
            "tied": self.tied,
            "metadata": self.metadata,
            "provenance": self.provenance,
            "notes": list(self.notes),
        }
        if tensors:
            found["tensors"] = {
                name: {"dtype": spec.dtype, "shape": list(spec.shape), "bytes": spec.nbytes}
                for name, spec in self.tensors.items()
            }
        return found

    def _described(self) -> str:
        where = {
            "single": "one file" if self.location.name in self.files else "one file in a folder",
            "sharded": "sharded folder",
            "distributed": "distributed folder",
            "orbax": "folder",
            "megatron": "torch_dist folder",
        }
        return f"{self.format} ({where.get(self.layout, self.layout)})"


@dataclass(frozen=True)
class RunEntry:
    """A checkpoint of a run: its format and the bytes of its tensors, or why it is not readable."""

    found: FoundCheckpoint
    format: str | None
    num_bytes: int | None
    error: str | None


@dataclass(frozen=True)
class RunInspection:
    """The checkpoints of a run's folder or of a pattern, oldest first."""

    path: str
    entries: tuple[RunEntry, ...]
    ordered_by: str
    notes: tuple[str, ...] = field(default=())

    def __str__(self) -> str:
        order = "in the order given" if self.ordered_by == "given" else f"by {self.ordered_by}"
        number = counted(len(self.entries), "checkpoint")
        lines = [f"{plain(self.path)}: {number}, oldest first ({order})"]
        rows = []
        for entry in self.entries:
            name, label = entry.found.location.name, entry.found.label
            size = "" if entry.num_bytes is None else format_bytes(entry.num_bytes)
            shown = entry.format or "not readable"
            rows.append((label if label != name else "", size, shown, plain(name)))
        lines += [f"  {line}" for line in aligned(rows, right={0, 1})]
        errors = [entry.error for entry in self.entries if entry.error is not None]
        for note in (*errors, *self.notes):
            lines += labelled("Note", wrapped(note))
        return "\n".join(lines)

    def to_json(self, *, tensors: bool = False) -> dict[str, Any]:
        """The same as JSON values; tensors of a run are not listed."""
        return {
            "kind": "run",
            "path": self.path,
            "ordered_by": self.ordered_by,
            "checkpoints": [
                {
                    "path": str(entry.found.location),
                    "step": entry.found.step,
                    "epoch": entry.found.epoch,
                    "format": entry.format,
                    "bytes": entry.num_bytes,
                    "error": entry.error,
                }
                for entry in self.entries
            ],
            "notes": list(self.notes),
        }


def inspect_path(
    path: str | os.PathLike[str], key: str | None = None
) -> Inspection | RunInspection:
    """Inspect a checkpoint, or all checkpoints of a run's folder or a pattern."""
    discovery = _discover(path, key)
    found = discovery.found
    if not discovery.is_run and len(found) == 1:
        return _inspect(discovery, key)
    entries = tuple(_open_all(found, key))
    return RunInspection(os.fspath(path), entries, discovery.ordered_by, discovery.notes)


def inspect_checkpoint(path: str | os.PathLike[str], key: str | None = None) -> Inspection:
    """Inspect one checkpoint: a file (also a single shard), a folder or a URL.

    >>> import tempfile, torch
    >>> from pathlib import Path
    >>> from torch_lawa.checkpoints.formats.safetensors_torch import save_tensors
    >>> path = Path(tempfile.mkdtemp()) / "step_100.safetensors"
    >>> save_tensors(path, {"w": torch.ones(2, 3)})
    >>> found = inspect_checkpoint(path)
    >>> found.num_values, found.progress.step, found.dtypes["F32"].num_bytes
    (6, 100, 24)
    """
    return _inspect(find_one(path, key), key)


def find_one(path: str | os.PathLike[str], key: str | None) -> Discovery:
    """Find the one checkpoint that a path names."""
    discovery = _discover(path, key)
    if discovery.is_run or len(discovery.found) > 1:
        raise ConfigError(
            f"{path}: found {len(discovery.found)} checkpoints "
            f"({few((each.label for each in discovery.found), limit=3)}). Give one of them, such "
            f"as {discovery.found[-1].location}."
        )
    return discovery


def _discover(path: str | os.PathLike[str], key: str | None) -> Discovery:
    location = parse_location(path)
    if location.is_file() and location.name not in POINTERS:  # whatever its name: also a shard
        return Discovery((FoundCheckpoint(location, None, None),), "given", is_run=False)
    return find_checkpoints([path], key=key)


def _inspect(discovery: Discovery, key: str | None) -> Inspection:
    location = discovery.found[0].location
    with open_checkpoint(location, key=key) as opened:
        made = _how_averaged(opened)
        known = opened.progress.known
        return Inspection(
            location=location,
            format=opened.format,
            layout=opened.layout,
            files={file.below(location): file.size for file in opened.files},
            tensors=dict(opened.tensors),
            tied=dict(opened.aliases),
            progress=opened.progress if known else parse_name(location.name),
            metadata={k: v for k, v in opened.metadata.items() if k != PROVENANCE or made is None},
            provenance=made,
            notes=(*discovery.notes, *opened.notes),
        )


def _open_all(found: Sequence[FoundCheckpoint], key: str | None) -> list[RunEntry]:
    """What each of them is; one bad checkpoint does not hide the others."""
    made: dict[int, RunEntry] = {}

    def work(todo: Iterator[tuple[int, FoundCheckpoint]]) -> None:
        for at, each in todo:
            try:
                with open_checkpoint(each.location, key=key) as opened:
                    made[at] = RunEntry(each, opened.format, opened.num_bytes, None)
            except (FormatError, LayoutError, FileNotFoundError, PermissionError) as error:
                # But not an error of the server, which concerns all.
                made[at] = RunEntry(each, None, None, str(error))

    in_threads(min(_OPENING, len(found)), iter(enumerate(found)), work, Meter())
    return [made[at] for at in range(len(found))]


def _how_averaged(opened: Checkpoint) -> dict[str, Any] | None:
    """How a checkpoint was averaged; None if it was not."""
    text = opened.metadata.get(PROVENANCE)
    try:
        made = None if text is None else json.loads(text)
    except (ValueError, RecursionError):
        return None
    return made if isinstance(made, dict) else None


def _provenance_lines(made: Mapping[str, Any] | None) -> list[str]:
    """How it was averaged, in lines; none if it was not."""
    if made is None:
        return []
    found = made.get("inputs")
    inputs = [i for i in found if isinstance(i, dict)] if isinstance(found, list) else []
    lines = wrapped(f"by torch-lawa {made.get('version')}, {made.get('date')}")
    # Snapshots of an online averager have no path.
    kind = "checkpoints" if any("path" in each for each in inputs) else "snapshots"
    lines += wrapped(f"{len(inputs)} {kind}, {made.get('coefficients')}:")
    rows = []
    for each in inputs:
        number = next(
            (f"{by} {each[by]}" for by in ("step", "epoch") if each.get(by) is not None), ""
        )
        weight = each.get("weight")
        shown = f"{weight:.4g}" if isinstance(weight, int | float) else str(weight)
        rows.append((number, f"weight {shown}", plain(str(each.get("path", "")))))
    return lines + aligned(rows, right={0})
