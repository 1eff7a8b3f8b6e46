"""A result is written aside, flushed, and then takes its name: whole, or not there."""

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from torch_lawa.checkpoints.formats.huggingface import read_json
from torch_lawa.checkpoints.formats.registry import StagedValues
from torch_lawa.checkpoints.formats.safetensors_folder import FolderSink, lay_file, write_index
from torch_lawa.checkpoints.storage.atomic import (
    TEMPORARY,
    clear_stale,
    publish,
    remove,
    require_space,
    sync_file,
    sync_folder,
    temporary_name,
)
from torch_lawa.checkpoints.storage.paths import LocalPath, Location, RemoteURL
from torch_lawa.errors import OutputError
from torch_lawa.mean.dtypes import DTYPES
from torch_lawa.offline.meeting import clear_meetings
from torch_lawa.offline.output import Output
from torch_lawa.offline.shares import LaidFile
from torch_lawa.offline.uploading import upload

__all__ = ["SafetensorsSink", "lay_out", "writing"]


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


class SafetensorsSink(FolderSink):
    """The files of an average that were laid out; tensors are named as in the inputs."""

    def __init__(self, folder: Path, files: Sequence[LaidFile]) -> None:
        self.files = files
        super().__init__(folder, {f.file: {t.name: at for t, at in f.tensors} for f in files})


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
        made = folder / output.shards[0].file
        target = folder if output.is_folder else made
        output.writer.finish(StagedValues(made, target, aliases, metadata, output.nested_under))
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
