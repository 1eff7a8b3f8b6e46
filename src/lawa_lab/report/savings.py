"""What averaging saved: the values that report.json, tables, figures and the page all show.

A series *reaches* a target at the first evaluation whose value is as good or better. Once is
enough, for raw and averaged weights alike: somebody who watches the run would have stopped there.
The *saving* at a target is what the baseline (raw weights) spent to reach it minus what the average
spent, in epochs, steps, seconds and GPU-hours, with every cost of averaging charged.

The *headline* is the paper's number: the largest saving at a value that the average had. It is one
target for all seeds, so that no seed picks its own. As a maximum over targets it is optimistic; the
savings at the baseline's own final and best values, which are not chosen, are given beside it.

Like is compared with like: if the BatchNorm statistics of the average were re-estimated, the raw
weights with re-estimated statistics show what *averaging* saved. Against raw weights with running
statistics the same curves show more, part of which is due to BatchNorm.
"""

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeAlias

from lawa_lab.report.curves import Axis, Curve, Metric, shared_evaluations
from lawa_lab.report.runs import Run, Series

__all__ = [
    "Amount",
    "Baseline",
    "Comparison",
    "Mean",
    "RunSeries",
    "Saving",
    "SavingCurve",
    "Stretch",
    "Unmatched",
    "baseline_of",
    "compare",
    "mean_of",
]

Baseline: TypeAlias = Literal["alike", "usual"]
RunSeries: TypeAlias = tuple[Run, Series]
Target: TypeAlias = Literal["headline", "final", "best", "given"]


@dataclass(frozen=True, kw_only=True)
class Mean:
    """A number over seeds."""

    mean: float
    sd: float | None  # sample standard deviation; None with one seed
    low: float
    high: float
    num_seeds: int


@dataclass(frozen=True, kw_only=True)
class Amount:
    """What it took to reach a target on one axis, over the seeds in which both series did."""

    baseline_at: Mean
    averaged_at: Mean
    saved: Mean
    percent: float | None  # the mean saving in percent of what the baseline took


@dataclass(frozen=True, kw_only=True)
class SeedSaving:
    """Where the two series of one seed reached a target, on the axis of the report."""

    seed: Any
    target: float
    baseline_at: float | None  # None: never reached
    averaged_at: float | None
    saved: float | None  # negative if the average was later; None unless both reached it


@dataclass(frozen=True, kw_only=True)
class Saving:
    """The saving at one target. An axis is None if it is unknown or no seed has both."""

    what: Target
    target: float | None  # the mean of the seeds' own targets, for "final" and "best"
    epochs: Amount | None
    steps: Amount | None
    seconds: Amount | None  # every cost of averaging charged
    gpu_hours: Amount | None
    num_seeds: int  # compared
    num_both: int  # seeds in which both series reached the target; the means are over these
    by_seed: tuple[SeedSaving, ...]

    def on(self, axis: Axis) -> Amount | None:
        """The saving on one axis."""
        by_axis = {
            "epoch": self.epochs,
            "step": self.steps,
            "seconds": self.seconds,
            "gpu_hours": self.gpu_hours,
        }
        return by_axis[axis]


@dataclass(frozen=True, kw_only=True)
class Unmatched:
    """Values of the average that the baseline never reached: a saving without an upper bound."""

    num_seeds: int  # in which this happened
    averaged_from: Mean  # where the average was first better than the baseline ever was
    baseline_end: Mean  # the last evaluation of the baseline
    at_least: Mean  # the lower bound: the second minus the first


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """Consecutive evaluations in which the average was behind, in most of the seeds."""

    begin: float
    end: float
    num_evaluations: int
    worst_at: float
    worst_by: float | None  # mean difference there, positive; None if a value is not finite


@dataclass(frozen=True, kw_only=True)
class SavingCurve:
    """Saving against target, from easy to hard, as parallel tuples with one entry per target.

    Between two targets the saving is that of the harder one, so this is the whole curve.
    """

    target: tuple[float, ...]
    saved: tuple[float | None, ...]  # mean over the seeds in which both series reached it
    sd: tuple[float | None, ...]
    low: tuple[float | None, ...]
    high: tuple[float | None, ...]
    num_both: tuple[int, ...]  # seeds in which both reached it
    num_averaged: tuple[int, ...]  # seeds in which the average did


def mean_of(numbers: Iterable[float | None]) -> Mean | None:
    """Mean and spread of the numbers that are not missing.

    >>> mean_of([1.0, 3.0, None])
    Mean(mean=2.0, sd=1.4142135623730951, low=1.0, high=3.0, num_seeds=2)
    """
    there = [number for number in numbers if number is not None]
    if not there:
        return None
    return Mean(
        mean=statistics.fmean(there),
        sd=statistics.stdev(there) if len(there) > 1 else None,
        low=min(there),
        high=max(there),
        num_seeds=len(there),
    )


@dataclass(frozen=True)
class Comparison:
    """An average against a baseline in one metric, over the seeds that both have.

    Both hold a curve per axis and seed. The values of a seed are the same on every axis, so targets
    are chosen on `axis` (epochs or steps), and the other axes say what those targets cost.
    """

    metric: Metric
    axis: Axis
    baseline: Mapping[Axis, dict[Any, Curve]]
    averaged: Mapping[Axis, dict[Any, Curve]]

    def saving_at(self, target: float) -> Saving:
        """The saving at one target for all seeds."""
        return self._saving("given", dict.fromkeys(self._averaged, target))

    @cached_property
    def headline(self) -> Saving | None:
        """The largest mean saving at a value that the average had and all seeds of both reached.

        Of targets with the same saving, the hardest. None if there is no such value, or if the
        average was never ahead.
        """
        values = {v for curve in self._averaged.values() for v in curve.values if v is not None}
        best, found = 0.0, None
        for target in sorted(values, reverse=self.metric.better == "higher"):  # hard ones first
            saved = [seed.saved for seed in self._by_seed(dict.fromkeys(self._averaged, target))]
            known = [each for each in saved if each is not None]
            if len(known) == len(saved) and (mean := statistics.fmean(known)) > best:
                best, found = mean, target
        if found is None:
            return None
        return self._saving("headline", dict.fromkeys(self._averaged, found))

    @cached_property
    def final(self) -> Saving:
        """The saving at the last value of the baseline, each seed with its own."""
        return self._saving("final", {s: self._baseline[s].values[-1] for s in self._averaged})

    @cached_property
    def best(self) -> Saving:
        """The saving at the best value of the baseline, each seed with its own."""
        best = {s: self.metric.best(self._baseline[s].values) for s in self._averaged}
        return self._saving("best", best)

    @cached_property
    def curve(self) -> SavingCurve:
        """The whole curve of saving against target.

        The targets are the values at which some series of some seed was better than ever before.
        Any other target is reached where the next harder one of these is.
        """
        values = {
            record
            for seed, curve in self._averaged.items()
            for each in (curve, self._baseline[seed])
            for record in each.records(self.metric)
        }
        targets = sorted(values, reverse=self.metric.better == "lower")
        seeds = [self._by_seed(dict.fromkeys(self._averaged, target)) for target in targets]
        saved = [mean_of(seed.saved for seed in each) for each in seeds]
        return SavingCurve(
            target=tuple(targets),
            saved=tuple(None if each is None else each.mean for each in saved),
            sd=tuple(None if each is None else each.sd for each in saved),
            low=tuple(None if each is None else each.low for each in saved),
            high=tuple(None if each is None else each.high for each in saved),
            num_both=tuple(0 if each is None else each.num_seeds for each in saved),
            num_averaged=tuple(
                sum(seed.averaged_at is not None for seed in each) for each in seeds
            ),
        )

    @cached_property
    def unmatched(self) -> Unmatched | None:
        """Where the average became better than the baseline ever was."""
        found: list[tuple[float, float]] = []
        for seed, curve in self._averaged.items():
            best = self.metric.best(self._baseline[seed].values)
            for at, value in zip(curve.at, curve.values, strict=True):
                if value is not None and (best is None or self.metric.beats(value, best)):
                    found.append((at, self._baseline[seed].at[-1]))
                    break
        begin, end = mean_of(at for at, _ in found), mean_of(end for _, end in found)
        at_least = mean_of(end - at for at, end in found)
        if begin is None or end is None or at_least is None:
            return None
        return Unmatched(
            num_seeds=len(found), averaged_from=begin, baseline_end=end, at_least=at_least
        )

    @cached_property
    def evaluated(self) -> dict[Any, list[tuple[float, float | None, float]]]:
        """By seed, where both were evaluated, with the averaged and the raw value.

        Evaluations at which the raw weights have no finite value are left out.
        """
        raw = {
            seed: dict(zip(curve.at, curve.values, strict=True))
            for seed, curve in self._baseline.items()
        }
        return {
            seed: [
                (at, value, base)
                for at, value in zip(curve.at, curve.values, strict=True)
                if (base := raw[seed].get(at)) is not None
            ]
            for seed, curve in self._averaged.items()
        }

    @property
    def behind_by_seed(self) -> dict[Any, list[float]]:
        """By seed, where the raw weights of the same moment were better than the average."""
        return {
            seed: [at for at, value, raw in moments if self._lost(value, raw)]
            for seed, moments in self.evaluated.items()
        }

    @property
    def behind(self) -> tuple[Stretch, ...]:
        """Where the average was behind in most of the seeds."""
        found: dict[float, list[tuple[float | None, float]]] = {}
        for moments in self.evaluated.values():
            for at, value, raw in moments:
                found.setdefault(at, []).append((value, raw))
        stretches: list[list[tuple[float, float | None]]] = [[]]
        for at in sorted(found):
            lost = [self._lost(value, raw) for value, raw in found[at]]
            if 2 * sum(lost) > len(lost):
                stretches[-1].append((at, self._deficit(found[at])))
            elif stretches[-1]:
                stretches.append([])
        return tuple(_stretch(places) for places in stretches if places)

    @property
    def num_behind(self) -> int:
        """The number of evaluations, of all seeds, in which the average was behind."""
        return sum(map(len, self.behind_by_seed.values()))

    @property
    def num_compared(self) -> int:
        """The number of evaluations of both, of all seeds."""
        return sum(map(len, self.evaluated.values()))

    @property
    def _baseline(self) -> dict[Any, Curve]:
        return self.baseline[self.axis]

    @property
    def _averaged(self) -> dict[Any, Curve]:
        return self.averaged[self.axis]

    def _lost(self, value: float | None, raw: float) -> bool:
        return value is None or self.metric.beats(raw, value)

    def _deficit(self, pairs: list[tuple[float | None, float]]) -> float | None:
        """How much worse the average is, as a mean over seeds; None if a value is not finite."""
        behind = [self.metric.lead(raw, value) for value, raw in pairs if value is not None]
        return statistics.fmean(behind) if len(behind) == len(pairs) else None

    def _by_seed(
        self, targets: Mapping[Any, float | None], axis: Axis | None = None
    ) -> tuple[SeedSaving, ...]:
        found = []
        for seed, target in targets.items():
            if target is not None:
                raw = self.baseline[axis or self.axis][seed].reach(self.metric, target)
                own = self.averaged[axis or self.axis][seed].reach(self.metric, target)
                saved = None if raw is None or own is None else raw - own
                found.append(
                    SeedSaving(
                        seed=seed, target=target, baseline_at=raw, averaged_at=own, saved=saved
                    )
                )
        return tuple(found)

    def _saving(self, what: Target, targets: Mapping[Any, float | None]) -> Saving:
        by_seed = self._by_seed(targets)
        amounts = {axis: _amount(self._by_seed(targets, axis)) for axis in self.averaged}
        target = mean_of(seed.target for seed in by_seed)
        return Saving(
            what=what,
            target=None if target is None else target.mean,
            epochs=amounts.get("epoch"),
            steps=amounts.get("step"),
            seconds=amounts.get("seconds"),
            gpu_hours=amounts.get("gpu_hours"),
            num_seeds=len(self._averaged),
            num_both=sum(seed.saved is not None for seed in by_seed),
            by_seed=by_seed,
        )


def compare(
    baseline: RunSeries, averaged: RunSeries, metric: Metric, *, axis: Axis = "epoch"
) -> Comparison:
    """One series against another, of the same run or of two.

    If one was evaluated more often than the other, only evaluations of both count (see
    `shared_evaluations`).

    >>> sgd, lookahead = (
    ...     Run("toy", name, tuple({"epoch": e, "weights": w, "k": k, "loss": loss}
    ...         for w, k, losses in (("raw", None, raw), ("averaged", 2, mean))
    ...         for e, loss in enumerate(losses, start=1)))
    ...     for name, raw, mean in (("sgd", (9, 8, 7, 5), (9, 7, 5, 5)),
    ...                             ("lookahead", (9, 7, 6, 5), (9, 7, 6, 5)))
    ... )
    >>> loss, lawa = Metric("loss", "lower"), Series("averaged", 2, "uniform")
    >>> compare((lookahead, Series()), (sgd, lawa), loss).headline.epochs.saved.mean
    1.0

    Args:
        baseline: A run and the series of it to compare with, usually raw weights.
        averaged: A run and one of its averages.
        metric: What is compared.
        axis: Epochs or steps, on which targets are chosen.
    """
    raw, own = baseline[0].moments(baseline[1], metric), averaged[0].moments(averaged[1], metric)
    both = [seed for seed in own if seed in raw]
    raw_at = {seed: shared_evaluations(raw[seed], own[seed]) for seed in both}
    own_at = {seed: shared_evaluations(own[seed], raw[seed]) for seed in both}
    known = baseline[0].axes(baseline[1])
    axes = (axis, *(each for each in averaged[0].axes(averaged[1]) if each in known))
    base: dict[Axis, dict[Any, Curve]] = {}
    mean: dict[Axis, dict[Any, Curve]] = {}
    for each in dict.fromkeys(axes):
        base[each] = baseline[0].curves(baseline[1], metric, each, at=raw_at)
        curves = averaged[0].curves(averaged[1], metric, each, at=own_at)
        mean[each] = {seed: curves[seed] for seed in both}
    return Comparison(metric, axis, base, mean)


def baseline_of(run: Run, averaged: Series, metric: Metric, how: Baseline) -> Series | None:
    """The raw weights of a run to compare an average with; None if it has none.

    "alike": with BatchNorm treated like the average's, if the run has that. "usual": with running
    statistics.
    """
    raw = [s for s in run.series if not s.averaged and run.has(s, metric)]
    wanted = [Series(batch_norm=averaged.batch_norm)] if how == "alike" else []
    return next((s for s in (*wanted, Series()) if s in raw), None)


def _amount(by_seed: tuple[SeedSaving, ...]) -> Amount | None:
    both = [seed for seed in by_seed if seed.saved is not None]
    baseline, averaged, saved = (
        mean_of(getattr(seed, name) for seed in both)
        for name in ("baseline_at", "averaged_at", "saved")
    )
    if baseline is None or averaged is None or saved is None:
        return None
    percent = 100.0 * saved.mean / baseline.mean if baseline.mean else None
    return Amount(baseline_at=baseline, averaged_at=averaged, saved=saved, percent=percent)


def _stretch(places: list[tuple[float, float | None]]) -> Stretch:
    worst_at, worst_by = max(places, key=lambda p: float("inf") if p[1] is None else p[1])
    return Stretch(
        begin=places[0][0],
        end=places[-1][0],
        num_evaluations=len(places),
        worst_at=worst_at,
        worst_by=worst_by,
    )
