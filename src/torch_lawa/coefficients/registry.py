"""What a coefficient rule is, and the registry of those that can be typed.

To add a rule, decorate its class with `register_coefficients`. Parsing, names in result files,
`--help` and error messages follow from that one entry.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, Self, TypeVar, runtime_checkable

from torch_lawa.errors import ConfigError

__all__ = [
    "Coefficients",
    "StepCoefficients",
    "Weights",
    "coefficients_help",
    "name_coefficients",
    "parse_coefficients",
    "register_coefficients",
]


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

    >>> from torch_lawa.coefficients import Exponential
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

    >>> from torch_lawa.coefficients import Explicit, Exponential
    >>> name_coefficients(Explicit([1, 3])), name_coefficients(Exponential(0.5))
    ('explicit:1,3', 'exponential:0.5')
    """
    for name, entry in _RULES.items():
        if isinstance(rule, entry.make):
            return f"{name}:{rule.argument}" if rule.argument else name
    return repr(rule)


def parse_coefficients(text: str) -> Coefficients:
    """The rule that `text` names.

    >>> import torch_lawa.coefficients  # registers the library's rules
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
