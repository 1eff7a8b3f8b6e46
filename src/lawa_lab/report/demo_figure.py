"""The figure of `lawa demo`: what averaging saved, loss and accuracy side by side."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lawa_lab.report.drawing import Drawing, draw
from lawa_lab.report.panels import Line, Mark, Panel
from lawa_lab.report.savings import Comparison, Curve, Metric, compare
from lawa_lab.report.styles import AVERAGED, RAW, USUAL, Style
from lawa_lab.report.views import band
from torch_lawa.checkpoints.storage.atomic import replacing
from torch_lawa.metrics import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["demo_figure", "save_demo_figure"]


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
    panels = tuple(
        _panel(compare(rows, metric), compare(rows, metric, baseline="usual"), title)
        for metric, title in (
            (Metric("test_loss", "lower"), "test loss"),
            (Metric("test_accuracy", "higher"), "test accuracy"),
        )
    )
    return draw(Drawing(name="savings", kind="demo", run=None, title="", panels=panels))


def _panel(alike: Comparison, usual: Comparison, title: str) -> Panel:
    lines = [
        _line(alike.baseline, "raw weights", Style(colour=RAW, width=2.0)),
        _line(alike.averaged, "averaged weights", Style(colour=AVERAGED, width=2.0)),
    ]
    if usual.baseline != alike.baseline:
        thin = Style(colour=USUAL, width=1.1, layer=1.0)
        label = "raw weights, BatchNorm not re-estimated"
        lines.append(_line(usual.baseline, label, thin, ranged=False))
    num_seeds = len(alike.averaged)
    several = f" (mean and range of {num_seeds} seeds)" if num_seeds > 1 else ""
    lower = alike.metric.better == "lower"
    return Panel(
        title=title,
        x_label=f"epoch{several}",
        lines=tuple(lines),
        percent=not lower,
        log=lower,
        x_limits=(0.0, 1.05 * max(lines[0].at, default=1.0)),
        y_limits=None if lower else _room(alike),
        mark=_mark(alike),
        # Curves improve from one corner to the other: the corner of late and bad values is free.
        text_at=(0.97, 0.7) if lower else (0.97, 0.34),
    )


def _line(curves: dict[object, Curve], label: str, style: Style, *, ranged: bool = True) -> Line:
    at, mean, low, high = band(
        point for curve in curves.values() for point in zip(curve.at, curve.values, strict=True)
    )
    if not ranged:
        return Line(label=label, style=style, at=at, mean=mean)
    return Line(label=label, style=style, at=at, mean=mean, low=low, high=high)


def _room(comparison: Comparison) -> tuple[float, float] | None:
    """Accuracy from where the averaged weights begin, with some room below and above."""
    values = [v for c in comparison.averaged.values() for v in c.values if v is not None]
    if not values:
        return None
    room = max(max(values) - min(values), 0.01)
    return max(min(values) - room, 0.0), min(max(values) + 0.25 * room, 1.0)


def _mark(comparison: Comparison) -> Mark | None:
    saving = comparison.headline
    if saving is None or saving.target is None:
        return None
    assert saving.averaged_at is not None  # a headline is reached by both, in every seed
    assert saving.baseline_at is not None
    low, high = saving.spread or (0.0, 0.0)
    spread = "" if len(saving.reaches) == 1 else f", {low:.0f} to {high:.0f} by seed"
    return Mark(
        begin=saving.baseline_at,
        end=saving.averaged_at,
        value=saving.target,
        ticks=tuple(
            (at or 0.0, colour)
            for reach in saving.reaches
            for at, colour in ((reach.baseline_at, RAW), (reach.averaged_at, AVERAGED))
        ),
        text=f"{saving.saved:.0f} epochs earlier\n({saving.percent:.0f}%{spread})",
    )
