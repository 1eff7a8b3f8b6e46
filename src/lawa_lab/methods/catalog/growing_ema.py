"""An exponential moving average whose memory grows with the run."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from lawa_lab.methods.registry import Method, register_method

if TYPE_CHECKING:
    from torch import nn

    from torch_lawa.averager_protocol import Averager


@register_method
@dataclass(frozen=True)
class GrowingEma(Method):
    """An EMA whose time constant is always `share` of the steps so far."""

    name: ClassVar[str] = "growing-ema"
    typed: ClassVar[str] = "growing-ema:SHARE"

    share: float

    def __post_init__(self) -> None:
        valid = 0 < self.share <= 1
        self.require(valid, "growing-ema:0.1", "the share must be above 0 and at most 1")

    def build(self, model: "nn.Module") -> "Averager":
        """A running average on the model's device."""
        from lawa_lab.methods.running_average import RunningAverage

        share = self.share
        return RunningAverage(model, lambda step: min(1.0, 1.0 / (share * step)), kind=str(self))
