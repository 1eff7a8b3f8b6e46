"""What the command prints: text from files and file names cannot control the terminal."""

import contextlib
import sys

import click

__all__ = ["echo", "escaped", "shortened", "tolerate_any_text"]

_LONGEST = 4000  # characters of an error message: a name may be as long as a file


def echo(text: str, *, err: bool = False) -> None:
    """Print lines of text with their control characters escaped."""
    click.echo(escaped(text), err=err)


def escaped(text: str) -> str:
    """Text in which only line feeds control the terminal.

    >>> escaped("step-1\\x1b[2J.pt")
    'step-1\\\\x1b[2J.pt'
    """
    if text.isascii() and text.replace("\n", "").isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


def shortened(text: str) -> str:
    """A message without the middle of what is too long to read."""
    if len(text) <= _LONGEST:
        return text
    half = _LONGEST // 2
    return f"{text[:half]} … ({len(text) - 2 * half:,} characters) … {text[-half:]}"


def tolerate_any_text() -> None:
    """Escape what the encoding of the output cannot express, such as names that are not UTF-8."""
    for stream in (sys.stdout, sys.stderr):
        # Not every stream can: it may be closed, replaced, or a pipe that was opened for both ways.
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
