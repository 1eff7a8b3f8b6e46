"""Primal averaging: the weights move along with their own growing average."""

from dataclasses import dataclass
from typing import ClassVar

from lawa_lab.wrappers.base import BuiltWrapper, Gradient, Step, WrappedRun
from lawa_lab.wrappers.registry import Wrapper, register_wrapper


@register_wrapper
@dataclass(frozen=True)
class PrimalAveraging(Wrapper):
    """w' = step from w; x' = x + (w' - x) / (share * t); w = w' + beta * (x' - x).

    x is an EMA of the weights whose time constant is always `share` of the t steps so far. With
    SGD without momentum at the rate r and `share` = 1 - beta, this is Schedule-Free SGD at the rate
    r / (1 - beta), written in the points where it takes gradients (Defazio et al., 2024).
    """

    name: ClassVar[str] = "primal-averaging"
    typed: ClassVar[str] = "primal-averaging[:BETA:SHARE]"

    beta: float = 0.9
    share: float = 0.1

    def __post_init__(self) -> None:
        valid = 0 < self.beta < 1 and 0 < self.share <= 1
        self.require(valid, "primal-averaging:0.9:0.1")

    def build(self, run: WrappedRun) -> BuiltWrapper:
        """One buffer, x."""
        return _AveragedSteps(self, run)


class _AveragedSteps(BuiltWrapper):
    vectors = ("average",)
    numbers = ("num_steps",)

    def __init__(self, settings: PrimalAveraging, run: WrappedRun) -> None:
        self._settings, self._run = settings, run
        self.average = run.weights.clone()
        self.num_steps = 0

    def step(self, gradient: Gradient, inner: Step) -> None:
        weights, average, beta = self._run.weights, self.average, self._settings.beta
        inner(gradient)
        self.num_steps += 1
        moved = min(1.0, 1.0 / (self._settings.share * self.num_steps))
        # In place and without a third copy: w + beta * moved * (w - x) is a lerp beyond w ...
        weights.lerp_(average, -beta * moved)
        # ... after which w - x is larger by the factor 1 + beta * moved.
        average.lerp_(weights, moved / (1.0 + beta * moved))

    def restart(self) -> None:
        self.average.copy_(self._run.weights)
