"""BatchNorm statistics that fit averaged weights: re-estimated from a few batches."""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from torch_lawa.core.roll_call import roll_call
from torch_lawa.core.shards import local
from torch_lawa.errors import BatchNormError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["recalibrate_batch_norm"]


def recalibrate_batch_norm(
    model: nn.Module,
    loader: Iterable[Any],
    num_batches: int | None = None,
    *,
    forward: Callable[[nn.Module, Any], Any] | None = None,
    group: "ProcessGroup | None" = None,
) -> int:
    """Re-estimate the running statistics of every BatchNorm layer; returns the batches used.

    The mean of averaged weights never saw a batch, so its BatchNorm statistics are unknown. This
    runs `num_batches` batches of training data (all of them by default) through the model with
    only the BatchNorm layers in training mode and sets their statistics to the average over the
    batches, each weighted by its size. Modes and momenta are restored; nothing else changes, and
    when anything fails the statistics are as they were. Without BatchNorm layers it returns 0 and
    does not touch the loader.

    A batch may be a tensor, a tuple or list whose first item is the input, or a dict of keyword
    arguments; tensors are moved to the model's device. For anything else give
    `forward=lambda model, batch: ...`, which gets the batch as it is.

    With several processes, give their `group` (`torch.distributed.group.WORLD` for all) and call
    it in each of them: every process runs batches of its own, and all end with the statistics of
    all batches. Without it each process has the statistics of its own batches.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    >>> recalibrate_batch_norm(model, [torch.randn(8, 2) for _ in range(5)], num_batches=4)
    4
    """
    layers = [
        module
        for module in model.modules()
        if isinstance(module, _BatchNorm) and module.running_mean is not None
    ]
    if not layers:
        return 0
    if num_batches is not None and num_batches < 1:
        raise BatchNormError(f"num_batches={num_batches}: at least one batch is needed.")
    call = forward if forward is not None else _forward(model)
    with _estimating(model, layers), torch.no_grad():
        num_used, total = 0, 0
        for batch in itertools.islice(loader, num_batches):
            size = _size(batch)
            total += size
            for layer in layers:
                layer.momentum = size / total
            call(model, batch)
            num_used += 1
        if group is not None:
            total = _agree(layers, total, group)
        if total == 0:
            raise BatchNormError(
                "the loader gave no batches, so the BatchNorm statistics were left as they were. "
                "Pass a loader that can be iterated again (not a spent iterator)."
            )
    return num_used


def _agree(layers: list[_BatchNorm], total: int, group: "ProcessGroup") -> int:
    """Give every process the statistics of all their batches; returns how many examples that was.

    A process without batches counts for nothing, and takes part all the same: others wait for it.
    """
    statistics = [
        local(statistic)
        for layer in layers
        for statistic in (layer.running_mean, layer.running_var)
        if statistic is not None
    ]
    device = statistics[0].device
    # Sums in float64: they are rounded once, and equal in every process.
    flat = torch.cat([statistic.flatten().double().to(device) for statistic in statistics])
    sums = torch.cat([flat * total if total else torch.zeros_like(flat), flat.new_tensor([total])])
    roll_call(f"recalibrate_batch_norm of {len(layers)} layers", group)
    torch.distributed.all_reduce(sums, group=group)
    everyone = int(sums[-1])
    if everyone:
        means = torch.split(sums[:-1] / sums[-1], [s.numel() for s in statistics])
        for statistic, mean in zip(statistics, means, strict=True):
            statistic.copy_(mean.view_as(statistic))
    return everyone


@contextlib.contextmanager
def _estimating(model: nn.Module, layers: list[_BatchNorm]) -> Iterator[None]:
    """Only `layers` in training mode, statistics reset; undone, except for new statistics."""
    modes = [(module, module.training) for module in model.modules()]
    momenta = [layer.momentum for layer in layers]
    before = [
        (buffer, buffer.clone()) for layer in layers for buffer in layer.buffers(recurse=False)
    ]
    try:
        model.eval()
        for layer in layers:
            layer.reset_running_stats()
            layer.train()
        yield
    except BaseException:
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)
        raise
    finally:
        for module, training in modes:
            module.training = training
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum


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
            f"a batch of type {type(batch).__name__} cannot be passed to the model as it is: give "
            "forward=lambda model, batch: model(...)."
        )

    return forward


def _size(batch: Any) -> int:
    """The number of examples in a batch: the length of the first tensor found in it."""
    if isinstance(batch, Tensor):
        return max(batch.shape[0], 1) if batch.ndim else 1
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, tuple | list):
        return next((_size(item) for item in batch if isinstance(item, Tensor)), 1)
    return 1
