"""A second window whose snapshots span another share of the run."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from lawa_lab.methods.registry import Method, register_method

if TYPE_CHECKING:
    from torch import nn

    from torch_lawa.averager_protocol import Averager


@register_method
@dataclass(frozen=True)
class HorizonWindow(Method):
    """The mean of `k` snapshots that span the last `share` of the steps so far.

    With `blend` below 1 the rest of the weight goes to the live weights.
    """

    name: ClassVar[str] = "horizon"
    typed: ClassVar[str] = "horizon:SHARE:K[:BLEND]"

    share: float
    k: float
    blend: float = 1.0

    def __post_init__(self) -> None:
        self.require(0 < self.share < 1 and self.k >= 1 and self.k == int(self.k), "horizon:0.5:16")
        why = "the weight of the mean must be above 0 and at most 1"
        self.require(0 < self.blend <= 1, "horizon:0.5:16:0.5", why)

    def build(self, model: "nn.Module") -> "Averager":
        """A window in the model's memory."""
        from lawa_lab.methods.window import WindowMethod

        return WindowMethod(
            model, k=int(self.k), share=self.share, blend=self.blend, kind=str(self)
        )
