"""From runs to a report: which series are held against which, and what came out."""

from collections.abc import Sequence

from torch_lawa.reporting.runs import Run
from torch_lawa.reporting.summary import Report

__all__ = ["summarise"]


def summarise(runs: Sequence[Run], *, metric: str | None = None, k: int | None = None) -> Report:
    """The report on all runs; `metric` and `k` narrow it to one value and one window."""
    raise NotImplementedError
