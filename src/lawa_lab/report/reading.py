"""Metrics files to rows that can be relied on: checked, numbers finite, no moment told twice."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lawa_lab.report.curves import BETTER
from torch_lawa.errors import FormatError
from torch_lawa.metrics import Row, read_metrics

__all__ = ["files_of", "read_rows"]

_COUNTS = {"epoch", "step", "num_devices", "k"}
_IDENTITY = (
    "recipe", "run", "seed", "step", "epoch", "weights", "k", "coefficients", "batch_norm",
)  # fmt: skip
_LABELS = ("recipe", "run", "seed", "coefficients", "batch_norm", "device")


def read_rows(paths: Sequence[Path]) -> list[Row]:
    """The rows of raw and averaged weights in all files, in the order of files and lines.

    Of rows that tell the same moment twice in one file the later stays (a resumed run repeats
    what came after its last checkpoint). Two files that differ about one moment are refused: no
    order of files would make them one run.
    """
    rows: dict[tuple[Any, ...], Row] = {}
    origin: dict[tuple[Any, ...], Path] = {}
    for file in files_of(paths):
        for row in _rows_in(file):
            key = _identity(row)
            other = origin.setdefault(key, file)
            if other != file:
                if not _agree(rows[key], row):
                    raise FormatError(_twice(other, file, row))
                row = max(rows[key], row, key=lambda r: "train_seconds" in r)
            rows.pop(key, None)  # the later one, in its own place
            rows[key] = row
    return list(rows.values())


def files_of(paths: Sequence[Path]) -> list[Path]:
    """The files, each once; a folder stands for the `metrics.jsonl` files in and below it."""
    files: dict[Path, Path] = {}
    for path in paths:
        found = sorted(path.rglob("metrics.jsonl")) if path.is_dir() else [path]
        if not found:
            others = sorted(p.name for p in path.glob("*.jsonl"))
            hint = f" Name the files themselves, such as {others[0]}." if others else ""
            raise FormatError(
                f"{path}: there is no metrics.jsonl in this folder or below it.{hint}"
            )
        for file in found:
            files.setdefault(file.resolve(), file)
    return list(files.values())


def _rows_in(file: Path) -> Iterator[Row]:
    anything = False
    for number, row in enumerate(read_metrics(file), start=1):
        if "weights" not in row:
            continue
        anything = True
        try:
            yield _checked(row)
        except ValueError as error:
            raise FormatError(f"{file}, line {number}: {error}.") from None
    if not anything:
        raise FormatError(
            f"{file}: no row of raw or averaged weights in it. `lawa train`, `lawa demo`, "
            "`lawa sweep` and evaluate_side_by_side() write such rows."
        )


def _checked(row: Row) -> Row:
    if row["weights"] not in ("raw", "averaged"):
        raise ValueError(f"weights are {row['weights']!r}, neither 'raw' nor 'averaged'")
    if row.get("epoch") is None and row.get("step") is None:
        raise ValueError("neither `epoch` nor `step` says when it was")
    for name, value in row.items():
        number = name in _COUNTS or name.split("_")[-1] in (*BETTER, "seconds")
        if number and not isinstance(value, int | float | None):
            raise ValueError(f"`{name}` is {value!r}, not a number")
        if number and name.endswith("accuracy") and value is not None and value > 1:
            raise ValueError(
                f"`{name}` is {value!r}: accuracies are shares of 1, so divide percentages by 100"
            )
        if name in _LABELS and isinstance(value, list | dict):
            raise ValueError(f"`{name}` is {value!r}, not a name")
    # Python's JSON takes NaN, which no comparison of ours should ever meet.
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in row.items()
    }


def _identity(row: Row) -> tuple[Any, ...]:
    """What makes a row the one that tells this moment of this series of this run."""
    coefficients = row.get("coefficients") or "uniform" if row["weights"] == "averaged" else None
    row = {**row, "coefficients": coefficients}
    if row.get("step") is not None:
        row.pop("epoch", None)
    return tuple(str(row.get(name)) for name in _IDENTITY)


def _agree(one: Row, other: Row) -> bool:
    """Whether two rows tell the same, as those of a run and of a sweep over its checkpoints do."""
    shared = (one.keys() & other.keys()) - set(_IDENTITY)
    return all(one[n] == other[n] for n in shared if not n.endswith("_seconds"))


def _twice(first: Path, second: Path, row: Row) -> str:
    where = f"step {row['step']}" if row.get("step") is not None else f"epoch {row['epoch']}"
    seed = "" if row.get("seed") is None else f" of seed {row['seed']}"
    return (
        f"{first} and {second} differ about {where}{seed}, and nothing in their rows tells the two "
        "runs apart. Report on one at a time, or give them a `run` (or `seed`) of their own; of a "
        "run that was resumed into a second file, append that to the first."
    )
