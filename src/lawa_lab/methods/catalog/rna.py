"""Regularised nonlinear acceleration: predicts where the weights converge to.

Either with one set of coefficients for the whole model, or with one for each tensor.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from lawa_lab.methods.registry import RingMethod, register_method

if TYPE_CHECKING:
    from torch_lawa.averager import LatestWeightAverager
    from torch_lawa.averager_protocol import Averager


@register_method
@dataclass(frozen=True)
class Rna(RingMethod):
    """A combination of the snapshots, of any sign, whose predicted further movement is smallest."""

    name: ClassVar[str] = "rna"
    typed: ClassVar[str] = "rna:PENALTY"

    penalty: float

    def __post_init__(self) -> None:
        self.require(0 < self.penalty < float("inf"), f"{self.name}:0.1")

    def read(self, ring: "LatestWeightAverager") -> "Averager":
        """Reads the run's own window."""
        from lawa_lab.methods.accelerated import AcceleratedAverage

        return AcceleratedAverage(ring, kind=str(self), penalty=self.penalty)


@register_method
@dataclass(frozen=True)
class RnaPerTensor(Rna):
    """As `rna`, but every tensor solves the least-squares problem for itself."""

    name: ClassVar[str] = "rna-per-tensor"
    typed: ClassVar[str] = "rna-per-tensor:PENALTY"

    def read(self, ring: "LatestWeightAverager") -> "Averager":
        """Reads the run's own window."""
        from lawa_lab.methods.accelerated import PerTensorAcceleration

        return PerTensorAcceleration(ring, kind=str(self), penalty=self.penalty)
