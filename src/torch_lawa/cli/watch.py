"""`lawa watch`: follow a live run and keep an average of its latest checkpoints."""

import json
from typing import TYPE_CHECKING

import click

from torch_lawa.cli.options import average_options
from torch_lawa.cli.output import echo
from torch_lawa.signals import StopRequest
from torch_lawa.units import counted, few, format_bytes

if TYPE_CHECKING:
    from torch_lawa.offline.options import AverageOptions
    from torch_lawa.offline.watch.watcher import Averaged

__all__ = ["command"]

_EXAMPLES = """
\b
Examples:
  lawa watch runs/gpt --k 6 -o averaged            keep the latest average
  lawa watch runs/gpt -o 'averages/step-{step}'    keep every average
  lawa watch runs/gpt -o averaged --once           average existing checkpoints and exit
  lawa watch 'runs/gpt/step-*.pt' -o averaged.pt   only files that match

The checkpoints of the window are stored beside OUT, in OUT.window: as hard links, which take no
space until the trainer deletes its own files, or as copies if RUN is on another disk. Stop the
watch with Ctrl-C or SIGTERM; start it again to resume.
"""


@click.command(epilog=_EXAMPLES)
@click.argument("run")
@click.option(
    "-o",
    "--output",
    required=True,
    metavar="OUT",
    help="File or folder to write; put {step} in the name to keep every average.",
)
@click.option(
    "--k",
    type=click.IntRange(min=1),
    default=6,
    show_default=True,
    metavar="K",
    help="Number of checkpoints to average.",
)
@average_options()
@click.option(
    "--poll",
    type=click.FloatRange(min=0, min_open=True),
    default=10.0,
    show_default=True,
    metavar="SECONDS",
    help="Time between two checks for new checkpoints.",
)
@click.option(
    "--settle",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    show_default="twice --poll",
    help="Use a checkpoint once it has not changed for SECONDS.",
)
@click.option(
    "--once", is_flag=True, help="Process existing checkpoints, write at most one average and exit."
)
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON per average.")
def command(
    run: str,
    output: str,
    k: int,
    options: "AverageOptions",
    poll: float,
    settle: float | None,
    once: bool,
    as_json: bool,
) -> None:
    """Follow a live run; average again at each new checkpoint.

    RUN is the folder or URL of a run, or a pattern. A checkpoint is used once it is complete; the
    trainer may delete it afterwards. The averages are the same as those of `lawa average`.
    """
    from torch_lawa.cli.ranks import require_one_process
    from torch_lawa.offline.threads import BackgroundTask
    from torch_lawa.offline.watch.watcher import watch_run

    require_one_process("watching a run")
    broken_pipes: list[BrokenPipeError] = []
    with StopRequest() as stop:

        def say(text: str, err: bool) -> None:
            try:
                echo(text, err=err)
            except BrokenPipeError as error:  # nobody reads any more, as behind `| head`
                broken_pipes.append(error)
                stop.event.set()

        def show(averaged: "Averaged") -> None:
            for line in [json.dumps(averaged.to_json())] if as_json else _lines(averaged):
                say(line, err=False)

        def work() -> None:
            watch_run(
                run,
                output,
                k=k,
                poll=poll,
                settle=settle,
                once=once,
                options=options,
                on_average=show,
                on_message=lambda text: say(text, err=as_json),
                stop=stop.event,
            )

        # In a thread, so that signals are handled at any time, also while the work holds a lock.
        BackgroundTask(work).start().result()
    if broken_pipes:
        raise broken_pipes[0]
    if stop.requested:
        echo("Stopped.", err=as_json)


def _lines(averaged: "Averaged") -> list[str]:
    """What was written, and a warning if it contains NaN or Inf."""
    inputs, result = averaged.inputs, averaged.result
    unit = "epoch" if inputs[-1].step is None else "step"
    first, last = (i.epoch if i.step is None else i.step for i in (inputs[0], inputs[-1]))
    span = f"{unit} {last}" if len(inputs) == 1 else f"{unit}s {first} to {last}"
    lines = [
        f"{inputs[-1].label}: averaged {counted(len(inputs), 'checkpoint')}, {span} -> "
        f"{result.location} ({format_bytes(result.bytes_written)} in {result.seconds:.1f} s)"
    ]
    if result.not_finite:
        more = len(result.not_finite) - 1
        others = f" and {counted(more, 'other tensor')}" if more else ""
        where = f": so does {few(result.not_finite_in)}" if result.not_finite_in else ""
        lines.append(
            f"Warning: the mean of {result.not_finite[0]!r}{others} contains NaN or Inf{where}"
        )
    return lines
