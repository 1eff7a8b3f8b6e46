"""The rules that weight snapshots: one class each."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Self, get_args

from torch_lawa.coefficients.registry import Weights, register_coefficients
from torch_lawa.errors import ConfigError

__all__ = ["Annealing", "Explicit", "Exponential", "Recency", "Recent", "Trend", "Uniform"]

AnnealingCurve = Literal["linear", "1-sqrt", "cosine"]


@register_coefficients("uniform")
@dataclass(frozen=True)
class Uniform:
    """The paper's LAWA: all k snapshots count the same.

    >>> Uniform().weights(3)
    Weights(numerators=(1.0, 1.0, 1.0), divisor=3.0)
    """

    @classmethod
    def parse(cls, argument: str) -> Self:
        """`uniform` takes no argument."""
        if argument:
            raise ValueError(argument)
        return cls()

    @property
    def argument(self) -> str:
        """It has none."""
        return ""

    def weights(self, n: int) -> Weights:
        """Ones over n."""
        return Weights((1.0,) * n, float(n))


class _OneNumber:
    """What rules with one number share: it is typed after their name, and has a default."""

    @classmethod
    def parse(cls, argument: str) -> Self:
        """The number; without an argument the default."""
        make: Callable[..., Self] = cls
        return make(float(argument)) if argument else make()

    @property
    def argument(self) -> str:
        """The number."""
        number, *_ = vars(self).values()
        return f"{number:g}"


@register_coefficients("exponential:ALPHA", "ALPHA is the weight of the newest snapshot")
@dataclass(frozen=True)
class Exponential(_OneNumber):
    """The paper's EXP (appendix C): `ema = alpha * newest + (1 - alpha) * ema`, oldest first.

    `alpha` is the weight of the *newest* snapshot. PyTorch's `decay` (`swa_utils.get_ema_avg_fn`)
    is the weight of the *past*: `decay = 1 - alpha`, so the paper's alpha = 0.9 is a decay of 0.1,
    and torch's usual decay of 0.999 would be alpha = 0.001. The recursion starts at the oldest
    snapshot of the window, which therefore has all of the remaining weight.

    >>> [round(w, 3) for w in Exponential(0.9).weights(3).numerators]
    [0.01, 0.09, 0.9]
    """

    alpha: float = 0.9

    def __post_init__(self) -> None:
        if not 0.0 < self.alpha <= 1.0:
            raise ConfigError(
                f"Exponential(alpha={self.alpha}): alpha is the weight of the newest snapshot and "
                "must be in (0, 1]. To convert a torch decay, use alpha = 1 - decay."
            )

    def weights(self, n: int) -> Weights:
        """`alpha (1 - alpha)^age`, and `(1 - alpha)^(n - 1)` for the oldest."""
        past = 1.0 - self.alpha
        newer = tuple(self.alpha * past ** (n - 1 - i) for i in range(1, n))
        return Weights((past ** (n - 1), *newer), 1.0)


@register_coefficients("recent:SHARE", "an EMA over the last SHARE of the steps, such as 0.1")
@dataclass(frozen=True)
class Recent(_OneNumber):
    """Recent steps count more: the weights of an EMA whose memory grows with the run.

    Its time constant is `share` of the steps so far, so step s counts `s ** (1 / share - 1)`. A
    snapshot stands for the steps since the one before it, and steps before the window do not count.
    Unlike with `Exponential`, the result hardly depends on the number of snapshots.

    >>> Recent(0.5).weights_at([10, 20, 40]).numerators  # 10^2, 20^2 - 10^2, 40^2 - 20^2 of 40^2
    (0.0625, 0.1875, 0.75)
    """

    share: float = 0.1

    def __post_init__(self) -> None:
        if not 0.0 < self.share <= 1.0:
            raise ConfigError(
                f"Recent(share={self.share}): the share of the steps so far must be above 0 and at "
                "most 1, such as 0.1."
            )

    def weights(self, n: int) -> Weights:
        """Those of snapshots at steps 1 to n."""
        return self.weights_at(range(1, n + 1))

    def weights_at(self, steps: Sequence[int]) -> Weights:
        """The part of the EMA's weights that each snapshot stands for."""
        if len(steps) == 1:
            return Weights((1.0,), 1.0)
        if steps[0] < 0:
            raise ConfigError(
                f"Recent: a snapshot is labelled step {steps[0]}, but it counts the steps of the "
                "run so far. Label snapshots with steps from 0 on."
            )
        # The oldest snapshot stands for as many steps as the one after it.
        begin = max(0, 2 * steps[0] - steps[1])
        sums = [(step / steps[-1]) ** (1.0 / self.share) for step in (begin, *steps)]
        weights = tuple(end - start for start, end in itertools.pairwise(sums))
        return Weights(weights, math.fsum(weights))


@register_coefficients("explicit:W,W,...", "one weight per snapshot, oldest first")
@dataclass(frozen=True, init=False)
class Explicit:
    """Weights that you choose, oldest snapshot first; they are divided by their sum.

    A window that holds fewer snapshots uses the last (newest) weights of the list.

    >>> Explicit([1, 2, 3]).weights(2)
    Weights(numerators=(2.0, 3.0), divisor=5.0)
    """

    values: tuple[float, ...]

    def __init__(self, values: Sequence[float]) -> None:
        try:
            numbers = tuple(float(v) for v in values)
        except OverflowError:
            raise ConfigError("Explicit: a weight is too large. Divide all of them.") from None
        if not numbers:
            raise ConfigError("Explicit([]): give one weight per snapshot, oldest first.")
        bad = [v for v in numbers if not math.isfinite(v)]
        if bad:
            raise ConfigError(f"Explicit: weights must be finite numbers, got {bad[0]}.")
        if numbers[-1] == 0.0:
            raise ConfigError(
                "Explicit: the last weight, that of the newest snapshot, is 0. Give it a weight, "
                "or collect one snapshot fewer and remove it from the list."
            )
        object.__setattr__(self, "values", numbers)

    @classmethod
    def parse(cls, argument: str) -> Self:
        """`explicit:1,2,3`."""
        return cls([float(part) for part in argument.split(",")])

    @property
    def argument(self) -> str:
        """The weights."""
        return ",".join(f"{value:g}" for value in self.values)

    def weights(self, n: int) -> Weights:
        """The n newest weights over their sum."""
        if n > len(self.values):
            raise ConfigError(
                f"Explicit has {len(self.values)} weights, but the window holds {n} snapshots: "
                "give one weight per snapshot, oldest first."
            )
        chosen = self.values[len(self.values) - n :]
        try:
            divisor = math.fsum(chosen)
        except OverflowError:
            raise ConfigError(
                f"Explicit: the sum of the weights {self.argument} is too large. Divide all of "
                "them: only their ratios matter."
            ) from None
        if divisor == 0.0:
            raise ConfigError(f"Explicit: the weights {chosen} sum to 0, so they have no mean.")
        return Weights(chosen, divisor)


@register_coefficients(
    f"annealing:{'|'.join(get_args(AnnealingCurve))}",
    "replaces a learning-rate decay of that shape",
)
@dataclass(frozen=True)
class Annealing:
    """Weights that replace a learning-rate decay, for snapshots taken at a constant rate.

    Snapshot j is the first one plus the updates of intervals 1 to j. Scaling the updates of
    interval i by w_i, as a decaying rate would, gives a sum over snapshots with the weights
    `c_j = w_j - w_{j+1}`. The curve runs from w_0 = 1 at the oldest of the n snapshots to w_n = 0,
    evenly spaced; `linear` is therefore the uniform mean.

    >>> [round(w, 3) for w in Annealing("1-sqrt").weights(4).numerators]
    [0.5, 0.207, 0.159, 0.134]
    >>> Annealing("linear").weights(4) == Uniform().weights(4)
    True
    """

    curve: AnnealingCurve = "1-sqrt"

    def __post_init__(self) -> None:
        curves = get_args(AnnealingCurve)
        if self.curve not in curves:
            raise ConfigError(
                f"Annealing({self.curve!r}): the curve must be one of {', '.join(curves)}."
            )

    @classmethod
    def parse(cls, argument: str) -> Self:
        """`annealing` or `annealing:cosine`."""
        return cls(argument) if argument else cls()  # type: ignore[arg-type]

    @property
    def argument(self) -> str:
        """The curve."""
        return self.curve

    def weights(self, n: int) -> Weights:
        """The drops of the curve from each snapshot to the next."""
        if self.curve == "linear":
            return Uniform().weights(n)
        drops = [_curve(self.curve, j / n) - _curve(self.curve, (j + 1) / n) for j in range(n)]
        return Weights(tuple(drops), math.fsum(drops))


def _curve(curve: AnnealingCurve, t: float) -> float:
    return 1.0 - math.sqrt(t) if curve == "1-sqrt" else (1.0 + math.cos(math.pi * t)) / 2.0


@register_coefficients("recency:P", "weights snapshot i, oldest first, by i to the power P")
@dataclass(frozen=True)
class Recency(_OneNumber):
    """Snapshot i of n counts i^power: 0 is the uniform mean, 1 the linear one of PMA's WMA.

    >>> Recency(1.0).weights(3)
    Weights(numerators=(1.0, 2.0, 3.0), divisor=6.0)
    """

    power: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.power <= 20.0:  # more would overflow in a long window
            raise ConfigError(f"Recency({self.power}): the power must be from 0 to 20.")

    def weights(self, n: int) -> Weights:
        """1, 2^power, ..., n^power."""
        numerators = tuple(float(i) ** self.power for i in range(1, n + 1))
        return Weights(numerators, sum(numerators))


@register_coefficients(
    "trend:AHEAD", "each weight's least-squares line, AHEAD windows after the newest snapshot"
)
@dataclass(frozen=True)
class Trend(_OneNumber):
    """A line through the snapshots of every weight by least squares, read ahead of the newest.

    The steps between snapshots count as equal. `ahead` is in lengths of the window: 0 is the line
    at the newest snapshot, 1 as far ahead as the oldest is behind, -0.5 the uniform mean. All
    weights of a model get the same coefficients, so the whole regression is one weighted mean.

    >>> Trend(1.0).weights(2)  # a line through two points, continued once
    Weights(numerators=(-1.0, 2.0), divisor=1.0)
    """

    ahead: float = 0.0

    def __post_init__(self) -> None:
        if not -1.0 <= self.ahead <= 100.0:
            raise ConfigError(f"Trend({self.ahead}): give a number of windows, from -1 to 100.")

    def weights(self, n: int) -> Weights:
        """`1 / n + (t - mean of t_i) (t_i - mean of t_i) / sum of squares`; they sum to 1."""
        if n == 1:
            return Weights((1.0,), 1.0)
        middle = (n - 1) / 2
        slope = ((n - 1) * (1 + self.ahead) - middle) / sum((i - middle) ** 2 for i in range(n))
        return Weights(tuple(1 / n + slope * (i - middle) for i in range(n)), 1.0)
