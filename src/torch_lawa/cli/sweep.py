"""`lawa sweep`: average many windows of a run in one pass, and evaluate them."""

import importlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from torch_lawa.cli.options import (
    average_options,
    dry_run_option,
    parse_numbers,
    selection_options,
    threads_option,
)
from torch_lawa.cli.output import echo, escaped
from torch_lawa.metrics import Row
from torch_lawa.units import parse_number

if TYPE_CHECKING:
    from torch_lawa.offline.options import AverageOptions

__all__ = ["command"]

_EXAMPLES = """
\b
Examples:
  lawa sweep runs/gpt --k 2,4,6,10,16 --evaluator mymodel.eval:evaluate
  lawa sweep runs/gpt --k 4,8 --at 8000,9000 -o averages
  lawa sweep runs/gpt --horizon 0.1,0.25,0.5 --evaluator mymodel.eval:evaluate

An evaluator is a function that takes a state dict and returns named values:

\b
  def evaluate(state_dict):
      model.load_state_dict(state_dict)
      return {"val_loss": ...}

For a run of `lawa train --save-trajectory`, RUN itself can be the evaluator:

\b
  lawa sweep RUN/trajectory --k 3,6,10 --evaluator RUN
"""


@click.command(epilog=_EXAMPLES)
@click.argument("inputs", nargs=-1, required=True, metavar="RUN...")
@click.option(
    "--k", "ks", metavar="K,K,...", help="Window lengths: numbers of checkpoints to average."
)
@click.option(
    "--horizon",
    metavar="SHARE,...",
    help="Average all checkpoints in the last SHARE of the steps, e.g. 0.1,1/4.",
)
@click.option(
    "--at",
    metavar="STEP,...",
    show_default="every checkpoint",
    help="Steps (or epochs) at which windows end.",
)
@selection_options
@click.option(
    "--evaluator",
    metavar="MODULE:FUNCTION",
    help="Function that evaluates each average, or the folder of a `lawa train` run.",
)
@click.option(
    "--metrics",
    type=click.Path(path_type=Path, dir_okay=False),
    default="metrics.jsonl",
    show_default=True,
    metavar="FILE",
    help="File for the results of the evaluator; windows already in it are skipped.",
)
@click.option(
    "--raw/--no-raw", default=True, show_default=True, help="Also evaluate the raw checkpoints."
)
@click.option("-o", "--output", metavar="OUT", help="Folder to write the averages to.")
@average_options(without=("buffers", "layout", "max_shard_size"))
@click.option(
    "--scratch",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    metavar="FOLDER",
    show_default="the system's temporary folder",
    help="Folder for averages until they are evaluated.",
)
@threads_option
@dry_run_option
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON per row.")
def command(
    inputs: tuple[str, ...],
    ks: str | None,
    horizon: str | None,
    at: str | None,
    start: int | None,
    stop: int | None,
    every: int | None,
    evaluator: str | None,
    metrics: Path,
    raw: bool,
    output: str | None,
    options: "AverageOptions",
    scratch: Path | None,
    threads: int | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Average and evaluate many windows of a run in one pass.

    Averages are passed to an evaluator, whose results become rows of a metrics file, or are written
    to a folder, or both.
    """
    from torch_lawa.cli.progress import run_with_progress
    from torch_lawa.cli.ranks import require_one_process
    from torch_lawa.offline.sweep import run_sweep
    from torch_lawa.offline.sweep_plan import plan_sweep
    from torch_lawa.offline.threads import Meter

    require_one_process("a sweep")
    if ks is None and horizon is None:
        raise click.UsageError("Give --k, --horizon, or both.")
    lengths = [] if ks is None else parse_numbers(ks, int, "--k")
    if evaluator and raw and 1 not in lengths:
        lengths.append(1)
    plan = plan_sweep(
        inputs,
        lengths,
        horizons=() if horizon is None else parse_numbers(horizon, parse_number, "--horizon"),
        at=None if at is None else parse_numbers(at, int, "--at"),
        start=start,
        stop=stop,
        every=every,
        options=options,
    )
    if dry_run:
        echo(json.dumps(plan.to_json(), indent=2) if as_json else str(plan))
        return
    if evaluator is None and output is None:
        raise click.UsageError("Give --evaluator, -o, or both.")
    evaluate = _load(evaluator) if evaluator else None
    if not as_json:
        echo(str(plan), err=True)
    meter = Meter()
    rows = run_with_progress(
        lambda: run_sweep(
            plan,
            evaluator=evaluate,
            metrics=metrics if evaluator else None,
            output=output,
            scratch=scratch,
            threads=threads,
            meter=meter,
            on_row=_print_json if as_json else _print,
        ),
        meter,
        "Sweeping",
        # The bar wraps what is printed above it, and a row must be one line.
        shown=not (as_json and sys.stdout.isatty()),
    )
    if not as_json:
        known = len(plan.windows) - len(rows)
        skipped = f", {known} evaluated before (remove their rows to repeat them)" if known else ""
        evaluated = f"{len(rows)} evaluated{skipped}; rows in {metrics}. " if evaluator else ""
        results = f"Results in {output}." if output else ""
        echo((evaluated + results).strip(), err=True)


def _load(name: str) -> Callable[[Any], Mapping[str, Any]]:
    """Import `package.module:function`, from the current folder first; or load a run's folder."""
    if (Path(name) / "config.json").is_file():
        from importlib.metadata import entry_points  # takes a while

        for entry in entry_points(group="lawa.run_evaluators"):
            return entry.load()(Path(name))  # type: ignore[no-any-return]
    module, _, function = name.partition(":")
    if not function:
        raise click.BadParameter(
            f"{name!r} is neither package.module:function nor the folder of a `lawa train` run",
            param_hint="--evaluator",
        )
    sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise click.BadParameter(f"{name!r}: {error}", param_hint="--evaluator") from None
    if not callable(found):
        raise click.BadParameter(f"{name!r} is not a function", param_hint="--evaluator")
    return found  # type: ignore[no-any-return]


def _print(row: Row) -> None:
    from torch_lawa.offline.sweep_rows import IDENTITY

    where = f"step {row['step']}" if "step" in row else f"epoch {row['epoch']}"
    who = "raw" if row["k"] is None else f"k = {row['k']}"
    if "horizon" in row:
        who = f"horizon = {row['horizon']:.6g} ({who})"
    known = {*IDENTITY, "batch_norm", "evaluate_seconds"}
    values = (
        f"{name} {value:.6g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in row.items()
        if name not in known
    )
    # Not click.echo, which would write into the progress bar.
    print(escaped(f"{where:<12} {who:<7} {'  '.join(values)}"), flush=True)


def _print_json(row: Row) -> None:
    print(json.dumps(row), flush=True)
