"""The formats that are PyTorch's own, written by PyTorch, from values that lie in a file already.

The values are memory-mapped, so no more than the pages being written are in memory.
"""

import json
import warnings
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from torch_lawa.checkpoints.formats.safetensors import read_header
from torch_lawa.checkpoints.formats.safetensors_torch import load_tensors
from torch_lawa.checkpoints.storage.atomic import replacing, sync_file

__all__ = ["save_distributed", "save_file"]


def save_file(
    values: Path,
    path: Path,
    aliases: Mapping[str, str],
    metadata: Mapping[str, str],
    nested_under: str = "",
) -> None:
    """A file that `torch.load` reads with `weights_only=True`: a state dict, ties tied.

    What is known of its making goes into the state dict's `_metadata`, where PyTorch keeps the
    versions of modules and `load_state_dict` ignores names that are no module's.
    """
    state = _state(values, aliases)
    state._metadata = OrderedDict(metadata)  # type: ignore[attr-defined]
    with replacing(path) as file:
        torch.save(_nested(state, nested_under), file)


def save_distributed(
    values: Path,
    folder: Path,
    aliases: Mapping[str, str],
    metadata: Mapping[str, str],
    nested_under: str = "",
) -> None:
    """A folder that `torch.distributed.checkpoint` loads on any number of ranks."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    state = _nested(dict(_state(values, aliases)), nested_under)
    with warnings.catch_warnings():
        # That there is one process only is what we want, and `no_dist` is not known everywhere.
        warnings.filterwarnings("ignore", message=".*torch.distributed is.*")
        warnings.filterwarnings("ignore", message="TypedStorage is deprecated")  # theirs, in 2.6
        save(state, storage_writer=FileSystemWriter(folder))
    (folder / "lawa.json").write_text(json.dumps(dict(metadata), indent=2) + "\n")
    for path in folder.iterdir():
        sync_file(path)


def _state(values: Path, aliases: Mapping[str, str]) -> "OrderedDict[str, Tensor]":
    # Each tensor is a storage of its own, so that saving one does not save the whole map.
    state = OrderedDict(load_tensors(values, read_header(values)))
    state.update({name: state[kept] for name, kept in aliases.items()})
    return state


def _nested(state: Mapping[str, Tensor], key: str) -> Mapping[str, object]:
    found: Mapping[str, object] = state
    for part in reversed(key.split(".") if key else []):
        found = {part: found}
    return found
