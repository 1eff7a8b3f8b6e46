"""The mean of flat snapshots: float64 sums, oldest first, one division, one rounding.

A float64 sum of k float32 (or narrower) values whose magnitudes are within a factor of 2**29 / k is
exact, so the result is the true mean, correctly rounded, in any order of summation. `mean_blocks`
is the fast version, `mean_reference` the plain one that it must equal bit for bit.
"""

import math
import warnings
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from torch_lawa.coefficients import Weights

__all__ = [
    "block_length",
    "divide",
    "mean_blocks",
    "mean_reference",
    "round_into",
    "warn_if_flushing",
]

# A block of float64 sums must stay in cache while k snapshots are added to it, and be long enough
# to hide the cost of a call: 2 MiB of sums on a CPU (measured: docs/decisions/0002). On a GPU they
# are memory that a swap needs on top of the model: 32 MiB. Four times that is 3 % faster from host
# memory and 13 % from device memory, but takes 0.4 copies of RoBERTa-Base with its staging.
_CPU_BLOCK = 1 << 18
_GPU_BLOCK = 1 << 22


def block_length(device: torch.device) -> int:
    """How many values to average at a time on `device`."""
    return _CPU_BLOCK if device.type == "cpu" else _GPU_BLOCK


def mean_reference(snapshots: Sequence[Tensor], weights: Weights, dtype: torch.dtype) -> Tensor:
    """The definition, on whole tensors: every other implementation must equal it bit for bit.

    >>> from torch_lawa.coefficients import Uniform
    >>> mean_reference([torch.ones(1), torch.zeros(1)], Uniform().weights(2), torch.float32)
    tensor([0.5000])
    """
    terms = [
        s.double() if w == 1.0 else s.double() * w
        for s, w in zip(snapshots, weights.numerators, strict=True)
        if w != 0.0
    ]
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    out = torch.empty(total.shape, dtype=dtype, device=total.device)
    round_into(out, total / torch.full_like(total, weights.divisor))
    return out


def mean_blocks(
    snapshots: Sequence[Tensor], weights: Weights, device: torch.device | None = None
) -> Iterator[tuple[int, Tensor]]:
    """Yield `(offset, float64 mean)` of flat snapshots, block by block.

    The yielded tensor is scratch memory: the next block overwrites it. With `device`, snapshots in
    host memory are copied there block by block and summed there.
    """
    used = [(s, w) for s, w in zip(snapshots, weights.numerators, strict=True) if w != 0.0]
    numel = snapshots[0].numel()
    device = snapshots[0].device if device is None else device
    length = min(block_length(device), numel)
    total = torch.empty(length, dtype=torch.float64, device=device)
    # A separate buffer for the weighted term: multiply, then add, each rounded, on any hardware.
    # A fused multiply-add would give different bits on different machines.
    # It also holds float8 values, which cannot be added to float64 directly.
    narrow = snapshots[0].element_size() == 1
    term = torch.empty_like(total) if narrow or not weights.uniform else total
    for start in range(0, numel, length):
        n = min(length, numel - start)
        acc, tmp = total[:n], term[:n]
        if not used:  # all the weight is that of values which are not in a snapshot
            acc.zero_()
        for i, (snapshot, w) in enumerate(used):
            block = snapshot[start : start + n]
            if block.device != device:
                block = block.to(device, non_blocking=True)
            if i == 0:
                acc.copy_(block)
                if w != 1.0:
                    acc.mul_(w)
            elif w != 1.0:
                acc.add_(tmp.copy_(block).mul_(w))
            elif narrow:
                acc.add_(tmp.copy_(block))
            else:
                acc.add_(block)
        yield start, divide(acc, weights.divisor, out=acc)


def divide(total: Tensor, divisor: float, *, out: Tensor) -> Tensor:
    """`total / divisor`, by multiplication if that gives the same bits at half the cost."""
    if math.frexp(divisor)[0] == 0.5:  # a power of two
        return torch.mul(total, 1.0 / divisor, out=out)
    if total.device.type == "cpu":
        return torch.div(total, divisor, out=out)
    # CUDA does not divide by a Python number: it multiplies by the reciprocal and rounds twice.
    return torch.div(
        total, torch.full((), divisor, dtype=total.dtype, device=total.device), out=out
    )


def round_into(out: Tensor, exact: Tensor) -> None:
    """Round float64 values to the dtype of `out`, once.

    PyTorch narrows float64 to 16 and 8 bits by way of float32, which rounds twice and can land on
    the wrong neighbour. Rounding to float32 *to odd* first makes the second rounding right.
    """
    if out.dtype in (torch.float32, torch.float64):
        out.copy_(exact)
        return
    single = exact.to(torch.float32)
    widened = single.double()
    bits = single.view(torch.int32)
    bits.sub_((widened.abs() > exact.abs()).int())  # truncate: one step towards zero
    bits.bitwise_or_((widened != exact).int())  # sticky: the last bit records what was cut off
    out.copy_(single)


def warn_if_flushing() -> None:
    """Warn if this thread flushes subnormal numbers to zero, and so loses them in a mean."""
    smallest = torch.full((1,), 2.0**-149, dtype=torch.float64, device="cpu").to(torch.float32)
    if smallest.double().item() == 0.0:
        warnings.warn(
            "this process flushes subnormal numbers to zero (torch.set_flush_denormal, or a "
            "library built with -ffast-math): weights below 1.2e-38 count as 0 in the mean. Call "
            "torch.set_flush_denormal(False) to average them exactly.",
            RuntimeWarning,
            stacklevel=2,
        )
