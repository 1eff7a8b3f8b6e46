"""What a recipe brings to the loop: a model, batches, a loss, an evaluation."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from torch_lawa.ranks.barrier import barrier

__all__ = ["Batch", "MakeTask", "Place", "Task", "mixed_seed", "seeded"]

# Examples first: every tensor of a batch has one row for each.
Batch: TypeAlias = Sequence[Tensor]


@dataclass(frozen=True)
class Place:
    """Where one process trains: its device, and which of how many it is."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    rank: int = 0
    world_size: int = 1

    def share(self, batch_size: int) -> slice:
        """The part of a batch that is this process's."""
        own = batch_size // self.world_size
        return slice(self.rank * own, (self.rank + 1) * own)

    def total(self, values: Sequence[float]) -> list[float]:
        """The sums of values over all processes."""
        if self.world_size == 1:
            return list(values)
        barrier(sys._getframe(1).f_code.co_qualname)  # who asks for a sum says where this is
        sums = torch.tensor(values, dtype=torch.float64, device=self.device)
        torch.distributed.all_reduce(sums)
        return sums.tolist()


class Task(Protocol):
    """One recipe, its data loaded.

    Everything random is drawn from a generator that `seeded` makes of the seed and the step, so
    that a run that was stopped goes on with the very batches it would have had.
    """

    num_batches: int
    """Steps in an epoch."""

    strict: bool
    """Whether all of a step has a repeatable algorithm: then that is insisted on."""

    def build_model(self) -> nn.Module:
        """A fresh model; the global generator has been seeded."""
        ...

    def batches(self, epoch: int, first: int = 0) -> Iterator[Batch]:
        """This process's part of every batch of an epoch (from 0), from batch `first` on."""
        ...

    def calibration(self) -> Sequence[Batch]:
        """Batches to re-estimate BatchNorm with: the same ones at every call, in any process."""
        ...

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The mean loss of a batch."""
        ...

    def evaluate(self, model: nn.Module) -> Mapping[str, float]:
        """Named values on held-out data, the same in every process.

        Names end in `_loss` (lower is better) or `_accuracy` (higher is).
        """
        ...


class MakeTask(Protocol):
    """`make_task` of a recipe's module."""

    def __call__(
        self, config: Any, data: Path | None, *, seed: int, place: Place, smoke: bool
    ) -> Task:
        """Load the data: from the folder `data`, or made up for a smoke run."""
        ...


def mixed_seed(*numbers: int) -> int:
    """One seed that depends on all the numbers; neighbours share nothing.

    >>> mixed_seed(1, 2) == mixed_seed(1, 2), mixed_seed(1, 2) == mixed_seed(2, 1)
    (True, False)
    """
    mixed = 0x9E3779B97F4A7C15
    for number in numbers:  # a splitmix64 round for each
        mixed = (mixed ^ number) + 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
        mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
        mixed ^= mixed >> 31
    return mixed & 0x7FFFFFFFFFFFFFFF


def seeded(device: torch.device, *numbers: int) -> torch.Generator:
    """A generator that depends on all the numbers, such as a seed, an epoch and a rank.

    >>> a, b = (torch.rand(2, generator=seeded(torch.device("cpu"), 1, n)) for n in (2, 3))
    >>> bool((a != b).all())
    True
    """
    return torch.Generator(device).manual_seed(mixed_seed(*numbers))
