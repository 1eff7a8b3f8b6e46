"""Coefficient rules: how much each snapshot of the window counts. Pure Python, no tensors.

A rule maps a window of n snapshots to numerators and a divisor; the mean is
`sum(numerator_i * theta_i) / divisor`. Keeping the division separate makes the uniform mean exact:
the sum is exact, and only the division rounds.

To add a rule, decorate its class with `register_coefficients`. Parsing, names in result files,
`--help` and error messages follow from that one entry.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, Protocol, Self, TypeVar, get_args, runtime_checkable

from torch_lawa.errors import ConfigError

__all__ = [
    "Annealing",
    "Blend",
    "Coefficients",
    "Explicit",
    "Exponential",
    "Recent",
    "StepCoefficients",
    "Uniform",
    "Weights",
    "blended",
    "coefficients_help",
    "name_coefficients",
    "parse_coefficients",
    "register_coefficients",
    "weights_at",
]

AnnealingCurve = Literal["linear", "1-sqrt", "cosine"]


@dataclass(frozen=True)
class Weights:
    """Numerators, oldest snapshot first, and the divisor of their weighted sum.

    >>> Weights((1.0, 3.0), divisor=4.0).uniform
    False
    """

    numerators: tuple[float, ...]
    divisor: float

    @property
    def uniform(self) -> bool:
        """Whether all snapshots count the same."""
        return all(w == 1.0 for w in self.numerators)


class Coefficients(Protocol):
    """A rule that weights the snapshots of a window. Any object with this method will do.

    >>> rule: Coefficients = Exponential(alpha=0.5)
    >>> rule.weights(2)
    Weights(numerators=(0.5, 0.5), divisor=1.0)
    """

    def weights(self, n: int) -> Weights:
        """The weights of a window of `n` snapshots, oldest first."""
        ...


@runtime_checkable
class StepCoefficients(Coefficients, Protocol):
    """A rule that also depends on when the snapshots were taken."""

    def weights_at(self, steps: Sequence[int]) -> Weights:
        """The weights of snapshots taken at these steps, which increase."""
        ...


def weights_at(rule: Coefficients, steps: Sequence[int | None]) -> Weights:
    """The weights of snapshots taken at these steps; None where a step is not known.

    >>> weights_at(Uniform(), [None, None])
    Weights(numerators=(1.0, 1.0), divisor=2.0)
    """
    if isinstance(rule, Blend):
        return rule.merged(weights_at(rule.rule, steps))
    if not isinstance(rule, StepCoefficients):
        return rule.weights(len(steps))
    known = [step for step in steps if step is not None]
    if len(known) < len(steps) or any(b <= a for a, b in itertools.pairwise(known)):
        raise ConfigError(
            f"coefficients {name_coefficients(rule)}: needs the step of every checkpoint, and the "
            "steps must increase. Use uniform or exponential coefficients."
        )
    return rule.weights_at(known)


class NamedCoefficients(Coefficients, Protocol):
    """A rule that can be written as text, `name:argument`, on the command line and in files."""

    @classmethod
    def parse(cls, argument: str) -> Self:
        """The rule for the text after the colon ("" if there is none); ValueError if invalid."""
        ...

    @property
    def argument(self) -> str:
        """The text after the colon that `parse` turns into this rule; "" for none."""
        ...


_Named = TypeVar("_Named", bound=NamedCoefficients)


@dataclass(frozen=True)
class _Registered:
    make: type[NamedCoefficients]
    usage: str  # the name and its argument: "exponential:ALPHA"
    help: str


_RULES: dict[str, _Registered] = {}


def register_coefficients(usage: str, help: str = "") -> Callable[[type[_Named]], type[_Named]]:
    """Register a rule under the name that `usage` begins with, such as "exponential:ALPHA".

    >>> @register_coefficients("newest", "the newest snapshot alone")
    ... class Newest:
    ...     argument = ""
    ...     @classmethod
    ...     def parse(cls, argument):
    ...         return cls()
    ...     def weights(self, n):
    ...         return Weights((0.0,) * (n - 1) + (1.0,), 1.0)
    >>> parse_coefficients("newest").weights(3)
    Weights(numerators=(0.0, 0.0, 1.0), divisor=1.0)
    >>> "newest (the newest snapshot alone)" in coefficients_help()
    True
    >>> del _RULES["newest"]
    """
    name = usage.partition(":")[0]

    def register(make: type[_Named]) -> type[_Named]:
        if name in _RULES:
            raise ConfigError(
                f"the coefficient rule {name!r} is registered already, for "
                f"{_RULES[name].make.__name__}: choose another name."
            )
        _RULES[name] = _Registered(make, usage, help)
        return make

    return register


def coefficients_help() -> str:
    """Every registered rule as it is typed, for `--help` texts and error messages."""
    return "; ".join(e.usage + (f" ({e.help})" if e.help else "") for e in _RULES.values())


def name_coefficients(rule: Coefficients) -> str:
    """A rule as it is typed; an unregistered one by its `repr`.

    >>> name_coefficients(Explicit([1, 3])), name_coefficients(Exponential(0.5))
    ('explicit:1,3', 'exponential:0.5')
    """
    for name, entry in _RULES.items():
        if isinstance(rule, entry.make):
            return f"{name}:{rule.argument}" if rule.argument else name
    return repr(rule)


def parse_coefficients(text: str) -> Coefficients:
    """The rule that `text` names.

    >>> parse_coefficients("exponential:0.5"), parse_coefficients("annealing:cosine")
    (Exponential(alpha=0.5), Annealing(curve='cosine'))
    """
    name, _, argument = text.strip().partition(":")
    if name not in _RULES:
        raise ConfigError(f"coefficients {text!r}: unknown rule; use {coefficients_help()}.")
    entry = _RULES[name]
    try:
        return entry.make.parse(argument)
    except ConfigError:
        raise
    except ValueError:
        raise ConfigError(
            f"coefficients {text!r}: {argument!r} is not a valid argument; use {entry.usage}"
            f"{f' ({entry.help})' if entry.help else ''}."
        ) from None


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
        """None."""
        return ""

    def weights(self, n: int) -> Weights:
        """Ones over n."""
        return Weights((1.0,) * n, float(n))


@register_coefficients("exponential:ALPHA", "ALPHA is the weight of the newest snapshot")
@dataclass(frozen=True)
class Exponential:
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

    @classmethod
    def parse(cls, argument: str) -> Self:
        """`exponential` or `exponential:0.9`."""
        return cls(float(argument)) if argument else cls()

    @property
    def argument(self) -> str:
        """alpha."""
        return f"{self.alpha:g}"

    def weights(self, n: int) -> Weights:
        """`alpha (1 - alpha)^age`, and `(1 - alpha)^(n - 1)` for the oldest."""
        past = 1.0 - self.alpha
        newer = tuple(self.alpha * past ** (n - 1 - i) for i in range(1, n))
        return Weights((past ** (n - 1), *newer), 1.0)


@register_coefficients("recent:SHARE", "an EMA over the last SHARE of the steps, such as 0.1")
@dataclass(frozen=True)
class Recent:
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

    @classmethod
    def parse(cls, argument: str) -> Self:
        """`recent` or `recent:0.1`."""
        return cls(float(argument)) if argument else cls()

    @property
    def argument(self) -> str:
        """The share."""
        return f"{self.share:g}"

    def weights(self, n: int) -> Weights:
        """Those of snapshots at steps 1 to n."""
        return self.weights_at(range(1, n + 1))

    def weights_at(self, steps: Sequence[int]) -> Weights:
        """The part of the EMA's weights that each snapshot stands for."""
        if len(steps) == 1:
            return Weights((1.0,), 1.0)
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


@register_coefficients(
    "blend:B[,RULE]", "B of the mean (weighted by RULE) plus 1 - B of the newest weights"
)
@dataclass(frozen=True)
class Blend:
    """The mean and the live weights: `(1 - blend) * live + blend * mean`.

    `blend` is the weight of the mean; `rule` weights the snapshots in it. The live weights are the
    model's own where it is there (`swapped_into`), and the newest snapshot or checkpoint elsewhere
    (`average`, `save_pretrained`, `lawa average`).

    >>> Blend(0.6).weights(4)
    Weights(numerators=(3.0, 3.0, 3.0, 11.0), divisor=20.0)
    >>> Blend(0.6).live_weights([1, 2, 3, 4])
    Weights(numerators=(3.0, 3.0, 3.0, 3.0, 8.0), divisor=20.0)
    """

    blend: float
    rule: Coefficients = Uniform()

    def __post_init__(self) -> None:
        number = isinstance(self.blend, float | int) and not isinstance(self.blend, bool)
        if not number or not 0.0 < self.blend <= 1.0:
            raise ConfigError(
                f"blend={self.blend!r}: give the weight of the mean, above 0 and at most 1, such "
                "as 0.6. The live weights have the rest."
            )
        if isinstance(self.rule, Blend):
            raise ConfigError(f"{self.rule} is a blend already: give one of the two.")

    @classmethod
    def parse(cls, argument: str) -> Self:
        """`blend:0.6` or `blend:0.6,exponential:0.9`."""
        number, _, rule = argument.partition(",")
        return cls(float(number), parse_coefficients(rule) if rule else Uniform())

    @property
    def argument(self) -> str:
        """The weight of the mean, and the rule unless it is uniform."""
        rule = "" if self.rule == Uniform() else f",{name_coefficients(self.rule)}"
        return f"{self.blend:g}{rule}"

    def weights(self, n: int) -> Weights:
        """With the newest snapshot as the live weights."""
        return self.merged(self.rule.weights(n))

    def merged(self, snapshots: Weights) -> Weights:
        """The weights of the snapshots, with the newest one as the live weights."""
        blended = self._with_live(snapshots)
        *numerators, newest, live = blended.numerators
        return Weights((*numerators, newest + live), blended.divisor)

    def live_weights(self, steps: Sequence[int]) -> Weights:
        """One numerator more than there are snapshots: the last is that of the live weights."""
        return self._with_live(weights_at(self.rule, steps))

    def _with_live(self, weights: Weights) -> Weights:
        # In whole numbers as far as possible: then sums are exact, as in the uniform mean, and the
        # result does not depend on whether the live weights are added by themselves.
        share = Fraction(self.blend).limit_denominator(1_000_000)
        mean, rest = float(share.numerator), float(share.denominator - share.numerator)
        snapshots = (mean * w for w in weights.numerators)
        return Weights((*snapshots, rest * weights.divisor), share.denominator * weights.divisor)


def blended(rule: Coefficients, blend: float | None) -> Coefficients:
    """The rule itself, or blended with the live weights if `blend` is given.

    >>> name_coefficients(blended(Exponential(0.5), 0.6))
    'blend:0.6,exponential:0.5'
    """
    return rule if blend is None else Blend(blend, rule)
