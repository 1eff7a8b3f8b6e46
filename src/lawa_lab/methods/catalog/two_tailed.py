"""Two-tailed averaging: where the mean begins follows from the validation loss."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from lawa_lab.methods.registry import Method, register_method

if TYPE_CHECKING:
    from torch import nn

    from torch_lawa.averager_protocol import Averager


@register_method
@dataclass(frozen=True)
class TwoTailed(Method):
    """Two running means; the short one replaces the long one when it is better."""

    name: ClassVar[str] = "two-tailed"
    typed: ClassVar[str] = "two-tailed"

    def build(self, model: "nn.Module") -> "Averager":
        """A running average on the model's device."""
        from lawa_lab.methods.two_tailed import TwoTailedAverage

        return TwoTailedAverage(model, kind=str(self))
