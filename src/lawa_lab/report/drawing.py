"""Panels under one legend: figures, and their files.

Drawn without pyplot, so nothing global changes and no display is needed. The same figure always
gives the same bytes.
"""

import importlib
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lawa_lab.report.panels import Panel, fill, matplotlib
from lawa_lab.report.styles import INK, Style
from torch_lawa.checkpoints.storage.atomic import replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Drawing", "draw", "draw_panel", "legend", "save", "svg_text"]

_WIDTH, _HEIGHT = 9.0, 3.4  # inches of a row of two panels; 11 points are 12 pixels at 700 wide
_WORDS = {"frameon": False, "fontsize": 11.5, "labelcolor": INK, "handlelength": 2.6}


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """A figure: panels side by side, two in a row, under one legend."""

    name: str  # of its file
    kind: str
    run: str | None  # None: of all runs
    title: str  # above the legend: what was trained
    panels: tuple[Panel, ...]


def draw(drawing: Drawing) -> "Figure":
    """All panels of a figure, with its legend."""
    num_columns = min(len(drawing.panels), 2)
    num_rows = -(-len(drawing.panels) // 2)
    wide = _WIDTH if num_columns == 2 else 0.6 * _WIDTH
    names = list(legend(drawing.panels))
    num_fitting = _fitting(names, wide)
    beside = num_columns * num_rows > len(drawing.panels)  # a free place takes the legend
    above = 0.0 if beside else 0.25 * (bool(drawing.title) - (-len(names) // num_fitting))
    figure: Figure = matplotlib("figure").Figure(
        figsize=(wide, _HEIGHT * num_rows + above), layout="constrained"
    )
    grid = figure.subplots(num_rows, num_columns, squeeze=False).ravel().tolist()
    handles: dict[str, Any] = {}
    for axes, panel in zip(grid, drawing.panels, strict=False):
        fill(axes, panel)
        found, labels = axes.get_legend_handles_labels()
        handles |= dict(zip(labels, found, strict=True))
    if beside:
        grid[-1].set_axis_off()
        box = grid[-1].legend([handles[name] for name in names], names, loc="center", **_WORDS)
    else:
        box = figure.legend(
            [handles[name] for name in names],
            names,
            loc="outside upper center",
            ncols=num_fitting,
            **_WORDS,
        )
    if drawing.title:
        box.set_title(drawing.title, prop={"size": 11.5})
        box.get_title().set_color(INK)
    for text in (box.get_title(), *box.get_texts()):
        text.set_parse_math(False)  # a name from a file may hold a dollar sign
    return figure


def legend(panels: Sequence[Panel]) -> dict[str, Style | None]:
    """What the legend of some panels says, and how each line looks; None for a point."""
    found: dict[str, Style | None] = {}
    for panel in panels:
        found |= {line.name: line.style for line in panel.lines if line.name}
        found |= {point.label: None for point in panel.points}
    return found


def _fitting(names: Sequence[str], wide: float) -> int:
    """So many columns of a legend fit; each is as wide as its longest label."""
    for num_columns in range(len(names), 1, -1):
        num_rows = -(-len(names) // num_columns)
        columns = [names[at : at + num_rows] for at in range(0, len(names), num_rows)]
        # Letters of 0.093 inch, beside a piece of line and the room to the next column.
        if sum(0.093 * max(map(len, column)) + 0.85 for column in columns) < wide:
            return len(columns)
    return 1


def draw_panel(panel: Panel) -> "Figure":
    """One panel alone, without a legend, for a narrow page."""
    figure: Figure = matplotlib("figure").Figure(figsize=(4.7, 3.4), layout="constrained")
    fill(figure.subplots(), panel)
    return figure


def save(drawing: Drawing, folder: Path) -> list[Path]:
    """Write a figure as PNG and as SVG."""
    folder.mkdir(parents=True, exist_ok=True)
    figure = draw(drawing)
    paths = [folder / f"{drawing.name}.png", folder / f"{drawing.name}.svg"]
    with replacing(paths[0]) as file:
        figure.savefig(file, format="png", dpi=200, metadata={"Software": None})
    with replacing(paths[1]) as file:
        file.write(svg_text(figure).encode())
    return paths


def svg_text(figure: "Figure") -> str:
    """A figure as SVG: text as text, no date, the same bytes each time."""
    buffer = io.BytesIO()
    with importlib.import_module("matplotlib").rc_context(
        {"svg.hashsalt": "torch-lawa", "svg.fonttype": "none"}
    ):
        none = {"Date": None, "Creator": None, "Format": None, "Type": None}
        figure.savefig(buffer, format="svg", metadata=none)
    # A hundredth of a point is finer than any screen, and half the size of the file.
    return re.sub(
        r'(?<= d=")[^"]+',
        lambda path: re.sub(r"-?\d+\.\d{3,}", lambda x: f"{float(x[0]):.2f}", path[0]),
        buffer.getvalue().decode(),
    )
