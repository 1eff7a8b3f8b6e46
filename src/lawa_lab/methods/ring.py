"""Methods that weight the snapshots of a window which somebody else fills.

They keep numbers, not tensors: any number of them share one window. All of them decide in `fit`,
which a run calls before each evaluation, so the weights belong to the snapshots of that moment.
"""

import abc
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lawa_lab.methods.fitting import FittingData
from torch_lawa.averager import LatestWeightAverager
from torch_lawa.coefficients import Recency, Weights
from torch_lawa.errors import ConfigError, NotReadyError, StateError

__all__ = [
    "PhasedAverage",
    "RingAverage",
    "RingWeights",
    "SampledAverage",
    "gram_matrices",
    "snapshots_of",
]

_CHUNK = 1 << 16  # values of each snapshot at a time


@dataclass(frozen=True)
class RingWeights:
    """Weights of the snapshots, oldest first, of any sign; they are divided by their sum.

    >>> RingWeights((0.0, 1.0, 1.0)).weights(3)
    Weights(numerators=(0.0, 1.0, 1.0), divisor=2.0)
    """

    values: tuple[float, ...]

    def weights(self, n: int) -> Weights:
        """As many as were given."""
        if n != len(self.values):
            raise ConfigError(f"{len(self.values)} weights for {n} snapshots")
        return Weights(self.values, math.fsum(self.values))


class RingAverage(abc.ABC):
    """A weighted mean of the newest snapshots of a window, as an `Averager`.

    After more snapshots were collected, the weights are those of the newest ones until the next
    `fit`.
    """

    def __init__(self, ring: LatestWeightAverager, *, kind: str, least: int = 1) -> None:
        self.ring, self.kind, self._least = ring, kind, least
        self.weights: tuple[float, ...] = ()

    @abc.abstractmethod
    def chosen(self, data: FittingData, n: int) -> Sequence[float]:
        """The weights of the n newest snapshots, oldest first."""

    def fit(self, data: FittingData) -> None:
        """Weight the snapshots that the window averages now; nothing if they are too few."""
        n = self.ring.num_averaged
        if self.ring.ready and n >= self._least:
            self.weights = tuple(float(weight) for weight in self.chosen(data, n))

    @property
    def ready(self) -> bool:
        """Whether snapshots have been weighted."""
        return bool(self.weights)

    def collect(self, model: nn.Module, *, step: int | None = None) -> None:
        """Nothing to do: the window collects."""
        return

    def step(self, model: nn.Module, *, loss: float | None = None) -> bool:
        """Nothing to do: the window collects."""
        return False

    def swapped_into(self, model: nn.Module) -> AbstractContextManager[None]:
        """Swap the weighted mean into the model."""
        return self.swapped(model, self._required())

    def swapped(self, model: nn.Module, weights: Sequence[float]) -> AbstractContextManager[None]:
        """Swap the mean with these weights into the model."""
        rule = RingWeights(tuple(weights))
        return self.ring.swapped_into(model, len(weights), coefficients=rule)

    def average(self) -> dict[str, Tensor]:
        """The weighted mean."""
        weights = self._required()
        return self.ring.average(len(weights), coefficients=RingWeights(weights))

    def state_dict(self) -> dict[str, Any]:
        """The weights as one string, whose key is there before the first `fit`, too."""
        return {"weights": json.dumps(self.weights)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state."""
        try:
            self.weights = tuple(float(weight) for weight in json.loads(state["weights"]))
        except (KeyError, TypeError, ValueError) as error:
            raise StateError(f"this is not the state of {self.kind} ({error!r})") from None

    def _required(self) -> tuple[float, ...]:
        if not self.ready:
            raise NotReadyError(
                f"{self.kind}: no snapshots were weighted yet; call fit(data) when the window has "
                f"at least {self._least}."
            )
        return self.weights


class PhasedAverage(RingAverage):
    """Of the uniform mean and the one that weights snapshot i by i, the better on validation.

    Weights that favour recent snapshots are better early in a run.
    """

    validates = True

    def chosen(self, data: FittingData, n: int) -> Sequence[float]:
        """Measure both."""
        losses: dict[tuple[float, ...], float] = {}
        for power in (0.0, 1.0):  # equal losses: uniform
            weights = Recency(power).weights(n).numerators
            with self.swapped(data.model, weights):
                losses[weights] = data.validate()
        return min(losses, key=losses.__getitem__)


class SampledAverage(RingAverage):
    """A SWAG sample: weights drawn around the mean of the snapshots, always those of one seed."""

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


def snapshots_of(ring: LatestWeightAverager, n: int) -> list[dict[str, Tensor]]:
    """The n newest snapshots, oldest first, as views: read them before the next one is collected.

    >>> ring = LatestWeightAverager(k=2)
    >>> for value in (1.0, 2.0, 4.0):
    ...     ring.collect({"w": torch.full((1,), value)})
    >>> [snapshot["w"].item() for snapshot in snapshots_of(ring, 2)]
    [2.0, 4.0]
    """
    state = ring.state_dict()
    if "snapshots" not in state:
        raise ConfigError("this method needs whole weights on each rank: train without fsdp.")
    return [snapshot["tensors"] for snapshot in state["snapshots"][-n:]]


def gram_matrices(ring: LatestWeightAverager, n: int) -> Iterator[tuple[str, Tensor]]:
    """For each tensor, the scalar products of the snapshots' deviations from their mean.

    They are float64 and computed in one pass, a chunk of every snapshot at a time.
    """
    snapshots = snapshots_of(ring, n)
    for name in snapshots[0]:
        flats = [snapshot[name].reshape(-1) for snapshot in snapshots]
        total = torch.zeros(n, n, dtype=torch.float64)
        for start in range(0, flats[0].numel(), _CHUNK):
            rows = torch.stack([flat[start : start + _CHUNK].double() for flat in flats])
            rows -= rows.mean(0)
            total += (rows @ rows.T).cpu()
        yield name, total
