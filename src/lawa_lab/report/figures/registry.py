"""The table of figures: one entry per figure, with its heading, its caption and what it draws.

A function decorated with `register_figure` is all that a new figure needs. The files, the page, the
list in `lawa report --help` and the order on the page follow from the table.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from lawa_lab.report.figures.axes import Panel
from lawa_lab.report.figures.scene import Scene
from lawa_lab.report.runs import Run
from torch_lawa.errors import ConfigError

__all__ = ["FIGURES", "FigureKind", "Say", "register_figure"]

Build: TypeAlias = Callable[[Scene, Run], Sequence[Panel]]
Say: TypeAlias = Callable[[Scene, Run], str]


@dataclass(frozen=True, kw_only=True)
class FigureKind:
    """One kind of figure. It applies to a run if `panels` returns any."""

    name: str  # of its files
    heading: str  # of its section on the page
    caption: str
    panels: Build
    sentence: Say | None = None  # what the figure shows, in numbers
    all_runs: bool = False  # one figure for all runs of a recipe; `panels` gets the first run


FIGURES: dict[str, FigureKind] = {}  # in the order of the page


def register_figure(
    name: str,
    heading: str,
    caption: str,
    *,
    sentence: Say | None = None,
    all_runs: bool = False,
    first: bool = False,
) -> Callable[[Build], Build]:
    """Add a figure to the table; used as a decorator of the function that builds its panels.

    It comes last, or `first` on the page.
    """
    if name in FIGURES:
        raise ConfigError(f"a figure named {name!r} is registered already: choose another name.")

    def add(panels: Build) -> Build:
        FIGURES[name] = FigureKind(
            name=name,
            heading=heading,
            caption=caption,
            panels=panels,
            sentence=sentence,
            all_runs=all_runs,
        )
        if first:
            others = [other for other in FIGURES if other != name]
            for other in others:  # to the end, in their order
                FIGURES[other] = FIGURES.pop(other)
        return panels

    return add
