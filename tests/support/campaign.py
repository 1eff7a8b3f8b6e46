"""The budget of a fault-injection campaign, and its count of trials."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

_T = TypeVar("_T")

# Counts finished trials: their kind, and how many there were.
CountTrials: TypeAlias = Callable[[str, int], None]


@dataclass
class Campaign:
    """One test's share of the campaign: seeded, and limited in time."""

    seconds: float
    seed: int = 0
    trials: int = 0
    _began: float = field(default_factory=time.monotonic)

    def until_time_is_up(self, trials: Iterable[_T]) -> Iterator[_T]:
        """The given trials, at least one, as long as there is time; counts them."""
        for each in trials:
            yield each
            self.trials += 1
            if time.monotonic() - self._began > self.seconds:
                return
