"""Samples of weights around the mean of a window: SWAG (Maddox et al., 2019), block by block.

Mean, variance and deviations of SWAG's Gaussian are all in the window, so a sample costs one more
pass over its snapshots and no memory. The random number of an element depends on the seed, the name
of its tensor and its index in the whole tensor alone. Samples are therefore equal bit for bit
whatever the store, the size of blocks and the number of ranks.
"""

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from torch_lawa.errors import ConfigError, LayoutError, NotReadyError
from torch_lawa.mean.blocks import divide
from torch_lawa.shards import Sharding
from torch_lawa.stores.base import FlatEntry, FlatGroup
from torch_lawa.validation import whole_number

__all__ = ["Draw", "normal_numbers"]

_LEAST_VARIANCE = 1e-30  # as in the authors' code


@dataclass(frozen=True)
class Draw:
    """One sample: `mean + sqrt(scale) * (sqrt(var) * z1 + sum_i D_i * z2_i / sqrt(n - 1))`.

    `D_i` are the deviations of the n snapshots from their mean, `var` is the mean of their squares.
    The standard normal z1 has one number per element, z2 one per snapshot.

    Args:
        seed: Which sample; the same number gives the same one.
        scale: Scales the variance. SWAG's is 1/2, half for each of the two terms; 0 is the mean.
        shardings: What the tensors that this rank holds a shard of are shards of.
    """

    seed: int
    scale: float = 0.5
    shardings: Mapping[str, Sharding] = field(default_factory=dict)

    def __post_init__(self) -> None:
        whole_number("seed", self.seed, least=0)
        if not isinstance(self.scale, int | float) or not 0.0 <= self.scale < math.inf:
            raise ConfigError(
                f"scale={self.scale!r}: give the factor of the variance, a number of at least 0. "
                "SWAG uses 0.5."
            )

    def check(self, n: int) -> None:
        """Raise if so few snapshots have no spread."""
        if n < 2:
            raise NotReadyError(
                f"a sample is drawn from at least 2 snapshots, not from {n}: collect more, or "
                "request a larger k."
            )

    def around(
        self, means: Iterable[tuple[int, Tensor]], snapshots: Sequence[Tensor], group: FlatGroup
    ) -> Iterator[tuple[int, Tensor]]:
        """Turn float64 blocks of the mean of flat snapshots into blocks of the sample, in place."""
        n = len(snapshots)
        z2 = normal_numbers(_key(self.seed), torch.arange(n, device="cpu")).tolist()
        numbers = [_Numbers(entry, group, self) for entry in group.entries if entry.numel]
        for start, mean in means:
            stop = start + mean.numel()
            along, spread = torch.zeros_like(mean), torch.zeros_like(mean)
            deviation, term = torch.empty_like(mean), torch.empty_like(mean)
            for snapshot, z in zip(snapshots, z2, strict=True):
                deviation.copy_(snapshot[start:stop]).sub_(mean)
                # Multiply, then add: a fused operation has other bits at the end of a block.
                along.add_(torch.mul(deviation, z, out=term))
                spread.add_(torch.mul(deviation, deviation, out=term))
            divide(spread, float(n), out=spread).clamp_(min=_LEAST_VARIANCE).sqrt_()
            for each in numbers:
                each.multiply(spread, start, stop)
            spread.add_(divide(along, math.sqrt(n - 1), out=along))
            yield start, mean.add_(spread.mul_(math.sqrt(self.scale)))


class _Numbers:
    """The random numbers z1 of the elements of one tensor in a flat buffer."""

    def __init__(self, entry: FlatEntry, group: FlatGroup, draw: Draw) -> None:
        self._key = _key(draw.seed, entry.name)
        self._entry, self._parts = entry, 2 if group.dtype.is_complex else 1
        sharding = draw.shardings.get(entry.name)
        try:
            self._locate = None if sharding is None else sharding.positions(entry.shape)
        except LayoutError as error:
            raise LayoutError(f"tensor {entry.name!r}: {error}") from None

    def multiply(self, spread: Tensor, start: int, stop: int) -> None:
        """Multiply the tensor's part of a block from `start` to `stop` by its numbers."""
        begin = self._entry.offset * self._parts
        low, high = max(begin, start), min(begin + self._entry.numel * self._parts, stop)
        if low < high:
            indices = self._indices(low - begin, high - begin, spread.device)
            spread[low - start : high - start].mul_(normal_numbers(self._key, indices))

    def _indices(self, low: int, high: int, device: torch.device) -> Tensor:
        """Where these elements of the buffer are in the whole tensor, if it were contiguous."""
        flat = torch.arange(low, high, device=device)
        element = flat if self._parts == 1 else flat // self._parts
        dims = list(zip(self._entry.stride, self._entry.shape, strict=True))
        at = [element // max(stride, 1) % size for stride, size in dims]
        whole = torch.zeros_like(element)
        if self._locate is not None and at:
            whole = self._locate(at)
        else:
            for index, (_, size) in zip(at, dims, strict=True):
                whole = whole * size + index
        return whole if self._parts == 1 else whole * self._parts + flat % self._parts


def _key(seed: int, name: str | None = None) -> int:
    """A number below 2**63 for a seed and a tensor; without a name, for the numbers of snapshots.

    >>> _key(0, "weight") == _key(0, "bias"), _key(0, "weight") == _key(1, "weight")
    (False, False)
    """
    digest = hashlib.sha256(repr((seed, name)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def normal_numbers(key: int, indices: Tensor) -> Tensor:
    """Standard normal float64 numbers that depend on the key and each index alone.

    The bits of splitmix64 as a uniform number, then the inverse of the distribution function.

    >>> few, many = normal_numbers(7, torch.tensor([5])), normal_numbers(7, torch.arange(10))
    >>> bool(few[0] == many[5])
    True
    """
    bits = indices.mul(_signed(0x9E3779B97F4A7C15)).add_(key)  # int64 wraps around, as it should
    bits.bitwise_xor_(_shifted(bits, 30)).mul_(_signed(0xBF58476D1CE4E5B9))
    bits.bitwise_xor_(_shifted(bits, 27)).mul_(_signed(0x94D049BB133111EB))
    bits.bitwise_xor_(_shifted(bits, 31))
    # 52 bits and a half: never 0 or 1, and 2 u - 1 is exact.
    uniform = _shifted(bits, 12).double().add_(0.5).mul_(2.0**-51).sub_(1.0)
    return uniform.erfinv_().mul_(math.sqrt(2.0))


def _shifted(bits: Tensor, by: int) -> Tensor:
    """A logical shift to the right."""
    return (bits >> by).bitwise_and_((1 << (64 - by)) - 1)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number
