"""Figures of a report: which there are (`builders`), how they look, and their files."""

from lawa_lab.report.figures.builders import FIGURES, FigureKind, figure
from lawa_lab.report.figures.files import Drawing, drawings, save, save_figures

__all__ = ["FIGURES", "Drawing", "FigureKind", "drawings", "figure", "save", "save_figures"]
