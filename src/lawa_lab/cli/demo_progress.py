"""The progress of `lawa demo`: raw and averaged weights, one line per seed."""

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

__all__ = ["DemoProgress", "show_progress"]


class DemoProgress(TrainingCallback):
    """Raw and averaged weights side by side, one line per seed, updated in place."""

    def __init__(self, console: Console, seeds: Sequence[int], epochs: int) -> None:
        self._console, self._epochs = console, epochs
        self._rows: dict[int, list[Row]] = {seed: [] for seed in seeds}
        self._begin = time.monotonic()
        self._seed_begin = self._begin

    def on_rows(self, rows: list[Row]) -> None:
        """Show the rows of one more epoch."""
        self._rows[rows[0]["seed"]] = rows

    def on_seed_done(self) -> None:
        """Print a line, if there is no live display."""
        done = [rows for rows in self._rows.values() if rows][-1]
        seconds, self._seed_begin = time.monotonic() - self._seed_begin, time.monotonic()
        if not self._console.is_interactive:
            raw, averaged = _cells(done)
            self._console.print(
                f"seed {done[0]['seed']}: {seconds:.0f} s, raw loss {raw[0]} accuracy {raw[1]}, "
                f"averaged {averaged[0]} {averaged[1]}"
            )

    def __rich__(self) -> RenderableType:
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
        table.add_column("")
        table.add_column("epoch", justify="right")
        table.add_column("", width=14)
        for name, style in (("raw", RAW_STYLE), ("averaged", AVERAGED_STYLE)):
            table.add_column(f"{name}\nloss", justify="right", style=style, min_width=8)
            table.add_column("\naccuracy", justify="right", style=style)
        for seed, rows in self._rows.items():
            epoch = rows[0]["epoch"] if rows else 0
            raw, averaged = _cells(rows)
            bar = ProgressBar(total=self._epochs, completed=epoch, width=14)
            done = f"{epoch}/{self._epochs}"
            table.add_row(f"seed {seed}", done, bar, *raw, *averaged)
        return Group(table, Text(), Text(self._pace(), style="dim"))

    def _pace(self) -> str:
        done = sum(rows[0]["epoch"] for rows in self._rows.values() if rows)
        total = self._epochs * len(self._rows)
        spent = time.monotonic() - self._begin
        if not done or done == total:
            return f"{spent:.0f} s"
        left = math.ceil(spent / done * (total - done))
        return f"{spent:.0f} s, {done / spent:.1f} epochs/s, about {left} s left"


@contextlib.contextmanager
def show_progress(
    seeds: Sequence[int], epochs: int, *, k: int, as_json: bool
) -> Iterator[DemoProgress]:
    """Show progress while the block runs: live on a terminal, else one line per seed."""
    console = Console(stderr=as_json, highlight=False)
    console.print(
        f"A small convolutional network learns scikit-learn's digits with {len(seeds)} seeds and "
        f"{epochs} epochs each. After every epoch, the raw weights and the average of the {k} "
        "latest epochs are evaluated on held-out images, both with re-estimated BatchNorm "
        "statistics.\n"
    )
    view = DemoProgress(console, seeds, epochs)
    if not console.is_interactive:
        yield view
        return
    with Live(view, console=console, refresh_per_second=4):
        yield view


def _cells(rows: list[Row]) -> tuple[list[str], list[str]]:
    """Loss and accuracy of raw and averaged weights, both with BatchNorm re-estimated."""
    cells = {"raw": ["-", "-"], "averaged": ["-", "-"]}
    for row in rows:
        if row["batch_norm"] == "re-estimated":
            loss, accuracy = row["test_loss"], row["test_accuracy"]
            cells[row["weights"]] = [f"{loss:.4f}", f"{100 * accuracy:.2f}%"]
    return cells["raw"], cells["averaged"]
