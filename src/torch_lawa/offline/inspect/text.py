"""Plain text for a terminal of 80 columns: labels, aligned columns, no control characters."""

import textwrap
from collections.abc import Collection, Sequence

__all__ = ["aligned", "labelled", "plain", "shortened", "wrapped"]

_WIDTH, _LABEL = 80, 13


def plain(text: str) -> str:
    """Text from a file with control characters escaped, so that it is safe to print.

    >>> plain("a\\x1b[2Jb")
    'a\\\\x1b[2Jb'
    """
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def labelled(label: str, lines: Sequence[str]) -> list[str]:
    """Lines behind a label; nothing if there are no lines.

    >>> labelled("Files", ["a", "b"])
    ['  Files      a', '             b']
    """
    labels = [f"  {label}", *[""] * len(lines)]
    return [f"{name:<{_LABEL}}{line}" for name, line in zip(labels, lines, strict=False)]


def wrapped(text: str) -> list[str]:
    """Text wrapped to fit behind a label."""
    return textwrap.wrap(
        plain(text), _WIDTH - _LABEL, break_long_words=False, break_on_hyphens=False
    )


def aligned(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Rows with aligned columns.

    >>> aligned([("a", "1"), ("bb", "10")], right={1})
    ['a    1', 'bb  10']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if at in right else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def shortened(text: str) -> str:
    """Text cut to one line behind a label."""
    text, room = plain(text), _WIDTH - _LABEL
    if len(text) <= room:
        return text
    end = f"… ({len(text):,} characters)"
    return text[: room - len(end)] + end
