"""The mean blended with the live weights, and the weights of any rule at given steps."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Self

from torch_lawa.coefficients.registry import (
    Coefficients,
    StepCoefficients,
    Weights,
    name_coefficients,
    parse_coefficients,
    register_coefficients,
)
from torch_lawa.coefficients.rules import Uniform
from torch_lawa.errors import ConfigError

__all__ = ["Blend", "blended", "weights_at"]


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


@register_coefficients("blend:B[:RULE]", "B times RULE's mean plus 1 - B times the newest weights")
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
    rule: Coefficients = field(default_factory=Uniform)

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
        """`blend:0.6` or `blend:0.6:exponential:0.9`."""
        number, _, rule = argument.partition(":")
        return cls(float(number), parse_coefficients(rule) if rule else Uniform())

    @property
    def argument(self) -> str:
        """The weight of the mean, and the rule unless it is uniform."""
        rule = "" if self.rule == Uniform() else f":{name_coefficients(self.rule)}"
        return f"{self.blend:g}{rule}"

    def weights(self, n: int) -> Weights:
        """The weights with the newest snapshot as the live weights."""
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

    >>> from torch_lawa.coefficients import Exponential
    >>> name_coefficients(blended(Exponential(0.5), 0.6))
    'blend:0.6:exponential:0.5'
    """
    return rule if blend is None else Blend(blend, rule)
