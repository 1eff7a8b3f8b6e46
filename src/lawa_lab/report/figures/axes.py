"""One pair of axes as plain values (`Panel`), and the function that draws it.

matplotlib (the `lab` extra) is imported only when something is drawn.
"""

import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lawa_lab.report.figures.style import INK, Style
from torch_lawa.errors import LawaError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Arrow", "Line", "Panel", "Point", "fill", "matplotlib"]

_SPARSE = 15  # lines of fewer points show each of them


@dataclass(frozen=True, kw_only=True)
class Line:
    """The mean over seeds, and the range of the seeds around it."""

    label: str  # "" keeps it out of the legend
    style: Style
    at: tuple[float, ...]
    mean: tuple[float | None, ...]
    low: tuple[float | None, ...] = ()  # () where there is one seed
    high: tuple[float | None, ...] = ()
    steps: bool = False  # between two points, the value of the later one
    bar: bool = False  # without markers and with square ends
    marker: str = ""  # points without a line, and the range of the seeds as bars
    hollow: bool = False  # of markers
    end_label: str = ""  # written where the line ends, instead of in the legend

    @property
    def name(self) -> str:
        """The label for a legend; matplotlib leaves out labels that begin with "_"."""
        return f" {self.label}" if self.label.startswith("_") else self.label


@dataclass(frozen=True, kw_only=True)
class Arrow:
    """An arrow from where the baseline reached a value back to where the average did."""

    begin: float
    end: float
    value: float
    ticks: tuple[tuple[float, str], ...]  # where each seed reached it, and the colour of its line
    text: str


@dataclass(frozen=True, kw_only=True)
class Point:
    """A single value, with an entry in the legend."""

    label: str
    at: float
    value: float
    marker: str


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One pair of axes."""

    title: str
    x_label: str
    lines: tuple[Line, ...]
    percent: bool = False  # the values are fractions, shown in percent
    log: bool = False
    x_limits: tuple[float, float] | None = None
    y_limits: tuple[float, float] | None = None
    x_percent: bool = False
    x_log: bool = False
    x_ticks: tuple[float, ...] = ()  # () lets matplotlib choose
    zero: bool = False  # a line at zero
    arrow: Arrow | None = None
    text_at: tuple[float, float] = (0.97, 0.12)  # of the arrow, as fractions of the axes
    points: tuple[Point, ...] = ()
    y_labels: tuple[str, ...] = ()  # names instead of numbers, at 0, -1, -2 and so on


def fill(axes: "Axes", panel: Panel) -> None:
    """Draw a panel into axes."""
    begin, end = sorted(panel.x_limits or (float("-inf"), float("inf")))
    for line in panel.lines:
        if line.marker:
            _markers(axes, line)
        else:
            _line(axes, line, (begin, end))
    for point in panel.points:
        axes.plot(
            [point.at],
            [point.value],
            point.marker,
            label=point.label,
            color=INK,
            markersize=8,
            markerfacecolor="white",
            markeredgewidth=1.8,
            zorder=7,
        )
    axes.set_title(panel.title, loc="left", fontsize=12, color=INK)
    axes.set_xlabel(panel.x_label, fontsize=11, color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=10.5, colors=INK)
    axes.grid(axis="y", color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    if panel.zero:
        axes.axhline(0.0, color=INK, linewidth=1.0, zorder=1.5)
    _scale(axes, panel)
    _end_labels(axes, panel)
    if panel.arrow is not None:
        _arrow(axes, panel.arrow, panel.text_at)


def _markers(axes: "Axes", line: Line) -> None:
    colour, low, high = line.style.colour, _numbers(line.low), _numbers(line.high)
    if low and high:
        axes.vlines(line.at, low, high, color=colour, linewidth=1.4, zorder=line.style.layer - 0.1)
    axes.plot(
        line.at,
        _numbers(line.mean),
        line.marker,
        color=colour,
        markersize=7,
        markerfacecolor="white" if line.hollow else colour,
        markeredgecolor=colour if line.hollow else "white",
        markeredgewidth=1.6 if line.hollow else 0.8,
        label=line.name or "_",
        zorder=line.style.layer,
    )


def _end_labels(axes: "Axes", panel: Panel) -> None:
    """Names at the right edge, pushed apart where they would overlap, or beside the last point."""
    margin = []
    for line in panel.lines:
        there = [(x, y) for x, y in zip(line.at, line.mean, strict=True) if y is not None]
        if not line.end_label or not there:
            continue
        x, y = (_share(axes, which, at) for which, at in zip("xy", there[-1], strict=True))
        if not 0.0 <= y <= 1.0:
            continue
        if x > 0.8:
            margin.append((y, line))
        else:
            axes.annotate(
                line.end_label,
                there[-1],
                xytext=(7, 5),
                textcoords="offset points",
                fontsize=10.5,
                color=line.style.colour,
                parse_math=False,
            )
    margin.sort(key=lambda pair: pair[0])
    for y, (_, line) in zip(_apart([y for y, _ in margin]), margin, strict=True):
        axes.text(
            1.015,
            y,
            line.end_label,
            transform=axes.transAxes,
            va="center",
            fontsize=10.5,
            color=line.style.colour,
            fontweight="bold" if line.style.width > 2.5 else "normal",
            parse_math=False,
        )


def _share(axes: "Axes", which: str, value: float) -> float:
    """Where a value is on an axis, from 0 to 1."""
    low, high = axes.get_xlim() if which == "x" else axes.get_ylim()
    scale = axes.get_xscale() if which == "x" else axes.get_yscale()
    if scale == "log":
        low, high, value = math.log(low), math.log(high), math.log(value)
    return (value - low) / (high - low)


def _apart(places: Sequence[float], gap: float = 0.075) -> list[float]:
    """Sorted places moved as little as needed to be `gap` apart.

    >>> [round(place, 3) for place in _apart([0.1, 0.12, 0.9])]
    [0.073, 0.147, 0.9]
    """
    groups: list[list[float]] = []  # places that touch, centred on their own mean
    for place in places:
        groups.append([place])
        while len(groups) > 1:
            (a, b), reach = groups[-2:], 0.5 * gap * (len(groups[-2]) + len(groups[-1]))
            if sum(b) / len(b) - sum(a) / len(a) >= reach:
                break
            groups[-2:] = [a + b]
    return [
        sum(group) / len(group) + gap * (index - 0.5 * (len(group) - 1))
        for group in groups
        for index in range(len(group))
    ]


def _line(axes: "Axes", line: Line, view: tuple[float, float]) -> None:
    # Points outside the view are left out, except the next one on either side.
    inside = [index for index, at in enumerate(line.at) if view[0] <= at <= view[1]]
    part = slice(max(min(inside) - 1, 0), max(inside) + 2) if inside else slice(0, 0)
    at = line.at[part]
    axes.plot(
        at,
        _numbers(line.mean[part]),
        color=line.style.colour,
        linestyle=line.style.dashes,
        linewidth=line.style.width,
        marker="o"
        if len(inside) < _SPARSE and not (line.steps or line.bar or line.end_label)
        else None,
        markersize=4.5,
        drawstyle="steps-pre" if line.steps else "default",
        solid_capstyle="butt" if line.bar else "projecting",
        label=line.name or "_",
        zorder=line.style.layer,
    )
    if line.low and line.high:
        axes.fill_between(
            at,
            _numbers(line.low[part]),
            _numbers(line.high[part]),
            step="pre" if line.steps else None,
            color=line.style.colour,
            alpha=0.18,
            linewidth=0,
            zorder=line.style.layer - 0.5,
        )


def _numbers(values: Sequence[float | None]) -> list[float]:
    return [float("nan") if value is None else value for value in values]


def _scale(axes: "Axes", panel: Panel) -> None:
    ticker = matplotlib("ticker")
    if panel.x_log:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(
            ticker.FixedLocator(panel.x_ticks) if panel.x_ticks else ticker.LogLocator()
        )
        axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:,g}"))
        axes.xaxis.set_minor_locator(ticker.NullLocator())
        if panel.x_limits is not None:
            axes.set_xlim(*panel.x_limits)
    elif panel.x_limits is not None:
        axes.set_xlim(*panel.x_limits)
        whole = abs(panel.x_limits[1] - panel.x_limits[0]) >= 8  # epochs are whole
        axes.xaxis.set_major_locator(
            ticker.MaxNLocator(8 if whole else 5, steps=[1, 2, 2.5, 5, 10], integer=whole)
        )
    if panel.y_labels:
        axes.set_yticks([-index for index in range(len(panel.y_labels))], panel.y_labels)
        for text in axes.get_yticklabels():
            text.set_parse_math(False)
        axes.set_ylim(0.6 - len(panel.y_labels), 0.6)
    elif panel.log:
        axes.set_yscale("log")
        low, high = panel.y_limits or (1.0, 10.0)
        subs: tuple[float, ...] = (1.0, 2.0, 5.0) if high < 1e3 * low else (1.0,)
        if high < 5.0 * low:
            subs = (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0)
        axes.yaxis.set_major_locator(ticker.LogLocator(base=10, subs=subs))
        axes.yaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
        axes.yaxis.set_minor_locator(ticker.NullLocator())
    else:
        axes.yaxis.set_major_locator(ticker.MaxNLocator(6, steps=[1, 2, 5, 10]))
    if panel.y_limits is not None:
        axes.set_ylim(*panel.y_limits)
    percent = ticker.FuncFormatter(
        lambda value, _: f"{round(100 * value, 4):g}%" if value <= 1.0 else ""
    )
    if panel.percent:
        axes.yaxis.set_major_formatter(percent)
    if panel.x_percent:
        axes.xaxis.set_major_formatter(percent)


def _arrow(axes: "Axes", arrow: Arrow, text_at: tuple[float, float]) -> None:
    axes.annotate(
        "",
        xy=(arrow.end, arrow.value),
        xytext=(arrow.begin, arrow.value),
        arrowprops={
            "arrowstyle": "-|>",
            "color": INK,
            "linewidth": 1.6,
            "shrinkA": 0,
            "shrinkB": 5,
        },
        zorder=5,
    )
    for at, colour in arrow.ticks:
        axes.plot(at, arrow.value, "|", color=colour, markersize=13, markeredgewidth=2.2, zorder=6)
    axes.text(
        *text_at,
        arrow.text,
        transform=axes.transAxes,
        ha="right",
        va="bottom" if text_at[1] < 0.5 else "top",
        fontsize=11.5,
        color=INK,
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 2},
        zorder=4.5,
    )


def matplotlib(name: str) -> Any:
    """A module of matplotlib, or an error that says how to install it."""
    try:
        return importlib.import_module(f"matplotlib.{name}")
    except ImportError as error:
        raise LawaError(
            f"figures need matplotlib, which could not be imported ({error}): "
            "pip install 'torch-lawa[lab]'"
        ) from None
