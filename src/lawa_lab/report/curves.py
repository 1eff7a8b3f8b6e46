"""A metric, and one series of it as a curve on an axis: epochs, steps, seconds, GPU-hours.

On the axes of time a point lies where its value was *known*: after the training until then and all
that this series cost so far, averaging, BatchNorm passes and evaluations alike.
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
    "shared_looks",
]

Axis: TypeAlias = Literal["epoch", "step", "seconds", "gpu_hours"]

# The last word of a value's name tells which way is better.
BETTER: dict[str, Literal["lower", "higher"]] = {
    "loss": "lower",
    "perplexity": "lower",
    "error": "lower",
    "accuracy": "higher",
}


@dataclass(frozen=True)
class Metric:
    """A value in the rows, and which way is better."""

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

    def best(self, values: Iterable[float | None]) -> float | None:
        """The best of the values that are there."""
        there = [value for value in values if value is not None]
        return (min if self.better == "lower" else max)(there, default=None)


@dataclass(frozen=True)
class Curve:
    """One series of one seed: where it was (`at`) and what it was worth, in order."""

    at: tuple[float, ...]
    values: tuple[float | None, ...]

    def reach(self, metric: Metric, target: float) -> float | None:
        """Where the series first is as good as `target`, None where it never is.

        >>> Curve((1, 2, 3), (0.9, 0.3, 0.5)).reach(Metric("loss", "lower"), 0.5)
        2
        """
        places, records, sign = self._bests[metric.better]
        # The first record that is as good: records improve, so `sign * record` only grows.
        found = bisect.bisect_left(records, sign * target)
        return places[found] if found < len(places) else None

    def records(self, metric: Metric) -> list[float]:
        """The values that were better than all before, in order."""
        _, records, sign = self._bests[metric.better]
        return [sign * record for record in records]

    def value_at(self, at: float) -> float | None:
        """What the series was worth then: the value of the last point that is not later."""
        found = bisect.bisect_right(self.at, at)
        return self.values[found - 1] if found else None

    @cached_property
    def _bests(self) -> dict[str, tuple[list[float], list[float], float]]:
        """By direction: where each record was set, and the record times the direction's sign."""
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
    """What a row is ordered by: its step, or its epoch where steps are not counted."""
    for name in ("step", "epoch"):
        if row.get(name) is not None:
            return float(row[name])
    raise FormatError("a row of metrics has neither `step` nor `epoch`: nothing orders it.")


def in_order(rows: Iterable[Row]) -> list[Row]:
    """The rows of one seed and series by moment; of a moment that was written twice, the later.

    A resumed run repeats what came after its last checkpoint, and that is what it went on from.
    """
    latest = {moment_of(row): row for row in rows}
    return [latest[moment] for moment in sorted(latest)]


def shared_looks(own: Sequence[float], other: Sequence[float]) -> set[float]:
    """The moments of one series that count when it is held against another one.

    Who looks more often is sooner seen to reach a value, by up to the other's interval. So between
    the first and the last look at the other series, only moments at which both were looked at
    count. All count where there is no such moment.

    >>> sorted(shared_looks(own=[1, 2, 3, 4, 5, 6, 7], other=[2, 4, 6]))
    [1, 2, 4, 6, 7]
    """
    if not set(own) & set(other):
        return set(own)
    first, last, both = other[0], other[-1], set(other)
    return {moment for moment in own if moment in both or not first <= moment <= last}


def curve_of(rows: Iterable[Row], usual: Iterable[Row], metric: Metric, axis: Axis) -> Curve:
    """The curve of one series of one seed.

    `usual` are the rows of the same seed's raw weights as they are usually evaluated. An average
    is charged with those evaluations too, since it comes on top of them.
    """
    own = in_order(rows)
    if axis in ("epoch", "step"):
        places = [_known(row, axis) for row in own]
    else:
        places = _clock(own, in_order(usual))
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
    """Seconds until each row was known: the training and all that this series cost so far."""
    clock = []
    own = raw_evaluations = 0.0
    waiting = iter(usual)
    next_usual = next(waiting, None)
    for row in rows:
        own += sum(
            row.get(f"{act}_seconds") or 0.0 for act in ("average", "batch_norm", "evaluate")
        )
        spent = _known(row, "train_seconds") + own
        if row.get("weights") == "averaged":
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
            f"does not say its `{name}`, so nothing can be counted by it."
        )
    return value  # type: ignore[no-any-return]
