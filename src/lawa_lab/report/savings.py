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
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeAlias

from lawa_lab.report.curves import Axis, Curve, Metric, shared_looks
from lawa_lab.report.runs import Run, Series
from torch_lawa.errors import ConfigError, FormatError
from torch_lawa.metrics import Row

__all__ = [
    "Axis",
    "Baseline",
    "Comparison",
    "Curve",
    "Line",
    "Metric",
    "Reach",
    "Saving",
    "Unmatched",
    "baseline_of",
    "compare",
    "compare_series",
]

Baseline: TypeAlias = Literal["alike", "usual"]
Line: TypeAlias = tuple[Run, Series]


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
    def sd(self) -> float | None:
        """The standard deviation of the savings of the seeds; None for fewer than two."""
        saved = [r.saved for r in self.both if r.saved is not None]
        return statistics.stdev(saved) if len(saved) > 1 else None

    @property
    def percent(self) -> float | None:
        """The mean saving in percent of what the baseline spent."""
        if self.saved is None or not self.baseline_at:
            return None
        return 100.0 * self.saved / self.baseline_at


@dataclass(frozen=True)
class Unmatched:
    """In one seed the averaged weights came to a value that the baseline never reached."""

    seed: Any
    averaged_at: float  # where they first beat everything the baseline ever reached
    baseline_end: float  # where the baseline was seen last

    @property
    def at_least(self) -> float:
        """The saving is more than this: so long the baseline went on and did not get there."""
        return self.baseline_end - self.averaged_at


@dataclass(frozen=True)
class Comparison:
    """Averaged weights against the baseline in one metric, over the seeds that both have."""

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

        Of targets with the same saving, the hardest. None where no value of the averaged weights
        was reached by both in every seed, or where they were never ahead.
        """
        values = {v for curve in self.averaged.values() for v in curve.values if v is not None}
        hard_first = sorted(values, reverse=self.metric.better == "higher")
        savings = [self.saving_at(target) for target in hard_first]
        ahead = [s for s in savings if len(s.both) == len(s.reaches) and (s.saved or 0.0) > 0.0]
        return max(ahead, key=lambda s: s.saved or 0.0, default=None)

    @cached_property
    def savings(self) -> tuple[Saving, ...]:
        """The whole curve of saving against target, from easy to hard.

        The targets are the values at which some series of some seed was better than ever before.
        Any other target is reached where the next harder of these is, so nothing lies between.
        """
        values = {
            record
            for seed, curve in self.averaged.items()
            for each in (curve, self.baseline[seed])
            for record in each.records(self.metric)
        }
        easy_first = sorted(values, reverse=self.metric.better == "lower")
        return tuple(self.saving_at(target) for target in easy_first)

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
    def unmatched(self) -> tuple[Unmatched, ...]:
        """The seeds in which the averaged weights beat everything the baseline ever reached."""
        found = []
        for seed, curve in self.averaged.items():
            best = self.metric.best(self.baseline[seed].values)
            for at, value in zip(curve.at, curve.values, strict=True):
                if value is not None and (best is None or self.metric.beats(value, best)):
                    found.append(Unmatched(seed, at, self.baseline[seed].at[-1]))
                    break
        return tuple(found)

    @property
    def never_matched(self) -> dict[Any, float]:
        """By seed, where the averaged weights first beat everything the baseline ever reached."""
        return {found.seed: found.averaged_at for found in self.unmatched}

    @cached_property
    def moments(self) -> dict[Any, list[tuple[float, float | None, float]]]:
        """By seed, the places where both were looked at, with the averaged and the raw value.

        By the clock they never are at the same moment: the raw value is then the last one known.
        Places where the raw weights have no finite value are left out.
        """
        together = self.axis in ("epoch", "step")
        return {
            seed: [
                (at, value, raw)
                for at, value in zip(curve.at, curve.values, strict=True)
                if (raw := self.baseline[seed].value_at(at)) is not None
                and (not together or at in self._looked_at[seed])
            ]
            for seed, curve in self.averaged.items()
        }

    @property
    def behind(self) -> dict[Any, list[float]]:
        """By seed, where the raw weights of that very moment were better than the averaged ones."""
        return {
            seed: [
                at for at, value, raw in moments if value is None or self.metric.beats(raw, value)
            ]
            for seed, moments in self.moments.items()
        }

    @cached_property
    def _looked_at(self) -> dict[Any, set[float]]:
        return {seed: set(curve.at) for seed, curve in self.baseline.items()}

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


def compare_series(
    baseline: Line, averaged: Line, metric: Metric, *, axis: Axis = "epoch"
) -> Comparison:
    """One series against another, of the same run or of two, over the seeds that both have.

    Where one was evaluated more often than the other, only evaluations of both count (see
    `shared_looks`): looking more often must not pass for a saving.

    >>> sgd, lookahead = (
    ...     Run("toy", name, tuple({"epoch": e, "weights": w, "k": k, "loss": loss}
    ...         for w, k, losses in (("raw", None, raw), ("averaged", 2, mean))
    ...         for e, loss in enumerate(losses, start=1)))
    ...     for name, raw, mean in (("sgd", (9, 8, 7, 5), (9, 7, 5, 5)),
    ...                             ("lookahead", (9, 7, 6, 5), (9, 7, 6, 5)))
    ... )
    >>> loss, lawa = Metric("loss", "lower"), Series(2, "uniform")
    >>> compare_series((lookahead, Series()), (sgd, lawa), loss).headline.saved
    1.0
    """
    raw, own = baseline[0].moments(baseline[1], metric), averaged[0].moments(averaged[1], metric)
    both = [seed for seed in own if seed in raw]
    raw_at = {seed: shared_looks(raw[seed], own[seed]) for seed in both}
    own_at = {seed: shared_looks(own[seed], raw[seed]) for seed in both}
    raw_curves = baseline[0].curves(baseline[1], metric, axis, at=raw_at)
    own_curves = averaged[0].curves(averaged[1], metric, axis, at=own_at)
    return Comparison(metric, axis, raw_curves, {seed: own_curves[seed] for seed in both})


def baseline_of(run: Run, averaged: Series, metric: Metric, how: Baseline) -> Series | None:
    """The raw weights of a run to hold an average against; None where it has none.

    "alike": with BatchNorm treated as the average's was, where the run has that. "usual": with
    their running statistics.
    """
    raw = [s for s in run.series if not s.averaged and run.has(s, metric)]
    wanted = [Series(None, None, averaged.batch_norm)] if how == "alike" else []
    return next((s for s in (*wanted, Series()) if s in raw), None)


def compare(
    rows: Sequence[Row],
    metric: Metric,
    *,
    axis: Axis = "epoch",
    k: int | None = None,
    coefficients: str | None = None,
    batch_norm: str | None = None,
    baseline: Baseline = "alike",
) -> Comparison:
    """Averaged weights against raw ones, from the rows of one or several seeds.

    Of several averages in the rows, choose with `k`, `coefficients` and `batch_norm`; uniform
    coefficients go before others, re-estimated BatchNorm statistics before copied ones. The
    baseline is the raw weights with BatchNorm treated "alike" where the rows have them, or as
    "usual", with their running statistics. Where a resumed run wrote a moment twice, the later row
    counts.

    >>> rows = [
    ...     {"epoch": e, "weights": w, "k": 2, "loss": loss}
    ...     for w, losses in {"raw": (9, 8, 7, 5), "averaged": (None, 7, 6, 5)}.items()
    ...     for e, loss in enumerate(losses, start=1)
    ... ]
    >>> compare(rows, Metric("loss", "lower")).headline.saved
    1.0
    """
    run = Run("", "", tuple(rows))
    averages = [s for s in run.series if s.averaged and run.has(s, metric)]
    for name, wanted, preferred in (
        ("k", k, None),
        ("coefficients", coefficients, "uniform"),
        ("batch_norm", batch_norm, "re-estimated"),
    ):
        found = dict.fromkeys(getattr(series, name) for series in averages)
        if wanted is None and len(found) > 1:
            if preferred not in found:
                raise ConfigError(
                    f"the rows hold averages with {name} in {list(found)}: choose one."
                )
            wanted = preferred
        if wanted is not None:
            averages = [series for series in averages if getattr(series, name) == wanted]
    if not any(run.has(s, metric) for s in run.series if not s.averaged):
        raise FormatError(f"no row holds {metric.name!r} of raw weights to compare.")
    if not averages:
        raise FormatError(f"no row holds {metric.name!r} of averaged weights to compare.")
    raw = baseline_of(run, averages[0], metric, baseline)
    if raw is None:
        raise FormatError(
            f"no row holds {metric.name!r} of raw weights with their running statistics."
        )
    return compare_series((run, raw), (run, averages[0]), metric, axis=axis)


def _mean(values: Sequence[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return math.fsum(there) / len(there) if there else None
