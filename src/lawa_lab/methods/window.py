"""A window of the latest snapshots as a method beside a run's own window."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from lawa_lab.methods.running_average import RunningAverage, swapped_values
from torch_lawa.averager import LatestWeightAverager
from torch_lawa.coefficients import Explicit
from torch_lawa.shards import local
from torch_lawa.stores.memory import DeviceStore

__all__ = ["DenseWindow", "WindowMethod"]


class WindowMethod:
    """A `LatestWeightAverager` with a horizon under a name of its own; one row per evaluation."""

    def __init__(self, model: nn.Module, *, k: int, share: float, blend: float, kind: str) -> None:
        self.kind = kind
        # The snapshots of a method that is compared must not slow down the run by host copies.
        self._window = LatestWeightAverager(
            k, horizon=share, blend=None if blend == 1.0 else blend, store=DeviceStore()
        )

    @property
    def ready(self) -> bool:
        """Whether there is a snapshot."""
        return self._window.ready

    def collect(self, model: nn.Module, *, step: int | None = None) -> None:
        """Take a snapshot."""
        self._window.collect(model, step=step)

    def step(self, model: nn.Module, *, loss: float | None = None) -> bool:
        """Count one step and take a snapshot if one is due."""
        return self._window.step(model, loss=loss)

    def swapped_into(self, model: nn.Module) -> AbstractContextManager[None]:
        """Swap in the mean, or its blend with the model's own weights."""
        return self._window.swapped_into(model)

    def average(self) -> dict[str, Tensor]:
        """The mean of the window."""
        return self._window.average()

    def state_dict(self) -> dict[str, Any]:
        """The window's."""
        return self._window.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state."""
        self._window.load_state_dict(state)


class DenseWindow(WindowMethod):
    """A window over every step: each snapshot is the mean of the steps since the one before.

    The steps since the newest snapshot count as well, so the average is never behind the run.
    """

    def __init__(self, model: nn.Module, *, k: int, share: float, kind: str) -> None:
        super().__init__(model, k=k, share=share, blend=1.0, kind=kind)
        self._mean = RunningAverage(model, lambda step: 1.0 / step, kind=kind)
        self._num_steps = 0
        self._lengths: list[int] = []  # how many steps each snapshot of the window is the mean of

    def step(self, model: nn.Module, *, loss: float | None = None) -> bool:
        """Add a step to the mean; store the mean as a snapshot if one is due."""
        self._mean.step(model)
        self._num_steps += 1
        due = self._window.schedule.due(self._num_steps)
        if due:
            self._window.collect(self._mean.average(), step=self._num_steps)
            self._lengths = [*self._lengths, self._mean.num_steps][-self._window.k :]
            self._mean.restart()
        return due

    def swapped_into(self, model: nn.Module) -> AbstractContextManager[None]:
        """Swap in the mean of all steps of the window."""
        return swapped_values(model, self.average())

    @torch.no_grad()
    def average(self) -> dict[str, Tensor]:
        """The mean of all steps of the window."""
        lengths = self._lengths[-self._window.num_averaged :]
        mean = self._window.average(coefficients=Explicit(lengths))
        newest = self._mean.num_steps
        if newest:
            share = newest / (newest + sum(lengths))
            for name, tensor in self._mean.average().items():
                local(mean[name]).lerp_(local(tensor), share)
        return mean

    def state_dict(self) -> dict[str, Any]:
        """The window's, and the mean since its newest snapshot."""
        return {
            "window": super().state_dict(),
            "mean": self._mean.state_dict(),
            "lengths": list(self._lengths),
            "num_steps": self._num_steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state."""
        super().load_state_dict(state["window"])
        self._mean.load_state_dict(state["mean"])
        self._lengths = [int(length) for length in state["lengths"]]
        self._num_steps = int(state["num_steps"])
