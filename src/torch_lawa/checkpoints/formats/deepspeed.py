"""Checkpoints of DeepSpeed: ZeRO 1, 2 and 3 and universal ones, read without DeepSpeed.

`*_model_states.pt` has the names and shapes of the parameters, the buffers and, before ZeRO-3, the
16-bit weights. `*_optim_states.pt` has one rank's part of the float32 weights, flattened. They are
put together by the rules of DeepSpeed's `zero_to_fp32.py`, while they are read. As there, all
floating-point tensors are float32. Other entries of the files may be objects of any class: they
are not used, and nothing is executed.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np

from torch_lawa.checkpoints.formats.base import (
    Checkpoint,
    TensorSpec,
    TrainingProgress,
    check_claims,
    is_plain_name,
)
from torch_lawa.checkpoints.formats.deepspeed_files import RankFiles
from torch_lawa.checkpoints.formats.deepspeed_flat import (
    FlatTensor,
    FlatVector,
    Part,
    PartitionedVector,
    read_flat,
)
from torch_lawa.checkpoints.formats.deepspeed_states import (
    StateFile,
    as_counts,
    as_tensor,
    open_archive,
)
from torch_lawa.checkpoints.formats.torch_pickle.safe_pickle import Record
from torch_lawa.checkpoints.formats.torch_pickle.tensors import StoredTensor
from torch_lawa.checkpoints.storage.byte_sources import ByteSource
from torch_lawa.checkpoints.storage.paths import Location
from torch_lawa.errors import ConfigError, FormatError
from torch_lawa.units import few

if TYPE_CHECKING:
    from torch_lawa.mean.kernels import Bytes

__all__ = ["DeepSpeedCheckpoint"]

_GROUPS, _GROUPS_OF_3 = "single_partition_of_fp32_groups", "fp32_flat_groups"
_EXPERTS = ("ds_autoep_layers", "autoep_layers")
_CONVERTED = ("F64", "F16", "BF16")  # to float32
_MAX_RANKS = 1_000_000
_MAX_OPEN = 64  # files of a universal checkpoint, which has one per parameter

_Shapes = dict[str, tuple[int, ...]]
_Tensors = dict[str, FlatTensor]


class DeepSpeedCheckpoint(Checkpoint):
    """A `global_stepN` folder, or a universal one; tensors are whole, for any number of ranks."""

    def __init__(self, folder: Location, key: str | None = None) -> None:
        if key is not None:
            raise ConfigError(
                f"{folder}: --key {key} was given, but a DeepSpeed checkpoint has one set of "
                "weights. Leave it out."
            )
        self._sources: list[ByteSource] = []
        self._files: list[Location] = []
        self._universal: _UniversalFolder | None = None
        try:
            self._find(folder)
            check_claims(self, sum(file.size for file in self._files))
        except BaseException:
            self.close()
            raise

    def _find(self, folder: Location) -> None:
        children = {child.name: child for child in folder.children()}
        ranks = RankFiles.find(folder, children)
        groups = self._open_groups(ranks)
        model = self._open_model(ranks, groups)
        states = model[0]
        _refuse_experts(states)
        module = states.below("module")
        aliases: dict[str, str] = {}
        notes: tuple[str, ...] = ()
        if states.entries.get("param_shapes") is None:
            self._tensors = _from_module(module, module.tensor_names(), convert=False)
            notes = ("saved without ZeRO: the weights are those of the module",)
        else:
            trained = self._find_trained(states, ranks, groups, children.get("zero"))
            buffers = {name for name in states.items("buffer_names") if isinstance(name, str)}
            stored = module.tensor_names()
            # In the order of zero_to_fp32.py.
            self._tensors = _from_module(module, [n for n in stored if n in buffers], convert=True)
            self._tensors |= _join_frozen(model) | trained
            aliases = _find_aliases(states, self._tensors)
            # Frozen parameters of ZeRO-1 are in the module only. That of ZeRO-3 has no parameters.
            known = {*self._tensors, *aliases}
            rest = [] if ranks.model else [name for name in stored if name not in known]
            self._tensors |= _from_module(module, rest, convert=True)
            if rest:
                shown = few(map(repr, rest), limit=1)
                notes = (f"not trained by ZeRO, so taken from the module: {shown}",)
        universal = "universal checkpoint" if self._universal else "checkpoint"
        super().__init__(
            location=folder,
            format=f"DeepSpeed {universal}" if groups is None else groups.title,
            layout="folder",
            tensors={name: tensor.spec for name, tensor in self._tensors.items()},
            aliases=aliases,
            progress=TrainingProgress(step=states.count("global_steps")),
            notes=notes,
            beside=_find_config(folder, children),
        )

    def _find_trained(
        self,
        states: StateFile,
        ranks: RankFiles,
        groups: "_FlatGroups | None",
        zero: Location | None,
    ) -> _Tensors:
        """The parameters that are trained: from flat groups, or from the folder `zero`."""
        shapes = [
            StateFile(states.file, group, "param_shapes").sizes()
            for group in states.items("param_shapes")
        ]
        if groups is not None:
            return groups.cut(shapes)
        if zero is None or not zero.is_folder():
            ranks.require_optim(states.count("dp_world_size") or 1)
        assert zero is not None
        self._universal = _UniversalFolder(zero, shapes)
        self._files += self._universal.files
        return self._universal.tensors

    def _open(self, file: Location) -> StateFile:
        found, source = open_archive(file)
        self._sources.append(source)
        self._files.append(file)
        return StateFile(file, found)

    def _open_groups(self, ranks: RankFiles) -> "_FlatGroups | None":
        if not ranks.optim:
            return None
        first = self._open(ranks.optim[min(ranks.optim)])
        count = _count_ranks(first.below("optimizer_state_dict"))
        files = ranks.require_optim(count)
        states = [first, *(self._open(file) for file in files[1:])]
        return _FlatGroups([state.below("optimizer_state_dict") for state in states])

    def _open_model(self, ranks: RankFiles, groups: "_FlatGroups | None") -> list[StateFile]:
        """The model states: one file, or with ZeRO-3 one per rank."""
        if not ranks.model and not (groups is not None and groups.partitioned):
            return [self._open(ranks.require_whole())]
        if groups is not None:
            return [self._open(file) for file in ranks.require_model(groups.num_ranks)]
        first = self._open(ranks.model[min(ranks.model)])
        files = ranks.require_model(first.count("dp_world_size") or 1)
        return [first, *(self._open(file) for file in files[1:])]

    def read(self, name: str, begin: int, end: int) -> "Bytes":
        return self._tensors[name].read(begin, end)

    def read_all(self, names: Sequence[str]) -> "Bytes":
        # Parameters that follow each other in a flat vector are one range of it.
        found: list[Bytes] = []
        at = 0
        while at < len(names):
            first = self._tensors[names[at]]
            end, at = first.offset + first.spec.numel, at + 1
            while at < len(names):
                tensor = self._tensors[names[at]]
                if tensor.vector is not first.vector or tensor.offset != end:
                    break
                end, at = end + tensor.spec.numel, at + 1
            found.append(read_flat(first.vector, first.spec.dtype, first.offset, end))
        return found[0] if len(found) == 1 else np.concatenate(found)

    def file_of(self, name: str) -> Location:
        return self._tensors[name].file

    @property
    def files(self) -> list[Location]:
        return self._files

    def close(self) -> None:
        for source in self._sources:
            source.close()


class _FlatGroups:
    """The float32 weights of all ranks, in flat groups, and how to cut them into parameters."""

    def __init__(self, ranks: Sequence[StateFile]) -> None:
        first = ranks[0]
        self.num_ranks, self._first = len(ranks), first
        self.partitioned = _GROUPS_OF_3 in first.entries
        key = _GROUPS_OF_3 if self.partitioned else _GROUPS
        self._groups = [
            [Part(as_tensor(t, rank.file, key), rank.file) for t in rank.items(key)]
            for rank in ranks
        ]
        dtypes = {part.tensor.spec.dtype for groups in self._groups for part in groups}
        for rank, groups in zip(ranks, self._groups, strict=True):
            same = len(groups) == len(self._groups[0]) and len(dtypes) == 1
            if not same or _count_ranks(rank) != self.num_ranks:
                raise rank.damaged(f"its groups do not fit those of {first.file.name}")
        stage = first.entries.get("zero_stage")
        number = stage.args[0] if isinstance(stage, Record) and stage.args else stage
        self.title = f"DeepSpeed ZeRO{f'-{number}' if number in (1, 2, 3) else ''}" + (
            f", {self.num_ranks} ranks"
        )

    def cut(self, shapes: Sequence[_Shapes]) -> _Tensors:
        """The parameters; `shapes` has those of each group, in order."""
        return self._cut_partitioned(shapes) if self.partitioned else self._cut_joined(shapes)

    def _cut_joined(self, shapes: Sequence[_Shapes]) -> _Tensors:
        """Before ZeRO-3: a group is the parts of all ranks, and has one parameter after another."""
        if len(shapes) != len(self._groups[0]):
            raise self._first.damaged(f"{len(self._groups[0])} groups, expected {len(shapes)}")
        paddings = self._paddings(shapes)
        tensors: _Tensors = {}
        for number, group in enumerate(shapes):
            vector = FlatVector([groups[number] for groups in self._groups])
            offset = 0
            for (name, shape), padding in zip(group.items(), paddings[number], strict=True):
                tensors[name] = FlatTensor(_converted(vector.dtype, shape), vector, offset)
                offset += math.prod(shape) + padding
            # The end is padded, by one value or another; DeepSpeed makes the same check.
            unit = 2 * self.num_ranks
            if offset > vector.numel + unit or -(-offset // unit) != -(-vector.numel // unit):
                raise self._first.damaged(
                    f"group {number} has {vector.numel} values, expected {offset}"
                )
            used = max((t.offset + t.spec.numel for t in map(tensors.get, group) if t), default=0)
            if used > vector.numel:
                raise self._first.damaged(f"group {number} has {vector.numel} of {used} values")
        return tensors

    def _paddings(self, shapes: Sequence[_Shapes]) -> list[list[int]]:
        """The number of unused values after each parameter."""
        if self._first.entries.get("param_alignment_paddings") is None:
            return [[0] * len(group) for group in shapes]
        found = self._first.items("param_alignment_paddings")
        sizes = [as_counts(paddings) for paddings in found]
        if list(map(len, sizes)) != list(map(len, shapes)):
            raise self._first.damaged("'param_alignment_paddings' does not fit the parameters")
        return sizes

    def _cut_partitioned(self, shapes: Sequence[_Shapes]) -> _Tensors:
        """ZeRO-3: every rank has a part of every parameter, padded to the same size."""
        vectors = [FlatVector(groups) for groups in self._groups]
        tensors: _Tensors = {}
        offset = 0
        for name, shape in ((n, s) for group in shapes for n, s in group.items()):
            size = -(-math.prod(shape) // self.num_ranks)
            vector = PartitionedVector(vectors, offset, size)
            tensors[name] = FlatTensor(_converted(vector.dtype, shape), vector)
            offset += size
        for part in vectors:
            if part.numel != offset:
                raise FormatError(
                    f"{part.parts[0].file}: has {part.numel} values of the parameters, expected "
                    f"{offset}. Save or copy the checkpoint again."
                )
        return tensors


class _UniversalFolder:
    """The folder `zero` of a universal checkpoint: `NAME/fp32.pt` for each parameter.

    There may be thousands of files, so only the ones that were read last stay open.
    """

    def __init__(self, folder: Location, shapes: Iterable[_Shapes]) -> None:
        self.tensors: _Tensors = {}
        self.files: list[Location] = []
        self._open: OrderedDict[Location, StoredTensor] = OrderedDict()
        self._lock = Lock()
        for name, shape in ((n, s) for group in shapes for n, s in group.items()):
            if not is_plain_name(name):
                raise FormatError(f"{folder}: the name {name!r:.200} is not that of a folder.")
            file = folder.child(name).child("fp32.pt")
            stored = self.load(file)
            if stored.spec.numel != math.prod(shape):
                raise FormatError(f"{file}: has {stored.spec}, expected {list(shape)}.")
            part = Part(_ReopenedTensor(stored.spec, file, self.load), file)
            vector = FlatVector([part])
            self.tensors[name] = FlatTensor(_converted(vector.dtype, shape), vector)
            self.files.append(file)

    def load(self, file: Location) -> StoredTensor:
        """The tensor in a file, which is opened if it is not open."""
        with self._lock:
            found = self._open.get(file)
        if found is None:
            top, _ = open_archive(file)  # closed with the last reference to the tensor
            value = top.get("param") if isinstance(top, dict) else top
            found = as_tensor(value, file, "param")
        with self._lock:
            self._open[file] = found
            self._open.move_to_end(file)
            while len(self._open) > _MAX_OPEN:
                self._open.popitem(last=False)
        return found


@dataclass(frozen=True, slots=True)
class _ReopenedTensor:
    """A stored tensor whose file need not be open."""

    spec: TensorSpec
    file: Location
    load: Callable[[Location], StoredTensor]

    def read(self, begin: int, end: int) -> "Bytes":
        """Bytes `begin` to `end` in row-major order."""
        return self.load(self.file).read(begin, end)


def _count_ranks(states: StateFile) -> int:
    """The number of ranks among which the weights are divided; groups may have fewer."""
    found = states.entries.get("partition_count")
    counts = as_counts(found if isinstance(found, list) else [found])
    if not counts or not 0 < max(counts) <= _MAX_RANKS:
        raise states.damaged("it does not say from how many ranks it is")
    return max(counts)


def _refuse_experts(states: StateFile) -> None:
    if any(states.entries.get(key) for key in _EXPERTS):
        raise FormatError(
            f"{states.file}: from AutoEP, whose experts are divided among ranks in another way: "
            "save the model's state dict instead."
        )


def _converted(dtype: str, shape: tuple[int, ...]) -> TensorSpec:
    return TensorSpec("F32" if dtype in _CONVERTED else dtype, shape)


def _from_module(module: StateFile, names: Iterable[str], *, convert: bool) -> _Tensors:
    """Tensors that are stored whole."""
    tensors: _Tensors = {}
    for name in names:
        stored = module.tensor(name)
        vector = FlatVector([Part(stored, module.file)])
        spec = _converted(vector.dtype, stored.spec.shape) if convert else stored.spec
        tensors[name] = FlatTensor(spec, vector)
    return tensors


def _join_frozen(model: Sequence[StateFile]) -> _Tensors:
    """Frozen parameters: whole, or with ZeRO-3 divided among the ranks."""
    fragments = [states.below("frozen_param_fragments") for states in model]
    tensors: _Tensors = {}
    for name, shape in model[0].below("frozen_param_shapes").sizes().items():
        vector = FlatVector([Part(rank.tensor(name), rank.file) for rank in fragments])
        dtypes = {part.tensor.spec.dtype for part in vector.parts}
        if vector.numel < math.prod(shape) or len(dtypes) > 1:
            raise fragments[0].damaged(f"frozen parameter {name!r} has {vector.numel} values")
        tensors[name] = FlatTensor(_converted(vector.dtype, shape), vector)
    return tensors


def _find_aliases(states: StateFile, tensors: _Tensors) -> dict[str, str]:
    """Other names of tied parameters."""
    shared = states.below("shared_params")
    return {
        alias: kept
        for alias in shared.names()
        if isinstance(kept := shared.entries[alias], str)
        and kept in tensors
        and alias not in tensors
    }


def _find_config(folder: Location, children: Iterable[str]) -> Location | None:
    """The folder above, if it is a checkpoint of Transformers' Trainer."""
    above = folder.parent
    return above if "config.json" not in children and above.child("config.json").is_file() else None
