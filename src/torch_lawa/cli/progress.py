"""Run long work in a background thread, with a progress bar on a terminal."""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import click

from torch_lawa.cli.signals import interruptible
from torch_lawa.offline.engine import BackgroundTask, Meter, Stopped

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, ProgressColumn

__all__ = ["run_with_progress"]

_T = TypeVar("_T")
_PATIENCE = 0.4  # seconds before importing rich and showing a bar is worth it
_WIDE = 60  # columns of a terminal that hold a bar and its figures


def run_with_progress(act: Callable[[], _T], meter: Meter, title: str, *, shown: bool = True) -> _T:
    """Run `act` with a progress bar for `meter` and return its result.

    Ctrl-C, SIGTERM (a time limit) and SIGHUP (a closed terminal) stop it between two pieces, so
    that it removes its temporary files, which may be as large as the model.
    """
    task = BackgroundTask(act)
    with interruptible():
        try:
            task.start()
            if not task.wait(_PATIENCE) and shown and sys.stderr.isatty():
                _show(task, meter, title)
            return task.result()
        except BaseException as error:  # from `act`, a signal, or a bar on a closed terminal
            meter.stop()
            task.end()
            if task.succeeded:  # the signal came too late: the work is done
                return task.result()
            if isinstance(error, KeyboardInterrupt | Stopped):
                raise click.Abort from None
            raise


def make_bar(
    figures: "tuple[ProgressColumn, ...]",
    narrow: "tuple[ProgressColumn, ...]",
    console: "Console",
    *,
    redirect_stdout: bool = True,
) -> "Progress":
    """A bar with its title and `figures`, or only `narrow` ones where the terminal is narrow."""
    from rich.progress import BarColumn, Progress, TextColumn

    is_wide = console.width >= _WIDE
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=40 if is_wide else None),
        *(figures if is_wide else narrow),
        console=console,
        transient=True,
        redirect_stdout=redirect_stdout,
    )


def _show(task: BackgroundTask[_T], meter: Meter, title: str) -> None:
    from rich.console import Console
    from rich.progress import (
        DownloadColumn,
        TaskProgressColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    figures = (DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    # Lines that the work prints meanwhile go above the bar, or to the file they are sent to.
    redirect = sys.stdout.isatty()
    console = Console(stderr=True)
    with make_bar(figures, (TaskProgressColumn(),), console, redirect_stdout=redirect) as bar:
        shown = bar.add_task(title, total=None)
        while not task.wait(0.1):
            bar.update(shown, completed=meter.done, total=meter.total or None)
