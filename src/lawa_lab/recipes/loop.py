"""The training loop of all recipes: train, take snapshots, evaluate raw and averaged weights.

Everything random in a step follows from the seed and the number of the step, and a checkpoint holds
the rest. A resumed run therefore equals an uninterrupted one, bit for bit on the same machine.
"""

import contextlib
import dataclasses
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lawa_lab.recipes.evaluation import main_average
from lawa_lab.recipes.learning_rate import first_landing_step
from lawa_lab.recipes.parallel import ParallelName
from lawa_lab.recipes.run_folder import RunFolder, RunPlan
from lawa_lab.recipes.runtime import deterministic, process_group, stop_request
from lawa_lab.recipes.task import Task, Worker
from lawa_lab.recipes.trainer import Trainer
from torch_lawa.checkpoints.formats.safetensors_torch import save_tensors
from torch_lawa.errors import ConfigError
from torch_lawa.metrics import MetricsWriter, Row, read_metrics
from torch_lawa.signals import StopRequest

__all__ = ["Branch", "Outcome", "Target", "TrainingCallback", "make_task", "train"]


class TrainingCallback:
    """Methods that `train` calls; override the ones you need."""

    def on_begin(self, step: int, num_steps: int, num_batches: int) -> None:
        """The data is loaded; the run starts, or resumes after `step` steps."""

    def on_branch(self, plan: RunPlan) -> None:
        """Steps and rows from here on are those of a branch, which starts at the current step."""

    def on_trunk(self) -> None:
        """The branch has ended; steps and rows are again those of the run it started from."""

    def on_step(self, step: int) -> None:
        """A step was submitted to the device."""

    def on_rows(self, rows: list[Row]) -> None:
        """Raw and averaged weights were evaluated."""


@dataclass(frozen=True)
class Branch:
    """A landing that starts from a constant-rate run, and the folder of its rows and weights."""

    plan: RunPlan
    folder: RunFolder


@dataclass(frozen=True)
class Target:
    """The quality at which training may stop: the value of a metric.

    >>> Target.parse("test_accuracy=0.784").reached({"test_accuracy": 0.79})
    True
    """

    metric: str
    value: float

    @classmethod
    def parse(cls, text: str) -> "Target":
        """From METRIC=VALUE."""
        metric, _, value = text.partition("=")
        try:
            target = cls(metric.strip(), float(value))
        except ValueError:
            raise ConfigError(
                f"--until {text}: write it as METRIC=VALUE, such as test_accuracy=0.784 or "
                "valid_loss=3.2"
            ) from None
        if not math.isfinite(target.value):
            raise ConfigError(f"--until {text}: METRIC=VALUE needs a finite number")
        if not target.metric.endswith(("_loss", "_accuracy")):
            raise ConfigError(
                f"--until {text}: give a metric whose name ends in _loss or _accuracy, such as "
                "test_accuracy"
            )
        if target.metric.endswith("_accuracy") and target.value > 1:
            raise ConfigError(f"--until {text}: accuracies are fractions of 1 (0.95, not 95)")
        return target

    def check(self, names: Sequence[str]) -> None:
        """Raise if the metric is not among these names."""
        if self.metric not in names:
            raise ConfigError(
                f"--until {self.metric}={self.value:g}: this run measures {', '.join(names)}"
            )

    def reached(self, row: Row) -> bool:
        """Whether a row has it."""
        value = row[self.metric]
        if self.metric.endswith("_loss"):
            return bool(value <= self.value)
        return bool(value >= self.value)


@dataclass(frozen=True)
class Outcome:
    """How far a run came."""

    step: int
    num_steps: int
    num_trained: int
    """Steps of this call: 0 if a run was resumed that had nothing left to train."""
    reached: Row | None = None
    """The row of the main average that reached the target, if one did (its values on rank 0)."""

    @property
    def finished(self) -> bool:
        """Whether all steps are done, or the target is reached."""
        return self.step == self.num_steps or self.reached is not None


def train(
    plan: RunPlan,
    folder: RunFolder,
    worker: Worker,
    *,
    compile: bool | None = None,
    parallel: ParallelName = "ddp",
    save_trajectory: bool = False,
    save_minutes: float = 10.0,
    until: Target | None = None,
    branches: Sequence[Branch] = (),
    later: Sequence[RunPlan] = (),
    callback: TrainingCallback | None = None,
) -> Outcome:
    """Train a recipe in its folder; resumes from the folder's checkpoint, if there is one.

    Ctrl-C or SIGTERM saves a checkpoint and returns an `Outcome` that is not `finished`. A
    checkpoint is also saved every `save_minutes`. The folder is written to only when the data is
    loaded and the options have proved valid. Training ends early when the main average has
    reached the target `until`; a resumed run whose average had reached it trains nothing.

    The `branches` are landings of this constant-rate run: each is trained when the run reaches the
    step where its rate begins to fall, and ends with the bits that a run of its own would have.
    Plans that are trained `later`, on the same data with other lengths, are checked now.
    """
    if branches and parallel == "fsdp":  # now, not when the first of them is due
        raise ConfigError(
            "--parallel fsdp: landings cannot branch off a sharded run. Train with ddp, or every "
            "landing as a run of its own: --land with --epochs instead of --budgets."
        )
    with (
        process_group(worker, always=parallel == "fsdp"),
        deterministic(plan.num_threads),
        contextlib.ExitStack() as stack,
    ):
        task = make_task(plan, worker)  # may take a while; Ctrl-C has nothing to save yet
        if until is not None:
            until.check(task.metrics)
        stop = stack.enter_context(stop_request())
        trainer = Trainer(plan, task, worker, compile=compile, parallel=parallel)
        for other in later:
            trainer.check(other.config)
        for branch in branches:
            trainer.check_warmup(branch.plan.config)
        if worker.rank == 0:
            folder.begin(plan, world_size=worker.world_size)
        worker.barrier("the beginning of the run")
        resumed = trainer.load(folder)
        _refuse_missed(trainer, branches, folder)
        writer = None
        if worker.rank == 0:
            folder.extend(plan, world_size=worker.world_size)
            folder.cut(trainer.step if resumed else -1, epochs=plan.config.epochs)
            writer = stack.enter_context(MetricsWriter(folder.metrics))
        options = _LoopOptions(
            stop=stop,
            save_trajectory=save_trajectory,
            save_seconds=60.0 * save_minutes,
            until=until,
            callback=callback or TrainingCallback(),
        )
        options.callback.on_begin(trainer.step, trainer.num_steps, task.num_batches)
        return _loop(trainer, folder, writer, options, branches)


def make_task(plan: RunPlan, worker: Worker) -> Task:
    """The task of a plan's recipe, with its data loaded."""
    data = Path(plan.data) if plan.data is not None else None
    return plan.config.make_task(data, seed=plan.seed, worker=worker, smoke=plan.smoke)


@dataclass(frozen=True, kw_only=True)
class _LoopOptions:
    stop: StopRequest
    save_trajectory: bool
    save_seconds: float | None  # None: a branch, which starts again from its trunk
    until: Target | None
    callback: TrainingCallback


def _loop(
    trainer: Trainer,
    folder: RunFolder,
    writer: MetricsWriter | None,
    options: _LoopOptions,
    branches: Sequence[Branch],
) -> Outcome:
    callback, saves = options.callback, options.save_seconds
    saved_at = time.monotonic()
    begin = trainer.step
    reached = _reached_before(trainer, folder, options.until)
    stopped = _train_branches(trainer, branches, options)  # if it resumes where one starts
    for batch in trainer.batches() if not stopped and reached is None else ():
        trainer.train_step(batch)
        callback.on_step(trainer.step)
        if trainer.averager.schedule.due(trainer.step):
            trainer.collect()
            if options.save_trajectory:
                whole = trainer.parallel.whole(trainer.model)
                if writer is not None:
                    folder.save_snapshot(whole, trainer.step, trainer.epoch)
        if trainer.evaluation_due:
            rows = trainer.evaluate(writer)
            callback.on_rows(rows)
            reached = _reached(rows, trainer, options.until)
            if reached is not None:
                break
        if _train_branches(trainer, branches, options):
            stopped = True
            break
        late = saves is not None and time.monotonic() - saved_at > saves
        stopped, due = trainer.agree(options.stop.requested, late)
        if (stopped or due) and trainer.step < trainer.num_steps:
            if stopped:
                break
            trainer.save(folder)
            saved_at = time.monotonic()
    if saves is not None:
        trainer.save(folder)
    num_trained = trainer.step - begin
    outcome = Outcome(trainer.step, trainer.num_steps, num_trained=num_trained, reached=reached)
    if outcome.finished:
        tensors, notes = trainer.averaged()
        if trainer.worker.rank == 0:
            save_tensors(folder.averaged, tensors, notes)
    return outcome


def _reached(rows: Sequence[Row], trainer: Trainer, until: Target | None) -> Row | None:
    """The row of the main average, if it has reached the target."""
    if until is None:
        return None
    main = main_average(rows, trainer.config)
    return main if main is not None and until.reached(main) else None


def _reached_before(trainer: Trainer, folder: RunFolder, until: Target | None) -> Row | None:
    """The first row of a resumed run whose main average had reached the target."""
    if until is None or not trainer.step:
        return None
    found = None
    if trainer.worker.rank == 0 and folder.metrics.exists():
        rows = read_metrics(folder.metrics)
        found = next((row for row in rows if _reached([row], trainer, until) is not None), None)
    [ranks] = trainer.worker.total([float(found is not None)], "the search for the target")
    return found or ({} if ranks else None)


def _first_step(trainer: Trainer, branch: Branch) -> int:
    """The step of the trunk from which a branch starts."""
    config = branch.plan.config
    return first_landing_step(config, trainer.count_steps(config.epochs))


def _refuse_missed(trainer: Trainer, branches: Sequence[Branch], folder: RunFolder) -> None:
    """Raise if a resumed run is past the step where a branch starts that is not done."""
    missed = [
        branch.plan.config
        for branch in branches
        if _first_step(trainer, branch) < trainer.step and not branch.folder.averaged.exists()
    ]
    if missed:
        land, past = missed[0].land, trainer.epoch
        raise ConfigError(
            f"--land {land:g}: {folder.path} is already at epoch {past:g}, and the decay of "
            f"{_say_epochs([config.epochs for config in missed])} would start before that. "
            f"Budgets of {math.ceil(past / (1 - land))} epochs or more can be added to it. Train "
            "the others in another folder (-o)."
        )


def _say_epochs(epochs: Sequence[float]) -> str:
    *others, last = (f"{number:g}" for number in epochs)
    return f"{', '.join(others)} and {last} epochs" if others else f"{last} epochs"


def _train_branches(trainer: Trainer, branches: Sequence[Branch], options: _LoopOptions) -> bool:
    """Train the branches that start at this step and are not done; whether a stop was requested."""
    for branch in branches:
        if trainer.step != _first_step(trainer, branch) or branch.folder.averaged.exists():
            continue
        if trainer.worker.rank == 0:
            branch.folder.clear()  # of a branch that was interrupted
            branch.folder.begin(branch.plan, world_size=trainer.worker.world_size)
        with contextlib.ExitStack() as stack:
            stack.enter_context(trainer.branched(branch.plan))
            writer = None
            if trainer.worker.rank == 0:
                writer = stack.enter_context(MetricsWriter(branch.folder.metrics))
            options.callback.on_branch(branch.plan)
            own = dataclasses.replace(options, save_seconds=None, until=None)
            if not _loop(trainer, branch.folder, writer, own, ()).finished:
                return True
        options.callback.on_trunk()
    return False
