"""What a store is: a bounded queue of snapshots, each a few flat tensors with one layout.

Flat means that a snapshot is one buffer for each device and dtype, so that it moves in one copy
and is averaged in blocks that ignore where one weight ends and the next begins.
"""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_lawa.errors import ConfigError

__all__ = [
    "Buffer",
    "Content",
    "Entry",
    "Found",
    "Group",
    "Layout",
    "Snapshot",
    "Store",
    "flat_view",
]

_ALIGNMENT = 64  # bytes: vector loads never straddle two tensors


@dataclass(frozen=True)
class Entry:
    """One tensor inside a flat buffer. `stride` is that of the buffer's view, always dense."""

    name: str
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    numel: int

    def view(self, flat: Tensor) -> Tensor:
        """This tensor's values inside `flat`."""
        return flat.as_strided(self.shape, self.stride, flat.storage_offset() + self.offset)


@dataclass(frozen=True)
class Group:
    """The tensors of one device and dtype; `stored` is the dtype they are kept in."""

    device: torch.device
    dtype: torch.dtype
    stored: torch.dtype
    numel: int
    entries: tuple[Entry, ...]


@dataclass(frozen=True)
class Layout:
    """Where each named tensor lies in the flat buffers."""

    groups: tuple[Group, ...]

    @staticmethod
    def of(
        tensors: Mapping[str, Tensor],
        *,
        storage_dtype: torch.dtype | None = None,
        packed: bool = False,
        dtypes: Mapping[str, torch.dtype] | None = None,
    ) -> "Layout":
        """The layout of live tensors. `packed` leaves no gaps and no strides, as in a file.

        `dtypes` names the dtype a tensor stands for where it is not the one it has, as when the
        tensors come from a saved state with narrower storage.
        """
        sorted_: dict[tuple[str, torch.dtype], list[tuple[str, Tensor]]] = {}
        for name, tensor in tensors.items():
            dtype = (dtypes or {}).get(name, tensor.dtype)
            sorted_.setdefault((str(tensor.device), dtype), []).append((name, tensor))
        groups = []
        for (device, dtype), members in sorted_.items():
            stored = dtype
            if storage_dtype is not None and dtype.is_floating_point:
                stored = min(dtype, storage_dtype, key=lambda d: d.itemsize)
            step = 1 if packed else max(1, _ALIGNMENT // stored.itemsize)
            entries, offset = [], 0
            for name, tensor in members:
                stride = _dense_stride(tensor, packed)
                entries.append(Entry(name, tensor.shape, stride, offset, tensor.numel()))
                offset += -(-tensor.numel() // step) * step
            groups.append(Group(torch.device(device), dtype, stored, offset, tuple(entries)))
        # Widest dtype first, so that a packed file stays aligned.
        groups.sort(key=lambda group: -group.stored.itemsize)
        return Layout(tuple(groups))

    def allocate(
        self, dtype: torch.dtype | None, device: torch.device | str | None
    ) -> dict[str, Tensor]:
        """A tensor of its own for each name: of its own dtype and on its device, or on another."""
        room = {}
        for group in self.groups:
            wanted = dtype or group.dtype
            if group.dtype.is_complex and not wanted.is_complex:
                wanted = wanted.to_complex()
            for e in group.entries:
                room[e.name] = torch.empty_strided(
                    e.shape, e.stride, dtype=wanted, device=device or group.device
                )
        return room

    @property
    def nbytes(self) -> int:
        """The size of one snapshot."""
        return sum(group.numel * group.stored.itemsize for group in self.groups)

    @property
    def numel(self) -> int:
        """The number of values in one snapshot, padding left out."""
        return sum(entry.numel for group in self.groups for entry in group.entries)

    def signature(self) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """Name -> shape and dtype: what two models must share to be averaged."""
        return {e.name: (e.shape, g.dtype) for g in self.groups for e in g.entries}

    def zeros(self) -> dict[str, Tensor]:
        """Named tensors as they would be stored, all zeros, in host memory."""
        flats = [torch.zeros(group.numel, dtype=group.stored) for group in self.groups]
        return self.views(flats)

    def views(self, flats: Sequence[Tensor]) -> dict[str, Tensor]:
        """The named tensors inside flat buffers."""
        return {
            entry.name: entry.view(flat)
            for group, flat in zip(self.groups, flats, strict=True)
            for entry in group.entries
        }


class Buffer:
    """The flat memory of one group, with the views that snapshots are copied through."""

    def __init__(self, group: Group, device: torch.device | None = None) -> None:
        self._names = [entry.name for entry in group.entries]
        # Zeros, so that the padding between tensors is a number.
        self.flat = torch.zeros(group.numel, dtype=group.stored, device=device or group.device)
        self._views = [entry.view(self.flat) for entry in group.entries]
        # The stream to which the memory returns: others that use it must be recorded.
        self.home = torch.cuda.current_stream(self.flat.device) if self.flat.is_cuda else None

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy live tensors in, in one call."""
        if self._views:
            torch._foreach_copy_(self._views, [tensors[name] for name in self._names])


def _dense_stride(tensor: Tensor, packed: bool) -> tuple[int, ...]:
    """The tensor's own stride where its memory has no holes, else that of a contiguous one."""
    if not packed and _is_dense(tensor):
        return tuple(tensor.stride())
    stride, step = [], 1
    for size in reversed(tensor.shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


def _is_dense(tensor: Tensor) -> bool:
    """Whether the values fill their memory without holes or overlaps, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


def flat_view(tensor: Tensor, entry: Entry) -> Tensor | None:
    """`tensor`'s memory as one dimension in the order of `entry`; None where that is no view."""

    def order(stride: Sequence[int]) -> list[int]:
        return [s for s, n in zip(stride, entry.shape, strict=True) if n > 1]

    if order(tensor.stride()) != order(entry.stride):
        return None
    return tensor.as_strided((entry.numel,), (1,), tensor.storage_offset())


@dataclass(frozen=True)
class Snapshot:
    """One snapshot in a store. `index` counts collects, `step` is the user's label."""

    index: int
    step: int


@dataclass(frozen=True)
class Content:
    """A snapshot with its values: what goes into a store."""

    snapshot: Snapshot
    averaged: Mapping[str, Tensor]
    kept: Mapping[str, Tensor]


@dataclass(frozen=True)
class Found:
    """What a store that outlives the process still held when it was opened."""

    averaged: Layout
    kept: Layout
    notes: dict[str, Any]


class Store(ABC):
    """A bounded queue of snapshots; the oldest leaves when a new one comes.

    The averager calls `open` once the tensors are known, then `put` and `flats`. What a `put`
    displaced stays readable as `evicted` until the next one when `keep_evicted` is set.
    """

    packed: bool = False  # whether flat buffers must be laid out as in a file
    on_host: bool = True  # whether snapshots lie in host memory whatever the model's device
    keep_evicted: bool = False

    def __init__(self) -> None:
        self.snapshots: list[Snapshot] = []
        self.evicted: Snapshot | None = None
        self._user: weakref.ref[object] | None = None

    def serve(self, user: object) -> None:
        """Be the store of `user`, and of nobody else from here on."""
        self._user = weakref.ref(user)

    def check(self, user: object) -> None:
        """Refuse one that it does not serve any more: two would push out each other's snapshots."""
        if self._user is not None and self._user() is not user:
            raise ConfigError(
                f"the store of this averager ({self.describe()}) was given to another one since: "
                "give each averager a store of its own."
            )

    def find(self, k: int) -> Found | None:
        """Take over what an earlier process left, at most the `k` newest."""
        return None

    @abstractmethod
    def open(self, averaged: Layout, kept: Layout, k: int) -> None:
        """Make room for `k` snapshots of `averaged` and one of `kept`; drop what was there."""

    @abstractmethod
    def retarget(self, averaged: Layout, kept: Layout) -> None:
        """Take coming snapshots from other devices; the layout is otherwise the same."""

    @abstractmethod
    def put(self, content: Content, notes: Mapping[str, Any]) -> None:
        """Copy one snapshot in.

        May return before the copy is done, never before it is ordered against what the caller
        does next with the tensors. `notes` are plain values to remember with it.
        """

    def refill(
        self,
        averaged: Layout,
        kept: Layout,
        k: int,
        contents: list[Content],
        notes: Mapping[str, Any],
        *,
        relaid: bool = False,
    ) -> None:
        """Replace everything. `contents`, oldest first, is emptied so that memory is freed.

        `relaid` says that they are the snapshots that are there, in another layout.
        """
        self.open(averaged, kept, k)
        while contents:
            self.put(contents.pop(0), notes)

    @abstractmethod
    def flats(self, snapshot: Snapshot) -> list[Tensor]:
        """The flat buffers of a snapshot, once they are complete. Not to be written to."""

    @abstractmethod
    def kept_flats(self) -> list[Tensor]:
        """The flat buffers of the kept tensors, from the newest snapshot."""

    @abstractmethod
    def wait(self) -> None:
        """Return when everything that was put is where it belongs."""

    def idle_memory(self) -> AbstractContextManager[Mapping[str, Tensor]]:
        """Room on the model's device, by tensor, that nothing else uses while the block lasts."""
        return nullcontext({})

    @abstractmethod
    def clear(self) -> None:
        """Drop every snapshot."""

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy is empty: an averager fills its own."""
        return type(self), ()

    @abstractmethod
    def describe(self) -> str:
        """Where the snapshots are, in two or three words."""
