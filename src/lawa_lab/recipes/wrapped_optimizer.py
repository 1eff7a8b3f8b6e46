"""An optimizer with its wrappers: one step, in which each of them has its part."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lawa_lab.recipes.task import Worker
from lawa_lab.vector import Vector
from lawa_lab.wrappers.base import BuiltWrapper, Step
from lawa_lab.wrappers.registry import Wrapper
from torch_lawa.averager import LatestWeightAverager
from torch_lawa.shards import local, reshard
from torch_lawa.spike_rescue import go_to_average

__all__ = ["WrappedOptimizer"]


class _Skipped(Exception):  # not an error
    """The rest of a step is left out."""


class WrappedOptimizer:
    """Takes the steps of a run; to its wrappers it is the `WrappedRun`."""

    def __init__(
        self,
        wrappers: Sequence[Wrapper],
        model: nn.Module,
        optimizer: Optimizer,
        averager: LatestWeightAverager,
        worker: Worker,
    ) -> None:
        self.model, self.optimizer, self.averager, self._worker = model, optimizer, averager, worker
        self.weights = Vector(dict(model.named_parameters()))
        self.rate_share = 1.0
        self.loss = torch.zeros((), dtype=torch.float64, device=worker.device)
        self.built: dict[str, BuiltWrapper] = {
            f"wrapper {wrapper.name}": wrapper.build(self) for wrapper in wrappers
        }
        step: Step = self._plain_step
        for wrapper in self.built.values():  # the first is the innermost
            step = functools.partial(wrapper.step, inner=step)
        self._step = step

    @property
    def facts(self) -> dict[str, int]:
        """What rows say about the run so far."""
        return {name: fact for built in self.built.values() for name, fact in built.facts.items()}

    def step(self, gradient: Callable[[], Tensor], *, rate_share: float) -> Tensor | None:
        """One optimizer step; `gradient` computes gradients and returns the loss.

        Returns the loss of its first call, at the weights before the step; None if the step was
        skipped.
        """
        if self.built:
            reshard(self.model)  # an evaluation may have left parameters gathered
        self.rate_share = rate_share
        losses: list[Tensor] = []

        def compute() -> None:
            loss = gradient()
            if not losses:
                losses.append(loss)
                self.loss = loss

        with torch.no_grad():
            try:
                self._step(torch.enable_grad()(compute))
            except _Skipped:
                for wrapper in self.built.values():
                    wrapper.restart()
                return None
        return losses[0]

    def _plain_step(self, gradient: Callable[[], None]) -> None:
        gradient()
        self.optimizer.step()

    # What wrappers may use, beside the attributes: see `WrappedRun`

    def gradients(self) -> Vector:
        """The gradients themselves, of the parameters that have one."""
        named = self.model.named_parameters()
        return Vector({name: p.grad for name, p in named if p.grad is not None})

    @contextlib.contextmanager
    def preserved_buffers(self) -> Iterator[None]:
        """Restore the buffers after the block."""
        buffers = [local(buffer) for buffer in self.model.buffers()]
        before = [buffer.clone() for buffer in buffers]
        try:
            yield
        finally:
            for buffer, value in zip(buffers, before, strict=True):
                buffer.copy_(value)

    def mean_loss(self) -> float:
        """The loss of this step, the mean over all ranks."""
        [total] = self._worker.total([float(self.loss)], "the loss of a step")
        return total / self._worker.world_size

    def skip(self) -> NoReturn:
        """End this step with the weights as they are; its loss does not count."""
        raise _Skipped

    def go_to_average(self) -> None:
        """Make the weights the average of the run's window; buffers stay."""
        with self.preserved_buffers():
            go_to_average(self.model, self.averager)

    def reset_optimizer(self) -> None:
        """Forget the momentum and the like."""
        self.optimizer.state.clear()
