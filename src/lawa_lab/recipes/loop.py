"""The training loop of all recipes: train, take snapshots, evaluate raw and averaged weights.

Everything random in a step follows from the seed and the step's number, and a checkpoint holds the
rest: a run that was stopped goes on as if it had not been, bit for bit on the same machine.
"""

import contextlib
import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lawa_lab.recipes.machine import StopSignal, joined, repeatable
from lawa_lab.recipes.parallel import Parallel
from lawa_lab.recipes.run_folder import RunFolder, RunPlan
from lawa_lab.recipes.task import Place, Task
from lawa_lab.recipes.trainer import Trainer
from torch_lawa.checkpoints.formats.safetensors_torch import save_tensors
from torch_lawa.metrics import MetricsWriter, Row

__all__ = ["Outcome", "Watcher", "make_task", "train"]


class Watcher:
    """What somebody may want to hear of a run; each method may be overridden."""

    def on_begin(self, step: int, num_steps: int, num_batches: int) -> None:
        """The data is loaded; the run begins, or goes on after `step` steps."""

    def on_step(self, step: int) -> None:
        """A step was handed to the device."""

    def on_rows(self, rows: list[Row]) -> None:
        """Raw and averaged weights were evaluated."""


@dataclass(frozen=True)
class Outcome:
    """How far a run came."""

    step: int
    num_steps: int

    @property
    def finished(self) -> bool:
        """Whether all steps were made."""
        return self.step == self.num_steps


def train(
    plan: RunPlan,
    folder: RunFolder,
    place: Place,
    *,
    compile: bool | None = None,
    parallel: Parallel = "ddp",
    save_trajectory: bool = False,
    save_minutes: float = 10.0,
    watcher: Watcher | None = None,
    prepare: Callable[[], None] | None = None,
) -> Outcome:
    """Run a recipe in its folder; goes on where the folder's checkpoint ends.

    Stopped by Ctrl-C or SIGTERM it saves a checkpoint and returns an `Outcome` that is not
    finished; it also saves one every `save_minutes`. `prepare` is called in the first process when
    data and options have proved good, before anything is looked for or written in the folder.
    """
    with (
        joined(place, alone=parallel != "fsdp"),
        repeatable(plan.num_threads),
        contextlib.ExitStack() as stack,
    ):
        task = make_task(plan, place)  # may take a while: Ctrl-C has nothing to save yet
        stop = stack.enter_context(StopSignal())
        trainer = Trainer(plan, task, place, compile=compile, parallel=parallel)
        if prepare is not None and place.rank == 0:
            prepare()  # the others wait for this process where they load
        if trainer.parallel.load(trainer, folder) and place.rank == 0:
            folder.cut_metrics(trainer.step)
            folder.cut_trajectory(trainer.step)
        writer = None
        if place.rank == 0:
            writer = stack.enter_context(MetricsWriter(folder.metrics))
        return _loop(
            trainer,
            folder,
            writer,
            stop,
            save_trajectory=save_trajectory,
            save_seconds=60.0 * save_minutes,
            watcher=watcher or Watcher(),
        )


def make_task(plan: RunPlan, place: Place) -> Task:
    """The task of a plan's recipe, its data loaded."""
    module = importlib.import_module(plan.config.module)
    data = Path(plan.data) if plan.data is not None else None
    task: Task = module.make_task(plan.config, data, seed=plan.seed, place=place, smoke=plan.smoke)
    return task


def _loop(
    trainer: Trainer,
    folder: RunFolder,
    writer: MetricsWriter | None,
    stop: StopSignal,
    *,
    save_trajectory: bool,
    save_seconds: float,
    watcher: Watcher,
) -> Outcome:
    watcher.on_begin(trainer.step, trainer.num_steps, trainer.task.num_batches)
    saved_at = time.monotonic()
    for batch in trainer.batches():
        trainer.train_step(batch)
        watcher.on_step(trainer.step)
        if trainer.averager.schedule.due(trainer.step):
            trainer.collect()
            if save_trajectory:
                whole = trainer.parallel.whole(trainer.model)
                if writer is not None:
                    folder.save_snapshot(whole, trainer.step, trainer.epoch)
        if trainer.evaluation_due:
            watcher.on_rows(trainer.evaluate(writer))
        late = time.monotonic() - saved_at > save_seconds
        stopped, due = trainer.agree(stop.pending, late)
        if (stopped or due) and trainer.step < trainer.num_steps:
            trainer.parallel.save(trainer, folder)
            saved_at = time.monotonic()
            if stopped:
                return Outcome(trainer.step, trainer.num_steps)
    trainer.parallel.save(trainer, folder)
    tensors, notes = trainer.averaged()
    if trainer.place.rank == 0:
        save_tensors(folder.averaged, tensors, notes)
    return Outcome(trainer.step, trainer.num_steps)
