"""The average at the step where a decay starts, as a forecast of where the decay ends."""

import itertools
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lawa_lab.report.curves import Axis, Curve, Metric
from lawa_lab.report.runs import Run

if TYPE_CHECKING:
    from lawa_lab.report.frontier import AnnealedRun, AnytimeCurve

__all__ = ["Forecast", "forecasts_of"]

_FEWEST = 3  # branches from which on a rank correlation means something


@dataclass(frozen=True, kw_only=True)
class ForecastBranch:
    """One decay that starts from a constant-rate run."""

    seed: Any
    peak: float | None
    at: float  # where the rate begins to fall
    budget: float  # where it has fallen to zero
    average: float  # of the constant-rate run at `at`
    final: float  # of the raw weights at `budget`


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """The average at the step where a decay starts, as a forecast of where the decay ends."""

    annealed: str
    average: str
    mean_error: float  # average minus final
    mean_absolute_error: float
    rank_correlation: float | None  # Spearman's, over all branches; None if values are all equal
    branches: tuple[ForecastBranch, ...]


def forecasts_of(
    runs: Iterable[Run],
    annealed: Sequence["AnnealedRun"],
    curves: Sequence["AnytimeCurve"],
    metric: Metric,
    axis: Axis,
) -> Iterator[Forecast]:
    """Landings against the main average of the run they start from, of all peak rates together.

    One forecast per schedule, if there are enough branches.
    """
    by_name = {run.name: run for run in runs}
    groups: dict[tuple[str, str], list[ForecastBranch]] = {}
    for point in annealed:
        run = by_name[point.run]
        if run.land:
            for curve in _trunks(run, point, curves, by_name):
                key = (point.label, curve.label)
                trunk = by_name[curve.run].curves(curve.series, metric, axis)
                ends = run.curves(point.raw_series, metric, axis)
                groups.setdefault(key, []).extend(_branches(run.land, point, trunk, ends))
    for (label, average), branches in groups.items():
        if len(branches) >= _FEWEST:
            errors = [branch.average - branch.final for branch in branches]
            yield Forecast(
                annealed=label,
                average=average,
                mean_error=statistics.fmean(errors),
                mean_absolute_error=statistics.fmean(map(abs, errors)),
                rank_correlation=_rank_correlation(
                    [branch.average for branch in branches], [branch.final for branch in branches]
                ),
                branches=tuple(branches),
            )


def _trunks(
    run: Run, point: "AnnealedRun", curves: Sequence["AnytimeCurve"], by_name: dict[str, Run]
) -> list["AnytimeCurve"]:
    """The first average of each constant-rate run that a landing may have started from."""
    first: dict[str, AnytimeCurve] = {}
    for curve in curves:
        kind = run.kind.partition(", landing ")[0]  # not a prefix: "adam" is one of "adamw"
        same = kind == by_name[curve.run].kind and curve.peak == point.peak
        if same and curve.series.averaged:
            first.setdefault(curve.run, curve)
    return list(first.values())


def _branches(
    land: float, point: "AnnealedRun", trunk: dict[Any, Curve], ends: dict[Any, Curve]
) -> Iterator[ForecastBranch]:
    for seed, final in point.by_seed.items():
        end = ends[seed].at[-1]
        at = (1.0 - land) * end
        average = _between(trunk[seed], at) if seed in trunk else None
        if average is not None:
            yield ForecastBranch(
                seed=seed, peak=point.peak, at=at, budget=end, average=average, final=final
            )


def _between(curve: Curve, at: float) -> float | None:
    """The value at a place, on a straight line between the evaluations around it.

    >>> _between(Curve((4.0, 5.0), (0.2, 0.1)), 4.8)
    0.12
    """
    for (a, low), (b, high) in itertools.pairwise(zip(curve.at, curve.values, strict=True)):
        if a <= at <= b and low is not None and high is not None:
            return round(low + (high - low) * (at - a) / (b - a), 12)
    return None


def _rank_correlation(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Spearman's, with mean ranks for equal values.

    >>> _rank_correlation([1.0, 2.0, 3.0], [0.1, 0.4, 0.2])
    0.5
    """
    try:
        return round(statistics.correlation(_ranks(one), _ranks(other)), 12)
    except statistics.StatisticsError:
        return None


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(values)
    return [order.index(v) + (order.count(v) - 1) / 2 for v in values]
