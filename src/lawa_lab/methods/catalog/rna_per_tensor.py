"""Regularised nonlinear acceleration with coefficients of its own for each tensor."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from lawa_lab.methods.registry import RingMethod, register_method
from torch_lawa.errors import ConfigError

if TYPE_CHECKING:
    from torch_lawa.averager import LatestWeightAverager
    from torch_lawa.averager_protocol import Averager

__all__ = ["RnaPerTensor"]


@register_method
@dataclass(frozen=True)
class RnaPerTensor(RingMethod):
    """As `rna`, but every tensor solves the least-squares problem for itself."""

    name: ClassVar[str] = "rna-per-tensor"
    typed: ClassVar[str] = "rna-per-tensor:PENALTY"

    penalty: float

    def __post_init__(self) -> None:
        if not (0 < self.penalty < float("inf")):
            raise ConfigError(f"{self}: write it as {self.typed}, such as rna-per-tensor:0.1")

    def read(self, ring: "LatestWeightAverager") -> "Averager":
        """Reads the run's own window."""
        from lawa_lab.methods.accelerated import PerTensorAcceleration

        return PerTensorAcceleration(ring, kind=str(self), penalty=self.penalty)
