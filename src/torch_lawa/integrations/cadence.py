"""When an integration asks its averager's schedule, and how many snapshots a run will give."""

import copy
import math
from collections.abc import Iterable
from typing import Literal, TypeAlias

from torch_lawa.averager import LatestWeightAverager
from torch_lawa.errors import ConfigError
from torch_lawa.metrics import mode_by_name
from torch_lawa.schedule import Schedule, check_start, smaller_window
from torch_lawa.units import counted
from torch_lawa.validation import check_kind
from torch_lawa.window_choice import WindowSearch

__all__ = ["Cadence", "Unit"]

Unit: TypeAlias = Literal["steps", "epochs"]


class Cadence:
    """A schedule, the unit in which the framework asks it, and how many units it leaves out.

    `schedule` is the configuration and stays as it is: each averager has a copy, whose state is
    saved with the window. `start` is a number of units, or a fraction of the run; `other_start` a
    number of the other units (epochs, if `unit` is steps) that must be complete as well.
    """

    def __init__(
        self, schedule: Schedule, unit: Unit, start: int | float, other_start: int = 0
    ) -> None:
        check_kind("schedule", schedule, "due", "Every(n) or OnPlateau()")
        check_start(start, f"collecting by {unit}")
        self.schedule, self.unit, self.start = copy.deepcopy(schedule), unit, start
        self.other_start = other_start

    def check_monitor(self, monitor: str) -> None:
        """Raise if the schedule would take a metric of which high values are good for a loss."""
        if self.schedule.needs_loss and mode_by_name(monitor) == "max":
            raise ConfigError(
                f"monitor={monitor!r}: {type(self.schedule).__name__} waits for a loss that falls, "
                "and high values of this metric are good, by its name. Monitor a loss."
            )

    def due(
        self,
        averager: LatestWeightAverager,
        position: int,
        *,
        total: int | None = None,
        loss: float | None = None,
    ) -> bool:
        """Whether a snapshot is due when `position` of `total` units are complete."""
        return position > self._left_out(total) and averager.schedule.due(position, loss)

    def restart(self, averager: LatestWeightAverager) -> None:
        """Let the averager's schedule begin again, for a new run."""
        averager.schedule.load_state_dict(self.schedule.state_dict())

    def shortfall(
        self,
        total: int | None,
        averager: LatestWeightAverager,
        asked: Iterable[int] | None = None,
        search: WindowSearch | None = None,
    ) -> tuple[str, list[str]] | None:
        """If a run gives too few snapshots for an average: a message, and what to lower.

        `asked` are the positions at which the schedule is asked, all of the run by default. With a
        `search` its smallest window is enough.
        """
        if total is None:
            return None
        positions = range(1, total + 1) if asked is None else asked
        left_out = self._left_out(total)
        expected = self.schedule.expected(p for p in positions if p > left_out)
        if expected is None:
            return None
        expected //= averager.samples
        needed = averager.min_snapshots if search is None else search.smallest
        if expected >= needed:
            return None
        ways = smaller_window(averager.k, averager.samples, 1 if search else needed)
        if search is not None and needed > 1:
            ways.append("compare smaller windows")
        length = counted(total, "complete epoch" if self.unit == "epochs" else "step")
        return (
            f"this run of {length} gives {counted(expected, 'snapshot')}, but an average needs "
            f"{needed}"
        ), ways

    def _left_out(self, total: int | None) -> int:
        if isinstance(self.start, float):
            return math.ceil(self.start * (total or 0))
        return self.start
