"""Folders of safetensors files that `from_pretrained` of Hugging Face libraries reads, written.

Which file holds which tensor, the names of the files, and their values in any order.
"""

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from torch_lawa.checkpoints.formats.base import TensorSpec
from torch_lawa.checkpoints.formats.safetensors import encode_header
from torch_lawa.checkpoints.storage.atomic import reserve, start_flushing, sync_file
from torch_lawa.errors import ConfigError, OutputError
from torch_lawa.mean.dtypes import DTYPES
from torch_lawa.system_errors import named_errors

if TYPE_CHECKING:
    from torch_lawa.mean.kernels import Bytes

__all__ = [
    "DEFAULT_SHARD",
    "FolderSink",
    "create_file",
    "group_by_size",
    "shard_names",
    "widest_first",
    "write_at",
    "write_index",
]

DEFAULT_SHARD = 5_000_000_000  # bytes, what Hugging Face's `save_pretrained` has used for years
_FLUSH_EVERY = 64 * 1024 * 1024  # bytes
_WRITE = 1 << 18  # bytes per call: twice as many can cost the kernel twice the time per byte

_T = TypeVar("_T")


def group_by_size(
    items: Iterable[_T], spec: Callable[[_T], TensorSpec], limit: int
) -> list[list[_T]]:
    """Group items, in their order, by at most `limit` bytes; a larger one is a group by itself.

    >>> group_by_size([2, 3, 9, 1], lambda n: TensorSpec("U8", (n,)), limit=5)
    [[2, 3], [9], [1]]
    """
    if limit < 1:
        raise ConfigError(f"max_shard_size={limit}: shards need at least 1 byte.")
    groups: list[list[_T]] = [[]]
    size = 0
    for item in items:
        num_bytes = spec(item).nbytes
        if groups[-1] and size + num_bytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(item)
        size += num_bytes
    return groups


def widest_first(items: Iterable[_T], spec: Callable[[_T], TensorSpec]) -> tuple[_T, ...]:
    """Sort by element size, which aligns every tensor without gaps; the format has no padding."""
    return tuple(sorted(items, key=lambda item: -DTYPES[spec(item).dtype].itemsize))


def shard_names(stem: str, num_shards: int) -> list[str]:
    """The file names of the shards.

    >>> shard_names("model", 2)
    ['model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors']
    """
    total = f"{num_shards:05d}"
    return [f"{stem}-{i:05d}-of-{total}.safetensors" for i in range(1, num_shards + 1)]


def create_file(
    path: Path,
    entries: Sequence[tuple[str, TensorSpec]],
    metadata: Mapping[str, str],
    *,
    flushed: bool = False,
) -> tuple[dict[str, int], int]:
    """Create a file with its header and space for the values; returns offsets and the size.

    With `flushed` the file is on disk on return, so that other machines can write into it.
    """
    header, starts, size = encode_header(entries, metadata)
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        reserve(handle, size, path)
        with named_errors(path):
            write_at(handle, header, 0)
            if flushed:
                os.fsync(handle)
    finally:
        os.close(handle)
    return starts, size


def write_at(handle: int, data: bytes | memoryview, at: int) -> None:
    """Write all of `data` to an open file, from byte `at` on."""
    if not hasattr(os, "pwrite"):
        raise OutputError(
            "writing checkpoints needs Linux or macOS. On Windows use WSL, or save what "
            "averager.average() returns with torch.save."
        )
    rest = memoryview(data)
    while rest:
        n = os.pwrite(handle, rest[:_WRITE], at)
        rest, at = rest[n:], at + n


class FolderSink:
    """Files made by `create_file`, filled piece by piece, in any order and from any thread.

    `starts` says where in which file each tensor begins: file -> tensor -> byte.
    """

    def __init__(self, folder: Path, starts: Mapping[str, Mapping[str, int]]) -> None:
        self._starts: dict[str, tuple[int, int]] = {}  # tensor -> open file, byte
        self._handles: list[int] = []
        self._paths: dict[int, Path] = {}
        self._unflushed = 0
        try:
            for file, tensors in starts.items():
                handle = os.open(folder / file, os.O_WRONLY)
                self._handles.append(handle)
                self._paths[handle] = folder / file
                self._starts |= {name: (handle, start) for name, start in tensors.items()}
        except BaseException:
            self.close()
            raise

    def write(self, name: str, begin: int, piece: "Bytes") -> None:
        """Write bytes of a tensor, from its byte `begin` on."""
        handle, start = self._starts[name]
        with named_errors(self._paths[handle]):
            write_at(handle, piece.data, start + begin)
        # The disk writes while the next pieces are computed, so the final flush has little to do.
        self._unflushed += len(piece)  # from several threads: about right is enough
        if self._unflushed > _FLUSH_EVERY:
            self._unflushed = 0
            start_flushing(handle)

    def write_all(self, parts: Sequence[tuple[str, int]], piece: "Bytes") -> None:
        """Write several whole tensors, (name, bytes) each, whose bytes follow each other."""
        done = 0
        while parts:
            handle, start = self._starts[parts[0][0]]
            size = num = 0
            for name, num_bytes in parts:
                if self._starts[name] != (handle, start + size):
                    break
                size, num = size + num_bytes, num + 1
            self.write(parts[0][0], 0, piece[done : done + size])
            done, parts = done + size, parts[num:]

    def flush(self) -> None:
        """Make what was written survive a power cut."""
        for handle in self._handles:
            with named_errors(self._paths[handle]):
                os.fsync(handle)

    def close(self) -> None:
        """Close the files."""
        while self._handles:
            os.close(self._handles.pop())


def write_index(path: Path, weight_map: Mapping[str, str], num_bytes: int) -> None:
    """Write and flush the index, which says which shard contains which tensor."""
    index = {"metadata": {"total_size": num_bytes}, "weight_map": dict(weight_map)}
    with named_errors(path):
        path.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    sync_file(path)
