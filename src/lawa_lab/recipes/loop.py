"""The training loop of all recipes: train, take snapshots, evaluate raw and averaged weights.

Everything random in a step follows from the seed and the number of the step, and a checkpoint holds
the rest. A resumed run therefore equals an uninterrupted one, bit for bit on the same machine.
"""

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path

from lawa_lab.recipes.parallel import Parallel
from lawa_lab.recipes.run_folder import RunFolder, RunPlan
from lawa_lab.recipes.runtime import deterministic, process_group, stop_request
from lawa_lab.recipes.task import Task, Worker
from lawa_lab.recipes.trainer import Trainer
from torch_lawa.checkpoints.formats.safetensors_torch import save_tensors
from torch_lawa.cli.signals import StopRequest
from torch_lawa.metrics import MetricsWriter, Row

__all__ = ["Outcome", "TrainingCallback", "make_task", "train"]


class TrainingCallback:
    """Methods that `train` calls; override the ones you need."""

    def on_begin(self, step: int, num_steps: int, num_batches: int) -> None:
        """The data is loaded; the run starts, or resumes after `step` steps."""

    def on_step(self, step: int) -> None:
        """A step was submitted to the device."""

    def on_rows(self, rows: list[Row]) -> None:
        """Raw and averaged weights were evaluated."""


@dataclass(frozen=True)
class Outcome:
    """How far a run came."""

    step: int
    num_steps: int

    @property
    def finished(self) -> bool:
        """Whether all steps are done."""
        return self.step == self.num_steps


def train(
    plan: RunPlan,
    folder: RunFolder,
    worker: Worker,
    *,
    compile: bool | None = None,
    parallel: Parallel = "ddp",
    save_trajectory: bool = False,
    save_minutes: float = 10.0,
    callback: TrainingCallback | None = None,
) -> Outcome:
    """Train a recipe in its folder; resumes from the folder's checkpoint, if there is one.

    Ctrl-C or SIGTERM saves a checkpoint and returns an `Outcome` that is not `finished`. A
    checkpoint is also saved every `save_minutes`. The folder is written to only when the data is
    loaded and the options have proved valid.
    """
    with (
        process_group(worker, always=parallel == "fsdp"),
        deterministic(plan.num_threads),
        contextlib.ExitStack() as stack,
    ):
        task = make_task(plan, worker)  # may take a while; Ctrl-C has nothing to save yet
        stop = stack.enter_context(stop_request())
        trainer = Trainer(plan, task, worker, compile=compile, parallel=parallel)
        if worker.rank == 0:
            folder.begin(plan, world_size=worker.world_size)
        worker.barrier("the beginning of the run")
        resumed = trainer.load(folder)
        writer = None
        if worker.rank == 0:
            folder.cut(trainer.step if resumed else -1)
            writer = stack.enter_context(MetricsWriter(folder.metrics))
        return _loop(
            trainer,
            folder,
            writer,
            stop,
            save_trajectory=save_trajectory,
            save_seconds=60.0 * save_minutes,
            callback=callback or TrainingCallback(),
        )


def make_task(plan: RunPlan, worker: Worker) -> Task:
    """The task of a plan's recipe, with its data loaded."""
    data = Path(plan.data) if plan.data is not None else None
    return plan.config.make_task(data, seed=plan.seed, worker=worker, smoke=plan.smoke)


def _loop(
    trainer: Trainer,
    folder: RunFolder,
    writer: MetricsWriter | None,
    stop: StopRequest,
    *,
    save_trajectory: bool,
    save_seconds: float,
    callback: TrainingCallback,
) -> Outcome:
    callback.on_begin(trainer.step, trainer.num_steps, trainer.task.num_batches)
    saved_at = time.monotonic()
    for batch in trainer.batches():
        trainer.train_step(batch)
        callback.on_step(trainer.step)
        if trainer.averager.schedule.due(trainer.step):
            trainer.collect()
            if save_trajectory:
                whole = trainer.parallel.whole(trainer.model)
                if writer is not None:
                    folder.save_snapshot(whole, trainer.step, trainer.epoch)
        if trainer.evaluation_due:
            callback.on_rows(trainer.evaluate(writer))
        late = time.monotonic() - saved_at > save_seconds
        stopped, due = trainer.agree(stop.requested, late)
        if (stopped or due) and trainer.step < trainer.num_steps:
            trainer.save(folder)
            saved_at = time.monotonic()
            if stopped:
                return Outcome(trainer.step, trainer.num_steps)
    trainer.save(folder)
    tensors, notes = trainer.averaged()
    if trainer.worker.rank == 0:
        save_tensors(folder.averaged, tensors, notes)
    return Outcome(trainer.step, trainer.num_steps)
