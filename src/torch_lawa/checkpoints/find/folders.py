"""What a folder contains: one checkpoint, a run's checkpoints, or something unsupported."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch_lawa.checkpoints.find.step_names import (
    SHARD,
    UNFINISHED,
    is_temporary,
    parse_name,
    parse_names,
    reason_against,
)
from torch_lawa.checkpoints.formats.base import TrainingProgress
from torch_lawa.checkpoints.formats.huggingface import DIFFUSERS, weights_stem
from torch_lawa.checkpoints.formats.registry import file_suffixes, format_of_folder, typical_files
from torch_lawa.checkpoints.storage.paths import LocalPath, Location
from torch_lawa.errors import FormatError
from torch_lawa.units import few

__all__ = ["Candidate", "FolderContents", "describe_left_out", "examine_run"]

_DEPTH = 3  # RUN/iter_0001000/mp_rank_00/model_optim_rng.pt
_MANY_FOLDERS = 64  # a sub-folder with more sub-folders than this contains data
_RUN_FOLDERS = ("checkpoints", "checkpoint")
_VERSION = re.compile(r"version_[0-9]+")
_DEEPSPEED = re.compile(r"global_step[0-9]+")
_NO_CHECKPOINTS = re.compile(r"optimizer(_[0-9]+)?|wandb|__pycache__")

_EMA = "_ema"
_IS_EMA = "the EMA of the model beside it: to average it, give a pattern of these folders"

_TRACKER = "latest_checkpointed_iteration.txt"  # Megatron writes it when a checkpoint is complete

# Names that show which unsupported kind of checkpoint a folder is, and what to do about it.
_FOREIGN = (
    (
        re.compile(r"(mp_rank_|zero_pp_rank_|bf16_zero_|fp16_zero_|layer_).*_states\.pt"),
        "a DeepSpeed checkpoint without the files of rank 0: save or copy it again",
    ),
    (
        re.compile(r"mp_rank_(?!00(_0+)*$)[0-9_]+"),
        "a model-parallel Megatron checkpoint, which is not supported: merge its ranks into one",
    ),
    (
        re.compile(r"common\.pt"),  # beside `.metadata` it is a checkpoint of a known format
        "an unfinished Megatron checkpoint, or one in the old zarr format, which is not supported: "
        "convert it with Megatron (--ckpt-convert-format torch_dist)",
    ),
    (
        re.compile(r"model_index\.json"),
        "a Diffusers pipeline with several models: give the sub-folder of one model, or for a run "
        "a pattern such as 'RUN/checkpoint-*/unet'",
    ),
)


@dataclass(frozen=True)
class Candidate:
    """A possible checkpoint: what to open, and the name it is shown under.

    The two differ where a folder wraps the checkpoint, as in `step-500/model/.metadata`.
    """

    location: Location
    shown: Location


@dataclass
class FolderContents:
    """What was found in a folder; `own` files make it a checkpoint itself."""

    folder: Location
    own: tuple[str, ...] = ()  # files by which a format recognises the folder
    exclusive: bool = False  # that format's folders are never runs
    entries: list[Candidate] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)  # name -> why
    runs: list[str] = field(default_factory=list)  # sub-folders that hold several checkpoints
    foreign: str | None = None  # the unsupported kind of checkpoint that it is
    series: bool = False  # entries have steps in their names, whatever else the folder contains

    @property
    def checkpoint(self) -> Location | None:
        """The one checkpoint that the folder is, or wraps; None if it has several or none."""
        if self.own and (self.exclusive or not self.series):
            return self.folder
        if self.own or self.runs or len(self.entries) != 1:
            return None
        return self.entries[0].location

    @property
    def is_run(self) -> bool:
        """Whether it contains checkpoints from which some must be selected."""
        if self.checkpoint is None:
            return bool(self.num_numbered or (self.entries and not self.runs))
        # A run may have one checkpoint so far, but the one in `step-500/model_0` is that folder's.
        wraps = self.checkpoint != self.folder and not parse_name(self.folder.name).known
        return wraps and self.num_numbered > 0

    @property
    def progress(self) -> list[TrainingProgress]:
        """The steps and epochs in the entries' names."""
        return parse_names([entry.shown.name for entry in self.entries])

    @property
    def num_numbered(self) -> int:
        """How many entries have a step or an epoch in their name."""
        return sum(found.known for found in self.progress)

    def explain(self) -> str:
        """Explain why there is no checkpoint here, and what to do."""
        if self.foreign is not None:
            return f"{self.folder}: {self.foreign}."
        if self.runs:
            if all(parse_name(name).known for name in self.runs):
                pattern = self.folder.child("*").child("unet")
                return (
                    f"{self.folder}: its checkpoints contain several models ({few(self.runs)}). "
                    f"Give the folders of one of them by a pattern, such as '{pattern}'."
                )
            return (
                f"{self.folder}: its sub-folders are runs ({few(self.runs)}). Give one of them, or "
                "the checkpoints themselves."
            )
        text = f"{self.folder}: no checkpoint here or one folder down"
        if self.left_out:
            return text + f"; found {describe_left_out(self.left_out)}."
        files = ", ".join(typical_files())
        return text + f"; looked for {files}, *{', *'.join(file_suffixes())}."


def describe_left_out(left_out: dict[str, str]) -> str:
    """Names grouped by the reason they were left out for."""
    reasons: dict[str, list[str]] = {}
    for name, why in left_out.items():
        reasons.setdefault(why, []).append(name)
    return "; ".join(f"{few(names)} ({why})" for why, names in reasons.items())


def examine(folder: Location, depth: int = _DEPTH) -> FolderContents:
    """Look into a folder, and into sub-folders as deep as checkpoints may be nested.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from torch_lawa.checkpoints.storage.paths import LocalPath
    >>> run = Path(tempfile.mkdtemp())
    >>> for name in ("step-500/model/.metadata", "step-500/optimizer/.metadata", "best.pt"):
    ...     (run / name).parent.mkdir(parents=True, exist_ok=True)
    ...     (run / name).touch()
    >>> found = examine(LocalPath(run)).entries
    >>> [entry.location.path.relative_to(run).as_posix() for entry in found]
    ['best.pt', 'step-500/model']
    """
    children = folder.children()
    names = [child.name for child in children]
    contents = FolderContents(folder)
    found = format_of_folder(names)
    if found is not None:
        contents.own = tuple(name for name in found.folder_files if name in names)
        contents.exclusive = found.exclusive
    if contents.exclusive:
        return contents
    contents.foreign = None if contents.own else _foreign(names)
    if contents.foreign is not None:
        return contents
    visible = [child for child in children if not child.name.startswith(".")]
    is_folder = {child: child.is_folder() for child in visible}  # before any other is listed
    parts = found.folder_parts if found is not None else ""
    for child in visible:
        if not (is_folder[child] or child.name in contents.own or re.fullmatch(parts, child.name)):
            _add_file(contents, child)
    contents.series = any(parse_name(e.shown.name).known for e in contents.entries)
    if depth:
        _add_folders(contents, [child for child in visible if is_folder[child]], depth)
    if _TRACKER in names:
        _leave_out_unfinished(contents)
    return contents


def examine_run(folder: Location) -> FolderContents:
    """Look into a folder and, if its checkpoints are elsewhere, where frameworks store them.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from torch_lawa.checkpoints.storage.paths import LocalPath
    >>> run = Path(tempfile.mkdtemp())
    >>> (run / "checkpoints").mkdir()
    >>> (run / "checkpoints/epoch=3-step=400.ckpt").touch()
    >>> [entry.shown.name for entry in examine_run(LocalPath(run)).entries]
    ['epoch=3-step=400.ckpt']
    """
    contents = examine(folder)
    if contents.exclusive or contents.foreign is not None:
        return contents
    containers = _containers(folder)
    inner = [] if contents.num_numbered else [examine(location) for location in containers]
    holding = [found for found in inner if _holds(found)]
    numbered = [found for found in holding if found.num_numbered]
    chosen = numbered if _holds(contents) else numbered or holding
    if len(chosen) > 1:
        raise FormatError(
            f"{folder}: contains several runs ({few(c.folder for c in chosen)}). Give one of them."
        )
    if chosen:
        for name in (*contents.own, *(entry.shown.name for entry in contents.entries)):
            chosen[0].left_out[str(folder.child(name))] = f"not in {chosen[0].folder}"
        return chosen[0]
    if _holds(contents):
        for location in containers:
            contents.left_out[str(location)] = f"checkpoints are in {folder} itself"
        return contents
    return next((found for found in inner if found.left_out or found.runs), contents)


def _containers(folder: Location) -> list[Location]:
    """Sub-folders in which frameworks store a run's checkpoints."""
    found = [folder.child(name) for name in _RUN_FOLDERS]
    for logs in (folder, folder.child("lightning_logs")):
        if logs.is_folder():
            versions = [child for child in logs.children() if _VERSION.fullmatch(child.name)]
            found += [version.child("checkpoints") for version in versions]
    return [location for location in found if location.is_folder()]


def _is_container(name: str) -> bool:
    return name in (*_RUN_FOLDERS, "lightning_logs") or bool(_VERSION.fullmatch(name))


def _holds(contents: FolderContents) -> bool:
    return contents.checkpoint is not None or bool(contents.entries)


def _add_file(contents: FolderContents, file: Location) -> None:
    why = UNFINISHED if is_temporary(file.name) else reason_against(file.name)
    if why is None and file.is_file():
        contents.entries.append(Candidate(file, file))
    elif why == UNFINISHED or (why == SHARD and not contents.own):
        contents.left_out[file.name] = why
    elif (why is None or parse_name(file.name).known) and _is_dangling(file):
        contents.left_out[file.name] = "a link to nothing"


def _is_dangling(location: Location) -> bool:
    path = location.path if isinstance(location, LocalPath) else None
    return path is not None and path.is_symlink() and not path.exists()


def _add_folders(contents: FolderContents, folders: list[Location], depth: int) -> None:
    if depth == _DEPTH:
        folders = [folder for folder in folders if not _is_container(folder.name)]
    elif len(folders) > _MANY_FOLDERS:
        return
    if contents.own and not _may_be_run(contents.folder, folders):
        return
    num_files = len(contents.entries)
    for folder in folders:
        _add_folder(contents, folder, depth - 1)
    _leave_out_emas(contents)
    contents.series |= _name_steps([entry.shown for entry in contents.entries[num_files:]])


def _add_folder(contents: FolderContents, child: Location, depth: int) -> None:
    if is_temporary(child.name):
        contents.left_out[child.name] = UNFINISHED
        return
    if _NO_CHECKPOINTS.fullmatch(child.name):
        return
    try:
        inside = examine(child, depth)
    except OSError as error:
        # If a checkpoint cannot be read, `--last N` must not silently take an older one instead.
        # Other folders may be unreadable, and the run may be deleting an old checkpoint.
        forbidden = isinstance(error, PermissionError)
        if forbidden and parse_name(child.name).known:
            raise
        if not forbidden and not isinstance(error, FileNotFoundError | NotADirectoryError):
            raise
        contents.left_out[child.name] = f"cannot be listed: {error.strerror or error}"
        return
    if inside.checkpoint is not None:
        contents.entries.append(Candidate(inside.checkpoint, child))
        contents.left_out |= {
            f"{child.name}/{name}": why for name, why in inside.left_out.items() if why == _IS_EMA
        }
    elif inside.entries or inside.runs:
        contents.runs.append(child.name)
    elif inside.foreign is not None:
        contents.left_out[child.name] = inside.foreign
    elif inside.left_out:
        contents.left_out[child.name] = describe_left_out(inside.left_out)
    elif parse_name(child.name).known:
        contents.left_out[child.name] = "contains no weights"


def _leave_out_emas(contents: FolderContents) -> None:
    """Leave out `unet_ema` beside `unet`, as training scripts of Diffusers save both."""
    found = {entry.shown.name: entry for entry in contents.entries}
    for name, entry in found.items():
        model = found.get(name.removesuffix(_EMA)) if name.endswith(_EMA) else None
        if model is not None and _of_diffusers(model) and _of_diffusers(entry):
            contents.entries.remove(entry)
            contents.left_out[name] = _IS_EMA


def _of_diffusers(entry: Candidate) -> bool:
    children = entry.location.children() if entry.location.is_folder() else [entry.location]
    return any(weights_stem(child.name) == DIFFUSERS for child in children)


def _leave_out_unfinished(contents: FolderContents) -> None:
    """Leave out checkpoints that are newer than the last one that Megatron completed."""
    try:
        latest = int(contents.folder.child(_TRACKER).read_bytes()[:32])
    except ValueError:  # "release"
        return
    newer = [e for e in contents.entries if (parse_name(e.shown.name).step or 0) > latest]
    if len(newer) < len(contents.entries):
        for entry in newer:
            contents.entries.remove(entry)
            contents.left_out[entry.shown.name] = f"newer than {latest} in {_TRACKER}"


def _foreign(names: Iterable[str]) -> str | None:
    for pattern, why in _FOREIGN:
        if any(pattern.fullmatch(name) for name in names):
            return why
    return None


def _may_be_run(folder: Location, folders: Sequence[Location]) -> bool:
    """Whether a folder with weights of its own may be a run: its sub-folders' names have steps.

    In `checkpoint-500` of Transformers' Trainer, `global_step500` is the same checkpoint again.
    """
    numbered = parse_name(folder.name).known
    others = [f for f in folders if not (numbered and _DEEPSPEED.fullmatch(f.name))]
    return _name_steps(others)


def _name_steps(locations: Sequence[Location]) -> bool:
    """Whether names beside a folder's own weights have steps."""
    found = parse_names([location.name for location in locations], alone=False)
    return any(progress.known for progress in found)
