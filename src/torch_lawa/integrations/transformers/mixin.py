"""What a Trainer does with the average: it evaluates, predicts with, saves and loads it.

Trainer has no event before an evaluation, nor between the parts of a save, so a callback alone
cannot; and it does not tell its callbacks who it is. Hence a class before Trainer in the line of
inheritance.
"""

import contextlib
import inspect
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import Trainer
from transformers.trainer_utils import PredictionOutput

from torch_lawa.checkpoints.storage.atomic import remove
from torch_lawa.errors import ConfigError, StateError
from torch_lawa.integrations.transformers.batch_norm import same_random_numbers
from torch_lawa.integrations.transformers.callback import (
    LatestWeightAveragingCallback,
    selects_average,
)

__all__ = ["LatestWeightAveragingMixin", "LatestWeightAveragingTrainer"]

if TYPE_CHECKING:
    _Base = Trainer
else:
    _Base = object

# Not the averaged folder itself: Trainer takes an adapter that lies in a folder of a checkpoint
# for one that was trained, and would load it when it resumes.
_MODEL = Path("averaged", "model")
_PREFIX = "metric_key_prefix"


class LatestWeightAveragingMixin(_Base):
    """A Trainer that evaluates, predicts with, saves and loads what its callback averages.

    `class MyTrainer(LatestWeightAveragingMixin, SFTTrainer): pass`, the mixin first. Without a
    `LatestWeightAveragingCallback` among its callbacks it changes nothing.
    """

    _evaluating = False  # within our own call of `evaluate`, which calls itself for several sets
    _lent = False  # the model holds the average

    def add_callback(self, callback: Any) -> None:
        """As `Trainer.add_callback`; the Trainer calls it when it is made, too."""
        super().add_callback(callback)
        averaging = self._averaging()
        if averaging is not None:
            averaging.attached = True

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """As the trainer's own `evaluate`, of the weights as they are and of the average.

        Every metric `eval_X` has a companion `eval_averaged_X`, once there is an average. With
        `metrics="averaged"` there is one pass, and `eval_X` is of the average.
        """
        averaging = self._averaging()
        if averaging is None or self._evaluating:
            return super().evaluate(*args, **kwargs)
        if self.is_in_train and self.control.should_save:
            averaging.before_save(self._trained, self.state.global_step)
        self._evaluating = True
        try:
            if averaging.metrics == "averaged":
                with self._judged_average(averaging):
                    return super().evaluate(*args, **kwargs)
            with _no_false_alarm():
                averaged = {}
                if averaging.ready:
                    averaged = self._evaluate_average(averaging, args, dict(kwargs))
                # Last: what shows one row a step (notebooks, W&B) ends with names it knows.
                return {**averaged, **super().evaluate(*args, **kwargs)}
        finally:
            self._evaluating = False

    def _evaluate_average(
        self, averaging: LatestWeightAveragingCallback, args: tuple[Any, ...], kwargs: Any
    ) -> dict[str, float]:
        # Trainers of other libraries have arguments of their own before the prefix.
        names = list(inspect.signature(super().evaluate).parameters)[: len(args)]
        if _PREFIX in names:
            place = names.index(_PREFIX)
            kwargs.update(zip(names[place:], args[place:], strict=False))
            args = args[:place]
        kwargs[_PREFIX] = f"{kwargs.get(_PREFIX, 'eval')}_averaged"
        with same_random_numbers(self.args.device), self._judged_average(averaging):
            return super().evaluate(*args, **kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> PredictionOutput:
        """As the trainer's own `predict`, with the average where there is one.

        Within an evaluation it is with the weights that are evaluated there.
        `Trainer.predict(trainer, test_dataset)` predicts with the weights as they are.
        """
        averaging = self._averaging()
        if averaging is None or self._evaluating:
            return super().predict(*args, **kwargs)
        with self._judged_average(averaging):
            return super().predict(*args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As `Trainer.save_model`; the averaged model goes into the folder `averaged/model`."""
        averaging = self._averaging()
        if averaging is not None and not self._lent:
            folder = Path(output_dir or str(self.args.output_dir)) / _MODEL
            if averaging.ready:
                self._save_average(averaging, folder)
            elif self.state.global_step and self.args.should_save:
                remove(folder)  # of an earlier run with the same folders
        super().save_model(output_dir, _internal_call=_internal_call)

    def _save_average(self, averaging: LatestWeightAveragingCallback, folder: Path) -> None:
        if self.is_fsdp_enabled and not self._gathers():
            # Trainer writes no model in this case, only shards to resume from.
            averaging.averager.save_pretrained(folder, self._trained, overwrite=True)
            if self.args.should_save and self.processing_class is not None:
                self.processing_class.save_pretrained(str(folder))
            return
        with self._average(averaging):
            super().save_model(str(folder), _internal_call=True)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        averaging = self._averaging()
        if averaging is not None:
            averaging.before_save(self._trained, self.state.global_step)
        super()._save_checkpoint(*args, **kwargs)

    # The window is saved and loaded with the optimizer: in the same cases (not with
    # `save_only_model`), before the file that makes a checkpoint valid, and before older ones go.
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
        if averaging is not None and not averaging.ready and selects_average(metric):
            name = metric.removeprefix("eval_averaged_").removeprefix("averaged_")
            if f"eval_{name}" in metrics:
                return False  # the average's will come with the first one
            raise ConfigError(
                f"metric_for_best_model={metric!r}: an evaluation gives no eval_{name}, so there "
                f"will be none of the average. It gives {', '.join(metrics)}."
            )
        return super()._determine_best_metric(metrics, trial)

    def _load_best_model(self) -> None:
        averaging = self._averaging()
        if averaging is None:
            super()._load_best_model()
            return
        self.accelerator.wait_for_everyone()  # the main process may still be writing
        best = Path(str(self.state.best_model_checkpoint))
        by_average = selects_average(self.args.metric_for_best_model or "")
        averaged = (averaging.metrics == "averaged" or by_average) and (best / _MODEL).is_dir()
        if not averaged or self.is_fsdp_enabled:
            super()._load_best_model()
        if averaged and self.is_fsdp_enabled:
            if not averaging.load(self._trained, best):
                raise StateError(f"{best} holds no window of snapshots to make its average from.")
            device = next(self._trained.parameters()).device
            average = averaging.averager.average(device=device)
            self._trained.load_state_dict(average, strict=False)
        elif averaged:
            try:  # by the Trainer's own rules, from another folder
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
                f"{len(found)} LatestWeightAveragingCallbacks were given, and one is enough: the "
                "mean of fewer snapshots is callback.averager.average(k=...)."
            )
        return found[0] if found else None

    @property
    def _trained(self) -> nn.Module:
        """The model, without what DDP puts around it."""
        assert self.model is not None
        return self.model

    def _gathers(self) -> bool:
        """Whether FSDP is told to save whole models."""
        plugin: Any = self.accelerator.state.fsdp_plugin
        return "FULL_STATE_DICT" in str(plugin.state_dict_type)

    @contextlib.contextmanager
    def _judged_average(self, averaging: LatestWeightAveragingCallback) -> Iterator[None]:
        """As `_average`, for an evaluation."""
        optimizer: Any = self.optimizer
        if averaging.ready and callable(getattr(optimizer, "eval", None)):
            # Trainer calls it when it evaluates. Schedule-free optimizers change the weights there
            # and back before the next step: those of training it must be, not the average.
            optimizer.eval()
        with self._average(averaging):
            yield

    @contextlib.contextmanager
    def _average(self, averaging: LatestWeightAveragingCallback) -> Iterator[None]:
        """Within, the model holds the average, if there is one; it has its own weights after."""
        if not averaging.ready or self._lent:
            yield
            return
        with averaging.averager.swapped_into(self._trained):
            averaging.fit_batch_norm(self)
            self._lent = True
            try:
                yield
            finally:
                self._lent = False


class LatestWeightAveragingTrainer(LatestWeightAveragingMixin, Trainer):
    """The Transformers `Trainer` with weight averaging."""


def _adapter_in(folder: Path, model: nn.Module) -> Path:
    """Where PEFT saves the adapter that is trained: one with a name of its own lies deeper."""
    active = getattr(model, "active_adapters", None)
    named = folder / active[0] if isinstance(active, list) and active else folder
    return named if named.is_dir() else folder


@contextlib.contextmanager
def _no_false_alarm() -> Iterator[None]:
    """`EarlyStoppingCallback` sees both passes, and says in one of them that it is disabled."""
    logger = logging.getLogger("transformers.trainer_callback")

    def is_true(record: logging.LogRecord) -> bool:
        return "early stopping is disabled" not in record.getMessage()

    logger.addFilter(is_true)
    try:
        yield
    finally:
        logger.removeFilter(is_true)
