"""What the output will consist of: its format, its files, the tensors in each."""

import os
import posixpath
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from torch_lawa.checkpoints.formats.base import Checkpoint, CheckpointLayout, TensorSpec
from torch_lawa.checkpoints.formats.huggingface import weights_stem
from torch_lawa.checkpoints.formats.registry import (
    FORMATS,
    FormatWriter,
    file_suffixes,
    format_of_file,
    format_of_layout,
    output_layouts,
)
from torch_lawa.checkpoints.formats.safetensors import require_name
from torch_lawa.checkpoints.formats.safetensors_folder import (
    DEFAULT_SHARD,
    group_by_size,
    shard_names,
    widest_first,
)
from torch_lawa.checkpoints.replacement import require_replaceable
from torch_lawa.checkpoints.storage.atomic import require_short_name
from torch_lawa.checkpoints.storage.paths import LocalPath, Location, RemoteURL
from torch_lawa.errors import ConfigError, FormatError, OutputError
from torch_lawa.offline.matching import PlannedTensor
from torch_lawa.offline.options import AverageOptions
from torch_lawa.offline.side_files import side_files

__all__ = ["Output", "Shard", "plan_output"]


@dataclass(frozen=True)
class Shard:
    """One safetensors file of the output and its tensors, in order."""

    file: str
    tensors: tuple[PlannedTensor, ...]


@dataclass(frozen=True)
class Output:
    """What will be written, and where."""

    location: Location
    kind: str  # the name of a format in the registry
    is_folder: bool
    shards: tuple[Shard, ...]
    index: str | None  # name of the file that maps tensors to shards
    copied: tuple[Location, ...]
    nested_under: str  # the key that holds the weights in a PyTorch file or DCP folder
    overwrite: bool
    newest: Location  # the newest input
    provisional: bool = False  # it will be moved to where it belongs

    @property
    def writer(self) -> FormatWriter:
        """How the format is written."""
        writer = FORMATS[self.kind].writer
        assert writer is not None
        return writer

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors."""
        return sum(t.target.nbytes for shard in self.shards for t in shard.tensors)

    @property
    def num_bytes_copied(self) -> int:
        """Bytes of what is copied from the newest input."""
        copied = sum(location.size for location in self.copied)
        if self.writer.keeps == ("names",):  # and the writer copies the rest
            copied += sum(file.size for file in self.newest.walk())
        return copied

    @property
    def space(self) -> int:
        """Bytes of disk needed while it is written: twice its size where values are converted."""
        values = self.num_bytes * (1 if self.writer.convert is None else 2)
        return values + self.num_bytes_copied

    def announce(self) -> None:
        """Tell the programs that read such checkpoints of one that has been published."""
        if self.writer.announce is not None and isinstance(self.location, LocalPath):
            self.writer.announce(self.location.path)

    def describe(self) -> str:
        """The format in words."""
        if self.writer.convert is not None:
            return FORMATS[self.kind].title
        if len(self.shards) == 1:
            return "one safetensors file" + (" in a folder" if self.is_folder else "")
        return f"{len(self.shards)} safetensors shards"


def plan_output(
    location: Location,
    checkpoints: Sequence[Checkpoint],
    tensors: Sequence[PlannedTensor],
    options: AverageOptions,
    *,
    overwrite: bool,
) -> Output:
    """Decide the layout: the one in `options`, else that of the newest input."""
    newest, layout, max_shard_size = checkpoints[-1], options.layout, options.max_shard_size
    is_file = location.suffix in file_suffixes()
    if is_file and layout not in (None, "single"):
        raise ConfigError(
            f"{location}: this names one file, but --layout {layout} needs a folder. Give a name "
            "without a suffix."
        )
    own = newest.layout if newest.layout in output_layouts() else "single"
    chosen: CheckpointLayout = "single" if is_file else layout or own
    if layout is None and max_shard_size is not None and not is_file:
        chosen = "sharded"
    if max_shard_size is not None and chosen != "sharded":
        raise ConfigError(
            f"--max-shard-size was given, but {location} will have no shards. Leave it out, or "
            "give a folder and --layout sharded."
        )
    found = format_of_file(location) if is_file else format_of_layout(chosen)
    if found is None or found.writer is None:
        raise ConfigError(f"{location}: this format can be read, but not written. Choose another.")
    if found.writer.keeps:
        _refuse_changes(location, newest, chosen, options, found.writer)
    if "dtypes" not in found.writer.keeps and (unique := getattr(newest, "in_place_only", ())):
        raise ConfigError(
            f"{location}: --key {options.key}: {unique[0]!r} of {newest.location} can only be "
            f"written with --layout {newest.layout}. Leave out --key to average the weights."
        )
    for tensor in tensors:
        _require_name(tensor)
    converted = found.writer.convert is not None
    if converted and not location.local:
        raise ConfigError(
            f"{location}: only safetensors can be written to a URL. Write to a path and upload it, "
            "or use --layout single or sharded."
        )
    shards = _shards(
        location, newest, tensors, "single" if converted else chosen, max_shard_size, is_file
    )
    _refuse_clashes(location, checkpoints, is_file=is_file, overwrite=overwrite)
    return Output(
        location=location,
        kind=found.name,
        is_folder=not is_file,
        shards=shards,
        index=None if is_file or chosen != "sharded" else f"{_stem(newest)}.safetensors.index.json",
        copied=() if is_file else tuple(_copied(newest, found.writer)),
        nested_under=getattr(newest, "key", None) or "",
        overwrite=overwrite,
        newest=newest.location,
    )


def _require_name(tensor: PlannedTensor) -> None:
    """Every output is a safetensors file first, and most stay one."""
    try:
        require_name(tensor.written)
    except FormatError as error:
        raise ConfigError(f"{error} (--exclude {tensor.name!r})") from None


def _copied(newest: Checkpoint, writer: FormatWriter) -> list[Location]:
    return newest.files if "dtypes" in writer.keeps else side_files(newest)


def _refuse_changes(
    location: Location,
    newest: Checkpoint,
    layout: CheckpointLayout,
    options: AverageOptions,
    writer: FormatWriter,
) -> None:
    """Refuse what cannot be had by replacing values in a copy of the newest checkpoint."""
    if newest.layout != layout:
        raise ConfigError(
            f"{location}: --layout {layout} takes everything but the weights from the newest "
            f"input, but {newest.location} has another format. Leave out --layout."
        )
    changes = {
        "names": ("--strip-prefix", options.strip_prefix),
        "dtypes": ("--dtype", options.dtype),
    }
    for option, value in (changes[kept] for kept in writer.keeps):
        if value:
            raise ConfigError(
                f"{location}: {option} {value}: --layout {layout} keeps "
                f"{' and '.join(writer.keeps)} of the newest input. Leave out {option}, or write "
                "safetensors (--layout single, or a name that ends in .safetensors)."
            )


def _shards(
    location: Location,
    newest: Checkpoint,
    tensors: Sequence[PlannedTensor],
    layout: CheckpointLayout,
    max_shard_size: int | None,
    is_file: bool,
) -> tuple[Shard, ...]:
    if layout != "sharded":
        file = location.name if is_file else f"{_stem(newest)}.safetensors"
        return (Shard(file, widest_first(tensors, _target)),)
    groups: dict[str, list[PlannedTensor]] = {}
    if newest.layout == "sharded" and max_shard_size is None:
        for tensor in tensors:
            groups.setdefault(newest.file_of(tensor.name).name, []).append(tensor)
        found = [groups[name] for name in sorted(groups)]
    else:
        limit = DEFAULT_SHARD if max_shard_size is None else max_shard_size
        found = group_by_size(tensors, _target, limit)
    names = shard_names(_stem(newest), len(found))
    return tuple(
        Shard(name, widest_first(group, _target)) for name, group in zip(names, found, strict=True)
    )


def _target(tensor: PlannedTensor) -> TensorSpec:
    return tensor.target


def _stem(newest: Checkpoint) -> str:
    """`model`, or the name that libraries expect of this kind of weights."""
    found = weights_stem(newest.files[0].name) if newest.files else None
    return "model" if found in (None, "pytorch_model") else found


def _refuse_clashes(
    location: Location, checkpoints: Sequence[Checkpoint], *, is_file: bool, overwrite: bool
) -> None:
    for checkpoint in checkpoints:
        for part in (checkpoint.location, *checkpoint.files):
            if _overlap(location, part):
                raise OutputError(
                    f"{location}: the output is, contains or is inside the input "
                    f"{checkpoint.location}. Write elsewhere."
                )
    if isinstance(location, LocalPath):
        _refuse_odd(location)
    if not location.exists():
        return
    if not overwrite:
        raise OutputError(f"{location}: already exists. Pass --overwrite to replace it.")
    if isinstance(location, LocalPath):  # on a server nothing but weights is ever removed
        require_replaceable(location, is_file=is_file)


def _refuse_odd(location: LocalPath) -> None:
    """Refuse names that are too long, what must not be replaced, and parents that are files."""
    require_short_name(location.path)
    if _is_odd(location.path):
        raise OutputError(
            f"{location}: this is neither a file nor a folder (a device, or a broken link). Write "
            "elsewhere."
        )
    above = next((p for p in location.path.parents if os.path.lexists(p)), None)
    if above is not None and not above.is_dir():
        raise OutputError(f"{location}: {above} is not a folder. Write elsewhere.")


def _is_odd(path: Path) -> bool:
    """Whether something is there that is neither a file nor a folder."""
    try:
        found = path.lstat().st_mode  # one look: another writer may replace it meanwhile
    except OSError:
        return False
    if stat.S_ISLNK(found):
        return not (path.is_file() or path.is_dir())
    return not (stat.S_ISREG(found) or stat.S_ISDIR(found))


def _overlap(a: Location, b: Location) -> bool:
    """Whether one is the other, contains it or is inside it, however they are written."""
    a, b = (p.stored_at if isinstance(p, RemoteURL) else p for p in (a, b))
    if isinstance(a, LocalPath) and isinstance(b, LocalPath):
        one, other = _entries(a.path.resolve()), _entries(b.path.resolve())
        return one[0] in other or other[0] in one
    if isinstance(a, RemoteURL) and isinstance(b, RemoteURL) and type(a.fs) is type(b.fs):
        first, second = (PurePosixPath(posixpath.normpath("/" + p.path)) for p in (a, b))
        return first.is_relative_to(second) or second.is_relative_to(first)
    return False


def _entries(path: Path) -> list[tuple[object, ...]]:
    """What a path and each folder above it are to the file system."""
    above = [] if path == path.parent else _entries(path.parent)
    inside = above[0] if above else ()
    try:
        found = path.stat()
    except OSError:
        return [(*inside, path.name), *above]
    if not stat.S_ISDIR(found.st_mode) and found.st_nlink > 1:
        return [(*inside, path.name), *above]  # replacing one of its names leaves the others
    return [(found.st_dev, found.st_ino), *above]
