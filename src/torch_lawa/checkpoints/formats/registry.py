"""The registry of checkpoint formats: how each is recognised, opened and written.

A format is one module and one entry here. Finding checkpoints, opening them, planning an output and
the lists of formats in messages and documentation all read this table, so a format that is added
with `register_format` is known everywhere. Its module is imported when it is needed.
"""

import importlib
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_lawa.checkpoints.formats import deepspeed_files
from torch_lawa.checkpoints.formats.huggingface import FOLDER_FILES, FOLDER_PARTS
from torch_lawa.checkpoints.formats.orbax_tree import (
    CHECKPOINT_FILE,
    ITEM_FILE,
    list_parts,
)
from torch_lawa.checkpoints.storage.atomic import sync_file, sync_folder
from torch_lawa.errors import ConfigError, FormatError

if TYPE_CHECKING:
    from torch_lawa.checkpoints.formats.base import Checkpoint
    from torch_lawa.checkpoints.storage.paths import Location

__all__ = [
    "FORMATS",
    "Format",
    "FormatWriter",
    "StagedValues",
    "checkpoint_parts",
    "file_suffixes",
    "format_of_file",
    "format_of_folder",
    "format_of_layout",
    "format_titles",
    "is_checkpoint_file",
    "is_checkpoint_folder",
    "open_checkpoint",
    "output_layouts",
    "register_format",
    "typical_files",
]


@dataclass(frozen=True)
class StagedValues:
    """A finished average in one safetensors file, which a writer converts to its own format."""

    values: Path  # the safetensors file; memory-map it (`read_header`, `load_tensors`)
    target: Path  # the file to write, or the folder to write into
    aliases: Mapping[str, str]  # other names of tied tensors, with the name in `values`
    metadata: Mapping[str, str]  # the newest input's, and the provenance of the average
    nested_under: str  # the dotted key that held the weights in the inputs ("" for the top)
    newest: "Location"  # the newest input
    proceed: Callable[[], None] = lambda: None  # called between pieces; raises if it is to stop


@dataclass(frozen=True)
class FormatWriter:
    """How a format is written.

    The values of an average arrive in pieces, in any order, from several threads or processes. So
    they are always written to safetensors files whose layout is planned beforehand
    (`safetensors_folder.FolderSink`). Without `convert` these files are the result. Otherwise
    there is one, and `convert` writes the result from it; both are on disk for a moment.
    """

    layouts: tuple[str, ...] = ()  # values of --layout that write a folder of this format
    convert: Callable[[StagedValues], None] | None = None
    keeps: tuple[str, ...] = ()  # "names", "dtypes" of the newest input, of which it is a copy
    announce: Callable[[Path], None] | None = None  # called with the published path

    def finish(self, staged: StagedValues) -> None:
        """Replace the staged values by the result, flushed to disk."""
        if self.convert is None:
            return
        staged.proceed()
        aside = staged.values.rename(staged.values.with_name(f"{staged.values.name}.values"))
        self.convert(replace(staged, values=aside))
        aside.unlink()
        for path in staged.target.rglob("*") if staged.target.is_dir() else (staged.target,):
            sync_folder(path) if path.is_dir() else sync_file(path)


@dataclass(frozen=True)
class Format:
    """An entry of the registry.

    A file belongs to a format by its suffix; a folder is one checkpoint of a format if it contains
    one of `folder_files` and all of `folder_also`. With `exclusive` that holds whatever else the
    folder contains; otherwise the folder is a run if its entries have steps in their names.
    `folder_parts` matches the names of the other files that hold or describe the weights of such a
    folder; `list_parts` finds those, also sub-folders, that only a folder of this format has.
    """

    name: str  # in plans and for programs
    title: str  # in messages: "PyTorch file"
    description: str  # one line for documentation
    open: "Callable[[Location, str | None], Checkpoint]"  # a file or folder, and --key
    suffixes: tuple[str, ...] = ()
    folder_files: tuple[str, ...] = ()
    folder_also: tuple[str, ...] = ()
    folder_parts: str = ""  # a regular expression
    exclusive: bool = False
    list_parts: "Callable[[Location], Collection[str]]" = lambda folder: ()
    writer: FormatWriter | None = None
    typical_file: str = ""  # the one of `folder_files` that messages name, if not the first


FORMATS: dict[str, Format] = {}  # by name, in the order in which they are tried and listed


def register_format(new: Format) -> Format:
    """Add a format. Its suffixes and layouts must not belong to another one."""
    for known in FORMATS.values():
        both = (set(known.suffixes) & set(new.suffixes)) | (_layouts(known) & _layouts(new))
        if known.name == new.name or both:
            raise ConfigError(
                f"format {new.name!r}: {', '.join(sorted(both)) or 'its name'} already belongs to "
                f"the format {known.name!r}. Choose another."
            )
    FORMATS[new.name] = new
    return new


def typical_files() -> list[str]:
    """For messages: one file per format by which its folders are recognised."""
    found = [f.typical_file or f.folder_files[0] for f in FORMATS.values() if f.folder_files]
    return list(dict.fromkeys(found))


def _layouts(known: Format) -> set[str]:
    return set(known.writer.layouts) if known.writer is not None else set()


def file_suffixes() -> tuple[str, ...]:
    """The suffixes of all formats.

    >>> file_suffixes()
    ('.safetensors', '.pt', '.pth', '.bin', '.ckpt', '.tar')
    """
    return tuple(suffix for known in FORMATS.values() for suffix in known.suffixes)


def output_layouts() -> tuple[str, ...]:
    """The values of `--layout`.

    >>> output_layouts()
    ('single', 'sharded', 'megatron', 'distributed', 'orbax')
    """
    return tuple(
        layout for known in FORMATS.values() if known.writer for layout in known.writer.layouts
    )


def format_titles() -> tuple[str, ...]:
    """The formats as messages and `--help` call them.

    >>> format_titles()[:3]
    ('safetensors', 'PyTorch file', 'Megatron checkpoint')
    """
    return tuple(known.title for known in FORMATS.values())


def format_of_file(location: "Location") -> Format | None:
    """The format that a file has by its suffix."""
    return next((f for f in FORMATS.values() if location.suffix in f.suffixes), None)


def format_of_folder(names: Collection[str]) -> Format | None:
    """The format of which a folder with files of these names is one checkpoint.

    >>> format_of_folder([".metadata", "__0_0.distcp"]).name
    'distributed'
    """
    found = [
        f
        for f in FORMATS.values()
        if any(name in names for name in f.folder_files)
        and all(name in names for name in f.folder_also)
    ]
    return next((f for f in found if f.exclusive), found[0] if found else None)


def format_of_layout(layout: str) -> Format:
    """The format of a folder that is written with `--layout`."""
    for known in FORMATS.values():
        if known.writer is not None and layout in known.writer.layouts:
            return known
    raise ConfigError(f"layout {layout!r} is unknown; use one of {', '.join(output_layouts())}.")


def is_checkpoint_folder(folder: "Location") -> bool:
    """Whether a folder is itself one checkpoint (and not a run that contains some)."""
    return format_of_folder([child.name for child in folder.children()]) is not None


def is_checkpoint_file(name: str) -> bool:
    """Whether a file of this name in a checkpoint folder belongs to its weights.

    These files are removed when the folder is overwritten; all others stay.

    >>> [is_checkpoint_file(name) for name in ("model.safetensors", "0.distcp", "notes.txt")]
    [True, True, False]
    """
    return any(
        name in known.folder_files or re.fullmatch(known.folder_parts, name)
        for known in FORMATS.values()
    )


def checkpoint_parts(folder: "Location") -> Callable[[str], bool]:
    """Whether an entry of this folder, by its name, belongs to the checkpoint in it."""
    if not folder.is_folder():
        return is_checkpoint_file
    found = format_of_folder([child.name for child in folder.children()])
    named = set(found.list_parts(folder)) if found is not None else set()
    return lambda name: name in named or is_checkpoint_file(name)


def open_checkpoint(location: "Location", *, key: str | None = None) -> "Checkpoint":
    """Open the checkpoint at a path or URL.

    `key` names the entry of a PyTorch file that holds the weights, where there are several.
    """
    if location.is_folder():
        found = format_of_folder([child.name for child in location.children()])
        if found is None:
            known = ", ".join(typical_files())
            raise FormatError(f"{location}: no checkpoint here: looked for {known}, …")
        return found.open(location, key)
    if not location.is_file():
        raise FormatError(f"{location}: there is no such file or folder.")
    found = format_of_file(location)
    if found is None:
        raise FormatError(
            f"{location}: not a checkpoint by its name; known are {', '.join(file_suffixes())} and "
            "folders."
        )
    return found.open(location, key)


def _deferred(module: str, name: str) -> Callable[..., Any]:
    """A function of a format's module, which is imported when the function is called."""

    def call(*arguments: Any) -> Any:
        found = importlib.import_module(f"torch_lawa.checkpoints.formats.{module}")
        return getattr(found, name)(*arguments)

    return call


register_format(
    Format(
        name="safetensors",
        title="safetensors",
        description="one safetensors file",
        open=_deferred("safetensors", "SafetensorsFile"),
        suffixes=(".safetensors",),
        writer=FormatWriter(layouts=("single", "sharded")),  # folders that from_pretrained loads
    )
)
register_format(
    Format(
        name="torch",
        title="PyTorch file",
        description="file of torch.save: a state dict, alone or nested",
        open=_deferred("torch_file", "TorchFile"),
        suffixes=(".pt", ".pth", ".bin", ".ckpt", ".tar"),
        writer=FormatWriter(convert=_deferred("torch_write", "write_file")),
    )
)
register_format(
    Format(  # before "distributed", whose files it has as well
        name="megatron",
        title="Megatron checkpoint",
        description="torch_dist folder of Megatron-Core or NeMo, from any number of ranks",
        open=_deferred("megatron", "open_megatron"),
        folder_files=(".metadata",),
        folder_also=("metadata.json",),
        exclusive=True,
        writer=FormatWriter(
            layouts=("megatron",),
            convert=_deferred("megatron_write", "write_megatron"),
            keeps=("names", "dtypes"),
            announce=_deferred("megatron_write", "write_tracker"),
        ),
    )
)
register_format(
    Format(
        name="distributed",
        title="PyTorch distributed checkpoint",
        description="folder of torch.distributed.checkpoint, from any number of ranks",
        open=_deferred("dcp", "DistributedCheckpoint"),
        folder_files=(".metadata",),
        folder_parts=r".+\.distcp",
        exclusive=True,
        writer=FormatWriter(
            layouts=("distributed",), convert=_deferred("torch_write", "write_distributed")
        ),
    )
)
register_format(
    Format(
        name="huggingface",
        title="Hugging Face folder",
        description="folder that from_pretrained loads: one file or shards, also adapters",
        open=_deferred("huggingface", "open_folder"),
        folder_files=FOLDER_FILES,
        folder_parts=FOLDER_PARTS,
        typical_file="model.safetensors",
    )
)
register_format(
    Format(
        name="deepspeed",
        title="DeepSpeed checkpoint",
        description="folder of DeepSpeed: ZeRO 1, 2, 3 or universal, from any number of ranks",
        open=_deferred("deepspeed", "DeepSpeedCheckpoint"),
        folder_files=deepspeed_files.FOLDER_FILES,
        folder_parts=deepspeed_files.FOLDER_PARTS,
    )
)
register_format(
    Format(
        name="orbax",
        title="Orbax checkpoint",
        description="folder of Orbax (JAX): OCDBT or zarr, with tensorstore",
        open=_deferred("orbax", "OrbaxCheckpoint"),
        folder_files=(ITEM_FILE, CHECKPOINT_FILE),
        exclusive=True,
        list_parts=list_parts,
        writer=FormatWriter(
            layouts=("orbax",), convert=_deferred("orbax_write", "write_orbax"), keeps=("names",)
        ),
    )
)
