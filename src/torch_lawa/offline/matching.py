"""Match the tensors of several checkpoints and decide how each tensor of the output is made."""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from torch_lawa.checkpoints.formats.base import Checkpoint, TensorSpec
from torch_lawa.errors import ConfigError, LayoutError
from torch_lawa.mean.dtypes import DTYPES, averageable, is_statistic
from torch_lawa.offline.options import AverageOptions

__all__ = ["PlannedTensor", "Rule", "match_tensors", "shared_aliases"]

Rule = Literal["average", "newest"]


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor of the output: its dtype and shape as read and as written, and how it is made."""

    name: str
    source: TensorSpec
    target: TensorSpec
    rule: Rule
    written: str  # its name in the output


def match_tensors(
    checkpoints: Sequence[Checkpoint], options: AverageOptions
) -> list[PlannedTensor]:
    """The tensors of the output, in the newest checkpoint's order; all checkpoints must match."""
    newest = checkpoints[-1]
    chosen = [name for name in newest.tensors if options.includes(name)]
    everywhere = {name for c in checkpoints for name in c.tensors} if options.patterns else ()
    for pattern in options.patterns:
        if not any(fnmatchcase(name, pattern) for name in everywhere):
            raise ConfigError(
                f"no tensor of {newest.location} matches the pattern {pattern!r}. "
                f"`lawa inspect {newest.location} --tensors` lists their names."
            )
    if not chosen:
        raise ConfigError("--include and --exclude leave no tensor to write.")
    for other in checkpoints[:-1]:
        if other.tensors is not newest.tensors:  # files with the same header share them
            _compare(other, newest, chosen, options)
    prefix = options.strip_prefix
    for name in chosen:
        if prefix and (not name.startswith(prefix) or name == prefix):
            raise ConfigError(
                f"tensor {name!r} of {newest.location} does not begin with {prefix!r}. Leave such "
                f"tensors out with --include '{prefix}*', or do without --strip-prefix."
            )
    return [_planned(newest, name, options) for name in chosen]


def shared_aliases(
    checkpoints: Sequence[Checkpoint], tensors: Sequence[PlannedTensor], strip_prefix: str
) -> dict[str, str]:
    """Tied names that all checkpoints share, among the tensors that are written."""
    written = {t.name: t.written for t in tensors}
    first, *others = [c.aliases for c in checkpoints]
    return {
        name.removeprefix(strip_prefix): written[kept]
        for name, kept in first.items()
        if kept in written and name not in written and all(o.get(name) == kept for o in others)
    }


def _compare(
    other: Checkpoint, newest: Checkpoint, chosen: Sequence[str], options: AverageOptions
) -> None:
    advice = "Average checkpoints of one model, or leave tensors out with --exclude."
    for name in chosen:
        if name not in other.tensors:
            tied = other.aliases.get(name)
            why = f"it is tied to {tied!r} there" if tied else "it has no tensor of that name"
            raise LayoutError(
                f"{other.location}: tensor {name!r} of {newest.file_of(name)} is missing: {why}. "
                f"{advice}"
            )
        if other.tensors[name] != newest.tensors[name]:
            raise LayoutError(
                f"{other.file_of(name)}: tensor {name!r} is {other.tensors[name]}, but "
                f"{newest.tensors[name]} in {newest.file_of(name)}. {advice}"
            )
    known = set(newest.tensors)
    for name in other.tensors:
        if name not in known and options.includes(name):
            tied = newest.aliases.get(name)
            why = f"tied to {tied!r} in {newest.location}, but not here" if tied else ""
            raise LayoutError(
                f"{other.file_of(name)}: tensor {name!r} is "
                f"{why or f'not in {newest.location}'}. {advice}"
            )


def _planned(newest: Checkpoint, name: str, options: AverageOptions) -> PlannedTensor:
    source, written = newest.tensors[name], name.removeprefix(options.strip_prefix)
    if DTYPES[source.dtype].kind == "opaque":
        raise LayoutError(
            f"{newest.file_of(name)}: tensor {name!r} is {source.dtype}, which has no mean (a "
            "scale or packed values). Leave it out with --exclude, or average before quantising."
        )
    if not averageable(source.dtype):
        return PlannedTensor(name, source, source, "newest", written)
    target = source
    if options.dtype is not None and DTYPES[source.dtype].kind == "float":
        target = TensorSpec(options.dtype, source.shape)
    # The same rule as in the online averager.
    rule: Rule = "newest" if is_statistic(name) and options.buffers == "newest" else "average"
    return PlannedTensor(name, source, target, rule, written)
