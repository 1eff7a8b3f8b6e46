"""Figures of a report: which there are (`builders`), how they look, and their files."""

from lawa_lab.report.figures.builders import FIGURES, FigureKind, register_figure
from lawa_lab.report.figures.files import Drawing, drawings, save, save_figures
from lawa_lab.report.figures.frontier import frontier_panels

__all__ = [
    "FIGURES",
    "Drawing",
    "FigureKind",
    "drawings",
    "frontier_panels",
    "register_figure",
    "save",
    "save_figures",
]
