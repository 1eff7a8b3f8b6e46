"""A window whose snapshots are means: every step of the window is averaged."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from lawa_lab.methods.registry import Method, register_method

if TYPE_CHECKING:
    from torch import nn

    from torch_lawa.averager_protocol import Averager


@register_method
@dataclass(frozen=True)
class Dense(Method):
    """The window of `horizon`, but over every step: snapshots are means of the steps between them.

    It costs one more copy of the weights and an update per step, as an EMA does.
    """

    name: ClassVar[str] = "dense"
    typed: ClassVar[str] = "dense:SHARE:K"

    share: float
    k: float

    def __post_init__(self) -> None:
        self.require(0 < self.share < 1 and self.k >= 1 and self.k == int(self.k), "dense:0.25:16")

    def build(self, model: "nn.Module") -> "Averager":
        """A window in the model's memory."""
        from lawa_lab.methods.window import DenseWindow

        return DenseWindow(model, k=int(self.k), share=self.share, kind=str(self))
