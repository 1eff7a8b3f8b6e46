"""What averaging saved, from rows of metrics alone. Pure Python.

A series *reaches* a target at the first point where its value is as good or better, once is
enough, for raw and averaged weights alike: somebody who watches the run would have stopped there.
The *saving* at a target is what the baseline (the raw weights) spent to reach it minus what the
averaged weights spent, in epochs, in steps, or in seconds with every cost of averaging charged.

The *headline* is the paper's: the longest stretch until the baseline matches the averaged weights.
It is one target for all seeds, the one at which the mean saving is longest, so that no seed picks
its own. As a maximum over targets it is a flattering number; the savings at the baseline's own
final and best values, which it does not choose, stand beside it.

Like is compared with like: where BatchNorm statistics of the average were re-estimated, the raw
weights with re-estimated statistics are the baseline that tells what *averaging* saved. Against
raw weights as they are usually evaluated the same curves show more, part of it the BatchNorm's.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeAlias

from torch_lawa.core.records import Row
from torch_lawa.errors import ConfigError, FormatError

__all__ = ["Axis", "Baseline", "Comparison", "Curve", "Metric", "Reach", "Saving", "compare"]

Axis: TypeAlias = Literal["epoch", "step", "seconds"]
Baseline: TypeAlias = Literal["alike", "usual"]


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
    """One series of one run: where it was (`at`) and what it was worth, in order."""

    at: tuple[float, ...]
    values: tuple[float | None, ...]

    def reach(self, metric: Metric, target: float) -> float | None:
        """Where the series first is as good as `target`, None where it never is.

        >>> Curve((1, 2, 3), (0.9, 0.3, 0.5)).reach(Metric("loss", "lower"), 0.5)
        2
        """
        pairs = zip(self.at, self.values, strict=True)
        return next((at for at, value in pairs if metric.reaches(value, target)), None)

    def value_at(self, at: float) -> float | None:
        """What the series was worth then: the value of the last point that is not later."""
        known = [v for place, v in zip(self.at, self.values, strict=True) if place <= at]
        return known[-1] if known else None


@dataclass(frozen=True)
class Reach:
    """Where the two series of one seed reached one target."""

    seed: Any
    target: float
    baseline_at: float | None
    averaged_at: float | None

    @property
    def saved(self) -> float | None:
        """What averaging saved, negative where it came later; None unless both reached it."""
        if self.baseline_at is None or self.averaged_at is None:
            return None
        return self.baseline_at - self.averaged_at


@dataclass(frozen=True)
class Saving:
    """The saving over all seeds: means and range of those seeds where both series got there."""

    reaches: tuple[Reach, ...]

    @property
    def both(self) -> list[Reach]:
        """The seeds in which both series reached their target."""
        return [reach for reach in self.reaches if reach.saved is not None]

    @property
    def target(self) -> float | None:
        """The target, the mean of them where each seed has its own."""
        return _mean([reach.target for reach in self.reaches])

    @property
    def baseline_at(self) -> float | None:
        """Where the baseline reached it, on average."""
        return _mean([r.baseline_at for r in self.both])

    @property
    def averaged_at(self) -> float | None:
        """Where the averaged weights reached it, on average."""
        return _mean([r.averaged_at for r in self.both])

    @property
    def saved(self) -> float | None:
        """The mean saving."""
        return _mean([r.saved for r in self.both])

    @property
    def spread(self) -> tuple[float, float] | None:
        """The smallest and the largest saving of a seed."""
        saved = [r.saved for r in self.both if r.saved is not None]
        return (min(saved), max(saved)) if saved else None

    @property
    def percent(self) -> float | None:
        """The mean saving in percent of what the baseline spent."""
        if self.saved is None or not self.baseline_at:
            return None
        return 100.0 * self.saved / self.baseline_at


@dataclass(frozen=True)
class Comparison:
    """Averaged weights against the baseline in one metric, over all seeds of the rows."""

    metric: Metric
    axis: Axis
    baseline: dict[Any, Curve]
    averaged: dict[Any, Curve]

    def saving_at(self, target: float) -> Saving:
        """The saving at one target for all seeds."""
        return self._saving(dict.fromkeys(self.averaged, target))

    @cached_property
    def headline(self) -> Saving | None:
        """The longest stretch until the baseline matches the averaged weights in every seed.

        None where no value of the averaged weights was reached by both in every seed, or where
        they were never ahead.
        """
        values = {v for curve in self.averaged.values() for v in curve.values if v is not None}
        savings = [self.saving_at(target) for target in sorted(values)]
        ahead = [s for s in savings if len(s.both) == len(s.reaches) and (s.saved or 0.0) > 0.0]
        return max(ahead, key=lambda s: s.saved or 0.0, default=None)

    @property
    def at_final(self) -> Saving:
        """The saving at the value that the baseline ended with, each seed its own."""
        return self._saving({seed: self.baseline[seed].values[-1] for seed in self.averaged})

    @property
    def at_best(self) -> Saving:
        """The saving at the best value that the baseline ever had, each seed its own."""
        return self._saving(
            {seed: self.metric.best(self.baseline[seed].values) for seed in self.averaged}
        )

    @property
    def never_matched(self) -> dict[Any, float]:
        """By seed, where the averaged weights first beat everything the baseline ever reached."""
        found = {}
        for seed, curve in self.averaged.items():
            best = self.metric.best(self.baseline[seed].values)
            for at, value in zip(curve.at, curve.values, strict=True):
                if value is not None and (best is None or self.metric.beats(value, best)):
                    found[seed] = at
                    break
        return found

    @property
    def behind(self) -> dict[Any, list[float]]:
        """By seed, where the raw weights of that very moment were better than the averaged ones."""
        return {
            seed: [
                at
                for at, value in zip(curve.at, curve.values, strict=True)
                if (raw := self.baseline[seed].value_at(at)) is not None
                and (value is None or self.metric.beats(raw, value))
            ]
            for seed, curve in self.averaged.items()
        }

    def _saving(self, targets: dict[Any, float | None]) -> Saving:
        return Saving(
            tuple(
                Reach(
                    seed,
                    target,
                    self.baseline[seed].reach(self.metric, target),
                    self.averaged[seed].reach(self.metric, target),
                )
                for seed, target in targets.items()
                if target is not None
            )
        )


def compare(
    rows: Sequence[Row],
    metric: Metric,
    *,
    axis: Axis = "epoch",
    k: int | None = None,
    batch_norm: str | None = None,
    baseline: Baseline = "alike",
) -> Comparison:
    """Averaged weights against raw ones, from the rows of one or several seeds.

    Of several averages in the rows, choose with `k` and `batch_norm`; BatchNorm statistics that
    were re-estimated go before copied ones. The baseline is the raw weights with BatchNorm treated
    "alike" where the rows have them, or as "usual", with their running statistics. Where a
    resumed run wrote a moment twice, the later row counts.

    >>> rows = [
    ...     {"epoch": e, "weights": w, "k": 2, "loss": loss}
    ...     for w, losses in {"raw": (9, 8, 7, 5), "averaged": (None, 7, 6, 5)}.items()
    ...     for e, loss in enumerate(losses, start=1)
    ... ]
    >>> compare(rows, Metric("loss", "lower")).headline.saved
    1.0
    """
    rows = [row for row in rows if metric.name in row]
    raw = [row for row in rows if row.get("weights") == "raw"]
    averaged = [row for row in rows if row.get("weights") == "averaged"]
    for name, wanted in (("k", k), ("batch_norm", batch_norm)):
        found = {row.get(name) for row in averaged}
        if wanted is None and len(found) > 1:
            if "re-estimated" not in found:
                raise ConfigError(f"the rows hold averages with {name} in {found}: choose one.")
            wanted = "re-estimated"
        if wanted is not None:
            averaged = [row for row in averaged if row.get(name) == wanted]
    if not raw or not averaged:
        missing = "averaged" if raw else "raw"
        raise FormatError(f"no row holds {metric.name!r} of {missing} weights to compare.")
    usual = [row for row in raw if row.get("batch_norm") is None]
    treated = [row for row in raw if row.get("batch_norm") == averaged[0].get("batch_norm")]
    raw_curves = _curves((treated if baseline == "alike" else []) or usual, usual, metric, axis)
    averaged_curves = _curves(averaged, usual, metric, axis)
    return Comparison(
        metric, axis, raw_curves, {s: c for s, c in averaged_curves.items() if s in raw_curves}
    )


def _curves(rows: list[Row], usual: list[Row], metric: Metric, axis: Axis) -> dict[Any, Curve]:
    curves = {}
    for seed in dict.fromkeys(row.get("seed") for row in rows):
        own = _moments(rows, seed)
        at = _clock(own, _moments(usual, seed)) if axis == "seconds" else [r[axis] for r in own]
        curves[seed] = Curve(tuple(at), tuple(row[metric.name] for row in own))
    return curves


def _moments(rows: list[Row], seed: Any) -> list[Row]:
    """The rows of one seed in order, the last one of each moment."""
    latest = {_moment(row): row for row in rows if row.get("seed") == seed}
    return [latest[moment] for moment in sorted(latest)]


def _moment(row: Row) -> float:
    return float(row["step"] if "step" in row else row["epoch"])


def _clock(rows: list[Row], usual: list[Row]) -> list[float]:
    """Seconds until each row was known: the training and all that this series cost so far.

    An average is charged with the usual evaluations too, since it comes on top of them.
    """
    clock = []
    own = 0.0
    for row in rows:
        own += sum(row.get(f"{act}_seconds", 0.0) for act in ("average", "batch_norm", "evaluate"))
        spent = row["train_seconds"] + own
        if row["weights"] == "averaged":
            before = [r for r in usual if _moment(r) <= _moment(row)]
            spent += sum(r.get("evaluate_seconds", 0.0) for r in before)
            spent += row.get("collect_seconds", 0.0)
        clock.append(spent)
    return clock


def _mean(values: Sequence[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return math.fsum(there) / len(there) if there else None
