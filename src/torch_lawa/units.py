"""Sizes, numbers and lists as text: "1.42 GB", "2 files", "this, or that", "a, b and 4 more"."""

import re
from collections.abc import Iterable, Sequence

from torch_lawa.errors import ConfigError

__all__ = [
    "counted",
    "either",
    "few",
    "format_bytes",
    "parse_bytes",
    "parse_number",
    "three_digits",
]

_UNITS = ("B", "kB", "MB", "GB", "TB")
_TYPED = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kKmMgGtT]?)(i?)[bB]?\s*")


def counted(number: int, noun: str) -> str:
    """A number with its noun.

    >>> counted(1, "checkpoint"), counted(6, "checkpoint")
    ('1 checkpoint', '6 checkpoints')
    """
    return f"{number:,} {noun}{'s'[: number != 1]}"


def either(ways: Sequence[str]) -> str:
    """What one can do, as a part of a sentence.

    >>> either(["Train longer", "lower k", "set min_snapshots=1"])
    'Train longer, lower k, or set min_snapshots=1'
    """
    return ", or ".join(filter(None, (", ".join(ways[:-1]), ways[-1])))


def few(names: Iterable[object], limit: int = 6) -> str:
    """Join names for a message, the first few of them.

    >>> few(["a", "b", "c"], limit=2)
    'a, b and 1 more'
    """
    listed = [str(name) for name in names]
    more = f" and {len(listed) - limit} more" if len(listed) > limit else ""
    return ", ".join(listed[:limit]) + more


def format_bytes(num_bytes: float) -> str:
    """Bytes, with three digits, in the largest unit in which the number is at least 1.

    >>> format_bytes(1_420_000_000), format_bytes(12)
    ('1.42 GB', '12 B')
    """
    at = 0
    while num_bytes >= 999.5 and at < len(_UNITS) - 1:  # 999.5 rounds to 1000
        num_bytes, at = num_bytes / 1000, at + 1
    return f"{three_digits(num_bytes)} {_UNITS[at]}"


def three_digits(number: float) -> str:
    """A number with three digits, or more if they are needed, and without an exponent.

    >>> three_digits(1.4219), three_digits(1234.5)
    ('1.42', '1,234')
    """
    return f"{number:,.0f}" if number >= 999.5 else f"{number:.3g}"


def parse_bytes(text: str) -> int:
    """`5GB`, `500 MB`, `2GiB` or a plain number of bytes.

    >>> parse_bytes("5GB"), parse_bytes("1KiB")
    (5000000000, 1024)
    """
    found = _TYPED.fullmatch(text)
    if not found:
        raise ConfigError(f"{text!r} is not a size: write it as 5GB or 500MB.")
    number, unit, binary = found.groups()
    power = " kmgt".index(unit.lower()) if unit else 0
    return int(float(number) * (1024 if binary else 1000) ** power)


def parse_number(text: str) -> float:
    """A number or a fraction, such as `0.25` or `1/4`.

    >>> parse_number("0.25"), parse_number("1/4")
    (0.25, 0.25)
    """
    top, slash, bottom = text.partition("/")
    try:
        return float(top) / float(bottom) if slash else float(text)
    except (ValueError, ZeroDivisionError):
        raise ValueError(f"{text!r} is not a number such as 0.25 or 1/4") from None
