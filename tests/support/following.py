"""A made-up run that every method can follow: weights that move, a window, data to fit to."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lawa_lab.methods.fitting import Fitted, FittingData
from lawa_lab.methods.registry import Method, RingMethod
from torch_lawa import Averager, LatestWeightAverager

STEPS, K, EVERY = 32, 4, 3  # steps of the run, snapshots of the window, steps between them
FITS = (10, 22, 32)  # the steps after which methods are fitted


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.reshape(-1) for parameter in model.parameters()])


def numbers(seed: int, size: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=size)


def position(step: int, size: int) -> np.ndarray:
    """The weights after a step: noise around a curve, in float32."""
    return (numbers(step, size) + 8 * 0.9**step * numbers(999, size)).astype(np.float32)


def goal(size: int) -> np.ndarray:
    return 0.3 * numbers(777, size)


def target(number: int, size: int) -> np.ndarray:
    return 0.3 * numbers(777, size) + 0.1 * numbers(10_000 + number, size)


def validation_loss(weights: np.ndarray) -> float:
    return float(np.square(weights.astype(np.float64) - goal(weights.size)).sum())


def move(model: nn.Module, step: int) -> None:
    values = torch.from_numpy(position(step, flat(model).numel()))
    with torch.no_grad():
        for parameter, part in zip(
            model.parameters(), values.split([p.numel() for p in model.parameters()]), strict=True
        ):
            parameter.copy_(part.view(parameter.shape))


def data_for(model: nn.Module) -> FittingData:
    """The loss of a batch is half the squared distance from it, so that gradients are simple."""
    size = flat(model).numel()

    def batches() -> Iterator[Sequence[Tensor]]:
        return ([torch.from_numpy(target(i, size)).float()] for i in itertools.count())

    return FittingData(
        model,
        batches,
        lambda batch: (flat(model) - batch[0]).square().sum() / 2,
        lambda: validation_loss(flat(model).detach().numpy()),
    )


@dataclass
class Following:
    """A method that follows the run, alone with its window."""

    method: Method
    model: nn.Module = field(default_factory=net)
    step: int = 0
    ring: LatestWeightAverager = field(
        default_factory=lambda: LatestWeightAverager(K, min_snapshots=1)
    )

    def __post_init__(self) -> None:
        self.averager: Averager = (
            self.method.read(self.ring)
            if isinstance(self.method, RingMethod)
            else self.method.build(self.model)
        )

    def go(self, until: int = STEPS) -> "Following":
        while self.step < until:
            self.step += 1
            move(self.model, self.step)
            if self.step % EVERY == 0:
                self.ring.collect(self.model, step=self.step)
            self.averager.step(self.model)
            if self.step in FITS and isinstance(self.averager, Fitted):
                self.averager.fit(data_for(self.model))
        return self

    def state_dict(self) -> dict[str, Any]:
        return {"ring": self.ring.state_dict(), "averager": self.averager.state_dict()}

    def load_state_dict(self, state: dict[str, Any], step: int) -> None:
        self.ring.load_state_dict(state["ring"])
        self.averager.load_state_dict(state["averager"])
        self.step = step

    def served(self) -> np.ndarray:
        with self.averager.swapped_into(self.model):
            return flat(self.model).detach().numpy().copy()
