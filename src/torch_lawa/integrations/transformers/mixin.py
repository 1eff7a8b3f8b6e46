"""A Trainer that evaluates, predicts with, saves and loads the average.

A callback alone is not enough: Trainer has no event before an evaluation or between the parts of a
save, and does not pass itself to its callbacks. So a mixin overrides Trainer's methods.
"""

import contextlib
import inspect
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import Trainer
from transformers.trainer_utils import PredictionOutput

from torch_lawa.checkpoints.replacement import require_replaceable
from torch_lawa.checkpoints.storage.atomic import remove
from torch_lawa.checkpoints.storage.paths import LocalPath
from torch_lawa.errors import ConfigError, OutputError, StateError
from torch_lawa.evaluation import ActClock
from torch_lawa.integrations.random_state import preserved_rng
from torch_lawa.integrations.transformers.arguments import selects_average
from torch_lawa.integrations.transformers.callback import (
    LatestWeightAveragingCallback,
    model_and_ranks,
)
from torch_lawa.window_choice import WindowSearch

__all__ = ["LatestWeightAveragingMixin", "LatestWeightAveragingTrainer"]

if TYPE_CHECKING:
    _Base = Trainer
else:
    _Base = object

# Not the folder "averaged" itself: Trainer takes an adapter in a sub-folder of a checkpoint for one
# that was trained, and would load it when it resumes.
_MODEL = Path("averaged", "model")
_PREFIX = "metric_key_prefix"


class LatestWeightAveragingMixin(_Base):
    """A Trainer that evaluates, predicts with, saves and loads what its callback averages.

    `class MyTrainer(LatestWeightAveragingMixin, SFTTrainer): pass`, the mixin first. Without a
    `LatestWeightAveragingCallback` among its callbacks it changes nothing.
    """

    _evaluating = False  # inside our call of `evaluate`, which calls itself for several datasets
    _swapped = False  # the model holds the average
    _suffix = ""  # of the prefix of the metrics, in an evaluation of an average beside another one
    # In the evaluation of the trained weights, if their metrics will decide which window is chosen.
    _choose: Callable[[Mapping[str, float]], None] | None = None

    def add_callback(self, callback: Any) -> None:
        """Like `Trainer.add_callback`, which the Trainer's constructor calls, too."""
        super().add_callback(callback)
        averaging = self._averaging()
        if averaging is not None:
            averaging.trained = lambda: self._trained
            averaging.check_target = lambda: self._check_target()

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Like the trainer's own; the callback sees the loss, to find spikes."""
        loss = super().training_step(*args, **kwargs)
        averaging = self._averaging()
        if averaging is not None:
            averaging.add_loss(loss)
        return loss

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Like the trainer's own `evaluate`, for the trained weights and for the average.

        Once there is an average, every metric `eval_X` has a companion `eval_averaged_X`. With
        `metrics="averaged"` there is one pass, and `eval_X` is of the average.
        """
        averaging = self._averaging()
        if averaging is None or self._evaluating:
            return super().evaluate(*args, **kwargs)
        if self.is_in_train and self.control.should_save:
            averaging.before_save(self._trained, self.state)
        self._evaluating = True
        try:
            metrics = self._evaluate_both(averaging, args, kwargs)
        finally:
            self._evaluating = False
        if self.is_in_train:
            averaging.after_evaluation(self._trained, self.state, metrics)
        return metrics

    def _evaluate_both(
        self, averaging: LatestWeightAveragingCallback, args: tuple[Any, ...], kwargs: Any
    ) -> dict[str, float]:
        if averaging.metrics == "averaged":
            with self._evaluated_average(averaging):
                return super().evaluate(*args, **kwargs)
        args, kwargs = self._prefix_by_name(args, kwargs)
        prefix = kwargs[_PREFIX]
        with _no_false_warning():
            monitored = averaging.monitor.startswith(f"{prefix}_")
            if averaging.search is not None and self.is_in_train and monitored:
                return self._evaluate_windows(averaging, averaging.search, args, kwargs)
            averaged = {}
            if averaging.ready:
                averaged = self._evaluate_average(averaging, args, kwargs, "averaged")
            # Last, because displays with one row per step (notebooks, W&B) keep the last names.
            trained = super().evaluate(*args, **kwargs)
            if averaging.search is not None and not averaging.ready:
                averaged = _renamed(trained, prefix, f"{prefix}_averaged")
            return {**averaged, **trained}

    def _evaluate_windows(
        self,
        averaging: LatestWeightAveragingCallback,
        search: WindowSearch,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> dict[str, float]:
        """Evaluate several windows and the trained weights, and report the best as the average."""
        prefix = kwargs[_PREFIX]
        clock, windows, chosen = ActClock(self._trained), {}, {}
        with clock("choose"):
            candidates = search.candidates(averaging.averager)
            again = 1 in candidates and averaging.newest_is_trained(self)
            for k in candidates[again:]:
                with averaging.trying(k):
                    found = self._evaluate_average(averaging, args, kwargs, f"averaged_k{k}")
                windows[k] = _renamed(found, f"{prefix}_averaged_k{k}", prefix)
        seconds = clock.take()["choose"]

        def choose(trained: Mapping[str, float]) -> None:
            measured = {0: trained, **({1: trained} if again else {}), **windows}
            k = averaging.choose(measured, seconds, *model_and_ranks(self))
            chosen.update(_renamed(measured[k], prefix, f"{prefix}_averaged"))
            chosen.update({f"{prefix}_averaged_k": k, f"{prefix}_averaged_seconds": seconds})
            report = dict(chosen)  # as `evaluate` reports: callbacks may monitor it
            if again:
                report |= _renamed(trained, prefix, f"{prefix}_averaged_k1")
            self.log(report)
            self.control = self.callback_handler.on_evaluate(
                self.args, self.state, self.control, report
            )

        self._choose = choose
        try:
            trained = super().evaluate(*args, **kwargs)
            if self._choose is not None:
                choose(trained)
        finally:
            self._choose = None
        if chosen[f"{prefix}_averaged_k"] == 0:  # of several datasets, those evaluated later, too
            chosen.update(_renamed(trained, prefix, f"{prefix}_averaged"))
        return {**chosen, **trained}

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Like the trainer's own `log`; a window is chosen before the trained weights' metrics.

        Displays with one row per step then keep the names of the trained weights.
        """
        averaging, choose = self._averaging(), self._choose
        if averaging is not None and choose is not None and averaging.monitor in logs:
            self._choose = None
            choose(dict(logs))
        if self._suffix:
            self._rename_own_metrics()
        super().log(logs, *args, **kwargs)

    def _rename_own_metrics(self) -> None:
        """Give the metrics that TRL's trainers collect themselves the names of an average.

        Their `log` adds `eval_` to the names, whatever the prefix of the evaluation.
        """
        collected = getattr(self, "_metrics", None)
        found = collected.get("eval") if isinstance(collected, dict) else None
        if isinstance(found, dict):
            for name in list(found):
                found[f"{self._suffix}_{name}"] = found.pop(name)

    def _prefix_by_name(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of `evaluate`, with the prefix of its metrics among the keywords."""
        # Trainers of other libraries may have more arguments before the prefix.
        names = list(inspect.signature(super().evaluate).parameters)[: len(args)]
        if _PREFIX in names:
            index = names.index(_PREFIX)
            kwargs = {**kwargs, **dict(zip(names[index:], args[index:], strict=False))}
            args = args[:index]
        return args, {_PREFIX: "eval", **kwargs}

    def _evaluate_average(
        self,
        averaging: LatestWeightAveragingCallback,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        suffix: str,
    ) -> dict[str, float]:
        kwargs = {**kwargs, _PREFIX: f"{kwargs[_PREFIX]}_{suffix}"}
        self._suffix = suffix
        try:
            with preserved_rng(self.args.device), self._evaluated_average(averaging):
                return super().evaluate(*args, **kwargs)
        finally:
            self._suffix = ""

    def predict(self, *args: Any, **kwargs: Any) -> PredictionOutput:
        """Like the trainer's own `predict`, with the average if there is one.

        Inside an evaluation it uses the weights that are being evaluated.
        `Trainer.predict(trainer, test_dataset)` predicts with the trained weights.
        """
        averaging = self._averaging()
        if averaging is None or self._evaluating:
            return super().predict(*args, **kwargs)
        with self._evaluated_average(averaging):
            return super().predict(*args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Like `Trainer.save_model`; the averaged model goes into the folder `averaged/model`."""
        averaging = self._averaging()
        if averaging is not None and not self._swapped:
            folder = Path(output_dir or str(self.args.output_dir)) / _MODEL
            if averaging.ready:
                self._save_average(averaging, folder)
            elif self.state.global_step and self.args.should_save:
                remove(folder)  # left by an earlier run with the same output folder
        super().save_model(output_dir, _internal_call=_internal_call)

    def _check_target(self) -> None:
        """Refuse, before training, a folder to which `save_model` could not write the average."""
        if not self.args.should_save:
            return
        folder = Path(str(self.args.output_dir)) / _MODEL
        for path in (folder.parent, folder):
            if os.path.lexists(path) and not path.is_dir():
                raise OutputError(
                    f"{path}: is not a folder, so the average could not be saved in {folder}. Move "
                    "it, or choose another output_dir."
                )
        if self._exports() and folder.is_dir():
            require_replaceable(LocalPath(folder), is_file=False)

    def _exports(self) -> bool:
        """Whether the average is exported: Trainer may write only the shards to resume from."""
        return self.is_deepspeed_enabled or (self.is_fsdp_enabled and not self._gathers())

    def _save_average(self, averaging: LatestWeightAveragingCallback, folder: Path) -> None:
        if self._exports():
            # DeepSpeed's masters are float32; the model that it saves is not.
            dtype = self._dtype() if self.is_deepspeed_enabled else None
            averaging.averager.save_pretrained(
                folder, self._trained, k=averaging.k, dtype=dtype, overwrite=True
            )
            if self.args.should_save and self.processing_class is not None:
                self.processing_class.save_pretrained(str(folder))
            return
        with self._average(averaging):
            super().save_model(str(folder), _internal_call=True)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        averaging = self._averaging()
        if averaging is not None:
            averaging.before_save(self._trained, self.state)
        super()._save_checkpoint(*args, **kwargs)

    # The window is saved and loaded with the optimizer: in the same cases (not with
    # `save_only_model`), before the file that makes a checkpoint valid, and before older
    # checkpoints are removed.
    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        averaging = self._averaging()
        if averaging is not None:
            averaging.save(self._trained, Path(output_dir), writes=self.args.should_save)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        averaging = self._averaging()
        if averaging is not None and checkpoint is not None:
            averaging.resume_from = Path(checkpoint)

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        averaging = self._averaging()
        metric = self.args.metric_for_best_model or ""
        late = averaging is not None and averaging.search is None and not averaging.ready
        if late and selects_average(metric):
            name = metric.removeprefix("eval_averaged_").removeprefix("averaged_")
            if f"eval_{name}" in metrics:
                return False  # there will be one with the first average
            raise ConfigError(
                f"metric_for_best_model={metric!r}: an evaluation gives no eval_{name}, so there "
                f"will be none for the average. It gives {', '.join(metrics)}."
            )
        return super()._determine_best_metric(metrics, trial)

    def _load_best_model(self) -> None:
        averaging = self._averaging()
        if averaging is None:
            super()._load_best_model()
            return
        self.accelerator.wait_for_everyone()  # the main process may still be writing it
        best = Path(str(self.state.best_model_checkpoint))
        by_average = selects_average(self.args.metric_for_best_model or "")
        averaged = (averaging.metrics == "averaged" or by_average) and (best / _MODEL).is_dir()
        sharded = self.is_fsdp_enabled or self.is_deepspeed_enabled
        if not averaged or sharded:
            super()._load_best_model()
        if averaged and sharded:
            if not averaging.load(self._trained, best):
                raise StateError(
                    f"{best} holds no window of snapshots to compute its average from: set "
                    "load_best_model_at_end=False, or save the window (save_only_model=False)."
                )
            device = next(self._trained.parameters()).device
            average = averaging.averager.average(averaging.k, device=device)
            if self.is_deepspeed_enabled:
                from torch_lawa.integrations.deepspeed import put_average

                put_average(self._trained, average)
            else:
                self._trained.load_state_dict(average, strict=False)
        elif averaged:
            try:  # let Trainer load it, from another folder
                self.state.best_model_checkpoint = str(_adapter_in(best / _MODEL, self._trained))
                super()._load_best_model()
            finally:
                self.state.best_model_checkpoint = str(best)
        averaging.model_is_final = True

    def _averaging(self) -> LatestWeightAveragingCallback | None:
        found = [
            callback
            for callback in self.callback_handler.callbacks
            if isinstance(callback, LatestWeightAveragingCallback)
        ]
        if len(found) > 1:
            raise ConfigError(
                f"{len(found)} LatestWeightAveragingCallbacks were given; use one. The mean of "
                "fewer snapshots is callback.averager.average(k=...)."
            )
        return found[0] if found else None

    @property
    def _trained(self) -> nn.Module:
        """The model without its DDP wrapper; for DeepSpeed the engine, which has the masters."""
        if self.is_deepspeed_enabled and self.deepspeed is not None:
            engine: nn.Module = self.deepspeed
            return engine
        assert self.model is not None
        return self.model

    def _gathers(self) -> bool:
        """Whether FSDP is configured to save whole models."""
        plugin: Any = self.accelerator.state.fsdp_plugin
        return "FULL_STATE_DICT" in str(plugin.state_dict_type)

    def _dtype(self) -> torch.dtype:
        """The dtype of the weights that forward passes use, and that Trainer saves."""
        return next(p.dtype for p in self._trained.parameters() if p.is_floating_point())

    @contextlib.contextmanager
    def _evaluated_average(self, averaging: LatestWeightAveragingCallback) -> Iterator[None]:
        """Like `_average`, for an evaluation."""
        optimizer: Any = self.optimizer
        if averaging.ready and callable(getattr(optimizer, "eval", None)):
            # Trainer calls this when it evaluates. Schedule-free optimizers change the weights in
            # it, and back before the next step; they must change the trained weights.
            optimizer.eval()
        with self._average(averaging):
            yield

    @contextlib.contextmanager
    def _average(self, averaging: LatestWeightAveragingCallback) -> Iterator[None]:
        """Inside the block the model holds the average, if there is one."""
        if not averaging.ready or self._swapped:
            yield
            return
        with averaging.averager.swapped_into(self._trained, averaging.k):
            averaging.put_batch_norm(self)
            self._swapped = True
            try:
                yield
            finally:
                self._swapped = False


class LatestWeightAveragingTrainer(LatestWeightAveragingMixin, Trainer):
    """The Transformers `Trainer` with weight averaging."""


def _renamed(metrics: Mapping[str, float], prefix: str, other: str) -> dict[str, float]:
    """The metrics that begin with a prefix, with another one."""
    return {
        other + name.removeprefix(prefix): value
        for name, value in metrics.items()
        if name.startswith(f"{prefix}_")
    }


def _adapter_in(folder: Path, model: nn.Module) -> Path:
    """Where PEFT saves the active adapter: a named one is in a sub-folder of that name."""
    active = getattr(model, "active_adapters", None)
    named = folder / active[0] if isinstance(active, list) and active else folder
    return named if named.is_dir() else folder


@contextlib.contextmanager
def _no_false_warning() -> Iterator[None]:
    """Suppress the warning of `EarlyStoppingCallback` about the pass without its metric."""
    logger = logging.getLogger("transformers.trainer_callback")

    def is_true(record: logging.LogRecord) -> bool:
        return "early stopping is disabled" not in record.getMessage()

    logger.addFilter(is_true)
    try:
        yield
    finally:
        logger.removeFilter(is_true)
