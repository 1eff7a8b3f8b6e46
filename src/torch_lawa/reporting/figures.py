"""Figures from rows of metrics. matplotlib (the `report` extra) is imported only when one is made.

Figures are made without pyplot, so nothing global changes and no display is needed.
"""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_lawa.checkpoints.files import replacing
from torch_lawa.core.records import Row
from torch_lawa.errors import LawaError
from torch_lawa.reporting.savings import Comparison, Curve, Metric, Saving, compare

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["demo_figure", "save_demo_figure"]

# Of Okabe and Ito's palette: told apart with any colour vision, and in grey.
_RAW, _AVERAGED, _USUAL, _INK = "#d55e00", "#0072b2", "#999999", "#333333"


def save_demo_figure(rows: Sequence[Row], path: Path) -> None:
    """Draw `demo_figure` into a PNG file, which is whole or not there."""
    figure = demo_figure(rows)
    with replacing(path) as file:
        figure.savefig(file, format="png", dpi=200)


def demo_figure(rows: Sequence[Row]) -> "Figure":
    """Test loss and accuracy against epochs, raw and averaged, with the longest saving marked.

    Both with BatchNorm statistics re-estimated; a thin grey line shows the raw weights as they
    are usually evaluated, with running statistics. Lines are means over seeds, bands run from the
    worst to the best seed, and ticks on the arrow are where each seed first reached the value.
    """
    figure: Figure = _matplotlib("figure").Figure(figsize=(9.0, 3.8), layout="constrained")
    loss_axes, accuracy_axes = figure.subplots(1, 2)
    for axes, metric, title in (
        (loss_axes, Metric("test_loss", "lower"), "test loss"),
        (accuracy_axes, Metric("test_accuracy", "higher"), "test accuracy"),
    ):
        alike, usual = compare(rows, metric), compare(rows, metric, baseline="usual")
        _panel(axes, alike, title)
        if usual.baseline != alike.baseline:
            at, mean, _, _ = _band(list(usual.baseline.values()))
            label = "raw weights, BatchNorm not re-estimated"
            axes.plot(at, mean, color=_USUAL, linewidth=1.1, label=label, zorder=1)
    handles, labels = loss_axes.get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside upper center", ncols=3, frameon=False, fontsize=11.5
    )
    return figure


def _panel(axes: "Axes", comparison: Comparison, title: str) -> None:
    num_seeds = len(comparison.averaged)
    for curves, label, colour in (
        (comparison.baseline, "raw weights", _RAW),
        (comparison.averaged, "averaged weights", _AVERAGED),
    ):
        at, mean, low, high = _band(list(curves.values()))
        axes.plot(at, mean, color=colour, linewidth=2, label=label)
        axes.fill_between(at, low, high, color=colour, alpha=0.18, linewidth=0)
    axes.set_title(title, loc="left", fontsize=12, color=_INK)
    several = f" (mean and range of {num_seeds} seeds)" if num_seeds > 1 else ""
    axes.set_xlabel(f"epoch{several}", fontsize=11, color=_INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=10.5, colors=_INK)
    axes.grid(axis="y", color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_xlim(left=0)
    _scale(axes, comparison)
    _mark(axes, comparison)


def _scale(axes: "Axes", comparison: Comparison) -> None:
    """Loss on a log scale; accuracy from where the averaged weights begin, with some room."""
    ticker = _matplotlib("ticker")
    if comparison.metric.better == "lower":
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(ticker.LogLocator(base=10, subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
        axes.yaxis.set_minor_locator(ticker.NullLocator())
        return
    values = [v for c in comparison.averaged.values() for v in c.values if v is not None]
    room = max(max(values) - min(values), 0.01) if values else 1.0
    if values:
        axes.set_ylim(max(min(values) - room, 0.0), min(max(values) + 0.25 * room, 1.0))
    axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{100 * value:g}%"))


def _mark(axes: "Axes", comparison: Comparison) -> None:
    """The longest saving: an arrow at its value, ticks where each seed got there."""
    saving = comparison.headline
    if saving is None or saving.target is None:
        return
    begin, end, y = saving.averaged_at, saving.baseline_at, saving.target
    assert begin is not None  # a headline is reached by both, in every seed
    assert end is not None
    axes.annotate(
        "",
        xy=(begin, y),
        xytext=(end, y),
        arrowprops={
            "arrowstyle": "-|>",
            "color": _INK,
            "linewidth": 1.6,
            "shrinkA": 0,
            "shrinkB": 5,
        },
        zorder=5,
    )
    for reach in saving.reaches:
        for at, colour in ((reach.baseline_at, _RAW), (reach.averaged_at, _AVERAGED)):
            axes.plot(at or 0.0, y, "|", color=colour, markersize=13, markeredgewidth=2.2, zorder=6)
    # Curves improve from one corner to the other, so the corner of late and bad values is free.
    lower = comparison.metric.better == "lower"
    spread = "" if len(saving.reaches) == 1 else f", {_range(saving)} by seed"
    axes.text(
        0.97,
        0.62 if lower else 0.42,
        f"{saving.saved:.0f} epochs earlier\n({saving.percent:.0f}%{spread})",
        transform=axes.transAxes,
        ha="right",
        va="center",
        fontsize=11.5,
        color=_INK,
    )


def _range(saving: Saving) -> str:
    low, high = saving.spread or (0.0, 0.0)
    return f"{low:.0f} to {high:.0f}"


def _band(curves: list[Curve]) -> tuple[list[float], list[float], list[float], list[float]]:
    """Mean, lowest and highest value at each place that some seed has a value for."""
    found: dict[float, list[float]] = {}
    for curve in curves:
        for at, value in zip(curve.at, curve.values, strict=True):
            if value is not None:
                found.setdefault(at, []).append(value)
    places = sorted(found)
    mean = [sum(found[at]) / len(found[at]) for at in places]
    return places, mean, [min(found[at]) for at in places], [max(found[at]) for at in places]


def _matplotlib(name: str) -> Any:
    try:
        return importlib.import_module(f"matplotlib.{name}")
    except ImportError as error:
        raise LawaError(
            f"figures are drawn with matplotlib, which could not be imported ({error}): "
            "pip install 'torch-lawa[report]'"
        ) from None
