"""Show long work while it runs: a bar with rate and time left, or nothing where nobody looks."""

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

import click

from torch_lawa.offline.engine import Meter, Stopped

__all__ = ["while_shown"]

_T = TypeVar("_T")
_PATIENCE = 0.4  # seconds before a bar is worth its import
_WIDE = 60  # columns of a terminal that hold a bar with its figures


def while_shown(act: Callable[[], _T], meter: Meter, title: str, *, shown: bool = True) -> _T:
    """Run `act` beside a progress bar of `meter`; Ctrl-C stops it between two pieces.

    So do SIGTERM and SIGHUP (a time limit, a terminal that closed): what was written aside may be
    as large as the model, and must not stay.
    """
    made: list[_T] = []
    failed: list[BaseException] = []
    # An event rather than `join`, which after a Ctrl-C may take a running thread for ended.
    begun, ended = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        try:
            made.append(act())
        except BaseException as error:
            failed.append(error)
        finally:
            ended.set()

    with _interrupting():
        try:
            threading.Thread(target=work, daemon=True).start()
            if not ended.wait(_PATIENCE) and shown and sys.stderr.isatty():
                _show(ended, meter, title)
            while not ended.wait(1.0):  # with a time limit, so that Ctrl-C is noticed
                pass
        except BaseException as error:  # Ctrl-C, or a bar on a terminal that is gone
            meter.stop()
            if begun.is_set():
                ended.wait()
            if not made:  # else too late: it is done, and nothing is gained by hiding that
                if isinstance(error, KeyboardInterrupt):
                    raise click.Abort from None
                raise
    if failed:
        if isinstance(failed[0], Stopped):
            raise click.Abort from None
        raise failed[0]
    return made[0]


@contextmanager
def _interrupting() -> Iterator[None]:
    """Take the signals that would end the process at once for a Ctrl-C.

    A second SIGTERM does end it; of a terminal that closes, the kernel and a shell may both tell.
    """
    names = [name for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    numbers = [getattr(signal, name) for name in names]
    here = threading.current_thread() is threading.main_thread()
    # One that is ignored, as under nohup, stays so.
    taken = [n for n in numbers if here and signal.getsignal(n) is signal.SIG_DFL]

    def interrupt(number: int, frame: FrameType | None) -> None:
        again = signal.SIG_DFL if number == signal.SIGTERM else signal.SIG_IGN
        signal.signal(number, again)
        raise KeyboardInterrupt

    for number in taken:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


def _show(ended: threading.Event, meter: Meter, title: str) -> None:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    console = Console(stderr=True)
    figures = (DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    narrow = (TaskProgressColumn(),)  # all of them would be cut, and on two lines
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=40 if console.width >= _WIDE else None),
        *(figures if console.width >= _WIDE else narrow),
    )
    # Lines that the work prints meanwhile go above the bar, or to the file they are sent to.
    with Progress(
        *columns,
        console=console,
        transient=True,
        redirect_stdout=sys.stdout.isatty(),
    ) as progress:
        task = progress.add_task(title, total=None)
        while not ended.is_set():
            progress.update(task, completed=meter.done, total=meter.total or None)
            ended.wait(0.1)
