"""Regularised nonlinear acceleration (Scieur et al., 2018): later weights from the past ones."""

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from lawa_lab.methods.fitting import FittingData
from lawa_lab.methods.ring import RingAverage, gram_matrices, snapshots_of
from lawa_lab.methods.running_average import swapped_values
from torch_lawa.averager import LatestWeightAverager
from torch_lawa.coefficients import Weights
from torch_lawa.mean.blocks import mean_reference

__all__ = ["AcceleratedAverage", "PerTensorAcceleration"]


def extrapolation_weights(gram: Tensor, penalty: float) -> list[float]:
    """Weights c of the snapshots, oldest first, from the products of their deviations.

    With R the differences of consecutive snapshots, c solves `(R^T R / |R^T R| + penalty I) c = 1`
    and is divided by its sum; c_i is the weight of the later snapshot of difference i. If the
    weights converged linearly, this combination would be their limit. A large penalty gives the
    uniform mean of all snapshots but the oldest.

    >>> points = torch.tensor([[8.0], [4.0], [2.0]], dtype=torch.float64)  # towards 0
    >>> weights = extrapolation_weights(points @ points.T, 1e-12)
    >>> round(abs((torch.tensor(weights, dtype=torch.float64) @ points).item()), 3)
    0.0
    """
    n = len(gram)
    step = torch.eye(n, dtype=torch.float64)[1:] - torch.eye(n, dtype=torch.float64)[:-1]
    residuals = step @ gram @ step.T
    norm = torch.linalg.matrix_norm(residuals, 2)
    if not norm > 0:
        return [0.0] * (n - 1) + [1.0]  # nothing moves
    eye = torch.eye(n - 1, dtype=torch.float64)
    solved = torch.linalg.solve(
        residuals / norm + penalty * eye, torch.ones(n - 1, dtype=torch.float64)
    )
    return [0.0, *(solved / solved.sum()).tolist()]


class AcceleratedAverage(RingAverage):
    """One set of weights for the whole model, from one n x n matrix."""

    def __init__(self, ring: LatestWeightAverager, *, kind: str, penalty: float) -> None:
        super().__init__(ring, kind=kind, least=3)
        self._penalty = penalty

    def chosen(self, data: FittingData, n: int) -> Sequence[float]:
        """From the snapshots alone: no data is used."""
        total = torch.zeros(n, n, dtype=torch.float64)
        for _, gram in gram_matrices(self.ring, n):
            total += gram
        return extrapolation_weights(total, self._penalty)


class PerTensorAcceleration(AcceleratedAverage):
    """Weights of its own for each tensor, by the same least-squares problem."""

    def __init__(self, ring: LatestWeightAverager, *, kind: str, penalty: float) -> None:
        super().__init__(ring, kind=kind, penalty=penalty)
        self._by_tensor: dict[str, list[float]] = {}

    def chosen(self, data: FittingData, n: int) -> Sequence[float]:
        """Those of every tensor; what is returned is used for nothing but the number."""
        self._by_tensor = {
            name: extrapolation_weights(gram, self._penalty)
            for name, gram in gram_matrices(self.ring, n)
        }
        return [1.0] * n

    def swapped_into(self, model: nn.Module) -> AbstractContextManager[None]:
        """Swap every tensor's own combination into the model."""
        return swapped_values(model, self._combined())

    def average(self) -> dict[str, Tensor]:
        """Every tensor's own combination; others are those of the newest snapshot."""
        return {**super().average(), **self._combined()}

    def state_dict(self) -> dict[str, Any]:
        """Also the weights of each tensor."""
        return {**super().state_dict(), "by_tensor": json.dumps(self._by_tensor)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state."""
        super().load_state_dict(state)
        self._by_tensor = json.loads(state["by_tensor"])

    def _combined(self) -> dict[str, Tensor]:
        snapshots = snapshots_of(self.ring, len(self._required()))
        return {
            name: mean_reference(
                [snapshot[name] for snapshot in snapshots],
                Weights(tuple(weights), 1.0),
                snapshots[0][name].dtype,
            )
            for name, weights in self._by_tensor.items()
        }
