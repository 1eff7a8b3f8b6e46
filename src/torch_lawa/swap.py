"""Swap averaged weights into a model: `copy_` into its own tensors, restored on any exit."""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from torch_lawa.errors import LayoutError, SwapError
from torch_lawa.selection import unwrap, write_into
from torch_lawa.shards import local, reshard

__all__ = ["ordinary_mode", "refuse_if_swapped", "swap_targets", "swapped"]

# By id (a module may define its own equality): the module, and the addresses of its weights.
_swapped: dict[int, tuple[nn.Module, frozenset[int]]] = {}
_claiming = threading.Lock()


@contextlib.contextmanager
def ordinary_mode() -> Iterator[None]:
    """No gradients, and no inference tensors, which could not be written to later.

    >>> with torch.inference_mode(), ordinary_mode():
    ...     torch.ones(1).is_inference()
    False
    """
    with torch.inference_mode(False), torch.no_grad():
        yield


def refuse_if_swapped(model: nn.Module | Mapping[str, Tensor], act: str) -> None:
    """Raise if averaged weights are swapped into `model`, or into any part of it, right now.

    This covers a submodule of a swapped model, a model that contains one, and its state dict.
    `act` begins the message: "collect was called".
    """
    if not _swapped:
        return
    mine = _addresses(model)
    own = id(unwrap(model)) if isinstance(model, nn.Module) else None
    if own in _swapped or any(not mine.isdisjoint(theirs) for _, theirs in list(_swapped.values())):
        raise SwapError(
            f"{act} while the model holds averaged weights: leave the `with "
            "averager.swapped_into(model)` block first."
        )


def _addresses(model: nn.Module | Mapping[str, Tensor]) -> frozenset[int]:
    """The addresses of the trained weights; for a sharded model those of the local shards."""
    tensors: list[Tensor] = []  # anything that is neither is refused elsewhere
    if isinstance(model, nn.Module):
        reshard(model)
        tensors = [parameter for parameter in model.parameters() if parameter.requires_grad]
    elif isinstance(model, Mapping):
        tensors = [tensor for tensor in model.values() if isinstance(tensor, Tensor)]
    # Empty tensors have no address, or share one with another tensor.
    return frozenset(local(t).data_ptr() for t in tensors if not is_lazy(t) and local(t).numel())


@contextlib.contextmanager
def _claimed(model: nn.Module) -> Iterator[nn.Module]:
    """Mark `model`, the unwrapped module, as swapped for the duration of the block."""
    key = id(model)
    addresses = _addresses(model)
    with _claiming:  # two threads may swap at the same time
        refuse_if_swapped(model, "swapped_into was called")
        _swapped[key] = model, addresses
    try:
        yield model
    finally:
        del _swapped[key]


def swap_targets(
    live: Mapping[str, Tensor], collected: Mapping[str, tuple[torch.Size, torch.dtype]]
) -> dict[str, Tensor]:
    """The live tensors that the collected ones are written to; each must be there and match."""
    found = {}
    for name, (shape, dtype) in collected.items():
        tensor = live.get(name)
        if tensor is None or tensor.shape != shape or _kind(tensor.dtype) != _kind(dtype):
            there = "no such tensor"
            if tensor is not None:
                there = f"shape {tuple(tensor.shape)} and {tensor.dtype}"
            raise LayoutError(
                f"tensor {name!r} was collected with shape {tuple(shape)} and {dtype}, but this "
                f"model has {there}: swap into the model that the snapshots were taken of."
            )
        found[name] = tensor
    return found


def _kind(dtype: torch.dtype) -> tuple[bool, bool]:
    """Values may be rounded between dtypes of one kind; between kinds they would be lost."""
    return dtype.is_floating_point, dtype.is_complex


@contextlib.contextmanager
def swapped(
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    write: Callable[[], None],
    idle_memory: AbstractContextManager[Mapping[str, Tensor]] | None = None,
) -> Iterator[None]:
    """Call `write`, which changes `tensors` and maybe buffers of `model`; restore them on exit.

    The given tensors and all buffers are restored, including buffers that only the block changed.
    Their values are saved in `idle_memory` where it has memory for a tensor of that name.
    """
    with (
        _claimed(unwrap(model)) as inner,
        idle_memory or contextlib.nullcontext({}) as room,
    ):
        found = {id(tensor): (tensor, room.get(name)) for name, tensor in tensors.items()}
        buffers = [
            (module._buffers, name, buffer)
            for module in inner.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        for _, _, buffer in buffers:
            found.setdefault(id(local(buffer)), (local(buffer), None))
        touched = [tensor for tensor, _ in found.values()]
        with ordinary_mode():
            before = [_memory_for(tensor, offered) for tensor, offered in found.values()]
            _copy(before, touched)
        values = dict(zip(found, before, strict=True))

        def restore() -> None:
            reshard(inner)
            _wait_for_copies(touched)
            with ordinary_mode():
                _copy(touched, before)
                for owner, name, buffer in buffers:
                    # `model.half()` and the like replace the buffer by another tensor.
                    now = owner.get(name)
                    if now is not None and now is not buffer and now.shape == buffer.shape:
                        write_into(local(now), values[id(local(buffer))])
            _clear_autocast_cache()

        try:
            _wait_for_copies(touched)
            with ordinary_mode():
                write()
            _clear_autocast_cache()
            yield
        finally:
            try:
                restore()
            except BaseException:  # a second Ctrl-C or signal: restore the weights first
                restore()
                raise


def _memory_for(tensor: Tensor, offered: Tensor | None) -> Tensor:
    """Memory for the tensor's values: the offered one if they fit, else newly allocated."""
    if offered is not None and all(
        getattr(offered, fact) == getattr(tensor, fact) for fact in ("shape", "dtype", "device")
    ):
        return offered
    return torch.empty_like(tensor, requires_grad=False)


def _clear_autocast_cache() -> None:
    """Inside `torch.autocast`, drop its low-precision copies of weights that have just changed.

    Autocast caches one per parameter until its outermost block ends and does not notice `copy_`:
    the model would continue to use the weights from before.
    """
    torch.clear_autocast_cache()


def _wait_for_copies(tensors: Iterable[Tensor]) -> None:
    """Wait for the GPU if it may still have to read memory that is about to be overwritten.

    FSDP2 keeps offloaded parameters in pinned memory. A forward pass enqueues their copies to the
    GPU and returns; a copy that runs later would read the new values.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return
    if any(tensor.device.type == "cpu" and tensor.is_pinned() for tensor in tensors):
        torch.cuda.synchronize()


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy many tensors, in one call per device and dtype."""
    groups: dict[object, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        if 0 in target.stride():
            write_into(target, source)
            continue
        group = groups.setdefault((target.device, target.dtype), ([], []))
        group[0].append(target)
        group[1].append(source)
    for group in groups.values():
        torch._foreach_copy_(*group)
