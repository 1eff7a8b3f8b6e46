"""BEMA: an EMA with a correction for its lag."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from lawa_lab.methods.registry import Method, register_method

if TYPE_CHECKING:
    from torch import nn

    from torch_lawa.averager_protocol import Averager


@register_method
@dataclass(frozen=True)
class Bema(Method):
    """average = EMA + (10 + t)^-eta * (weights - first weights), EMA moves by (10 + t)^-kappa."""

    name: ClassVar[str] = "bema"
    typed: ClassVar[str] = "bema:KAPPA:ETA"

    kappa: float = 0.5
    eta: float = 0.2

    def __post_init__(self) -> None:
        self.require(self.kappa > 0 and self.eta > 0, "bema:0.5:0.2")

    def build(self, model: "nn.Module") -> "Averager":
        """A running average on the model's device."""
        from lawa_lab.methods.bema import BemaAverage

        return BemaAverage(model, kappa=self.kappa, eta=self.eta, kind=str(self))
