"""Show long work while it runs: a bar with rate and time left, or nothing where nobody looks."""

import sys
import threading
from collections.abc import Callable
from typing import TypeVar

import click

from torch_lawa.offline.engine import Meter, Stopped

__all__ = ["while_shown"]

_T = TypeVar("_T")
_PATIENCE = 0.4  # seconds before a bar is worth its import


def while_shown(act: Callable[[], _T], meter: Meter, title: str) -> _T:
    """Run `act` beside a progress bar of `meter`; Ctrl-C stops it between two pieces."""
    made: list[_T] = []
    failed: list[BaseException] = []

    def work() -> None:
        try:
            made.append(act())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        thread.join(_PATIENCE)
        if thread.is_alive() and sys.stderr.isatty():
            _show(thread, meter, title)
        while thread.is_alive():  # with a time limit, so that Ctrl-C is noticed
            thread.join(1.0)
    except KeyboardInterrupt:
        meter.stop()
        thread.join()
        raise click.Abort from None
    if failed:
        if isinstance(failed[0], Stopped):
            raise click.Abort from None
        raise failed[0]
    return made[0]


def _show(thread: threading.Thread, meter: Meter, title: str) -> None:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(title, total=None)
        while thread.is_alive():
            progress.update(task, completed=meter.done, total=meter.total or None)
            thread.join(0.1)
