"""What a report says, as plain values: tables, sentences, and how each number came about.

`summarise` in `lawa_lab.report.summarising` makes a `Report` from runs; the terminal, the page
and the JSON file only lay it out. No PyTorch and no matplotlib here.

    Report
      recipes: RecipeReport (one for each recipe)
        metrics: MetricReport (one for each value, such as "test_loss")
          main:    what the default average of each run saved, a row for each baseline
          windows: every window, kind of coefficients and BatchNorm policy, a row each
          runs:    the raw weights of each run
          losses:  sentences: where averaging lost
        notes:     sentences: what limits these numbers
      how:         sentences: how each number came about
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from lawa_lab.report.runs import Series
from lawa_lab.report.savings import Axis, Metric

__all__ = [
    "Against",
    "Amount",
    "MainRow",
    "Mean",
    "MetricReport",
    "RecipeReport",
    "Report",
    "RunRow",
    "SavingCurve",
    "SeedSaving",
    "Stretch",
    "TargetSaving",
    "Unmatched",
    "WindowRow",
]

Against: TypeAlias = Literal["alike", "usual", "other run"]


@dataclass(frozen=True, kw_only=True)
class Mean:
    """A number over seeds."""

    mean: float
    sd: float | None  # sample standard deviation; None with one seed
    low: float
    high: float
    num_seeds: int


@dataclass(frozen=True, kw_only=True)
class Amount:
    """What it took to reach a target, on one axis, over the seeds in which both series did."""

    baseline_at: Mean
    averaged_at: Mean
    saved: Mean  # negative where the averaged weights came later
    percent: float | None  # of what the baseline took


@dataclass(frozen=True, kw_only=True)
class SeedSaving:
    """One seed, on the axis of the report (epochs where they are known, else steps)."""

    seed: Any
    target: float
    baseline_at: float | None  # None: never reached
    averaged_at: float | None
    saved: float | None


@dataclass(frozen=True, kw_only=True)
class TargetSaving:
    """The saving at one target. An axis is None where unknown, or where no seed has both."""

    what: Literal["headline", "final", "best"]
    target: float | None  # the mean of the seeds' own targets, for "final" and "best"
    epochs: Amount | None
    steps: Amount | None
    seconds: Amount | None  # every cost of averaging charged
    gpu_hours: Amount | None
    num_seeds: int  # compared
    num_both: int  # of those, both series reached the target: what the means are over
    by_seed: tuple[SeedSaving, ...]


@dataclass(frozen=True, kw_only=True)
class Unmatched:
    """Values of the average that the baseline never reached: a saving with no upper end."""

    num_seeds: int  # in so many seeds
    averaged_from: Mean  # here the average first was better than the baseline ever was
    baseline_end: Mean  # so long the baseline was watched
    at_least: Mean  # the lower bound: the second minus the first


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """Evaluations in a row in which the averaged weights were behind, in most of the seeds."""

    begin: float
    end: float
    num_evaluations: int
    worst_at: float
    worst_by: float | None  # mean difference there, positive; None where a value is not finite


@dataclass(frozen=True, kw_only=True)
class SavingCurve:
    """Saving against target, from easy to hard: parallel tuples, a target each.

    Between two targets the saving is that of the harder one, so the whole curve is here.
    """

    target: tuple[float, ...]
    saved: tuple[float | None, ...]  # mean over the seeds in which both series reached it
    sd: tuple[float | None, ...]
    low: tuple[float | None, ...]
    high: tuple[float | None, ...]
    num_both: tuple[int, ...]  # in so many seeds both reached it
    num_averaged: tuple[int, ...]  # in so many seeds the averaged weights did


@dataclass(frozen=True, kw_only=True)
class MainRow:
    """An average against a baseline."""

    averaged_run: str
    averaged: Series
    baseline_run: str
    baseline: Series
    against: Against
    axis: Axis  # of `by_seed`, `unmatched`, `behind` and `curve`
    headline: TargetSaving | None  # None: never ahead, or nothing that both reached in every seed
    final: TargetSaving  # at the baseline's own last value
    best: TargetSaving  # at the best value that the baseline ever had
    unmatched: Unmatched | None
    behind: tuple[Stretch, ...]
    num_behind: int  # evaluations of all seeds together in which the average was behind, of
    num_compared: int
    curve: SavingCurve
    notes: tuple[str, ...]

    @property
    def label(self) -> str:
        """Such as "sgd, k = 10 against raw"; another run's raw weights with its name."""
        averaged, baseline, both = self.averaged.label, self.baseline.label, ""
        treated = self.averaged.batch_norm
        if treated is not None and treated == self.baseline.batch_norm:
            averaged, baseline = (
                dataclasses.replace(series, batch_norm=None).label
                for series in (self.averaged, self.baseline)
            )
            both = f", both BatchNorm {treated}"
        other = "" if self.baseline_run == self.averaged_run else f"{self.baseline_run}, "
        return f"{self.averaged_run}, {averaged} against {other}{baseline}{both}"


@dataclass(frozen=True, kw_only=True)
class WindowRow:
    """One average against the raw weights of its own run, BatchNorm treated alike."""

    run: str
    series: Series
    default: bool  # the average of the main table
    headline: TargetSaving | None
    unmatched: Unmatched | None
    final: Mean | None  # value at the end
    best: Mean | None
    behind: tuple[Stretch, ...]
    num_behind: int
    num_compared: int
    charged_seconds: Mean | None  # all that this average cost beyond the run, to the end


@dataclass(frozen=True, kw_only=True)
class RunRow:
    """The raw weights of one run."""

    run: str
    series: Series
    final: Mean | None
    best: Mean | None
    seeds: tuple[Any, ...]
    epochs: Mean | None
    steps: Mean | None
    device: str | None
    num_devices: int | None
    train_seconds: Mean | None


@dataclass(frozen=True, kw_only=True)
class MetricReport:
    """One value of one recipe."""

    metric: Metric
    main: tuple[MainRow, ...]
    windows: tuple[WindowRow, ...]
    runs: tuple[RunRow, ...]
    losses: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class RecipeReport:
    """One recipe."""

    recipe: str
    axis: Axis  # "epoch", or "step" where epochs are not known
    metrics: tuple[MetricReport, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Report:
    """All that is said of the runs."""

    recipes: tuple[RecipeReport, ...]
    how: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """The same in lists and dicts, for JSON."""
        return dataclasses.asdict(self)
