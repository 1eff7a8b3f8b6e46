"""Tensors that are flattened and cut into runs: each rank holds one run of consecutive values.

ZeRO divides weights like this. A run may begin and end anywhere, so no placement of a DTensor
describes it. A `FlatShard` takes the place of the DTensor: it has the whole tensor's shape, is
saved through `torch.distributed.checkpoint` as boxes, so that it can be loaded on any number of
ranks, and can be gathered.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torch_lawa.boxes import Box, boxes
from torch_lawa.errors import LayoutError
from torch_lawa.shards import Sharding

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["FlatShard", "FlatSharding"]


@dataclass(frozen=True)
class FlatSharding(Sharding):
    """Which values of a flattened tensor this rank holds; its group's ranks hold the others."""

    shape: torch.Size
    start: int
    count: int
    group: "ProcessGroup"
    device_type: str  # on which the group communicates

    def __deepcopy__(self, memo: Any) -> "FlatSharding":
        """Itself: it never changes, and a process group cannot be copied."""
        return self

    def whole(self, part: Tensor) -> Tensor:
        """The `FlatShard` of which this rank holds `part`."""
        return FlatShard(part, self)

    def gather(self, part: Tensor) -> Tensor:
        """All values, on every rank of the group, as bits: a sum with zeros."""
        kind = {4: torch.int32, 8: torch.int64, 16: torch.int64}.get(part.itemsize, torch.uint8)
        width = part.itemsize // kind.itemsize
        size = self.shape.numel() * width
        bits = torch.zeros(size, dtype=kind, device=part.device)
        bits[self.start * width : (self.start + self.count) * width] = part.view(kind)
        torch.distributed.all_reduce(bits, group=self.group)
        return bits.view(part.dtype).view(self.shape)

    @property
    def is_split(self) -> bool:
        """Whether there are other ranks."""
        return torch.distributed.get_world_size(self.group) > 1

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        if self.device_type == "cpu":
            return torch.device("cpu")
        current = torch.get_device_module(self.device_type).current_device()
        return torch.device(self.device_type, current)

    @property
    def problem(self) -> str | None:
        """Runs can always be gathered."""
        return None

    def layout(self) -> object:
        """The number of ranks."""
        return "flat", torch.distributed.get_world_size(self.group)

    def part(self) -> object | None:
        """The run, if there are other ranks."""
        return ("flat", self.start, self.count) if self.is_split else None

    def positions(self, shape: torch.Size) -> Callable[[Sequence[Tensor]], Tensor]:
        """The run begins at `start`."""
        return lambda at: at[0] + self.start

    def groups(self, *, copies: bool) -> "list[ProcessGroup]":
        """The group."""
        return [self.group] if self.is_split else []


class FlatShard(Tensor):
    """A tensor of which this rank holds the run that `flat_sharding` describes."""

    _local_tensor: Tensor
    flat_sharding: FlatSharding

    @staticmethod
    def __new__(cls, part: Tensor, sharding: FlatSharding) -> "FlatShard":
        """`part` is one-dimensional; its memory is used."""
        made: FlatShard = Tensor._make_wrapper_subclass(
            cls, sharding.shape, dtype=part.dtype, device=part.device, requires_grad=False
        )
        made._local_tensor, made.flat_sharding = part, sharding
        return made

    def to_local(self) -> Tensor:
        """The values that this rank holds, one-dimensional."""
        return self._local_tensor

    def full_tensor(self) -> Tensor:
        """The whole tensor; every rank of the group must call this."""
        return self.flat_sharding.gather(self._local_tensor.to(self.flat_sharding.device))

    def __repr__(self) -> str:  # type: ignore[override]
        run = self.flat_sharding
        return (
            f"FlatShard(values {run.start} to {run.start + run.count} of {tuple(run.shape)}, "
            f"{self._local_tensor})"
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # a class method, as PyTorch documents it
        cls,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[Any, Any] | None = None,
    ) -> Any:
        aten = torch.ops.aten
        if func.overloadpacket in (aten.detach, aten.clone, aten._to_copy):
            shard, *others = args
            part = func(shard._local_tensor, *others, **(kwargs or {}))
            return FlatShard(part, shard.flat_sharding)
        if func.overloadpacket is aten.new_empty:  # asynchronous saving sets its values later
            return FlatShard(args[0]._local_tensor.new_empty(0), args[0].flat_sharding)
        raise LayoutError(
            f"{func} of a tensor of which this rank holds a part: call its full_tensor() on every "
            "rank for all values, or to_local() for those of this rank."
        )

    # What torch.distributed.checkpoint asks of a sharded tensor.

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        kind = TensorProperties.create_from_tensor(self._local_tensor)
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, kind, self.flat_sharding.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [
            ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            for offsets, sizes in self._boxes()
        ]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        begin = 0
        for offsets, sizes in self._boxes():
            end = begin + math.prod(sizes)
            if torch.Size(offsets) == index.offset:
                return self._local_tensor[begin:end].view(sizes)
            begin = end
        raise LayoutError(f"no values of {index.fqn!r} at {index.offset} are on this rank.")

    def _boxes(self) -> list[Box]:
        run = self.flat_sharding
        if run.shape.numel() == 0:  # one rank writes that there is nothing
            first = torch.distributed.get_rank(run.group) == 0
            return [((0,) * len(run.shape), tuple(run.shape))] if first else []
        return list(boxes(run.shape, run.start, run.start + run.count))
