"""The figure of the frontier: annealed runs as points, anytime averages as curves."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from lawa_lab.report import frontier_words
from lawa_lab.report.curves import Metric
from lawa_lab.report.figures.axes import Arrow, Line, Panel
from lawa_lab.report.figures.registry import register_figure
from lawa_lab.report.figures.scene import Scene
from lawa_lab.report.figures.style import RAW, Dashes, Style, vary
from lawa_lab.report.frontier import AnnealedRun, AnytimeCurve, Frontier, best_curve
from lawa_lab.report.runs import Run
from lawa_lab.report.words import plain, say_axis, say_number, say_over_seeds

__all__ = ["frontier_panels"]

_MAIN = "#0072b2"
_ANNEALED: tuple[tuple[str, str], ...] = (
    (RAW, "o"), ("#cc79a7", "s"), ("#e69f00", "D"), ("#661100", "^"), ("#888888", "v"),
)  # fmt: skip
_OTHERS = ("#009e73", "#882255", "#999933", "#332288", "#44aa99", "#555555")
_DASHES: tuple[Dashes, ...] = ("--", "-.", (0, (1, 1)), (0, (5, 1, 1, 1)))
_QUIET, _FAINT = "#7d8791", "#aab3bb"
_WIDE = 4.0  # budgets that span more than this factor have a logarithmic axis
_FEW = 1  # with more other methods, their names are in the legend, not beside their curves
_LONG = 16  # letters, as "20% linear decay"; longer names are in the legend too
# Of the arrow's text, as fractions of the axes: width and height, and where its right edge may be.
_TEXT, _RIGHT = (0.62, 0.2), (0.97, 0.8, 0.64)
_MARKER = 0.02  # half of a marker's width

_Looks: TypeAlias = dict[str, tuple[str, Dashes]]  # by the name of a curve


def _say(scene: Scene, run: Run) -> str:
    report = scene.shown[0]
    return "" if report.frontier is None else frontier_words.leads(report.metric, report.frontier)


@register_figure(
    "frontier",
    "Annealed runs and anytime averages",
    "Points are annealed runs, each trained for its own length; the thin line is their envelope. "
    "Hollow points are the averages of annealed runs at their end, where they are better. Curves "
    "are one constant-rate run. Bars and bands run from the worst to the best seed.",
    sentence=_say,
    all_runs=True,
    first=True,
)
def frontier_panels(scene: Scene, run: Run) -> list[Panel]:
    """One panel per metric that has a frontier."""
    shown = [(each.metric, each.frontier) for each in scene.shown if each.frontier is not None]
    kinds = {run.name: run.kind for run in scene.runs}
    others = [_others(metric, frontier, kinds) for metric, frontier in shown]
    named = [curve.label for curves in others for curve in curves]
    looks = {  # the same in all panels, because they have one legend
        label: vary(index, _OTHERS, _DASHES) for index, label in enumerate(dict.fromkeys(named))
    }
    return [
        _panel(metric, frontier, curves, looks)
        for (metric, frontier), curves in zip(shown, others, strict=True)
    ]


def _panel(
    metric: Metric, frontier: Frontier, others: Sequence[AnytimeCurve], looks: _Looks
) -> Panel:
    points, curves = _points(metric, frontier), _curves(frontier, others, looks)
    first, last = frontier.budgets[0], frontier.budgets[-1]
    log = last > _WIDE * first
    begin = 0.7 * first if log else 0.0
    end = max([last, *(line.at[-1] for line in curves)])
    envelope = Line(
        label="",
        style=Style(colour=_QUIET, width=1.0, layer=2.5),
        at=tuple(at for at, _ in frontier.envelope),
        mean=tuple(value for _, value in frontier.envelope),
        bar=True,
    )
    limits, y_log = _limits(metric, [*points, *curves], first)
    lines = tuple(_named(line) for line in (envelope, *curves, *points))
    x_limits = (begin, end * (1.06 if log else 1.03))
    return Panel(
        title=f"{plain(metric.name)}{_seeds(frontier)}",
        x_label=f"{say_axis(frontier.axis)} of training",
        lines=lines,
        percent=metric.name.endswith("accuracy"),
        log=y_log,
        x_log=log,
        x_ticks=_ticks(frontier.budgets),
        x_limits=x_limits,
        y_limits=limits,
        arrow=_arrow(frontier),
        text_at=_free_spot(lines, (x_limits, log), (limits or (0.0, 1.0), y_log)),
    )


def _named(line: Line) -> Line:
    """With its name in the legend if that is long: beside its end it would squeeze the axes.

    Raw weights, which may leave the panel, are named only where they end inside it.
    """
    if len(line.end_label) <= _LONG or line.style.colour == _FAINT:
        return line
    return replace(line, label=line.end_label, end_label="", bar=not line.marker)


def _points(metric: Metric, frontier: Frontier) -> list[Line]:
    """One line of markers per schedule, and hollow ones where its average is better."""
    lines = []
    labels = dict.fromkeys(point.label for point in frontier.annealed)
    for index, label in enumerate(labels):
        colour, marker = _ANNEALED[index % len(_ANNEALED)]
        style = Style(colour=colour, layer=5.0)
        own = [p for p in frontier.annealed if p.label == label and p.best_peak]
        lines.append(_marked(label, style, marker, own))
        better = [p for p in own if p.average and metric.beats(p.average.mean, p.raw.mean)]
        if better:
            lines.append(
                Line(
                    label=f"{label}, its average if better",
                    style=Style(colour=colour, layer=4.9),
                    at=tuple(p.budget for p in better),
                    mean=tuple(p.average.mean if p.average else None for p in better),
                    marker=marker,
                    hollow=True,
                )
            )
    return lines


def _marked(label: str, style: Style, marker: str, own: Sequence[AnnealedRun]) -> Line:
    several = any(point.raw.num_seeds > 1 for point in own)
    return Line(
        label="",
        end_label=label,
        style=style,
        at=tuple(point.budget for point in own),
        mean=tuple(point.raw.mean for point in own),
        low=tuple(point.raw.low for point in own) if several else (),
        high=tuple(point.raw.high for point in own) if several else (),
        marker=marker,
    )


def _others(metric: Metric, frontier: Frontier, kinds: Mapping[str, str]) -> list[AnytimeCurve]:
    """The best curve of each other method, and of the first method of each other optimizer.

    An average that was evaluated once has no curve.
    """
    main = {kinds[curve.run]: curve.series.weights for curve in frontier.curves if curve.main}
    first: dict[str, str] = {}
    others: dict[tuple[str, str], list[AnytimeCurve]] = {}
    for curve in frontier.curves:
        kind, method = kinds[curve.run], curve.series.weights
        if not (curve.best_peak and curve.series.averaged and curve.at[1:]):
            continue
        if main[kind] != method if kind in main else first.setdefault(kind, method) == method:
            others.setdefault((kind, method), []).append(curve)
    return [best_curve(metric, curves) for curves in others.values()]


def _curves(frontier: Frontier, others: Sequence[AnytimeCurve], looks: _Looks) -> list[Line]:
    """The main average, the best curve of each other method, and raw weights."""
    shown = [curve for curve in frontier.curves if curve.best_peak]
    main = [curve for curve in shown if curve.main]
    raw = [curve for curve in shown if not curve.series.averaged][:1]
    lines = [_line(curve, Style(colour=_FAINT, width=0.9, layer=1.8)) for curve in raw]
    for curve in others:
        colour, dashes = looks[curve.label]
        style = Style(colour=colour, dashes=dashes, width=1.5, layer=3.2)
        lines.append(_line(curve, style, in_legend=len(others) > _FEW))
    lines += [_line(curve, Style(colour=_MAIN, width=2.6, layer=4.0), band=True) for curve in main]
    return lines


def _line(
    curve: AnytimeCurve, style: Style, *, band: bool = False, in_legend: bool = False
) -> Line:
    drawn = band and curve.num_seeds > 1
    return Line(
        label=curve.label if in_legend else "",
        end_label="" if in_legend else curve.label,
        style=style,
        at=curve.at,
        mean=curve.mean,
        low=curve.low if drawn else (),
        high=curve.high if drawn else (),
        bar=in_legend,
    )


def _limits(
    metric: Metric, lines: Sequence[Line], begin: float
) -> tuple[tuple[float, float] | None, bool]:
    """Room for all points and averages from the shortest budget on; and whether to use a log axis.

    Raw weights at a constant rate may be far off, and may leave the panel.
    """
    values = [
        value
        for line in lines
        if line.style.colour != _FAINT
        for series in (line.mean, line.low, line.high)
        for at, value in zip(line.at, series, strict=False)
        if value is not None and at >= begin
    ]
    if not values:
        return None, False
    low, high = min(values), max(values)
    log = metric.better == "lower" and high > 3.0 * low > 0.0
    if log:
        room = (high / low) ** 0.08
        return (low / room, high * room), True
    room = 0.08 * (high - low) or 0.05 * abs(high) or 1.0
    top = high + room
    return (low - room, min(top, 1.0) if metric.better == "higher" and high <= 1.0 else top), False


_Scale = tuple[tuple[float, float], bool]  # limits, and whether it is logarithmic


def _free_spot(lines: Sequence[Line], x: _Scale, y: _Scale) -> tuple[float, float]:
    """Where the arrow's text covers the least: its lower or upper right corner, in the axes."""
    drawn = [(_share(a, x), _share(b, y)) for line in lines for a, b in _sampled(line)]

    def covered(spot: tuple[float, float]) -> int:
        left, right = spot[0] - _TEXT[0], spot[0] + _MARKER
        bottom = spot[1] if spot[1] < 0.5 else spot[1] - _TEXT[1]
        return sum(left < a < right and bottom < b < bottom + _TEXT[1] for a, b in drawn)

    return min(((a, b) for b in (0.04, 0.97) for a in _RIGHT), key=covered)


def _sampled(line: Line) -> Iterator[tuple[float, float]]:
    """Points along a line, or its markers, each of which counts as much as a piece of a line."""
    there = [(a, b) for a, b in zip(line.at, line.mean, strict=True) if b is not None]
    if line.marker:
        yield from 8 * there
    else:
        yield from there
        for (a, b), (c, d) in itertools.pairwise(there):
            yield from ((a + i / 8 * (c - a), b + i / 8 * (d - b)) for i in range(1, 8))


def _share(value: float, scale: _Scale) -> float:
    """Where a value is between the limits, from 0 to 1."""
    (low, high), log = scale
    if log:
        low, high, value = math.log(low), math.log(high), math.log(max(value, 1e-300))
    return (value - low) / (high - low)


def _arrow(frontier: Frontier) -> Arrow | None:
    """From the end of the longest annealed run back to where the average is as good."""
    found = frontier.headline
    amount = None if found is None else found.saving.on(frontier.axis)
    if found is None or amount is None or found.saving.target is None:
        return None
    if found.saving.num_both < found.saving.num_seeds or not round(amount.percent or 0.0):
        return None
    begin, end = say_number(found.budget), say_over_seeds(amount.averaged_at)
    return Arrow(
        begin=found.budget,
        end=amount.averaged_at.mean,
        value=found.saving.target,
        ticks=(),
        text=f"{frontier_words.less_training(amount)}\n({end} for {begin} {frontier.axis}s)",
    )


def _ticks(budgets: Sequence[float]) -> tuple[float, ...]:
    """The budgets, without those whose numbers would touch."""
    kept: list[float] = []
    for budget in reversed(budgets):
        if not kept or kept[-1] > 1.25 * budget:
            kept.append(budget)
    return tuple(reversed(kept))


def _seeds(frontier: Frontier) -> str:
    counts = {point.raw.num_seeds for point in frontier.annealed}
    counts |= {curve.num_seeds for curve in frontier.curves}
    if counts == {1}:
        return ""
    number = str(max(counts)) if len(counts) == 1 else f"{min(counts)} to {max(counts)}"
    return f", {number} seeds"
