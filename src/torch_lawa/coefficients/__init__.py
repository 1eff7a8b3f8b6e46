"""Coefficient rules: how much each snapshot of the window counts. Pure Python, no tensors.

A rule maps a window of n snapshots to numerators and a divisor; the mean is
`sum(numerator_i * theta_i) / divisor`. Keeping the division separate makes the uniform mean exact:
the sum is exact, and only the division rounds.
"""

from torch_lawa.coefficients.blend import Blend, blended, weights_at
from torch_lawa.coefficients.registry import (
    Coefficients,
    StepCoefficients,
    Weights,
    coefficients_help,
    name_coefficients,
    parse_coefficients,
    register_coefficients,
)
from torch_lawa.coefficients.rules import (
    Annealing,
    Explicit,
    Exponential,
    Recency,
    Recent,
    Trend,
    Uniform,
)

__all__ = [
    "Annealing",
    "Blend",
    "Coefficients",
    "Explicit",
    "Exponential",
    "Recency",
    "Recent",
    "StepCoefficients",
    "Trend",
    "Uniform",
    "Weights",
    "blended",
    "coefficients_help",
    "name_coefficients",
    "parse_coefficients",
    "register_coefficients",
    "weights_at",
]
