"""Rows of metrics, sorted into runs and series. Pure Python.

A *run* is one recipe with one optimizer, over all its seeds, from any number of files. A *series*
is what was evaluated in it: raw weights, or the average of one window with one kind of coefficients,
by how BatchNorm statistics were made.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch_lawa.core.records import Row, read_metrics
from torch_lawa.errors import FormatError
from torch_lawa.reporting.savings import Metric

__all__ = ["Run", "Series", "load_runs", "metrics_of"]


@dataclass(frozen=True)
class Series:
    """What was evaluated: raw weights or one average, and how its BatchNorm was treated."""

    k: int | None = None  # None: raw weights
    coefficients: str | None = None  # None: raw weights
    batch_norm: str | None = None  # None: statistics as they came, or no BatchNorm in the model

    @property
    def averaged(self) -> bool:
        """Whether it is an average."""
        return self.k is not None

    @property
    def label(self) -> str:
        """A name for legends and tables.

        >>> Series(10, "uniform", "copied").label, Series().label
        ('k = 10, BatchNorm copied', 'raw')
        """
        parts = ["raw"] if self.k is None else [f"k = {self.k}"]
        if self.coefficients not in (None, "uniform"):
            parts.append(str(self.coefficients))
        if self.batch_norm is not None:
            parts.append(f"BatchNorm {self.batch_norm}")
        return ", ".join(parts)

    @classmethod
    def of(cls, row: Row) -> "Series":
        """The series that a row belongs to."""
        if row.get("weights") != "averaged":
            return cls(None, None, row.get("batch_norm"))
        return cls(row.get("k"), row.get("coefficients") or "uniform", row.get("batch_norm"))


@dataclass(frozen=True)
class Run:
    """All rows of one recipe and optimizer."""

    recipe: str
    name: str  # such as "sgd" or "lookahead(sgd)"
    rows: tuple[Row, ...]

    @cached_property
    def series(self) -> tuple[Series, ...]:
        """What was evaluated, in the order of its first row."""
        return tuple(dict.fromkeys(Series.of(row) for row in self.rows))

    @cached_property
    def seeds(self) -> tuple[Any, ...]:
        """The seeds, in order."""
        return tuple(sorted({row.get("seed") for row in self.rows}, key=str))

    def rows_of(self, series: Series) -> list[Row]:
        """The rows of one series, all seeds."""
        return [row for row in self.rows if Series.of(row) == series]


def load_runs(paths: Sequence[Path]) -> list[Run]:
    """Runs of all the files; a folder stands for the `metrics.jsonl` files in and below it."""
    rows: list[Row] = []
    for path in paths:
        files = sorted(path.rglob("metrics.jsonl")) if path.is_dir() else [path]
        if not files:
            raise FormatError(f"{path}: there is no metrics.jsonl in this folder or below it.")
        for file in files:
            found = [row for row in read_metrics(file) if "weights" in row]
            if not found:
                raise FormatError(f"{file}: no row of raw or averaged weights in it.")
            rows += found
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        key = (str(row.get("recipe", "run")), str(row.get("run", "raw")))
        groups.setdefault(key, []).append(row)
    return [Run(recipe, name, tuple(own)) for (recipe, name), own in groups.items()]


def metrics_of(rows: Iterable[Row]) -> list[Metric]:
    """The values in the rows that can be compared: held-out losses, then accuracies.

    >>> [m.name for m in metrics_of([{"test_accuracy": 0.5, "test_loss": 1.0, "train_loss": 1.0}])]
    ['test_loss', 'test_accuracy']
    """
    names = dict.fromkeys(name for row in rows for name in row)
    held_out = [name for name in names if not name.startswith("train_")]
    losses = [Metric(name, "lower") for name in held_out if name.endswith("_loss")]
    return losses + [Metric(name, "higher") for name in held_out if name.endswith("_accuracy")]
