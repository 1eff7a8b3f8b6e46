"""Bias-corrected exponential moving average (BEMA, Block and Zhang, 2025)."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from lawa_lab.methods.running_average import RunningAverage, averaged_parameters
from torch_lawa.errors import NotReadyError
from torch_lawa.shards import local
from torch_lawa.swap import swapped

__all__ = ["BemaAverage"]

_LAG = 10.0  # rho


class BemaAverage(RunningAverage):
    """An EMA with a growing memory, plus `(rho + t)^-eta` times the way from the start.

    An EMA lags behind a run that still moves; the second term corrects for it. The EMA begins at
    the start too, and moves to the weights by `(rho + t)^-kappa` in step t.
    """

    def __init__(self, model: nn.Module, *, kappa: float, eta: float, kind: str) -> None:
        super().__init__(model, lambda step: (_LAG + step) ** -kappa, kind=kind)
        self._eta = eta
        self._start = averaged_parameters(model).clone()

    def swapped_into(self, model: nn.Module) -> AbstractContextManager[None]:
        """Swap in the EMA, corrected by the way from the start to the model's own weights."""
        mean, share = super().average(), (_LAG + self.num_steps) ** -self._eta
        weights, start = averaged_parameters(model).locals(), self._start.locals()

        @torch.no_grad()
        def write() -> None:
            for name, weight in weights.items():
                weight.copy_(local(mean[name]) + share * (weight - start[name]))

        return swapped(model, weights, write)

    def average(self) -> dict[str, Tensor]:
        """The model's own weights are needed: use `swapped_into`."""
        raise NotReadyError(f"{self.kind}: read the average with swapped_into(model).")

    def state_dict(self) -> dict[str, Any]:
        """Also the weights at the start."""
        return {**super().state_dict(), "start": self._start.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state."""
        super().load_state_dict(state)
        self._start.load_state_dict(state["start"], self.kind)
