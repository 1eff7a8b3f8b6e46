"""How much each snapshot of the window counts. Pure Python: no tensors here.

A rule turns a window of n snapshots into numerators and a divisor; the mean is
`sum(numerator_i * theta_i) / divisor`. Keeping the division apart is what makes the uniform mean
exact: the sum is, and only the one division rounds.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

from torch_lawa.errors import ConfigError

__all__ = [
    "Annealing",
    "Coefficients",
    "Curve",
    "Explicit",
    "Exponential",
    "Uniform",
    "Weights",
    "name_coefficients",
    "parse_coefficients",
]

Curve = Literal["linear", "1-sqrt", "cosine"]


@dataclass(frozen=True)
class Weights:
    """Numerators, oldest snapshot first, and the one divisor of their sum."""

    numerators: tuple[float, ...]
    divisor: float

    @property
    def uniform(self) -> bool:
        """Whether every snapshot counts the same."""
        return all(w == 1.0 for w in self.numerators)


class Coefficients(Protocol):
    """A rule that weighs the snapshots of a window."""

    def weights(self, n: int) -> Weights:
        """The weights of a window of `n` snapshots, oldest first."""
        ...


@dataclass(frozen=True)
class Uniform:
    """The paper's LAWA: all k snapshots count the same.

    >>> Uniform().weights(3)
    Weights(numerators=(1.0, 1.0, 1.0), divisor=3.0)
    """

    def weights(self, n: int) -> Weights:
        """Ones over n."""
        return Weights((1.0,) * n, float(n))


@dataclass(frozen=True)
class Exponential:
    """The paper's EXP (appendix C): `ema = alpha * newest + (1 - alpha) * ema`, oldest first.

    `alpha` weighs the *newest* snapshot. PyTorch's `decay` (`swa_utils.get_ema_avg_fn`) weighs the
    *past*: `decay = 1 - alpha`, so the paper's alpha = 0.9 is a decay of 0.1, and torch's usual
    decay of 0.999 would be alpha = 0.001. The recursion starts at the oldest snapshot of the
    window, which therefore keeps the whole remaining weight.

    >>> [round(w, 3) for w in Exponential(0.9).weights(3).numerators]
    [0.01, 0.09, 0.9]
    """

    alpha: float = 0.9

    def __post_init__(self) -> None:
        if not 0.0 < self.alpha <= 1.0:
            raise ConfigError(
                f"Exponential(alpha={self.alpha}): alpha is the weight of the newest snapshot and "
                "must lie in (0, 1]. Coming from a torch decay, use alpha = 1 - decay."
            )

    def weights(self, n: int) -> Weights:
        """`alpha (1 - alpha)^age`, and `(1 - alpha)^(n - 1)` for the oldest."""
        past = 1.0 - self.alpha
        newer = tuple(self.alpha * past ** (n - 1 - i) for i in range(1, n))
        return Weights((past ** (n - 1), *newer), 1.0)


@dataclass(frozen=True, init=False)
class Explicit:
    """Weights of your own, oldest first, divided by their sum.

    A window that holds fewer snapshots uses the last (newest) weights of the list.

    >>> Explicit([1, 2, 3]).weights(2)
    Weights(numerators=(2.0, 3.0), divisor=5.0)
    """

    values: tuple[float, ...]

    def __init__(self, values: Sequence[float]) -> None:
        numbers = tuple(float(v) for v in values)
        if not numbers:
            raise ConfigError("Explicit([]): give one weight a snapshot, oldest first.")
        bad = [v for v in numbers if not math.isfinite(v)]
        if bad:
            raise ConfigError(f"Explicit: weights must be finite numbers, got {bad[0]}.")
        if numbers[-1] == 0.0:
            raise ConfigError(
                "Explicit: the last weight belongs to the newest snapshot and is 0; leave it out "
                "by collecting one snapshot fewer, or give it a weight."
            )
        object.__setattr__(self, "values", numbers)

    def weights(self, n: int) -> Weights:
        """The n newest weights over their sum."""
        if n > len(self.values):
            raise ConfigError(
                f"Explicit has {len(self.values)} weights and the window {n} snapshots: "
                "give one weight a snapshot, oldest first."
            )
        chosen = self.values[len(self.values) - n :]
        divisor = math.fsum(chosen)
        if divisor == 0.0:
            raise ConfigError(f"Explicit: the weights {chosen} sum to 0; they cannot be a mean.")
        return Weights(chosen, divisor)


@dataclass(frozen=True)
class Annealing:
    """Weights that stand in for a learning-rate decay, for snapshots taken at a constant rate.

    Snapshot j is the first one plus the updates of intervals 1 to j. Scaling the updates of
    interval i by w_i, as a decaying rate would, gives a sum over snapshots with the weights
    `c_j = w_j - w_{j+1}`. The curve runs from w_0 = 1 at the oldest of the n snapshots to w_n = 0,
    evenly spaced; `linear` is then the uniform mean.

    >>> [round(w, 3) for w in Annealing("1-sqrt").weights(4).numerators]
    [0.5, 0.207, 0.159, 0.134]
    >>> Annealing("linear").weights(4) == Uniform().weights(4)
    True
    """

    curve: Curve = "1-sqrt"

    def __post_init__(self) -> None:
        if self.curve not in get_args(Curve):
            raise ConfigError(
                f"Annealing({self.curve!r}): the curve must be one of {', '.join(get_args(Curve))}."
            )

    def weights(self, n: int) -> Weights:
        """The drops of the curve from each snapshot to the next."""
        if self.curve == "linear":
            return Uniform().weights(n)
        drops = [_curve(self.curve, j / n) - _curve(self.curve, (j + 1) / n) for j in range(n)]
        return Weights(tuple(drops), math.fsum(drops))


def _curve(curve: Curve, t: float) -> float:
    return 1.0 - math.sqrt(t) if curve == "1-sqrt" else (1.0 + math.cos(math.pi * t)) / 2.0


def name_coefficients(rule: Coefficients) -> str:
    """A rule as it would be typed; a class of someone else's by its own representation.

    >>> name_coefficients(Explicit([1, 3])), name_coefficients(Exponential(0.5))
    ('explicit:1,3', 'exponential:0.5')
    """
    match rule:
        case Uniform():
            return "uniform"
        case Exponential(alpha):
            return f"exponential:{alpha:g}"
        case Annealing(curve):
            return f"annealing:{curve}"
        case Explicit(values):
            return "explicit:" + ",".join(f"{value:g}" for value in values)
    return repr(rule)


def parse_coefficients(text: str) -> Coefficients:
    """The rule that someone typed.

    >>> parse_coefficients("exponential:0.5"), parse_coefficients("annealing:cosine")
    (Exponential(alpha=0.5), Annealing(curve='cosine'))
    """
    rule, _, argument = text.strip().partition(":")
    try:
        if rule == "uniform" and not argument:
            return Uniform()
        if rule == "exponential":
            return Exponential(float(argument)) if argument else Exponential()
        if rule == "annealing":
            return Annealing(argument or "1-sqrt")  # type: ignore[arg-type]
        if rule == "explicit":
            return Explicit([float(part) for part in argument.split(",")])
    except ConfigError:
        raise
    except ValueError:
        raise ConfigError(f"coefficients {text!r}: {argument!r} is not a number.") from None
    raise ConfigError(
        f"coefficients {text!r}: use uniform, exponential:ALPHA (the weight of the newest), "
        "annealing:linear|1-sqrt|cosine, or explicit:W1,W2,... (oldest first)."
    )
