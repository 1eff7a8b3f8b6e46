"""Signal handling for long work: Ctrl-C, SIGTERM and a closed terminal. Standard library only.

`interruptible` raises `KeyboardInterrupt` at once, for work that removes its own temporary files.
`interrupt_once` does so for a rank of torchrun, which may send the signal again during the cleanup.
`StopRequest` lets the current unit of work finish first. `noted_interrupts` remembers Ctrl-C.
"""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

__all__ = ["StopRequest", "interrupt_once", "interruptible", "noted_interrupts"]


@contextmanager
def noted_interrupts() -> Iterator[list[int]]:
    """Add each Ctrl-C in the block to a list, besides raising `KeyboardInterrupt` as usual.

    Libraries may turn a `KeyboardInterrupt` during their import into another error.
    """
    noted: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        noted.append(number)
        raise KeyboardInterrupt

    usual = signal.default_int_handler
    ours = _in_main_thread() and signal.getsignal(signal.SIGINT) is usual
    if ours:
        signal.signal(signal.SIGINT, interrupt)
    try:
        yield noted
    finally:
        if ours:
            signal.signal(signal.SIGINT, usual)


@contextmanager
def interruptible() -> Iterator[None]:
    """Make SIGTERM and SIGHUP raise `KeyboardInterrupt` in the block, as Ctrl-C does.

    A second SIGTERM ends the process. A second SIGHUP is ignored, because both the kernel and a
    shell may send one when a terminal closes. Signals that are ignored (as under nohup) or handled
    already are left alone, and so are all signals outside the main thread.
    """
    numbers = [getattr(signal, name, None) for name in ("SIGTERM", "SIGHUP")]
    handled = [
        number
        for number in numbers
        if number is not None and _in_main_thread() and signal.getsignal(number) is signal.SIG_DFL
    ]

    def interrupt(number: int, frame: FrameType | None) -> None:
        again = signal.SIG_DFL if number == signal.SIGTERM else signal.SIG_IGN
        signal.signal(number, again)
        raise KeyboardInterrupt

    for number in handled:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in handled:
            signal.signal(number, signal.SIG_DFL)


def interrupt_once() -> None:
    """From now on, raise `KeyboardInterrupt` at the first Ctrl-C or SIGTERM and ignore later ones.

    A rank gets Ctrl-C from the terminal and again from torchrun, which kills what is still running
    30 seconds later. Nothing should interrupt the cleanup before that.
    """
    numbers = (signal.SIGINT, signal.SIGTERM)

    def interrupt(number: int, frame: FrameType | None) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    for number in numbers:
        signal.signal(number, interrupt)


class StopRequest:
    """Ctrl-C or SIGTERM in the block sets `event`; a second one raises `KeyboardInterrupt`.

    The work asks `requested` (or waits for `event`) between two units and stops by itself. A
    launcher such as torchrun may repeat a signal that the terminal has already sent to every
    process: one that arrives within `repeat_seconds` of the first is taken as the same. Outside the
    main thread no signal is handled.

    >>> with StopRequest() as stop:
    ...     signal.raise_signal(signal.SIGTERM)
    ...     stop.requested
    True
    """

    def __init__(self, *, repeat_seconds: float = 0.0) -> None:
        self.event = threading.Event()
        self._repeat_seconds, self._first = repeat_seconds, 0.0
        self._before: dict[signal.Signals, Any] = {}

    @property
    def requested(self) -> bool:
        """Whether the work should stop."""
        return self.event.is_set()

    def __enter__(self) -> "StopRequest":
        if _in_main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        while self._before:
            signal.signal(*self._before.popitem())

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self.requested:
            self._first = time.monotonic()
            self.event.set()
        elif time.monotonic() - self._first >= self._repeat_seconds:
            raise KeyboardInterrupt


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
