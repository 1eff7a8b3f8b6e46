"""`lawa inspect`: what a checkpoint or a run holds, or how two checkpoints differ."""

import json
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from torch_lawa.offline.difference import Difference

__all__ = ["command"]

_EXAMPLES = """
\b
Examples:
  lawa inspect averaged                     what it holds and how it was made
  lawa inspect runs/gpt                     the checkpoints of a run
  lawa inspect averaged runs/gpt/step-9000  how two differ, tensor by tensor
  lawa inspect s3://bucket/mean.safetensors --tensors
"""


@click.command(epilog=_EXAMPLES, short_help="Show what a checkpoint holds, or how two differ.")
@click.argument("path", metavar="PATH")
@click.argument("path2", metavar="[PATH2]", required=False)
@click.option("--tensors", is_flag=True, help="List every tensor (of two: every one that differs).")
@click.option("--key", metavar="KEY", help="The entry of a PyTorch file that holds the weights.")
@click.option("--json", "as_json", is_flag=True, help="Print for programs.")
def command(path: str, path2: str | None, tensors: bool, key: str | None, as_json: bool) -> None:
    """Show what a checkpoint or a run's folder holds, or how two checkpoints differ.

    A path is whatever `lawa average` takes. Distances are in float64, relative to PATH.
    """
    from torch_lawa.offline.inspection import Inspection, inspect

    if path2 is None:
        found = inspect(path, key)
        if as_json:
            _print(found.to_json(tensors=tensors))
            return
        click.echo(str(found))
        if tensors and isinstance(found, Inspection):
            click.echo("\n" + found.list_tensors())
        return
    difference = _compare(path, path2, key)
    if as_json:
        _print(difference.to_json())
    else:
        click.echo(difference.describe(worst=None) if tensors else str(difference))


def _compare(a: str, b: str, key: str | None) -> "Difference":
    from torch_lawa.cli.progress import while_shown
    from torch_lawa.offline.comparison import compare_checkpoints
    from torch_lawa.offline.engine import Meter

    meter = Meter()
    return while_shown(lambda: compare_checkpoints(a, b, key, meter=meter), meter, "Comparing")


def _print(found: object) -> None:
    click.echo(json.dumps(found, indent=2))
