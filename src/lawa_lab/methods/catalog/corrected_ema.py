"""An exponential moving average without the weight of its start."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from lawa_lab.methods.registry import Method, register_method

if TYPE_CHECKING:
    from torch import nn

    from torch_lawa.averager_protocol import Averager


@register_method
@dataclass(frozen=True)
class CorrectedEma(Method):
    """An EMA from zero, divided by 1 - decay^t as in Adam: a mean of all steps at first."""

    name: ClassVar[str] = "corrected-ema"
    typed: ClassVar[str] = "corrected-ema:DECAY"

    decay: float

    def __post_init__(self) -> None:
        self.require(0 < self.decay < 1, "corrected-ema:0.999", "the decay must be between 0 and 1")

    def build(self, model: "nn.Module") -> "Averager":
        """A running average on the model's device."""
        from lawa_lab.methods.running_average import RunningAverage

        decay = self.decay
        return RunningAverage(
            model, lambda step: (1.0 - decay) / (1.0 - decay**step), kind=str(self)
        )
