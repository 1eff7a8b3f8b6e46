"""A metric, and the values of one series as a curve over epochs, steps, seconds or GPU-hours.

On the time axes a point is placed where its value became *known*: after the training up to there
and everything this series has cost so far, including averaging, BatchNorm passes and evaluations.
"""

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias

from torch_lawa.errors import FormatError
from torch_lawa.metrics import Row

__all__ = [
    "BETTER",
    "Axis",
    "Curve",
    "Metric",
    "curve_of",
    "in_order",
    "moment_of",
    "shared_evaluations",
]

Axis: TypeAlias = Literal["epoch", "step", "seconds", "gpu_hours"]

# The last word of a metric's name says which direction is better.
BETTER: dict[str, Literal["lower", "higher"]] = {
    "loss": "lower",
    "perplexity": "lower",
    "error": "lower",
    "accuracy": "higher",
}


@dataclass(frozen=True)
class Metric:
    """A value in the rows, and which direction is better."""

    name: str
    better: Literal["lower", "higher"]

    def reaches(self, value: float | None, target: float) -> bool:
        """Whether `value` is as good as `target`; a missing value never is."""
        if value is None:
            return False
        return value <= target if self.better == "lower" else value >= target

    def beats(self, value: float, other: float) -> bool:
        """Whether `value` is strictly better than `other`."""
        return value < other if self.better == "lower" else value > other

    def lead(self, value: float, other: float) -> float:
        """By how much `value` is better than `other`; negative if it is worse."""
        return other - value if self.better == "lower" else value - other

    def best(self, values: Iterable[float | None]) -> float | None:
        """The best of the values that are not missing."""
        there = [value for value in values if value is not None]
        return (min if self.better == "lower" else max)(there, default=None)


@dataclass(frozen=True)
class Curve:
    """One series of one seed: positions on the axis (`at`) and the values there, in order."""

    at: tuple[float, ...]
    values: tuple[float | None, ...]

    def reach(self, metric: Metric, target: float) -> float | None:
        """Where the series is first as good as `target`, or None if it never is.

        >>> Curve((1, 2, 3), (0.9, 0.3, 0.5)).reach(Metric("loss", "lower"), 0.5)
        2
        """
        places, records, sign = self._bests[metric.better]
        # Records only improve, so `sign * record` is sorted.
        found = bisect.bisect_left(records, sign * target)
        return places[found] if found < len(places) else None

    def records(self, metric: Metric) -> list[float]:
        """The values that were better than all earlier ones, in order."""
        _, records, sign = self._bests[metric.better]
        return [sign * record for record in records]

    def value_at(self, at: float) -> float | None:
        """The value of the last point that is not later than `at`."""
        found = bisect.bisect_right(self.at, at)
        return self.values[found - 1] if found else None

    @cached_property
    def _bests(self) -> dict[str, tuple[list[float], list[float], float]]:
        """By direction: where each record was set, the record times the sign, and the sign."""
        bests: dict[str, tuple[list[float], list[float], float]] = {}
        for better, sign in (("lower", -1.0), ("higher", 1.0)):
            places: list[float] = []
            records: list[float] = []
            for at, value in zip(self.at, self.values, strict=True):
                if value is not None and (not records or sign * value > records[-1]):
                    places.append(at)
                    records.append(sign * value)
            bests[better] = (places, records, sign)
        return bests


def moment_of(row: Row) -> float:
    """What rows are ordered by: the step, or the epoch if there is no step."""
    for name in ("step", "epoch"):
        if row.get(name) is not None:
            return float(row[name])
    raise FormatError("a row of metrics has neither `step` nor `epoch`.")


def in_order(rows: Iterable[Row]) -> list[Row]:
    """The rows of one seed and series, sorted; of rows written twice, the later one.

    A resumed run repeats what came after its last checkpoint.
    """
    latest = {moment_of(row): row for row in rows}
    return [latest[moment] for moment in sorted(latest)]


def shared_evaluations(own: Sequence[float], other: Sequence[float]) -> set[float]:
    """The moments of one series that count when it is compared with another.

    A series that is evaluated more often is seen to reach a value earlier, by up to the interval
    of the other. So between the first and the last evaluation of the other series, only moments
    at which both were evaluated count. If there is no such moment, all count.

    >>> sorted(shared_evaluations(own=[1, 2, 3, 4, 5, 6, 7], other=[2, 4, 6]))
    [1, 2, 4, 6, 7]
    """
    if not set(own) & set(other):
        return set(own)
    first, last, both = other[0], other[-1], set(other)
    return {moment for moment in own if moment in both or not first <= moment <= last}


def curve_of(
    rows: Iterable[Row],
    usual: Iterable[Row],
    metric: Metric,
    axis: Axis,
    *,
    earlier: Sequence[Row] = (),
) -> Curve:
    """The curve of one series of one seed.

    `usual` are the same seed's raw weights with running BatchNorm statistics. An average is charged
    for those evaluations as well, because they are needed with or without averaging. What `earlier`
    rows cost is charged too, but they are not part of the curve.
    """
    own = in_order(rows)
    if axis in ("epoch", "step"):
        places = [_known(row, axis) for row in own]
    else:
        places = _clock([*earlier, *own], in_order(usual))[len(earlier) :]
        if axis == "gpu_hours":
            places = [
                at * (row.get("num_devices") or 1) / 3600
                for at, row in zip(places, own, strict=True)
            ]
    there = [
        (at, row[metric.name]) for at, row in zip(places, own, strict=True) if metric.name in row
    ]
    return Curve(tuple(at for at, _ in there), tuple(value for _, value in there))


def _clock(rows: Sequence[Row], usual: Sequence[Row]) -> list[float]:
    """Seconds until each row was known: training, and everything this series has cost so far."""
    clock = []
    own = raw_evaluations = 0.0
    waiting = iter(usual)
    next_usual = next(waiting, None)
    for row in rows:
        own += sum(
            row.get(f"{act}_seconds") or 0.0 for act in ("average", "batch_norm", "evaluate")
        )
        spent = _known(row, "train_seconds") + own
        if row.get("weights") != "raw":
            while next_usual is not None and moment_of(next_usual) <= moment_of(row):
                raw_evaluations += next_usual.get("evaluate_seconds") or 0.0
                next_usual = next(waiting, None)
            spent += raw_evaluations + (row.get("collect_seconds") or 0.0)
        clock.append(spent)
    return clock


def _known(row: Row, name: str) -> float:
    value = row.get(name)
    if value is None:
        raise FormatError(
            f"a row at {'step' if row.get('step') is not None else 'epoch'} {moment_of(row):g} "
            f"has no `{name}`."
        )
    return value  # type: ignore[no-any-return]
