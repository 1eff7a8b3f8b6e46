"""BatchNorm statistics of the average of a Transformers `Trainer`, from its training data.

Also how work is done beside a run without being seen by it: with random numbers of its own.
"""

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from transformers import Trainer

from torch_lawa.batch_norm import recalibrate_batch_norm

__all__ = ["AverageStatistics", "same_random_numbers"]


class AverageStatistics:
    """Re-estimated once for an average: what is saved is what was evaluated."""

    def __init__(self, num_batches: int) -> None:
        self._num_batches = num_batches
        self._moment: int | None = None
        self._values: list[Tensor] = []

    def forget(self) -> None:
        """Of another run."""
        self._moment, self._values = None, []

    def fit(self, trainer: Trainer, *, moment: int) -> None:
        """Give a model that holds the average of a `moment` statistics that belong to it."""
        model: nn.Module = trainer.model  # type: ignore[assignment]  # Trainer says it may be None
        layers = [module for module in model.modules() if isinstance(module, _BatchNorm)]
        if not layers or not self._num_batches:
            return
        buffers = [buffer for layer in layers for buffer in layer.buffers(recurse=False)]
        if self._moment == moment:
            for buffer, value in zip(buffers, self._values, strict=True):
                buffer.copy_(value)
            return
        parallel = trainer.args.world_size > 1

        def forward(model: nn.Module, batch: Any) -> None:
            # As in training: a trainer may take from a batch what is not for the model.
            with trainer.compute_loss_context_manager():
                trainer.compute_loss(model, trainer._prepare_inputs(batch))

        with same_random_numbers(trainer.args.device):
            # Not the loader that training is in the middle of.
            loader = trainer.get_train_dataloader()
            try:
                recalibrate_batch_norm(
                    model,
                    loader,
                    self._num_batches,
                    forward=forward,
                    group=torch.distributed.group.WORLD if parallel else None,
                )
            finally:
                if hasattr(loader, "end"):
                    loader.end()  # Accelerate keeps track of loaders that did not come to theirs
        self._moment, self._values = moment, [buffer.clone() for buffer in buffers]


@contextlib.contextmanager
def same_random_numbers(device: torch.device) -> Iterator[None]:
    """After the block all random numbers are those that there would have been without it.

    So a run that is averaged trains as it would have without: a data loader alone takes one.

    >>> _ = torch.manual_seed(0)
    >>> with same_random_numbers(torch.device("cpu")):
    ...     first = torch.rand(1)
    >>> bool(torch.rand(1) == first)
    True
    """
    devices = [device] if device.type == "cuda" else []
    state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(state)
        np.random.set_state(numpy_state)
