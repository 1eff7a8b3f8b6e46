"""What the name of a file or folder says: its step and epoch, or that it is not a checkpoint.

A number that may be a size, a version or a seed is not taken for a step.
"""

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from torch_lawa.checkpoints.formats.base import TrainingProgress
from torch_lawa.checkpoints.formats.registry import file_suffixes
from torch_lawa.checkpoints.storage.atomic import TEMPORARY

__all__ = [
    "SHARD",
    "UNFINISHED",
    "is_temporary",
    "parse_name",
    "parse_names",
    "reason_against",
    "stem_of",
]

# A labelled number has no letter or digit before the label or after the number, and no second
# number right after it: `step-1k`, `step_1_000` and `step=1.5` are ambiguous.
_LABELLED = r"(?<![^\W_])(?:{})[ _=.-]?([0-9]{{1,18}})(?![^\W_]|[\W_][0-9])"
_STEP = re.compile(_LABELLED.format(r"(?:global)?steps?|iter(?:ation)?s?|batch|ba"), re.IGNORECASE)
_EPOCH = re.compile(_LABELLED.format(r"epochs?|ep"), re.IGNORECASE)
# `checkpoint` is a weaker label than `step`, so it only counts at the end of a name:
# `checkpoint-500-merged` is not the checkpoint of step 500.
_CHECKPOINT = re.compile(_LABELLED.format(r"checkpoint|ckpt|chkpt") + r"$", re.IGNORECASE)
# fairseq's epoch and update. Beside such names, its `checkpoint3` is the end of epoch 3.
_EPOCH_UPDATE = re.compile(r"checkpoint_([0-9]{1,18})_([0-9]{1,18})")
_BARE = re.compile(r"(?P<rest>(?:.*?(?P<before>[^\W_]+)[_.=-])?)(?P<number>[0-9]{1,18})", re.DOTALL)
_OTHER_COUNTS = frozenset(
    ("fold", "fsdp", "part", "rank", "run", "seed", "shard", "top", "trial", "version", "worker")
)

UNFINISHED = "unfinished"
SHARD = "a shard: give its folder, which must contain the index"
# What trainers call a checkpoint while they write it; `tmp-checkpoint-500` is Transformers'.
_TEMPORARY = re.compile(
    r"tmp[-_.].*|.*[-_.]te?mp|.*\.(partial|incomplete)|.*\.orbax-checkpoint-tmp.*", re.IGNORECASE
)
_SHARD = re.compile(r"[-_.][0-9]+-of-[0-9]+$")
_NOT_WEIGHTS = (
    *("optimizer.*", "optimizer_*", "optim.*", "scheduler.*", "scheduler_*", "scaler.*"),
    *("distrib_optim.pt", "sampler.*", "sampler_*", "dl_state_dict*"),
    *("rng_state*", "random_states*", "training_args.bin", "recipe_state.pt"),
    *("trainer_state.json", "*.index.json", "*tfevents*"),
)


def stem_of(name: str) -> str:
    """A name without the suffixes of checkpoints.

    >>> stem_of("checkpoint-12.pth.tar"), stem_of("epoch=3-val_loss=0.25.ckpt"), stem_of("v1.5")
    ('checkpoint-12', 'epoch=3-val_loss=0.25', 'v1.5')
    """
    suffixes = file_suffixes()
    while name.lower().endswith(suffixes):
        name = name[: name.rindex(".")]
    return name


def parse_name(name: str) -> TrainingProgress:
    """The step and epoch that a name states on its own.

    >>> parse_name("epoch=3-step=400.ckpt"), parse_name("iter_0000500")
    (TrainingProgress(step=400, epoch=3), TrainingProgress(step=500, epoch=None))
    >>> parse_name("checkpoint_3_1500.pt")
    TrainingProgress(step=1500, epoch=3)
    >>> parse_name("llama-3-8b"), parse_name("step-1k")
    (TrainingProgress(step=None, epoch=None), TrainingProgress(step=None, epoch=None))
    """
    stem = stem_of(name)
    if pair := _EPOCH_UPDATE.fullmatch(stem):
        return TrainingProgress(step=int(pair[2]), epoch=int(pair[1]))
    steps = _STEP.findall(stem) or _CHECKPOINT.findall(stem)
    return TrainingProgress(step=_only(steps), epoch=_only(_EPOCH.findall(stem)))


def parse_names(names: Sequence[str], *, alone: bool = True) -> list[TrainingProgress]:
    """The step and epoch of each name in one folder.

    Where no name states one, a bare number at the end is a step, provided that the names are equal
    before it. With `alone` this also holds for a single name with no other beside it.

    >>> [p.step for p in parse_names(["model_0500.pt", "model_1000.pt", "model_best.pt"])]
    [500, 1000, None]
    >>> [p.step for p in parse_names(["vit-16.pt", "resnet-50.pt"])]
    [None, None]
    """
    spelled = [parse_name(name) for name in names]
    if any(found.known for found in spelled):
        return _with_epochs(names, spelled)
    bare = [_bare_number(stem_of(name)) for name in names]
    rests = [found[0] for found in bare if found is not None]
    enough = len(rests) > 1 or rests == [""] or (alone and len(names) == 1)
    if len(set(rests)) != 1 or not enough:
        return spelled
    return [
        TrainingProgress() if found is None else TrainingProgress(step=found[1]) for found in bare
    ]


def reason_against(name: str) -> str | None:
    """Why a file of this name is not a checkpoint by itself; None if it may be one.

    >>> reason_against("optimizer.pt"), reason_against("model-00001-of-00003.safetensors")
    ('not weights', 'a shard: give its folder, which must contain the index')
    >>> reason_against("model.safetensors") is None
    True
    """
    lowered = name.lower()
    if lowered.endswith(TEMPORARY):
        return UNFINISHED
    if any(fnmatchcase(lowered, pattern) for pattern in _NOT_WEIGHTS):
        return "not weights"
    if _SHARD.search(stem_of(lowered)):
        return SHARD
    if not lowered.endswith(file_suffixes()):
        return f"not a checkpoint by its name; known are {', '.join(file_suffixes())} and folders"
    return None


def is_temporary(name: str) -> bool:
    """Whether a name is one that checkpoints have while they are being written.

    >>> is_temporary("tmp-checkpoint-500"), is_temporary("checkpoint-500")
    (True, False)
    """
    return _TEMPORARY.fullmatch(stem_of(name)) is not None


def _with_epochs(names: Sequence[str], spelled: list[TrainingProgress]) -> list[TrainingProgress]:
    """Beside `checkpoint_3_1500` the 3 of `checkpoint3` is an epoch, not a step."""
    stems = [stem_of(name) for name in names]
    if not any(_EPOCH_UPDATE.fullmatch(stem) for stem in stems):
        return spelled
    return [
        TrainingProgress(epoch=found.step) if _CHECKPOINT.fullmatch(stem) else found
        for stem, found in zip(stems, spelled, strict=True)
    ]


def _only(numbers: Iterable[str]) -> int | None:
    """The number, unless there are several different ones."""
    values = {int(number) for number in numbers}
    return values.pop() if len(values) == 1 else None


def _bare_number(stem: str) -> tuple[str, int] | None:
    """The number that is the last token of a stem, and the text before it."""
    found = _BARE.fullmatch(stem)
    if found is None:
        return None
    rest, before = found["rest"], (found["before"] or "").lower()
    decimal = rest.endswith(".") and before[-1:].isdigit()  # v1.5
    if decimal or before.isdigit() or before in _OTHER_COUNTS:
        return None
    return rest, int(found["number"])
