"""Figures of a report: which there are (`builders`, `frontier`), how they look, and their files."""

from lawa_lab.report.figures import builders, frontier  # they fill the table
from lawa_lab.report.figures.files import Drawing, drawings, save, save_figures
from lawa_lab.report.figures.registry import FIGURES, FigureKind, register_figure

__all__ = [
    "FIGURES",
    "Drawing",
    "FigureKind",
    "builders",
    "drawings",
    "frontier",
    "register_figure",
    "save",
    "save_figures",
]
