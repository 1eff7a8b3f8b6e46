"""When `averager.step(model)` takes a snapshot. Pure Python, a few counters, fully resumable.

A schedule counts the calls of `step`. Call it after every optimizer step and the unit is steps
(the paper's nu); call it after every epoch and the unit is epochs; call it after every validation
and the unit is validations.
"""

import math
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch_lawa.errors import ConfigError, StateError

__all__ = ["Every", "OnPlateau", "Schedule"]


class Schedule(Protocol):
    """Decides, call by call, whether to take a snapshot."""

    def due(self, loss: float | None) -> bool:
        """Count one call and say whether a snapshot is due."""
        ...

    def expected(self) -> int | None:
        """How many snapshots the whole run will give, where that is known."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """The counters, as plain numbers."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from saved counters."""
        ...


def _positive(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _first_call(start: int | float, total: int | None, where: str) -> int:
    """The number of calls to leave out, from a count or a fraction of the run."""
    if total is not None and not _positive(total):
        raise ConfigError(f"{where}: total={total!r} must be a positive number of calls.")
    if isinstance(start, float):
        if not 0.0 <= start < 1.0:
            raise ConfigError(
                f"{where}: start={start} as a fraction of the run must lie in [0, 1); "
                "for a number of calls give an int."
            )
        if total is None:
            raise ConfigError(
                f"{where}: start={start} is a fraction of the run, so say how long the run is: "
                "total=NUMBER_OF_CALLS."
            )
        return math.ceil(start * total)
    if isinstance(start, bool) or not isinstance(start, int):
        raise ConfigError(
            f"{where}: start={start!r} must be a number of calls (an int) or a fraction of the run "
            "(a float)."
        )
    if start < 0:
        raise ConfigError(f"{where}: start={start} must not be negative.")
    if total is not None and start >= total:
        raise ConfigError(
            f"{where}: start={start} is not before the end of the run (total={total}), so nothing "
            "would ever be collected; lower start."
        )
    return start


@dataclass
class Every:
    """A snapshot every `n` calls, the first `start` calls left out.

    `start` is a number of calls, or a fraction of `total` when it is a float: the first, wild
    phase of training, where averaging hurts.

    >>> schedule = Every(2, start=3)
    >>> [schedule.due(None) for _ in range(8)]
    [False, False, False, False, True, False, True, False]
    """

    n: int = 1
    start: int | float = field(default=0, kw_only=True)
    total: int | None = field(default=None, kw_only=True)
    num_calls: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if not _positive(self.n):
            raise ConfigError(f"Every({self.n!r}): n must be a positive number of calls.")
        self._first = _first_call(self.start, self.total, f"Every({self.n})")
        if self.expected() == 0:
            raise ConfigError(
                f"Every({self.n}, start={self.start}): a run of {self.total} calls ends before the "
                "first snapshot; lower n or start."
            )

    def due(self, loss: float | None) -> bool:
        """Whether this call is the n-th since the start or since the last one due."""
        self.num_calls += 1
        since = self.num_calls - self._first
        return since > 0 and since % self.n == 0

    def expected(self) -> int | None:
        """The number of snapshots in a run of `total` calls."""
        return None if self.total is None else (self.total - self._first) // self.n

    def state_dict(self) -> dict[str, Any]:
        """The one counter."""
        return {"num_calls": self.num_calls}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved counter."""
        self.num_calls = int(_entry(state, "num_calls", "Every"))


@dataclass
class OnPlateau:
    """A snapshot whenever the validation loss has not improved for `patience` calls.

    Call `averager.step(model, loss=validation_loss)` after every validation. An improvement is a
    loss below the best one by more than `min_delta`. A loss that is NaN or infinite, of a run that
    diverged, never takes a snapshot.

    >>> schedule = OnPlateau()
    >>> [schedule.due(loss) for loss in (3.0, 2.0, 2.5, 2.0, 1.0)]
    [False, False, True, True, False]
    """

    patience: int = 1
    min_delta: float = 0.0
    start: int | float = field(default=0, kw_only=True)
    total: int | None = field(default=None, kw_only=True)
    num_calls: int = field(default=0, init=False)
    best: float = field(default=math.inf, init=False)
    num_waited: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if not _positive(self.patience):
            raise ConfigError(
                f"OnPlateau(patience={self.patience!r}): patience must be an int of at least 1."
            )
        if not self.min_delta >= 0.0:
            raise ConfigError(
                f"OnPlateau(min_delta={self.min_delta}): min_delta must not be negative."
            )
        self._first = _first_call(self.start, self.total, "OnPlateau")

    def due(self, loss: float | None) -> bool:
        """Whether the loss has now failed to improve `patience` times in a row."""
        if loss is None:
            raise ConfigError(
                "OnPlateau needs the validation loss: call averager.step(model, loss=...)."
            )
        self.num_calls += 1
        if not math.isfinite(loss):
            return False
        if loss < self.best - self.min_delta:
            self.best, self.num_waited = float(loss), 0
            return False
        self.num_waited += 1
        if self.num_waited < self.patience or self.num_calls <= self._first:
            return False
        self.num_waited = 0
        return True

    def expected(self) -> int | None:
        """Nobody knows beforehand."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """The counters and the best loss."""
        return {"num_calls": self.num_calls, "best": self.best, "num_waited": self.num_waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from saved counters."""
        self.num_calls = int(_entry(state, "num_calls", "OnPlateau"))
        self.best = float(_entry(state, "best", "OnPlateau"))
        self.num_waited = int(_entry(state, "num_waited", "OnPlateau"))


def _entry(state: dict[str, Any], key: str, where: str) -> Any:
    try:
        return state[key]
    except KeyError:
        raise StateError(
            f"the saved schedule has no {key!r}, which {where} needs: it was saved with another "
            "schedule. Build the averager with the schedule it was saved with."
        ) from None
