"""Folders that Hugging Face libraries write: one weights file, or shards and an index.

Adapter folders of PEFT and Diffusers are such folders too. An index may only name files in its own
folder.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from torch_lawa.checkpoints.formats.base import (
    Checkpoint,
    TensorSpec,
    TrainingProgress,
    is_plain_name,
)
from torch_lawa.checkpoints.provenance import PROVENANCE_FILE
from torch_lawa.errors import FormatError

if TYPE_CHECKING:
    from torch_lawa.checkpoints.storage.paths import Location
    from torch_lawa.mean.kernels import Bytes

__all__ = [
    "DIFFUSERS",
    "FOLDER_FILES",
    "FOLDER_PARTS",
    "INDEXES",
    "find_weights_file",
    "open_folder",
    "weights_stem",
]

DIFFUSERS = "diffusion_pytorch_model"  # how Diffusers calls the files of a model
# In this order: where a folder has several, the first is the one that `from_pretrained` reads.
# Diffusers' scripts train LoRA weights and leave a `model.safetensors` of Accelerate beside them.
_WEIGHTS = (
    "pytorch_lora_weights.safetensors",
    "model.safetensors",
    "adapter_model.safetensors",
    f"{DIFFUSERS}.safetensors",
    "pytorch_model.bin",
    "adapter_model.bin",
    f"{DIFFUSERS}.bin",
)
INDEXES = (
    "model.safetensors.index.json",
    f"{DIFFUSERS}.safetensors.index.json",
    "pytorch_model.bin.index.json",
    f"{DIFFUSERS}.bin.index.json",
)
FOLDER_FILES = (*_WEIGHTS, *INDEXES)
_STEMS = sorted({name.partition(".")[0] for name in _WEIGHTS})
# Shards, and what describes the weights.
FOLDER_PARTS = (
    rf"({'|'.join(_STEMS)})-[0-9]{{5}}-of-[0-9]{{5}}\.(safetensors|bin)"
    rf"|{re.escape(PROVENANCE_FILE)}|trainer_state\.json"
)
# Diffusers and Transformers put the name of a variant before the suffix: `model.fp16.safetensors`.
_WEIGHTS_FILE = re.compile(
    rf"({'|'.join(_STEMS)})(\.[^.]+)?(-[0-9]{{5}}-of-[0-9]{{5}})?\.(safetensors|bin)"
)
OpenShard = Callable[["Location"], Checkpoint]


def weights_stem(name: str) -> str | None:
    """The part of a file's name that says which library loads it; None for files of other kinds.

    >>> weights_stem("diffusion_pytorch_model.fp16.safetensors"), weights_stem("step-500.pt")
    ('diffusion_pytorch_model', None)
    """
    found = _WEIGHTS_FILE.fullmatch(name)
    return found[1] if found else None


def find_weights_file(folder: "Location") -> "Location | None":
    """The weights file or index of a folder that is one checkpoint; None where it is not."""
    names = {child.name for child in folder.children()}
    # safetensors before pickles, and a whole file before shards, as `from_pretrained` looks.
    ordered = sorted(FOLDER_FILES, key=lambda name: ".bin" in name)
    return next((folder.child(name) for name in ordered if name in names), None)


def open_folder(folder: "Location", key: str | None = None) -> Checkpoint:
    """Open a folder; `key` names the entry with the weights in files of PyTorch."""
    found = find_weights_file(folder)
    if found is None:
        raise FormatError(
            f"{folder}: no checkpoint here: looked for {', '.join(_WEIGHTS[1:3])}, {INDEXES[0]}, …"
        )
    opener = _opener(found.name, key)
    progress = _trainer_state(folder)
    if found.name in INDEXES:
        return ShardedCheckpoint(folder, found, opener, progress)
    checkpoint = opener(found)
    checkpoint.location = folder
    if progress.known:
        checkpoint.progress = progress
    return checkpoint


def _opener(name: str, key: str | None) -> OpenShard:
    if ".bin" not in name:
        from torch_lawa.checkpoints.formats.safetensors import SafetensorsFile

        return SafetensorsFile
    from torch_lawa.checkpoints.formats.torch_file import TorchFile

    return lambda file: TorchFile(file, key=key)


class ShardedCheckpoint(Checkpoint):
    """Shards, and the index that says which of them contains which tensor."""

    def __init__(
        self, folder: "Location", index: "Location", opener: OpenShard, progress: TrainingProgress
    ) -> None:
        weight_map = _weight_map(index)
        self._shards: dict[str, Checkpoint] = {}
        try:
            for file in sorted(set(weight_map.values())):
                location = folder.child(file)
                if not location.is_file():
                    raise FormatError(
                        f"{index}: names the shard {file!r}, which does not exist. Copy it there, "
                        "or save the checkpoint again."
                    )
                self._shards[file] = opener(location)
            tensors, aliases = self._check(index, weight_map)
        except BaseException:
            self.close()
            raise
        self._map = weight_map
        first = next(iter(self._shards.values()))
        super().__init__(
            location=folder,
            format=f"{first.format}, {len(self._shards)} shards",
            layout="sharded",
            tensors=tensors,
            aliases=aliases,
            metadata=first.metadata,
            progress=progress if progress.known else first.progress,
            notes=first.notes,
        )

    def _check(
        self, index: "Location", weight_map: Mapping[str, str]
    ) -> tuple[dict[str, TensorSpec], dict[str, str]]:
        tensors: dict[str, TensorSpec] = {}
        aliases: dict[str, str] = {}
        for name, file in weight_map.items():
            shard = self._shards[file]
            if name in shard.tensors:
                tensors[name] = shard.tensors[name]
            elif name in shard.aliases:
                aliases[name] = shard.aliases[name]
            else:
                raise FormatError(
                    f"{shard.location}: {index.name} names {name!r}, which is not in this file. "
                    "One of the two is from another checkpoint: copy or save all files again."
                )
        for shard in self._shards.values():
            for name in shard.tensors:
                if weight_map.get(name) != shard.location.name:
                    raise FormatError(
                        f"{shard.location}: contains {name!r}, which {index.name} does not list. "
                        "One of the two is from another checkpoint: copy or save all files again."
                    )
            aliases |= {n: kept for n, kept in shard.aliases.items() if n not in tensors}
        return tensors, aliases

    def read(self, name: str, begin: int, end: int) -> "Bytes":
        return self._shards[self._map[name]].read(name, begin, end)

    def read_all(self, names: Sequence[str]) -> "Bytes":
        files = {self._map[name] for name in names}
        return (
            self._shards[files.pop()].read_all(names)
            if len(files) == 1
            else super().read_all(names)
        )

    def file_of(self, name: str) -> "Location":
        return self.location.child(self._map[name])

    @property
    def files(self) -> "list[Location]":
        return [location for shard in self._shards.values() for location in shard.files]

    def close(self) -> None:
        for shard in self._shards.values():
            shard.close()


def _weight_map(index: "Location") -> dict[str, str]:
    found = index.read_json().get("weight_map")
    if not isinstance(found, dict) or not found:
        raise FormatError(f"{index}: has no weight_map, so it is not an index of shards.")
    for name, file in found.items():
        if not isinstance(file, str) or not is_plain_name(file):
            raise FormatError(
                f"{index}: maps {name!r} to {file!r}; a shard must be a file in the same folder."
            )
    return found


def _trainer_state(folder: "Location") -> TrainingProgress:
    """Step and epoch, as the Trainer of Transformers stores them beside a checkpoint."""
    location = folder.child("trainer_state.json")
    if not location.is_file():
        return TrainingProgress()
    state = location.read_json()
    step, epoch = state.get("global_step"), state.get("epoch")
    # An epoch there may be a fraction (2.75); only whole ones count.
    if isinstance(epoch, float) and epoch.is_integer():
        epoch = int(epoch)
    return TrainingProgress(_count(step), _count(epoch))


def _count(value: object) -> int | None:
    return value if type(value) is int and 0 <= value < 2**63 else None
