"""Rows of metrics, grouped into runs and series. Pure Python.

A *run* is one recipe with one optimizer, schedule, length and peak rate, with all its seeds, from
any number of files. A *series* is what was evaluated in it: the raw weights, or one average
(method, window, coefficients), each with one treatment of the BatchNorm statistics.
"""

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
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
    shared_evaluations,
)
from lawa_lab.report.rows import read_rows
from torch_lawa.metrics import Row

__all__ = ["Run", "Series", "load_runs", "main_averages", "metrics_of", "treatment_rank"]


@dataclass(frozen=True)
class Series:
    """What was evaluated: raw weights or one average, and how its BatchNorm was treated."""

    weights: str = "raw"  # or "averaged" (the latest k snapshots), or another method, such as "ema"
    k: int | None = None
    coefficients: str | None = None
    batch_norm: str | None = None  # None: running statistics, or a model without BatchNorm

    @property
    def averaged(self) -> bool:
        """Whether it is an average, of whichever method."""
        return self.weights != "raw"

    @property
    def label(self) -> str:
        """A name for tables.

        >>> Series("averaged", 10, "uniform", "copied").label, Series().label, Series("ema").label
        ('k = 10, BatchNorm copied', 'raw', 'ema')
        """
        window = self.weights == "averaged" and self.k is not None
        parts = [] if window else [self.weights]
        if self.k is not None:
            parts.append(f"k = {self.k}")
        if self.coefficients not in (None, "uniform"):
            parts.append(str(self.coefficients))
        if self.batch_norm is not None:
            parts.append(f"BatchNorm {self.batch_norm}")
        return ", ".join(parts)

    @classmethod
    def of(cls, row: Row) -> "Series":
        """The series that a row belongs to."""
        weights = row.get("weights") or "raw"
        if weights == "raw":  # rows of `lawa sweep` name coefficients here too
            return cls(batch_norm=row.get("batch_norm"))
        coefficients = row.get("coefficients") or None
        if weights == "averaged":
            coefficients = coefficients or "uniform"
        if row.get("horizon") is not None:  # of `lawa sweep --horizon`: k differs from row to row
            rule = "" if coefficients == "uniform" else f", {coefficients}"
            return cls("averaged", None, f"horizon {row['horizon']:g}{rule}", row.get("batch_norm"))
        return cls(weights, row.get("k"), coefficients, row.get("batch_norm"))


@dataclass(frozen=True)
class Run:
    """All rows of one recipe and optimizer; and of one length and rate, if there are several."""

    recipe: str
    name: str  # such as "sgd" or "lookahead(sgd)", or "sgd, 50 epochs" beside other lengths
    rows: tuple[Row, ...]
    shared: tuple[Row, ...] = ()  # of the constant-rate run that a landing branched off

    @property
    def annealed(self) -> bool:
        """Whether its learning rate falls to zero, so that its length was chosen in advance."""
        return self._schedule not in (None, "constant") or self.land > 0

    @property
    def anytime(self) -> bool:
        """Whether its rate is constant to the end, so that it can be stopped at any time."""
        return self._schedule == "constant" and not self.land

    @property
    def land(self) -> float:
        """The share of the run in which a constant rate falls to zero, at its end."""
        return float(self._first.get("land") or 0.0)

    @property
    def budget_epochs(self) -> float | None:
        """The length that was planned."""
        return self._first.get("budget_epochs")

    @property
    def peak(self) -> float | None:
        """The highest learning rate."""
        return self._first.get("peak_learning_rate")

    @property
    def kind(self) -> str:
        """What runs that differ only in length and peak rate have in common."""
        return str(self._first.get("run") or self.name)

    @property
    def _schedule(self) -> str | None:
        return self._first.get("schedule")

    @property
    def _first(self) -> Row:
        return self.rows[0] if self.rows else {}

    @cached_property
    def series(self) -> tuple[Series, ...]:
        """What was evaluated, in the order of the rows of the moment that has most of them.

        Not in the order of first rows: a short window is full before a long one.
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
        """The axes that a series has values for; rows of `lawa sweep`, for example, have no time.

        Seconds must not decrease. GPU-hours need rows with a GPU as `device` or with `num_devices`,
        and the same number of GPUs throughout.
        """
        return self._axes[series]

    @cached_property
    def num_devices(self) -> dict[Any, int | None]:
        """By seed, the number of GPUs; None on a CPU, or if rows disagree."""
        found: dict[Any, set[int | None]] = {seed: set() for seed in self.seeds}
        for row in self.rows:
            if {"device", "num_devices"} & row.keys():
                number = None if row.get("device") == "cpu" else row.get("num_devices") or 1
                found[row.get("seed")].add(number)
        return {seed: n.pop() if len(n) == 1 else None for seed, n in found.items()}

    def rows_of(self, series: Series, seed: Any = ...) -> list[Row]:
        """The rows of one series in order, of one seed or of all, one per moment."""
        seeds = self.seeds if seed is ... else (seed,)
        return [row for each in seeds for row in self._sorted.get((series, each), ())]

    def moments(self, series: Series, metric: Metric) -> dict[Any, list[float]]:
        """By seed, the moments at which the series was evaluated for a metric, in order."""
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
        """By seed, one metric of one series; seeds without a value are left out.

        With `at`, only evaluations at those moments count, and only they are charged.
        """
        curves = {}
        for seed in self.moments(series, metric):
            own, usual = self.rows_of(series, seed), self.rows_of(Series(), seed)
            if at is not None and seed in at:
                kept = shared_evaluations([moment_of(row) for row in usual], sorted(at[seed]))
                own = [row for row in own if moment_of(row) in at[seed]]
                usual = [row for row in usual if moment_of(row) in kept]
            earlier, usually = (self._shared.get((s, seed), []) for s in (series, Series()))
            curves[seed] = curve_of(own, [*usually, *usual], metric, axis, earlier=earlier)
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
        return _by_series(self.rows)

    @cached_property
    def _shared(self) -> dict[tuple[Series, Any], list[Row]]:
        return _by_series(self.shared)


def _by_series(rows: Iterable[Row]) -> dict[tuple[Series, Any], list[Row]]:
    """By series and seed, the rows in order, one per moment."""
    groups: dict[tuple[Series, Any], list[Row]] = {}
    for row in rows:
        groups.setdefault((Series.of(row), row.get("seed")), []).append(row)
    return {key: in_order(own) for key, own in groups.items()}


def load_runs(paths: Sequence[Path]) -> list[Run]:
    """The runs in all files (see `find_files` for folders).

    A plain optimizer comes before one that wraps it, such as lookahead(sgd), because it is the
    reference; then annealed runs follow runs at a constant rate, by their length. Apart from that,
    the order is that of the files.
    """
    groups: dict[tuple[str, str, float | None, float | None], list[Row]] = {}
    for row in read_rows(paths):
        recipe, name = str(row.get("recipe") or "run"), str(row.get("run") or "raw")
        key = (recipe, name, row.get("budget_epochs"), row.get("peak_learning_rate"))
        groups.setdefault(key, []).append(row)
    found = []
    for (recipe, name, budget, peak), own in groups.items():
        lengths = {key[2] for key in groups if key[:2] == (recipe, name)}
        peaks = {key[3] for key in groups if key[:3] == (recipe, name, budget)}
        full = name
        if len(lengths) > 1 and budget is not None:
            full += f", {budget:.4g} epoch{'s' * (budget != 1)}"
        if len(peaks) > 1 and peak is not None:
            full += f", rate {peak:g}"
        found.append(Run(recipe, full, tuple(own)))
    found = [replace(run, shared=_shared_by(run, found)) if run.land else run for run in found]
    return sorted(found, key=lambda run: ("(" in run.name, run.annealed, _length(run)))


def _shared_by(run: Run, runs: Sequence[Run]) -> tuple[Row, ...]:
    """Rows of the constant-rate run that a landing branches off, up to the branch.

    `lawa train --budgets` trains and evaluates this part once. A landing that was trained alone has
    rows of its own from before the decay.
    """
    kind = run.kind.partition(", landing ")[0]  # not a prefix: "adam" is one of "adamw"
    same = [r for r in runs if (r.recipe, r.kind, r.peak) == (run.recipe, kind, run.peak)]
    found: list[Row] = []
    for seed in run.seeds:
        first = min((row for row in run.rows if row.get("seed") == seed), key=moment_of)
        branch = (1.0 - run.land) * (run.budget_epochs or math.inf) * (1.0 + 1e-9)
        if (first.get("epoch") or 0.0) > branch:
            trunks = (
                [r for r in each.rows if r.get("seed") == seed and _is_timed_until(r, branch)]
                for each in same
                if each.anytime
            )
            found += next(filter(None, trunks), [])
    return tuple(found)


def _is_timed_until(row: Row, epoch: float) -> bool:
    known = row.get("train_seconds") is not None and row.get("epoch") is not None
    return known and row["epoch"] <= epoch


def main_averages(run: Run, metric: Metric, k: int | None) -> list[Series]:
    """The average that represents each method: its first window, or that of `k`.

    The window of latest weights comes first, then other methods. Within a method, uniform
    coefficients are preferred, and re-estimated BatchNorm statistics (or a model without any) to
    copied ones.
    """
    averages = [s for s in run.series if s.averaged and run.has(s, metric)]
    methods = dict.fromkeys(s.weights for s in averages)
    found = []
    for method in sorted(methods, key=lambda name: name != "averaged"):
        own = [s for s in averages if s.weights == method]
        window = k if k is not None and method == "averaged" else own[0].k
        own = [s for s in own if s.k == window]
        found += sorted(own, key=lambda s: (s.coefficients != "uniform", treatment_rank(s)))[:1]
    return found


def treatment_rank(series: Series) -> int:
    """Order of preference: BatchNorm statistics re-estimated, running (or none), copied."""
    return {"re-estimated": 0, None: 1}.get(series.batch_norm, 2)


def _length(run: Run) -> float:
    return run.budget_epochs or 0.0 if run.annealed else 0.0


def metrics_of(rows: Iterable[Row]) -> list[Metric]:
    """The metrics that can be compared: held-out losses, then accuracies.

    The last word of a name says which direction is better: loss, perplexity, error; accuracy.
    Values of rounded weights (`test_4bit_loss`) exist at the end of a run only, so there is nothing
    to compare over time.

    >>> [m.name for m in metrics_of([{"test_accuracy": 0.5, "test_loss": 1.0, "train_loss": 1.0}])]
    ['test_loss', 'test_accuracy']
    """
    names = dict.fromkeys(name for row in rows for name in row if not name.startswith("train_"))
    found = [
        Metric(name, BETTER[word])
        for name in names
        if (word := name.split("_")[-1]) in BETTER and not re.search(r"_\d+bit_", name)
    ]
    return sorted(found, key=lambda metric: metric.better == "higher")


def _timed(rows: Sequence[Row]) -> bool:
    clock = [row.get("train_seconds") for row in rows]
    return None not in clock and clock == sorted(clock)  # type: ignore[type-var]


def _rank(seed: Any) -> tuple[bool, float, str]:
    number = isinstance(seed, int | float)
    return (not number, seed if number else 0.0, str(seed))
