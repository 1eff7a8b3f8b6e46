"""Lending averaged weights to a model: by `copy_` into its own tensors, and always back."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from torch_lawa.core.modes import ordinary_mode
from torch_lawa.core.selection import unwrap, write_into
from torch_lawa.core.shards import local, reshard
from torch_lawa.errors import LayoutError, SwapError

__all__ = ["find_targets", "lend", "refuse_if_lent"]

_lent: dict[int, nn.Module] = {}  # by id: a module may define its own equality


def refuse_if_lent(model: nn.Module, act: str) -> None:
    """Raise where `model` holds averaged weights right now."""
    if id(unwrap(model)) in _lent:
        raise SwapError(
            f"{act} while the model holds averaged weights: leave the `with "
            "averager.swapped_into(model)` block first."
        )


def find_targets(
    live: Mapping[str, Tensor], collected: Mapping[str, tuple[torch.Size, torch.dtype]]
) -> dict[str, Tensor]:
    """The tensors of a model that take what was collected; refused if one is not there."""
    found = {}
    for name, (shape, _) in collected.items():
        tensor = live.get(name)
        if tensor is None or tensor.shape != shape:
            there = "no such tensor" if tensor is None else f"shape {tuple(tensor.shape)}"
            raise LayoutError(
                f"tensor {name!r} was collected with shape {tuple(shape)} and this model has "
                f"{there}: swap into the model that was collected from."
            )
        found[name] = tensor
    return found


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
    refuse_if_lent(model, "swapped_into was called")
    inner = unwrap(model)
    reshard(inner)
    with idle_memory or contextlib.nullcontext({}) as room:
        found = {id(tensor): (tensor, room.get(name)) for name, tensor in tensors.items()}
        for buffer in map(local, inner.buffers()):
            found.setdefault(id(buffer), (buffer, None))
        touched = [tensor for tensor, _ in found.values()]
        with ordinary_mode():
            before = [_room_for(tensor, offered) for tensor, offered in found.values()]
            _copy(before, touched)
        _lent[id(inner)] = inner
        try:
            _let_copies_end(touched)
            with ordinary_mode():
                write()
            _forget_casts()
            yield
        finally:
            del _lent[id(inner)]
            reshard(inner)
            _let_copies_end(touched)
            with ordinary_mode():
                _copy(touched, before)
            _forget_casts()


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
