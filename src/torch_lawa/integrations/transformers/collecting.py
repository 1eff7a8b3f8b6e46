"""When a run of the Transformers `Trainer` gives a snapshot: told by where it is, with no counters.

So a resumed run, also one that had no averaging before, collects where an uninterrupted one would.
"""

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from torch_lawa.errors import ConfigError

__all__ = ["CollectStrategy", "Collecting", "RunLength"]

CollectStrategy: TypeAlias = Literal["save", "steps", "epoch"]


@dataclass(frozen=True)
class RunLength:
    """How long a run is, and how often it saves; None where that is not known."""

    max_steps: int | None  # optimizer steps
    num_epochs: int | None  # whole ones
    steps_per_epoch: int | None
    saves_every: int | None  # optimizer steps; None: at the end of an epoch

    def of(self, strategy: CollectStrategy) -> int | None:
        """In the unit that a strategy counts."""
        return self.num_epochs if strategy == "epoch" else self.max_steps


@dataclass(frozen=True)
class Collecting:
    """Every save, every so many steps or epochs; the first ones may be left out.

    `start` is a number of epochs for "epoch", of optimizer steps otherwise, or as a float a
    fraction of the run.

    >>> rule = Collecting("steps", every=10, start=0.5)
    >>> [step for step in range(1, 61) if rule.due(step, total=60)]
    [40, 50, 60]
    """

    strategy: CollectStrategy = "save"
    every: int = 1
    start: int | float = 0

    def __post_init__(self) -> None:
        if self.strategy not in get_args(CollectStrategy):
            raise ConfigError(
                f"collect_strategy={self.strategy!r}: choose 'save' (at each save of the Trainer), "
                "'steps' or 'epoch'."
            )
        if isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 1:
            raise ConfigError(f"collect_every={self.every!r}: it must be an int of at least 1.")
        if self.strategy == "save" and self.every != 1:
            raise ConfigError(
                f"collect_every={self.every} with collect_strategy='save': every save is "
                "collected. Set save_steps, or collect_strategy='steps'."
            )
        if isinstance(self.start, bool) or not isinstance(self.start, int | float):
            raise ConfigError(f"start={self.start!r}: give an int, or a fraction of the run.")
        if isinstance(self.start, float) and not 0.0 <= self.start < 1.0:
            raise ConfigError(
                f"start={self.start}: as a fraction of the run it must lie in [0, 1); for a number "
                "of steps or epochs give an int."
            )
        if self.start < 0:
            raise ConfigError(f"start={self.start}: it must not be negative.")

    def due(self, position: int, total: int) -> bool:
        """Whether a run that has come to `position` of `total` gives a snapshot now."""
        return position > self._first(total) and position % self.every == 0

    def check(self, run: RunLength, min_snapshots: int) -> None:
        """Refuse a run in which nothing, or never enough, would be collected."""
        total = run.of(self.strategy)
        if total is None:
            return
        unit = "whole epochs" if self.strategy == "epoch" else "steps"
        if total and self._first(total) >= total:
            raise ConfigError(
                f"start={self.start} leaves out the whole run of {total} {unit}: lower it."
            )
        expected = self._expected(run, total)
        if expected is not None and expected < min_snapshots:
            found = f"{expected} snapshot{'' if expected == 1 else 's'}"
            often = {
                "save": "save more often (save_steps)",
                "steps": "collect more often (collect_every)",
                "epoch": "collect more often (collect_every, or collect_strategy='steps')",
            }[self.strategy]
            waits = min_snapshots > 1
            waiting = f" and an average needs {min_snapshots}" if waits else ""
            fewer = "lower start or k, or set min_snapshots=1" if waits else "or lower start"
            raise ConfigError(
                f"this run of {total} {unit} gives {found}{waiting}: there would never be "
                f"an average. Train longer, {often}, {fewer}."
            )

    def _first(self, total: int) -> int:
        """The last position that is left out."""
        return math.ceil(self.start * total) if isinstance(self.start, float) else self.start

    def _expected(self, run: RunLength, total: int) -> int | None:
        first = self._first(total)
        if self.strategy != "save":
            return total // self.every - first // self.every
        every = run.saves_every or run.steps_per_epoch
        # The end of the run is saved, too.
        return None if every is None else math.ceil(total / every) - first // every
