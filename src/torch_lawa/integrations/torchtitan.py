"""Averaging in torchtitan: its trainer with a window of snapshots, and options for it.

```python
def llama3_8b():  # in the module that `--module` names
    return averaged(config_registry.llama3_8b())
```
The window is part of torchtitan's checkpoints, and validation runs with the average, too.
"""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import torch
from torch import nn
from torchtitan.components.checkpointer import MODEL, AsyncMode, BaseCheckpointManager
from torchtitan.components.metrics import BaseLogger, MetricsProcessor
from torchtitan.components.validate import BaseValidator
from torchtitan.tools.logging import logger
from torchtitan.trainer import Trainer

from torch_lawa.averager import LatestWeightAverager
from torch_lawa.errors import ConfigError
from torch_lawa.integrations.cadence import Cadence
from torch_lawa.schedule import Every, Horizon
from torch_lawa.selection import ModelParts

__all__ = ["AveragedTrainer", "AveragedTrainerMixin", "AveragingOptions", "averaged"]


@dataclass(kw_only=True, slots=True)
class AveragingOptions:
    """The section `averager` of the configuration: `--averager.k 8` on the command line."""

    k: int = 16
    """How many snapshots the window holds."""

    horizon: float = 0.25
    """The share of the steps so far that the window spans, however long the run will be."""

    collect_every: int = 0
    """Take a snapshot every so many steps, instead of by the horizon; 0: by the horizon."""

    samples: int = 1
    """How many collected weights make up a snapshot, which is their mean."""

    start: int | float = 0
    """Collect nothing in the first steps: their number, or a fraction of the run such as 0.2."""

    min_snapshots: int | None = None
    """How many snapshots an average needs; by default 1 with a horizon, otherwise k."""

    metrics: Literal["both", "averaged"] = "both"
    """What is validated: the trained weights and the average (`validation_metrics/averaged_loss`),
    or, as soon as there is one, the average alone (`validation_metrics/loss`)."""

    store: Literal["host", "device"] = "host"
    """Keep the snapshots in host memory, or on the device of the weights."""

    storage_dtype: Literal["own", "bfloat16", "float16"] = "own"
    """A dtype of 16 bits halves the memory of the snapshots and rounds them."""

    buffers: Literal["newest", "average"] = "newest"
    """Persistent floating-point buffers, such as the expert bias of a mixture of experts: those of
    the newest snapshot, or their average."""

    export: Literal["none", "dcp", "hf"] = "none"
    """At the end, write the average to `averaged/step-N` in the dump folder: as a checkpoint of
    torchtitan, or with the names and in the format of Hugging Face."""

    def cadence(self) -> Cadence:
        """When snapshots are collected, in optimizer steps."""
        if self.collect_every:
            return Cadence(Every(self.collect_every), "steps", self.start)
        return Cadence(Horizon(self.horizon, k=self.k * self.samples), "steps", self.start)

    def build(self, cadence: Cadence) -> LatestWeightAverager:
        """An averager with these options and an empty window."""
        own = self.storage_dtype == "own"
        return LatestWeightAverager(
            k=self.k,
            schedule=cadence.schedule,
            samples=self.samples,
            min_snapshots=self.min_snapshots,
            store=self.store,
            storage_dtype=None if own else getattr(torch, self.storage_dtype),
            buffers=self.buffers,
        )


class AveragedTrainerMixin:
    """Averages the weights in a trainer of torchtitan.

    `class MyTrainer(AveragedTrainerMixin, FluxTrainer)`, the mixin first, with a `Config` that has
    a field `averager: AveragingOptions`.
    """

    averager: LatestWeightAverager
    # Of torchtitan's trainer:
    config: Any
    step: int
    model_parts: list[nn.Module]
    checkpointer: BaseCheckpointManager
    validator: BaseValidator
    metrics_processor: MetricsProcessor

    def __init__(self, config: Any) -> None:
        super().__init__(config)  # type: ignore[call-arg]
        options: AveragingOptions = config.averager
        self._cadence = options.cadence()
        self._parts = ModelParts(self.model_parts)
        self.averager = options.build(self._cadence)
        self.averager.bind(self._parts)  # before a checkpoint is loaded
        if self.checkpointer.enable:
            self.checkpointer.states["averager"] = self.averager
        if config.validator.enable:
            self.validator = _AveragedValidator(self)
        if options.export != "none":  # now, not after training
            self._check_export(to_hf=options.export == "hf")
        if shortfall := self._cadence.shortfall(config.training.steps, self.averager):
            logger.warning(f"No average will be made: {shortfall[0]}.")

    def train_step(self, data_iterator: Iterator[Any]) -> None:
        """One step, then collect if a snapshot is due: before the checkpoint is saved."""
        super().train_step(data_iterator)  # type: ignore[misc]
        if self._cadence.due(self.averager, self.step, total=self.config.training.steps):
            self.averager.collect(self._parts, step=self.step)

    def train(self) -> None:
        """Train, then export the average if that is configured."""
        super().train()  # type: ignore[misc]
        export = self.config.averager.export
        if export == "none":
            return
        if not self.averager.ready:
            logger.warning(f"Too few snapshots for an average ({len(self.averager)}): no export.")
            return
        folder = os.path.join(self.config.dump_folder, "averaged", f"step-{self.step}")
        self.save_average(folder, to_hf=export == "hf")

    def save_average(self, folder: str, *, to_hf: bool) -> None:
        """Write the average as torchtitan writes a model: its own format, or Hugging Face's.

        Call it on every rank. The dtype is `checkpoint.export_dtype`, and the names are those of
        the model's state dict, mapped by its state dict adapter for Hugging Face. It needs
        `checkpoint.enable`.
        """
        self._check_export(to_hf=to_hf)
        manager = self.checkpointer
        with self.swapped():
            state = {
                name: tensor.to(manager.export_dtype) if tensor.is_floating_point() else tensor
                for name, tensor in manager.states[MODEL].state_dict().items()
            }
            manager.dcp_save(state, folder, AsyncMode.DISABLED, to_hf=to_hf)
        logger.info(f"Saved the average of {self.describe_average()} to {folder}.")

    def _check_export(self, *, to_hf: bool) -> None:
        if not self.checkpointer.enable:
            raise ConfigError(
                "the average is written by torchtitan's checkpoint manager, which is disabled: set "
                "checkpoint.enable, or averager.export to none."
            )
        if to_hf and self.checkpointer.sd_adapter is None:
            raise ConfigError(
                "this model has no state dict adapter, so its average cannot be written in the "
                "format of Hugging Face: set averager.export to dcp."
            )

    def swapped(self) -> AbstractContextManager[None]:
        """A `with` block in which the model holds the average."""
        # A checkpoint may still be copied from the weights in the background.
        self.checkpointer.maybe_wait_for_staging()
        return self.averager.swapped_into(self._parts)

    def describe_average(self) -> str:
        """Which snapshots are averaged, for a log."""
        steps = self.averager.snapshot_steps[-self.averager.num_averaged :]
        return f"{len(steps)} snapshots, of steps {steps[0]} to {steps[-1]}"


class AveragedTrainer(AveragedTrainerMixin, Trainer):  # type: ignore[misc]
    """torchtitan's `Trainer`, averaging its weights."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):  # type: ignore[misc]
        """torchtitan's configuration with the section `averager`."""

        averager: AveragingOptions = field(default_factory=AveragingOptions)


def averaged(config: Any, options: AveragingOptions | None = None) -> Any:
    """The configuration of an `AveragedTrainer` from one of torchtitan's `Trainer`."""
    if type(config) is not Trainer.Config:
        raise ConfigError(
            f"averaged() extends a Trainer.Config, and this is a {type(config).__qualname__}: make "
            "a trainer of its class and AveragedTrainerMixin."
        )
    own = {each.name: getattr(config, each.name) for each in fields(config)}
    return AveragedTrainer.Config(**own, averager=options or AveragingOptions())


class _AveragedValidator(BaseValidator):  # type: ignore[misc]
    """A trainer's validator, called with the average as well."""

    def __init__(self, trainer: AveragedTrainerMixin) -> None:
        super().__init__(config=trainer.validator.config)
        self._trainer, self._inner = trainer, trainer.validator

    def should_validate(self, step: int) -> bool:
        return bool(self._inner.should_validate(step))

    def validate(self, model_parts: list[nn.Module], step: int) -> None:
        trainer = self._trainer
        both = trainer.config.averager.metrics == "both"
        if both or not trainer.averager.ready:
            self._inner.validate(model_parts, step)
        if not trainer.averager.ready:
            return
        logger.info(f"Validating with the average of {trainer.describe_average()}:")
        processor = trainer.metrics_processor
        plain = processor.logger
        with trainer.swapped():
            if both:
                processor.logger = _AveragedLogger(plain)
            try:
                self._inner.validate(model_parts, step)
            finally:
                processor.logger = plain


class _AveragedLogger(BaseLogger):  # type: ignore[misc]
    """Logs validation metrics under names that say that they are those of the average."""

    def __init__(self, inner: BaseLogger) -> None:
        self._inner = inner

    def log(self, metrics: dict[str, Any], step: int) -> None:
        names = {name: name.replace("_metrics/", "_metrics/averaged_", 1) for name in metrics}
        self._inner.log({names[name]: value for name, value in metrics.items()}, step)
