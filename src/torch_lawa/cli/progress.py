"""Run long work in a background thread, with a progress bar on a terminal."""

import sys
from collections.abc import Callable
from typing import TypeVar

import click

from torch_lawa.offline.threads import BackgroundTask, Meter, Stopped
from torch_lawa.signals import interruptible

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


def _show(task: BackgroundTask[_T], meter: Meter, title: str) -> None:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        ProgressColumn,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    console = Console(stderr=True)
    is_wide = console.width >= _WIDE
    figures: list[ProgressColumn] = [TaskProgressColumn()]
    if is_wide:
        figures = [DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()]
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=40 if is_wide else None),
        *figures,
        console=console,
        transient=True,
        # Lines that the work prints meanwhile go above the bar, or to the file they are sent to.
        redirect_stdout=sys.stdout.isatty(),
    ) as bar:
        shown = bar.add_task(title, total=None)
        while not task.wait(0.1):
            bar.update(shown, completed=meter.done, total=meter.total or None)
