"""The output of `lawa train`: one line per evaluation, and a progress bar on a terminal."""

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from lawa_lab.recipes.config import TrainConfig
from lawa_lab.recipes.evaluation import main_average
from lawa_lab.recipes.loop import TrainingCallback
from lawa_lab.recipes.quantization import is_rounded
from lawa_lab.recipes.run_folder import RunPlan
from lawa_lab.recipes.task import Worker
from torch_lawa.metrics import Row

__all__ = ["show_run"]


@contextlib.contextmanager
def show_run(
    plan: RunPlan, path: Path, worker: Worker, *, as_json: bool
) -> Iterator[TrainingCallback]:
    """A callback that prints on rank 0 and is silent on the other ranks."""
    if worker.rank:
        yield TrainingCallback()
        return
    if as_json:
        yield _Json()
        return
    console = Console(highlight=False)
    config = plan.config
    console.print(
        f"{config.recipe}, {plan.run_name}, seed {plan.seed}: {config.epochs} "
        f"epoch{'s'[: config.epochs != 1]} on {worker.device}"
        f"{f' × {worker.world_size}' if worker.world_size > 1 else ''}; run folder {path}",
        soft_wrap=True,
    )
    if not console.is_terminal:
        yield _Lines(config, console, None)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("steps, {task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        yield _Lines(config, console, progress)


class _Json(TrainingCallback):
    """Prints rows as they are written."""

    def on_rows(self, rows: list[Row]) -> None:
        """One JSON object per line."""
        for row in rows:
            print(json.dumps(row), flush=True)


class _Lines(TrainingCallback):
    """One line per evaluation: raw weights and the main average, with BatchNorm treated alike."""

    def __init__(self, config: TrainConfig, console: Console, progress: Progress | None) -> None:
        self._config, self._console, self._progress = config, console, progress
        self._begun = False

    def on_begin(self, step: int, num_steps: int, num_batches: int) -> None:
        """Report where the run resumed, and start the bar."""
        if step:
            done = " It is finished." if step == num_steps else ""
            self._console.print(f"Resumed after step {step} of {num_steps}.{done}")
        if self._progress is not None:
            self._bar = self._progress.add_task(
                "training", total=num_steps, completed=step, rate="-"
            )

    def on_branch(self, plan: RunPlan) -> None:
        """Name the branch."""
        self._say(f"  branch: {plan.run_name}, {plan.config.epochs:g} epochs")

    def on_trunk(self) -> None:
        """Say that the run goes on."""
        self._say("  end of the branch")

    def on_step(self, step: int) -> None:
        """Move the bar."""
        if self._progress is not None:
            speed = self._progress.tasks[self._bar].speed
            rate = f"{speed:.1f}/s" if speed else "-"
            self._progress.update(self._bar, completed=step, rate=rate)

    def on_rows(self, rows: list[Row]) -> None:
        """Print the values of raw and averaged weights."""
        averaged = main_average(rows, self._config)
        policy = self._config.batch_norm[0]  # also before the first average
        raw = next(
            (r for r in rows if r["weights"] == "raw" and r["batch_norm"] == policy), rows[0]
        )
        values = _values(raw)
        if not self._begun:
            self._begun = True
            heads = "  ".join(f"{name.replace('_', ' '):>16}" for name in values)
            self._say(f"{'':>10}  {heads}   raw → averaged")
        cells = []
        for name, value in values.items():
            new = f"{averaged[name]:.4f}" if averaged else "-"
            cells.append(f"{value:.4f} → {new:>6}")
        epoch = raw["epoch"]
        where = f"epoch {epoch}" if isinstance(epoch, int) else f"epoch {epoch:.2f}"
        self._say(f"{where:<11} {'  '.join(f'{cell:>16}' for cell in cells)}")

    def _say(self, line: str) -> None:
        self._console.print(line, soft_wrap=True)
        sys.stdout.flush()


def _values(row: Row) -> dict[str, float]:
    """Held-out loss and accuracy; other values are only in the file."""
    skipped = ("train_loss", "top5_accuracy")
    names = [name for name in row if name.endswith(("_loss", "_accuracy"))]
    return {n: row[n] for n in names if not n.endswith(skipped) and not is_rounded(n)}
