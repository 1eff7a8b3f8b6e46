"""A running average of the weights on the model's device: EMA, SWA and their relatives."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from lawa_lab.vector import Vector
from torch_lawa.errors import NotReadyError
from torch_lawa.shards import local, reshard
from torch_lawa.swap import swapped

__all__ = ["RunningAverage", "averaged_parameters", "swapped_values"]


class RunningAverage:
    """After every step, moves the average towards the weights by a share `weight(step)`.

    It implements the library's `Averager` protocol. `1 / step` is the mean of all steps, a constant
    share after the first step an EMA. Where the share of step 1 is below 1, the average begins at
    the weights before it. Floating-point parameters are averaged, in their own dtype as in
    `torch.optim.swa_utils`; everything else, BatchNorm statistics included, is the model's own.

    >>> model = nn.Linear(1, 1, bias=False)
    >>> average = RunningAverage(model, lambda step: 1 / step, kind="mean")
    >>> for value in (1.0, 2.0, 6.0):
    ...     _ = model.weight.data.fill_(value)
    ...     _ = average.step(model)
    >>> with average.swapped_into(model):
    ...     model.weight.item()
    3.0
    """

    def __init__(self, model: nn.Module, weight: Callable[[int], float], *, kind: str) -> None:
        self._weight, self.kind = weight, kind
        # Now, since it may begin here, and a sharded checkpoint be loaded before the first step.
        self._average = averaged_parameters(model).clone()
        self.num_steps = 0  # that have been averaged

    @property
    def ready(self) -> bool:
        """Whether a step has been counted."""
        return self.num_steps > 0

    @torch.no_grad()
    def collect(self, model: nn.Module, *, step: int | None = None) -> None:
        """Move the average towards the model's weights."""
        self.num_steps += 1
        weights, share = averaged_parameters(model), self._weight(self.num_steps)
        if share == 1.0:
            self._average.copy_(weights)
        else:
            self._average.lerp_(weights, share)

    def step(self, model: nn.Module, *, loss: float | None = None) -> bool:
        """Count one optimizer step; every one of them is averaged."""
        self.collect(model)
        return True

    def restart(self) -> None:
        """Begin a new average with the next step."""
        self.num_steps = 0

    def swapped_into(self, model: nn.Module) -> AbstractContextManager[None]:
        """Swap the average into the model; weights and buffers are restored on any exit."""
        self._require_ready()
        weights = averaged_parameters(model)
        return swapped(model, weights.locals(), lambda: weights.copy_(self._average))

    def average(self) -> dict[str, Tensor]:
        """A copy of the averaged parameters."""
        self._require_ready()
        return self._average.clone().tensors

    def state_dict(self) -> dict[str, Any]:
        """The average and the number of steps."""
        return {"average": self._average.state_dict(), "num_steps": self.num_steps}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state."""
        self._average.load_state_dict(state.get("average", {}), self.kind)
        self.num_steps = int(state["num_steps"])

    def _require_ready(self) -> None:
        if not self.ready:
            raise NotReadyError(f"{self.kind}: no step has been averaged yet; call step() first.")


def averaged_parameters(model: nn.Module) -> Vector:
    """Every floating-point parameter once, also if it is tied."""
    reshard(model)  # FSDP2 may leave parameters gathered after a forward pass
    return Vector({name: p for name, p in model.named_parameters() if p.is_floating_point()})


def swapped_values(model: nn.Module, values: Mapping[str, Tensor]) -> AbstractContextManager[None]:
    """Swap values of some of a model's parameters into it, by their names."""
    targets = {name: local(p.detach()) for name, p in model.named_parameters() if name in values}

    @torch.no_grad()
    def write() -> None:
        for name, target in targets.items():
            target.copy_(local(values[name]))

    return swapped(model, targets, write)
