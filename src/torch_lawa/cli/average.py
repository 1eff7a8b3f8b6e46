"""`lawa average`: average checkpoints on disk or on a server."""

import json
import os
from typing import TYPE_CHECKING

import click

from torch_lawa.checkpoints.formats.registry import format_titles
from torch_lawa.cli.options import (
    ParsedNumber,
    average_options,
    dry_run_option,
    json_option,
    parse_numbers,
    selection_options,
    threads_option,
)
from torch_lawa.cli.output import echo
from torch_lawa.garbage import paused_garbage_collection
from torch_lawa.units import counted, few, format_bytes, parse_number

if TYPE_CHECKING:
    from torch_lawa.checkpoints.find.scores import Mode
    from torch_lawa.offline.average import Result
    from torch_lawa.offline.options import AverageOptions
    from torch_lawa.offline.plan import AveragePlan

__all__ = ["command"]

_EXAMPLES = f"""
Formats: {", ".join(format_titles())}.

\b
Examples:
  lawa average runs/gpt --last 6 -o averaged             the last six
  lawa average runs/gpt --at 9000 --last 6 -o averaged   the six up to step 9000
  lawa average runs/gpt --horizon 0.25 -o averaged       the last quarter of the run
  lawa average runs/gpt --best 5 --metric eval_loss -o averaged
  lawa average a.pt b.pt --weights 1,3 -o mean.pt        b has three times the weight
  lawa average 's3://bucket/run/step-*' -o averaged      patterns and URLs
  lawa average runs/gpt --last 8 --coefficients annealing:1-sqrt -o averaged

\b
Several processes, or machines with a shared disk, can write one result:
  torchrun --nproc-per-node 4 -m torch_lawa average runs/gpt --last 6 -o out
"""


@click.command(epilog=_EXAMPLES)
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...")
@click.option("-o", "--output", required=True, metavar="OUT", help="File, folder or URL to write.")
@click.option("--last", type=int, metavar="K", help="Average the last K checkpoints of a run.")
@click.option(
    "--horizon",
    type=ParsedNumber("share", parse_number),
    metavar="SHARE",
    help="Average all checkpoints in the last SHARE of the steps, e.g. 0.25 or 1/4.",
)
@click.option("--at", type=int, metavar="STEP", help="End the window at this step (or epoch).")
@selection_options
@click.option("--best", type=int, metavar="N", help="Average the N best checkpoints by --metric.")
@click.option("--metric", metavar="NAME", help="Metric for --best, e.g. valid_loss.")
@click.option(
    "--mode",
    type=click.Choice(["min", "max"]),
    show_default="from the metric's name",
    help="Whether lower or higher values are better.",
)
@click.option(
    "--metrics",
    type=click.Path(),
    metavar="FILE",
    show_default="values stored with the checkpoints",
    help="JSON Lines file with the metric values, each with a step or epoch.",
)
@click.option("--weights", metavar="W,W,...", help="One weight per INPUT, in the same order.")
@average_options()
@click.option("--digests", is_flag=True, help="Store the SHA-256 of every input file in OUT.")
@threads_option
@click.option("--overwrite", is_flag=True, help="Replace OUT if it exists.")
@dry_run_option
@json_option
def command(
    inputs: tuple[str, ...],
    output: str,
    last: int | None,
    horizon: float | None,
    at: int | None,
    start: int | None,
    stop: int | None,
    every: int | None,
    best: int | None,
    metric: str | None,
    mode: "Mode | None",
    metrics: str | None,
    weights: str | None,
    options: "AverageOptions",
    digests: bool,
    threads: int | None,
    overwrite: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Average checkpoints: files, folders, patterns, URLs or a run.

    The inputs are read once. OUT has the layout of the newest input and contains the exact mean,
    summed in float64 and rounded once.
    """
    # NumPy's linear algebra would start a thread per core when it is imported; none is used here.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from torch_lawa.cli.progress import run_with_progress
    from torch_lawa.cli.ranks import averaging
    from torch_lawa.offline.plan import plan_average
    from torch_lawa.offline.threads import Meter

    meter = Meter()
    with (
        paused_garbage_collection(),  # a plan of 100,000 tensors would be traversed many times
        averaging(output, meter, threads=threads, dry_run=dry_run) as run_average,
    ):
        plan = plan_average(
            inputs,
            output,
            last=last,
            horizon=horizon,
            at=at,
            start=start,
            stop=stop,
            every=every,
            best=best,
            metric=metric,
            mode=mode,
            metrics=metrics,
            weights=None if weights is None else parse_numbers(weights, parse_number, "--weights"),
            overwrite=overwrite,
            options=options,
        )
        if dry_run:
            echo(json.dumps(plan.to_json(), indent=2) if as_json else str(plan))
            return
        if not as_json:
            for note in plan.notes:
                echo(f"Note: {note}", err=True)
        result = run_with_progress(
            lambda: run_average(plan, threads=threads, digests=digests, meter=meter),
            meter,
            "Averaging",
        )
    if as_json:
        echo(json.dumps({**plan.to_json(), **result.to_json()}, indent=2))
    else:
        _print(plan, result)


def _print(plan: "AveragePlan", result: "Result") -> None:
    if result.not_finite:
        echo(f"Warning: {_not_finite(plan, result)}", err=True)
    first, newest = plan.inputs[0].label, plan.inputs[-1].label
    rate = result.bytes_read / max(result.seconds, 1e-9)
    many = len(plan.inputs) > 1
    inputs = f"{counted(len(plan.inputs), 'checkpoint')}, {first} to {newest}" if many else first
    echo(
        f"{result.location}: the mean of {inputs}. "
        f"Read {format_bytes(result.bytes_read)} in {result.seconds:.2f} s "
        f"({format_bytes(rate)}/s), wrote {format_bytes(result.bytes_written)}."
    )


def _not_finite(plan: "AveragePlan", result: "Result") -> str:
    """Which tensors contain NaN or Inf, and why that is."""
    more = len(result.not_finite) - 1
    others = f" and {counted(more, 'other tensor')}" if more else ""
    overflowed = [t for t in plan.tensors if t.name in result.overflowed]
    narrow = {t.target.dtype for t in overflowed if t.source.dtype != t.target.dtype}
    causes = [f"so does {few(result.not_finite_in)}"] if result.not_finite_in else []
    if narrow:
        causes.append(f"values are too large for {', '.join(sorted(narrow))}")
    if any(t.source.dtype == t.target.dtype for t in overflowed):
        causes.append("the sum of the values of all checkpoints overflows")
    why = ", and ".join(causes)
    return f"the mean of {result.not_finite[0]!r}{others} contains NaN or Inf: {why}."
