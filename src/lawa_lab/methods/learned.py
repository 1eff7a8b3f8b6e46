"""Trainable weight averaging (Li et al., 2023): gradient descent in the span of the snapshots."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lawa_lab.methods.fitting import FittingData
from lawa_lab.methods.ring import RingAverage, gram_matrices, snapshots_of
from torch_lawa.averager import LatestWeightAverager

__all__ = ["LearnedAverage"]

_RANK = 1e-10  # smaller eigenvalues, relative to the largest, are rounding errors


class LearnedAverage(RingAverage):
    """Starts from the mean and follows the projected gradients of training batches.

    An orthonormal basis P of the snapshots' deviations from their mean makes a step
    `theta -= rate * P^T (P g)`. It is never stored: its coordinates are combinations of the
    snapshots, so a step costs one product of the gradient with each snapshot. The rate falls
    linearly to 0.
    """

    def __init__(
        self, ring: LatestWeightAverager, *, kind: str, rate: float, num_batches: int
    ) -> None:
        super().__init__(ring, kind=kind, least=2)
        self._rate, self._num_batches = rate, num_batches

    def chosen(self, data: FittingData, n: int) -> Sequence[float]:
        """Train the coordinates from 0, the mean."""
        gram = torch.zeros(n, n, dtype=torch.float64)
        for _, part in gram_matrices(self.ring, n):
            gram += part
        squares, vectors = torch.linalg.eigh(gram)
        kept = squares > _RANK * squares[-1].clamp(min=torch.finfo(torch.float64).tiny)
        basis = vectors[:, kept] / squares[kept].sqrt()  # row i: how much of snapshot i
        at = torch.zeros(basis.shape[1], dtype=torch.float64)
        snapshots, batches = snapshots_of(self.ring, n), data.batches()
        for number in range(self._num_batches):
            weights = _weights(basis, at)
            products = self._products(data, weights, snapshots, next(batches))
            slope = torch.tensor(data.mean(products), dtype=torch.float64)
            rate = self._rate * (1 - number / self._num_batches)
            at -= rate * (basis.T @ (slope - slope.mean()))
        return _weights(basis, at)

    def _products(
        self,
        data: FittingData,
        weights: Sequence[float],
        snapshots: Sequence[dict[str, Tensor]],
        batch: Sequence[Tensor],
    ) -> list[float]:
        """The products of the gradient at the weighted mean with each snapshot."""
        parameters = {
            name: parameter
            for name, parameter in data.model.named_parameters()
            if parameter.requires_grad and name in snapshots[0]
        }
        with self.swapped(data.model, weights), torch.enable_grad():
            found = torch.autograd.grad(
                data.loss(batch), list(parameters.values()), allow_unused=True
            )
        gradients = {
            name: gradient.double()
            for name, gradient in zip(parameters, found, strict=True)
            if gradient is not None
        }
        products = [
            sum((snapshot[name].to(g.device).double() * g).sum() for name, g in gradients.items())
            for snapshot in snapshots
        ]
        return [float(product) for product in products]


def _weights(basis: Tensor, at: Tensor) -> list[float]:
    """The weights of the snapshots at a point of the basis around their mean; their sum is 1."""
    along = basis @ at
    weights: list[float] = (1 / len(along) + along - along.mean()).tolist()
    return weights
