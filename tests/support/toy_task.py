"""A regression in float64 that any number of ranks trains alike, and its trajectory."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lawa_lab.recipes.config import TrainConfig
from lawa_lab.recipes.parallel import ParallelName
from lawa_lab.recipes.run_folder import RunPlan
from lawa_lab.recipes.task import Batch, Worker, seeded
from lawa_lab.recipes.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class ToyConfig(TrainConfig):
    recipe: ClassVar[str] = "toy"
    about: ClassVar[str] = "A toy."
    smoke_values: ClassVar[dict[str, Any]] = {}

    epochs: int | float = 4
    batch_size: int = 8
    learning_rate: float = 0.1
    weight_decay: float = 0.0
    schedule: Any = "constant"
    nu: int | None = 4
    ks: tuple[int, ...] = (2,)

    def make_task(self, data: Path | None, *, seed: int, worker: Worker, smoke: bool) -> "ToyTask":
        return ToyTask(worker)


class ToyTask:
    """`poisoned` steps have targets that are no numbers."""

    num_batches = 6
    metrics: tuple[str, ...] = ("test_loss",)
    strict = True

    def __init__(self, worker: Worker, poisoned: tuple[int, ...] = ()) -> None:
        self._worker, self._poisoned = worker, poisoned

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()

    def batches(self, epoch: int, first: int = 0) -> Iterator[Batch]:
        for number in range(first, self.num_batches):
            step = epoch * self.num_batches + number
            share = self._worker.share(8)
            yield tuple(tensor[share] for tensor in toy_batch(step, step in self._poisoned))

    def calibration(self) -> list[Batch]:
        return []

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        inputs, targets = batch
        return (model(inputs) - targets).square().mean()

    def evaluate(self, model: nn.Module) -> Mapping[str, float]:
        return {"test_loss": float(self.loss(model, toy_batch(1000)))}


def toy_batch(step: int, poisoned: bool = False) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(8, 3, generator=seeded(torch.device("cpu"), 7, step), dtype=torch.float64)
    targets = inputs.sin().sum(1, keepdim=True) + 2
    return inputs, targets * math.nan if poisoned else targets


def toy_gradient(weights: list[Tensor], step: int) -> list[Tensor]:
    """The gradient of the toy's loss, without a module, a trainer or an optimizer."""
    free = [w.clone().requires_grad_() for w in weights]
    inputs, targets = toy_batch(step)
    first, bias, second, last = free
    outputs = (inputs @ first.T + bias).tanh() @ second.T + last
    return list(torch.autograd.grad((outputs - targets).square().mean(), free))


def toy_trainer(
    *,
    worker: Worker | None = None,
    parallel: ParallelName = "ddp",
    poisoned: tuple[int, ...] = (),
    **settings: Any,
) -> Trainer:
    """A trainer of the toy, before its first step."""
    plan, worker = RunPlan(config=ToyConfig(**settings)), worker or Worker()
    return Trainer(plan, ToyTask(worker, poisoned), worker, parallel=parallel)


def train_until(trainer: Trainer, last: int | None = None) -> None:
    """Train and collect as the loop does, up to a step or the end."""
    for batch in trainer.batches():
        trainer.train_step(batch)
        if trainer.averager.schedule.due(trainer.step):
            trainer.collect()
        if trainer.step == last:
            return


def toy_run(**settings: Any) -> tuple[list[Tensor], list[Tensor], Trainer]:
    """The weights before and after a run, whole, and its trainer."""
    trainer = toy_trainer(**settings)
    start = whole_weights(trainer)
    train_until(trainer)
    return start, whole_weights(trainer), trainer


def whole_weights(trainer: Trainer) -> list[Tensor]:
    parameters = trainer.model.parameters()
    full = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in parameters]
    return [p.detach().clone() for p in full]
