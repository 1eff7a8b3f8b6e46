"""Write the output: under a temporary name first, so that it appears whole or not at all.

A local result is flushed and renamed. On a server a folder is several objects, without an atomic
rename, so the file that makes it a checkpoint (the index, or the only weights file) is uploaded
last. An older index is removed before its shards are replaced: a valid index over old and
new shards would be a checkpoint that never existed.
"""

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch_lawa.checkpoints.formats.huggingface import INDEXES
from torch_lawa.checkpoints.formats.registry import (
    StagedValues,
    checkpoint_parts,
    is_checkpoint_file,
)
from torch_lawa.checkpoints.formats.safetensors_folder import FolderSink, create_file, write_index
from torch_lawa.checkpoints.replacement import require_replaceable
from torch_lawa.checkpoints.storage.atomic import (
    publish,
    require_space,
    staging,
    sync_file,
    sync_folder,
)
from torch_lawa.checkpoints.storage.paths import LocalPath, Location, RemoteURL
from torch_lawa.errors import LawaError, OutputError
from torch_lawa.garbage import paused_garbage_collection
from torch_lawa.mean.dtypes import DTYPES
from torch_lawa.offline.matching import PlannedTensor
from torch_lawa.offline.output_plan import Output
from torch_lawa.offline.threads import Meter
from torch_lawa.system_errors import named_errors

__all__ = ["OutputFile", "SafetensorsSink", "writing"]


@dataclass(frozen=True)
class OutputFile:
    """A safetensors file of the output: its size, its tensors, and the offset of each."""

    file: str
    size: int
    tensors: tuple[tuple[PlannedTensor, int], ...]


def create_files(
    folder: Path, output: Output, metadata: Mapping[str, str], *, flushed: bool
) -> list[OutputFile]:
    """Create the safetensors files of `output`: their headers, and space for the values.

    With `flushed`, other machines see the files before they write into them.
    """
    files = []
    with paused_garbage_collection():
        for shard in output.shards:
            entries = [(t.written, t.target) for t in shard.tensors]
            starts, size = create_file(folder / shard.file, entries, metadata, flushed=flushed)
            files.append(
                OutputFile(shard.file, size, tuple((t, starts[t.written]) for t in shard.tensors))
            )
    return files


class SafetensorsSink(FolderSink):
    """Writes pieces into files that `create_files` created; tensors are named as in the inputs."""

    def __init__(self, folder: Path, files: Sequence[OutputFile]) -> None:
        self.folder, self.files = folder, files
        super().__init__(folder, {f.file: {t.name: at for t, at in f.tensors} for f in files})


@contextlib.contextmanager
def writing(
    output: Output,
    metadata: Mapping[str, str],
    aliases: Mapping[str, str],
    *,
    shared: bool = False,
    meter: Meter | None = None,
) -> Iterator[SafetensorsSink]:
    """A sink for the tensors of `output`, which is published when the block succeeds.

    With `shared`, other processes write to the files of the sink as well. A `meter` also stops the
    conversion to another format, which may take as long as the block.
    """
    proceed = (meter or Meter()).proceed
    with _aside(output) as folder:
        files = create_files(folder, output, {**metadata, **aliases}, flushed=shared)
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
        staged = StagedValues(
            made, target, aliases, metadata, output.nested_under, output.newest, proceed
        )
        try:
            output.writer.finish(staged)
        except Exception:
            proceed()  # PyTorch hides `Stopped` behind an error of its own
            raise
        _deliver(folder, output)


@contextlib.contextmanager
def _aside(output: Output) -> Iterator[Path]:
    """A temporary folder on the disk of the target, removed in any case."""
    if isinstance(output.location, LocalPath):
        target, mode = output.location.path, 0o777
    else:
        target, mode = Path(tempfile.gettempdir(), "lawa-upload"), 0o700
    with staging(target, mode=mode) as folder:
        _refuse_recovered(output)
        require_space(target.parent, output.space)
        try:
            yield folder
        except OutputError:
            raise
        except OSError as error:
            named = Path(str(error.filename))
            if folder not in (named, *named.parents):
                raise  # an input
            raise OutputError(
                f"{output.location}: cannot be written ({error.strerror}); nothing was changed. "
                "Free some space, check the disk, or write elsewhere."
            ) from error


def _refuse_recovered(output: Output) -> None:
    """Apply the rules of the plan to an older result that was missing when it was made."""
    if isinstance(output.location, LocalPath) and output.location.exists():
        if not output.overwrite:
            raise _exists(output.location)
        require_replaceable(output.location, is_file=not output.is_folder)


def _exists(location: Location) -> OutputError:
    return OutputError(
        f"{location}: another process wrote it meanwhile; it was kept. Pass --overwrite to replace "
        "it."
    )


def _deliver(folder: Path, output: Output) -> None:
    if isinstance(output.location, RemoteURL):
        _upload(folder, output.location, output)
    elif isinstance(output.location, LocalPath):
        target = output.location.path
        sync_folder(folder)
        made = folder if output.is_folder else folder / target.name
        parts = checkpoint_parts(output.location)
        try:
            publish(made, target, overwrite=output.overwrite, is_outdated=parts)
        except FileExistsError:
            raise _exists(output.location) from None
        except PermissionError as error:
            raise OutputError(
                f"{target}: cannot be replaced ({error.strerror}); it was kept. Does it belong to "
                "another user? Write elsewhere."
            ) from error
        if not output.provisional:
            output.announce()


def _upload(folder: Path, location: RemoteURL, output: Output) -> None:
    """Upload the files of `folder`; no weights of an older result are left."""
    if not output.is_folder:
        location.upload(folder / output.shards[0].file)
        return
    last = output.index or output.shards[0].file
    names = sorted((path.name for path in folder.iterdir()), key=lambda name: (name == last, name))
    older = {found.name for found in location.children()} if location.exists() else set()
    if older & {shard.file for shard in output.shards} - {last}:
        for name in older & set(INDEXES):
            location.child(name).remove()
    new: list[RemoteURL] = []
    try:
        for name in names:
            target = location.child(name)
            if name not in older:
                new.append(target)
            target.upload(folder / name)
    except BaseException:
        for target in new:
            with contextlib.suppress(LawaError):
                target.remove()
        raise
    outdated = {name for name in older - set(names) if is_checkpoint_file(name)}
    for name in sorted(outdated, key=lambda name: (name not in INDEXES, name)):
        location.child(name).remove()


def _copy(location: Location, path: Path, output: Output) -> None:
    with named_errors(path):
        location.copy_to(path)
    tensors = [tensor for shard in output.shards for tensor in shard.tensors]
    floats = {t.target.dtype for t in tensors if t.source.dtype != t.target.dtype}
    if location.name == "config.json" and len(floats) == 1:
        config = location.read_json()
        for key in ("torch_dtype", "dtype"):
            if key in config:
                config[key] = DTYPES[next(iter(floats))].torch_name
        path.write_text(json.dumps(config, indent=2) + "\n")
    with contextlib.suppress(OSError):
        if isinstance(location, LocalPath):
            shutil.copymode(location.path, path)
    sync_file(path)
