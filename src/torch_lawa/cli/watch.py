"""`lawa watch`: follow a live run and keep an average of its latest checkpoints."""

import contextlib
import json
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING

import click

from torch_lawa.coefficients import coefficients_help
from torch_lawa.units import format_bytes

if TYPE_CHECKING:
    from torch_lawa.offline.watch import Averaged

__all__ = ["command"]

_EXAMPLES = """
\b
Examples:
  lawa watch runs/gpt --k 6 -o averaged                   one average, always the newest
  lawa watch runs/gpt -o 'averages/step-{step}'           every average under its own name
  lawa watch runs/gpt -o averaged --once                  what is there now, for cron
  lawa watch 'runs/gpt/step-*.pt' -o averaged.pt          just what matches

The checkpoints of the window are kept beside OUT, in OUT.window, as hard links, which take no room
until the trainer deletes its own, or as copies where RUN is on another disk. Stop it with Ctrl-C
or SIGTERM; started again, it goes on.
"""


@click.command(epilog=_EXAMPLES)
@click.argument("run")
@click.option(
    "-o",
    "--output",
    required=True,
    metavar="OUT",
    help="File or folder to write; {step} in it keeps every average.",
)
@click.option(
    "--k", type=click.IntRange(min=1), default=6, show_default=True, help="Checkpoints to average."
)
@click.option(
    "--coefficients",
    default="uniform",
    show_default=True,
    metavar="RULE",
    help=f"One of: {coefficients_help()}.",
)
@click.option("--dtype", metavar="DTYPE", help="Write floats as float32, bfloat16, ...")
@click.option("--include", multiple=True, metavar="PATTERN", help="Only tensors with such names.")
@click.option("--exclude", multiple=True, metavar="PATTERN", help="No tensors with such names.")
@click.option("--key", metavar="KEY", help="The entry of a PyTorch file that holds the weights.")
@click.option(
    "--poll",
    type=click.FloatRange(min=0, min_open=True),
    default=10.0,
    show_default=True,
    metavar="SECONDS",
    help="Time between two looks.",
)
@click.option(
    "--settle",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    help="Take what has not changed for so long; twice --poll unless given.",
)
@click.option("--once", is_flag=True, help="Take what is there, write at most one average, exit.")
@click.option("--json", "as_json", is_flag=True, help="Print a line of JSON for each average.")
def command(
    run: str,
    output: str,
    k: int,
    coefficients: str,
    dtype: str | None,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    key: str | None,
    poll: float,
    settle: float | None,
    once: bool,
    as_json: bool,
) -> None:
    """Follow a live run and write a new average when a checkpoint lands.

    RUN is the folder or URL of a run, or a pattern. A checkpoint is taken once it is complete; the
    trainer may delete it then. The averages are those of `lawa average`.
    """
    from torch_lawa.cli.teamwork import refuse_team

    refuse_team("watching a run")
    stop = threading.Event()
    unheard: list[BrokenPipeError] = []

    def say(text: str, err: bool) -> None:
        """Nobody reads any more, as behind `| head`: the watch ends as with Ctrl-C."""
        try:
            click.echo(text, err=err)
        except BrokenPipeError as error:
            unheard.append(error)
            stop.set()

    def tell(averaged: "Averaged") -> None:
        for line in [json.dumps(averaged.to_json())] if as_json else _lines(averaged):
            say(line, err=False)

    def work() -> None:
        from torch_lawa.offline.watch import watch_run

        watch_run(
            run,
            output,
            k=k,
            coefficients=coefficients,
            dtype=dtype,
            include=include,
            exclude=exclude,
            key=key,
            poll=poll,
            settle=settle,
            once=once,
            on_average=tell,
            on_message=lambda text: say(text, err=as_json),
            stop=stop,
        )

    with _signals(stop):
        _run_aside(work)
    if unheard:
        raise unheard[0]
    if stop.is_set():
        click.echo("Stopped.", err=as_json)


@contextlib.contextmanager
def _signals(stop: threading.Event) -> Iterator[None]:
    """Ctrl-C and SIGTERM end the watch; a second one ends it at once."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def end(number: int, frame: FrameType | None) -> None:
        stop.set()
        restore()

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    for number in before:
        signal.signal(number, end)
    try:
        yield
    finally:
        restore()


def _run_aside(work: Callable[[], None]) -> None:
    """In a thread of its own: a signal's handler must not wait for a lock that its thread holds."""
    failed: list[BaseException] = []
    ended = threading.Event()

    def guarded() -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)
        finally:
            ended.set()

    threading.Thread(target=guarded, daemon=True).start()
    while not ended.wait(1.0):  # with a time limit, so that signals are noticed
        pass
    if failed:
        raise failed[0]


def _lines(averaged: "Averaged") -> list[str]:
    """For people: what was written, and what is wrong with it."""
    inputs, result = averaged.inputs, averaged.result
    unit = "epoch" if inputs[-1].step is None else "step"
    first, last = (i.epoch if i.step is None else i.step for i in (inputs[0], inputs[-1]))
    span = f"{unit} {last}" if len(inputs) == 1 else f"{unit}s {first} to {last}"
    lines = [
        f"{inputs[-1].label}: averaged {len(inputs)} checkpoints, {span} -> {result.location} "
        f"({format_bytes(result.bytes_written)} in {result.seconds:.1f} s)"
    ]
    if result.not_finite:
        more = len(result.not_finite) - 1
        others = f" and {more} other tensors" if more else ""
        lines.append(f"warning: the mean of {result.not_finite[0]!r}{others} holds NaN or Inf")
    return lines
