"""When a snapshot is due: one decision for `averager.step`, every integration and the lab.

A schedule is asked with the *step*: how many units of training are complete, counted from 1. The
caller chooses the unit (optimizer steps, epochs, validations), so a resumed run asks the same
questions as an uninterrupted one. What does not follow from the step, such as the best loss so
far, is the schedule's state: plain numbers that are saved and loaded with the averager. Whoever
keeps a schedule keeps a copy (`copy.deepcopy`), so one object may configure several averagers.

To add a schedule, write one dataclass and register it. Its fields are its options and fields with
`init=False` are its state; saving and the entry in the documentation follow from them:

    @register_schedule("doubling", "at FIRST, then whenever the step has doubled")
    @dataclass
    class Doubling(Schedule):
        first: int = 1
        last: int = field(default=0, init=False)

        def due(self, step, loss=None):
            if step < max(self.first, 2 * self.last):
                return False
            self.last = step
            return True
"""

import abc
import copy
import dataclasses
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from torch_lawa.errors import ConfigError, StateError
from torch_lawa.units import counted, either

__all__ = [
    "SCHEDULES",
    "Every",
    "Horizon",
    "OnPlateau",
    "Schedule",
    "check_share",
    "check_start",
    "check_window",
    "choose_schedule",
    "num_within",
    "register_schedule",
    "smaller_window",
]


class Schedule(abc.ABC):
    """Decides at which steps a snapshot is taken. A subclass is a dataclass with a `due` method.

    >>> @dataclass
    ... class PowersOfTwo(Schedule):
    ...     def due(self, step: int, loss: float | None = None) -> bool:
    ...         return step & (step - 1) == 0
    >>> [step for step in range(1, 20) if PowersOfTwo().due(step)]
    [1, 2, 4, 8, 16]
    """

    needs_loss: ClassVar[bool] = False
    """Whether `due` needs the validation loss; the integrations then ask after each validation."""

    total: int | None = None
    """How many steps the run has, where the schedule was given that."""

    @abc.abstractmethod
    def due(self, step: int, loss: float | None = None) -> bool:
        """Whether a snapshot is due now that `step` units are complete; asked once per step.

        Steps increase. Some may be left out: an integration may ask only when it saves.
        """

    def expected(self, steps: Iterable[int] | None = None) -> int | None:
        """How many snapshots a run gives that asks at `steps`; None if nobody can know.

        By default these are all the steps of a run of `total` steps.
        """
        if steps is None and self.total is not None:
            steps = range(1, self.total + 1)
        if steps is None or self.needs_loss:
            return None
        trial = copy.deepcopy(self)
        return sum(trial.due(step) for step in steps)

    def num_averaged(self, steps: Sequence[int]) -> int:
        """How many of the newest snapshots an average takes, of those in the window.

        `steps` are the steps of the snapshots, oldest first. An average takes all of them unless
        the schedule limits what it spans.
        """
        return len(steps)

    def warn_if_bypassed(self) -> None:  # noqa: B027  # few have something to warn of
        """Called when the first snapshot is collected by hand, without a step."""

    def state_dict(self) -> dict[str, Any]:
        """The fields with `init=False`: plain numbers."""
        return {each.name: getattr(self, each.name) for each in _fields(self) if not each.init}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state; nothing changes if it is that of another schedule."""
        found = {}
        for name, own in self.state_dict().items():
            try:
                value = state[name]
                # A float stays one, also if the field began as `0`.
                convert = isinstance(own, int | float) and not isinstance(value, float)
                found[name] = type(own)(value) if convert else value
            except (KeyError, TypeError, ValueError):
                raise StateError(
                    f"the saved schedule has no usable {name!r}, which {type(self).__name__} needs:"
                    " it was saved with another schedule. Build the averager with that one."
                ) from None
        for name, value in found.items():
            setattr(self, name, value)


@dataclass(frozen=True)
class RegisteredSchedule:
    """One entry of `SCHEDULES`."""

    name: str
    make: type[Schedule]
    help: str

    @property
    def usage(self) -> str:
        """How it is written, such as `every:N,start=START,total=TOTAL`."""
        options = [each.name for each in _fields(self.make) if each.init]
        parts = [
            f"{option}={option.upper()}" if i else option.upper()
            for i, option in enumerate(options)
        ]
        return ":".join(filter(None, (self.name, ",".join(parts))))


SCHEDULES: dict[str, RegisteredSchedule] = {}
"""Every registered schedule, by name."""

_Class = TypeVar("_Class", bound=type[Schedule])


def register_schedule(name: str, help: str) -> Callable[[_Class], _Class]:
    """Class decorator: adds a dataclass to `SCHEDULES`.

    >>> @register_schedule("late", "every step after the first SKIPPED")
    ... @dataclass
    ... class Late(Schedule):
    ...     skipped: int = 0
    ...
    ...     def due(self, step: int, loss: float | None = None) -> bool:
    ...         return step > self.skipped
    >>> SCHEDULES["late"].usage
    'late:SKIPPED'
    >>> del SCHEDULES["late"]
    """
    if name in SCHEDULES:
        raise ConfigError(f"a schedule named {name!r} is registered already: choose another name.")

    def register(make: _Class) -> _Class:
        SCHEDULES[name] = RegisteredSchedule(name, make, help)
        return make

    return register


@register_schedule("every", "every N steps, after the first START (or that fraction of TOTAL)")
@dataclass
class Every(Schedule):
    """A snapshot every `n` steps, after the first `start` steps.

    `start` is a number of steps, or a fraction of `total` if it is a float: the early phase of
    training, where averaging hurts.

    >>> schedule = Every(2, start=3)
    >>> [step for step in range(1, 10) if schedule.due(step)]
    [5, 7, 9]
    """

    n: int = 1
    start: int | float = field(default=0, kw_only=True)
    total: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if not _positive(self.n):
            raise ConfigError(f"Every({self.n!r}): n must be a positive number of steps.")
        self._first = resolve_start(self.start, self.total, f"Every({self.n})")
        if self.expected() == 0:
            raise ConfigError(
                f"Every({self.n}, start={self.start}): a run of {self.total} steps ends before the "
                "first snapshot; lower n or start."
            )

    def due(self, step: int, loss: float | None = None) -> bool:
        """Whether `step` is n, 2n, 3n, ... steps after the start."""
        since = step - self._first
        return since > 0 and since % self.n == 0

    def expected(self, steps: Iterable[int] | None = None) -> int | None:
        """As for any schedule, without counting through the steps where `total` is enough."""
        if steps is None and self.total is not None:
            return (self.total - self._first) // self.n
        return super().expected(steps)


@register_schedule("horizon", "K snapshots over the last SHARE of the steps done so far")
@dataclass
class Horizon(Schedule):
    """Snapshots whose window always spans the last `share` of the training done so far.

    `k` is the size of the window. The spacing grows with the run, so its length need not be known:
    a snapshot is due when the step passes the next power of `r = (1 - share) ** (-1 / k)`, and k
    powers make up the share. The powers are fixed, so rounding to whole steps does not add up.
    While they are less than one step apart, every step is due and the share holds fewer than k
    snapshots.

    An average takes the snapshots of the last `floor(share * step)` steps before the newest one, at
    least that one. The share is one of all steps; `start` only leaves out the first snapshots, so
    the window is shorter than its share until step `start / (1 - share)`.

    >>> schedule = Horizon(1 / 2, k=4)
    >>> [step for step in range(1, 100) if schedule.due(step)]
    [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 23, 27, 32, 39, 46, 54, 64, 77, 91]
    >>> schedule.num_averaged([39, 46, 54, 64, 77, 91])
    4
    """

    share: float = 0.25
    k: int = 16
    start: int | float = field(default=0, kw_only=True)
    total: int | None = field(default=None, kw_only=True)
    last: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        check_share("share", self.share)
        if not _positive(self.k):
            raise ConfigError(f"Horizon(k={self.k!r}): k must be an int of at least 1.")
        self._first = resolve_start(self.start, self.total, f"Horizon({self.share})")
        self._powers = -self.k / math.log1p(-self.share)  # of r, per factor of e

    def due(self, step: int, loss: float | None = None) -> bool:
        """Whether a power of r is after the last snapshot, and not after `step`."""
        before = max(self.last, self._first)
        if step <= before or (before and self._power(step) <= self._power(before)):
            return False
        self.last = step
        return True

    def num_averaged(self, steps: Sequence[int]) -> int:
        """Those within the share; see `num_within`."""
        return num_within(steps, self.share)

    def warn_if_bypassed(self) -> None:
        """A horizon is measured in steps, which `collect` does not count."""
        warnings.warn(
            "collect takes a snapshot at every call, so the horizon does not decide when. Call "
            "averager.step(model) after every optimizer step instead, or label the snapshots with "
            "collect(model, step=...).",
            stacklevel=4,
        )

    def _power(self, step: int) -> int:
        """The exponent of the largest power of r that is not above the step."""
        return math.floor(math.log(step) * self._powers + 1e-9)  # r ** k may be a whole number


@register_schedule("plateau", "when the loss has not improved by MIN_DELTA for PATIENCE steps")
@dataclass
class OnPlateau(Schedule):
    """A snapshot whenever the validation loss has not improved for `patience` validations.

    Call `averager.step(model, loss=validation_loss)` after every validation. An improvement is a
    loss below the best one by more than `min_delta`. A loss that is NaN or infinite, from a run
    that diverged, never takes a snapshot.

    >>> schedule = OnPlateau()
    >>> losses = (3.0, 2.0, 2.5, 2.0, 1.0)
    >>> [schedule.due(step, loss) for step, loss in enumerate(losses, 1)]
    [False, False, True, True, False]
    """

    needs_loss: ClassVar[bool] = True

    patience: int = 1
    min_delta: float = 0.0
    start: int | float = field(default=0, kw_only=True)
    total: int | None = field(default=None, kw_only=True)
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
        self._first = resolve_start(self.start, self.total, "OnPlateau")

    def due(self, step: int, loss: float | None = None) -> bool:
        """Whether the loss has now failed to improve `patience` times in a row."""
        if loss is None:
            raise ConfigError(
                "OnPlateau needs the validation loss: call averager.step(model, loss=...)."
            )
        if not math.isfinite(loss):
            return False
        if loss < self.best - self.min_delta:
            self.best, self.num_waited = float(loss), 0
            return False
        self.num_waited += 1
        if self.num_waited < self.patience or step <= self._first:
            return False
        self.num_waited = 0
        return True


def choose_schedule(schedule: Schedule | None, horizon: float | None, k: int) -> Schedule | None:
    """The schedule, or the one that `horizon` stands for; raises if both are given.

    >>> choose_schedule(None, 0.25, 8)
    Horizon(share=0.25, k=8, start=0, total=None, last=0)
    """
    if horizon is None:
        return schedule
    if schedule is not None:
        raise ConfigError(
            f"horizon={horizon} and schedule={schedule}: pass only one. For a horizon with a "
            f"start, use schedule=Horizon({horizon}, k={k}, start=...)."
        )
    check_share("horizon", horizon)
    return Horizon(horizon, k)


def check_window(schedule: Schedule, k: int, samples: int, min_snapshots: int) -> None:
    """Refuse a schedule that does not fit a window of k snapshots, of so many samples each."""
    room = k * samples
    if isinstance(schedule, Horizon) and schedule.k != room:
        what, window = ("snapshots", f"k={k}") if samples == 1 else ("samples", f"{room} of them")
        raise ConfigError(
            f"{schedule} spreads {schedule.k} {what} over its share of the run, but the window "
            f"holds {window}: set the schedule's k to {room}."
        )
    expected = schedule.expected()
    if expected is not None and expected // samples < min_snapshots:
        ways = ("Collect more often", "start earlier", *smaller_window(k, samples, min_snapshots))
        raise ConfigError(
            f"the schedule {schedule} gives {counted(expected // samples, 'snapshot')} in the "
            f"whole run, but an average needs {min_snapshots}. {either(ways)}."
        )


def smaller_window(k: int, samples: int, least: int) -> list[str]:
    """What else gives an average in a short run, of an averager that needs `least` snapshots.

    >>> smaller_window(k=16, samples=4, least=1), smaller_window(k=6, samples=1, least=6)
    (['lower samples=4'], ['lower k=6', 'set min_snapshots=1'])
    """
    fewer = [f"lower k={k}", "set min_snapshots=1"] if least > 1 else []
    return [f"lower samples={samples}"] * (samples > 1) + fewer


def num_within(steps: Sequence[int], share: float) -> int:
    """How many of these steps, oldest first, are within the last `share` of the newest one.

    The last share of n steps is its last `floor(share * n)` steps, and at least the newest.

    >>> num_within([700, 750, 800, 900, 1000], 0.25)
    3
    """
    newest = steps[-1] if steps else 0
    span = math.floor(share * newest * (1 + 1e-12))  # 0.29 * 100 is a little less than 29
    return sum(newest - step < span for step in steps) or min(1, len(steps))


def check_share(name: str, share: object) -> None:
    """Refuse what is not a share of the run."""
    if not isinstance(share, float) or not 0.0 < share < 1.0:
        raise ConfigError(
            f"{name}={share!r}: give the share of the steps done so far that the window spans, a "
            "float between 0 and 1, such as 0.25."
        )


def check_start(start: object, where: str) -> None:
    """Refuse what is neither a number of steps nor a fraction of the run."""
    if isinstance(start, bool) or not isinstance(start, int | float):
        raise ConfigError(
            f"{where}: start={start!r} must be a number of steps (an int) or a fraction of the run "
            "(a float)."
        )
    if isinstance(start, float) and not 0.0 <= start < 1.0:
        raise ConfigError(
            f"{where}: start={start} as a fraction of the run must be in [0, 1); for a number of "
            "steps give an int."
        )
    if start < 0:
        raise ConfigError(f"{where}: start={start} must not be negative.")


def resolve_start(start: int | float, total: int | None, where: str) -> int:
    """The number of steps to leave out, from that number or a fraction of the run.

    >>> resolve_start(0.25, 10, "Every(1)")
    3
    """
    check_start(start, where)
    if total is not None and not _positive(total):
        raise ConfigError(f"{where}: total={total!r} must be a positive number of steps.")
    if isinstance(start, float):
        if total is None:
            raise ConfigError(
                f"{where}: start={start} is a fraction of the run, so give the length of the run: "
                "total=NUMBER_OF_STEPS."
            )
        return math.ceil(start * total)
    if total is not None and start >= total:
        raise ConfigError(
            f"{where}: start={start} is not before the end of the run (total={total}), so nothing "
            "would ever be collected; lower start."
        )
    return start


def _fields(schedule: Schedule | type[Schedule]) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(schedule) if dataclasses.is_dataclass(schedule) else ()


def _positive(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
