"""`lawa average`: the mean of checkpoints that lie on disk."""

import json
from typing import TYPE_CHECKING

import click

from torch_lawa.coefficients import coefficients_help
from torch_lawa.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from torch_lawa.offline import Plan, Result

__all__ = ["command"]

_EXAMPLES = """
\b
Examples:
  lawa average runs/gpt --last 6 -o averaged              the six newest of a run
  lawa average runs/gpt --at 9000 --last 6 -o averaged    the six up to step 9000
  lawa average a.pt b.pt --weights 1,3 -o mean.pt         files, b counting three times
  lawa average 's3://bucket/run/step-*' -o averaged       patterns and URLs
  lawa average runs/gpt --last 8 --coefficients annealing:1-sqrt -o averaged

\b
Several processes or machines that share a disk make one result together:
  torchrun --nproc-per-node 4 -m torch_lawa average runs/gpt --last 6 -o averaged
"""


@click.command(epilog=_EXAMPLES)
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...")
@click.option("-o", "--output", required=True, metavar="OUT", help="File, folder or URL to write.")
@click.option("--last", type=int, metavar="K", help="The K newest checkpoints.")
@click.option("--at", type=int, metavar="STEP", help="The window ends at this step (or epoch).")
@click.option("--from", "start", type=int, metavar="STEP", help="Not before this step.")
@click.option("--to", "stop", type=int, metavar="STEP", help="Not after this step.")
@click.option("--every", type=int, metavar="N", help="Only steps that are multiples of N.")
@click.option(
    "--coefficients",
    default="uniform",
    show_default=True,
    metavar="RULE",
    help=f"One of: {coefficients_help()}.",
)
@click.option("--weights", metavar="W,W,...", help="One weight for each INPUT, in their order.")
@click.option("--dtype", metavar="DTYPE", help="Write floats as float32, bfloat16, ...")
@click.option("--include", multiple=True, metavar="PATTERN", help="Only tensors with such names.")
@click.option("--exclude", multiple=True, metavar="PATTERN", help="No tensors with such names.")
@click.option(
    "--buffers",
    type=click.Choice(["newest", "average"]),
    default="newest",
    show_default=True,
    help="BatchNorm statistics.",
)
@click.option("--strip-prefix", default="", metavar="PREFIX", help="Leave this off every name.")
@click.option("--key", metavar="KEY", help="The entry of a PyTorch file that holds the weights.")
@click.option(
    "--layout",
    type=click.Choice(["single", "sharded", "distributed"]),
    help="Layout of the output; that of the inputs unless given.",
)
@click.option("--max-shard-size", metavar="SIZE", help="Split into shards of at most, e.g., 5GB.")
@click.option("--digests", is_flag=True, help="Note the SHA-256 of every input in the result.")
@click.option("--threads", type=int, metavar="N", help="Threads; one a core unless given.")
@click.option("--overwrite", is_flag=True, help="Replace OUT if it exists.")
@click.option("--dry-run", is_flag=True, help="Print the plan and write nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print for programs.")
def command(
    inputs: tuple[str, ...],
    output: str,
    last: int | None,
    at: int | None,
    start: int | None,
    stop: int | None,
    every: int | None,
    coefficients: str,
    weights: str | None,
    dtype: str | None,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    buffers: str,
    strip_prefix: str,
    key: str | None,
    layout: str | None,
    max_shard_size: str | None,
    digests: bool,
    threads: int | None,
    overwrite: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Average checkpoints: files, folders, patterns, URLs or a run.

    Reads safetensors, sharded folders, PyTorch files, distributed checkpoints and adapters, each
    byte once, and writes the same layout with the exact mean (float64, rounded once).
    """
    from torch_lawa.cli.teamwork import as_team
    from torch_lawa.cli.working import while_shown
    from torch_lawa.offline import average_checkpoints, plan_average
    from torch_lawa.offline.engine import Meter

    meter = Meter()
    with as_team(output, meter, threads=threads, alone=dry_run) as leader:
        plan = plan_average(
            inputs,
            output,
            last=last,
            at=at,
            start=start,
            stop=stop,
            every=every,
            coefficients=coefficients,
            weights=None if weights is None else _numbers(weights),
            dtype=dtype,
            include=include,
            exclude=exclude,
            buffers=buffers,  # type: ignore[arg-type]
            strip_prefix=strip_prefix,
            key=key,
            layout=layout,
            max_shard_size=None if max_shard_size is None else parse_bytes(max_shard_size),
            overwrite=overwrite,
        )
        if dry_run:
            click.echo(json.dumps(plan.to_json(), indent=2) if as_json else str(plan))
            return
        if not as_json:
            for note in plan.notes:
                click.echo(f"Note: {note}", err=True)
        result = while_shown(
            lambda: average_checkpoints(
                plan, threads=threads, digests=digests, meter=meter, leader=leader
            ),
            meter,
            "Averaging",
        )
    if as_json:
        click.echo(json.dumps({**plan.to_json(), **result.to_json()}, indent=2))
    else:
        _say(plan, result)


def _say(plan: "Plan", result: "Result") -> None:
    if result.not_finite:
        more = len(result.not_finite) - 1
        click.echo(
            f"Warning: the mean of {result.not_finite[0]!r}"
            + (f" and {more} other tensors" if more else "")
            + f" holds NaN or Inf, as {_why_not_finite(plan, result)}.",
            err=True,
        )
    first, newest = plan.inputs[0].label, plan.inputs[-1].label
    rate = result.bytes_read / max(result.seconds, 1e-9)
    many = len(plan.inputs) > 1
    inputs = f"{len(plan.inputs)} checkpoints, {first} to {newest}" if many else first
    click.echo(
        f"{result.location}: the mean of {inputs}. "
        f"Read {format_bytes(result.bytes_read)} in {result.seconds:.2f} s "
        f"({format_bytes(rate)}/s), wrote {format_bytes(result.bytes_written)}."
    )


def _why_not_finite(plan: "Plan", result: "Result") -> str:
    """What to look into; whether a checkpoint holds them is known only where dtypes are kept."""
    narrowed = {
        t.target.dtype
        for t in plan.tensors
        if t.name in result.not_finite and t.source.dtype != t.target.dtype
    }
    if not narrowed:
        return "a checkpoint does"
    return f"a checkpoint does, or as values are too large for {', '.join(sorted(narrowed))}"


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise click.BadParameter(
            f"{text!r} is not a list of numbers like 1,2,3", param_hint="--weights"
        ) from None
