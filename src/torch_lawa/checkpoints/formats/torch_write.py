"""Writers for PyTorch's own formats: files of `torch.save` and folders of DCP.

PyTorch writes them from a safetensors file that is memory-mapped, so only the pages being written
are in memory.
"""

import copyreg
import pickle
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.storage import TypedStorage

from torch_lawa.checkpoints.formats.registry import StagedValues
from torch_lawa.checkpoints.formats.safetensors import read_header
from torch_lawa.checkpoints.formats.safetensors_torch import load_tensors
from torch_lawa.checkpoints.provenance import write_provenance
from torch_lawa.garbage import paused_garbage_collection
from torch_lawa.system_errors import named_errors, unwrapped_errors

__all__ = ["write_distributed", "write_file"]

# Dtypes that PyTorch writes in the form that `_faster_pickle` has; newer ones have another.
_PLAIN = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
}


def write_file(staged: StagedValues) -> None:
    """Write a file that `torch.load` reads with `weights_only=True`: a state dict, ties tied.

    The provenance goes into the state dict's `_metadata`, where PyTorch keeps the versions of
    modules; `load_state_dict` ignores names that are not modules.
    """
    with (
        paused_garbage_collection(),
        unwrapped_errors(staged.target),
        staged.target.open("wb") as file,
    ):
        state = _state(staged)
        state._metadata = OrderedDict(staged.metadata)  # type: ignore[attr-defined]
        target: Any = _Interruptible(file, staged.proceed)
        torch.save(_nested(state, staged.nested_under), target, pickle_module=_faster_pickle())


def write_distributed(staged: StagedValues) -> None:
    """Write a folder that `torch.distributed.checkpoint` loads on any number of ranks."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    folder = staged.target
    state = _nested(dict(_state(staged)), staged.nested_under)
    with paused_garbage_collection(), unwrapped_errors(folder), warnings.catch_warnings():
        # One process is intended, and older versions of PyTorch have no `no_dist`.
        warnings.filterwarnings("ignore", message=".*torch.distributed is.*")
        warnings.filterwarnings("ignore", message="TypedStorage is deprecated")  # theirs, in 2.6
        save(state, storage_writer=FileSystemWriter(folder))
    with named_errors(folder):
        write_provenance(folder, staged.metadata)


class _Interruptible:
    """A file for `torch.save`, which writes a tensor in one call: asks before each call."""

    def __init__(self, file: BinaryIO, proceed: Callable[[], None]) -> None:
        self._file, self._proceed = file, proceed

    def write(self, data: bytes) -> int:
        self._proceed()
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()


def _faster_pickle() -> Any:
    """`pickle` for plain tensors on the CPU, each with a storage of its own.

    PyTorch's way to take a tensor apart provides for every kind of tensor, and PyTorch looks at
    every object that is pickled: shapes that are the same object are looked at once. Many small
    tensors are written in two thirds of the time.
    """
    shapes: dict[object, tuple[tuple[int, ...], tuple[int, ...]]] = {}

    def reduced(tensor: Tensor) -> Any:
        if tensor.dtype not in _PLAIN:
            return tensor.__reduce_ex__(2)  # type: ignore[no-untyped-call]
        storage = TypedStorage(  # type: ignore[no-untyped-call]
            wrap_storage=tensor.untyped_storage(), dtype=tensor.dtype, _internal=True
        )
        plain = tuple(tensor.shape), tensor.stride()
        shape, stride = shapes.setdefault(plain, plain)
        hooks: OrderedDict[int, object] = OrderedDict()  # not shared: a tensor adds its own to it
        parts = storage, tensor.storage_offset(), shape, stride, tensor.requires_grad, hooks
        return torch._utils._rebuild_tensor_v2, parts

    class Pickler(pickle.Pickler):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.dispatch_table = {**copyreg.dispatch_table, Tensor: reduced}

    return SimpleNamespace(Pickler=Pickler, __name__="pickle")


def _state(staged: StagedValues) -> "OrderedDict[str, Tensor]":
    # Each tensor is a storage of its own, so that saving one does not save the whole map.
    state = OrderedDict(load_tensors(staged.values, read_header(staged.values)))
    state.update({name: state[kept] for name, kept in staged.aliases.items()})
    return state


def _nested(state: Mapping[str, Tensor], key: str) -> Mapping[str, object]:
    found: Mapping[str, object] = state
    for part in reversed(key.split(".") if key else []):
        found = {part: found}
    return found
