"""Metrics files, read and checked: finite numbers, one row per evaluation."""

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lawa_lab.report.curves import BETTER
from torch_lawa.errors import FormatError
from torch_lawa.metrics import Row, read_metrics
from torch_lawa.validation import DAMAGE

__all__ = ["find_empty", "find_files", "read_rows"]

_COUNTS = {"epoch", "step", "num_devices", "k", "land", "budget_epochs", "peak_learning_rate"}
_PLAN = ("schedule", "land", "budget_epochs", "peak_learning_rate")
_IDENTITY = (
    "recipe", "run", "seed", "step", "epoch", "weights", "k", "horizon", "coefficients",
    "batch_norm", *_PLAN,
)  # fmt: skip
_LABELS = ("recipe", "run", "seed", "coefficients", "batch_norm", "device")


def find_files(paths: Sequence[Path]) -> dict[Path, str | None]:
    """The metrics files, each once, and the run name that the file itself implies, if any.

    A folder stands for the `metrics.jsonl` files in and below it that have rows. If there are none,
    it stands for its other `.jsonl` files that hold rows of weights, whose runs are named after
    them: nothing else tells such files apart. A folder whose `metrics.jsonl` files are all empty
    stands for nothing, beside others that have rows.
    """
    files: dict[Path, tuple[Path, str | None]] = {}
    for path in paths:
        for file, name in _files_in(path) if path.is_dir() else [(path, None)]:
            files.setdefault(file.resolve(), (file, name))
    if not files and (empty := find_empty(paths)):
        raise FormatError(_no_rows_yet(empty[0]))
    return dict(files.values())


def find_empty(paths: Sequence[Path]) -> list[Path]:
    """The `metrics.jsonl` files below folders that `find_files` leaves out: they have no row yet.

    A run writes its first row after its first evaluation.
    """
    below = [file for path in paths if path.is_dir() for file in path.rglob("metrics.jsonl")]
    return sorted({file for file in below if _is_empty(file)})


def _is_empty(file: Path) -> bool:
    return not file.stat().st_size


def _files_in(folder: Path) -> list[tuple[Path, str | None]]:
    usual = [file for file in sorted(folder.rglob("metrics.jsonl")) if not _is_empty(file)]
    if usual:
        return [(file, None) for file in usual]
    others = [file for file in sorted(folder.rglob("*.jsonl")) if not _is_empty(file)]
    rows = [file for file in others if any("weights" in row for row in read_metrics(file))]
    if not rows and not others and find_empty([folder]):
        return []
    if not rows:
        names = ", ".join(file.name for file in others)
        seen = f" ({names} hold{'s'[: len(others) == 1]} none)" if others else ""
        raise FormatError(
            f"{folder}: no metrics.jsonl and no other .jsonl file with rows of weights in or below "
            f"this folder{seen}. {_WRITERS}"
        )
    alone = len(rows) == 1
    return [
        (file, None if alone else file.relative_to(folder).with_suffix("").as_posix())
        for file in rows
    ]


def read_rows(paths: Sequence[Path]) -> list[Row]:
    """The rows of all files, in the order of files and lines; other kinds of rows are skipped.

    If one file holds the same evaluation twice, the later row counts: a resumed run repeats what
    came after its last checkpoint. Two files that disagree about an evaluation are refused, because
    nothing says which of them is right.
    """
    rows: dict[tuple[Any, ...], Row] = {}
    origin: dict[tuple[Any, ...], Path] = {}
    files = {
        file: _named(_with_peaks(_rows_in(file), _planned_peak(file)), name)
        for file, name in find_files(paths).items()
    }
    plans = _plans(row for own in files.values() for row in own)
    for file, own in files.items():
        for row in own:
            if "schedule" not in row and len(known := plans.get(_name_of(row), ())) == 1:
                row = {**row, **dict(zip(_PLAN, *known, strict=True))}
            key = _identity(row)
            other = origin.setdefault(key, file)
            if other != file:
                if not _agree(rows[key], row):
                    raise FormatError(_conflict(other, file, row))
                row = max(rows[key], row, key=lambda r: "train_seconds" in r)
            rows.pop(key, None)  # keep the order of the later row
            rows[key] = row
    _require_one_run_each([(row, origin[key]) for key, row in rows.items()])
    return list(rows.values())


def _named(rows: list[Row], file: str | None) -> list[Row]:
    """The rows of a file whose name names its run, or stands before the names of its runs."""
    if file is None:
        return rows
    names = {row["run"] for row in rows if row.get("run")}
    return [
        {**row, "run": f"{file} {row['run']}" if len(names) > 1 and row.get("run") else file}
        for row in rows
    ]


def _require_one_run_each(rows: Iterable[tuple[Row, Path]]) -> None:
    """Refuse files of one run whose epochs differ in length: they are of different runs.

    No evaluation of one need have the step of one of the other, so rows do not disagree. A file in
    which the length varies says nothing: its epochs may be rounded.
    """
    runs: dict[tuple[Any, ...], dict[Path, dict[float, Row]]] = {}
    for row, file in rows:
        step, epoch = row.get("step"), row.get("epoch")
        if step and epoch:
            key = (*_trained_as(row), row.get("peak_learning_rate"))
            runs.setdefault(key, {}).setdefault(file, {})[step / epoch] = row
    for files in runs.values():
        steady = [
            (min(own), file, own) for file, own in files.items() if max(own) < 1.01 * min(own)
        ]
        steady.sort(key=lambda each: each[0])
        if steady and steady[-1][0] > 1.02 * steady[0][0]:
            (_, first, _), (length, second, own) = steady[0], steady[-1]
            raise FormatError(_conflict(first, second, own[length], "the steps per epoch"))


def _plans(rows: Iterable[Row]) -> dict[tuple[str, str], set[tuple[Any, ...]]]:
    """By recipe and run, which schedules, lengths and rates there are.

    Rows of `lawa sweep` do not say; they belong to the run of that name, if there is only one.
    """
    found: dict[tuple[str, str], set[tuple[Any, ...]]] = {}
    for row in rows:
        if "schedule" in row:
            plan = tuple(row.get(name) for name in _PLAN)
            found.setdefault(_name_of(row), set()).add(plan)
    return found


def _planned_peak(file: Path) -> float | None:
    """The peak rate in the plan of the run that wrote the file, if that is beside it."""
    try:
        plan = json.loads((file.parent / "config.json").read_bytes())
        return float(plan["hyperparameters"]["learning_rate"])
    except (OSError, *DAMAGE):
        return None


def _with_peaks(rows: list[Row], planned: float | None) -> list[Row]:
    """The rows, each with the peak rate of its run: as it says, as planned, or the highest one.

    The peak tells runs of a sweep over rates apart, whose names, seeds and lengths are the same.
    """
    highest: dict[tuple[Any, ...], float] = {}
    for row in rows:
        if "schedule" in row and row.get("learning_rate") is not None:
            key = _trained_as(row)
            highest[key] = max(highest.get(key, 0.0), row["learning_rate"])
    return [
        {"peak_learning_rate": planned or highest.get(_trained_as(row)), **row}
        if "schedule" in row
        else row
        for row in rows
    ]


def _trained_as(row: Row) -> tuple[Any, ...]:
    return (*_name_of(row), row.get("seed"), *(row.get(name) for name in _PLAN[:3]))


def _name_of(row: Row) -> tuple[str, str]:
    return str(row.get("recipe")), str(row.get("run"))


_WRITERS = "`lawa train`, `lawa demo`, `lawa sweep` and evaluate_side_by_side() write such rows."


def _no_rows_yet(file: Path) -> str:
    return (
        f"{file}: is empty. A run writes its first rows after its first evaluation; report on it "
        "then."
    )


def _rows_in(file: Path) -> list[Row]:
    if _is_empty(file):
        raise FormatError(_no_rows_yet(file))
    rows = []
    for number, row in enumerate(read_metrics(file), start=1):
        if "weights" in row:
            try:
                rows.append(_checked(row))
            except ValueError as error:
                raise FormatError(f"{file}, line {number}: {error}.") from None
    if not rows:
        raise FormatError(
            f"{file}: no row has `weights`, so this is not a metrics file. {_WRITERS}"
        )
    return rows


def _checked(row: Row) -> Row:
    if not isinstance(row["weights"], str) or not row["weights"]:
        raise ValueError(
            f"`weights` is {row['weights']!r}; use 'raw', 'averaged' or the name of a method"
        )
    if row.get("epoch") is None and row.get("step") is None:
        raise ValueError("the row has neither `epoch` nor `step`")
    for name, value in row.items():
        number = name in _COUNTS or name.split("_")[-1] in (*BETTER, "seconds")
        if number and not isinstance(value, int | float | None):
            raise ValueError(f"`{name}` is {value!r}, not a number")
        if name in ("epoch", "step") and value is not None and value < 0:
            raise ValueError(f"`{name}` is {value!r}, which is negative")
        if number and name.endswith("accuracy") and value is not None and value > 1:
            raise ValueError(
                f"`{name}` is {value!r}, but accuracies are fractions of 1; divide percentages by "
                "100"
            )
        if name in _LABELS and isinstance(value, list | dict):
            raise ValueError(f"`{name}` is {value!r}, not a name")
    # Python's JSON accepts NaN; a missing value is easier to handle correctly.
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in row.items()
    }


def _identity(row: Row) -> tuple[Any, ...]:
    """What identifies an evaluation: which series of which run, and when."""
    coefficients = row.get("coefficients")
    if row["weights"] == "raw":
        coefficients = None
    elif row["weights"] == "averaged":
        coefficients = coefficients or "uniform"
    row = {**row, "coefficients": coefficients}
    if row.get("step") is not None:
        row.pop("epoch", None)
    return tuple(str(row.get(name)) for name in _IDENTITY)


def _agree(one: Row, other: Row) -> bool:
    """Whether two rows hold the same values, as those of a run and a sweep over it do."""
    shared = (one.keys() & other.keys()) - set(_IDENTITY)
    return all(one[n] == other[n] for n in shared if not n.endswith("_seconds"))


def _conflict(first: Path, second: Path, row: Row, about: str | None = None) -> str:
    step = row.get("step")
    about = about or (f"step {step}" if step is not None else f"epoch {row['epoch']}")
    seed = "" if row.get("seed") is None else f" of seed {row['seed']}"
    return (
        f"{first} and {second} disagree about {about}{seed}, and nothing in their rows tells the "
        "two runs apart. Report on one file at a time, or give the rows different `run` or `seed` "
        "values. If a run was resumed into a second file, append that file to the first."
    )
