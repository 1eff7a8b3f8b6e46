"""References that share no code with the package: exact fractions, plain loops, small models."""

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor, nn

# dtype -> (bits of the significand, exponent of the smallest normal number)
FORMATS = {
    torch.float64: (53, -1022),
    torch.float32: (24, -126),
    torch.bfloat16: (8, -126),
    torch.float16: (11, -14),
    torch.float8_e4m3fn: (4, -6),
    torch.float8_e5m2: (3, -14),
}


def round_fraction(value: Fraction, dtype: torch.dtype) -> float:
    """The nearest number of `dtype`, ties to even, straight from the exact value."""
    if value == 0:
        return 0.0
    precision, smallest = FORMATS[dtype]
    exponent = 0
    size = abs(value)
    while size >= 2:
        size, exponent = size / 2, exponent + 1
    while size < 1:
        size, exponent = size * 2, exponent - 1
    quantum = Fraction(2) ** (max(exponent, smallest) - (precision - 1))
    return float(round(value / quantum) * quantum)


def true_mean(tensors: Sequence[Tensor], weights: Sequence[int] | None = None) -> list[Fraction]:
    """The mean as exact fractions, value by value."""
    weights = weights or [1] * len(tensors)
    columns = [t.double().flatten().tolist() for t in tensors]
    return [
        sum((w * Fraction(c[i]) for w, c in zip(weights, columns, strict=True)), Fraction(0))
        / sum(weights)
        for i in range(len(columns[0]))
    ]


def brute_force(tensors: Sequence[Tensor]) -> np.ndarray:
    """float64, oldest first, one division: NumPy and nothing else."""
    total = tensors[0].double().numpy().copy()
    for tensor in tensors[1:]:
        total = total + tensor.double().numpy()
    return total / len(tensors)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal dtype, shape and bytes, except that any NaN equals any other."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.is_floating_point():
        if not torch.equal(a.isnan(), b.isnan()):
            return False
        a, b = a.nan_to_num(0.0, torch.inf, -torch.inf), b.nan_to_num(0.0, torch.inf, -torch.inf)
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))


def assert_same_state(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    """Two state dicts are equal bit for bit."""
    assert list(a) == list(b) or set(a) == set(b)
    for name in a:
        assert same_bits(a[name].cpu(), b[name].cpu()), name


def small_net() -> nn.Module:
    """A convolution, BatchNorm and a linear layer."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3)
    )


def shake(model: nn.Module, scale: float = 1.0) -> dict[str, Tensor]:
    """Change every float tensor at random, as training would; a copy of the state."""
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tensor.is_floating_point():
                tensor.normal_(std=scale)
            if name.endswith("running_var"):
                tensor.abs_()
    return {name: t.clone() for name, t in model.state_dict().items()}
