"""Stochastic weight averaging: the mean of all weights after a number of steps."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from lawa_lab.methods.registry import Method, register_method

if TYPE_CHECKING:
    from torch import nn

    from torch_lawa.averager_protocol import Averager


@register_method
@dataclass(frozen=True)
class Swa(Method):
    """The equal mean of the weights of every step after the first `start`; until then the weights.

    Torch's `AveragedModel` with its default rule, updated after every step instead of every epoch.
    """

    name: ClassVar[str] = "swa"
    typed: ClassVar[str] = "swa:START_STEP"

    start: float

    def __post_init__(self) -> None:
        valid = self.start >= 0 and self.start == int(self.start)
        self.require(valid, "swa:4000", "START_STEP is a whole number of steps")

    def build(self, model: "nn.Module") -> "Averager":
        """A running average on the model's device."""
        from lawa_lab.methods.running_average import RunningAverage

        start = int(self.start)
        return RunningAverage(model, lambda step: 1.0 / max(1, step - start), kind=str(self))
