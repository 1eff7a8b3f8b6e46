"""`lawa sweep`: every window of a run in one pass over its checkpoints."""

import importlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from torch_lawa.coefficients import coefficients_help
from torch_lawa.metrics import Row

if TYPE_CHECKING:
    from torch_lawa.offline.sweep import SweepPlan

__all__ = ["command"]

_EXAMPLES = """
\b
Examples:
  lawa sweep runs/gpt --k 2,4,6,10,16 --evaluator mymodel.eval:evaluate
  lawa sweep runs/gpt --k 4,8 --at 8000,9000 -o averages

An evaluator is a function that takes a state dict and returns named values:

\b
  def evaluate(state_dict):
      model.load_state_dict(state_dict)
      return {"val_loss": ...}

The windows of a run of `lawa train --save-trajectory`, evaluated as the run did:

\b
  lawa sweep RUN/trajectory --k 3,6,10 --evaluator RUN
"""


@click.command(epilog=_EXAMPLES)
@click.argument("run", nargs=-1, required=True, metavar="RUN...")
@click.option("--k", "ks", required=True, metavar="K,K,...", help="Lengths of the windows.")
@click.option("--at", metavar="STEP,...", help="Windows end here; at every checkpoint by default.")
@click.option("--from", "start", type=int, metavar="STEP", help="No checkpoint before this step.")
@click.option("--to", "stop", type=int, metavar="STEP", help="No checkpoint after this step.")
@click.option("--every", type=int, metavar="N", help="Only steps that are multiples of N.")
@click.option(
    "--evaluator",
    metavar="MODULE:FUNCTION",
    help="Called with each result; or the folder of a `lawa train` run, to evaluate as it did.",
)
@click.option(
    "--metrics",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Rows of the evaluator; metrics.jsonl unless given. What it has is not done again.",
)
@click.option("--raw/--no-raw", default=True, help="Evaluate each checkpoint by itself too.")
@click.option("-o", "--output", metavar="OUT", help="Folder to write the results to.")
@click.option("--coefficients", default="uniform", show_default=True, metavar="RULE",
              help=f"One of: {coefficients_help()}.")  # fmt: skip
@click.option("--key", metavar="KEY", help="The entry of a PyTorch file that holds the weights.")
@click.option(
    "--scratch",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    metavar="FOLDER",
    help="Where results lie until they are evaluated.",
)
@click.option("--threads", type=click.IntRange(min=1), metavar="N", help="One a core by default.")
@click.option("--dry-run", is_flag=True, help="Print the plan and make nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print rows for programs, one a line.")
def command(
    run: tuple[str, ...],
    ks: str,
    at: str | None,
    start: int | None,
    stop: int | None,
    every: int | None,
    evaluator: str | None,
    metrics: Path | None,
    raw: bool,
    output: str | None,
    coefficients: str,
    key: str | None,
    scratch: Path | None,
    threads: int | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Average many windows of a run in one pass and evaluate them.

    Each result goes to an evaluator and becomes a row of metrics, or to a folder, or both.
    """
    from torch_lawa.cli.teamwork import refuse_team
    from torch_lawa.cli.working import while_shown
    from torch_lawa.offline.engine import Meter
    from torch_lawa.offline.sweep import plan_sweep, run_sweep

    refuse_team("a sweep")
    lengths = _numbers(ks, "--k")
    if evaluator and raw and 1 not in lengths:
        lengths.append(1)
    plan = plan_sweep(
        run,
        lengths,
        at=None if at is None else _numbers(at, "--at"),
        start=start,
        stop=stop,
        every=every,
        coefficients=coefficients,
        key=key,
    )
    if dry_run:
        click.echo(json.dumps(_as_json(plan), indent=2) if as_json else str(plan))
        return
    if evaluator is None and output is None:
        raise click.UsageError("give --evaluator, -o, or both")
    if not as_json:
        click.echo(str(plan), err=True)
    meter = Meter()
    rows = while_shown(
        lambda: run_sweep(
            plan,
            evaluator=_load(evaluator) if evaluator else None,
            metrics=(metrics or Path("metrics.jsonl")) if evaluator else None,
            output=output,
            scratch=scratch,
            threads=threads,
            meter=meter,
            on_row=_say_json if as_json else _say,
        ),
        meter,
        "Sweeping",
    )
    if not as_json:
        where = f"; rows in {metrics or 'metrics.jsonl'}" if evaluator else ""
        results = f"; results in {output}" if output else ""
        click.echo(f"{len(rows)} evaluated{where}{results}.", err=True)


def _numbers(text: str, option: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise click.BadParameter(
            f"{text!r} is not a list of whole numbers like 2,4,6", param_hint=option
        ) from None


def _load(name: str) -> Callable[[Any], Mapping[str, Any]]:
    """`package.module:function`, looked for in the current folder first; or a run's folder."""
    if (Path(name) / "config.json").is_file():
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


def _say(row: Row) -> None:
    where = f"step {row['step']}" if "step" in row else f"epoch {row['epoch']}"
    who = "raw" if row["k"] is None else f"k = {row['k']}"
    known = {"step", "epoch", "coefficients", "weights", "k", "batch_norm", "evaluate_seconds"}
    values = (
        f"{name} {value:.6g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in row.items()
        if name not in known
    )
    # Not click.echo, which would write through the progress bar.
    print(f"{where:<12} {who:<7} {'  '.join(values)}", flush=True)


def _say_json(row: Row) -> None:
    print(json.dumps(row), flush=True)


def _as_json(plan: "SweepPlan") -> dict[str, Any]:
    return {
        "checkpoints": [{"path": str(f.location), "step": f.step, "epoch": f.epoch}
                        for f in plan.found],
        "windows": [{"k": w.k, "step": w.step, "epoch": w.epoch} for w in plan.windows],
        "coefficients": plan.coefficients,
        "result_bytes": plan.result_bytes,
        "notes": list(plan.notes),
    }  # fmt: skip
