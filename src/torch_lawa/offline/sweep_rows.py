"""The rows of a sweep: which ones a metrics file already has, and what the evaluator returns."""

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_lawa.checkpoints.formats.registry import open_checkpoint
from torch_lawa.checkpoints.storage.paths import LocalPath, Location
from torch_lawa.errors import ConfigError, OutputError
from torch_lawa.metrics import Row, read_metrics
from torch_lawa.offline.sweep_plan import SweepPlan, SweepWindow

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["IDENTITY", "Evaluator", "evaluate", "newest_checkpoint", "without_known"]

# What a row is about; see `without_known`.
IDENTITY = ("step", "epoch", "weights", "k", "horizon", "coefficients", "checkpoint")

Evaluator = Callable[["dict[str, Tensor]"], Mapping[str, Any]]


def without_known(plan: SweepPlan, metrics: Path | None) -> list[SweepWindow]:
    """The windows that the metrics file has no row of; rows of another run are refused."""
    if metrics is None or not metrics.exists():
        return list(plan.windows)
    known: dict[tuple[object, ...], object] = {}
    for row in read_metrics(metrics):
        rule = None if row.get("k") is None else row.get("coefficients")  # raw rows have no rule
        key = row.get("step"), row.get("epoch"), row.get("k"), row.get("horizon"), rule
        known[key] = row.get("checkpoint")  # None in rows that a sweep did not write
    todo = []
    for w in plan.windows:
        key = w.step, w.epoch, _k(w), w.horizon, None if w.k == 1 else plan.coefficients
        if key not in known:
            todo.append(w)
        elif known[key] not in (None, here := newest_checkpoint(plan, w, metrics)):
            raise OutputError(
                f"{metrics}: has a row of {known[key]}, but this sweep is about {here}. Write "
                "each run's rows to a metrics file of its own (--metrics)."
            )
    return todo


def newest_checkpoint(plan: SweepPlan, window: SweepWindow, metrics: Path) -> str:
    """The newest checkpoint of a window, as seen from the metrics file: both may be moved."""
    location = plan.found[window.end].location
    if isinstance(location, LocalPath):
        return os.path.relpath(location.path, metrics.parent)
    return str(location)


def _k(window: SweepWindow) -> int | None:
    return None if window.k == 1 else window.k


def evaluate(
    evaluator: Evaluator,
    location: Location,
    window: SweepWindow,
    facts: Mapping[str, Any],
) -> Row:
    """The row of one result, with the values that the evaluator returns for it."""
    from torch_lawa.checkpoints.formats.safetensors import read_header
    from torch_lawa.checkpoints.formats.safetensors_torch import load_tensors

    path = Path(str(location))
    began = time.perf_counter()
    state = load_tensors(path, read_header(path))
    with open_checkpoint(location) as made:
        state.update({name: state[kept] for name, kept in made.aliases.items()})
    try:
        values = evaluator(state)
    except Exception as error:
        error.add_note(f"This was raised by the evaluator, for {window.name}.")
        raise
    seconds = time.perf_counter() - began
    if not isinstance(values, Mapping):
        raise ConfigError(
            f"the evaluator returned {type(values).__name__}; it must return a dict of named "
            "values, such as {'test_loss': 0.1}."
        )
    found = {name: _plain(name, value) for name, value in values.items()}
    if not any(isinstance(value, float | int) for value in found.values()):
        raise ConfigError(
            f"the evaluator returned no number, but {dict(values)!r}; it must return named values, "
            "such as {'test_loss': 0.1}."
        )
    clash = [name for name in IDENTITY if name in found]
    if clash:
        raise ConfigError(
            f"the evaluator returned a value named {clash[0]!r}, which identifies the rows of a "
            "sweep; choose another name."
        )
    moment = {"step": window.step, "epoch": window.epoch}
    return {
        **facts,
        **{name: number for name, number in moment.items() if number is not None},
        "weights": "raw" if window.k == 1 else "averaged",
        "k": _k(window),
        **({} if window.horizon is None else {"horizon": window.horizon}),
        "batch_norm": None,
        **found,
        "evaluate_seconds": seconds,
    }


def _plain(name: str, value: Any) -> float | int | str | None:
    """A value that a metrics file can hold; arrays and tensors of one number become floats."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise ConfigError(
            f"the evaluator returned a {type(value).__name__} as {name!r}; return one number, such "
            "as value.item()."
        ) from None
