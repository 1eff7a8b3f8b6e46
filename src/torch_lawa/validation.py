"""Options that people give: refused where they are given, with what would do instead."""

import operator
from typing import SupportsIndex

from torch_lawa.errors import ConfigError

__all__ = ["check_float", "check_kind", "one_of", "whole_number"]


def one_of(name: str, value: object, choices: tuple[object, ...], hint: str = "") -> None:
    """Refuse what is none of the choices; 1 is not True.

    >>> one_of("store", "tape", ("host", "device"))
    Traceback (most recent call last):
        ...
    torch_lawa.errors.ConfigError: store='tape': choose one of 'host', 'device'.
    """
    if not any(value is c or (type(value) is type(c) and value == c) for c in choices):
        wanted = ", ".join(repr(c) for c in choices)
        raise ConfigError(f"{name}={value!r}: choose one of {wanted}.{hint}")


def check_kind(name: str, value: object, method: str, examples: str) -> None:
    """Refuse an object that cannot do what is wanted of it, and a class in its place."""
    if isinstance(value, type) or not hasattr(value, method):
        raise ConfigError(f"{name}={value!r}: give one of these: {examples}.")


def check_float(dtype: object) -> None:
    """Refuse to write weights as anything but floating-point numbers."""
    if dtype is not None and not getattr(dtype, "is_floating_point", False):
        raise ConfigError(
            f"dtype={dtype!r}: weights are floating-point numbers; give a dtype such as "
            "torch.bfloat16."
        )


def whole_number(name: str, value: SupportsIndex) -> int:
    """A plain int, also of NumPy's and the like, which no checkpoint could hold.

    >>> whole_number("step", 7)
    7
    """
    try:
        return operator.index(value)
    except TypeError:
        raise ConfigError(f"{name}={value!r}: give a whole number, as an int.") from None
