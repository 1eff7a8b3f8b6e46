"""Lending averaged weights to a model: by `copy_` into its own tensors, and always back."""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from torch_lawa.errors import LayoutError, SwapError
from torch_lawa.modes import ordinary_mode
from torch_lawa.selection import unwrap, write_into
from torch_lawa.shards import local, reshard

__all__ = ["find_targets", "lend", "refuse_if_lent"]

# By id (a module may define its own equality): the module, and where its trained weights lie.
_lent: dict[int, tuple[nn.Module, frozenset[int]]] = {}
_claiming = threading.Lock()


def refuse_if_lent(model: nn.Module | Mapping[str, Tensor], act: str) -> None:
    """Raise where `model`, or any part of it, holds averaged weights right now.

    So for a part of a lent model, a model with a lent part, and the state dict of one.
    """
    if not _lent:
        return
    mine = _addresses(model)
    own = id(unwrap(model)) if isinstance(model, nn.Module) else None
    if own in _lent or any(not mine.isdisjoint(theirs) for _, theirs in list(_lent.values())):
        raise SwapError(
            f"{act} while the model holds averaged weights: leave the `with "
            "averager.swapped_into(model)` block first."
        )


def _addresses(model: nn.Module | Mapping[str, Tensor]) -> frozenset[int]:
    """Where the trained weights lie, of a sharded model the parts here."""
    tensors: list[Tensor] = []  # of anything else, which is refused elsewhere
    if isinstance(model, nn.Module):
        reshard(model)
        tensors = [parameter for parameter in model.parameters() if parameter.requires_grad]
    elif isinstance(model, Mapping):
        tensors = [tensor for tensor in model.values() if isinstance(tensor, Tensor)]
    # Empty tensors have no address, or that of something else.
    return frozenset(local(t).data_ptr() for t in tensors if not is_lazy(t) and local(t).numel())


@contextlib.contextmanager
def _claimed(model: nn.Module) -> Iterator[nn.Module]:
    """Nobody else may lend or collect `model`, the bare module, meanwhile."""
    key = id(model)
    addresses = _addresses(model)
    with _claiming:  # two threads may come at once
        refuse_if_lent(model, "swapped_into was called")
        _lent[key] = model, addresses
    try:
        yield model
    finally:
        del _lent[key]


def find_targets(
    live: Mapping[str, Tensor], collected: Mapping[str, tuple[torch.Size, torch.dtype]]
) -> dict[str, Tensor]:
    """The tensors of a model that take what was collected; refused if one is not there."""
    found = {}
    for name, (shape, dtype) in collected.items():
        tensor = live.get(name)
        if tensor is None or tensor.shape != shape or _kind(tensor.dtype) != _kind(dtype):
            there = "no such tensor"
            if tensor is not None:
                there = f"shape {tuple(tensor.shape)} of {tensor.dtype}"
            raise LayoutError(
                f"tensor {name!r} was collected with shape {tuple(shape)} of {dtype} and this "
                f"model has {there}: swap into the model that was collected from."
            )
        found[name] = tensor
    return found


def _kind(dtype: torch.dtype) -> tuple[bool, bool]:
    """Between dtypes of one kind values may be rounded; between others they would be lost."""
    return dtype.is_floating_point, dtype.is_complex


@contextlib.contextmanager
def lend(
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    write: Callable[[], None],
    idle_memory: AbstractContextManager[Mapping[str, Tensor]] | None = None,
) -> Iterator[None]:
    """Call `write`, which changes `tensors` and maybe buffers of `model`; undo it at the end.

    Undone are the given tensors and all buffers, also those that only the block changed. Their
    values are kept in `idle_memory` where it has room for a tensor of that name.
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
            before = [_room_for(tensor, offered) for tensor, offered in found.values()]
            _copy(before, touched)
        values = dict(zip(found, before, strict=True))

        def restore() -> None:
            reshard(inner)
            _let_copies_end(touched)
            with ordinary_mode():
                _copy(touched, before)
                for owner, name, buffer in buffers:
                    # `model.half()` and the like put another tensor in its place.
                    now = owner.get(name)
                    if now is not None and now is not buffer and now.shape == buffer.shape:
                        write_into(local(now), values[id(local(buffer))])
            _forget_casts()

        try:
            _let_copies_end(touched)
            with ordinary_mode():
                write()
            _forget_casts()
            yield
        finally:
            try:
                restore()
            except BaseException:  # Ctrl-C once more, or another signal: the weights go first
                restore()
                raise


def _room_for(tensor: Tensor, offered: Tensor | None) -> Tensor:
    """Memory for its values: what is offered, if they fit in there, or new."""
    if offered is not None and all(
        getattr(offered, fact) == getattr(tensor, fact) for fact in ("shape", "dtype", "device")
    ):
        return offered
    return torch.empty_like(tensor, requires_grad=False)


def _forget_casts() -> None:
    """Inside `torch.autocast`, drop its low-precision copies of weights that have just changed.

    It keeps one of each parameter until its outermost block ends, and does not notice `copy_`:
    the model would go on with the weights it had before.
    """
    torch.clear_autocast_cache()


def _let_copies_end(tensors: Iterable[Tensor]) -> None:
    """Wait for the GPU where it may still have to read what is about to be overwritten.

    FSDP2 keeps offloaded parameters in page-locked memory. A forward pass orders their copies to
    the GPU and returns; a copy that the GPU comes to later would find the new values.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return
    if any(tensor.device.type == "cpu" and tensor.is_pinned() for tensor in tensors):
        torch.cuda.synchronize()


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy many tensors, in one call for each device and dtype."""
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
