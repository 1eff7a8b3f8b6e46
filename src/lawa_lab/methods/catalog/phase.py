"""Recent snapshots first, all snapshots later."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from lawa_lab.methods.registry import RingMethod, register_method

if TYPE_CHECKING:
    from torch_lawa.averager import LatestWeightAverager
    from torch_lawa.averager_protocol import Averager


@register_method
@dataclass(frozen=True)
class Phase(RingMethod):
    """The better of the uniform and the linearly increasing weights, by validation loss."""

    name: ClassVar[str] = "phase"
    typed: ClassVar[str] = "phase"

    def read(self, ring: "LatestWeightAverager") -> "Averager":
        """Reads the run's own window."""
        from lawa_lab.methods.ring import PhasedAverage

        return PhasedAverage(ring, kind=str(self))
