"""`lawa plan`: what a window of k snapshots costs a run, before the run is started."""

import dataclasses
import json
from collections.abc import Callable

import click

from torch_lawa.capacity.estimate import TrainingRun, cost_of, parse_count
from torch_lawa.capacity.fit import check_fit
from torch_lawa.capacity.machine import RECORD, Machine
from torch_lawa.cli.options import ParsedNumber, json_option
from torch_lawa.errors import ConfigError

__all__ = ["command"]

_EXAMPLES = f"""
\b
Examples:
  lawa plan --params 70e9 --gpus 512
  lawa plan --params 70B --gpus 64 --nu 100 --step-seconds 4 --store disk
  lawa plan --params 400B --gpus 1024 --k 16 --storage-dtype bfloat16
  lawa plan --params 1.3B --gpus 8 --sharding ddp --json

Constants marked H200 were measured ({RECORD}); for the
assumed ones, give your own values.
"""


def _machine_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add one option for each constant of `Machine`."""
    for item in reversed(dataclasses.fields(Machine)):
        about = item.metadata
        default = f"{item.default:g} {about['unit']}".strip()
        command = click.option(
            f"--{item.name.replace('_', '-')}",
            type=float,
            default=item.default,
            metavar="X",
            help=f"{about['what']}  [{default}; {about['source']}]",
        )(command)
    return command


@click.command("plan", epilog=_EXAMPLES)
@click.option(
    "--params",
    type=ParsedNumber("count", parse_count),
    required=True,
    metavar="N",
    help="Number of parameters, such as 70e9, 70B or 1.3B.",
)
@click.option("--gpus", type=int, required=True, metavar="N", help="Total number of GPUs.")
@click.option(
    "--gpus-per-node",
    type=int,
    metavar="N",
    show_default="8, or all if fewer",
    help="GPUs per node.",
)
@click.option(
    "--k",
    type=int,
    metavar="N",
    default=6,
    show_default=True,
    help="Number of snapshots in the window.",
)
@click.option(
    "--dtype",
    default="float32",
    show_default=True,
    metavar="DTYPE",
    help="Dtype of the weights: float32, bfloat16 or float16.",
)
@click.option(
    "--storage-dtype",
    metavar="DTYPE",
    show_default="that of the weights",
    help="Dtype of the snapshots: bfloat16 or float16.",
)
@click.option(
    "--store",
    default="host",
    metavar="STORE",
    show_default=True,
    help="Where snapshots are stored: host, device or disk.",
)
@click.option(
    "--sharding",
    default="fsdp",
    metavar="KIND",
    show_default=True,
    help="fsdp (sharded weights) or ddp (replicated).",
)
@click.option("--nu", type=int, metavar="STEPS", help="Training steps between two snapshots.")
@click.option(
    "--step-seconds", type=float, metavar="S", help="Duration of a training step in seconds."
)
@_machine_options
@json_option
def command(
    params: int,
    gpus: int,
    gpus_per_node: int | None,
    k: int,
    dtype: str,
    storage_dtype: str | None,
    store: str,
    sharding: str,
    nu: int | None,
    step_seconds: float | None,
    as_json: bool,
    **machine: float,
) -> None:
    """Estimate what averaging costs: memory, bandwidth, time.

    Print whether a window of K snapshots fits, and if not, what to change. Nothing is run. GB are
    10⁹ bytes, GiB are 2³⁰ bytes.
    """
    try:
        run = TrainingRun(
            params=params,
            gpus=gpus,
            gpus_per_node=min(8, max(1, gpus)) if gpus_per_node is None else gpus_per_node,
            k=k,
            dtype=dtype,
            storage_dtype=storage_dtype,
            store=store,
            sharding=sharding,
            nu=nu,
            step_seconds=step_seconds,
            machine=Machine(**machine),
        )
    except ConfigError as error:
        raise click.UsageError(str(error)) from None
    from torch_lawa.cli.plan_text import as_dict, as_text

    cost = cost_of(run)
    fit = check_fit(cost)
    if as_json:
        click.echo(json.dumps(as_dict(cost, fit), indent=2))
    else:
        click.echo(as_text(cost, fit))
