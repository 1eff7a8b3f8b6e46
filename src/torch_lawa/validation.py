"""Checks of arguments and of saved data: raise where they are given, and say what is valid."""

import operator
from typing import SupportsIndex

from torch_lawa.errors import ConfigError

__all__ = ["DAMAGE", "check_float", "check_kind", "one_of", "whole_number"]


# What code that takes saved data apart raises if the data is damaged.
DAMAGE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


def one_of(name: str, value: object, choices: tuple[object, ...], hint: str = "") -> None:
    """Raise if the value is none of the choices; 1 does not count as True.

    >>> one_of("store", "tape", ("host", "device"))
    Traceback (most recent call last):
        ...
    torch_lawa.errors.ConfigError: store='tape': choose one of 'host', 'device'.
    """
    if not any(value is c or (type(value) is type(c) and value == c) for c in choices):
        wanted = ", ".join(repr(c) for c in choices)
        raise ConfigError(f"{name}={value!r}: choose one of {wanted}.{hint}")


def check_kind(name: str, value: object, method: str, examples: str) -> None:
    """Raise if the object lacks `method`, or is a class instead of an instance."""
    if isinstance(value, type) or not hasattr(value, method):
        shown = repr(value) if len(repr(value)) < 80 else f"a {type(value).__name__}"
        raise ConfigError(f"{name}={shown}: give an object such as {examples}.")


def check_float(dtype: object) -> None:
    """Raise if weights are to be written as anything but floating-point numbers."""
    if dtype is not None and not getattr(dtype, "is_floating_point", False):
        raise ConfigError(
            f"dtype={dtype!r}: weights are written in a floating-point dtype, such as "
            "torch.bfloat16."
        )


def whole_number(
    name: str, value: SupportsIndex, *, least: int | None = None, most: int | None = None
) -> int:
    """A plain int, within bounds if they are given; NumPy integers are converted, bools refused.

    >>> whole_number("step", 7)
    7
    >>> whole_number("k", 0, least=1)
    Traceback (most recent call last):
        ...
    torch_lawa.errors.ConfigError: k=0: give an int of at least 1.
    """
    wanted = "an int"
    if least is not None:
        wanted += f" of at least {least}" if most is None else f" from {least} to {most}"
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    below = number is not None and least is not None and number < least
    above = number is not None and most is not None and number > most
    if number is None or isinstance(value, bool) or below or above:
        raise ConfigError(f"{name}={value!r}: give {wanted}.")
    return number
