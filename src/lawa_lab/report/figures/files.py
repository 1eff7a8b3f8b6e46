"""Figures as panels under one legend, and their files.

They are drawn without pyplot, so nothing global changes and no display is needed. The same figure
always gives the same bytes.
"""

import importlib
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from lawa_lab.report.figures.axes import Panel, fill, matplotlib
from lawa_lab.report.figures.registry import FIGURES, FigureKind
from lawa_lab.report.figures.scene import Scene
from lawa_lab.report.figures.style import INK, Style
from lawa_lab.report.runs import Run
from lawa_lab.report.summary import Report
from torch_lawa.checkpoints.storage.atomic import recover_all, replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "Drawing",
    "draw",
    "draw_panel",
    "drawings",
    "legend",
    "save",
    "save_figures",
    "svg_text",
]

_Format: TypeAlias = Literal["png", "svg"]
_FORMATS: tuple[_Format, ...] = ("png", "svg")
_WIDTH, _HEIGHT = 9.0, 3.4  # inches of a row of two panels; 11 points are 12 pixels at 700 wide
_WORDS = {"frameon": False, "fontsize": 11.5, "labelcolor": INK, "handlelength": 2.6}


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """A figure: panels side by side, two in a row, under one legend."""

    name: str  # of its file
    kind: FigureKind
    run: str | None  # None: of all runs
    title: str  # above the legend: what was trained
    panels: tuple[Panel, ...]
    sentence: str = ""


def drawings(scene: Scene) -> list[Drawing]:
    """The figures of one recipe; those of the second run and later ones carry the run's name."""
    found = []
    for kind in FIGURES.values():
        for index, run in enumerate(scene.runs[: 1 if kind.all_runs else None]):
            panels = tuple(kind.panels(scene, run))
            if not panels:
                continue
            recipe = scene.report.recipe
            found.append(
                Drawing(
                    name=_file_name(kind.name, scene.runs, index),
                    kind=kind,
                    run=None if kind.all_runs else run.name,
                    title=recipe if kind.all_runs else f"{recipe}, {run.name}",
                    panels=panels,
                    sentence=kind.sentence(scene, run) if kind.sentence is not None else "",
                )
            )
    return found


def save_figures(
    runs: Sequence[Run],
    report: Report,
    folder: Path,
    announce: Callable[[list[Path]], None] = lambda paths: None,
) -> list[Path]:
    """Write every figure as PNG and SVG; with several recipes, in one folder per recipe.

    `announce` is called with the files before the first of them is written.
    """
    drawn: dict[Path, list[Drawing]] = {}
    for recipe in report.recipes:
        own = folder / slug(recipe.recipe) if len(report.recipes) > 1 else folder
        drawn.setdefault(own, []).extend(drawings(Scene(recipe, runs)))
    paths = [path for own, found in drawn.items() for each in found for path in _paths(each, own)]
    announce(paths)
    for own, found in drawn.items():
        recover_all(own)
        for drawing in found:
            save(drawing, own)
    return paths


def _file_name(kind: str, runs: Sequence[Run], index: int) -> str:
    if not index:
        return kind
    name = slug(runs[index].name)
    alike = any(slug(other.name) == name for other in runs[:index])
    return f"{kind}-{name}-{index + 1}" if alike else f"{kind}-{name}"


def slug(name: str) -> str:
    """A name that any file system accepts.

    >>> slug("lookahead(sgd)"), slug("adam, constant rate"), slug("../<b>")
    ('lookahead-sgd', 'adam-constant-rate', 'b')
    """
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "run"


def _height(panel: Panel) -> float:
    """In inches; a panel with named rows needs room for each name."""
    return 1.1 + 0.22 * len(panel.y_labels) if panel.y_labels else _HEIGHT


def draw(drawing: Drawing) -> "Figure":
    """All panels of a figure, with its legend."""
    num_columns = min(len(drawing.panels), 2)
    num_rows = -(-len(drawing.panels) // 2)
    wide = _WIDTH if num_columns == 2 else 0.6 * _WIDTH
    names = list(legend(drawing.panels))
    num_fitting = _fitting(names, wide)
    beside = num_columns * num_rows > len(drawing.panels)  # the legend goes into the free cell
    above = 0.0 if beside else 0.25 * (bool(drawing.title) - (-len(names) // num_fitting))
    figure: Figure = matplotlib("figure").Figure(
        figsize=(wide, max(map(_height, drawing.panels)) * num_rows + above), layout="constrained"
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
    """The labels in the legend of some panels, and their styles; None for a point."""
    found: dict[str, Style | None] = {}
    for panel in panels:
        found |= {line.name: line.style for line in panel.lines if line.name}
        found |= {point.label: None for point in panel.points}
    return found


def _fitting(names: Sequence[str], wide: float) -> int:
    """How many columns of a legend fit; each is as wide as its longest label."""
    for num_columns in range(len(names), 1, -1):
        num_rows = -(-len(names) // num_columns)
        columns = [names[at : at + num_rows] for at in range(0, len(names), num_rows)]
        # 0.093 inch per letter, plus a sample of the line and the gap to the next column.
        if sum(0.093 * max(map(len, column)) + 0.85 for column in columns) < wide:
            return len(columns)
    return 1


def draw_panel(panel: Panel) -> "Figure":
    """One panel without a legend, so that panels can stack on a narrow page."""
    figure: Figure = matplotlib("figure").Figure(
        figsize=(4.7, _height(panel)), layout="constrained"
    )
    fill(figure.subplots(), panel)
    return figure


def _paths(drawing: Drawing, folder: Path, formats: Sequence[_Format] = _FORMATS) -> list[Path]:
    return [folder / f"{drawing.name}.{kind}" for kind in formats]


def save(drawing: Drawing, folder: Path, formats: Sequence[_Format] = _FORMATS) -> list[Path]:
    """Write a figure to one file per format."""
    folder.mkdir(parents=True, exist_ok=True)
    figure = draw(drawing)
    paths = _paths(drawing, folder, formats)
    for kind, path in zip(formats, paths, strict=True):
        with replacing(path) as file:
            if kind == "png":
                figure.savefig(file, format="png", dpi=200, metadata={"Software": None})
            else:
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
