"""Evaluates weights as a run of `lawa train` does, for `lawa sweep RUN/trajectory`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lawa_lab.recipes.loop import make_task
from lawa_lab.recipes.run_folder import RunFolder
from lawa_lab.recipes.runtime import choose_worker, deterministic
from lawa_lab.recipes.trainer import Trainer
from torch_lawa.batch_norm import recalibrate_batch_norm

__all__ = ["RunEvaluator"]


class RunEvaluator:
    """The evaluation of the run in a folder, with its data, BatchNorm batches and precision.

    BatchNorm statistics are re-estimated, for raw and averaged weights alike. On the machine of the
    run the values equal those of its own rows.
    """

    def __init__(self, folder: Path, *, device: str | None = None) -> None:
        self._plan = RunFolder(folder).read_plan()
        worker = choose_worker(device)
        with self._deterministic():
            self._trainer = Trainer(self._plan, make_task(self._plan, worker), worker)

    def __call__(self, state: Mapping[str, Tensor]) -> dict[str, Any]:
        """Named values of these weights, and which run they belong to."""
        trainer = self._trainer
        trainer.model.load_state_dict(state)
        with self._deterministic(), torch.no_grad(), trainer.autocast():
            num_batches = recalibrate_batch_norm(trainer.model, trainer.task.calibration())
            trainer.model.eval()
            values = trainer.task.evaluate(trainer.forward)
        config = self._plan.config
        return {
            "recipe": config.recipe,
            "run": self._plan.run_name,
            "seed": self._plan.seed,
            **values,
            "batch_norm": "re-estimated" if num_batches else None,
        }

    def _deterministic(self) -> Any:
        return deterministic(self._plan.num_threads)
