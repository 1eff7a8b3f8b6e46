"""BatchNorm statistics for an average: re-estimated once per window, then reused.

A framework supplies two things: training batches that can be read without disturbing the run, and
the forward pass. `preserved_rng` helps with the first.
"""

import contextlib
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from torch_lawa.averager import LatestWeightAverager
from torch_lawa.batch_norm import recalibrate_batch_norm
from torch_lawa.coefficients import Blend
from torch_lawa.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["BatchNormCache", "preserved_rng"]


class BatchNormCache:
    """The statistics for one window, which its snapshots' steps identify."""

    def __init__(self, num_batches: int) -> None:
        if type(num_batches) is not int or num_batches < 0:
            raise ConfigError(
                f"batch_norm_batches={num_batches!r}: give a number of batches of training data, "
                "or 0 to keep the statistics of the newest snapshot."
            )
        self._num_batches = num_batches
        self.clear()

    def clear(self) -> None:
        """Forget the statistics: another run begins."""
        self._steps: list[int] = []
        self._values: dict[str, Tensor] = {}

    def needed(self, model: nn.Module) -> bool:
        """Whether the model has statistics that should be re-estimated."""
        return self._num_batches > 0 and any(
            isinstance(module, _BatchNorm) and module.running_mean is not None
            for module in model.modules()
        )

    def holds(self, averager: LatestWeightAverager) -> bool:
        """Whether the statistics for the averager's present window are known.

        A blend also changes with the live weights, so its statistics are estimated each time.
        """
        if isinstance(averager.coefficients, Blend):
            return False
        return bool(self._values) and self._steps == averager.snapshot_steps

    def put_into(
        self,
        model: nn.Module,
        averager: LatestWeightAverager,
        batches: Callable[[], AbstractContextManager[Iterable[Any]]],
        forward: Callable[[nn.Module, Any], Any],
        *,
        group: "ProcessGroup | None" = None,
    ) -> None:
        """Give a model that holds the averager's mean the statistics for it.

        `batches` is entered only if they must be estimated. Call it in every process.
        """
        if not self.needed(model):
            return
        if not self.holds(averager):
            with batches() as loader:
                recalibrate_batch_norm(
                    model, loader, self._num_batches, forward=forward, group=group
                )
            with torch.inference_mode(False):  # an inference tensor could not be saved
                self._values = {name: buffer.detach().clone() for name, buffer in _buffers(model)}
            self._steps = averager.snapshot_steps
            return
        with torch.no_grad():
            for name, buffer in _buffers(model):
                buffer.copy_(self._values[name])

    def state_dict(self, averager: LatestWeightAverager) -> dict[str, Any]:
        """What to save with the averager's window; empty if it has no statistics yet."""
        return {"steps": self._steps, "values": self._values} if self.holds(averager) else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what was saved with a window."""
        self._steps = list(state.get("steps", ()))
        self._values = {name: value.clone() for name, value in state.get("values", {}).items()}


def _buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for prefix, module in model.named_modules():
        if isinstance(module, _BatchNorm):
            yield from module.named_buffers(prefix, recurse=False)


@contextlib.contextmanager
def preserved_rng(device: torch.device, seed: int | None = None) -> Iterator[None]:
    """Restore the random states of Python, NumPy and torch after the block.

    A run that is averaged then trains as it would without: a data loader alone draws one number.
    With a `seed`, the block itself always draws the same numbers.

    >>> _ = torch.manual_seed(0)
    >>> with preserved_rng(torch.device("cpu")):
    ...     first = torch.rand(1)
    >>> bool(torch.rand(1) == first)
    True
    """
    devices = range(torch.cuda.device_count()) if device.type == "cuda" else ()
    state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices):
            if seed is not None:
                random.seed(seed)
                np.random.seed(seed)
                torch.manual_seed(seed)
            yield
    finally:
        random.setstate(state)
        np.random.set_state(numpy_state)
