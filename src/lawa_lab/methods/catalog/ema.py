"""An exponential moving average of the weights, updated after every optimizer step."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from lawa_lab.methods.registry import Method, register_method

if TYPE_CHECKING:
    from torch import nn

    from torch_lawa.averager_protocol import Averager


@register_method
@dataclass(frozen=True)
class Ema(Method):
    """average = decay * average + (1 - decay) * weights; starts from the weights of step 1."""

    name: ClassVar[str] = "ema"
    typed: ClassVar[str] = "ema:DECAY"

    decay: float

    def __post_init__(self) -> None:
        self.require(0 < self.decay < 1, "ema:0.999", "the decay must be between 0 and 1")

    def build(self, model: "nn.Module") -> "Averager":
        """A running average on the model's device."""
        from lawa_lab.methods.running_average import RunningAverage

        share = 1.0 - self.decay
        return RunningAverage(model, lambda step: 1.0 if step == 1 else share, kind=str(self))
