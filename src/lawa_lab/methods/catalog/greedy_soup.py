"""The greedy soup of the window's snapshots."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from lawa_lab.methods.registry import RingMethod, register_method

if TYPE_CHECKING:
    from torch_lawa.averager import LatestWeightAverager
    from torch_lawa.averager_protocol import Averager


@register_method
@dataclass(frozen=True)
class GreedySnapshots(RingMethod):
    """Snapshots join the mean, from the best one on, while the validation loss falls."""

    name: ClassVar[str] = "greedy-soup"
    typed: ClassVar[str] = "greedy-soup"

    def read(self, ring: "LatestWeightAverager") -> "Averager":
        """Reads the run's own window."""
        from lawa_lab.methods.soups import GreedySoup

        return GreedySoup(ring, kind=str(self))
