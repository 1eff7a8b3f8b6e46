"""The average that a Schedule-Free optimizer keeps, as an `Averager`."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torch_lawa.errors import NotReadyError
from torch_lawa.swap import swapped

__all__ = ["ScheduleFreeAverage"]


class ScheduleFreeAverage:
    """The point x of Schedule-Free training, read without leaving the optimizer's training mode.

    The model holds y = (1 - beta) z + beta x, where z is the optimizer's iterate, so that
    x = y + (1 - 1/beta) (z - y), as the package's own `eval()` computes it. Swapping restores y to
    the bit, which `eval()` followed by `train()` does not. The state is the optimizer's.
    """

    kind = "schedule-free"

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    @property
    def ready(self) -> bool:
        """Whether a step has been taken."""
        return any("z" in state for state in self._optimizer.state.values())

    def collect(self, model: nn.Module, *, step: int | None = None) -> None:
        """Nothing to do: the optimizer averages."""

    def step(self, model: nn.Module, *, loss: float | None = None) -> bool:
        """Nothing to do: the optimizer averages."""
        return False

    def swapped_into(self, model: nn.Module) -> AbstractContextManager[None]:
        """Swap x into the model, then restore y."""
        return swapped(model, dict(model.named_parameters()), self._write)

    def average(self) -> dict[str, Tensor]:
        """The names of tensors are the model's, which is needed: use `swapped_into`."""
        raise NotReadyError("schedule-free: read the average with swapped_into(model).")

    def state_dict(self) -> dict[str, Any]:
        """Empty: everything is in the optimizer's state."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing to do."""

    @torch.no_grad()
    def _write(self) -> None:
        if not self.ready:
            raise NotReadyError("schedule-free: no step has been taken yet.")
        for group in self._optimizer.param_groups:
            beta = group["betas"][0] if "betas" in group else group["momentum"]
            for parameter in group["params"]:
                state = self._optimizer.state[parameter]
                if "z" in state:
                    parameter.lerp_(state["z"], 1 - 1 / beta)
