"""`torch_dist` folders of Megatron-Core, as Megatron-LM, Megatron Bridge and NeMo write them.

They are `torch.distributed.checkpoint` folders with a `metadata.json`. Keys are flat, so model and
optimizer tensors are distinguished by name. Everything else (`common.pt`, random states, extra
states of layers) is not read: an output is a copy of the newest folder, in which `megatron_write`
replaces the averaged values.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

from torch_lawa.boxes import boxes
from torch_lawa.checkpoints.formats.base import Checkpoint, TensorSpec, TrainingProgress
from torch_lawa.checkpoints.formats.dcp import (
    DistributedCheckpoint,
    DistributedMetadata,
    TensorEntry,
)
from torch_lawa.checkpoints.formats.dcp_chunks import Chunk, ChunkedTensor, find_problem
from torch_lawa.checkpoints.formats.torch_pickle.archive import load_archive
from torch_lawa.checkpoints.formats.torch_pickle.state_dicts import (
    FoundWeights,
    find_progress,
    is_training_state,
)
from torch_lawa.checkpoints.formats.torch_pickle.tensors import StoredTensor
from torch_lawa.checkpoints.provenance import PROVENANCE_FILE
from torch_lawa.checkpoints.storage.paths import LocalPath, Location
from torch_lawa.errors import FormatError
from torch_lawa.units import few

__all__ = ["MASTERS", "MegatronCheckpoint", "open_megatron"]

MASTERS = "masters"  # the value of --key
_BACKEND = "torch_dist"
_OPTIMIZER = r"(?:chained_[0-9]+\.)?optimizer\."
# Masters by parameter (`param` since 0.15), and those in the buckets of the distributed optimizer.
_MASTER = re.compile(_OPTIMIZER + r"state\.(?:fp32_param|param)\.(.+)", re.DOTALL)
_BUCKET = re.compile(_OPTIMIZER + r"distributed\..+\.param", re.DOTALL)
_TRAINING_STATE = re.compile(_OPTIMIZER)
_OWN_FILE = re.compile(r"\.metadata|metadata\.json|common\.pt|.+\.distcp")


def open_megatron(folder: Location, key: str | None = None) -> Checkpoint:
    """Open a folder with `.metadata` and `metadata.json`; the latter says whose it is."""
    file = folder.child("metadata.json")
    backend = file.read_json().get("sharded_backend")
    if backend is None:  # of somebody else
        return DistributedCheckpoint(folder, key=key)
    if backend != _BACKEND:
        raise FormatError(
            f"{file}: a Megatron checkpoint in the format {str(backend)[:80]!r}; only {_BACKEND} "
            f"is supported. Convert it with Megatron (--ckpt-convert-format {_BACKEND})."
        )
    return MegatronCheckpoint(folder, key=key)


class MegatronCheckpoint(DistributedCheckpoint):
    """A `torch_dist` folder: the tensors of the model, under the names that Megatron gives them.

    With the key "masters" they are the float32 copies in the state of the optimizer instead, where
    a tensor has one. Masters in buckets are not by parameter; they are read beside the model's
    tensors (`in_place_only`: no other format has them).
    """

    form = "Megatron checkpoint", "megatron"
    classes = tuple(
        f"megatron.core.dist_checkpointing.strategies.torch.{name}"
        for name in ("MCoreMetadata", "MCoreSavePlan")
    )

    def __init__(self, folder: Location, key: str | None = None) -> None:
        self._shapes: Mapping[str, tuple[int, ...]] = {}  # of the model's tensors with masters
        self._parts: dict[Chunk, tuple[Chunk, int]] = {}  # the chunk it is in, and the first value
        self.in_place_only: tuple[str, ...] = ()
        super().__init__(folder, key=key)

    @property
    def files(self) -> list[Location]:
        """Every file of the folder, since an output has them all."""
        return [
            child
            for child in self._folder.children()
            if child.name != PROVENANCE_FILE and child.is_file() and _belongs(child)
        ]

    def _find_weights(
        self, metadata: DistributedMetadata, key: str | None
    ) -> FoundWeights[TensorEntry]:
        if key not in (None, "", ".", MASTERS):
            raise FormatError(
                f"{self._folder}: --key {key}: of a Megatron checkpoint the model's tensors are "
                f"read, or with --key {MASTERS} the optimizer's float32 masters of them."
            )
        entries = metadata.tensors()
        weights = {
            name: entry
            for name, entry in entries.items()
            if not _TRAINING_STATE.match(name) and not is_training_state(name)
        }
        masters, buckets = {}, {}
        for name, entry in entries.items():
            if (found := _MASTER.fullmatch(name)) and found[1] in weights:
                masters[found[1]] = entry
            elif _BUCKET.fullmatch(name):
                buckets[name] = entry
        notes = list(self._note_folders())
        if not weights:
            raise FormatError(
                f"{self._folder}: contains no tensors of a model. Save it with the model."
            )
        if key != MASTERS:
            if masters or buckets:
                notes.append(
                    "the optimizer's float32 masters stay those of the newest checkpoint: load the "
                    f"result with --no-load-optim, or average them with --key {MASTERS}"
                )
            return FoundWeights(weights, "", tuple(notes), {})
        if not masters and not buckets:
            raise FormatError(
                f"{self._folder}: --key {MASTERS}: its optimizer state has no float32 masters that "
                "can be read, or there is no such state. Average the model's tensors instead."
            )
        self._shapes = {name: metadata.shape(weights[name]) for name in masters}
        self.in_place_only = tuple(buckets)
        return FoundWeights({**weights, **masters, **buckets}, MASTERS, tuple(notes), {})

    def _open(self, name: str, ref: TensorEntry, metadata: DistributedMetadata) -> ChunkedTensor:
        shape = self._shapes.get(name)
        if shape is None or shape == metadata.shape(ref):
            return super()._open(name, ref, metadata)
        stored, chunks = metadata.describe(ref)
        spec = TensorSpec(stored.dtype, shape)
        parts = [part for chunk in chunks for part in self._cut(ref, stored, chunk, shape)]
        if problem := find_problem(shape, parts):
            raise FormatError(f"{metadata.location}: tensor {ref.name!r}: {problem}.")
        for chunk in chunks:
            self._check_range(ref.name, chunk)
        return ChunkedTensor(spec, tuple(parts), partial(self._load_part, ref.name, stored.dtype))

    def _cut(
        self, ref: TensorEntry, stored: TensorSpec, chunk: Chunk, shape: tuple[int, ...]
    ) -> Iterator[Chunk]:
        """The boxes of a tensor that a chunk of its flattened form has.

        Before 0.16 the optimizer's part of a shard was a range of its values. A tensor [X, Y] in
        shards of [x, y] is stored as [X/x, Y/y, x*y], cut along the last dimension.
        """
        *grid, flat = stored.shape
        local = tuple(n // g if g else 0 for n, g in zip(shape, grid, strict=False))
        fits = len(grid) == len(shape) and flat == math.prod(local)
        if not fits or any(n != g * m for n, g, m in zip(shape, grid, local, strict=True)):
            raise FormatError(
                f"{self._folder}: {ref.name!r} has the shape {list(stored.shape)}, which is "
                f"neither that of its parameter, {list(shape)}, nor a flattened form of it."
            )
        if len(chunk.starts) != len(stored.shape) or any(n != 1 for n in chunk.sizes[:-1]):
            raise FormatError(f"{self._folder}: a chunk of {ref.name!r} is damaged.")
        begin, end = chunk.starts[-1], chunk.starts[-1] + chunk.sizes[-1]
        corner = [g * n for g, n in zip(chunk.starts, local, strict=False)]
        first = 0
        for starts, sizes in boxes(local, begin, min(end, flat)):
            at = tuple(a + b for a, b in zip(corner, starts, strict=True))
            part = replace(chunk, starts=at, sizes=sizes)
            self._parts[part] = chunk, first
            first += math.prod(sizes)
            yield part

    def _load_part(self, name: str, dtype: str, part: Chunk) -> StoredTensor:
        chunk, first = self._parts[part]
        whole = self._load(name, dtype, chunk)
        step = whole.stride[-1]
        strides = [step]
        for size in reversed(part.sizes[1:]):
            strides.insert(0, strides[0] * size)
        spec = TensorSpec(dtype, part.sizes)
        stride = tuple(strides[: len(part.sizes)])
        return StoredTensor(whole.storage, spec, whole.offset + first * step, stride)

    def _find_progress(self, metadata: DistributedMetadata) -> TrainingProgress:
        """The iteration in the common state: a file or, in newer releases, one of the objects.

        The arguments of the training script are beside it, and may be objects of any class.
        """
        file = self._folder.child("common.pt")
        try:
            if not file.is_file():
                chunk = metadata.locate("common_state/shard_0_1", None, ())
                self._check_range("common_state", chunk)
                return find_progress(self._load_item("common_state", chunk, any_name=True))
            source = file.open()
            try:
                return find_progress(load_archive(source, file, any_name=True))
            finally:
                source.close()
        except FormatError:  # missing or damaged; nothing else depends on it
            return TrainingProgress()

    def _note_folders(self) -> Iterator[str]:
        folders = [child.name for child in self._folder.children() if child.is_folder()]
        if folders:
            yield f"left out: {few(folders)} (folders inside of a checkpoint)"


def _belongs(file: Location) -> bool:
    """Whether a file is taken over: links to other files are not, unless they hold weights."""
    if _OWN_FILE.fullmatch(file.name):
        return True
    return not (isinstance(file, LocalPath) and file.path.is_symlink())
