"""Snapshots in memory: where the weights are (`DeviceStore`) or in host memory (`HostStore`).

Buffers are allocated once and reused, so that a snapshot is a copy and nothing else.
"""

import contextlib
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from torch_lawa.stores.base import Buffer, Content, Layout, Snapshot, Store

__all__ = ["DeviceStore", "HostStore", "Stage", "idle_memory"]

_CPU = torch.device("cpu")


class DeviceStore(Store):
    """The window on the same device as the weights: the fastest, and k copies of them."""

    on_host = False

    def __init__(self) -> None:
        super().__init__()
        self._written: dict[torch.device, torch.cuda.Event] = {}
        self.open(Layout(()), Layout(()), 1)

    def open(self, averaged: Layout, kept: Layout, k: int) -> None:
        """Forget what was there; buffers are made as snapshots come."""
        self._averaged, self._kept, self._k = averaged, kept, k
        self.clear()

    def retarget(self, averaged: Layout, kept: Layout) -> None:
        """Only a store on the host can take snapshots from elsewhere."""
        raise AssertionError("a device store is refilled, not retargeted")

    def clear(self) -> None:
        """Drop every snapshot and its memory."""
        self.snapshots, self.evicted = [], None
        self._newest: list[Buffer] | None = None
        self._buffers: dict[int, list[Buffer]] = {}
        self._free: list[list[Buffer]] = []

    def put(self, content: Content, notes: Mapping[str, Any]) -> None:
        """Copy into a buffer that is free, or into a new one while the window grows."""
        self._release()
        buffers = self._free.pop() if self._free else self._allocate(self._averaged)
        if self._newest is None:
            self._newest = self._allocate(self._kept)
        for device, event in self._written.items():  # the last snapshot's, maybe another stream's
            torch.cuda.current_stream(device).wait_event(event)
        self._copy(self._averaged, buffers, content.averaged)
        self._copy(self._kept, self._newest, content.kept)
        self._buffers[content.snapshot.index] = buffers
        self.snapshots.append(content.snapshot)

    def flats(self, snapshot: Snapshot) -> list[Tensor]:
        """The snapshot's buffers."""
        self.wait()
        return [buffer.flat for buffer in self._buffers[snapshot.index]]

    def kept_flats(self) -> list[Tensor]:
        """The kept tensors' buffers."""
        self.wait()
        assert self._newest is not None
        return [buffer.flat for buffer in self._newest]

    def wait(self) -> None:
        """Return when the last snapshot is there: it may be read on another stream."""
        for event in self._written.values():
            event.synchronize()

    def describe(self) -> str:
        """Where they are."""
        return "device memory"

    def _release(self) -> None:
        """Make room for one more: the oldest leaves, or is set aside as `evicted`."""
        if self.evicted is not None:
            self._free.append(self._buffers.pop(self.evicted.index))
            self.evicted = None
        if len(self.snapshots) == self._k:
            oldest = self.snapshots.pop(0)
            if self.keep_evicted:
                self.evicted = oldest
            else:
                self._free.append(self._buffers.pop(oldest.index))

    def _allocate(self, layout: Layout) -> list[Buffer]:
        return [Buffer(group) for group in layout.groups]

    def _copy(self, layout: Layout, buffers: list[Buffer], tensors: Mapping[str, Tensor]) -> None:
        for buffer in buffers:
            buffer.fill(tensors)
            if buffer.flat.is_cuda:
                stream = torch.cuda.current_stream(buffer.flat.device)
                if stream != buffer.home:
                    buffer.flat.record_stream(stream)
                self._written[buffer.flat.device] = stream.record_event()


class HostStore(DeviceStore):
    """The window in host memory. From a GPU it is filled behind the caller's back.

    The caller's stream makes one device-to-device copy into a staging buffer and goes on; a
    stream of our own carries the staging buffer to page-locked memory. The next snapshot waits,
    on the GPU, until that is done.
    """

    on_host = True
    _stages: Mapping[int, "Stage"] = {}

    def open(self, averaged: Layout, kept: Layout, k: int) -> None:
        """Forget what was there, and stage the tensors that are on a GPU."""
        super().open(averaged, kept, k)
        self.retarget(averaged, kept)

    def retarget(self, averaged: Layout, kept: Layout) -> None:
        """Take coming snapshots from the devices of these layouts."""
        self.wait()
        self._averaged, self._kept = averaged, kept
        self._stages = {id(layout): Stage(layout) for layout in (averaged, kept)}
        # What was loaded before any model was seen is ordinary memory, and will be written to.
        for buffers in (*self._buffers.values(), *self._free):
            self._stages[id(averaged)].lock(buffers)
        if self._newest is not None:
            self._stages[id(kept)].lock(self._newest)

    def wait(self) -> None:
        """Return when the last snapshot has reached host memory."""
        for stage in self._stages.values():
            stage.wait()

    def idle_memory(self) -> AbstractContextManager[Mapping[str, Tensor]]:
        """The staging buffers."""
        return idle_memory(self._stages.values())

    def describe(self) -> str:
        """Where they are."""
        return "host memory"

    def _allocate(self, layout: Layout) -> list[Buffer]:
        return self._stages[id(layout)].allocate()

    def _copy(self, layout: Layout, buffers: list[Buffer], tensors: Mapping[str, Tensor]) -> None:
        self._stages[id(layout)].copy(buffers, tensors)


@contextlib.contextmanager
def idle_memory(stages: Iterable["Stage"]) -> Iterator[dict[str, Tensor]]:
    """What the staging buffers of several stages have room for."""
    with contextlib.ExitStack() as stack:
        room: dict[str, Tensor] = {}
        for stage in stages:
            room.update(stack.enter_context(stage.idle()))
        yield room


class Stage:
    """Carries live tensors to flat buffers in host memory, without holding the caller."""

    def __init__(self, layout: Layout) -> None:
        self._groups = layout.groups
        self._staging: dict[int, Buffer] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._arrived: dict[torch.device, torch.cuda.Event] = {}

    def allocate(self) -> list[Buffer]:
        """Host buffers, page-locked where a GPU will write to them."""
        buffers = [Buffer(group, _CPU) for group in self._groups]
        self.lock(buffers)
        return buffers

    def lock(self, buffers: list[Buffer]) -> None:
        """Page-lock the buffers that a GPU will write to, where they are not yet."""
        for group, buffer in zip(self._groups, buffers, strict=True):
            if group.device.type == "cuda" and not buffer.flat.is_pinned():
                _page_lock(buffer.flat, group.device)

    def copy(self, buffers: list[Buffer], tensors: Mapping[str, Tensor]) -> None:
        """Order the copy of `tensors` into `buffers`."""
        staged: dict[torch.device, list[tuple[Tensor, Tensor]]] = {}
        for i, (group, buffer) in enumerate(zip(self._groups, buffers, strict=True)):
            device = group.device
            if device.type != "cuda":
                buffer.fill(tensors)
                continue
            if device not in staged and device in self._arrived:
                # The staging memory is free once the last snapshot has left it.
                torch.cuda.current_stream(device).wait_event(self._arrived[device])
            if i not in self._staging:
                self._staging[i] = Buffer(group)
            self._staging[i].fill(tensors)
            staged.setdefault(device, []).append((buffer.flat, self._staging[i].flat))
        for device, copies in staged.items():
            stream = self._stream(device)
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                for target, source in copies:
                    source.record_stream(stream)
                    target.copy_(source, non_blocking=True)
            self._arrived[device] = stream.record_event()

    @contextlib.contextmanager
    def idle(self) -> Iterator[dict[str, Tensor]]:
        """The staging memory, by tensor; a snapshot that is taken meanwhile gets other memory.

        Staging buffers narrower than their tensors would not do: their memory is given up.
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
                # The next snapshot may come on another stream than the one that reads here.
                device = self._groups[i].device
                stream = self._stream(device)
                stream.wait_stream(torch.cuda.current_stream(device))
                buffer.flat.record_stream(stream)
                self._arrived[device] = stream.record_event()
            if not self._staging:
                self._staging = staging

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device]

    def wait(self) -> None:
        """Return when the last copy has arrived."""
        for event in self._arrived.values():
            event.synchronize()


def _page_lock(flat: Tensor, device: torch.device) -> None:
    """Lock ordinary memory for the copy engine of `device`.

    PyTorch's own pinned allocator rounds every buffer up to a power of two; registering memory of
    the right size does not waste up to half of it.
    """
    if flat.numel() == 0:
        return
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address = flat.data_ptr()
    with torch.cuda.device(device):  # else on device 0, where this process may have no business
        code = int(runtime.cudaHostRegister(address, flat.numel() * flat.element_size(), 0))
    if code != 0:
        _drop_last_error(device)
        warnings.warn(
            f"host memory for a snapshot could not be page-locked (CUDA error {code}; is locked "
            "memory limited?): collect will hold the caller until the copy is done.",
            stacklevel=2,
        )
        return

    def unlock() -> None:
        torch.cuda.synchronize(device)  # a copy into this memory may still be under way
        with torch.cuda.device(device):
            runtime.cudaHostUnregister(address)

    weakref.finalize(flat, unlock).atexit = False


def _drop_last_error(device: torch.device) -> None:
    """The CUDA runtime remembers a failed call, and the next kernel would be blamed for it."""
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device=device)
