"""The callback of the Transformers `Trainer`: what is averaged, and when a snapshot is taken."""

import logging
import math
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import has_length

from torch_lawa.averager import LatestWeightAverager
from torch_lawa.coefficients import Coefficients
from torch_lawa.errors import ConfigError
from torch_lawa.integrations.transformers.batch_norm import AverageStatistics
from torch_lawa.integrations.transformers.collecting import Collecting, CollectStrategy, RunLength
from torch_lawa.integrations.visible import require_visible_parameters
from torch_lawa.integrations.window_files import load_window, save_window
from torch_lawa.selection import FrozenRule
from torch_lawa.stores.base import Store

__all__ = ["LatestWeightAveragingCallback", "Metrics", "selects_average"]

Metrics: TypeAlias = Literal["both", "averaged"]

_WINDOW = Path("averaged", "window")

logger = logging.getLogger(__name__)


class LatestWeightAveragingCallback(TrainerCallback):
    """Keeps the `k` latest snapshots of the model that a Trainer trains.

    It belongs to a `LatestWeightAveragingTrainer`, or a trainer of yours with the
    `LatestWeightAveragingMixin`, which evaluates, saves and loads the average.

    Args:
        k: How many snapshots the window holds. The paper's default is 6.
        collect_strategy: A snapshot at each "save" of the Trainer, so that the average is that of
            the latest checkpoints; every so many "steps", or after an "epoch".
        collect_every: How many optimizer steps, or epochs, lie between two snapshots.
        start: Leave out the first steps (epochs, for "epoch"), as an int, or a fraction of the run.
        metrics: "both": `eval_loss` of the weights as they are and `eval_averaged_loss` of the
            average, side by side. "averaged": all metrics are those of the average, as soon as
            there is one; it costs one evaluation instead of two.
        batch_norm_batches: How many batches of training data BatchNorm statistics are re-estimated
            from for the average; 0 takes those of the newest snapshot. Models without BatchNorm
            layers do not need any.
        coefficients: How much each snapshot counts; all the same by default.
        min_snapshots: How many snapshots make an average; `k` by default. Before that only the
            weights as they are get evaluated.
        store: Where snapshots live: "host", "device", or a `DiskStore(folder)`.
        storage_dtype: `torch.bfloat16` or `torch.float16` halves their memory and rounds them.
    """

    def __init__(
        self,
        k: int = 6,
        *,
        collect_strategy: CollectStrategy = "save",
        collect_every: int = 1,
        start: int | float = 0,
        metrics: Metrics = "both",
        batch_norm_batches: int = 40,
        coefficients: Coefficients | None = None,
        min_snapshots: int | None = None,
        store: Literal["host", "device"] | Store = "host",
        storage_dtype: torch.dtype | None = None,
    ) -> None:
        if metrics not in ("both", "averaged"):
            raise ConfigError(f"metrics={metrics!r}: choose 'both' or 'averaged'.")
        if type(batch_norm_batches) is not int or batch_norm_batches < 0:
            raise ConfigError(
                f"batch_norm_batches={batch_norm_batches!r}: give a number of batches, or 0."
            )
        self.metrics: Metrics = metrics
        self.attached = False  # to a trainer that knows what to do with an average
        self.resume_from: Path | None = None  # a checkpoint, from its loading to the first step
        self.model_is_final = False  # the Trainer has loaded its best model: nothing to swap
        self._batch_norm = AverageStatistics(batch_norm_batches)
        self._collecting = Collecting(collect_strategy, collect_every, start)
        self._total = 0
        self._store = store
        self._options: dict[str, Any] = {
            "k": k,
            "coefficients": coefficients,
            "min_snapshots": min_snapshots,
            "storage_dtype": storage_dtype,
        }
        # Stands in until there is a model: mistakes are found now, a folder is opened then.
        usable = "host" if isinstance(store, Store) else store
        self.averager = LatestWeightAverager(store=usable, **self._options)
        self._frozen: str | None = None  # the rule of an averager that is not a stand-in

    @property
    def ready(self) -> bool:
        """Whether there is an average that is to be evaluated, beside or instead of the model."""
        return self.averager.ready and not self.model_is_final

    def on_init_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Refuse what can be seen not to work before training begins."""
        self._require_trainer()
        self._check_arguments(args)
        steps = args.max_steps if args.max_steps > 0 else None
        epochs = int(args.num_train_epochs) if steps is None else None
        saves = int(args.save_steps) if _saves(args) == "steps" and args.save_steps >= 1 else None
        self._check(RunLength(steps, epochs, None, saves))

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Begin a window, or go on with the one in the checkpoint."""
        self._require_trainer()
        model, loader = kwargs["model"], kwargs["train_dataloader"]
        require_visible_parameters(model)
        self._check_arguments(args)
        per_epoch = None
        if has_length(loader):
            per_epoch = max(math.ceil(len(loader) / args.gradient_accumulation_steps), 1)
        elif self._collecting.strategy == "epoch":
            raise ConfigError(
                "collect_strategy='epoch': the training data has no length, so nobody knows when "
                "an epoch ends. Set collect_strategy='steps' and collect_every."
            )
        run = RunLength(
            max_steps=state.max_steps,
            num_epochs=None if per_epoch is None else state.max_steps // per_epoch,
            steps_per_epoch=per_epoch,
            saves_every=int(state.save_steps) if _saves(args) == "steps" else None,
        )
        self._check(run)
        self._total = run.of(self._collecting.strategy) or 0
        # What a run left that failed while it was being resumed is not for one from the start.
        checkpoint = self.resume_from if state.global_step else None
        self.resume_from = None
        self._begin(model, resuming=checkpoint is not None)
        if checkpoint is not None and not self.load(model, checkpoint):
            self.averager.reset()  # a store on disk may have held snapshots
            logger.warning(
                f"{checkpoint} holds no window of snapshots (it was saved without averaging, or "
                "with save_only_model): averaging begins anew at this step."
            )

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Collect after a step, or after the last step of an epoch.

        Not at the event for the end of an epoch: it comes after what is evaluated and saved at
        that step, does not come again in a run resumed there, and comes also where a run ends
        within an epoch.
        """
        if self._collecting.strategy == "steps":
            position = state.global_step
        elif self._collecting.strategy == "epoch" and float(state.epoch or 0).is_integer():
            position = int(state.epoch)
        else:
            return
        if self._collecting.due(position, self._total):
            self.averager.collect(kwargs["model"], step=state.global_step)

    def before_save(self, model: nn.Module, step: int) -> None:
        """Collect what is about to be saved, once; before it is evaluated, where it will be."""
        collected = bool(self.averager.snapshot_steps) and self.averager.snapshot_steps[-1] == step
        if self._collecting.strategy != "save" or collected:
            return
        if self._collecting.due(step, self._total):
            self.averager.collect(model, step=step)

    def save(self, model: nn.Module, checkpoint: Path, *, writes: bool) -> None:
        """Put the window into a checkpoint; called in every process."""
        save_window(self.averager, model, checkpoint / _WINDOW, writes=writes)

    def load(self, model: nn.Module, checkpoint: Path) -> bool:
        """Go back to the window of a checkpoint, if it has one."""
        return load_window(self.averager, model, checkpoint / _WINDOW)

    def fit_batch_norm(self, trainer: Trainer) -> None:
        """Re-estimate the statistics of the trainer's model, which holds the average."""
        self._batch_norm.fit(trainer, moment=self.averager.num_collected)

    def _begin(self, model: nn.Module, *, resuming: bool) -> None:
        self.model_is_final = False
        self._batch_norm.forget()
        # Of adapters on a large model nothing else is kept; elsewhere a layer may be unfrozen.
        frozen: FrozenRule = "omit" if _has_adapters(model) else "keep"
        if self._frozen == frozen:
            self.averager.reset()
            return
        averager = LatestWeightAverager(store=self._store, frozen=frozen, **self._options)
        if len(averager) and not resuming:
            raise ConfigError(
                "the store holds snapshots of an earlier run already (steps "
                f"{averager.snapshot_steps}): resume that run, or give a DiskStore on a new folder."
            )
        self.averager, self._frozen = averager, frozen

    def _require_trainer(self) -> None:
        if not self.attached:
            raise ConfigError(
                "LatestWeightAveragingCallback needs a trainer that evaluates and saves the "
                "average: use LatestWeightAveragingTrainer instead of Trainer, or class "
                "MyTrainer(LatestWeightAveragingMixin, YourTrainer)."
            )

    def _check(self, run: RunLength) -> None:
        self._collecting.check(run, self.averager.min_snapshots)

    def _check_arguments(self, args: TrainingArguments) -> None:
        saves = _saves(args)
        if self._collecting.strategy == "save" and saves not in ("steps", "epoch"):
            why = "nothing is saved" if saves == "no" else "a save depends on the metric"
            raise ConfigError(
                f"collect_strategy='save' with save_strategy={saves!r}: {why}. Set "
                "collect_strategy='steps' (and collect_every) or 'epoch'."
            )
        metric = str(args.metric_for_best_model)
        if self.metrics == "averaged" and selects_average(metric):
            raise ConfigError(
                f"metric_for_best_model={metric!r} with metrics='averaged', where the average's "
                "metrics have the names that Trainer gives them: set "
                f"metric_for_best_model={metric.replace('averaged_', '', 1)!r}, or metrics='both'."
            )
        follows = str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type))
        if follows in ("reduce_lr_on_plateau", "greedy") and selects_average(metric):
            raise ConfigError(
                f"lr_scheduler_type={follows!r} needs metric_for_best_model={metric!r} at every "
                "evaluation, and it is not there before the first average: set "
                "LatestWeightAveragingCallback(metrics='averaged') and "
                "metric_for_best_model='eval_loss'."
            )


def selects_average(metric: str) -> bool:
    """Whether this is the name of a metric of the average, as `metrics="both"` has them."""
    return metric.removeprefix("eval_").startswith("averaged_")


def _saves(args: TrainingArguments) -> str:
    return str(getattr(args.save_strategy, "value", args.save_strategy))


def _has_adapters(model: nn.Module) -> bool:
    """Of PEFT, around the model or added to it."""
    return bool(getattr(model, "peft_config", None))
