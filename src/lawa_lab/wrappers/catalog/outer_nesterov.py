"""Outer Nesterov (SNOO, MuLoCo): momentum on the way of every K optimizer steps."""

from dataclasses import dataclass
from typing import ClassVar

from lawa_lab.wrappers.base import WrappedRun
from lawa_lab.wrappers.outer_step import OuterStep
from lawa_lab.wrappers.registry import Wrapper, register_wrapper


@register_wrapper
@dataclass(frozen=True)
class OuterNesterov(Wrapper):
    """Every `k` steps, a Nesterov step on the weights of k steps ago.

    Its gradient is those weights minus the present ones. With `mean` above 0, the mean over the
    last share `mean` of the k steps takes the place of the present weights: an outer step on
    averages.
    """

    name: ClassVar[str] = "outer-nesterov"
    typed: ClassVar[str] = "outer-nesterov[:K:RATE:MOMENTUM[:MEAN]]"

    k: float = 30
    rate: float = 0.7
    momentum: float = 0.5
    mean: float = 0

    def __post_init__(self) -> None:
        valid = self.k >= 1 and self.k == int(self.k) and self.rate > 0
        valid = valid and 0 < self.momentum < 1 and 0 <= self.mean <= 1
        self.require(valid, "outer-nesterov:30:0.7:0.5")
        averaged = not self.mean or round(self.mean * self.k) >= 1
        self.require(averaged, "outer-nesterov:30:0.7:0.5:1", "no step would be averaged")

    def build(self, run: WrappedRun) -> OuterStep:
        """An outer step with momentum."""
        return OuterStep(
            run, period=int(self.k), rate=self.rate, momentum=self.momentum, mean=self.mean
        )
