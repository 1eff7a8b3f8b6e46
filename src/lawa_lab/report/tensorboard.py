"""The series of runs as TensorBoard event files. tensorboard (an extra) is imported only here.

A folder for each recipe, run, seed and series, so that TensorBoard lists them as runs and draws
raw and averaged weights in one chart. The step is the row's step. The time is what the meter
counts: seconds from the start of the run until the value was known, with the costs of that series;
TensorBoard's "wall" then reads as the time since the start, the same start for every series.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lawa_lab.report.curves import Metric
from lawa_lab.report.runs import Run, Series, metrics_of
from torch_lawa.errors import FormatError, LawaError, OutputError
from torch_lawa.metrics import Row

__all__ = ["save_events"]

_ALSO = ("learning_rate", "train_loss", "train_accuracy")  # of the run, not to be compared
_EVENTS = "events.out.tfevents.*"


def save_events(runs: Sequence[Run], folder: Path, *, overwrite: bool = False) -> list[Path]:
    """Write every series; returns the folders, one for each seed and series.

    Event files that are there already would be drawn together with the new ones: they are
    refused, or with `overwrite` removed where the new ones go.
    """
    writer = _writer()
    # All values before the first file: a row that cannot be told stops it with nothing written.
    plan = {place: list(_scalars(*which)) for place, which in _folders(runs, folder)}
    there = [place for place in plan if any(place.glob(_EVENTS))]
    if there and not overwrite:
        raise OutputError(
            f"{there[0]} already holds event files: pass --overwrite to replace them, or choose "
            "another folder."
        )
    for place, scalars in plan.items():
        for old in place.glob(_EVENTS):
            old.unlink()
        with writer(str(place)) as events:
            for tag, value, step, seconds in scalars:
                events.add_scalar(tag, value, step, walltime=seconds)
    return list(plan)


def _folders(runs: Sequence[Run], folder: Path) -> Iterator[tuple[Path, tuple[Run, Series, Any]]]:
    taken: set[Path] = set()
    for run in runs:
        for seed in run.seeds:
            for series in run.series:
                if not run.rows_of(series, seed):
                    continue
                names = [run.recipe, run.name]
                names += [] if seed is None else [f"seed {seed}"]
                place = folder.joinpath(*map(_file_name, [*names, series.label]))
                while place in taken:  # names that differ only in what a file name cannot hold
                    place = place.with_name(f"{place.name}_")
                taken.add(place)
                yield place, (run, series, seed)


def _scalars(run: Run, series: Series, seed: Any) -> Iterator[tuple[str, float, int, float | None]]:
    """Tag, value, step, and seconds where they are known."""
    rows = run.rows_of(series, seed)
    names = [metric.name for metric in metrics_of(rows)]
    if series == Series():  # once: they are the run's, whatever is evaluated
        names += [name for name in _ALSO if any(name in row for row in rows)]
    for name in names:
        own = [row for row in rows if name in row]
        known: Sequence[float | None] = [None] * len(own)
        if "seconds" in run.axes(series):
            # Which way the value is better does not matter to when it was known.
            known = run.curves(series, Metric(name, "lower"), "seconds")[seed].at
        for row, seconds in zip(own, known, strict=True):
            if row[name] is not None:
                yield name, row[name], _step(row), seconds


def _step(row: Row) -> int:
    step = row["epoch"] if row.get("step") is None else row["step"]
    if step != int(step):
        raise FormatError(
            f"a row at epoch {step} has no `step`: event files count whole steps, and two "
            "evaluations of one epoch would fall together."
        )
    return int(step)


def _file_name(text: str) -> str:
    """Such as "k=10,BatchNorm-copied": what any file system and TensorBoard's filter take."""
    tight = text.replace(" = ", "=").replace(", ", ",")
    return re.sub(r"[^\w.,=()+-]", "-", tight).strip(".") or "-"


def _writer() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise LawaError(
            f"event files are written with tensorboard, which could not be imported ({error}): "
            "pip install 'torch-lawa[tensorboard]'"
        ) from None
    return SummaryWriter
