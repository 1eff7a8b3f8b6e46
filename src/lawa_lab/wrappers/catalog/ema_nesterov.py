"""EMA-Nesterov: the gradient is taken ahead of the weights, along an average of their steps."""

from dataclasses import dataclass
from typing import ClassVar

from lawa_lab.wrappers.base import BuiltWrapper, Gradient, Step, WrappedRun
from lawa_lab.wrappers.registry import Wrapper, register_wrapper


@register_wrapper
@dataclass(frozen=True)
class EmaNesterov(Wrapper):
    """w' = step from (w + b m); m = decay * m + (1 - decay) * (w' - w).

    b is `boost` times the learning rate as a share of its peak, and 0 in the first `start` steps.
    """

    name: ClassVar[str] = "ema-nesterov"
    typed: ClassVar[str] = "ema-nesterov[:BOOST:DECAY:START]"

    boost: float = 0.3
    decay: float = 0.99
    start: float = 300

    def __post_init__(self) -> None:
        valid = self.boost > 0 and 0 < self.decay < 1 and self.start >= 0
        self.require(valid and self.start == int(self.start), "ema-nesterov:0.3:0.99:300")

    def build(self, run: WrappedRun) -> BuiltWrapper:
        """One buffer, m."""
        return _NesterovSteps(self, run)


class _NesterovSteps(BuiltWrapper):
    vectors = ("average_step",)
    numbers = ("num_steps",)

    def __init__(self, settings: EmaNesterov, run: WrappedRun) -> None:
        self._settings, self._run = settings, run
        self.average_step = run.weights.zeros()
        self.num_steps = 0

    def step(self, gradient: Gradient, inner: Step) -> None:
        weights, average, decay = self._run.weights, self.average_step, self._settings.decay
        active = self.num_steps >= self._settings.start
        boost = self._settings.boost * self._run.rate_share if active else 0.0
        weights.add_(average, boost)
        # Subtracts (1 - decay) * w, which is weights - boost * m now: no copy of w is needed.
        average.mul_(decay + (1.0 - decay) * boost)
        average.add_(weights, decay - 1.0)
        inner(gradient)
        self.num_steps += 1
        average.add_(weights, 1.0 - decay)

    def restart(self) -> None:
        self.average_step.zero_()
