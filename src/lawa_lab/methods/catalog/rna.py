"""Regularised nonlinear acceleration: predicts where the weights converge to."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from lawa_lab.methods.registry import RingMethod, register_method
from torch_lawa.errors import ConfigError

if TYPE_CHECKING:
    from torch_lawa.averager import LatestWeightAverager
    from torch_lawa.averager_protocol import Averager

__all__ = ["Rna"]


@register_method
@dataclass(frozen=True)
class Rna(RingMethod):
    """A combination of the snapshots, of any sign, whose predicted further movement is smallest."""

    name: ClassVar[str] = "rna"
    typed: ClassVar[str] = "rna:PENALTY"

    penalty: float

    def __post_init__(self) -> None:
        if not (0 < self.penalty < float("inf")):
            raise ConfigError(f"{self}: write it as {self.typed}, such as rna:0.1")

    def read(self, ring: "LatestWeightAverager") -> "Averager":
        """Reads the run's own window."""
        from lawa_lab.methods.accelerated import AcceleratedAverage

        return AcceleratedAverage(ring, kind=str(self), penalty=self.penalty)
