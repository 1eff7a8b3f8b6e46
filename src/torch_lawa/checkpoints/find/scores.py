"""The best checkpoints by a metric that was recorded during training.

Values come from a metrics file if one is given. Otherwise they are looked for with the checkpoints:
in the trainer states of Transformers, in the metrics of Orbax, and in names such as
`epoch=3-val_loss=0.25.ckpt`, which Lightning writes.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from torch_lawa.checkpoints.find.discovery import Discovery, FoundCheckpoint
from torch_lawa.checkpoints.find.step_names import stem_of
from torch_lawa.checkpoints.storage.paths import Location
from torch_lawa.errors import ConfigError, FormatError
from torch_lawa.metrics import mode_by_name, read_metrics
from torch_lawa.units import few
from torch_lawa.validation import one_of

__all__ = ["Mode", "choose_best", "find_scores", "mode_of"]

Mode = Literal["min", "max"]
Number = tuple[str, int]  # "step" or "epoch", and which
_VALUE = r"(?<!\w){}=?(-?[0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?)(?![0-9])"


@dataclass(frozen=True)
class BestCheckpoints:
    """The chosen checkpoints, oldest first, and the value of the metric of each."""

    discovery: Discovery
    metric: str
    mode: Mode
    values: tuple[float, ...]


def mode_of(metric: str) -> Mode:
    """Whether low or high values of a metric are good, by its name; raises if that is unclear."""
    mode = mode_by_name(metric)
    if mode is None:
        raise ConfigError(
            f"--metric {metric}: it is not clear from its name whether low or high values are "
            "good. Pass --mode min or --mode max."
        )
    return mode


def choose_best(
    discovery: Discovery,
    best: int,
    metric: str,
    *,
    mode: Mode | None = None,
    metrics: Path | None = None,
) -> BestCheckpoints:
    """Choose the `best` checkpoints by a metric; of equal ones the newer.

    >>> from torch_lawa.checkpoints.storage.paths import LocalPath
    >>> names = {1: "epoch=1-loss=0.5.ckpt", 2: "epoch=2-loss=0.2.ckpt", 3: "epoch=3-loss=0.3.ckpt"}
    >>> run = [FoundCheckpoint(LocalPath(name), None, epoch) for epoch, name in names.items()]
    >>> chosen = choose_best(Discovery(tuple(run), "epoch", is_run=True), 2, "loss")
    >>> chosen.discovery.numbers, chosen.values
    ([2, 3], (0.2, 0.3))
    """
    if best < 1:
        raise ConfigError(f"--best {best}: it must be at least 1.")
    one_of("mode", mode, (None, *get_args(Mode)))
    mode = mode or mode_of(metric)
    scores = find_scores(discovery.found, metric, metrics)
    scored = [(at, value) for at, value in enumerate(scores) if value is not None]
    pairs = zip(discovery.found, scores, strict=True)
    missing = few(each.label for each, value in pairs if value is None)
    if len(scored) < best:
        if not missing:
            raise ConfigError(
                f"--best {best}, but there are only {len(scored)} checkpoints to choose from. Use "
                f"--best {len(scored)} or fewer."
            )
        raise ConfigError(
            f"--best {best}, but only {len(scored)} of {len(scores)} checkpoints have a value of "
            f"{metric} (none for {missing}). Use --best {len(scored)} or fewer, or pass the values "
            "with --metrics FILE."
        )
    sign = 1 if mode == "min" else -1
    ranked = sorted(scored, key=lambda pair: (sign * pair[1], -pair[0]))
    chosen = sorted(ranked[:best])
    notes = list(discovery.notes)
    if len(ranked) > best and ranked[best][1] == ranked[best - 1][1]:
        kept, left = (discovery.found[ranked[i][0]].label for i in (best - 1, best))
        notes.append(f"{kept} and {left} have the same {metric}; the newer one is used")
    if missing:
        notes.append(f"left out: {missing} (no value of {metric})")
    found = tuple(discovery.found[at] for at, _ in chosen)
    return BestCheckpoints(
        replace(discovery, found=found, notes=tuple(notes)),
        metric,
        mode,
        tuple(value for _, value in chosen),
    )


def find_scores(
    found: Sequence[FoundCheckpoint], metric: str, metrics: Path | None = None
) -> list[float | None]:
    """The value of a metric for each checkpoint; None where there is none."""
    if metrics is not None:
        rows = read_metrics(metrics) if metrics.is_file() else None
        if rows is None:
            raise ConfigError(f"--metrics {metrics}: there is no such file.")
        raw = [row for row in rows if _is_raw(row)]
        # Side by side, BatchNorm statistics may be re-estimated in a second row of each step.
        raw = [row for row in raw if row.get("batch_norm") is None] or raw
        return _look_up(found, _by_number(raw, metric, metrics), metric, raw, str(metrics))
    states = [row for each in found for row in _trainer_rows(each.location)]
    named = [_named(each, metric) for each in found]
    if any(value is not None for value in named):
        return named
    name = metric
    if not any(name in row for row in states) and any(f"eval_{metric}" in row for row in states):
        name = f"eval_{metric}"  # as Transformers reads `metric_for_best_model`
    where = "the trainer states, Orbax metrics or names of the checkpoints"
    return _look_up(found, _by_number(states, name, where), metric, states, where)


def _look_up(
    found: Sequence[FoundCheckpoint],
    values: Mapping[Number, float],
    metric: str,
    rows: Iterable[Mapping[str, Any]],
    where: str,
) -> list[float | None]:
    if not values:
        known = sorted({str(k) for row in rows for k, v in row.items() if _number(v) is not None})
        listed = f" There are: {few(known, limit=12)}." if known else ""
        raise ConfigError(
            f"no value of {metric!r} in {where}.{listed} Choose another --metric, or pass a file "
            "with --metrics."
        )
    numbers = [(("step", each.step), ("epoch", each.epoch)) for each in found]
    return [
        next((values[by, n] for by, n in both if n is not None and (by, n) in values), None)
        for both in numbers
    ]


def _by_number(
    rows: Iterable[Mapping[str, Any]], metric: str, where: object
) -> dict[Number, float]:
    """The value of each step, or epoch where rows have no step."""
    values: dict[Number, float] = {}
    for row in rows:
        value = _number(row.get(metric))
        by = "step" if row.get("step") is not None else "epoch"
        number = _number(row.get(by))
        if value is None or number is None or not number.is_integer():
            continue
        known = values.setdefault((by, int(number)), value)
        if known != value:
            raise FormatError(
                f"{where}: {metric} of {by} {int(number)} is both {known:g} and {value:g}. Keep "
                "one row for each."
            )
    return values


def _is_raw(row: Mapping[str, Any]) -> bool:
    """Whether a row is about the checkpoint itself, not an average that ends there."""
    return row.get("weights") in (None, "raw") and row.get("k") in (None, 1)


def _trainer_rows(location: Location) -> list[dict[str, Any]]:
    """What Transformers logged until this checkpoint."""
    file = location.child("trainer_state.json")
    if not location.is_folder() or not file.is_file():
        return []
    rows = file.read_json().get("log_history")
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def _named(found: FoundCheckpoint, metric: str) -> float | None:
    """The value that Orbax stored with a checkpoint, or that is in its name."""
    folder = found.location
    file = folder.child("metrics").child("metrics")
    if folder.is_folder() and file.is_file():
        return _number(file.read_json().get(metric))
    text = re.search(_VALUE.format(re.escape(metric)), stem_of(folder.name), re.IGNORECASE)
    return _number(float(text[1])) if text else None


def _number(value: object) -> float | None:
    """A finite number: the loss of a run that diverged is not one."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None
