"""Coefficient rules that are compared in the lab: more for recent snapshots, and a line ahead.

They are typed like the library's own, as in `--coefficients uniform,recency:1`, once this module is
imported; the recipes' settings do that. Pure Python.
"""

from dataclasses import dataclass
from typing import Self

from torch_lawa.coefficients import Weights, register_coefficients
from torch_lawa.errors import ConfigError

__all__ = ["Recency", "Trend"]


@register_coefficients("recency:P", "weights snapshot i, oldest first, by i to the power P")
@dataclass(frozen=True)
class Recency:
    """Snapshot i of n counts i^power: 0 is the uniform mean, 1 the linear one of PMA's WMA.

    >>> Recency(1.0).weights(3)
    Weights(numerators=(1.0, 2.0, 3.0), divisor=6.0)
    """

    power: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.power <= 100.0:
            raise ConfigError(f"Recency({self.power}): the power must be from 0 to 100.")

    @classmethod
    def parse(cls, argument: str) -> Self:
        """`recency` or `recency:2`."""
        return cls(float(argument)) if argument else cls()

    @property
    def argument(self) -> str:
        """The power."""
        return f"{self.power:g}"

    def weights(self, n: int) -> Weights:
        """1, 2^power, ..., n^power."""
        numerators = tuple(float(i) ** self.power for i in range(1, n + 1))
        return Weights(numerators, sum(numerators))


@register_coefficients(
    "trend:AHEAD", "the least-squares line of each weight, AHEAD windows after the newest snapshot"
)
@dataclass(frozen=True)
class Trend:
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

    @classmethod
    def parse(cls, argument: str) -> Self:
        """`trend` or `trend:0.5`."""
        return cls(float(argument)) if argument else cls()

    @property
    def argument(self) -> str:
        """How far ahead."""
        return f"{self.ahead:g}"

    def weights(self, n: int) -> Weights:
        """`1 / n + (t - mean of t_i) (t_i - mean of t_i) / sum of squares`; they sum to 1."""
        if n == 1:
            return Weights((1.0,), 1.0)
        middle = (n - 1) / 2
        slope = ((n - 1) * (1 + self.ahead) - middle) / sum((i - middle) ** 2 for i in range(n))
        return Weights(tuple(1 / n + slope * (i - middle) for i in range(n)), 1.0)
