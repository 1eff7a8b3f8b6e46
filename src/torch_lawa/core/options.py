"""Options that people give: refused where they are given, with what would do instead."""

from torch_lawa.errors import ConfigError

__all__ = ["check_kind", "one_of"]


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
