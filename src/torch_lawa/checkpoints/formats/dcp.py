"""Folders of `torch.distributed.checkpoint` (DCP), read without PyTorch in a single process.

`.metadata` is a pickle that says which chunks a tensor has and where they are stored; a chunk is a
small file of `torch.save` within a `.distcp` file. Nothing in either is executed.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from torch_lawa.checkpoints.formats.base import (
    Checkpoint,
    TensorSpec,
    TrainingProgress,
    check_claims,
)
from torch_lawa.checkpoints.formats.dcp_chunks import Chunk, ChunkedTensor, find_problem
from torch_lawa.checkpoints.formats.torch_pickle.archive import load_archive
from torch_lawa.checkpoints.formats.torch_pickle.safe_pickle import Label, Record, load_pickle
from torch_lawa.checkpoints.formats.torch_pickle.state_dicts import (
    PROGRESS_KEYS,
    FoundWeights,
    find_progress,
    find_weights,
    is_training_state,
)
from torch_lawa.checkpoints.formats.torch_pickle.tensors import CODES, MAKERS, StoredTensor, as_size
from torch_lawa.checkpoints.provenance import read_provenance
from torch_lawa.checkpoints.storage.byte_sources import ByteSource
from torch_lawa.checkpoints.storage.paths import Location
from torch_lawa.errors import FormatError

if TYPE_CHECKING:
    from torch_lawa.mean.kernels import Bytes

__all__ = ["DistributedCheckpoint", "DistributedMetadata", "TensorEntry"]

_HOME = "torch.distributed.checkpoint"
_TENSOR = f"{_HOME}.metadata.TensorStorageMetadata"
_RECORDS = [
    *(
        f"{_HOME}.metadata.{name}"
        for name in (
            *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "MetadataIndex"),
            *("ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING", "StorageMeta"),
        )
    ),
    *(
        f"{_HOME}.planner.{name}"  # the plans of the ranks, which some trainers keep
        for name in (
            *("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData"),
        )
    ),
    f"{_HOME}.filesystem._StorageInfo",
    f"{_HOME}.filesystem._StoragePrefix",
    "torch.distributed._shard.sharded_tensor.metadata.TensorProperties",
    "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING",
]
_Item = tuple[str, tuple[int, ...] | None]  # the name of an entry, and where a chunk begins in it


class DistributedCheckpoint(Checkpoint):
    """A folder of `torch.distributed.checkpoint`; tensors are whole, for any number of ranks.

    `key` is the dotted entry with the weights ("" for the top).
    """

    form = "PyTorch distributed checkpoint", "distributed"  # in messages, and its layout
    classes: tuple[str, ...] = ()  # more names that `.metadata` may use

    def __init__(self, folder: Location, key: str | None = None) -> None:
        self._folder = folder
        self._sources: dict[str, ByteSource] = {}
        self._loaded: dict[Chunk, StoredTensor] = {}
        metadata = DistributedMetadata(folder.child(".metadata"), self.classes)
        weights = self._find_weights(metadata, key)
        self.key, notes = weights.key, weights.notes
        try:
            self._tensors = {n: self._open(n, ref, metadata) for n, ref in weights.tensors.items()}
            progress = self._find_progress(metadata)
            provenance = read_provenance(folder)
        except BaseException:
            self.close()
            raise
        super().__init__(
            location=folder,
            format=self.form[0],
            layout=self.form[1],
            tensors={name: tensor.spec for name, tensor in self._tensors.items()},
            progress=progress,
            notes=notes,
            metadata=provenance,
        )
        try:
            check_claims(self, sum(source.size for source in self._sources.values()))
        except FormatError:
            self.close()
            raise

    def read(self, name: str, begin: int, end: int) -> "Bytes":
        return self._tensors[name].read(begin, end)

    def stored(self, name: str) -> Iterator[tuple[Chunk, StoredTensor]]:
        """Where the values of the tensor `name` are: boxes of it, and the tensors with them."""
        tensor = self._tensors[name]
        return ((chunk, tensor.load(chunk)) for chunk in tensor.chunks)

    def file_of(self, name: str) -> Location:
        chunks = self._tensors[name].chunks
        return self._folder.child(chunks[0].file) if chunks else self._folder

    @property
    def files(self) -> list[Location]:
        found = {chunk.file for tensor in self._tensors.values() for chunk in tensor.chunks}
        return [self._folder.child(file) for file in sorted(found)]

    def close(self) -> None:
        for source in self._sources.values():
            source.close()

    def _find_weights(
        self, metadata: "DistributedMetadata", key: str | None
    ) -> "FoundWeights[TensorEntry]":
        tree = metadata.tree(key)
        found = find_weights(tree, TensorEntry, self._folder, key=key, all_if_unclear=True)
        if found.key and key is None and not found.notes:
            found = replace(found, notes=(f"weights under {found.key!r}",))
        return found

    def _open(
        self, name: str, ref: "TensorEntry", metadata: "DistributedMetadata"
    ) -> ChunkedTensor:
        spec, chunks = metadata.describe(ref)
        problem = find_problem(spec.shape, chunks)
        if problem:
            raise FormatError(
                f"{metadata.location}: tensor {name!r}: {problem}. Save the checkpoint again."
            )
        for chunk in chunks:
            self._check_range(name, chunk)
        return ChunkedTensor(spec, chunks, partial(self._load, name, spec.dtype))

    def _check_range(self, name: str, chunk: Chunk) -> None:
        location = self._folder.child(chunk.file)
        if chunk.file not in self._sources:
            if not location.is_file():
                raise FormatError(
                    f"{location}: does not exist, but should contain {name!r}. Copy it there, or "
                    "save the checkpoint again."
                )
            self._sources[chunk.file] = location.open()
        size = self._sources[chunk.file].size
        if chunk.offset + chunk.length > size:
            raise FormatError(
                f"{location}: {name!r} is at {chunk.offset} to {chunk.offset + chunk.length}, and "
                f"the file has {size} bytes. It is truncated; write the checkpoint again."
            )

    def _load(self, name: str, dtype: str, chunk: Chunk) -> StoredTensor:
        found = self._loaded.get(chunk)
        if found is None:
            found = self._load_item(name, chunk)
            if not isinstance(found, StoredTensor) or found.spec != TensorSpec(dtype, chunk.sizes):
                what = found.spec if isinstance(found, StoredTensor) else type(found).__name__
                raise FormatError(
                    f"{self._folder.child(chunk.file)}: the chunk at {chunk.offset} of tensor "
                    f"{name!r} is {what}, expected {TensorSpec(dtype, chunk.sizes)}."
                )
            self._loaded[chunk] = found
        return found

    def _load_item(self, name: str, chunk: Chunk, *, any_name: bool = False) -> Any:
        end = chunk.offset + chunk.length
        source, location = self._sources[chunk.file], self._folder.child(chunk.file)
        try:
            return load_archive(source, location, chunk.offset, end, any_name=any_name)
        except FormatError as error:
            raise FormatError(f"{error} (Bytes {chunk.offset} to {end}, for {name!r}.)") from None

    def _find_progress(self, metadata: "DistributedMetadata") -> TrainingProgress:
        found = {}
        for name in PROGRESS_KEYS:
            try:
                chunk = metadata.locate(name, None, ())
                self._check_range(name, chunk)
                found[name] = self._load_item(name, chunk)
            except FormatError:  # missing, or not a plain number
                continue
        return find_progress(found)


@dataclass(frozen=True, eq=False, slots=True)
class TensorEntry:
    """A tensor of the metadata, not checked yet: most may be the optimizer's."""

    name: str
    record: Record


class DistributedMetadata:
    """The contents of `.metadata`; entries are checked when they are used.

    `classes` are more names that the pickle may use; they are not imported.
    """

    def __init__(self, location: Location, classes: Iterable[str]) -> None:
        self.location = location
        if not location.is_file():
            raise FormatError(f"{location}: does not exist: not a distributed checkpoint.")
        source = location.open()
        try:
            makers = {**MAKERS, **dict.fromkeys((*_RECORDS, *classes))}
            state = self._state(load_pickle(source.view(0, source.size), location, makers))
        finally:
            source.close()
        self._entries = self._dict(state.get("state_dict_metadata"))
        self._paths = state.get("planner_data")
        self._items: dict[_Item, dict[str, Any]] = {}
        for index, info in self._dict(state.get("storage_data")).items():
            self._items[self._item(index)] = self._state(info)

    def _item(self, index: object) -> _Item:
        state = self._state(index)
        name, offset = state.get("fqn"), state.get("offset")
        start = None if offset is None else as_size(offset)
        if not isinstance(name, str) or (start is None and offset is not None):
            raise FormatError(
                f"{self.location}: its index of stored items is damaged. Save the checkpoint again."
            )
        return name, start

    def tensors(self) -> dict[str, TensorEntry]:
        """Every tensor, by the name it was saved under."""
        return {
            name: TensorEntry(name, entry)
            for name, entry in self._entries.items()
            if isinstance(name, str) and isinstance(entry, Record) and entry.path == _TENSOR
        }

    def tree(self, key: str | None) -> dict[object, object]:
        """The tensors, nested as they were saved."""
        names = list(self.tensors())
        tree: dict[object, object] = {}
        for name, path in zip(names, self._find_paths(names, key), strict=True):
            node = tree
            for part in path[:-1]:
                below = node.setdefault(part, {})
                if not isinstance(below, dict):
                    raise FormatError(f"{self.location}: {name!r} is nested in another tensor.")
                node = below
            if path[-1] in node:
                raise FormatError(f"{self.location}: two tensors have the path of {name!r}.")
            node[path[-1]] = TensorEntry(name, self._entries[name])
        return tree

    def _find_paths(self, names: list[str], key: str | None) -> Iterable[tuple[object, ...]]:
        if isinstance(self._paths, dict):
            return [self._check_path(name, self._paths.get(name, (name,))) for name in names]
        if key is not None:
            return [
                (key, name[len(key) + 1 :]) if name.startswith(f"{key}.") else (name,)
                for name in names
            ]
        # Not saved by the default planner: a dot may belong to a module's name or mean nesting.
        nested = any(map(is_training_state, names))
        return [tuple(name.split(".", 1)) if nested else (name,) for name in names]

    def _check_path(self, name: str, path: object) -> tuple[object, ...]:
        if isinstance(path, tuple) and path and all(isinstance(p, str | int) for p in path):
            return path
        raise FormatError(f"{self.location}: the path of {name!r} in the state dict is damaged.")

    def shape(self, ref: TensorEntry) -> tuple[int, ...]:
        """The shape that a tensor is stored with."""
        shape = as_size(self._state(ref.record).get("size"))
        if shape is None:
            raise FormatError(f"{self.location}: its entry for {ref.name!r} is damaged.")
        return shape

    def describe(self, ref: TensorEntry) -> tuple[TensorSpec, tuple[Chunk, ...]]:
        """The spec of a tensor, and its non-empty chunks."""
        state = self._state(ref.record)
        properties, shape = state.get("properties"), as_size(state.get("size"))
        values = properties.state if isinstance(properties, Record) else None
        label = values[0] if isinstance(values, tuple) and values else None
        if isinstance(values, dict):
            label = values.get("dtype")
        records = state.get("chunks")
        if not isinstance(label, Label) or shape is None or not isinstance(records, list):
            raise FormatError(f"{self.location}: its entry for {ref.name!r} is damaged.")
        if label.path not in CODES:
            raise FormatError(
                f"{self.location}: tensor {ref.name!r} is of {label.path}, which safetensors "
                "cannot hold."
            )
        chunks = []
        for record in records:
            part = self._state(record)
            starts, sizes = as_size(part.get("offsets")), as_size(part.get("sizes"))
            if starts is None or sizes is None:
                raise FormatError(f"{self.location}: a chunk of {ref.name!r} is damaged.")
            if 0 not in sizes:  # ranks without a part of a tensor write empty chunks
                chunks.append(self.locate(ref.name, starts, sizes))
        return TensorSpec(CODES[label.path], shape), tuple(chunks)

    def locate(self, name: str, starts: tuple[int, ...] | None, sizes: tuple[int, ...]) -> Chunk:
        """Look up where an item is stored."""
        where = "" if starts is None else f" at {starts}"
        info = self._items.get((name, starts))
        if info is None:
            raise FormatError(f"{self.location}: does not say where {name!r}{where} is stored.")
        if info.get("transform_descriptors"):
            raise FormatError(
                f"{self.location}: {name!r} is stored compressed or otherwise transformed: save "
                "it without extensions."
            )
        file, at = info.get("relative_path"), as_size([info.get("offset"), info.get("length")])
        if not isinstance(file, str) or at is None or not _is_beside(file):
            raise FormatError(
                f"{self.location}: stores {name!r}{where} in {file!r:.200}; it must be a range of "
                "a file in the folder."
            )
        return Chunk(starts or (), sizes, file, *at)

    def _state(self, thing: object) -> dict[str, Any]:
        return self._dict(thing.state if isinstance(thing, Record) else None)

    def _dict(self, thing: object) -> dict[Any, Any]:
        if not isinstance(thing, dict):
            raise FormatError(
                f"{self.location}: not the metadata of a distributed checkpoint. Save it again."
            )
        return thing


def _is_beside(file: str) -> bool:
    """Whether a path stays within the folder."""
    parts = PurePosixPath(file).parts
    return bool(parts) and not any(c in file for c in "\\\0:") and not {"/", ".."} & set(parts)
