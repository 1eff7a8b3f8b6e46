"""A result is written aside, flushed, and then takes its name: whole, or not there."""

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from torch_lawa.checkpoints.formats.huggingface import read_json
from torch_lawa.checkpoints.formats.sharded_layout import lay_file, write_at, write_index
from torch_lawa.checkpoints.storage.atomic import (
    TEMPORARY,
    clear_stale,
    publish,
    remove,
    require_space,
    start_flushing,
    sync_file,
    sync_folder,
    temporary_name,
)
from torch_lawa.checkpoints.storage.paths import LocalPath, Location, RemoteURL
from torch_lawa.errors import OutputError
from torch_lawa.mean.dtypes import DTYPES
from torch_lawa.mean.kernels import Bytes
from torch_lawa.offline.meeting import clear_meetings
from torch_lawa.offline.output import Output
from torch_lawa.offline.shares import LaidFile
from torch_lawa.offline.uploading import upload

__all__ = ["SafetensorsSink", "lay_out", "writing"]

_FLUSHED = 64 * 1024 * 1024


def lay_out(
    folder: Path, output: Output, metadata: Mapping[str, str], *, flushed: bool = False
) -> list[LaidFile]:
    """Make the safetensors files of `output`: their headers, and room for the values.

    `flushed` sees to it that other machines find all of that before they write into it.
    """
    files = []
    for shard in output.shards:
        entries = [(t.written, t.target) for t in shard.tensors]
        starts, size = lay_file(folder / shard.file, entries, metadata, flushed=flushed)
        files.append(
            LaidFile(shard.file, size, tuple((t, starts[t.written]) for t in shard.tensors))
        )
    return files


class SafetensorsSink:
    """Files that were laid out, filled piece by piece from any thread."""

    def __init__(self, folder: Path, files: Sequence[LaidFile]) -> None:
        self.files = files
        self._places: dict[str, tuple[int, int]] = {}
        self._handles: list[int] = []
        self._unflushed = 0
        try:
            for file in files:
                handle = os.open(folder / file.file, os.O_WRONLY)
                self._handles.append(handle)
                for tensor, start in file.tensors:
                    self._places[tensor.name] = handle, start
        except BaseException:
            self.close()
            raise

    def write(self, name: str, begin: int, piece: Bytes) -> None:
        """Bytes of a tensor, named as in the inputs."""
        handle, start = self._places[name]
        write_at(handle, piece.data, start + begin)
        # The disk works while the next pieces are made; the flush at the end finds little to do.
        self._unflushed += len(piece)  # by several threads: about right is enough
        if self._unflushed > _FLUSHED:
            self._unflushed = 0
            start_flushing(handle)

    def flush(self) -> None:
        """Make what was written survive a power cut."""
        for handle in self._handles:
            os.fsync(handle)

    def close(self) -> None:
        """Give back the files."""
        while self._handles:
            os.close(self._handles.pop())


@contextlib.contextmanager
def writing(
    output: Output,
    metadata: Mapping[str, str],
    aliases: Mapping[str, str],
    shared: Path | None = None,
) -> Iterator[SafetensorsSink]:
    """A sink for the tensors of `output`, which takes its place when the block ends well.

    Where several processes write, they do so in the folder `shared`, which is made here.
    """
    with _aside(output, shared) as folder:
        flushed = shared is not None
        files = lay_out(folder, output, {**metadata, **aliases}, flushed=flushed)
        sink = SafetensorsSink(folder, files)
        try:
            yield sink
            sink.flush()
        finally:
            sink.close()
        if output.index:
            weight_map = {t.written: s.file for s in output.shards for t in s.tensors}
            write_index(folder / output.index, weight_map, output.num_bytes)
        for location in output.copied:
            _copy(location, folder / location.name, output)
        if output.kind != "safetensors":
            _hand_over(folder, output, metadata, aliases)
        _deliver(folder, output)


@contextlib.contextmanager
def _aside(output: Output, shared: Path | None) -> Iterator[Path]:
    """A folder to work in, on the disk of the target, removed whatever happens."""
    if isinstance(output.location, LocalPath):
        target = output.location.path
        target.parent.mkdir(parents=True, exist_ok=True)
        clear_stale(target)
        if shared is None:
            clear_meetings(target)
        require_space(target.parent, output.space)
        folder = shared or temporary_name(target)
        remove(folder)
        folder.mkdir()
    else:
        base = Path(tempfile.gettempdir(), "lawa-upload")
        clear_stale(base)
        require_space(base.parent, output.space)
        folder = Path(tempfile.mkdtemp(TEMPORARY, f"{base.name}.{os.getpid()}."))
    try:
        yield folder
    finally:
        remove(folder)


def _deliver(folder: Path, output: Output) -> None:
    if isinstance(output.location, RemoteURL):
        upload(folder, output.location, output)
    elif isinstance(output.location, LocalPath):
        target = output.location.path
        if not output.overwrite and os.path.lexists(target):
            raise OutputError(
                f"{target}: was written by another process meanwhile; it stays. Pass --overwrite "
                "to replace it."
            )
        if output.is_folder:
            sync_folder(folder)
            publish(folder, target)
        else:
            publish(folder / target.name, target)


def _copy(location: Location, path: Path, output: Output) -> None:
    path.write_bytes(location.read_bytes())
    floats = {t.target.dtype for shard in output.shards for t in shard.tensors
              if t.source.dtype != t.target.dtype}  # fmt: skip
    if location.name == "config.json" and len(floats) == 1:
        config = read_json(location)
        for key in ("torch_dtype", "dtype"):
            if key in config:
                config[key] = DTYPES[next(iter(floats))].torch_name
        path.write_text(json.dumps(config, indent=2) + "\n")
    with contextlib.suppress(OSError):
        if isinstance(location, LocalPath):
            shutil.copymode(location.path, path)
    sync_file(path)


def _hand_over(
    folder: Path, output: Output, metadata: Mapping[str, str], aliases: Mapping[str, str]
) -> None:
    """PyTorch writes the formats that are its own, from the file just made, memory-mapped."""
    from torch_lawa.checkpoints.formats import torch_write as torch_output

    made = folder / output.shards[0].file
    raw = made.rename(made.with_name(made.name + ".values"))
    if output.kind == "torch":
        torch_output.save_file(raw, made, aliases, metadata, output.nested_under)
    else:
        torch_output.save_distributed(raw, folder, aliases, metadata, output.nested_under)
    raw.unlink()
