"""`lawa inspect`: what a checkpoint or a run contains, or how two checkpoints differ."""

import json
from typing import TYPE_CHECKING

import click

from torch_lawa.cli.options import json_option, key_option
from torch_lawa.cli.output import echo

if TYPE_CHECKING:
    from torch_lawa.offline.inspect.difference import Difference

__all__ = ["command"]

_EXAMPLES = """
\b
Examples:
  lawa inspect averaged                     contents, and how it was made
  lawa inspect runs/gpt                     the checkpoints of a run
  lawa inspect averaged runs/gpt/step-9000  the difference, tensor by tensor
  lawa inspect s3://bucket/mean.safetensors --tensors
"""


@click.command(epilog=_EXAMPLES, short_help="Show what a checkpoint contains, or compare two.")
@click.argument("path", metavar="PATH")
@click.argument("path2", metavar="[PATH2]", required=False)
@click.option(
    "--tensors", is_flag=True, help="List every tensor, or with PATH2 every tensor that differs."
)
@key_option
@json_option
def command(path: str, path2: str | None, tensors: bool, key: str | None, as_json: bool) -> None:
    """Show what a checkpoint or a run contains, or how two checkpoints differ.

    PATH is a file, a folder, a pattern or a URL. Differences are computed in float64; relative
    distances are relative to PATH.
    """
    from torch_lawa.offline.inspect.inspection import Inspection, inspect_path

    if path2 is None:
        found = inspect_path(path, key)
        if as_json:
            _print_json(found.to_json(tensors=tensors))
            return
        echo(str(found))
        if tensors and isinstance(found, Inspection):
            echo("\n" + found.list_tensors())
        return
    difference = _compare(path, path2, key)
    if as_json:
        _print_json(difference.to_json())
    else:
        echo(difference.describe(worst=None) if tensors else str(difference))


def _compare(a: str, b: str, key: str | None) -> "Difference":
    from torch_lawa.cli.progress import run_with_progress
    from torch_lawa.offline.inspect.comparison import compare_checkpoints
    from torch_lawa.offline.threads import Meter

    meter = Meter()
    return run_with_progress(
        lambda: compare_checkpoints(a, b, key, meter=meter), meter, "Comparing"
    )


def _print_json(found: object) -> None:
    echo(json.dumps(found, indent=2))
