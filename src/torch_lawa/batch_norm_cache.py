"""BatchNorm statistics for an average: re-estimated once per window, then reused.

A caller supplies training batches that can be read without disturbing the run, and the forward
pass if the model takes its batches in another way than usual.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from torch_lawa.averager import LatestWeightAverager
from torch_lawa.batch_norm import frozen_layers, layers_with_statistics, re_estimate
from torch_lawa.coefficients import Blend
from torch_lawa.errors import ConfigError
from torch_lawa.selection import unwrap

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["BatchNormCache"]


class BatchNormCache:
    """The statistics for the windows that end with one snapshot.

    A window is identified by the steps of its snapshots and of its newest sample; after the
    averager went back to a saved state, the same steps are other weights. Wherever `k` is an
    argument, it is the window of the k newest snapshots, by default the averager's own.
    """

    def __init__(self, num_batches: int | None) -> None:
        if num_batches is not None and (type(num_batches) is not int or num_batches < 0):
            raise ConfigError(
                f"batch_norm_batches={num_batches!r}: give a number of batches of training data, "
                "or 0 to keep the statistics of the newest snapshot."
            )
        self._num_batches = num_batches
        self.clear()

    def clear(self) -> None:
        """Forget the statistics: another run begins."""
        self._values: dict[tuple[int, ...], dict[str, Tensor]] = {}  # by the window's steps
        self._window_key: object = None  # of the window that has these snapshots, once it is known
        self._frozen: Collection[nn.Module] = ()  # layers that keep their statistics

    def __getstate__(self) -> dict[str, Any]:
        """A copy is used with a copy of the window, and of the model."""
        return {**vars(self), "_window_key": None, "_frozen": ()}

    def watch(self, model: nn.Module) -> None:
        """Note which layers are frozen at a snapshot, if the model is in training mode.

        Frameworks put the whole model into evaluation mode before the statistics are estimated.
        """
        if unwrap(model).training:
            self._frozen = WeakSet(frozen_layers(model))

    def needed(self, model: nn.Module) -> bool:
        """Whether the model has statistics that should be re-estimated."""
        return self._num_batches != 0 and bool(layers_with_statistics(model))

    def holds(self, averager: LatestWeightAverager, k: int | None = None) -> bool:
        """Whether the statistics for the averager's present window are known.

        A blend also changes with the live weights, so its statistics are estimated each time.
        """
        if self._window_key not in (None, averager.window_key):
            self.clear()
        self._window_key = averager.window_key
        blends = isinstance(averager.coefficients, Blend)
        return not blends and _window(averager, k) in self._values

    def put_into(
        self,
        model: nn.Module,
        averager: LatestWeightAverager,
        batches: Callable[[], AbstractContextManager[Iterable[Any]]],
        forward: Callable[[nn.Module, Any], Any] | None = None,
        *,
        k: int | None = None,
        group: "ProcessGroup | None" = None,
    ) -> None:
        """Give a model that holds the averager's mean the statistics for it.

        `batches` is entered only if they must be estimated. Call it in every process.
        """
        if not self.needed(model):
            return
        window = _window(averager, k)
        if self.holds(averager, k):
            with torch.no_grad():
                for name, buffer in _buffers(model):
                    buffer.copy_(self._values[window][name])
            return
        frozen = frozen_layers(model) if unwrap(model).training else self._frozen
        with batches() as loader:
            re_estimate(
                model, loader, self._num_batches, forward=forward, group=group, frozen=frozen
            )
        # Windows that end with an older snapshot will not be asked for again.
        self._values = {w: v for w, v in self._values.items() if w[-1:] == window[-1:]}
        with torch.inference_mode(False):  # an inference tensor could not be saved
            self._values[window] = {n: buffer.detach().clone() for n, buffer in _buffers(model)}

    def state_dict(self, averager: LatestWeightAverager, k: int | None = None) -> dict[str, Any]:
        """What to save with the averager's window; empty if it has no statistics yet."""
        window = _window(averager, k)
        if not self.holds(averager, k):
            return {}
        return {"steps": list(window), "values": self._values[window]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what was saved with a window."""
        found = {}
        if state:
            values = {name: value.clone() for name, value in state["values"].items()}
            found[tuple(int(step) for step in state["steps"])] = values
        self._values, self._window_key = found, None


def _window(averager: LatestWeightAverager, k: int | None) -> tuple[int, ...]:
    steps, newest = averager.snapshot_steps, averager.newest_step
    window = steps[len(steps) - (averager.num_averaged if k is None else k) :]
    if window and newest is not None and newest > window[-1]:
        window.append(newest)  # samples since the newest snapshot are a part of the average
    return tuple(window)


def _buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for prefix, module in model.named_modules():
        if isinstance(module, _BatchNorm):
            yield from module.named_buffers(prefix, recurse=False)
