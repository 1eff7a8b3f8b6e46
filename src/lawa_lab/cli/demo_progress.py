"""The progress of `lawa demo`: losses of the average and of annealed runs, as they come."""

import contextlib
import math
import time
from collections.abc import Iterator, Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from lawa_lab.cli.report_tables import AVERAGED_STYLE, RAW_STYLE
from lawa_lab.recipes.loop import TrainingCallback
from torch_lawa.metrics import Row

__all__ = ["show_progress"]

_AVERAGE, _ANNEALED = "average", "annealed"


class DemoProgress(TrainingCallback):
    """The test loss of the average and of annealed runs at every budget, one pair per seed."""

    def __init__(self, console: Console, seeds: Sequence[int], budgets: Sequence[int]) -> None:
        self._console, self._budgets = console, budgets
        self._losses: dict[tuple[int, str], dict[float, float]] = {
            (seed, kind): {} for seed in seeds for kind in (_AVERAGE, _ANNEALED)
        }
        self._epochs = len(seeds) * (sum(budgets) + budgets[-1])
        self._steps, self._num_batches = 0, 1
        self._begin = self._seed_begin = time.monotonic()

    def on_begin(self, step: int, num_steps: int, num_batches: int) -> None:
        """Remember how many steps an epoch has."""
        self._num_batches = num_batches

    def on_step(self, step: int) -> None:
        """Count the steps of all runs."""
        self._steps += 1

    def on_rows(self, rows: list[Row]) -> None:
        """Show the rows of one more epoch, if it is one of the budgets."""
        for row in rows:
            anytime = row["schedule"] == "constant"
            wanted = ("averaged" if anytime else "raw", "re-estimated")
            if (row["weights"], row["batch_norm"]) == wanted and row["epoch"] in self._budgets:
                kind = _AVERAGE if anytime else _ANNEALED
                self._losses[row["seed"], kind][row["epoch"]] = row["test_loss"]

    def on_seed_done(self, seed: int) -> None:
        """Print a line, if there is no live display."""
        seconds, self._seed_begin = time.monotonic() - self._seed_begin, time.monotonic()
        if not self._console.is_interactive:
            average, annealed = (
                " ".join(self._cells(seed, kind)) for kind in (_AVERAGE, _ANNEALED)
            )
            self._console.print(
                f"seed {seed}: {seconds:.0f} s, test loss after "
                f"{', '.join(map(str, self._budgets))} epochs: average {average}, annealed runs "
                f"{annealed}",
                soft_wrap=True,
            )

    def _cells(self, seed: int, kind: str) -> list[str]:
        losses = self._losses[seed, kind]
        return [f"{losses[b]:.4f}" if b in losses else "-" for b in self._budgets]

    def __rich__(self) -> RenderableType:
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
        table.add_column("test loss after")
        for budget in self._budgets:
            table.add_column(f"{budget} epochs", justify="right", min_width=9)
        for (seed, kind), _ in self._losses.items():
            style = AVERAGED_STYLE if kind == _AVERAGE else RAW_STYLE
            table.add_row(f"seed {seed}, {kind}", *self._cells(seed, kind), style=style)
        done = self._steps / self._num_batches
        bar = ProgressBar(total=self._epochs, completed=done, width=40)
        return Group(table, Text(), bar, Text(self._pace(done), style="dim"))

    def _pace(self, done: float) -> str:
        spent = time.monotonic() - self._begin
        if not done or done >= self._epochs:
            return f"{spent:.0f} s"
        left = math.ceil(spent / done * (self._epochs - done))
        return f"{spent:.0f} s, {done / spent:.1f} epochs/s, about {left} s left"


@contextlib.contextmanager
def show_progress(
    seeds: Sequence[int], budgets: Sequence[int], *, as_json: bool
) -> Iterator[DemoProgress]:
    """Show progress while the block runs: live on a terminal, else one line per seed."""
    console = Console(stderr=as_json, highlight=False)
    lengths = ", ".join(map(str, budgets))
    console.print(
        "This trains a small convolutional network on scikit-learn's digits, with "
        f"{len(seeds)} seeds. One constant-rate run, averaged over the last quarter of the "
        f"training so far, is compared with annealed runs (cosine to zero) of {lengths} epochs. "
        "Each schedule has the peak rate that was best for it on validation images.\n"
    )
    view = DemoProgress(console, seeds, budgets)
    if not console.is_interactive:
        yield view
        return
    with Live(view, console=console, refresh_per_second=4):
        yield view
