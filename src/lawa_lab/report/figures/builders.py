"""The figures of a run, in the order of the page: headings, captions and what they draw."""

import itertools
import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

from lawa_lab.report.curves import Metric
from lawa_lab.report.figures.axes import Line, Panel, Point
from lawa_lab.report.figures.registry import Say, register_figure
from lawa_lab.report.figures.scene import Scene
from lawa_lab.report.figures.style import PALE, RAW, Dashes, Style
from lawa_lab.report.runs import Run, Series
from lawa_lab.report.saving_words import losses, seen_at_targets
from lawa_lab.report.summary import MainRow, WindowRow
from lawa_lab.report.window_words import seen_in_windows
from lawa_lab.report.words import (
    plain,
    say_rows,
    say_rule,
    say_series,
)

Fixed: TypeAlias = Callable[[Series], tuple[object, ...]]
_MOST_BANDS = 6
_Step: TypeAlias = tuple[float, float | None, float | None, float | None]


# ---------------------------------------------------------------- what averaging saved


@register_figure(
    "saving",
    "What averaging saved",
    "The arrow is the largest saving: it runs from where the raw weights reached a value back to "
    "where the average did. Ticks are seeds.",
)
def _saving(scene: Scene, run: Run) -> list[Panel]:
    panels = []
    for report in scene.shown:
        for row in report.own(run.name)[:1]:
            wanted = [*scene.raw(run), row.baseline, row.averaged]
            lines = scene.lines(run, wanted, report.metric)
            panels.append(scene.panel(report.metric, lines, run, arrow=scene.arrow(run, row)))
    return panels


# ---------------------------------------------------------------- averages against each other


def _rows(scene: Scene, run: Run) -> list[WindowRow]:
    return [row for row in scene.shown[0].windows if row.run == run.name]


def _besides_k(series: Series) -> tuple[object, ...]:
    return series.weights, series.coefficients, series.batch_norm


def _besides_rule(series: Series) -> tuple[object, ...]:
    return series.weights, series.k, series.batch_norm


def _besides_norm(series: Series) -> tuple[object, ...]:
    return series.weights, series.k, series.coefficients


def _say_varied(fixed: Fixed, name: Callable[[Series], str]) -> Say:
    """A sentence on the averages that agree with the main one in all but one property."""

    def say(scene: Scene, run: Run) -> str:
        default = fixed(scene.defaults[run.name])
        rows = [row for row in _rows(scene, run) if fixed(row.series) == default]
        return seen_in_windows(scene.shown[0].metric, rows, scene.axis, name)

    return say


def _bare(lines: tuple[Line, ...]) -> tuple[Line, ...]:
    return tuple(replace(line, low=(), high=()) for line in lines)


def _readable(lines: tuple[Line, ...]) -> tuple[Line, ...]:
    """Without the bands of the seeds, if there are so many that they would hide the lines."""
    return lines if len(lines) <= _MOST_BANDS else _bare(lines)


@register_figure(
    "windows",
    "Window length k",
    "Means without ranges, which would hide the lines. Dots mark a series with few evaluations.",
    sentence=_say_varied(_besides_k, lambda s: f"k = {s.k}"),
)
def _windows(scene: Scene, run: Run) -> list[Panel]:
    default = scene.defaults.get(run.name)
    if default is None:
        return []
    alike = [s for s in run.series if s.averaged and _besides_k(s) == _besides_k(default)]
    alike.sort(key=lambda series: series.k or 0)
    metric = scene.shown[0].metric
    averages = _bare(scene.lines(run, alike, metric))
    if len(averages) < 2:
        return []
    lines = (*_bare(scene.lines(run, scene.raw_alike(run, default), metric)), *averages)
    late = scene.panel(
        metric,
        lines,
        run,
        begin=0.75 * scene.end(run),
        title=f"{plain(metric.name)}, last quarter",
        zoom_on=averages,
        skip=0.0,
        trim=False,
    )
    return [scene.panel(metric, lines, run, zoom_on=averages), late]


def _say_methods(scene: Scene, run: Run) -> str:
    shown = {row.averaged for row in scene.shown[0].own(run.name)}
    rows = [row for row in _rows(scene, run) if row.series in shown]
    return seen_in_windows(scene.shown[0].metric, rows, scene.axis, say_series)


@register_figure(
    "methods",
    "Other methods of averaging",
    "The average of the latest weights beside other methods on the same run.",
    sentence=_say_methods,
)
def _methods(scene: Scene, run: Run) -> list[Panel]:
    panels = []
    for report in scene.shown:
        averages = [row.averaged for row in report.own(run.name)]
        if len({series.weights for series in averages}) > 1:
            lines = scene.lines(run, [*scene.raw(run), *averages], report.metric)
            panels.append(scene.panel(report.metric, _readable(lines), run))
    return panels


@register_figure(
    "coefficients",
    "Coefficients",
    "Averages of the same k with different coefficients.",
    sentence=_say_varied(_besides_rule, lambda s: say_rule(str(s.coefficients))),
)
def _coefficients(scene: Scene, run: Run) -> list[Panel]:
    default = scene.defaults.get(run.name)
    if default is None:
        return []
    alike = [s for s in run.series if _besides_rule(s) == _besides_rule(default)]
    panels = []
    for report in scene.shown:
        averages = scene.lines(run, [default, *alike], report.metric)
        if len(averages) > 1:
            raw = scene.lines(run, scene.raw_alike(run, default), report.metric)
            lines = _readable((*raw, *averages))
            panels.append(scene.panel(report.metric, lines, run, zoom_on=lines[len(raw) :]))
    return panels


@register_figure(
    "batch_norm",
    "BatchNorm statistics",
    "The same weights with BatchNorm statistics obtained in different ways. Each average is "
    "compared with raw weights treated alike if there are any, else with running statistics.",
    sentence=_say_varied(_besides_norm, lambda s: f"BatchNorm {s.batch_norm or 'running'}"),
)
def _batch_norm(scene: Scene, run: Run) -> list[Panel]:
    default = scene.defaults.get(run.name)
    if default is None:
        return []
    alike = [s for s in run.series if _besides_norm(s) == _besides_norm(default)]
    if len(alike) < 2:
        return []
    wanted = [*scene.raw(run), *alike]
    return [
        scene.panel(report.metric, lines, run)
        for report in scene.shown
        if (lines := scene.lines(run, wanted, report.metric))
    ]


# ---------------------------------------------------------------- runs against each other


@register_figure(
    "runs",
    "Run against run",
    "Raw weights with running BatchNorm statistics, and the main average of each run.",
    all_runs=True,
)
def _runs(scene: Scene, run: Run) -> list[Panel]:
    if len(scene.runs) < 2 or any(report.frontier for report in scene.shown):
        return []  # the frontier compares runs
    panels = []
    for report in scene.shown:
        lines = []
        for each in scene.runs:
            default = scene.defaults.get(each.name)
            raw = scene.raw(each)[:1]
            for series in [*raw, *([default] if default else [])]:
                label = f"{each.name}, {say_series(series)}"
                lines.append(scene.line(each, series, report.metric, label))
        there = tuple(line for line in lines if line is not None)
        if len(there) > 1:
            panels.append(scene.panel(report.metric, _readable(there)))
    return panels


# ---------------------------------------------------------------- the saving at every target


def _say_target(scene: Scene, run: Run) -> str:
    rows = scene.shown[0].own(run.name)
    return seen_at_targets(scene.shown[0].metric, rows[0]) if rows else ""


@register_figure(
    "target",
    "Saving against target",
    "Dotted where only some seeds reached the target. Above zero the average was first.",
    sentence=_say_target,
)
def _target(scene: Scene, run: Run) -> list[Panel]:
    panels = []
    for report in scene.shown:
        own = report.own(run.name)
        rows = [row for row in own if row.curve.target and row.averaged == own[0].averaged]
        lines = [line for row in rows for line in _saved(scene, run, row)]
        if not lines:
            continue
        metric = report.metric
        panels.append(
            Panel(
                title=f"{scene.axis}s saved",
                x_label=f"target: {plain(metric.name)}, harder to the right",
                lines=tuple(lines),
                x_percent=metric.name.endswith("accuracy"),
                x_limits=_target_limits(scene, run, rows, metric),
                zero=True,
                points=_points(scene, rows[0]),
            )
        )
    return panels


def _target_limits(
    scene: Scene, run: Run, rows: list[MainRow], metric: Metric
) -> tuple[float, float]:
    """From a little easier than where the average began, or the raw weights were early on.

    Of several seeds the middle one counts: the best may begin beyond what the others ever reach.
    The axis ends with the hardest value that has a saving: there may be nothing to draw for most
    values of an average that the raw weights never reached. Every row and point is inside.
    """
    row = rows[0]
    saved = [
        [t for t, saved in zip(r.curve.target, r.curve.saved, strict=True) if saved is not None]
        for r in rows
    ]
    reached = saved[0]
    hardest = metric.best(itertools.chain(*saved)) or row.curve.target[-1]
    ours, theirs = (
        run.curves(series, metric, scene.axis).values() for series in (row.averaged, row.baseline)
    )
    soon = 0.05 * scene.end(run)
    begins = [[curve.values[0] for curve in ours], [curve.value_at(soon) for curve in theirs]]
    known = [[value for value in values if value is not None] for values in begins]
    middle = [statistics.median(values) for values in known if values]
    first = min(middle, key=lambda value: abs(value - hardest), default=row.curve.target[0])
    if reached and metric.beats(first, reached[-1]):  # where no saving is known, all are easier
        first = reached[0]
    if first == hardest:  # it never became better than at its start
        first = row.curve.target[0] if row.curve.target[0] != hardest else 0.9 * hardest - 1e-6
    inside = [*(point.at for point in _points(scene, row)), *(each[-1] for each in saved if each)]
    first = max((first, *inside), key=lambda value: abs(value - hardest))
    return first - 0.15 * (hardest - first), hardest + 0.04 * (hardest - first)


def _saved(scene: Scene, run: Run, row: MainRow) -> list[Line]:
    """The mean over all seeds; dotted where only some of them reached the target."""
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
    """A step function without the points inside a step.

    >>> _corners([(1, 5, 5, 5), (2, 7, 7, 7), (3, 7, 7, 7), (4, 8, 8, 8)])
    [(1, 5, 5, 5), (3, 7, 7, 7), (4, 8, 8, 8)]
    """
    pairs = itertools.pairwise(steps)
    inner = [step for step, following in pairs if step[1:] != following[1:]]
    return [*steps[:1], *(step for step in inner if step is not steps[0]), steps[-1]]


def _points(scene: Scene, row: MainRow) -> tuple[Point, ...]:
    """The largest saving and those at the baseline's own values, if all seeds reached them."""
    names = {
        "headline": ("largest saving", "o"),
        "final": ("at the baseline's final value", "s"),
        "best": ("at its best value", "D"),
    }
    points = []
    for saving in row.savings:
        amount = saving.on(scene.axis)
        if saving.target is not None and amount is not None and saving.num_both == saving.num_seeds:
            label, marker = names[saving.what]
            points.append(
                Point(label=label, at=saving.target, value=amount.saved.mean, marker=marker)
            )
    return tuple(points)


# ---------------------------------------------------------------- where averaging lost


def _say_behind(scene: Scene, run: Run) -> str:
    report = scene.shown[0]
    return " ".join(losses(report.metric, report.main, _rows(scene, run)))


@register_figure(
    "behind",
    "Where averaging lost",
    "Bars mark evaluations at which the raw weights at the same step were better in most seeds.",
    sentence=_say_behind,
)
def _behind(scene: Scene, run: Run) -> list[Panel]:
    panels = []
    for report in scene.shown:
        rows = [row for row in report.windows if row.run == run.name]
        once = all(row.num_compared <= len(run.seeds) for row in rows)  # one moment of the run
        if once or not any(row.behind for row in rows):
            continue
        lines = [line for index, row in enumerate(rows) for line in _bars(scene, run, row, -index)]
        first: dict[str, Line] = {}
        for line in lines:
            first.setdefault(line.label, line)
        panels.append(
            Panel(
                title=plain(report.metric.name),
                x_label=scene.axis,
                # Once in the legend is enough.
                lines=tuple(
                    line if first[line.label] is line else replace(line, label="") for line in lines
                ),
                x_limits=(0.0, 1.02 * scene.end(run)),
                y_labels=tuple(say_rows([row.series for row in rows])),
            )
        )
    return panels


def _bars(scene: Scene, run: Run, row: WindowRow, index: float) -> list[Line]:
    """A pale line over the evaluations of an average, and a bar where it was behind."""
    curves = run.curves(row.series, scene.shown[0].metric, scene.axis).values()
    at = sorted({each for curve in curves for each in curve.at})
    if not at:
        return []
    gaps = [b - a for a, b in itertools.pairwise(at)]
    half = 0.5 * (statistics.median(gaps) if gaps else 1.0)
    ends = [(s.begin - half, s.end + half) for s in row.behind]
    lines = [
        Line(
            label="average evaluated",
            style=Style(colour=PALE, width=2.5, layer=2.0),
            at=(at[0] - half, at[-1] + half),
            mean=(index, index),
            bar=True,
        )
    ]
    if ends:
        lines.append(
            Line(
                label="raw weights better",
                style=Style(colour=RAW, width=8.0, layer=3.0),
                at=tuple(x for begin, end in ends for x in (begin, end, end)),
                mean=tuple(y for _ in ends for y in (index, index, None)),
                bar=True,
            )
        )
    return lines


@register_figure(
    "early",
    "The early phase",
    "The start of training, where averages include much older and worse weights.",
)
def _early(scene: Scene, run: Run) -> list[Panel]:
    default = scene.defaults.get(run.name)
    if default is None:
        return []
    end = scene.early(run)
    same = (default.weights, default.coefficients)
    kinds = [s for s in run.series if (s.weights, s.coefficients) == same]
    alike = [s for s in kinds if s.batch_norm == default.batch_norm]
    longest = max(alike, key=lambda series: series.k or 0)
    wanted = [*scene.raw(run), default, longest, *(s for s in kinds if s.k == default.k)]
    panels = []
    for report in scene.shown:
        lines = scene.lines(run, wanted, report.metric)
        lines = tuple(line for line in lines if sum(at <= end for at in line.at) > 1)
        if any(line.style == scene.styles.of(run, default) for line in lines):
            panels.append(scene.panel(report.metric, lines, run, end=end, skip=0.0, trim=False))
    return panels


# ---------------------------------------------------------------- everything


@register_figure("curves", "All metrics", "Every metric that was recorded.")
def _curves(scene: Scene, run: Run) -> list[Panel]:
    default = scene.defaults.get(run.name)
    if default is None:
        return []
    metrics = [*(report.metric for report in scene.report.metrics), Metric("train_loss", "lower")]
    panels = []
    for metric in sorted(metrics, key=lambda metric: metric.better == "higher"):
        # The training loss is that of the raw weights, whichever rows hold it.
        training = metric.name.startswith("train_")
        wanted = scene.raw(run)[:1] if training else [*scene.raw(run), default]
        lines = scene.lines(run, wanted, metric)
        if lines:
            panels.append(scene.panel(metric, lines, run))
    return panels
