"""The report on some runs as plain values: `summarise` makes it, everything else only shows it.

Report
  recipes: RecipeReport (one per recipe)
    metrics: MetricReport (one per metric, such as "test_loss")
      main:    what the main average of each method saved, one row per baseline
      windows: every average of every run, one row each
      runs:    the raw weights of each run
      losses:  sentences: where averaging lost
      frontier: annealed runs of several lengths against constant-rate runs, if there are any
    notes:     sentences: what limits these numbers
  how:         sentences: how each number is defined
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from lawa_lab.report import frontier_words, saving_words
from lawa_lab.report.curves import Axis, Metric
from lawa_lab.report.frontier import Frontier, frontier_of
from lawa_lab.report.runs import Run, Series, main_averages, metrics_of, treatment_rank
from lawa_lab.report.savings import (
    Comparison,
    Mean,
    RunSeries,
    Saving,
    SavingCurve,
    Stretch,
    Unmatched,
    baseline_of,
    compare,
    mean_of,
)
from torch_lawa.errors import ConfigError, FormatError, LawaError

__all__ = [
    "MainRow",
    "MetricReport",
    "RecipeReport",
    "Report",
    "RunRow",
    "WindowRow",
    "summarise",
]

Against: TypeAlias = Literal["alike", "usual", "other run"]

_COSTS = ("average_seconds", "batch_norm_seconds", "evaluate_seconds")


@dataclass(frozen=True, kw_only=True)
class MainRow:
    """An average against a baseline."""

    averaged_run: str
    averaged: Series
    baseline_run: str
    baseline: Series
    against: Against
    axis: Axis  # of `by_seed`, `unmatched`, `behind` and `curve`
    headline: Saving | None  # None: never ahead, or no value that both reached in every seed
    final: Saving  # at the baseline's own last value
    best: Saving  # at the best value that the baseline ever had
    unmatched: Unmatched | None
    behind: tuple[Stretch, ...]
    num_behind: int  # evaluations of all seeds in which the average was behind, out of
    num_compared: int
    curve: SavingCurve
    notes: tuple[str, ...]

    @property
    def savings(self) -> list[Saving]:
        """Headline (if there is one), final and best."""
        return [saving for saving in (self.headline, self.final, self.best) if saving is not None]

    @property
    def label(self) -> str:
        """Such as "sgd, k = 10 against raw"; the raw weights of another run with its name."""
        averaged, baseline, both = self.averaged.label, self.baseline.label, ""
        treated = self.averaged.batch_norm
        if treated is not None and treated == self.baseline.batch_norm:
            averaged, baseline = (
                dataclasses.replace(series, batch_norm=None).label
                for series in (self.averaged, self.baseline)
            )
            both = f", both BatchNorm {treated}"
        other = "" if self.baseline_run == self.averaged_run else f"{self.baseline_run}, "
        return f"{self.averaged_run}, {averaged} against {other}{baseline}{both}"


@dataclass(frozen=True, kw_only=True)
class WindowRow:
    """One average against the raw weights of its own run, BatchNorm treated alike."""

    run: str
    series: Series
    default: bool  # the main average of the run
    headline: Saving | None
    unmatched: Unmatched | None
    final: Mean | None  # value at the end
    best: Mean | None
    behind: tuple[Stretch, ...]
    num_behind: int
    num_compared: int
    charged_seconds: Mean | None  # everything this average cost beyond the run, to the end

    @property
    def worst(self) -> Stretch | None:
        """The stretch in which the average was furthest behind."""
        return max(
            self.behind,
            key=lambda s: float("inf") if s.worst_by is None else s.worst_by,
            default=None,
        )


@dataclass(frozen=True, kw_only=True)
class RunRow:
    """The raw weights of one run."""

    run: str
    series: Series
    final: Mean | None
    best: Mean | None
    seeds: tuple[Any, ...]
    epochs: Mean | None
    steps: Mean | None
    device: str | None
    num_devices: int | None
    train_seconds: Mean | None


@dataclass(frozen=True, kw_only=True)
class MetricReport:
    """One metric of one recipe."""

    metric: Metric
    main: tuple[MainRow, ...]
    windows: tuple[WindowRow, ...]
    runs: tuple[RunRow, ...]
    losses: tuple[str, ...]
    frontier: Frontier | None = None

    def own(self, run: str | None = None) -> list[MainRow]:
        """Averages against raw weights of their own run, of one run or of all."""
        rows = [row for row in self.main if row.averaged_run == row.baseline_run]
        return [row for row in rows if run in (None, row.averaged_run)]

    @property
    def across(self) -> list[MainRow]:
        """Averages against raw weights of other runs."""
        return [row for row in self.main if row.averaged_run != row.baseline_run]


@dataclass(frozen=True, kw_only=True)
class RecipeReport:
    """One recipe."""

    recipe: str
    axis: Axis  # "epoch", or "step" if epochs are not known
    metrics: tuple[MetricReport, ...]
    notes: tuple[str, ...]

    @property
    def shown(self) -> list[MetricReport]:
        """The metrics that most figures show: the accuracy, if there is one, and the loss.

        Those on test data, if there are any: some methods have chosen on the validation data.
        """
        metrics = sorted(self.metrics, key=lambda m: not m.metric.name.startswith("test_"))
        first = [m for m in metrics if m.metric.better == "higher"]
        top1 = [m for m in first if "top5" not in m.metric.name] or first
        losses = [m for m in metrics if m.metric.better == "lower"]
        return top1[:1] + losses[:1]


@dataclass(frozen=True, kw_only=True)
class Report:
    """Everything that is said about the runs."""

    recipes: tuple[RecipeReport, ...]
    how: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Lists and dicts, for JSON; a metric without a frontier does not mention one."""
        values = dataclasses.asdict(self)
        for recipe in values["recipes"]:
            for metric in recipe["metrics"]:
                if metric["frontier"] is None:
                    del metric["frontier"]
        return values


def summarise(runs: Sequence[Run], *, metric: str | None = None, k: int | None = None) -> Report:
    """The report on all runs.

    >>> rows = [
    ...     {"epoch": e, "weights": w, "k": k, "loss": loss}
    ...     for w, k, losses in (("raw", None, (9, 8, 7, 5)), ("averaged", 2, (9, 7, 5, 5)))
    ...     for e, loss in enumerate(losses, start=1)
    ... ]
    >>> report = summarise([Run("toy", "sgd", tuple(rows))])
    >>> report.recipes[0].metrics[0].main[0].headline.epochs.saved.mean
    1.0

    Args:
        runs: What `load_runs` found.
        metric: Only this metric, such as "test_accuracy"; by default all that can be compared.
        k: The window of the main table; by default the first that each run evaluated.
    """
    windows = {s.k for run in runs for s in run.series if s.k is not None}
    if not any(s.averaged for run in runs for s in run.series):
        raise FormatError("there are only rows of raw weights, so there is nothing to compare.")
    if k is not None and k not in windows:
        raise ConfigError(f"--k {k}: no run has this window; there are {sorted(windows)}.")
    by_recipe: dict[str, list[Run]] = {}
    for run in runs:
        by_recipe.setdefault(run.recipe, []).append(run)
    recipes = [_recipe(recipe, own, metric, k) for recipe, own in by_recipe.items()]
    told = tuple(recipe for recipe in recipes if recipe.metrics)
    if not told:
        raise _nothing(runs, metric)
    how = saving_words.definitions([recipe.axis for recipe in told])
    if any(metric.frontier for recipe in told for metric in recipe.metrics):
        how = (*frontier_words.DEFINITIONS, *how)
    return Report(recipes=told, how=how)


def _recipe(recipe: str, runs: list[Run], name: str | None, k: int | None) -> RecipeReport:
    known = [run.axes(series) for run in runs for series in run.series]
    axes: tuple[Axis, ...] = ("epoch", "step")
    shared = [axis for axis in axes if all(axis in each for each in known)]
    if not shared:
        raise FormatError(
            f"recipe {recipe!r}: some rows have no `epoch` and others no `step`, so the series "
            "have no axis in common. Report on one file at a time."
        )
    # If evaluations fall inside epochs, fractions of an epoch would be rounded away: use steps.
    whole = all(float(row.get("epoch") or 0).is_integer() for run in runs for row in run.rows)
    axis = shared[0] if whole else shared[-1]
    metrics = [
        m
        for m in metrics_of(row for run in runs for row in run.rows)
        if name in (None, m.name) and any(run.has(s, m) for run in runs for s in run.series)
    ]
    frontiers = [frontier_of(runs, m, axis, k) for m in metrics]
    inside = _inside(runs, next(filter(None, frontiers), None))
    reports = [
        _metric(runs, inside, m, axis, k, frontier)
        for m, frontier in zip(metrics, frontiers, strict=True)
    ]
    return RecipeReport(
        recipe=recipe,
        axis=axis,
        metrics=tuple(report for report in reports if report.windows or report.frontier),
        notes=saving_words.notes_on(runs, axis),
    )


def _inside(runs: list[Run], frontier: Frontier | None) -> list[Run]:
    """The runs inside which averages are compared with raw weights: all, if there is no frontier.

    With a frontier, runs are compared with each other there. Those that are left are constant-rate
    runs and the longest annealed run of each schedule, with the best peak rate of each; landings
    are too short.
    """
    if frontier is None:
        return runs
    longest = {point.label: point.run for point in frontier.annealed if point.best_peak}
    names = {curve.run for curve in frontier.curves if curve.best_peak and curve.series.averaged}
    names |= set(longest.values())
    return [
        run
        for run in runs
        if (run.name in names and not run.land) or not (run.annealed or run.anytime)
    ]


def _metric(
    runs: list[Run],
    inside: list[Run],
    metric: Metric,
    axis: Axis,
    k: int | None,
    frontier: Frontier | None,
) -> MetricReport:
    main: list[MainRow] = []
    windows: list[WindowRow] = []
    raw: list[RunRow] = []
    for run in inside:
        defaults = main_averages(run, metric, k)
        for series in defaults:
            main += _main_rows(runs if frontier is None else [run], run, series, metric, axis)
        windows += _window_rows(run, metric, axis, defaults[0] if defaults else None)
    for run in runs:
        raw += _run_rows(run, metric)
    return MetricReport(
        metric=metric,
        main=tuple(main),
        windows=tuple(windows),
        runs=tuple(raw),
        losses=saving_words.losses(metric, main, windows),
        frontier=frontier,
    )


def _main_rows(
    runs: list[Run], run: Run, averaged: Series, metric: Metric, axis: Axis
) -> list[MainRow]:
    """Against the run's own baselines first, then against those of the others."""
    rows = []
    for other in (run, *(r for r in runs if r is not run)):
        seen: set[Series] = set()
        for how in ("alike", "usual"):
            series = baseline_of(other, averaged, metric, how)
            if series is None or series in seen:
                continue
            seen.add(series)
            against: Against = how if other is run else "other run"
            rows += _main_row((other, series), (run, averaged), metric, axis, against)
    return rows


def _main_row(
    baseline: RunSeries, averaged: RunSeries, metric: Metric, axis: Axis, against: Against
) -> list[MainRow]:
    compared = compare(baseline, averaged, metric, axis=axis)
    if not compared.averaged[axis]:
        return []
    row = MainRow(
        averaged_run=averaged[0].name,
        averaged=averaged[1],
        baseline_run=baseline[0].name,
        baseline=baseline[1],
        against=against,
        axis=axis,
        headline=compared.headline,
        final=compared.final,
        best=compared.best,
        unmatched=compared.unmatched,
        behind=compared.behind,
        num_behind=compared.num_behind,
        num_compared=compared.num_compared,
        curve=compared.curve,
        notes=saving_words.limits_of(baseline, averaged, metric, axis),
    )
    return [row]


def _window_rows(run: Run, metric: Metric, axis: Axis, default: Series | None) -> list[WindowRow]:
    averages = [s for s in run.series if s.averaged and run.has(s, metric)]
    rows = []
    for series in sorted(averages, key=_window_order):
        raw = baseline_of(run, series, metric, "alike")
        if raw is None:
            continue
        compared: Comparison = compare((run, raw), (run, series), metric, axis=axis)
        curves = run.curves(series, metric, axis).values()
        rows.append(
            WindowRow(
                run=run.name,
                series=series,
                default=series == default,
                headline=compared.headline,
                unmatched=compared.unmatched,
                final=mean_of(curve.values[-1] for curve in curves),
                best=mean_of(metric.best(curve.values) for curve in curves),
                behind=compared.behind,
                num_behind=compared.num_behind,
                num_compared=compared.num_compared,
                charged_seconds=mean_of(_charged(run, series)),
            )
        )
    return rows


def _run_rows(run: Run, metric: Metric) -> list[RunRow]:
    numbers = set(run.num_devices.values())
    names = {row.get("device") for row in run.rows} - {None}
    rows = []
    raw = [s for s in run.series if not s.averaged and run.has(s, metric)]
    for series in sorted(raw, key=lambda s: s.batch_norm or ""):
        axes = run.axes(series)
        curves = run.curves(series, metric, axes[0]).values()
        last = [own[-1] for seed in run.seeds if (own := run.rows_of(series, seed))]
        clock = [row.get("train_seconds") for row in last] if "seconds" in axes else []
        rows.append(
            RunRow(
                run=run.name,
                series=series,
                final=mean_of(curve.values[-1] for curve in curves),
                best=mean_of(metric.best(curve.values) for curve in curves),
                seeds=run.seeds,
                epochs=mean_of(row.get("epoch") for row in last),
                steps=mean_of(row.get("step") for row in last),
                device=", ".join(sorted(map(str, names))) or None,
                num_devices=next(iter(numbers)) if len(numbers) == 1 else None,
                train_seconds=mean_of(clock),
            )
        )
    return rows


def _charged(run: Run, series: Series) -> list[float]:
    """By seed, everything an average cost beyond the run: collecting, averaging, evaluating."""
    if "seconds" not in run.axes(series):
        return []
    return [
        sum(row.get(name) or 0.0 for row in own for name in _COSTS)
        + (own[-1].get("collect_seconds") or 0.0)
        for seed in run.seeds
        if (own := run.rows_of(series, seed))
    ]


def _window_order(series: Series) -> tuple[bool, str, float, bool, str, int]:
    how = str(series.coefficients)
    other = series.weights != "averaged"
    return (other, series.weights, series.k or 0, how != "uniform", how, treatment_rank(series))


def _nothing(runs: Sequence[Run], metric: str | None) -> LawaError:
    there = [m.name for m in metrics_of(row for run in runs for row in run.rows)]
    if metric is not None and metric not in there:
        names = f"there are {', '.join(there)}" if there else "there are none"
        return ConfigError(f"--metric {metric!r} is not a metric that can be compared; {names}.")
    return FormatError(
        "no metric has both raw and averaged weights to compare. A metric can be compared if its "
        "name ends in loss, perplexity, error or accuracy."
    )
