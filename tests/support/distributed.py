"""Distributed checkpoints for tests: written by PyTorch, as by several ranks, in one process."""

import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from torch_lawa.checkpoints.formats.dcp import DistributedCheckpoint
from torch_lawa.checkpoints.storage.paths import LocalPath

Box = tuple[tuple[int, ...], tuple[int, ...]]


def quietly(act: Callable[..., object], *args: object, **kwargs: object) -> None:
    """Without PyTorch's warnings that there is no process group, and of its own old classes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        act(*args, **kwargs)


def save(folder: Path, state: dict[str, Any]) -> DistributedCheckpoint:
    """One process saves a state dict."""
    quietly(dcp.save, state, checkpoint_id=folder)
    return DistributedCheckpoint(LocalPath(folder))


class Shards(SavePlanner):
    """Writes given boxes of tensors, as ranks that hold them would."""

    def __init__(self, tensors: Mapping[str, Tensor], boxes: Mapping[str, Sequence[Box]]) -> None:
        self.tensors, self.boxes = tensors, boxes

    def plan(self, rank: int, ranks: int) -> SavePlan:
        items = []
        for name, tensor in self.tensors.items():
            for starts, sizes in self.boxes[name][rank::ranks]:
                chunk = ChunkStorageMetadata(torch.Size(starts), torch.Size(sizes))
                kind = TensorProperties.create_from_tensor(tensor)
                data = TensorWriteData(chunk, kind, tensor.size())
                index = MetadataIndex(name, chunk.offsets)
                items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        return SavePlan(items)

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        assert write_item.tensor_data is not None
        chunk = write_item.tensor_data.chunk
        found = self.tensors[write_item.index.fqn]
        for dim, (start, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
            found = found.narrow(dim, start, size)
        return found.clone(memory_format=torch.preserve_format)

    def set_up_planner(self, *_: Any, **__: Any) -> None: ...
    def create_local_plan(self) -> SavePlan: ...
    def create_global_plan(self, all_plans: Any) -> Any: ...
    def finish_plan(self, new_plan: Any) -> Any: ...


def save_shards(
    folder: Path,
    tensors: Mapping[str, Tensor],
    boxes: Mapping[str, Sequence[Box]],
    paths: Mapping[str, tuple[object, ...]] | None = None,
    ranks: int = 2,
) -> None:
    """What `ranks` processes would save together; PyTorch's own writer without the processes."""
    planner, writer = Shards(tensors, boxes), FileSystemWriter(folder)
    writer.set_up_storage_writer(is_coordinator=True)
    plans, metadata = create_default_global_save_plan(
        [planner.plan(rank, ranks) for rank in range(ranks)]
    )
    plans = writer.prepare_global_plan(plans)
    folder.mkdir()
    results: list[Any] = []
    for plan in plans:
        quietly(lambda plan=plan: results.append(writer.write_data(plan, planner).wait()))
    writer.finish(replace(metadata, planner_data=paths), results)


def rows(tensor: Tensor, *cuts: int, dim: int = 0) -> list[Box]:
    """Boxes between cuts of one dimension."""
    edges = [0, *cuts, tensor.shape[dim]]
    found = []
    for begin, end in itertools.pairwise(edges):
        starts, sizes = [0] * tensor.ndim, list(tensor.shape)
        starts[dim], sizes[dim] = begin, end - begin
        found.append((tuple(starts), tuple(sizes)))
    return found


def cut_up(shape: tuple[int, ...], data: st.DataObject) -> list[Box]:
    """Boxes that make up the whole, some of them empty, in any order."""
    found: list[Box] = [((0,) * len(shape), shape)]
    for _ in range(data.draw(st.integers(0, 5))):
        starts, sizes = found.pop(data.draw(st.integers(0, len(found) - 1)))
        dim = data.draw(st.integers(0, len(shape) - 1))
        cut = data.draw(st.integers(0, sizes[dim]))
        for begin, size in ((0, cut), (cut, sizes[dim] - cut)):
            moved = (*starts[:dim], starts[dim] + begin, *starts[dim + 1 :])
            found.append((moved, (*sizes[:dim], size, *sizes[dim + 1 :])))
    return found


def sharded() -> tuple[dict[str, Tensor], dict[str, Sequence[Box]]]:
    """Tensors, and the boxes that ranks hold of them."""
    tensors = {
        "uneven": torch.rand(7, 5),
        "empty shard": torch.rand(2, 3),
        "columns": torch.rand(5, 6),
        "middle": torch.rand(3, 4, 5),
        "grid": torch.rand(4, 6),
        "no grid": torch.rand(4, 4),
        "turned": torch.rand(6, 5).t(),
        "whole": torch.rand(9),
        "scalar": torch.tensor(2.5),
        "one": torch.rand(1, 1),
        "nothing": torch.empty(0, 3),
        "bf16": torch.rand(9).to(torch.bfloat16),
    }
    boxes: dict[str, Sequence[Box]] = {
        name: [((0,) * t.ndim, tuple(t.shape))] for name, t in tensors.items()
    }
    boxes |= {
        "uneven": rows(tensors["uneven"], 4),
        "empty shard": rows(tensors["empty shard"], 1, 2, 2),
        "columns": rows(tensors["columns"], 1, 4, dim=1),
        "middle": rows(tensors["middle"], 1, dim=1),
        "grid": [((a, b), (2, 3)) for a in (2, 0) for b in (0, 3)],
        "no grid": [((0, 0), (3, 1)), ((0, 1), (1, 3)), ((1, 1), (3, 3)), ((3, 0), (1, 1))],
        "turned": rows(tensors["turned"], 2),
        "bf16": rows(tensors["bf16"], 2, 5),
    }
    return tensors, boxes
