"""What one comparison came to, as the plain values of a report."""

import statistics
from collections.abc import Iterable
from typing import Literal

from lawa_lab.report.savings import Axis, Comparison, Line, Metric, Saving, compare_series
from lawa_lab.report.summary import (
    Amount,
    Mean,
    SavingCurve,
    SeedSaving,
    Stretch,
    TargetSaving,
    Unmatched,
)

__all__ = ["Outcome", "mean_of"]


def mean_of(numbers: Iterable[float | None]) -> Mean | None:
    """Mean and spread of the numbers that are there.

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


class Outcome:
    """An average against a baseline, on every axis that both runs know."""

    def __init__(self, baseline: Line, averaged: Line, metric: Metric, axis: Axis) -> None:
        known = baseline[0].axes(baseline[1])
        shared = [each for each in averaged[0].axes(averaged[1]) if each in known]
        self._on: dict[Axis, Comparison] = {
            each: compare_series(baseline, averaged, metric, axis=each) for each in shared
        }
        self.compared = self._on[axis]

    @property
    def headline(self) -> TargetSaving | None:
        """The longest stretch on the axis of the report, and what the same target saved by others.

        Every axis would have a longest stretch of its own, at a target of its own: one is enough.
        """
        found = self.compared.headline
        if found is None:
            return None
        target = found.reaches[0].target
        return self._at("headline", {a: c.saving_at(target) for a, c in self._on.items()})

    @property
    def final(self) -> TargetSaving:
        """At the value that the baseline ended with."""
        return self._at("final", {a: c.at_final for a, c in self._on.items()})

    @property
    def best(self) -> TargetSaving:
        """At the best value that the baseline ever had."""
        return self._at("best", {a: c.at_best for a, c in self._on.items()})

    @property
    def unmatched(self) -> Unmatched | None:
        """What the average reached and the baseline never did."""
        found = self.compared.unmatched
        begin, end = (mean_of(u.averaged_at for u in found), mean_of(u.baseline_end for u in found))
        at_least = mean_of(u.at_least for u in found)
        if begin is None or end is None or at_least is None:
            return None
        return Unmatched(
            num_seeds=len(found), averaged_from=begin, baseline_end=end, at_least=at_least
        )

    @property
    def stretches(self) -> tuple[Stretch, ...]:
        """Where the average was behind in most of the seeds."""
        metric = self.compared.metric
        found: dict[float, list[tuple[float | None, float]]] = {}
        for moments in self.compared.moments.values():
            for at, value, raw in moments:
                found.setdefault(at, []).append((value, raw))
        stretches: list[list[tuple[float, float | None]]] = [[]]
        for at in sorted(found):
            lost = [v is None or metric.beats(raw, v) for v, raw in found[at]]
            if 2 * sum(lost) > len(lost):
                stretches[-1].append((at, _deficit(metric, found[at])))
            elif stretches[-1]:
                stretches.append([])
        return tuple(_stretch(places) for places in stretches if places)

    @property
    def num_behind(self) -> int:
        """In how many evaluations, over all seeds, the average was behind."""
        return sum(map(len, self.compared.behind.values()))

    @property
    def num_compared(self) -> int:
        """How many evaluations there are of both."""
        return sum(map(len, self.compared.moments.values()))

    @property
    def curve(self) -> SavingCurve:
        """The whole curve of saving against target."""
        savings = self.compared.savings
        spreads = [saving.spread or (None, None) for saving in savings]
        return SavingCurve(
            target=tuple(saving.reaches[0].target for saving in savings),
            saved=tuple(saving.saved for saving in savings),
            sd=tuple(saving.sd for saving in savings),
            low=tuple(low for low, _ in spreads),
            high=tuple(high for _, high in spreads),
            num_both=tuple(len(saving.both) for saving in savings),
            num_averaged=tuple(
                sum(reach.averaged_at is not None for reach in saving.reaches) for saving in savings
            ),
        )

    def _at(
        self, what: Literal["headline", "final", "best"], savings: dict[Axis, Saving]
    ) -> TargetSaving:
        own = savings[self.compared.axis]
        amounts = {axis: _amount(saving) for axis, saving in savings.items()}
        return TargetSaving(
            what=what,
            target=own.target,
            epochs=amounts.get("epoch"),
            steps=amounts.get("step"),
            seconds=amounts.get("seconds"),
            gpu_hours=amounts.get("gpu_hours"),
            num_seeds=len(self.compared.averaged),
            num_both=len(own.both),
            by_seed=tuple(
                SeedSaving(
                    seed=reach.seed,
                    target=reach.target,
                    baseline_at=reach.baseline_at,
                    averaged_at=reach.averaged_at,
                    saved=reach.saved,
                )
                for reach in own.reaches
            ),
        )


def _amount(saving: Saving) -> Amount | None:
    baseline, averaged, saved = (
        mean_of(getattr(reach, name) for reach in saving.both)
        for name in ("baseline_at", "averaged_at", "saved")
    )
    if baseline is None or averaged is None or saved is None:
        return None
    return Amount(baseline_at=baseline, averaged_at=averaged, saved=saved, percent=saving.percent)


def _deficit(metric: Metric, pairs: list[tuple[float | None, float]]) -> float | None:
    """By how much the average is worse in the mean over seeds; None where one is not finite."""
    sign = 1.0 if metric.better == "lower" else -1.0
    if any(value is None for value, _ in pairs):
        return None
    return statistics.fmean(sign * (value - raw) for value, raw in pairs if value is not None)


def _stretch(places: list[tuple[float, float | None]]) -> Stretch:
    worst_at, worst_by = max(places, key=lambda p: float("inf") if p[1] is None else p[1])
    return Stretch(
        begin=places[0][0],
        end=places[-1][0],
        num_evaluations=len(places),
        worst_at=worst_at,
        worst_by=worst_by,
    )
