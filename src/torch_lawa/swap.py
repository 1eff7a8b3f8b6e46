"""Swap averaged weights into a model: `copy_` into its own tensors, restored on any exit."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from torch_lawa.errors import LayoutError, SwapError
from torch_lawa.masters import Masters, masters_of
from torch_lawa.selection import unwrap, wrappers, write_into
from torch_lawa.shards import is_sharded, local, reshard

__all__ = ["ordinary_mode", "refuse_if_swapped", "swap_targets", "swapped"]

_TO_SYNC = "require_forward_param_sync"  # an attribute of DDP

# The swaps that are active, in their order: by id, the unwrapped module, and the addresses of its
# weights.
_swapped: dict[int, tuple[nn.Module, frozenset[int]]] = {}


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
    if _swapped:
        _refuse_overlap(model, _addresses(model), list(_swapped.values()), act)


def _refuse_overlap(
    model: nn.Module | Mapping[str, Tensor],
    mine: frozenset[int],
    others: Iterable[tuple[nn.Module, frozenset[int]]],
    act: str,
) -> None:
    own = unwrap(model) if isinstance(model, nn.Module) else None
    if any(own is other or not mine.isdisjoint(theirs) for other, theirs in others):
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
    # Empty tensors have no address, or share one with another tensor; subclasses that wrap other
    # tensors all say 0.
    found = [local(tensor) for tensor in tensors if not is_lazy(tensor)]
    return frozenset(tensor.data_ptr() or id(tensor) for tensor in found if tensor.numel())


def swap_targets(
    live: Mapping[str, Tensor],
    collected: Mapping[str, tuple[torch.Size, torch.dtype]],
    kept: Mapping[str, tuple[torch.Size, torch.dtype]],
) -> dict[str, Tensor]:
    """The live tensors that the collected ones are written to; each must be there and match.

    Except for buffers among the `kept` tensors whose shape has changed since: the model keeps its
    own value.
    """
    found = {}
    for name, (shape, dtype) in {**collected, **kept}.items():
        tensor = live.get(name)
        own = name in kept and tensor is not None and not isinstance(tensor, nn.Parameter)
        if own and live[name].shape != shape:
            continue
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


def swapped(
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    write: Callable[[], None],
    idle_memory: AbstractContextManager[Mapping[str, Tensor]] | None = None,
) -> AbstractContextManager[None]:
    """Call `write`, which changes `tensors` and maybe buffers of `model`; restore them on exit.

    The given tensors and all buffers are restored, including buffers that only the block changed.
    If the tensors are masters, the weights that forward passes use follow them, both ways. Values
    are saved in `idle_memory` where it has memory for a tensor of that name.
    """
    return _Swap(model, tensors, write, idle_memory or contextlib.nullcontext({}))


class _Swap(AbstractContextManager[None]):
    """One swap. Not a generator: an interrupt inside `contextlib` would leave that suspended.

    Everything happens inside `try`, and `_leave` may be called at any moment and twice, so that an
    interrupt at any line leaves the model with its own weights, and unclaimed.
    """

    def __init__(
        self,
        model: nn.Module,
        tensors: Mapping[str, Tensor],
        write: Callable[[], None],
        idle_memory: AbstractContextManager[Mapping[str, Tensor]],
    ) -> None:
        self._model, self._tensors, self._write = model, tensors, write
        self._idle_memory, self._memory = idle_memory, ExitStack()
        self._restore: Callable[[], None] | None = None  # known once all values are saved
        self._entered = False
        self._masters: Masters | None = masters_of(model) if tensors else None

    def __enter__(self) -> None:
        refuse_if_swapped(self._model, "swapped_into was called")
        if self._entered:
            raise SwapError(
                "this swap was used before, and the window may have changed since: call "
                "averager.swapped_into(model) for each `with` block."
            )
        self._entered = True
        try:
            self._claim()
            self._restore = self._save()
            with ordinary_mode():
                self._write()
                if self._masters is not None:
                    self._masters.round_into_copies()
            _clear_caches()
            return  # here, so that nothing is left to interrupt
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        try:
            self._leave()
        except BaseException:  # a second Ctrl-C or signal: restore the weights first
            try:
                self._leave()
            finally:
                _swapped.pop(id(self), None)
            raise

    def __del__(self) -> None:
        # After an interrupt at the very first instruction of `__exit__`.
        if _swapped and id(self) in _swapped:
            self._leave()

    def _claim(self) -> None:
        """Mark the model as swapped. Of two threads that do so, the second in the table raises."""
        addresses = _addresses(self._model)
        _swapped[id(self)] = unwrap(self._model), addresses
        earlier = []
        for key, other in list(_swapped.items()):
            if key == id(self):
                break
            earlier.append(other)
        _refuse_overlap(self._model, addresses, earlier, "swapped_into was called")

    def _leave(self) -> None:
        """Restore the weights, then give back the memory and the claim; may be repeated."""
        if self._restore is not None:
            self._restore()
            self._restore = None
        self._memory.close()
        _swapped.pop(id(self), None)

    def _save(self) -> Callable[[], None]:
        """Save all values; returns what restores them.

        That must not refer to this object: then it is freed, and restores, with its last reference.
        """
        inner, room = unwrap(self._model), self._memory.enter_context(self._idle_memory)
        masters = self._masters
        found = {id(tensor): (tensor, room.get(name)) for name, tensor in self._tensors.items()}
        for copy in () if masters is None else masters.working_copies():
            found.setdefault(id(copy), (copy, None))
        modules = list(inner.modules())
        buffers = [
            (module._buffers, name, buffer)
            for module in modules
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        parameters = [
            (module._parameters, name, parameter, local(parameter))
            for module in modules
            for name, parameter in module._parameters.items()
            if parameter is not None
        ]
        # DDP broadcasts the buffers of rank 0 before the first forward pass after a step. That must
        # happen for the trained weights, which come next, not for the averaged ones.
        synced = [
            (vars(wrapper), vars(wrapper)[_TO_SYNC])
            for wrapper in wrappers(self._model)
            if _TO_SYNC in vars(wrapper)
        ]
        for _, _, buffer in buffers:
            if _is_plain(buffer):
                found.setdefault(id(local(buffer)), (local(buffer), None))
        touched = [tensor for tensor, _ in found.values()]
        with ordinary_mode():
            before = [_memory_for(tensor, offered) for tensor, offered in found.values()]
            _copy(before, touched)
        _wait_for_copies(touched)
        values = dict(zip(found, before, strict=True))

        def restore() -> None:
            reshard(inner, after_exception=True)
            _wait_for_copies(touched)
            with ordinary_mode():
                _copy(touched, before)
                for owner, name, buffer in buffers:
                    # `model.half()` and the like replace the buffer by another tensor.
                    # The table of a TorchScript module has no `get`.
                    now = owner[name] if name in owner else None  # noqa: SIM401
                    if now is None or now is buffer:
                        continue
                    if not _is_plain(buffer):
                        owner[name] = buffer
                    elif _is_plain(now) and now.shape == buffer.shape:
                        write_into(local(now), values[id(local(buffer))])
                for table, name, parameter, part in parameters:
                    # `load_state_dict(assign=True)` and the like; the optimizer has this one.
                    now = table[name] if name in table else None  # noqa: SIM401
                    if now is part or now is None or local(now) is part:
                        continue
                    if not is_sharded(parameter):
                        table[name] = parameter
                    elif id(part) in values and local(now).shape == part.shape:
                        write_into(local(now), values[id(part)])  # FSDP2 refers to the new one
                if masters is not None:
                    masters.share_copies()
            for facts, due in synced:
                facts[_TO_SYNC] = due
            _clear_caches()

        return restore


def _is_plain(buffer: Tensor) -> bool:
    """Whether its values can be copied: it is neither sparse nor nested.

    A module may have other buffers, such as the adjacency of a graph, if they are not persistent.
    """
    return buffer.layout == torch.strided and not buffer.is_nested


def _memory_for(tensor: Tensor, offered: Tensor | None) -> Tensor:
    """Memory for the tensor's values: the offered one if they fit, else newly allocated."""
    if offered is not None and all(
        getattr(offered, fact) == getattr(tensor, fact) for fact in ("shape", "dtype", "device")
    ):
        return offered
    return torch.empty_like(tensor, requires_grad=False)


def _clear_caches() -> None:
    """Drop what `torch.autocast` and `parametrize.cached` computed from the weights before.

    Inside such a block they keep low-precision copies, or parametrized weights, until its end, and
    do not notice `copy_`: the model would continue to use the weights from before.
    """
    torch.clear_autocast_cache()
    parametrize._cache.clear()


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
        odd = target.is_conj() or target.is_neg() or target.is_inference()
        if odd or 0 in target.stride():
            write_into(target, source)
            continue
        group = groups.setdefault((target.device, target.dtype), ([], []))
        group[0].append(target)
        group[1].append(source)
    for group in groups.values():
        torch._foreach_copy_(*group)
