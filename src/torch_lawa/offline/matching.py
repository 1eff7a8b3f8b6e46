"""Do these checkpoints fit together, and what becomes of each tensor?"""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from torch_lawa.checkpoints.formats.base import Checkpoint, TensorSpec
from torch_lawa.errors import ConfigError, LayoutError
from torch_lawa.mean.dtypes import DTYPES, averageable

__all__ = ["Buffers", "PlannedTensor", "Rule", "match_tensors", "shared_aliases"]

Rule = Literal["average", "newest"]
Buffers = Literal["newest", "average"]

# The running statistics of BatchNorm, by the names PyTorch gives them. Averaged weights want them
# re-estimated; until then the newest are the honest choice, and the online averager's.
_STATISTICS = ("running_mean", "running_var")


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor of the output: what it is read as, written as, and made by."""

    name: str
    source: TensorSpec
    target: TensorSpec
    rule: Rule
    written: str  # its name in the output


def match_tensors(
    checkpoints: Sequence[Checkpoint],
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    dtype: str | None = None,
    buffers: Buffers = "newest",
    strip_prefix: str = "",
) -> list[PlannedTensor]:
    """The tensors of the output, in the newest checkpoint's order; every checkpoint must agree."""
    newest = checkpoints[-1]
    wanted = [name for name in newest.tensors if _wanted(name, include, exclude)]
    everywhere = {name for checkpoint in checkpoints for name in checkpoint.tensors}
    for pattern in (*include, *exclude):
        if not any(fnmatchcase(name, pattern) for name in everywhere):
            raise ConfigError(f"no tensor of {newest.location} matches the pattern {pattern!r}.")
    if not wanted:
        raise ConfigError("the patterns leave no tensor to write.")
    for other in checkpoints[:-1]:
        _compare(other, newest, wanted, include, exclude)
    for name in wanted:
        if not name.startswith(strip_prefix) or name == strip_prefix:
            raise ConfigError(
                f"tensor {name!r} of {newest.location} does not begin with {strip_prefix!r}: leave "
                f"such tensors out with --include '{strip_prefix}*', or keep the prefix."
            )
    return [_planned(newest, name, dtype, buffers, strip_prefix) for name in wanted]


def shared_aliases(
    checkpoints: Sequence[Checkpoint], tensors: Sequence[PlannedTensor], strip_prefix: str = ""
) -> dict[str, str]:
    """Ties that every checkpoint has, among the tensors that are written, by written names."""
    written = {t.name: t.written for t in tensors}
    first, *others = [c.aliases for c in checkpoints]
    return {
        name.removeprefix(strip_prefix): written[kept]
        for name, kept in first.items()
        if kept in written and name not in written and all(o.get(name) == kept for o in others)
    }


def _wanted(name: str, include: Sequence[str], exclude: Sequence[str]) -> bool:
    if include and not any(fnmatchcase(name, p) for p in include):
        return False
    return not any(fnmatchcase(name, p) for p in exclude)


def _compare(
    other: Checkpoint,
    newest: Checkpoint,
    wanted: Sequence[str],
    include: Sequence[str],
    exclude: Sequence[str],
) -> None:
    ways_out = "Average checkpoints of one model, or leave tensors out with --exclude."
    for name in wanted:
        if name not in other.tensors:
            tied = other.aliases.get(name)
            why = f"there it is tied to {tied!r}" if tied else "it has no tensor of that name"
            raise LayoutError(
                f"{other.location}: tensor {name!r} of {newest.file_of(name)} is missing: {why}. "
                f"{ways_out}"
            )
        if other.tensors[name] != newest.tensors[name]:
            raise LayoutError(
                f"{other.file_of(name)}: tensor {name!r} is {other.tensors[name]}, but "
                f"{newest.tensors[name]} in {newest.file_of(name)}. {ways_out}"
            )
    known = set(newest.tensors)
    for name in other.tensors:
        if name not in known and _wanted(name, include, exclude):
            raise LayoutError(
                f"{other.file_of(name)}: tensor {name!r} is not in {newest.location}. {ways_out}"
            )


def _planned(
    newest: Checkpoint, name: str, dtype: str | None, buffers: Buffers, strip_prefix: str
) -> PlannedTensor:
    source, written = newest.tensors[name], name.removeprefix(strip_prefix)
    if DTYPES[source.dtype].kind == "opaque":
        raise LayoutError(
            f"{newest.file_of(name)}: tensor {name!r} is {source.dtype}, which has no mean (a "
            "scale or a packed number). Leave it out with --exclude, or average before quantising."
        )
    if not averageable(source.dtype):
        return PlannedTensor(name, source, source, "newest", written)
    target = source
    if dtype is not None and DTYPES[source.dtype].kind == "float":
        target = TensorSpec(dtype, source.shape)
    is_statistic = name.rpartition(".")[2] in _STATISTICS
    rule: Rule = "newest" if is_statistic and buffers == "newest" else "average"
    return PlannedTensor(name, source, target, rule, written)
