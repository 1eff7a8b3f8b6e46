"""The frontier: final quality against training spent, annealed runs against anytime averages.

An *annealed* run decays its rate to zero, so its length is chosen in advance and it has one result:
the raw weights at its last step. Runs of several lengths are points. A run at a *constant rate* has
a result at any time, its average, so one run is a curve. Both are compared in two ways: the quality
at equal budget, and the budget at equal quality, which is the final quality of an annealed run.

Of runs that differ in their peak rate alone, or in nothing, the best is shown for each schedule and
length, and for each average.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from lawa_lab.report.curves import Axis, Curve, Metric
from lawa_lab.report.forecast import Forecast, forecasts_of
from lawa_lab.report.runs import Run, Series, main_averages
from lawa_lab.report.savings import Comparison, Mean, Saving, baseline_of, mean_of
from lawa_lab.report.words import say_series

__all__ = [
    "AnnealedRun",
    "AnytimeCurve",
    "EqualBudget",
    "EqualQuality",
    "Frontier",
    "Lead",
    "best_curve",
    "frontier_of",
]

Kind: TypeAlias = Literal["annealed", "annealed average", "anytime", "raw"]

_FREE = "schedule-free"  # optimizers whose own average is the method, and the name of its rows
_AXES: tuple[Axis, ...] = ("epoch", "step", "seconds", "gpu_hours")


@dataclass(frozen=True, kw_only=True)
class AnnealedRun:
    """One schedule at one length: a point of the frontier."""

    run: str
    label: str  # such as "cosine"
    peak: float | None
    budget: float  # on the axis of the report
    epochs: Mean | None
    steps: Mean | None
    seconds: Mean | None  # with its own evaluations
    gpu_hours: Mean | None
    raw: Mean  # the raw weights at the last step
    raw_series: Series
    average: Mean | None  # the main average of the same run at the last step
    average_series: Series | None
    by_seed: dict[Any, float]  # of the raw weights
    reached_at: Mean | None  # where the raw weights first had their final value
    best_peak: bool = False  # of the runs that differ only in their peak rate


@dataclass(frozen=True, kw_only=True)
class AnytimeCurve:
    """One series of a constant-rate run at every evaluation, as parallel tuples."""

    run: str
    label: str
    peak: float | None
    series: Series
    at: tuple[float, ...]  # on the axis of the report
    mean: tuple[float, ...]
    low: tuple[float, ...]  # of the seeds
    high: tuple[float, ...]
    num_seeds: int
    best_peak: bool = False
    main: bool = False  # the first average of the first constant-rate run, with its best peak


@dataclass(frozen=True, kw_only=True)
class EqualBudget:
    """The quality of one method at each budget of the frontier; None where it has none."""

    label: str
    kind: Kind
    values: tuple[Mean | None, ...]
    by_seed: dict[Any, tuple[float | None, ...]]


@dataclass(frozen=True, kw_only=True)
class Lead:
    """How far the main average is ahead of the best annealed run of the same budget."""

    budget: float
    annealed: str
    lead: float  # mean over the seeds that both have; negative: behind
    num_ahead: int
    num_behind: int  # with num_ahead less than all seeds, if the two are equal in some
    num_seeds: int


@dataclass(frozen=True, kw_only=True)
class EqualQuality:
    """What an anytime average takes to have the final quality of an annealed run."""

    run: str
    annealed: str
    kind: Kind  # the quality is that of the raw weights, or of the average if it is better
    budget: float
    average: str
    main: bool
    trained: float  # where the constant-rate run ends
    cheapest: float  # the shortest annealed run, of any schedule, that is as good in the mean
    saving: Saving  # each seed with its own target; averaged_at is None where it was not reached


@dataclass(frozen=True, kw_only=True)
class Frontier:
    """Annealed runs and anytime averages of one recipe in one metric."""

    axis: Axis
    budgets: tuple[float, ...]
    annealed: tuple[AnnealedRun, ...]
    envelope: tuple[tuple[float, float], ...]  # budget and value: no cheaper run was as good
    curves: tuple[AnytimeCurve, ...]
    equal_budget: tuple[EqualBudget, ...]
    equal_quality: tuple[EqualQuality, ...]
    headline: EqualQuality | None  # the main average, at the best of the longest annealed runs
    leads: tuple[Lead, ...]  # by budget
    forecasts: tuple[Forecast, ...]
    unfinished: tuple[str, ...]  # annealed runs that are left out
    several_peaks: bool  # whether some runs differ in their peak rate alone
    repeated: bool  # whether some differ in nothing that is known, not in their peak rate either


def frontier_of(
    runs: Sequence[Run], metric: Metric, axis: Axis, k: int | None = None
) -> Frontier | None:
    """The frontier, if there are annealed runs of several lengths, or beside constant-rate runs."""
    model = _Model(runs, metric, axis, k)
    if not model.annealed or (len(model.budgets) < 2 and not model.curves):
        return None
    return Frontier(
        axis=axis,
        budgets=model.budgets,
        annealed=tuple(model.annealed),
        envelope=model.envelope(),
        curves=tuple(model.curves),
        equal_budget=tuple(model.equal_budget()),
        equal_quality=tuple(model.equal_quality()),
        headline=model.headline(),
        leads=tuple(model.leads()),
        forecasts=tuple(forecasts_of(runs, model.annealed, model.curves, metric, axis)),
        unfinished=tuple(model.unfinished),
        several_peaks=model.several_peaks,
        repeated=model.repeated,
    )


class _Model:
    """The runs of one recipe, sorted into points and curves."""

    def __init__(self, runs: Sequence[Run], metric: Metric, axis: Axis, k: int | None) -> None:
        self.metric, self.axis, self.k = metric, axis, k
        self.runs = {run.name: run for run in runs}
        optimizers = {run.kind.partition(",")[0] for run in runs if run.annealed or run.anytime}
        self._named = len({name for name in optimizers if not name.startswith(_FREE)}) > 1
        self._several_free = len({name for name in optimizers if _FREE in name}) > 1
        mains = (main_averages(run, metric, k) for run in runs if run.anytime)
        # Annealed runs without averages are compared with BatchNorm treated like these.
        self._treated = next((Series(batch_norm=m[0].batch_norm) for m in mains if m), Series())
        self.unfinished: list[str] = []
        self.several_peaks = self.repeated = False
        points = [point for run in runs if run.annealed for point in self._points(run)]
        curves = [curve for run in runs if run.anytime for curve in self._curves(run)]
        self.annealed = self._with_best_points(points)
        self.curves = self._with_best_curves(curves)
        self.main = next((curve for curve in self.curves if curve.main), None)
        self.budgets = tuple(sorted({point.budget for point in self.annealed}))

    # ------------------------------------------------------------ points and curves

    def _points(self, run: Run) -> list[AnnealedRun]:
        average = next(iter(main_averages(run, self.metric, self.k)), None)
        raw = baseline_of(run, average or self._treated, self.metric, "alike")
        if raw is None:
            return []
        axes = [axis for axis in _AXES if axis in run.axes(raw)]
        ends = {axis: _ends(run.curves(raw, self.metric, axis)) for axis in axes}
        done = {seed: end for seed, end in ends[self.axis].items() if _finished(run, raw, seed)}
        if len(done) < len(ends[self.axis]) or not done:
            self.unfinished.append(run.name)
        values = {seed: value for seed, (_, value) in done.items() if value is not None}
        mean = mean_of(values.values())
        if mean is None:
            return []
        spent = {axis: mean_of(ends[axis][seed][0] for seed in values) for axis in axes}
        curves = run.curves(raw, self.metric, self.axis)
        reached = mean_of(curves[seed].reach(self.metric, v) for seed, v in values.items())
        own = _ends(run.curves(average, self.metric, self.axis)) if average else {}
        point = AnnealedRun(
            run=run.name,
            label=self._annealed_label(run),
            peak=run.peak,
            budget=max(end for end, _ in done.values()),
            epochs=spent.get("epoch"),
            steps=spent.get("step"),
            seconds=spent.get("seconds"),
            gpu_hours=spent.get("gpu_hours"),
            raw=mean,
            raw_series=raw,
            average=mean_of(own[seed][1] for seed in values if seed in own),
            average_series=average,
            by_seed=values,
            reached_at=reached,
        )
        return [point]

    def _curves(self, run: Run) -> list[AnytimeCurve]:
        """Raw weights, then every average of the run that is not a second treatment of another."""
        averages = main_averages(run, self.metric, self.k)
        free = [series for series in averages if series.weights == _FREE]
        if free:
            return [curve for series in free for curve in self._curve(run, series)]
        treatments = {series.batch_norm for series in averages[:1]}
        others = [s for s in run.series if s.averaged and s.batch_norm in treatments]
        raw = baseline_of(run, averages[0], self.metric, "alike") if averages else Series()
        wanted = dict.fromkeys([*averages, *others, *([raw] if raw else [])])
        return [curve for series in wanted for curve in self._curve(run, series)]

    def _curve(self, run: Run, series: Series) -> list[AnytimeCurve]:
        curves = run.curves(series, self.metric, self.axis)
        found: dict[float, list[float]] = {}
        for curve in curves.values():
            for at, value in zip(curve.at, curve.values, strict=True):
                if value is not None:
                    found.setdefault(at, []).append(value)
        # Where only some seeds were evaluated, a mean would jump.
        places = sorted(at for at, values in found.items() if len(values) == len(curves))
        if not places:
            return []
        optimizer = run.kind.partition(",")[0]
        label = say_series(replace(series, batch_norm=None))  # the same for all
        if series.weights == _FREE:
            label = optimizer if self._several_free else label
        elif self._named:
            label = f"{optimizer}, {label}"
        drawn = AnytimeCurve(
            run=run.name,
            label=label,
            peak=run.peak,
            series=series,
            at=tuple(places),
            mean=tuple(statistics.fmean(found[at]) for at in places),
            low=tuple(min(found[at]) for at in places),
            high=tuple(max(found[at]) for at in places),
            num_seeds=len(curves),
        )
        return [drawn]

    def _with_best_points(self, points: list[AnnealedRun]) -> list[AnnealedRun]:
        best: dict[tuple[str, float], AnnealedRun] = {}
        for point in points:
            key = (self.runs[point.run].kind, point.budget)
            if key not in best or self.metric.beats(point.raw.mean, best[key].raw.mean):
                best[key] = point
        self._compare_peaks((self.runs[p.run].kind, p.budget, p.peak) for p in points)
        names = {point.run for point in best.values()}
        chosen = [replace(point, best_peak=point.run in names) for point in points]
        return sorted(chosen, key=lambda p: (self.runs[p.run].land, p.label, p.budget))

    def _with_best_curves(self, curves: list[AnytimeCurve]) -> list[AnytimeCurve]:
        alike: dict[tuple[str, Series], list[AnytimeCurve]] = {}
        for curve in curves:
            alike.setdefault((self.runs[curve.run].kind, curve.series), []).append(curve)
        best = {key: best_curve(self.metric, own) for key, own in alike.items()}
        self._compare_peaks((self.runs[c.run].kind, c.series, c.peak) for c in curves)
        averages = [curve for curve in best.values() if curve.series.averaged]
        window = [curve for curve in averages if curve.series.weights == "averaged"]
        main = next(iter(window or averages), None)
        return [
            replace(
                curve,
                best_peak=best[self.runs[curve.run].kind, curve.series] is curve,
                main=curve is main,
            )
            for curve in curves
        ]

    def _compare_peaks(self, found: Iterable[tuple[str, object, float | None]]) -> None:
        """Note what sets apart those of one kind, of which only the best is shown."""
        alike: dict[object, list[float | None]] = {}
        for kind, what, peak in found:
            alike.setdefault((kind, what), []).append(peak)
        self.several_peaks |= any(len(set(peaks)) > 1 for peaks in alike.values())
        self.repeated |= any(len(set(peaks)) < len(peaks) for peaks in alike.values())

    def _annealed_label(self, run: Run) -> str:
        """Such as "cosine" or "20% linear decay"; with the optimizer, if there are several."""
        optimizer, _, rest = run.kind.partition(",")
        schedule = str(run.rows[0].get("schedule"))
        if run.land:
            shape = rest.partition(f"landing {run.land:g}")[2].strip() or "linear"
            schedule = f"{run.land:.0%} {shape} decay"
        return f"{optimizer}, {schedule}" if self._named else schedule

    # ------------------------------------------------------------ comparisons

    def envelope(self) -> tuple[tuple[float, float], ...]:
        """The annealed runs that no run of the same length or shorter is as good as."""
        found: list[tuple[float, float]] = []
        for budget in self.budgets:
            here = [p.raw.mean for p in self.annealed if p.budget == budget]
            best = self.metric.best(here)
            if best is not None and (not found or self.metric.beats(best, found[-1][1])):
                found.append((budget, best))
        return tuple(found)

    def equal_budget(self) -> Iterable[EqualBudget]:
        """Annealed runs by their schedule with their averages, then curves, the main one first."""
        labels = dict.fromkeys(point.label for point in self.annealed)
        for label in labels:
            own = {p.budget: p for p in self.annealed if p.label == label and p.best_peak}
            finals = {budget: point.by_seed for budget, point in own.items()}
            yield self._budgets_of(label, "annealed", finals)
            averages = {b: self._average_ends(point) for b, point in own.items()}
            if any(averages.values()):
                yield self._budgets_of(f"{label}, its average", "annealed average", averages)
        for curve in sorted(self.curves, key=lambda c: not c.main):
            if curve.best_peak:
                kind: Kind = "anytime" if curve.series.averaged else "raw"
                values = {budget: self._values_at(curve, budget) for budget in self.budgets}
                yield self._budgets_of(curve.label, kind, values)

    def _values_at(self, curve: AnytimeCurve, budget: float) -> dict[Any, float | None]:
        """By seed, the value at a budget; seeds that were not trained that far are left out."""
        curves = self.runs[curve.run].curves(curve.series, self.metric, self.axis)
        return {
            seed: each.value_at(budget)
            for seed, each in curves.items()
            if each.at[-1] >= 0.999 * budget
        }

    def _budgets_of(
        self, label: str, kind: Kind, values: Mapping[float, Mapping[Any, float | None]]
    ) -> EqualBudget:
        seeds = dict.fromkeys(seed for each in values.values() for seed in each)
        return EqualBudget(
            label=label,
            kind=kind,
            values=tuple(mean_of(values.get(b, {}).values()) for b in self.budgets),
            by_seed={
                seed: tuple(values.get(b, {}).get(seed) for b in self.budgets) for seed in seeds
            },
        )

    def _average_ends(self, point: AnnealedRun) -> dict[Any, float | None]:
        if point.average_series is None:
            return {}
        curves = self.runs[point.run].curves(point.average_series, self.metric, self.axis)
        return {seed: curves[seed].values[-1] for seed in point.by_seed if seed in curves}

    def equal_quality(self) -> Iterable[EqualQuality]:
        """Every annealed run with its best peak against every anytime average."""
        averages = [c for c in self.curves if c.best_peak and c.series.averaged]
        for point in self.annealed:
            if point.best_peak:
                for curve in sorted(averages, key=lambda c: not c.main):
                    yield from self._equal(point, curve, "annealed")
                    if point.average and self.metric.beats(point.average.mean, point.raw.mean):
                        yield from self._equal(point, curve, "annealed average")

    def headline(self) -> EqualQuality | None:
        """The main average against the best of the longest annealed runs that share a seed with it.

        The best is the one whose raw weights have the best mean.
        """
        if self.main is None:
            return None
        for point in sorted(self.annealed, key=lambda p: (-p.budget, self._best_first(p))):
            for found in self._equal(point, self.main, "annealed"):
                return found
        return None

    def _best_first(self, point: AnnealedRun) -> float:
        """Sorts annealed runs, the best first."""
        return -self.metric.lead(point.raw.mean, 0.0)

    def leads(self) -> Iterable[Lead]:
        """At each budget that the main average has a value for."""
        if self.main is None:
            return
        for budget in self.budgets:
            best = min((p for p in self.annealed if p.budget == budget), key=self._best_first)
            leads = [
                self.metric.lead(value, best.by_seed[seed])
                for seed, value in self._values_at(self.main, budget).items()
                if seed in best.by_seed and value is not None
            ]
            if leads:
                yield Lead(
                    budget=budget,
                    annealed=best.label,
                    lead=round(statistics.fmean(leads), 12),  # else equal means differ by 1e-17
                    num_ahead=sum(lead > 0 for lead in leads),
                    num_behind=sum(lead < 0 for lead in leads),
                    num_seeds=len(leads),
                )

    def _cheapest(self, point: AnnealedRun, kind: Kind) -> float:
        value = point.average if kind == "annealed average" and point.average else point.raw
        alike = [p for p in self.annealed if self.metric.reaches(p.raw.mean, value.mean)]
        return min([point.budget, *(p.budget for p in alike)])

    def _equal(self, point: AnnealedRun, curve: AnytimeCurve, kind: Kind) -> list[EqualQuality]:
        """Nothing if the two have no seed in common."""
        annealed, anytime = self.runs[point.run], self.runs[curve.run]
        series = point.raw_series if kind == "annealed" else point.average_series or Series()
        known = annealed.axes(series)
        ends: dict[Axis, dict[Any, Curve]] = {}
        averages: dict[Axis, dict[Any, Curve]] = {}
        for axis in dict.fromkeys(
            (self.axis, *(a for a in anytime.axes(curve.series) if a in known))
        ):
            theirs = annealed.curves(series, self.metric, axis)
            ours = anytime.curves(curve.series, self.metric, axis)
            both = [seed for seed in ours if seed in point.by_seed and seed in theirs]
            # Only the end of an annealed run is a result: its length was chosen for it.
            ends[axis] = {s: Curve(theirs[s].at[-1:], theirs[s].values[-1:]) for s in both}
            averages[axis] = {seed: ours[seed] for seed in both}
        if not averages[self.axis]:
            return []
        found = EqualQuality(
            run=point.run,
            annealed=point.label,
            kind=kind,
            budget=point.budget,
            average=curve.label,
            main=curve.main,
            trained=curve.at[-1],
            cheapest=self._cheapest(point, kind),
            saving=Comparison(self.metric, self.axis, ends, averages).final,
        )
        return [found]


def best_curve(metric: Metric, curves: Sequence[AnytimeCurve]) -> AnytimeCurve:
    """The one with the best last value, of those that none as long or longer beats where they end.

    A loss may rise, so that the last value of a short run is better than that of a longer one that
    was ahead of it at equal budget.
    """

    def behind(curve: AnytimeCurve, other: AnytimeCurve) -> bool:
        there = Curve(other.at, other.mean).value_at(curve.at[-1])
        longer = other.at[-1] >= curve.at[-1]
        return longer and there is not None and metric.beats(there, curve.mean[-1])

    left = [curve for curve in curves if not any(behind(curve, other) for other in curves)]
    return min(left, key=lambda curve: -metric.lead(curve.mean[-1], 0.0))


def _ends(curves: dict[Any, Curve]) -> dict[Any, tuple[float, float | None]]:
    return {seed: (curve.at[-1], curve.values[-1]) for seed, curve in curves.items()}


def _finished(run: Run, series: Series, seed: Any) -> bool:
    """Whether a seed came to the end of its schedule; steps are rounded, so to nearly all of it."""
    last = run.rows_of(series, seed)[-1].get("epoch")
    return last is None or run.budget_epochs is None or last >= 0.99 * run.budget_epochs
