"""Snapshots in memory: on the weights' device (`DeviceStore`) or on the host (`HostStore`).

Buffers are allocated once and reused, so that a snapshot is a copy and nothing else.
"""

import contextlib
import warnings
import weakref
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from torch_lawa.stores.base import Buffer, Content, FlatLayout, Held, Notes, Snapshot, Store
from torch_lawa.stores.feed import Feed

__all__ = ["DeviceStore", "HostStore", "Stage", "idle_memory"]

_CPU = torch.device("cpu")


class _Copier(Protocol):
    """Copies live tensors into flat buffers of one layout."""

    def allocate(self) -> list[Buffer]:
        """Buffers for one snapshot."""
        ...

    def prepare(self) -> None:
        """Allocate whatever else `copy` needs."""
        ...

    def copy(self, buffers: list[Buffer], tensors: Mapping[str, Tensor]) -> None:
        """Enqueue the copy of `tensors` into `buffers`."""
        ...

    def wait(self) -> None:
        """Return when the last copy has finished."""
        ...


@dataclass(frozen=True)
class _Ring(Held):
    """The buffers of the snapshots, and what copies into them."""

    copiers: tuple[_Copier, ...] = ()  # of averaged and kept tensors; none before a window begins
    buffers: Mapping[int, list[Buffer]] = field(default_factory=dict)  # by snapshot index
    free: tuple[list[Buffer], ...] = ()
    newest: list[Buffer] | None = None  # the kept tensors

    def with_room(self, keep_evicted: bool) -> "_Ring":
        """The same with room for one more: the oldest leaves, or is kept as `evicted`."""
        leaving, snapshots, evicted = self.evicted, self.snapshots, None
        if len(snapshots) == self.k:
            evicted, snapshots = snapshots[0], snapshots[1:]
        gone = [leaving] if leaving is not None else []
        if evicted is not None and not keep_evicted:
            gone, evicted = [*gone, evicted], None
        indices = {snapshot.index for snapshot in gone}
        return replace(
            self,
            snapshots=snapshots,
            evicted=evicted,
            buffers={i: each for i, each in self.buffers.items() if i not in indices},
            free=(*self.free, *(self.buffers[i] for i in indices)),
        )


class _MemoryStore(Store):
    """A ring of buffers; where they are and how they are filled is up to the copiers."""

    def __init__(self) -> None:
        super().__init__()
        self._ring = _Ring()

    @property
    def held(self) -> Held:
        """The ring."""
        return self._ring

    @staticmethod
    @abstractmethod
    def _copier(layout: FlatLayout) -> _Copier:
        """What copies tensors of `layout`."""

    def open(self, averaged: FlatLayout, kept: FlatLayout, k: int) -> None:
        """Drop every snapshot; buffers are allocated when snapshots are put."""
        self.wait()
        self._ring = replace(self._empty(averaged, kept, k), notes=self._ring.notes)

    def put(self, content: Content, notes: Notes) -> None:
        """Copy into a free buffer, or into a new one while the window grows."""
        before, after = self._ring, self._with(self._ring, content, notes)
        # All memory is allocated by now. The oldest snapshot and the kept tensors are overwritten
        # in place, so an interrupted copy is repeated: the model has not changed since.
        try:
            self._copy(after, content)
            self._ring = after
        except BaseException:
            room = before.with_room(self.keep_evicted)
            self._ring = room  # all that is left if the copy fails again
            self._copy(after, content)
            self._ring = after
            raise

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
        """Fill new buffers, then make them the window."""
        self.wait()
        ring = replace(self._empty(averaged, kept, k), notes=notes)
        if relaid:
            ring = replace(ring, window=self._ring.window)
        for content in contents:
            ring = self._with(ring, content, notes)
            self._copy(ring, content)
        self._ring = ring

    def flats(self, snapshot: Snapshot) -> list[Tensor]:
        """The snapshot's buffers."""
        self.wait()
        return [buffer.flat for buffer in self._ring.buffers[snapshot.index]]

    def kept_flats(self) -> list[Tensor]:
        """The kept tensors' buffers."""
        self.wait()
        assert self._ring.newest is not None
        return [buffer.flat for buffer in self._ring.newest]

    def wait(self) -> None:
        """Return when the last snapshot has been copied: another stream may read it."""
        for copier in self._ring.copiers:
            copier.wait()

    def _empty(self, averaged: FlatLayout, kept: FlatLayout, k: int) -> _Ring:
        copiers = self._copier(averaged), self._copier(kept)
        return _Ring(averaged, kept, k, copiers=copiers)

    def _with(self, ring: _Ring, content: Content, notes: Notes) -> _Ring:
        """The ring with one more snapshot, whose values are still to be copied."""
        ring = ring.with_room(self.keep_evicted)
        if content.kept_layout is not None and content.kept_layout != ring.kept:
            copiers = ring.copiers[0], self._copier(content.kept_layout)
            ring = replace(ring, kept=content.kept_layout, copiers=copiers, newest=None)
        for copier in ring.copiers:
            copier.prepare()
        buffers = ring.free[-1] if ring.free else ring.copiers[0].allocate()
        return replace(
            ring,
            snapshots=(*ring.snapshots, content.snapshot),
            buffers={**ring.buffers, content.snapshot.index: buffers},
            free=ring.free[:-1],
            newest=ring.copiers[1].allocate() if ring.newest is None else ring.newest,
            notes=notes,
        )

    def _copy(self, ring: _Ring, content: Content) -> None:
        """Copy the values of the newest snapshot of `ring`."""
        assert ring.newest is not None
        ring.copiers[0].copy(ring.buffers[content.snapshot.index], content.averaged)
        ring.copiers[1].copy(ring.newest, content.kept)


class DeviceStore(_MemoryStore):
    """The window on the device of the weights: the fastest store; it takes k copies of them."""

    on_host = False

    @staticmethod
    def _copier(layout: FlatLayout) -> "_DeviceCopier":
        return _DeviceCopier(layout)

    def describe(self) -> str:
        """Device memory."""
        return "device memory"


class HostStore(_MemoryStore):
    """The window in host memory, filled asynchronously from a GPU: see `Stage`."""

    @staticmethod
    def _copier(layout: FlatLayout) -> "Stage":
        return Stage(layout)

    def retarget(self, averaged: FlatLayout, kept: FlatLayout) -> bool:
        """Copy later snapshots from the devices of these layouts."""
        self.wait()
        stages = Stage(averaged), Stage(kept)
        ring = self._ring
        # A window that was loaded before any model was seen is in pageable memory.
        for buffers in (*ring.buffers.values(), *ring.free):
            stages[0].pin(buffers)
        if ring.newest is not None:
            stages[1].pin(ring.newest)
        self._ring = replace(ring, averaged=averaged, kept=kept, copiers=stages)
        return True

    def idle_memory(self) -> AbstractContextManager[Mapping[str, Tensor]]:
        """The staging buffers."""
        return idle_memory([c for c in self._ring.copiers if isinstance(c, Stage)])

    def describe(self) -> str:
        """Host memory."""
        return "host memory"


class _DeviceCopier:
    """Copies tensors into buffers on their own device, on the caller's stream."""

    def __init__(self, layout: FlatLayout) -> None:
        self._groups = layout.groups
        self._written: dict[torch.device, torch.cuda.Event] = {}

    def allocate(self) -> list[Buffer]:
        return [Buffer(group) for group in self._groups]

    def prepare(self) -> None:
        pass

    def copy(self, buffers: list[Buffer], tensors: Mapping[str, Tensor]) -> None:
        for device, event in self._written.items():  # the last copy may be on another stream
            torch.cuda.current_stream(device).wait_event(event)
        for buffer in buffers:
            buffer.fill(tensors)
            if buffer.flat.is_cuda:
                stream = torch.cuda.current_stream(buffer.flat.device)
                if stream != buffer.home:
                    buffer.flat.record_stream(stream)
                self._written[buffer.flat.device] = stream.record_event()

    def wait(self) -> None:
        for event in self._written.values():
            event.synchronize()


class Stage:
    """Copies live tensors to flat buffers in host memory without blocking the caller.

    On a GPU, the caller's stream makes one device-to-device copy into a staging buffer and goes
    on; a stream of the stage copies the staging buffer to pinned memory, piece by piece (`Feed`).
    The next snapshot waits, on the GPU, until that is done.
    """

    def __init__(self, layout: FlatLayout) -> None:
        self._groups = layout.groups
        self._staging: dict[int, Buffer] = {}  # by index of the group
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._feeds: dict[torch.device, Feed] = {}  # of the last snapshot

    def allocate(self) -> list[Buffer]:
        """Host buffers, pinned if a GPU will write to them."""
        buffers = [Buffer(group, _CPU) for group in self._groups]
        self.pin(buffers)
        return buffers

    def pin(self, buffers: list[Buffer]) -> None:
        """Pin the buffers that a GPU will write to, unless they are pinned already."""
        for group, buffer in zip(self._groups, buffers, strict=True):
            if group.device.type == "cuda" and not buffer.flat.is_pinned():
                _pin(buffer.flat, group.device)

    def prepare(self) -> None:
        """Allocate the staging buffers."""
        for i, group in enumerate(self._groups):
            if group.device.type == "cuda" and i not in self._staging:
                self._staging[i] = Buffer(group)

    def copy(self, buffers: list[Buffer], tensors: Mapping[str, Tensor]) -> None:
        """Enqueue the copy of `tensors` into `buffers`."""
        self.prepare()
        staged: dict[torch.device, list[tuple[Tensor, Tensor]]] = {}
        for i, (group, buffer) in enumerate(zip(self._groups, buffers, strict=True)):
            device = group.device
            if device.type != "cuda":
                buffer.fill(tensors)
                continue
            if device not in staged and device in self._feeds:
                # The staging memory is free once the last snapshot has left it.
                torch.cuda.current_stream(device).wait_event(self._feeds[device].hurry())
            self._staging[i].fill(tensors)
            staged.setdefault(device, []).append((buffer.flat, self._staging[i].flat))
        for device, copies in staged.items():
            stream = self._stream(device)
            stream.wait_stream(torch.cuda.current_stream(device))
            for _, source in copies:
                source.record_stream(stream)
            self._feeds[device] = Feed(stream, copies)  # known before it starts: see `hurry`
            self._feeds[device].start()

    @contextlib.contextmanager
    def idle(self) -> Iterator[dict[str, Tensor]]:
        """The staging memory, by tensor; a snapshot taken inside the block allocates its own.

        Staging buffers in a narrower dtype than their tensors are of no use here and are freed.
        """
        self.wait()
        fitting = {i for i, group in enumerate(self._groups) if group.stored == group.dtype}
        staging = {i: buffer for i, buffer in self._staging.items() if i in fitting}
        self._staging = {}
        try:
            yield {
                entry.name: entry.view(buffer.flat)
                for i, buffer in staging.items()
                for entry in self._groups[i].entries
            }
        finally:
            for i, buffer in staging.items():
                # The next snapshot may be taken on another stream than the one that reads here.
                device = self._groups[i].device
                stream = self._stream(device)
                stream.wait_stream(torch.cuda.current_stream(device))
                buffer.flat.record_stream(stream)
                self._feeds[device] = Feed(stream)
            if not self._staging:
                self._staging = staging

    def wait(self) -> None:
        """Return when the last copy has arrived in host memory."""
        for feed in self._feeds.values():
            feed.wait()

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device]


@contextlib.contextmanager
def idle_memory(stages: Iterable[Stage]) -> Iterator[dict[str, Tensor]]:
    """The staging memory of several stages."""
    with contextlib.ExitStack() as stack:
        memory: dict[str, Tensor] = {}
        for stage in stages:
            memory.update(stack.enter_context(stage.idle()))
        yield memory


def _pin(flat: Tensor, device: torch.device) -> None:
    """Register pageable memory for fast copies from `device`.

    PyTorch's own pinned allocator rounds every buffer up to a power of two; registering memory of
    the right size does not waste up to half of it.
    """
    if flat.numel() == 0:
        return
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address = flat.data_ptr()
    with torch.cuda.device(device):  # the default, device 0, may not be for this process
        code = int(runtime.cudaHostRegister(address, flat.numel() * flat.element_size(), 0))
    if code != 0:
        _clear_last_error(device)
        warnings.warn(
            f"host memory for a snapshot could not be pinned (CUDA error {code}; check `ulimit -l`)"
            ": collect will block until each copy to the host is done.",
            stacklevel=2,
        )
        return

    def unpin() -> None:
        torch.cuda.synchronize(device)  # a copy into this memory may still be running
        with torch.cuda.device(device):
            runtime.cudaHostUnregister(address)

    weakref.finalize(flat, unpin).atexit = False


def _clear_last_error(device: torch.device) -> None:
    """The CUDA runtime keeps the error of a failed call and would report it for the next kernel."""
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device=device)
