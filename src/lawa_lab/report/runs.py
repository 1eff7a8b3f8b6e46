"""Rows of metrics, sorted into runs and series. Pure Python.

A *run* is one recipe with one optimizer, over all its seeds, from any number of files. A *series*
is what was evaluated in it: raw weights, or the average of one window with one kind of
coefficients, by how BatchNorm statistics were made.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from lawa_lab.report.curves import (
    BETTER,
    Axis,
    Curve,
    Metric,
    curve_of,
    in_order,
    moment_of,
    shared_looks,
)
from lawa_lab.report.reading import read_rows
from torch_lawa.metrics import Row

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
        return self.coefficients is not None

    @property
    def label(self) -> str:
        """A name for legends and tables.

        >>> Series(10, "uniform", "copied").label, Series().label
        ('k = 10, BatchNorm copied', 'raw')
        """
        parts = ["averaged" if self.averaged else "raw"] if self.k is None else [f"k = {self.k}"]
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
        """What was evaluated, in the order of the rows of the fullest moment.

        Not in the order of first rows: a short window has rows before a long one has any.
        """
        moments: dict[tuple[Any, float], dict[Series, None]] = {}
        for row in self.rows:
            moments.setdefault((row.get("seed"), moment_of(row)), {})[Series.of(row)] = None
        fullest = sorted(moments.values(), key=len, reverse=True)
        return tuple(dict.fromkeys(series for moment in fullest for series in moment))

    @cached_property
    def seeds(self) -> tuple[Any, ...]:
        """The seeds, in order."""
        return tuple(sorted({row.get("seed") for row in self.rows}, key=_rank))

    def axes(self, series: Series) -> tuple[Axis, ...]:
        """What a series can be counted by; rows of `lawa sweep`, for one, know of no seconds.

        Seconds must not run backwards. GPU-hours need rows that name a GPU or say how many there
        were, and the same number all along.
        """
        return self._axes[series]

    @cached_property
    def num_devices(self) -> dict[Any, int | None]:
        """By seed, on how many GPUs it was trained; None on a CPU, or where rows do not agree."""
        found: dict[Any, set[int | None]] = {seed: set() for seed in self.seeds}
        for row in self.rows:
            if {"device", "num_devices"} & row.keys():
                number = None if row.get("device") == "cpu" else row.get("num_devices") or 1
                found[row.get("seed")].add(number)
        return {seed: n.pop() if len(n) == 1 else None for seed, n in found.items()}

    def rows_of(self, series: Series, seed: Any = ...) -> list[Row]:
        """The rows of one series in order, of one seed or of all, each moment once."""
        seeds = self.seeds if seed is ... else (seed,)
        return [row for each in seeds for row in self._sorted.get((series, each), ())]

    def moments(self, series: Series, metric: Metric) -> dict[Any, list[float]]:
        """By seed, when the series was evaluated for a metric, in order."""
        found = {
            seed: [moment_of(row) for row in self.rows_of(series, seed) if metric.name in row]
            for seed in self.seeds
        }
        return {seed: moments for seed, moments in found.items() if moments}

    def curves(
        self,
        series: Series,
        metric: Metric,
        axis: Axis = "epoch",
        *,
        at: Mapping[Any, Collection[float]] | None = None,
    ) -> dict[Any, Curve]:
        """By seed, one metric of one series; seeds without a value in it are left out.

        With `at`, only what was evaluated at those moments counts, for seeds that it names: as if
        nobody had looked, or paid, at any other.
        """
        curves = {}
        for seed in self.moments(series, metric):
            own, usual = self.rows_of(series, seed), self.rows_of(Series(), seed)
            if at is not None and seed in at:
                kept = shared_looks([moment_of(row) for row in usual], sorted(at[seed]))
                own = [row for row in own if moment_of(row) in at[seed]]
                usual = [row for row in usual if moment_of(row) in kept]
            curves[seed] = curve_of(own, usual, metric, axis)
        return curves

    def has(self, series: Series, metric: Metric) -> bool:
        """Whether some row of the series holds the metric."""
        return any(metric.name in row for row in self.rows_of(series))

    @cached_property
    def _axes(self) -> dict[Series, tuple[Axis, ...]]:
        axes = {}
        for series in self.series:
            known: list[Axis] = [
                axis
                for axis in ("epoch", "step")
                if all(row.get(axis) is not None for row in self.rows_of(series))
            ]
            if all(_timed(self.rows_of(series, seed)) for seed in self.seeds):
                known.append("seconds")
                if all(self.num_devices.values()):
                    known.append("gpu_hours")
            axes[series] = tuple(known)
        return axes

    @cached_property
    def _sorted(self) -> dict[tuple[Series, Any], list[Row]]:
        groups: dict[tuple[Series, Any], list[Row]] = {}
        for row in self.rows:
            groups.setdefault((Series.of(row), row.get("seed")), []).append(row)
        return {key: in_order(rows) for key, rows in groups.items()}


def load_runs(paths: Sequence[Path]) -> list[Run]:
    """Runs of all the files; a folder stands for the `metrics.jsonl` files in and below it.

    A plain optimizer comes before one that wraps it, such as lookahead(sgd): it is what others are
    measured by, and the order of files says nothing.
    """
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in read_rows(paths):
        key = (str(row.get("recipe") or "run"), str(row.get("run") or "raw"))
        groups.setdefault(key, []).append(row)
    found = [Run(recipe, name, tuple(own)) for (recipe, name), own in groups.items()]
    return sorted(found, key=lambda run: "(" in run.name)


def metrics_of(rows: Iterable[Row]) -> list[Metric]:
    """The values in the rows that can be compared: held-out losses, then accuracies.

    The last word of a name tells which way is better: loss, perplexity, error; accuracy.

    >>> [m.name for m in metrics_of([{"test_accuracy": 0.5, "test_loss": 1.0, "train_loss": 1.0}])]
    ['test_loss', 'test_accuracy']
    """
    names = dict.fromkeys(name for row in rows for name in row if not name.startswith("train_"))
    found = [Metric(n, BETTER[word]) for n in names if (word := n.split("_")[-1]) in BETTER]
    return sorted(found, key=lambda metric: metric.better == "higher")


def _timed(rows: Sequence[Row]) -> bool:
    clock = [row.get("train_seconds") for row in rows]
    return None not in clock and clock == sorted(clock)  # type: ignore[type-var]


def _rank(seed: Any) -> tuple[bool, float, str]:
    number = isinstance(seed, int | float)
    return (not number, seed if number else 0.0, str(seed))
