"""Runs of the loop that tests drive: stopped at a step, resumed, compared."""

import os
import signal
from pathlib import Path
from typing import Any

from lawa_lab.recipes.loop import Outcome, TrainingCallback, train
from lawa_lab.recipes.registry import RECIPES
from lawa_lab.recipes.run_folder import RunFolder, RunPlan
from lawa_lab.recipes.task import Worker
from torch_lawa.metrics import Row, read_metrics


class StopAt(TrainingCallback):
    """Presses Ctrl-C after a step."""

    def __init__(self, *steps: int) -> None:
        self._steps = steps

    def on_step(self, step: int) -> None:
        if step in self._steps:
            os.kill(os.getpid(), signal.SIGINT)


def smoke_plan(recipe: str, *, seed: int = 3, **changes: Any) -> RunPlan:
    kind = RECIPES.find(recipe)
    config = kind(**{**kind.smoke_values, **changes})
    return RunPlan(config=config, seed=seed, smoke=True)


def run(
    plan: RunPlan, path: Path, *, stop_at: int = -1, worker: Worker | None = None, **options: Any
) -> Outcome:
    folder = RunFolder(path)
    if not folder.used:
        folder.write_plan(plan, {})
    return train(plan, folder, worker or Worker(), callback=StopAt(stop_at), **options)


def rows_of(path: Path) -> list[Row]:
    """The rows of a run without what the clock says."""
    return [
        {name: value for name, value in row.items() if not name.endswith("_seconds")}
        for row in read_metrics(path / "metrics.jsonl")
    ]
