"""From runs to a report: which series are held against which."""

from collections.abc import Sequence

from lawa_lab.report.outcomes import Outcome, mean_of
from lawa_lab.report.runs import Run, Series, metrics_of
from lawa_lab.report.savings import Axis, Line, Metric, baseline_of
from lawa_lab.report.sentences import how_it_was_counted, limits_of, notes_on, where_it_lost
from lawa_lab.report.summary import (
    Against,
    MainRow,
    MetricReport,
    RecipeReport,
    Report,
    RunRow,
    WindowRow,
)
from torch_lawa.errors import ConfigError, FormatError

__all__ = ["default_average", "summarise"]

_COSTS = ("average_seconds", "batch_norm_seconds", "evaluate_seconds")


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
        metric: Only this value, such as "test_accuracy"; all that can be compared by default.
        k: The window of the main table; by default the first that each run evaluated.
    """
    windows = {s.k for run in runs for s in run.series if s.k is not None}
    if not any(s.averaged for run in runs for s in run.series):
        raise FormatError("there are rows of raw weights only, so there is nothing to compare.")
    if k is not None and k not in windows:
        raise ConfigError(f"k = {k}: no run has that window; there are {sorted(windows)}.")
    by_recipe: dict[str, list[Run]] = {}
    for run in runs:
        by_recipe.setdefault(run.recipe, []).append(run)
    recipes = [_recipe(recipe, own, metric, k) for recipe, own in by_recipe.items()]
    told = tuple(recipe for recipe in recipes if recipe.metrics)
    if not told:
        raise FormatError(_nothing(runs, metric))
    return Report(recipes=told, how=how_it_was_counted(told))


def default_average(run: Run, metric: Metric, k: int | None = None) -> Series | None:
    """The average that stands for a run: its first window, or that of `k`.

    Uniform coefficients go before others, and BatchNorm statistics that were re-estimated (or of
    a model without any) before copied ones. None where the run has no such average.
    """
    averages = [s for s in run.series if s.averaged and run.has(s, metric)]
    window = k if k is not None or not averages else averages[0].k
    own = [s for s in averages if s.k == window]
    return min(own, key=lambda s: (s.coefficients != "uniform", _treatment(s)), default=None)


def _recipe(recipe: str, runs: list[Run], name: str | None, k: int | None) -> RecipeReport:
    known = [run.axes(series) for run in runs for series in run.series]
    axes: tuple[Axis, ...] = ("epoch", "step")
    shared = [axis for axis in axes if all(axis in each for each in known)]
    if not shared:
        raise FormatError(
            f"recipe {recipe!r}: some rows have no `epoch` and some no `step`, so there is "
            "nothing that all can be counted by. Report on the files one at a time."
        )
    # Where evaluations fall inside epochs, parts of an epoch would be rounded away: count steps.
    whole = all(float(row.get("epoch") or 0).is_integer() for run in runs for row in run.rows)
    axis = shared[0] if whole else shared[-1]
    metrics = [
        m
        for m in metrics_of(row for run in runs for row in run.rows)
        if name in (None, m.name) and any(run.has(s, m) for run in runs for s in run.series)
    ]
    reports = [_metric(runs, m, axis, k) for m in metrics]
    return RecipeReport(
        recipe=recipe,
        axis=axis,
        metrics=tuple(report for report in reports if report.windows),
        notes=notes_on(runs, axis),
    )


def _metric(runs: list[Run], metric: Metric, axis: Axis, k: int | None) -> MetricReport:
    main, windows, raw = [], [], []
    for run in runs:
        default = default_average(run, metric, k)
        if default is not None:
            main += _main_rows(runs, run, default, metric, axis)
        windows += _window_rows(run, metric, axis, default)
        raw += _run_rows(run, metric)
    return MetricReport(
        metric=metric,
        main=tuple(main),
        windows=tuple(windows),
        runs=tuple(raw),
        losses=where_it_lost(metric, axis, main, windows),
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
            row = _main_row((other, series), (run, averaged), metric, axis, against)
            rows += [] if row is None else [row]
    return rows


def _main_row(
    baseline: Line, averaged: Line, metric: Metric, axis: Axis, against: Against
) -> MainRow | None:
    outcome = Outcome(baseline, averaged, metric, axis)
    if not outcome.compared.averaged:
        return None
    return MainRow(
        averaged_run=averaged[0].name,
        averaged=averaged[1],
        baseline_run=baseline[0].name,
        baseline=baseline[1],
        against=against,
        axis=axis,
        headline=outcome.headline,
        final=outcome.final,
        best=outcome.best,
        unmatched=outcome.unmatched,
        behind=outcome.stretches,
        num_behind=outcome.num_behind,
        num_compared=outcome.num_compared,
        curve=outcome.curve,
        notes=limits_of(baseline, averaged, metric, axis),
    )


def _window_rows(run: Run, metric: Metric, axis: Axis, default: Series | None) -> list[WindowRow]:
    averages = [s for s in run.series if s.averaged and run.has(s, metric)]
    rows = []
    for series in sorted(averages, key=_window_order):
        raw = baseline_of(run, series, metric, "alike")
        if raw is None:
            continue
        outcome = Outcome((run, raw), (run, series), metric, axis)
        curves = run.curves(series, metric, axis).values()
        rows.append(
            WindowRow(
                run=run.name,
                series=series,
                default=series == default,
                headline=outcome.headline,
                unmatched=outcome.unmatched,
                final=mean_of(curve.values[-1] for curve in curves),
                best=mean_of(metric.best(curve.values) for curve in curves),
                behind=outcome.stretches,
                num_behind=outcome.num_behind,
                num_compared=outcome.num_compared,
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
    """By seed, all that an average cost beyond the run: collecting, averaging, evaluating."""
    if "seconds" not in run.axes(series):
        return []
    return [
        sum(row.get(name) or 0.0 for row in own for name in _COSTS)
        + (own[-1].get("collect_seconds") or 0.0)
        for seed in run.seeds
        if (own := run.rows_of(series, seed))
    ]


def _window_order(series: Series) -> tuple[float, bool, str, int]:
    how = str(series.coefficients)
    return (series.k or 0, how != "uniform", how, _treatment(series))


def _treatment(series: Series) -> int:
    return {"re-estimated": 0, None: 1}.get(series.batch_norm, 2)


def _nothing(runs: Sequence[Run], metric: str | None) -> str:
    there = [m.name for m in metrics_of(row for run in runs for row in run.rows)]
    if metric is not None and metric not in there:
        names = f"there are {', '.join(there)}" if there else "there are none"
        return f"{metric!r} is not a value that can be compared; {names}."
    return (
        "no value of both raw and averaged weights to compare. A value can be compared when its "
        "name ends in loss, perplexity, error or accuracy."
    )
