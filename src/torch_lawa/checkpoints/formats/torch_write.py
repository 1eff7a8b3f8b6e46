"""Writers for PyTorch's own formats: files of `torch.save` and folders of DCP.

PyTorch writes them from a safetensors file that is memory-mapped, so only the pages being written
are in memory.
"""

import json
import warnings
from collections import OrderedDict
from collections.abc import Mapping

import torch
from torch import Tensor

from torch_lawa.checkpoints.formats.registry import StagedValues
from torch_lawa.checkpoints.formats.safetensors import read_header
from torch_lawa.checkpoints.formats.safetensors_torch import load_tensors
from torch_lawa.garbage import paused_garbage_collection
from torch_lawa.system_errors import named_errors, unwrapped_errors

__all__ = ["write_distributed", "write_file"]


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
        torch.save(_nested(state, staged.nested_under), file)


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
        (folder / "lawa.json").write_text(json.dumps(dict(staged.metadata), indent=2) + "\n")


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
