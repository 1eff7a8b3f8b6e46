"""BatchNorm statistics of the averaged weights in a Lightning run, from its own train loader.

Looking at training data a second time must leave no trace in the run: the loader is copied, random
states are put back. And it must come out the same in a run that was interrupted, so the random
numbers it uses depend on the window alone. What was estimated is remembered, and saved with the
window: whoever loads it to test or predict needs no training data.
"""

import contextlib
import copy
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import DataLoader

from torch_lawa.averager import LatestWeightAverager
from torch_lawa.batch_norm import recalibrate_batch_norm
from torch_lawa.errors import BatchNormError, ConfigError
from torch_lawa.integrations.lightning.names import (
    CombinedLoader,
    Trainer,
    isolate_rng,
    rank_zero_warn,
)
from torch_lawa.integrations.lightning.shards import callable_model

__all__ = ["Statistics", "generator_states"]

Forward = Callable[[Any, Any], Any]


class Statistics:
    """The statistics for one window, and how to get those for another."""

    def __init__(self, num_batches: int, forward: Forward) -> None:
        if isinstance(num_batches, bool) or not isinstance(num_batches, int) or num_batches < 0:
            raise ConfigError(
                f"batch_norm_batches={num_batches!r}: give a number of batches of training data, "
                "or 0 to keep the statistics of the newest snapshot."
            )
        self._num_batches, self._forward = num_batches, forward
        self._steps: list[int] = []  # the window they belong to
        self._values: dict[str, Tensor] = {}

    def wanted(self, model: nn.Module) -> bool:
        """Whether anything is to be re-estimated."""
        return self._num_batches > 0 and any(
            isinstance(module, _BatchNorm) and module.running_mean is not None
            for module in model.modules()
        )

    def known(self, averager: LatestWeightAverager) -> bool:
        """Whether they were estimated for the window as it is now."""
        return bool(self._values) and self._steps == averager.snapshot_steps

    def check(self, trainer: Trainer, batch: Any) -> None:
        """Try the forward pass on a training batch, so that it fails at once or never."""
        module = trainer.lightning_module
        modes = [(inside, inside.training) for inside in module.modules()]
        try:
            module.eval()
            with isolate_rng(), torch.no_grad(), trainer.precision_plugin.forward_context():
                self._forward(callable_model(trainer), batch)
        except Exception as error:
            raise _unusable(error) from error
        finally:
            for inside, training in modes:
                inside.training = training

    def put_into(self, trainer: Trainer, averager: LatestWeightAverager) -> None:
        """Give a model that holds the mean the statistics that belong to it."""
        module = trainer.lightning_module
        if not self.wanted(module):
            return
        if not self.known(averager):
            if trainer.train_dataloader is None:
                rank_zero_warn(
                    "The averaged weights have no BatchNorm statistics of their own: none were "
                    "saved with this window, and there is no train loader here to estimate them "
                    "from. Those of the newest snapshot are used, which can ruin an average."
                )
                return
            self._estimate(trainer, averager)
        with torch.no_grad():
            for name, buffer in _buffers(module):
                buffer.copy_(self._values[name])

    def state_dict(self, averager: LatestWeightAverager) -> dict[str, Any]:
        """To be saved with the window; empty where they are of another."""
        if not self.known(averager):
            return {}
        return {"steps": self._steps, "values": self._values}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """What was saved with a window."""
        self._steps = list(state.get("steps", ()))
        self._values = {name: value.clone() for name, value in state.get("values", {}).items()}

    def _estimate(self, trainer: Trainer, averager: LatestWeightAverager) -> None:
        module = trainer.lightning_module
        precision = trainer.precision_plugin

        def forward(_: nn.Module, batch: Any) -> None:
            # As the training loop does: the hooks may be the data module's.
            batch = module._on_before_batch_transfer(precision.convert_input(batch), 0)
            batch = trainer.strategy.batch_to_device(batch, module.device)
            try:
                with precision.forward_context():
                    self._forward(callable_model(trainer), batch)
            except Exception as error:
                raise _unusable(error) from error

        group = torch.distributed.group.WORLD if trainer.world_size > 1 else None
        with isolate_rng(), _second_look(trainer.train_dataloader) as loader:
            seed = averager.num_collected
            random.seed(seed)
            np.random.seed(seed)
            torch.manual_seed(seed)
            recalibrate_batch_norm(module, loader, self._num_batches, forward=forward, group=group)
        with torch.inference_mode(False):
            self._values = {name: buffer.detach().clone() for name, buffer in _buffers(module)}
        self._steps = averager.snapshot_steps


def generator_states(loaders: Iterable[Any]) -> dict[torch.Generator, Tensor]:
    """The states of generators that loaders have for themselves, to be put back."""
    states: dict[torch.Generator, Tensor] = {}
    for loader in loaders:
        generator = getattr(loader, "generator", None)
        if isinstance(generator, torch.Generator):
            states[generator] = generator.get_state()
        states.update(generator_states(_samplers(loader).values()))
    return states


def _buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for prefix, module in model.named_modules():
        if isinstance(module, _BatchNorm):
            yield from module.named_buffers(prefix, recurse=False)


def _unusable(error: Exception) -> BatchNormError:
    return BatchNormError(
        f"BatchNorm statistics cannot be re-estimated: {error!r} was raised when a batch of the "
        "train loader was run through forward(). Override `batch_norm_forward(pl_module, batch)` "
        "of the callback, or set batch_norm_batches=0 to keep the newest snapshot's statistics."
    )


@contextlib.contextmanager
def _second_look(loaders: Any) -> Iterator[Iterable[Any]]:
    """Batches of a loader that may be in the middle of an iteration, without disturbing that."""
    combined = CombinedLoader(loaders, "max_size_cycle")
    states = generator_states(combined.flattened)
    combined.flattened = [_aside(loader) for loader in combined.flattened]
    try:
        yield (batch for batch, _, _ in combined)
    finally:
        for generator, state in states.items():
            generator.set_state(state)


def _aside(loader: Any) -> Any:
    """The same once more; with samplers of its own, which may count how often they are used."""
    try:
        other = copy.copy(loader)
    except TypeError:
        return loader  # an iterator: there is only one
    for name, sampler in _samplers(other).items():
        vars(other)[name] = _aside(sampler)
    if isinstance(other, DataLoader):
        # Workers that persist are those of the running iteration, and a second one would end it.
        vars(other).update(_iterator=None, persistent_workers=False)
    return other


def _samplers(loader: Any) -> dict[str, Any]:
    """The samplers of a loader, or of a sampler, by the names of its attributes."""
    found = {
        name: value
        for name, value in getattr(loader, "__dict__", {}).items()
        if name in ("sampler", "batch_sampler", "_sampler", "dataset") and value is not None
    }
    # With several processes Lightning puts one's own sampler into a "dataset" of another.
    if not hasattr(found.get("dataset"), "_sampler"):
        found.pop("dataset", None)
    return found
