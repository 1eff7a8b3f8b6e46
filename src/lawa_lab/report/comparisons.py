"""Figures that hold one average against another, or one target against the next."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

from lawa_lab.report.panels import Line, Panel, Point
from lawa_lab.report.runs import Run, Series
from lawa_lab.report.savings import Metric
from lawa_lab.report.scenes import Scene, plain, say_series
from lawa_lab.report.styles import Dashes, Style
from lawa_lab.report.summary import MainRow, TargetSaving
from lawa_lab.report.views import band

__all__ = ["batch_norm", "coefficients", "target", "windows"]

_Step: TypeAlias = tuple[float, float | None, float | None, float | None]

_POINTS = {
    "headline": ("longest saving", "o"),
    "final": ("at the baseline's final value", "s"),
    "best": ("at its best value", "D"),
}


def windows(scene: Scene, run: Run) -> tuple[Panel, ...]:
    """Every k, over the whole run and at its end, without bands: they would hide the lines."""
    default = scene.defaults.get(run.name)
    if default is None:
        return ()
    alike = [s for s in run.series if s.averaged and _rest(s) == _rest(default)]
    alike.sort(key=lambda series: series.k or 0)
    metric = scene.shown[0].metric
    averages = _bare(scene.lines(run, alike, metric))
    if len(averages) < 2:
        return ()
    lines = (*_bare(scene.lines(run, scene.raw(run)[:1], metric)), *averages)
    end = scene.end(run)
    x_label = scene.x_label(run).replace("mean and range", "mean")
    panels = (
        scene.panel(metric, lines, run, zoom_on=averages),
        scene.panel(
            metric,
            lines,
            run,
            begin=0.75 * end,
            title=f"{plain(metric.name)}, last quarter",
            zoom_on=averages,
            skip=0.0,
            trim=False,
        ),
    )
    return tuple(replace(panel, x_label=x_label) for panel in panels)


def coefficients(scene: Scene, run: Run) -> tuple[Panel, ...]:
    """Uniform coefficients and others at the same k, and the difference between them."""
    default = scene.defaults.get(run.name)
    if default is None:
        return ()
    alike = [s for s in run.series if (s.k, s.batch_norm) == (default.k, default.batch_norm)]
    others = [s for s in alike if s != default]
    metric = scene.shown[0].metric
    averages = scene.lines(run, [default, *others], metric)
    if len(averages) < 2:
        return ()
    raw = scene.lines(run, scene.raw(run)[:1], metric)
    share = metric.name.endswith("accuracy")
    drawn = [_difference(scene, run, default, other, metric) for other in others]
    differences = tuple(line for line in drawn if line is not None)
    difference = Panel(
        title=f"difference to {_kind(default)}{', percentage points' if share else ''}",
        x_label=scene.x_label(run),
        lines=differences,
        x_limits=(0.0, 1.02 * scene.end(run)),
        y_limits=_around_zero(differences, 0.25 * scene.end(run)),
        zero=True,
    )
    return scene.panel(metric, (*raw, *averages), run, zoom_on=averages), difference


def batch_norm(scene: Scene, run: Run) -> tuple[Panel, ...]:
    """The default average with every BatchNorm policy, and the raw weights likewise."""
    default = scene.defaults.get(run.name)
    if default is None:
        return ()
    alike = [s for s in run.series if (s.k, s.coefficients) == (default.k, default.coefficients)]
    if len(alike) < 2:
        return ()
    wanted = [*scene.raw(run), *alike]
    return tuple(
        scene.panel(report.metric, lines, run)
        for report in scene.shown
        if (lines := scene.lines(run, wanted, report.metric))
    )


def target(scene: Scene, run: Run) -> tuple[Panel, ...]:
    """The saving at every target, against each baseline of the run's own."""
    panels = []
    for report in scene.shown:
        rows = [row for row in scene.own_rows(report, run) if row.curve.target]
        lines = [line for row in rows for line in _saved(scene, run, row)]
        if not lines:
            continue
        metric = report.metric
        easy, hard = _view(scene, run, rows[0], metric)
        panels.append(
            Panel(
                title=f"{scene.axis}s saved",
                x_label=f"target: {plain(metric.name)}, harder to the right",
                lines=tuple(lines),
                x_percent=metric.name.endswith("accuracy"),
                x_limits=(easy, hard),
                zero=True,
                points=_points(scene, rows[0]),
            )
        )
    return tuple(panels)


def _view(scene: Scene, run: Run, row: MainRow, metric: Metric) -> tuple[float, float]:
    """From somewhat easier than where the average began, or the raw weights were early on."""
    ours, theirs = (
        run.curves(series, metric, scene.axis).values() for series in (row.averaged, row.baseline)
    )
    soon = 0.05 * scene.end(run)
    begins = [curve.values[0] for curve in ours] + [curve.value_at(soon) for curve in theirs]
    hardest = row.curve.target[-1]
    known = [value for value in begins if value is not None]
    first = min(known, key=lambda value: abs(value - hardest), default=row.curve.target[0])
    if first == hardest:  # it never got better than it began
        first = row.curve.target[0] if row.curve.target[0] != hardest else 0.9 * hardest - 1e-6
    return first - 0.15 * (hardest - first), hardest + 0.02 * (hardest - first)


def _saved(scene: Scene, run: Run, row: MainRow) -> list[Line]:
    """The mean over all seeds; dotted where only some of them got there."""
    style = scene.styles.of(run, row.baseline)
    curve = row.curve
    num_seeds = max(curve.num_averaged, default=0)
    several = num_seeds > 1
    lines = []
    for label, whole in ((f"against {say_series(row.baseline)}", True), ("", False)):
        here = [(n == num_seeds) is whole for n in curve.num_both]
        if not any(here):
            continue
        dashes: Dashes = "-" if whole else (0, (1, 1.5))
        shown = [
            (at, *((mean, low, high) if use else (None, None, None)))
            for use, at, mean, low, high in zip(
                here, curve.target, curve.saved, curve.low, curve.high, strict=True
            )
        ]
        at, mean, low, high = zip(*_corners(shown), strict=True)
        lines.append(
            Line(
                label=label,
                style=Style(colour=style.colour, dashes=dashes, width=2.0, layer=style.layer),
                at=at,
                mean=mean,
                low=low if several else (),
                high=high if several else (),
                steps=True,
            )
        )
    return lines


def _corners(steps: list[_Step]) -> list[_Step]:
    """A flight of steps without the points inside a step: each value holds since the last point.

    >>> _corners([(1, 5, 5, 5), (2, 7, 7, 7), (3, 7, 7, 7), (4, 8, 8, 8)])
    [(1, 5, 5, 5), (3, 7, 7, 7), (4, 8, 8, 8)]
    """
    pairs = itertools.pairwise(steps)
    inner = [step for step, following in pairs if step[1:] != following[1:]]
    return [*steps[:1], *(step for step in inner if step is not steps[0]), steps[-1]]


def _points(scene: Scene, row: MainRow) -> tuple[Point, ...]:
    """The longest saving and those at the baseline's final and best value, where all got there."""
    points = []
    savings: tuple[TargetSaving | None, ...] = (row.headline, row.final, row.best)
    for saving in savings:
        if saving is None or saving.target is None or saving.num_both < saving.num_seeds:
            continue
        amount = saving.epochs if scene.axis == "epoch" else saving.steps
        if amount is not None:
            label, marker = _POINTS[saving.what]
            points.append(
                Point(label=label, at=saving.target, value=amount.saved.mean, marker=marker)
            )
    return tuple(points)


def _difference(
    scene: Scene, run: Run, default: Series, other: Series, metric: Metric
) -> Line | None:
    """Another average minus the default one, seed by seed, where both were evaluated."""
    ours, theirs = (run.curves(series, metric, scene.axis) for series in (default, other))
    unit = 100.0 if metric.name.endswith("accuracy") else 1.0
    points = []
    for seed, curve in theirs.items():
        known = dict(zip(ours[seed].at, ours[seed].values, strict=True)) if seed in ours else {}
        for place, value in zip(curve.at, curve.values, strict=True):
            base = known.get(place)
            if value is not None and base is not None:
                points.append((place, unit * (value - base)))
    at, mean, low, high = band(points)
    if len(at) < 2:
        return None
    several = len(theirs) > 1
    return Line(
        label=say_series(other),
        style=scene.styles.of(run, other),
        at=at,
        mean=mean,
        low=low if several else (),
        high=high if several else (),
    )


def _around_zero(lines: Sequence[Line], begin: float) -> tuple[float, float] | None:
    """Limits from what is seen after `begin`; before, windows that fill make any difference."""
    values = [
        value
        for line in lines
        for edge in (line.low or line.mean, line.high or line.mean)
        for at, value in zip(line.at, edge, strict=True)
        if at >= begin and value is not None
    ]
    if not values:
        return None
    low, high = min(*values, 0.0), max(*values, 0.0)
    room = 0.15 * (high - low) or 1.0
    return low - room, high + room


def _bare(lines: tuple[Line, ...]) -> tuple[Line, ...]:
    return tuple(replace(line, low=(), high=()) for line in lines)


def _rest(series: Series) -> tuple[str | None, str | None]:
    return series.coefficients, series.batch_norm


def _kind(series: Series) -> str:
    return str(series.coefficients).replace(":", " ")
