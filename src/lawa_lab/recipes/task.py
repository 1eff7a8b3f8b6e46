"""What a recipe provides to the training loop: a model, batches, a loss, an evaluation."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import torch
from torch import Tensor, nn

from torch_lawa.ranks import barrier

__all__ = ["CALIBRATION_EPOCH", "Batch", "Task", "Worker", "mixed_seed", "seeded"]

# The epoch that calibration batches are drawn from: beyond the epochs of any run.
CALIBRATION_EPOCH = 2**31

# The first dimension of every tensor of a batch is the example.
Batch: TypeAlias = Sequence[Tensor]


@dataclass(frozen=True)
class Worker:
    """One training process: its device, its rank, and the number of ranks."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    rank: int = 0
    world_size: int = 1

    def share(self, batch_size: int) -> slice:
        """The part of a batch that this rank processes."""
        own = batch_size // self.world_size
        return slice(self.rank * own, (self.rank + 1) * own)

    def barrier(self, where: str) -> None:
        """Wait for all ranks; an error names the missing ranks and `where` they were expected."""
        if self.world_size > 1:
            barrier.barrier(where)

    def total(self, values: Sequence[float], where: str) -> list[float]:
        """The sums of values over all ranks; `where` is for errors, as in `barrier`."""
        if self.world_size == 1:
            return list(values)
        self.barrier(where)
        sums = torch.tensor(values, dtype=torch.float64, device=self.device)
        torch.distributed.all_reduce(sums)
        return sums.tolist()


class Task(Protocol):
    """One recipe with its data loaded.

    Everything random is drawn from a generator that `seeded` makes from the seed and the step, so
    that a resumed run continues with exactly the batches it would have had.
    """

    num_batches: int
    """Steps per epoch."""

    metrics: tuple[str, ...]
    """The names of the values that `evaluate` returns, known before the first evaluation."""

    strict: bool
    """Whether every operation of a step has a deterministic algorithm, which is then required."""

    def build_model(self) -> nn.Module:
        """A new model; the global generator has been seeded."""
        ...

    def batches(self, epoch: int, first: int = 0) -> Iterator[Batch]:
        """This rank's part of every batch of an epoch (from 0), starting with batch `first`."""
        ...

    def calibration(self) -> Sequence[Batch]:
        """Batches to re-estimate BatchNorm with: the same at every call and on every rank."""
        ...

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The mean loss of a batch."""
        ...

    def evaluate(self, model: nn.Module) -> Mapping[str, float]:
        """Named values on held-out data, equal on every rank.

        Names end in `_loss` (lower is better) or `_accuracy` (higher is better).
        """
        ...


def mixed_seed(*numbers: int) -> int:
    """One seed that depends on all the numbers; seeds of similar numbers are unrelated.

    >>> mixed_seed(1, 2) == mixed_seed(1, 2), mixed_seed(1, 2) == mixed_seed(2, 1)
    (True, False)
    """
    mixed = 0x9E3779B97F4A7C15
    for number in numbers:  # one splitmix64 round each
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
