"""Round-to-nearest quantisation of a model's weights, to see how much quality survives it."""

import contextlib
import re
from collections.abc import Iterator

import torch
from torch import Tensor, nn

__all__ = ["is_rounded", "quantized", "rounded_name"]


@contextlib.contextmanager
def quantized(model: nn.Module, bits: int) -> Iterator[None]:
    """Round every matrix of a model to `bits` bits in the block, with one scale per output row.

    >>> model = nn.Linear(3, 1, bias=False)
    >>> _ = model.weight.data.copy_(torch.tensor([[7.0, 0.4, -3.6]]))
    >>> with quantized(model, bits=4):
    ...     model.weight.tolist()
    [[7.0, 0.0, -4.0]]
    """
    matrices = [p.detach() for p in model.parameters() if p.ndim >= 2]
    own = [weight.clone() for weight in matrices]
    try:
        for weight in matrices:
            weight.copy_(_rounded(weight, bits))
        torch.clear_autocast_cache()  # which may hold the weights in bfloat16
        yield
    finally:
        torch._foreach_copy_(matrices, own)
        torch.clear_autocast_cache()


def rounded_name(metric: str, bits: int) -> str:
    """The name of a metric of rounded weights.

    >>> rounded_name("test_loss", 8)
    'test_8bit_loss'
    """
    head, _, kind = metric.rpartition("_")
    return f"{head}_{bits}bit_{kind}"


def is_rounded(metric: str) -> bool:
    """Whether a metric is one of rounded weights."""
    return re.search(r"_[0-9]+bit_", metric) is not None


def _rounded(weight: Tensor, bits: int) -> Tensor:
    largest = 2 ** (bits - 1) - 1
    rows = weight.flatten(1)
    scale = rows.abs().amax(1, keepdim=True).clamp(min=1e-12) / largest
    rounded: Tensor = (rows / scale).round() * scale
    return rounded.view_as(weight)
