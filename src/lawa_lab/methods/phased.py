"""Weights that favour recent snapshots while that is better, and count all alike later."""

from collections.abc import Sequence

from lawa_lab.methods.fitting import FittingData
from lawa_lab.methods.ring import RingAverage
from lawa_lab.methods.rules import Recency

__all__ = ["PhasedAverage"]


class PhasedAverage(RingAverage):
    """Of the uniform mean and the one that weights snapshot i by i, the better on validation."""

    def chosen(self, data: FittingData, n: int) -> Sequence[float]:
        """Measure both."""
        losses: dict[tuple[float, ...], float] = {}
        for power in (0.0, 1.0):  # equal losses: uniform
            weights = Recency(power).weights(n).numerators
            with self.swapped(data.model, weights):
                losses[weights] = data.validate()
        return min(losses, key=losses.__getitem__)
