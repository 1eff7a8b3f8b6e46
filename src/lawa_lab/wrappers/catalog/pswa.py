"""Periodic SWA: after every period the weights become the mean of the period."""

from dataclasses import dataclass
from typing import ClassVar

from lawa_lab.wrappers.base import WrappedRun
from lawa_lab.wrappers.outer_step import OuterStep
from lawa_lab.wrappers.registry import Wrapper, register_wrapper


@register_wrapper
@dataclass(frozen=True)
class PeriodicSwa(Wrapper):
    """From step `start` on, every `period` steps: weights = mean of the weights of these steps."""

    name: ClassVar[str] = "pswa"
    typed: ClassVar[str] = "pswa:PERIOD[:START]"

    period: float
    start: float = 0

    def __post_init__(self) -> None:
        whole = self.period == int(self.period) and self.start == int(self.start)
        self.require(whole and self.period >= 1 and self.start >= 0, "pswa:500:1000")

    def build(self, run: WrappedRun) -> OuterStep:
        """An outer step that goes all the way to the mean."""
        return OuterStep(run, period=int(self.period), rate=1.0, mean=1.0, start=int(self.start))
