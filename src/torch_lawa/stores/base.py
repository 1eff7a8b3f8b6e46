"""The `Store` interface: a bounded queue of snapshots, each a few flat buffers of one layout.

Flat means that a snapshot is one buffer per device and dtype, so that it moves in one copy and is
averaged in blocks that ignore where one weight ends and the next begins.
"""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, TypedDict

import torch
from torch import Tensor

from torch_lawa.errors import ConfigError

__all__ = [
    "NO_NOTES",
    "Buffer",
    "Content",
    "Counters",
    "FlatEntry",
    "FlatGroup",
    "FlatLayout",
    "Held",
    "Notes",
    "Snapshot",
    "Store",
    "flat_view",
]

_ALIGNMENT = 64  # bytes: vector loads never straddle two tensors


@dataclass(frozen=True)
class FlatEntry:
    """One tensor inside a flat buffer. `stride` is that of its view there, always dense."""

    name: str
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    numel: int

    def view(self, flat: Tensor) -> Tensor:
        """This tensor's values inside `flat`."""
        return flat.as_strided(self.shape, self.stride, flat.storage_offset() + self.offset)


@dataclass(frozen=True)
class FlatGroup:
    """The tensors of one device and dtype; `stored` is the dtype that they are stored in."""

    device: torch.device
    dtype: torch.dtype
    stored: torch.dtype
    numel: int
    entries: tuple[FlatEntry, ...]


@dataclass(frozen=True)
class FlatLayout:
    """Where each named tensor is in the flat buffers."""

    groups: tuple[FlatGroup, ...]

    @staticmethod
    def of(
        tensors: Mapping[str, Tensor],
        *,
        storage_dtype: torch.dtype | None = None,
        packed: bool = False,
        dtypes: Mapping[str, torch.dtype] | None = None,
    ) -> "FlatLayout":
        """The layout of live tensors. `packed` leaves no padding and no strides, as in a file.

        `dtypes` has the original dtype of tensors that come from a saved state in a narrower one.
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
                entries.append(FlatEntry(name, tensor.shape, stride, offset, tensor.numel()))
                offset += -(-tensor.numel() // step) * step
            groups.append(FlatGroup(torch.device(device), dtype, stored, offset, tuple(entries)))
        # Widest dtype first, so that a packed file stays aligned.
        groups.sort(key=lambda group: -group.stored.itemsize)
        return FlatLayout(tuple(groups))

    def allocate(
        self, dtype: torch.dtype | None, device: torch.device | str | None
    ) -> dict[str, Tensor]:
        """One new tensor per name, in its own dtype and on its own device unless given."""
        allocated = {}
        for group in self.groups:
            wanted = dtype or group.dtype
            if group.dtype.is_complex and not wanted.is_complex:
                wanted = wanted.to_complex()
            for e in group.entries:
                allocated[e.name] = torch.empty_strided(
                    e.shape, e.stride, dtype=wanted, device=device or group.device
                )
        return allocated

    def on_host(self) -> "FlatLayout":
        """The same layout for tensors in host memory."""
        cpu = torch.device("cpu")
        return FlatLayout(tuple(replace(group, device=cpu) for group in self.groups))

    @property
    def nbytes(self) -> int:
        """The size of one snapshot in bytes."""
        return sum(group.numel * group.stored.itemsize for group in self.groups)

    @property
    def numel(self) -> int:
        """The number of values in one snapshot, without padding."""
        return sum(entry.numel for group in self.groups for entry in group.entries)

    def signature(self) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """Name -> shape and dtype: what two models must share to be averaged."""
        return {e.name: (e.shape, g.dtype) for g in self.groups for e in g.entries}

    def zeros(self) -> dict[str, Tensor]:
        """Named tensors as they would be stored, all zeros, in host memory."""
        flats = [
            torch.zeros(group.numel, dtype=group.stored, device="cpu") for group in self.groups
        ]
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

    def __init__(self, group: FlatGroup, device: torch.device | None = None) -> None:
        self._names = [entry.name for entry in group.entries]
        # Zeros, so that the padding between tensors is a number.
        self.flat = torch.zeros(group.numel, dtype=group.stored, device=device or group.device)
        self._views = [entry.view(self.flat) for entry in group.entries]
        # The stream that the memory belongs to: other streams that use it must be recorded.
        self.home = torch.cuda.current_stream(self.flat.device) if self.flat.is_cuda else None

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy live tensors in, in one call."""
        if self._views:
            torch._foreach_copy_(self._views, [tensors[name] for name in self._names])


def _dense_stride(tensor: Tensor, packed: bool) -> tuple[int, ...]:
    """The tensor's own stride if its memory has no gaps, else that of a contiguous one."""
    if not packed and _is_dense(tensor):
        return tuple(tensor.stride())
    stride, step = [], 1
    for size in reversed(tensor.shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


def _is_dense(tensor: Tensor) -> bool:
    """Whether the values fill their memory without gaps or overlaps, in any order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


def flat_view(tensor: Tensor, entry: FlatEntry) -> Tensor | None:
    """`tensor`'s memory as one dimension in the order of `entry`; None if that is not a view.

    Nor if it could not be written: the memory may have the conjugate or the negative of the values
    (`x.conj().imag`), and the tensor may be of inference mode.
    """

    def order(stride: Sequence[int]) -> list[int]:
        return [s for s, n in zip(stride, entry.shape, strict=True) if n > 1]

    odd = tensor.is_conj() or tensor.is_neg() or tensor.is_inference()
    if odd or order(tensor.stride()) != order(entry.stride):
        return None
    return tensor.as_strided((entry.numel,), (1,), tensor.storage_offset())


@dataclass(frozen=True)
class Snapshot:
    """One snapshot in a store. `index` counts collects, `step` is the user's label."""

    index: int
    step: int


class Counters(TypedDict):
    """How far an averager is: plain values."""

    num_steps: int
    num_collected: int
    schedule_kind: str  # the schedule's class
    schedule: dict[str, Any]  # the schedule's own state


class Notes(Counters):
    """What a store that outlives the process saves with each snapshot, as plain values."""

    ties: dict[str, str]  # other name of a tensor -> the name it is stored under
    excluded: list[str]  # tensors that are kept because include or exclude say so
    shards: str  # which shards of the model this process holds: see `shards.fingerprint`


NO_NOTES: Notes = {
    "num_steps": 0,
    "num_collected": 0,
    "schedule_kind": "",
    "schedule": {},
    "ties": {},
    "excluded": [],
    "shards": "",
}


@dataclass(frozen=True)
class Content:
    """A snapshot with its values, as it is put into a store."""

    snapshot: Snapshot
    averaged: Mapping[str, Tensor]
    kept: Mapping[str, Tensor]
    kept_layout: FlatLayout | None = None  # if the kept tensors are not as in the store


@dataclass(frozen=True)
class Held:
    """What a store holds at one moment.

    A store replaces the whole of it in one assignment, the last step of every change: a change that
    fails or is interrupted has happened completely or not at all.
    """

    averaged: FlatLayout = field(default_factory=lambda: FlatLayout(()))
    kept: FlatLayout = field(default_factory=lambda: FlatLayout(()))  # of the newest snapshot
    k: int = 1
    snapshots: tuple[Snapshot, ...] = ()  # oldest first
    evicted: Snapshot | None = None
    notes: Notes = field(default_factory=lambda: NO_NOTES)  # those that came last
    # Which window it is: another object after the window was replaced or dropped.
    window: object = field(default_factory=object)


class Store(ABC):
    """A bounded queue of snapshots; the oldest leaves when a new one is put.

    The window calls `open` once the tensors are known, then `put` and `flats`. If `keep_evicted` is
    set, the snapshot that a `put` displaced stays readable as `evicted` until the next `put`.
    """

    packed: bool = False  # whether flat buffers have the layout of a file
    on_host: bool = True  # whether snapshots are in host memory on any device of the model
    per_process: bool = False  # whether it is independent of the stores of the other ranks
    keep_evicted: bool = False

    def __init__(self) -> None:
        self._owner: weakref.ref[object] | None = None

    @property
    @abstractmethod
    def held(self) -> Held:
        """What the store holds now."""

    @property
    def snapshots(self) -> list[Snapshot]:
        """Oldest first."""
        return list(self.held.snapshots)

    @property
    def evicted(self) -> Snapshot | None:
        """The snapshot that left last, while it is readable."""
        return self.held.evicted

    def claim(self, owner: object) -> None:
        """Belong to `owner` alone from now on."""
        self._owner = weakref.ref(owner)

    def check_owner(self, owner: object) -> None:
        """Raise if the store was claimed by another: they would evict each other's snapshots."""
        if self._owner is not None and self._owner() is not owner:
            raise ConfigError(
                f"the store of this averager ({self.describe()}) has been passed to another "
                "averager: give each averager a store of its own."
            )

    def find(self, k: int) -> Notes | None:
        """Take over the window of an earlier process, at most the `k` newest snapshots.

        Returns the notes of its newest snapshot; None if there is no window.
        """
        return None

    @abstractmethod
    def open(self, averaged: FlatLayout, kept: FlatLayout, k: int) -> None:
        """Begin a window of `k` snapshots of `averaged` and one of `kept`; drop the old one."""

    def retarget(self, averaged: FlatLayout, kept: FlatLayout) -> bool:
        """Copy later snapshots from other devices, with layouts that are otherwise the same.

        Returns False if the store cannot do that: then it is refilled.
        """
        return False

    @abstractmethod
    def put(self, content: Content, notes: Notes) -> None:
        """Copy one snapshot into the store.

        May return before the copy is done, but not before it is ordered with respect to what the
        caller does next with the tensors. `notes` are saved with it if the store is persistent.
        """

    @abstractmethod
    def refill(
        self,
        averaged: FlatLayout,
        kept: FlatLayout,
        k: int,
        contents: Sequence[Content],
        notes: Notes,
        *,
        relaid: bool = False,
    ) -> None:
        """Replace the whole window by `contents`, oldest first; maybe by none.

        The window before is kept until all of them are stored. `relaid` means that these are the
        snapshots of the present window in another layout.
        """

    @abstractmethod
    def flats(self, snapshot: Snapshot) -> list[Tensor]:
        """The flat buffers of a snapshot, once they are complete. Do not write to them."""

    @abstractmethod
    def kept_flats(self) -> list[Tensor]:
        """The flat buffers of the kept tensors, from the newest snapshot."""

    def shared_flats(self, snapshot: Snapshot) -> list[Tensor]:
        """The same as `flats`, for callers who keep them, and read them after `check_read`."""
        return self.flats(snapshot)

    def shared_kept_flats(self) -> list[Tensor]:
        """The same as `kept_flats`, for such callers."""
        return self.kept_flats()

    def check_read(self) -> None:
        """Raise if what was read from `flats` or `kept_flats` may be wrong."""
        return  # memory does not change by itself

    @abstractmethod
    def wait(self) -> None:
        """Return when every snapshot has reached the store."""

    def idle_memory(self) -> AbstractContextManager[Mapping[str, Tensor]]:
        """Unused memory on the model's device, by tensor, for the duration of the block."""
        return nullcontext({})

    def __reduce__(self) -> tuple[Any, ...]:
        """A copied store is empty: the copied averager fills it."""
        return type(self), ()

    @abstractmethod
    def describe(self) -> str:
        """Where the snapshots are, in two or three words."""
