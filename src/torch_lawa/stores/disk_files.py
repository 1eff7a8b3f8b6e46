"""The files of a `DiskStore`: staged and written, and mapped for reading."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from torch_lawa.checkpoints.formats.safetensors import Header, require_name
from torch_lawa.checkpoints.formats.safetensors_torch import map_privately, view_flat, write_flat
from torch_lawa.checkpoints.storage.byte_sources import open_guarded
from torch_lawa.errors import StoreError
from torch_lawa.stores.base import Buffer, FlatLayout, Snapshot
from torch_lawa.stores.disk_manifest import entries
from torch_lawa.stores.memory import Stage

__all__ = ["MappedFile", "Staging", "map_unguarded"]


class Staging:
    """Host memory for one file, from which it is written."""

    def __init__(self, layout: FlatLayout) -> None:
        for name, _, _ in entries(layout):
            require_name(name)
        self.layout, self.stage = layout, Stage(layout)
        self._buffers: list[Buffer] | None = None

    def copy(self, tensors: Mapping[str, Tensor]) -> None:
        """Enqueue the copy of the tensors."""
        if self._buffers is None:
            self._buffers = self.stage.allocate()
        self.stage.copy(self._buffers, tensors)

    def write(self, path: Path, snapshot: Snapshot) -> None:
        """Write the file, once the tensors have arrived."""
        assert self._buffers is not None
        self.stage.wait()
        labels = {"index": str(snapshot.index), "step": str(snapshot.step)}
        write_flat(path, entries(self.layout), [buffer.flat for buffer in self._buffers], labels)


class MappedFile:
    """A file, memory-mapped: if it is truncated meanwhile, reading it is an error and no SIGBUS.

    Without the C kernels there is no such guard.
    """

    def __init__(self, path: Path, header: Header, layout: FlatLayout) -> None:
        self._path, self._size, self._source = path, header.file_size, open_guarded(path)
        buffer = map_privately(path) if self._source is None else self._source.buffer
        self.flats = _flats(buffer, header, layout)

    def require_whole(self) -> None:
        """Raise if the file has lost bytes since it was mapped; one that was removed has not."""
        try:
            lost = self._path.stat().st_size != self._size
        except FileNotFoundError:
            lost = False
        if lost or (self._source is not None and self._source.damaged):
            raise StoreError(
                f"{self._path}: was truncated by another program while it was in use. Restore it, "
                "or call averager.reset() to begin a new window."
            )


def map_unguarded(path: Path, header: Header, layout: FlatLayout) -> list[Tensor]:
    """The groups of a file, for callers who keep them: zeros in their place would go unnoticed."""
    return _flats(map_privately(path), header, layout)


def _flats(buffer: Any, header: Header, layout: FlatLayout) -> list[Tensor]:
    """The buffers of the groups, in a mapped file."""
    flats, begin = [], 0
    for group in layout.groups:
        flats.append(view_flat(buffer, header, group.stored, begin, group.numel))
        begin += group.numel * group.stored.itemsize
    return flats
