"""A SWAG sample of a window as a method beside its mean."""

from collections.abc import Sequence
from contextlib import AbstractContextManager

from torch import Tensor, nn

from lawa_lab.methods.fitting import FittingData
from lawa_lab.methods.ring import RingAverage
from torch_lawa.averager import LatestWeightAverager

__all__ = ["SampledAverage"]


class SampledAverage(RingAverage):
    """Weights drawn around the mean of the snapshots; always those of one seed."""

    def __init__(self, ring: LatestWeightAverager, *, kind: str, seed: int, scale: float) -> None:
        super().__init__(ring, kind=kind, least=2)
        self._seed, self._scale = seed, scale

    def chosen(self, data: FittingData, n: int) -> Sequence[float]:
        """All snapshots count the same."""
        return [1.0] * n

    def swapped_into(self, model: nn.Module) -> AbstractContextManager[None]:
        """Swap the sample into the model."""
        n = len(self._required())
        return self.ring.sampled_into(model, n, seed=self._seed, scale=self._scale)

    def average(self) -> dict[str, Tensor]:
        """The sample."""
        return self.ring.sample(len(self._required()), seed=self._seed, scale=self._scale)
