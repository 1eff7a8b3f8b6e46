"""Megatron checkpoints as output: values replaced in a copy of the newest input.

The copy keeps what only Megatron understands (its metadata, common state, random states, extra
states, the optimizer), so Megatron loads the result like any other checkpoint. Every tensor in a
`.distcp` file is a zip of its own; the checksums in it are replaced as well.
"""

import errno
import math
import os
import re
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from torch_lawa.boxes import boxes
from torch_lawa.checkpoints.formats.megatron import MASTERS, MegatronCheckpoint
from torch_lawa.checkpoints.formats.registry import StagedValues
from torch_lawa.checkpoints.formats.safetensors import read_header
from torch_lawa.checkpoints.formats.safetensors_folder import write_at
from torch_lawa.checkpoints.formats.safetensors_torch import dtype_of, load_tensors
from torch_lawa.checkpoints.formats.torch_pickle.archive import StorageEntry, find_storage
from torch_lawa.checkpoints.formats.torch_pickle.strided import is_row_major
from torch_lawa.checkpoints.formats.torch_pickle.tensors import StoredTensor
from torch_lawa.checkpoints.provenance import PROVENANCE_FILE, write_provenance
from torch_lawa.checkpoints.storage.atomic import replacing
from torch_lawa.checkpoints.storage.byte_sources import ByteSource
from torch_lawa.checkpoints.storage.paths import LocalPath
from torch_lawa.system_errors import named_errors

__all__ = ["write_megatron", "write_tracker"]

_TRACKER = "latest_checkpointed_iteration.txt"
_ITERATION = re.compile(r"iter_([0-9]{7,18})|release")
_PIECE = 1 << 22  # values or bytes that are in memory at a time


def write_megatron(staged: StagedValues) -> None:
    """Replace values in the copied folder `staged.target`.

    Where masters were averaged, the model's own tensors become the rounded masters, as after a
    step of Megatron's optimizer.
    """
    folder = staged.target
    values = load_tensors(staged.values, read_header(staged.values))
    for key in (MASTERS, None) if staged.nested_under == MASTERS else (None,):
        with MegatronCheckpoint(LocalPath(folder), key=key) as copy, _CopiedFiles(folder) as files:
            for name in copy.tensors:
                if name in values:
                    files.replace(copy, name, values[name])
    with named_errors(folder):
        write_provenance(folder, staged.metadata)


def write_tracker(published: Path) -> None:
    """Name a result `iter_0000100` in the file by which Megatron finds the newest checkpoint.

    A file that names a checkpoint of a training run is left as it is.
    """
    found = _ITERATION.fullmatch(published.name)
    tracker = published.parent / _TRACKER
    if found is None or not _is_ours(tracker):
        return
    with replacing(tracker) as file:
        file.write(str(int(found[1])).encode() if found[1] else b"release")


def _is_ours(tracker: Path) -> bool:
    try:
        text = tracker.read_text().strip()
        name = "release" if text == "release" else f"iter_{int(text):07d}"
    except FileNotFoundError:
        return True
    except ValueError:
        return False
    return (tracker.parent / name / PROVENANCE_FILE).is_file()


class _CopiedFiles:
    """The `.distcp` files of a copied folder, open for writing."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, tuple[int, ByteSource]] = {}
        self._stack = ExitStack()

    def __enter__(self) -> "_CopiedFiles":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def replace(self, copy: MegatronCheckpoint, name: str, values: Tensor) -> None:
        """Replace the values of a tensor, converted to its dtype, wherever they are stored."""
        dtype = dtype_of(copy.tensors[name].dtype)
        changed: dict[tuple[str, int], StorageEntry] = {}
        for chunk, stored in copy.stored(name):
            file, source = self._opened(chunk.file)
            entry = changed.get((chunk.file, chunk.offset))
            if entry is None:
                location = LocalPath(self._folder / chunk.file)
                end = chunk.offset + chunk.length
                entry = find_storage(source, location, chunk.offset, end, stored.storage.key)
                changed[chunk.file, chunk.offset] = entry
            box = tuple(slice(a, a + n) for a, n in zip(chunk.starts, chunk.sizes, strict=True))
            with named_errors(self._folder / chunk.file):
                _write(file, entry, stored, values[box], dtype)
        for (name_of_file, _), entry in changed.items():
            with named_errors(self._folder / name_of_file):
                _write_checksum(self._open[name_of_file][0], entry)

    def _opened(self, name: str) -> tuple[int, ByteSource]:
        if name not in self._open:
            path = self._folder / name
            with named_errors(path):
                path.chmod(path.stat().st_mode | 0o200)  # the original may be read-only
                file = os.open(path, os.O_RDWR)
            self._stack.callback(os.close, file)
            source = LocalPath(path).open()
            self._stack.callback(source.close)
            self._open[name] = file, source
        return self._open[name]


def _write(
    file: int, entry: StorageEntry, stored: StoredTensor, values: Tensor, dtype: torch.dtype
) -> None:
    item = dtype.itemsize
    if is_row_major(stored.spec.shape, stored.stride):
        at = entry.start + stored.offset * item
        for piece in _pieces(values):
            data = _bytes(piece.to(dtype))
            write_at(file, data.data, at)
            at += len(data)
        return
    # Megatron saves contiguous tensors, so what is not need not be fast.
    storage = bytearray(b"".join(_read(file, entry)))
    steps = tuple(step * item for step in stored.stride)
    target = np.ndarray(
        stored.spec.shape, f"u{item}", storage, offset=stored.offset * item, strides=steps
    )
    target[...] = _bytes(values.to(dtype)).view(f"u{item}").reshape(stored.spec.shape)
    write_at(file, memoryview(storage), entry.start)


def _pieces(values: Tensor) -> Iterator[Tensor]:
    """The values in row-major order, a limited number at a time."""
    shape = tuple(values.shape)
    for begin in range(0, math.prod(shape), _PIECE):
        for starts, sizes in boxes(shape, begin, min(begin + _PIECE, math.prod(shape))):
            yield values[tuple(slice(a, a + n) for a, n in zip(starts, sizes, strict=True))]


def _bytes(values: Tensor) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
    found: np.ndarray[tuple[int], np.dtype[np.uint8]]
    found = values.contiguous().reshape(-1).view(torch.uint8).numpy()
    return found


def _read(file: int, entry: StorageEntry) -> Iterator[bytes]:
    done = 0
    while done < entry.size:
        found = os.pread(file, min(_PIECE, entry.size - done), entry.start + done)
        if not found:
            raise OSError(errno.EIO, "the copy ended early")
        done += len(found)
        yield found


def _write_checksum(file: int, entry: StorageEntry) -> None:
    checksum = 0
    for piece in _read(file, entry):
        checksum = zlib.crc32(piece, checksum)
    for at in entry.checksums:
        write_at(file, checksum.to_bytes(4, "little"), at)
