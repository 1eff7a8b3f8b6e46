"""Re-estimates BatchNorm running statistics from a few batches, for averaged weights."""

import contextlib
import functools
import itertools
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from torch_lawa.errors import BatchNormError
from torch_lawa.ranks.barrier import barrier
from torch_lawa.selection import unwrap
from torch_lawa.shards import local

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["frozen_layers", "layers_with_statistics", "re_estimate", "recalibrate_batch_norm"]


def recalibrate_batch_norm(
    model: nn.Module,
    loader: Iterable[Any],
    num_batches: int | None = None,
    *,
    forward: Callable[[nn.Module, Any], Any] | None = None,
    group: "ProcessGroup | None" = None,
) -> int:
    """Re-estimate the running statistics of every BatchNorm layer; returns the batches used.

    Averaged weights were never run on a batch, so the BatchNorm statistics for them are unknown.
    This runs `num_batches` batches of training data (all by default) through the model, with only
    the BatchNorm layers in training mode, and sets their statistics to the average over the
    batches, weighted by batch size. A layer that is used several times in a pass gets the average
    over its uses; one that is not used keeps its statistics. Modes and momenta are restored. If
    anything fails, the statistics are unchanged. Without BatchNorm layers it returns 0 and does
    not iterate the loader.

    Layers that training keeps in evaluation mode are frozen, and keep their statistics. Call it
    while the model is in training mode: in evaluation mode they cannot be told from the others.

    A batch may be a tensor, a tuple or list whose first item is the input, or a dict of keyword
    arguments; tensors are moved to the model's device. For any other batch pass
    `forward=lambda model, batch: ...`, which gets the batch unchanged.

    With several processes, pass their `group` (`torch.distributed.group.WORLD` for all) and call
    it in each of them with its own batches: all get the statistics over all batches. Without a
    group each process gets the statistics over its own batches.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    >>> recalibrate_batch_norm(model, [torch.randn(8, 2) for _ in range(5)], num_batches=4)
    4
    """
    frozen = frozen_layers(model)
    if frozen and len(frozen) == len(layers_with_statistics(model)):
        warnings.warn(
            "every BatchNorm layer is in evaluation mode while the model is in training mode, so "
            "all keep their statistics. If they are not meant to be frozen, call model.train() "
            "before recalibrate_batch_norm.",
            stacklevel=2,
        )
    return re_estimate(model, loader, num_batches, forward=forward, group=group, frozen=frozen)


def re_estimate(
    model: nn.Module,
    loader: Iterable[Any],
    num_batches: int | None,
    *,
    forward: Callable[[nn.Module, Any], Any] | None,
    group: "ProcessGroup | None",
    frozen: Collection[nn.Module],
) -> int:
    """Like `recalibrate_batch_norm`, except for the given `frozen` layers."""
    layers = [layer for layer in layers_with_statistics(model) if layer not in frozen]
    if not layers:
        return 0
    if num_batches is not None and (not isinstance(num_batches, int) or num_batches < 1):
        raise BatchNormError(f"num_batches={num_batches}: it must be an int of at least 1.")
    call = forward if forward is not None else _forward(model)
    num_used = 0
    with torch.no_grad():
        seen = _Seen(layers)
        with _estimating(model, layers):
            for batch in itertools.islice(loader, num_batches):
                seen.add(functools.partial(call, model, batch), _size(batch))
                num_used += 1
        if not (num_used if group is None else seen.share(num_used, group)):
            raise BatchNormError(
                "the loader gave no batches, so the BatchNorm statistics are unchanged. Pass a "
                "loader that can be iterated again (not an exhausted iterator)."
            )
        try:
            seen.write()
        except BaseException:  # Ctrl-C in the middle: once more, and whole
            seen.write()
            raise
    return num_used


def layers_with_statistics(model: nn.Module) -> list[_BatchNorm]:
    """The BatchNorm layers that update running statistics."""
    return [
        module
        for module in model.modules()
        if isinstance(module, _BatchNorm)
        and module.running_mean is not None
        and module.track_running_stats  # switched off later by Lightning's `BaseFinetuning.freeze`
    ]


def frozen_layers(model: nn.Module) -> list[_BatchNorm]:
    """The layers that are in evaluation mode, while the model is trained; none if it is not."""
    if not unwrap(model).training:
        return []
    return [layer for layer in layers_with_statistics(model) if not layer.training]


class _Seen:
    """The statistics over all batches so far: float64 sums, rounded once, equal on all ranks."""

    def __init__(self, layers: list[_BatchNorm]) -> None:
        self._layers = layers
        self._statistics = [
            local(statistic)
            for layer in layers
            for statistic in (layer.running_mean, layer.running_var)
            if statistic is not None
        ]
        self._lengths = [statistic.numel() for statistic in self._statistics]
        # One sum per value; one total (the number of examples) per statistic, two per layer.
        device = self._statistics[0].device
        self._sums = torch.zeros(sum(self._lengths), dtype=torch.float64, device=device)
        self._totals = torch.zeros(len(self._lengths), dtype=torch.float64, device="cpu")
        self._calls = torch.zeros(len(layers), dtype=torch.int64, device="cpu")

    def add(self, run: Callable[[], Any], size: int) -> None:
        """Run one batch of `size` examples, and add each layer's statistics of it."""
        while True:
            for layer in self._layers:
                layer.reset_running_stats()
            run()
            calls = self._count_calls()
            # A momentum of 1 keeps the last of several uses, a momentum of None their average.
            again = [
                layer
                for layer, n in zip(self._layers, calls.tolist(), strict=True)
                if n > 1 and layer.momentum is not None
            ]
            if not again:
                break
            for layer in again:
                layer.momentum = None
        if not size:  # run nevertheless: other processes may wait in a collective
            return
        weights = (size * calls).double().repeat_interleave(2)
        device = self._sums.device
        flat = torch.cat([statistic.flatten().to(device) for statistic in self._statistics])
        self._sums += flat.double() * self._by_value(weights)
        self._totals += weights
        self._calls += calls

    def share(self, num_used: int, group: "ProcessGroup") -> int:
        """Sum over all processes; returns the number of batches of all of them.

        A process without batches adds nothing, but must take part in the collective.
        """
        counts = torch.cat([self._totals, self._totals.new_tensor([num_used])])
        everything = torch.cat([self._sums, counts.to(self._sums.device)])
        barrier(f"recalibrate_batch_norm of {len(self._layers)} layers", group)
        torch.distributed.all_reduce(everything, group=group)
        self._sums, counts = torch.split(everything, [self._sums.numel(), counts.numel()])
        *totals, everyone = counts.tolist()
        self._totals = self._totals.new_tensor(totals)
        return int(everyone)

    def write(self) -> None:
        """Write the statistics into the layers that were used."""
        means = torch.split(self._sums / self._by_value(self._totals), self._lengths)
        used = self._totals.tolist()
        for statistic, mean, total in zip(self._statistics, means, used, strict=True):
            if total:
                statistic.copy_(mean.view_as(statistic))
        for layer, n in zip(self._layers, self._calls.tolist(), strict=True):
            if n and layer.num_batches_tracked is not None:
                layer.num_batches_tracked.fill_(n)

    def _count_calls(self) -> Tensor:
        """How often each layer was used, with one synchronisation with the device."""
        tracked = [local(layer.num_batches_tracked) for layer in self._layers]  # type: ignore[arg-type]
        return torch.stack([count.to(self._sums.device) for count in tracked]).cpu()

    def _by_value(self, numbers: Tensor) -> Tensor:
        lengths = torch.tensor(self._lengths, device="cpu")
        return numbers.repeat_interleave(lengths).to(self._sums.device)


@contextlib.contextmanager
def _estimating(model: nn.Module, layers: list[_BatchNorm]) -> Iterator[None]:
    """Only `layers` are in training mode, with a momentum of 1; restored at the end."""
    modes = [(module, module.training) for module in model.modules()]
    momenta = [layer.momentum for layer in layers]
    before = [
        (buffer, buffer.clone()) for layer in layers for buffer in layer.buffers(recurse=False)
    ]

    def restore() -> None:
        for buffer, value in before:
            buffer.copy_(value)
        for module, training in modes:
            module.training = training
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum

    try:
        model.eval()
        for layer in layers:
            layer.train()
            layer.momentum = 1.0
        yield
    finally:
        # Not a helper function: Ctrl-C could arrive before its first line.
        try:
            restore()
        except BaseException:  # Ctrl-C in the middle: once more, and whole
            restore()
            raise


def _forward(model: nn.Module) -> Callable[[nn.Module, Any], Any]:
    device = next((p.device for p in model.parameters()), torch.device("cpu"))

    def move(value: Any) -> Any:
        return value.to(device, non_blocking=True) if isinstance(value, Tensor) else value

    def forward(model: nn.Module, batch: Any) -> Any:
        if isinstance(batch, Tensor):
            return model(move(batch))
        if isinstance(batch, Mapping):
            return model(**{key: move(value) for key, value in batch.items()})
        if isinstance(batch, tuple | list) and batch and isinstance(batch[0], Tensor):
            return model(move(batch[0]))
        raise BatchNormError(
            f"a batch of type {type(batch).__name__} cannot be passed to the model directly: pass "
            "forward=lambda model, batch: model(...)."
        )

    return forward


def _size(batch: Any) -> int:
    """The number of examples in a batch: the length of the first tensor found in it."""
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.ndim else 1
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, tuple | list):
        return next((_size(item) for item in batch if isinstance(item, Tensor)), 1)
    return 1
