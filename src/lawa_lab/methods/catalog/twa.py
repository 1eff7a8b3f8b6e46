"""Trainable weight averaging: weights of the snapshots learned on training batches."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from lawa_lab.methods.registry import RingMethod, register_method

if TYPE_CHECKING:
    from torch_lawa.averager import LatestWeightAverager
    from torch_lawa.averager_protocol import Averager


@register_method
@dataclass(frozen=True)
class Twa(RingMethod):
    """Gradient descent in the span of the snapshots, from their mean, before each evaluation."""

    name: ClassVar[str] = "twa"
    typed: ClassVar[str] = "twa:RATE:BATCHES"

    rate: float
    batches: float

    def __post_init__(self) -> None:
        self.require(
            self.rate > 0 and self.batches >= 1 and self.batches == int(self.batches), "twa:0.5:28"
        )

    def read(self, ring: "LatestWeightAverager") -> "Averager":
        """Reads the run's own window."""
        from lawa_lab.methods.learned import LearnedAverage

        return LearnedAverage(ring, kind=str(self), rate=self.rate, num_batches=int(self.batches))
