"""The samples that will make up the next snapshot of a window."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from torch_lawa.coefficients import Coefficients, StepCoefficients, Weights, weights_at
from torch_lawa.mean.blocks import divide

__all__ = ["Block", "BlockMean", "summed_dtype"]


@dataclass(frozen=True)
class Block:
    """The samples of an incomplete snapshot, as they are saved."""

    count: int
    step: int  # of the newest one
    total: dict[str, Tensor]  # their sum


@dataclass(frozen=True)
class _Facts:
    """What the tensors of a block are: changed in one step."""

    count: int = 0  # samples
    key: object = None  # the snapshot that they will be
    step: int = 0  # of the newest sample
    divided: bool = False  # whether the tensors are the mean, and not the sum


class BlockMean:
    """The sum of the samples since the newest snapshot, on the device of the model.

    `size` samples make a snapshot. The sum is in float32, or in the tensors' own dtype if that is
    wider; it is only added to, so that the bits are the same on every device and in every shard.
    A `key` says which snapshot the samples will be: with the key of the next one the block is
    empty, whatever happened in between.

    >>> block = BlockMean(size=2)
    >>> for step, value in ((10, 1.0), (20, 4.0)):
    ...     block.add({"w": torch.tensor([value])}, key="first", step=step)
    >>> block.count("first"), block.mean()["w"], block.count("second")
    (2, tensor([2.5000]), 0)
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._tensors: dict[str, Tensor] = {}
        self._facts = _Facts()

    def count(self, key: object) -> int:
        """How many samples there are for that snapshot."""
        return self._facts.count if self._facts.key == key else 0

    def step(self, key: object) -> int | None:
        """The step of the newest sample for that snapshot; None if there is none."""
        return self._facts.step if self.count(key) else None

    def add(self, tensors: Mapping[str, Tensor], *, key: object, step: int) -> None:
        """Add one sample. An interrupt on the way drops the samples of the block."""
        count = self.count(key)
        if count:
            self.sum()
        self._facts = _Facts()
        if count:
            self._tensors = {name: self._tensors[name].to(t.device) for name, t in tensors.items()}
            _add(self._tensors, tensors)
        else:
            self._begin(tensors)
        self._facts = _Facts(count + 1, key, step)

    def sum(self) -> dict[str, Tensor]:
        """The sum of the samples. It changes with the next one."""
        return self._turned(divided=False)

    def mean(self) -> dict[str, Tensor]:
        """The mean of the samples, in the same memory."""
        return self._turned(divided=True)

    def load(self, block: Block, key: object) -> None:
        """Continue with saved samples."""
        self._facts = _Facts()
        self._tensors = {name: tensor.clone() for name, tensor in block.total.items()}
        self._facts = _Facts(block.count, key, block.step)

    def carry(self, key: object, tensors: Mapping[str, Tensor]) -> None:
        """Keep the samples for another snapshot if it is one of such tensors, else drop them."""
        alike = _forms(self._tensors) == _forms(tensors)
        self._facts = replace(self._facts, key=key) if alike else _Facts()

    def saved(self, key: object) -> Block | None:
        """The samples for that snapshot, in live memory; None if there are none."""
        count = self.count(key)
        return Block(count, self._facts.step, self.sum()) if count else None

    def weights(self, rule: Coefficients, steps: Sequence[int], key: object) -> Weights:
        """The weights of the snapshots taken at `steps`, and last that of the block's sum.

        >>> from torch_lawa.coefficients import Uniform
        >>> block = BlockMean(size=4)
        >>> block.add({"w": torch.zeros(1)}, key=3, step=10)
        >>> block.weights(Uniform(), [4, 8], key=3)
        Weights(numerators=(4.0, 4.0, 1.0), divisor=9.0)
        """
        count, newest = self.count(key), self._facts.step
        if isinstance(rule, StepCoefficients):
            # One snapshot does not tell for how many steps it stands: as many as its samples take.
            length = (newest - steps[-1]) * self.size // count
            before = [max(0, steps[0] - length)] if len(steps) == 1 and steps[0] > 0 else []
            weights = weights_at(rule, [*before, *steps, newest])
            *snapshots, samples = weights.numerators[len(before) :]
            return Weights((*snapshots, samples / count), math.fsum((*snapshots, samples)))
        whole = rule.weights(len(steps))
        last = whole.numerators[-1]  # a sample counts as one of the newest snapshot's
        numerators = (*(self.size * weight for weight in whole.numerators), last)
        return Weights(numerators, self.size * whole.divisor + count * last)

    def _turned(self, *, divided: bool) -> dict[str, Tensor]:
        facts = self._facts
        if facts.divided != divided:
            self._facts = _Facts()
            for tensor in self._tensors.values():
                divide(tensor, facts.count, out=tensor) if divided else tensor.mul_(facts.count)
            self._facts = replace(facts, divided=divided)
        return self._tensors

    def _begin(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy the first sample, into the memory of the block before if that fits."""
        old, self._tensors = self._tensors, {}
        for name, tensor in tensors.items():
            dtype, mine = summed_dtype(tensor.dtype), old.get(name)
            form = tensor.shape, dtype, tensor.device
            if mine is None or (mine.shape, mine.dtype, mine.device) != form:
                mine = torch.empty_like(tensor, dtype=dtype)
            self._tensors[name] = mine.copy_(tensor)


def _add(sums: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    alike = [name for name, tensor in tensors.items() if tensor.dtype == sums[name].dtype]
    if alike:
        torch._foreach_add_([sums[name] for name in alike], [tensors[name] for name in alike])
    for name in tensors.keys() - set(alike):
        tensor = tensors[name]
        narrow = tensor.itemsize == 1  # float8: PyTorch does not add it to other dtypes
        sums[name].add_(tensor.to(sums[name].dtype) if narrow else tensor)


def summed_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the sum of samples of that dtype."""
    return torch.float32 if dtype.itemsize == 1 else torch.promote_types(dtype, torch.float32)


def _forms(tensors: Mapping[str, Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Shape, and dtype of the sum."""
    return {name: (tensor.shape, summed_dtype(tensor.dtype)) for name, tensor in tensors.items()}
