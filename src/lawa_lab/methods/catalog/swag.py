"""A random sample around the mean of the window: SWAG."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from lawa_lab.methods.registry import RingMethod, register_method

if TYPE_CHECKING:
    from torch_lawa.averager import LatestWeightAverager
    from torch_lawa.averager_protocol import Averager


@register_method
@dataclass(frozen=True)
class SwagSample(RingMethod):
    """One sample of the library's `LatestWeightAverager.sampled_into`."""

    name: ClassVar[str] = "swag"
    typed: ClassVar[str] = "swag:SEED[:SCALE]"

    seed: float
    scale: float = 0.5

    def __post_init__(self) -> None:
        self.require(
            self.seed >= 0 and self.seed == int(self.seed) and 0 <= self.scale < float("inf"),
            "swag:0:0.5",
        )

    def read(self, ring: "LatestWeightAverager") -> "Averager":
        """Reads the run's own window."""
        from lawa_lab.methods.ring import SampledAverage

        return SampledAverage(ring, kind=str(self), seed=int(self.seed), scale=self.scale)
