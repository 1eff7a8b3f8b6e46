"""The callback of the Transformers `Trainer`: what is averaged, and when a snapshot is taken."""

import contextlib
import copy
import logging
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import has_length

from torch_lawa.averager import LatestWeightAverager
from torch_lawa.batch_norm_cache import BatchNormCache
from torch_lawa.coefficients import Coefficients
from torch_lawa.errors import ConfigError
from torch_lawa.integrations.cadence import Cadence
from torch_lawa.integrations.random_state import preserved_rng
from torch_lawa.integrations.transformers.arguments import (
    REGULAR_SAVES,
    CollectStrategy,
    Metrics,
    check_arguments,
    selects_average,
    text_of,
)
from torch_lawa.integrations.window_files import IN_TRAINER_CHECKPOINT, load_window, save_window
from torch_lawa.masters import require_visible_parameters
from torch_lawa.ranks.agreement import check_same_decision
from torch_lawa.schedule import Every, Schedule, choose_schedule
from torch_lawa.selection import FrozenRule
from torch_lawa.spike_rescue import SpikeRescue, refuse_masters, rescue_for
from torch_lawa.stores.base import Store
from torch_lawa.units import either
from torch_lawa.validation import one_of, whole_number
from torch_lawa.window_choice import MonitoredWindow, WindowSearch, newest_is_live, search_for

__all__ = ["LatestWeightAveragingCallback", "model_and_ranks"]

logger = logging.getLogger(__name__)


class LatestWeightAveragingCallback(MonitoredWindow, TrainerCallback):
    """Keeps the `k` latest snapshots of the model that a Trainer trains.

    It needs a `LatestWeightAveragingTrainer`, or your own trainer with the
    `LatestWeightAveragingMixin`, which evaluates, saves and loads the average.

    Args:
        k: How many snapshots the window holds. The paper's default is 6.
        collect_strategy: Take a snapshot at each "save" of the Trainer (the default), so that the
            average is that of the latest checkpoints; or every so many "steps", or after each
            "epoch".
        collect_every: The number of optimizer steps, or epochs, between two snapshots.
        start: Leave out the first steps (epochs, for "epoch"): an int, or a fraction of the run.
        schedule: Any schedule, such as `Every(10)` or `OnPlateau()`, instead of `collect_every`.
            It counts optimizer steps, or with `collect_strategy="epoch"` epochs; with "save" it is
            asked at saves only. One that needs a loss is asked after each evaluation instead.
        horizon: Instead of a schedule: the share of the steps (or epochs) so far, such as 1/4, that
            the window spans with its `k` snapshots. The average is then used from the first one on.
        samples: How many collected weights make up a snapshot, which is their mean; see
            `LatestWeightAverager`. With a horizon, 16 is a good value.
        monitor: The metric that is the loss for `schedule`, and that `choose_window` compares.
        metrics: "both": `eval_loss` of the trained weights and `eval_averaged_loss` of the
            average, side by side. "averaged": all metrics are those of the average, as soon as
            there is one, which costs one evaluation instead of two.
        choose_window: At each evaluation during training, evaluate several windows of the k
            snapshots one after the other, and choose the one with the best `monitor`, or the
            trained weights if they are better. The choice is saved as the average, used by
            `predict`, and loaded as the best model. Give a `WindowSearch` for other windows than
            1, k/4, k/2 and k, or with a `mode` if the name of `monitor` does not say whether high
            values are good. `eval_averaged_loss` is of the chosen window, `eval_averaged_k4_loss`
            of the window of 4; `eval_averaged_k` and `eval_averaged_seconds` are logged as well.
        rescue_spikes: When the training loss spikes or is NaN, go back to the mean of the good
            snapshots and skip the batch. Give a `SpikeRescue(factor=1.5)` for other settings.
        batch_norm_batches: How many batches of training data the BatchNorm statistics of the
            average are re-estimated from; 0 keeps those of the newest snapshot. Has no effect on
            models without BatchNorm layers.
        coefficients: How much each snapshot counts; all the same by default.
        blend: Blend the mean with the trained weights: `(1 - blend) * trained + blend * mean`.
        min_snapshots: How many snapshots make an average; `k` by default, 1 with a horizon. Until
            then only the trained weights are evaluated.
        store: Where snapshots are kept: "host", "device", or a `DiskStore(folder)`.
        storage_dtype: `torch.bfloat16` or `torch.float16` halves their memory and rounds them.
        include: Average only tensors whose name matches one of these patterns.
        exclude: Do not average tensors whose name matches one of these patterns, such as
            `*embed*`: they stay as they were in the newest snapshot.
    """

    def __init__(
        self,
        k: int = 6,
        *,
        collect_strategy: CollectStrategy | None = None,
        collect_every: int = 1,
        start: int | float = 0,
        schedule: Schedule | None = None,
        horizon: float | None = None,
        samples: int = 1,
        monitor: str = "eval_loss",
        metrics: Metrics = "both",
        choose_window: bool | WindowSearch = False,
        rescue_spikes: bool | SpikeRescue = False,
        batch_norm_batches: int = 40,
        coefficients: Coefficients | None = None,
        blend: float | None = None,
        min_snapshots: int | None = None,
        store: Literal["host", "device"] | Store = "host",
        storage_dtype: torch.dtype | None = None,
        include: str | Sequence[str] = (),
        exclude: str | Sequence[str] = (),
    ) -> None:
        one_of("metrics", metrics, ("both", "averaged"))
        k, samples = whole_number("k", k, least=1), whole_number("samples", samples, least=1)
        schedule = choose_schedule(schedule, horizon, k * samples)
        strategy = collect_strategy or ("save" if schedule is None else "steps")
        one_of("collect_strategy", strategy, ("save", "steps", "epoch"))
        collect_every = whole_number("collect_every", collect_every, least=1)
        if schedule is not None and collect_every != 1:
            given = f"schedule={schedule}" if horizon is None else f"horizon={horizon}"
            raise ConfigError(f"{given} and collect_every={collect_every}: pass only one.")
        if strategy == "save" and collect_every != 1:
            raise ConfigError(
                f"collect_every={collect_every} with collect_strategy='save': every save is "
                "collected. Set save_steps, or collect_strategy='steps'."
            )
        self.search = search_for(choose_window, monitor)
        if self.search is not None and metrics == "averaged":
            raise ConfigError(
                "choose_window with metrics='averaged': the choice needs the metrics of the "
                "trained weights as well. Set metrics='both'."
            )
        if self.search is not None and not monitor.startswith("eval_"):
            raise ConfigError(
                f"monitor={monitor!r}: the window is chosen by a metric of the Trainer's "
                f"evaluation, and their names begin with 'eval_'. Set monitor='eval_{monitor}'."
            )
        self.metrics: Metrics = metrics
        self.monitor = monitor
        # Gives the model, once attached to a trainer that knows what to do with an average.
        self.trained: Callable[[], nn.Module] | None = None
        self.check_target: Callable[[], None] | None = None  # of the average that is saved
        self.resume_from: Path | None = None  # a checkpoint, from its loading to the first step
        self.model_is_final = False  # the Trainer has loaded its best model: nothing to swap in
        self._strategy: CollectStrategy = strategy
        self._asked_for_saves = collect_strategy == "save"
        self._collects_saves = False  # whether this run saves regularly
        self._cadence = Cadence(
            schedule if schedule is not None else Every(collect_every),
            "epochs" if strategy == "epoch" else "steps",
            start,
        )
        self._cadence.check_monitor(monitor)
        self._batch_norm = BatchNormCache(batch_norm_batches)
        self._total = 0  # the length of the run, in the cadence's unit
        self._asked_step = -1  # so that a save that is evaluated first is not asked about twice
        self._store = store
        self._options: dict[str, Any] = {
            "k": k,
            "samples": samples,
            "coefficients": coefficients,
            "blend": blend,
            "min_snapshots": min_snapshots,
            "storage_dtype": storage_dtype,
            "include": include,
            "exclude": exclude,
        }
        # A placeholder until there is a model: finds mistakes now, and opens no folder yet.
        usable = "host" if isinstance(store, Store) else store
        self.averager = LatestWeightAverager(
            store=usable, schedule=self._cadence.schedule, **self._options
        )
        if self.search is not None:
            self.search.check(self.averager)
        self.rescue = rescue_for(rescue_spikes, self.averager)
        self._step_loss: torch.Tensor | float = 0.0  # of the micro-batches since the last step
        self._frozen: str | None = None  # the rule of the averager that is not a placeholder

    @property
    def ready(self) -> bool:
        """Whether there is an average to evaluate, next to or instead of the model."""
        return super().ready and not self.model_is_final

    def newest_is_trained(self, trainer: Trainer) -> bool:
        """Whether the newest snapshot will be evaluated anyway, as the trained weights."""
        model, group = model_and_ranks(trainer)
        # Schedule-free optimizers change the weights for an evaluation. Accelerate wraps them all.
        optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        changes = callable(getattr(optimizer, "eval", None))
        if changes or self._batch_norm.needed(model):
            return False
        return newest_is_live(self.averager, model, group)

    def on_init_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Refuse what is known not to work before training begins."""
        self._require_trainer()
        self._check_arguments(args)
        steps = args.max_steps if args.max_steps > 0 else None
        epochs = int(args.num_train_epochs) if steps is None else None
        saves = (
            int(args.save_steps)
            if text_of(args.save_strategy) == "steps" and args.save_steps >= 1
            else None
        )
        self._check_length(args, epochs if self._strategy == "epoch" else steps, saves, warn=False)

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Begin a window, or continue with the one in the checkpoint."""
        model, loader = self._require_trainer()(), kwargs["train_dataloader"]
        require_visible_parameters(model)
        if problem := self._check_arguments(args):
            warnings.warn(
                f"{problem} Until then the weights are trained as if without averaging.",
                stacklevel=2,
            )
        if self.check_target is not None:
            self.check_target()
        total, per_epoch = int(state.max_steps), None
        if has_length(loader):
            per_epoch = max(math.ceil(len(loader) / args.gradient_accumulation_steps), 1)
        if self._strategy == "epoch":
            if per_epoch is None:
                raise ConfigError(
                    "collect_strategy='epoch': the training data has no length, so the end of an "
                    "epoch is not known. Set collect_strategy='steps' and collect_every."
                )
            total //= per_epoch
        self._collects_saves = (
            self._strategy == "save" and text_of(args.save_strategy) in REGULAR_SAVES
        )
        saves_every = int(state.save_steps) if text_of(args.save_strategy) == "steps" else per_epoch
        self._check_length(args, total, saves_every, warn=True)
        self._total, self._asked_step = total, -1
        # A run from the start ignores what a failed attempt to resume left behind.
        checkpoint = self.resume_from if state.global_step else None
        self.resume_from = None
        self._begin(model, resuming=checkpoint is not None)
        if checkpoint is not None and not self.load(model, checkpoint):
            self.averager.reset()  # a store on disk may have held snapshots
            logger.warning(
                f"{checkpoint} holds no window of snapshots (it was saved without averaging, or "
                "with save_only_model): a new window begins at this step."
            )

    def add_loss(self, loss: torch.Tensor) -> None:
        """Add the loss of a micro-batch, as a share of its step."""
        if self.rescue is not None:
            self._step_loss = self._step_loss + loss.detach()

    def on_pre_optimizer_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Go back if the loss of this step is a spike; the step then does nothing."""
        loss, self._step_loss = self._step_loss, 0.0
        if self.rescue is not None and self.rescue(kwargs["model"], kwargs["optimizer"], loss):
            logger.warning(f"Step {state.global_step + 1}: {self.rescue.message}")

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Collect after a step, or after the last step of an epoch.

        The event for the end of an epoch is of no use: it comes after the evaluation and the save
        at that step, is not repeated in a run resumed there, and also comes when a run ends within
        an epoch.
        """
        whole_epoch = float(state.epoch or 0).is_integer()
        if self._strategy == "steps" or (self._strategy == "epoch" and whole_epoch):
            self._ask(self._require_trainer()(), state)

    def before_save(self, model: nn.Module, state: TrainerState) -> None:
        """Collect what is about to be saved, once; before its evaluation if there is one."""
        if self._collects_saves:
            self._ask(model, state)

    def after_evaluation(
        self, model: nn.Module, state: TrainerState, metrics: Mapping[str, float]
    ) -> None:
        """Collect after an evaluation during training, if the schedule depends on its loss."""
        if not self._cadence.schedule.needs_loss:
            return
        if self.monitor not in metrics:
            raise ConfigError(
                f"monitor={self.monitor!r}: the schedule {self._cadence.schedule} needs this loss, "
                f"and the evaluation gives {', '.join(metrics)}. Set monitor=..."
            )
        self._ask(model, state, loss=float(metrics[self.monitor]))

    def _ask(self, model: nn.Module, state: TrainerState, loss: float | None = None) -> None:
        step = int(state.global_step)
        if step == self._asked_step or self._cadence.schedule.needs_loss != (loss is not None):
            return
        self._asked_step = step
        position = step if self._cadence.unit == "steps" else int(state.epoch or 0)
        due = self._cadence.due(self.averager, position, total=self._total, loss=loss)
        if loss is not None:
            check_same_decision(model, due, step)
        if due:
            self._batch_norm.watch(model)
            self.averager.collect(model, step=step)

    def save(self, model: nn.Module, checkpoint: Path, *, writes: bool) -> None:
        """Put the window into a checkpoint; called in every process."""
        parts = {"choice": self.search, "rescue": self.rescue}
        notes = {name: None if part is None else part.state_dict() for name, part in parts.items()}
        path = checkpoint / IN_TRAINER_CHECKPOINT
        save_window(self.averager, model, path, writes=writes, notes=notes)

    def load(self, model: nn.Module, checkpoint: Path) -> bool:
        """Restore the window of a checkpoint, if it has one."""
        saved = load_window(self.averager, model, checkpoint / IN_TRAINER_CHECKPOINT)
        for name, part in (("choice", self.search), ("rescue", self.rescue)):
            if saved is not None and part is not None:
                with saved.reading():
                    if (state := saved.notes.get(name)) is not None:
                        part.load_state_dict(state)
        return saved is not None

    def put_batch_norm(self, trainer: Trainer) -> None:
        """Give the trainer's model, which holds the average, the BatchNorm statistics for it."""

        def forward(model: nn.Module, batch: Any) -> None:
            # As in training: a trainer may remove what is in a batch but not for the model.
            with trainer.compute_loss_context_manager():
                trainer.compute_loss(model, trainer._prepare_inputs(batch))

        @contextlib.contextmanager
        def batches() -> Iterator[Iterable[Any]]:
            with preserved_rng(trainer.args.device):
                loader = trainer.get_train_dataloader()  # not the one that training iterates
                try:
                    yield loader
                finally:
                    if hasattr(loader, "end"):
                        loader.end()  # Accelerate keeps loaders that were not iterated to the end

        model, group = model_and_ranks(trainer)
        self._batch_norm.put_into(model, self.averager, batches, forward, k=self.k, group=group)

    def _begin(self, model: nn.Module, *, resuming: bool) -> None:
        self.model_is_final, self.choice = False, None
        if self.search is not None:
            self.search.reset()
        if self.rescue is not None:
            refuse_masters(model)
            self.rescue.reset()
        self._step_loss = 0.0
        self._batch_norm.clear()
        # With adapters nothing else is kept; in other models a frozen layer may be unfrozen later.
        frozen: FrozenRule = "omit" if _has_adapters(model) else "keep"
        if self._frozen == frozen:
            self.averager.reset()
            self._cadence.restart(self.averager)
            return
        averager = LatestWeightAverager(
            store=self._store,
            frozen=frozen,
            schedule=copy.deepcopy(self._cadence.schedule),
            **self._options,
        )
        if len(averager) and not resuming:
            raise ConfigError(
                "the store holds snapshots of an earlier run already (steps "
                f"{averager.snapshot_steps}): resume that run, or give a DiskStore on a new folder."
            )
        self.averager, self._frozen = averager, frozen
        if self.rescue is not None:
            self.rescue = self.rescue.watching(averager)

    def _require_trainer(self) -> Callable[[], nn.Module]:
        """What gives the model that is trained: for DeepSpeed its engine."""
        if self.trained is None:
            raise ConfigError(
                "LatestWeightAveragingCallback needs a trainer that evaluates and saves the "
                "average: use LatestWeightAveragingTrainer instead of Trainer, or class "
                "MyTrainer(LatestWeightAveragingMixin, YourTrainer)."
            )
        return self.trained

    def _check_arguments(self, args: TrainingArguments) -> str | None:
        searches, asked = self.search is not None, self._asked_for_saves
        return check_arguments(
            args, self._strategy, self.metrics, searches=searches, asked_for_saves=asked
        )

    def _check_length(
        self, args: TrainingArguments, total: int | None, saves_every: int | None, *, warn: bool
    ) -> None:
        """Warn about a run that gives too few snapshots; refuse it if its options need one."""
        if self._strategy == "save" and text_of(args.save_strategy) not in REGULAR_SAVES:
            return  # `check_arguments` has said so
        asked: Iterable[int] | None = None
        if self._strategy == "save" and total is not None and saves_every is not None:
            asked = [*range(saves_every, total, saves_every), total]  # the end is saved, too
        found = self._cadence.shortfall(total, self.averager, asked, self.search)
        if found is not None:
            option = "save_steps" if self._strategy == "save" else "collect_every"
            start = [f"lower start={self._cadence.start}"] if self._cadence.start else []
            message, fewer = found
            ways = ["Train longer", f"collect more often ({option})", *start, *fewer]
            advice = f"{message}. {either(ways)}."
            metric = str(args.metric_for_best_model)
            if selects_average(metric):
                raise ConfigError(f"metric_for_best_model={metric!r}: {advice}")
            if warn:
                warnings.warn(
                    f"{advice} The weights are trained as if without averaging.", stacklevel=2
                )


def model_and_ranks(trainer: Trainer) -> "tuple[nn.Module, torch.distributed.ProcessGroup | None]":
    """The trainer's model, and the group of its ranks if there are several."""
    model: nn.Module = trainer.model  # type: ignore[assignment]  # may be None for Trainer
    return model, torch.distributed.group.WORLD if trainer.args.world_size > 1 else None


def _has_adapters(model: nn.Module) -> bool:
    """Whether PEFT adapters wrap the model or were added to it."""
    return bool(getattr(model, "peft_config", None))
