"""The series of runs as TensorBoard event files. tensorboard (an extra) is imported only here.

There is one folder per recipe, run, seed and series, so that TensorBoard lists them as runs and
draws raw and averaged weights in one chart. The step is that of the row. The time is the one that
savings are counted in: seconds from the start of the run until the value was known, including the
costs of that series, so that TensorBoard's "wall" time starts at zero for every series.
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

_ALSO = ("learning_rate", "train_loss", "train_accuracy")  # of the run, whatever is evaluated
_EVENTS = "events.out.tfevents.*"


def save_events(runs: Sequence[Run], folder: Path, *, overwrite: bool = False) -> list[Path]:
    """Write every series; returns the folders, one per seed and series.

    TensorBoard would draw existing event files together with the new ones, so they are refused, or
    with `overwrite` removed.
    """
    writer = _writer()
    # Collect all values first, so that a bad row stops it before anything is written.
    plan = {path: list(_scalars(*which)) for path, which in _folders(runs, folder)}
    there = [path for path in plan if any(path.glob(_EVENTS))]
    if there and not overwrite:
        raise OutputError(
            f"{there[0]} already holds event files. Pass --overwrite to replace them, or choose "
            "another folder."
        )
    for path, scalars in plan.items():
        for old in path.glob(_EVENTS):
            old.unlink()
        with writer(str(path)) as events:
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
                path = folder.joinpath(*map(_file_name, [*names, series.label]))
                while path in taken:  # names that differ only in characters that were replaced
                    path = path.with_name(f"{path.name}_")
                taken.add(path)
                yield path, (run, series, seed)


def _scalars(run: Run, series: Series, seed: Any) -> Iterator[tuple[str, float, int, float | None]]:
    """Tag, value, step, and seconds if they are known."""
    rows = run.rows_of(series, seed)
    names = [metric.name for metric in metrics_of(rows)]
    if series == Series():  # only once
        names += [name for name in _ALSO if any(name in row for row in rows)]
    for name in names:
        own = [row for row in rows if name in row]
        known: Sequence[float | None] = [None] * len(own)
        if "seconds" in run.axes(series):
            # Which direction is better does not matter here.
            known = run.curves(series, Metric(name, "lower"), "seconds")[seed].at
        for row, seconds in zip(own, known, strict=True):
            if row[name] is not None:
                yield name, row[name], _step(row), seconds


def _step(row: Row) -> int:
    step = row["epoch"] if row.get("step") is None else row["step"]
    if step != int(step):
        raise FormatError(
            f"a row at epoch {step} has no `step`, but event files need whole steps. Add `step` to "
            "the rows."
        )
    return int(step)


def _file_name(text: str) -> str:
    """A name such as "k=10,BatchNorm-copied", for any file system and TensorBoard's filter."""
    tight = text.replace(" = ", "=").replace(", ", ",")
    return re.sub(r"[^\w.,=()+-]", "-", tight).strip(".") or "-"


def _writer() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise LawaError(
            f"event files need tensorboard, which could not be imported ({error}): "
            "pip install 'torch-lawa[tensorboard]'"
        ) from None
    return SummaryWriter
