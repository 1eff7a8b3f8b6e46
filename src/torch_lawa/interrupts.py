"""Ctrl-C, and other exceptions that may arrive at any line."""

from collections.abc import Callable

__all__ = ["despite_interrupt"]


def despite_interrupt(act: Callable[[], None]) -> None:
    """Call `act` again if an interrupt ends it half-way, then raise; it must be repeatable.

    >>> despite_interrupt(lambda: print("restored"))
    restored
    """
    try:
        act()
    except BaseException:
        act()
        raise
