"""The checkpoints that inputs name, oldest first, and the selection of some of them by step.

What was decided or left out on the way is in the notes of a `Discovery`.
"""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from torch_lawa.checkpoints.find.expand import expand
from torch_lawa.checkpoints.find.folders import Candidate
from torch_lawa.checkpoints.find.step_names import parse_name, parse_names
from torch_lawa.checkpoints.formats.base import TrainingProgress
from torch_lawa.checkpoints.formats.registry import open_checkpoint
from torch_lawa.checkpoints.storage.paths import Location
from torch_lawa.errors import ConfigError, FormatError, LawaError
from torch_lawa.schedule import check_share, num_within
from torch_lawa.units import few

__all__ = ["Discovery", "FoundCheckpoint", "find_checkpoints", "require_number", "select"]

Number = Literal["step", "epoch"]
_NUMBERS: tuple[Number, ...] = ("step", "epoch")  # in the order of preference
_WAYS_OUT = "Give a pattern that matches only some of them, or the checkpoints themselves."


@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint that was found and is not open yet.

    >>> from torch_lawa.checkpoints.storage.paths import LocalPath
    >>> FoundCheckpoint(LocalPath("run/checkpoint-500"), step=500, epoch=None).label
    'step 500'
    """

    location: Location
    step: int | None
    epoch: int | None

    @property
    def label(self) -> str:
        """Its step, its epoch, or its name, for messages."""
        if self.step is not None:
            return f"step {self.step}"
        return self.location.name if self.epoch is None else f"epoch {self.epoch}"


@dataclass(frozen=True)
class Discovery:
    """The checkpoints that were found, oldest first, and notes on what was decided."""

    found: tuple[FoundCheckpoint, ...]
    ordered_by: Literal["step", "epoch", "given"]
    is_run: bool  # from a run's folder, so a selection is needed
    notes: tuple[str, ...] = ()

    @property
    def numbers(self) -> list[int]:
        """The steps or epochs that they are ordered by; empty if they are in the order given."""
        if self.ordered_by == "given":
            return []
        return [n for n in _numbers(self.found, self.ordered_by) if n is not None]


def find_checkpoints(
    inputs: Sequence[str | os.PathLike[str]], *, key: str | None = None
) -> Discovery:
    """Find the checkpoints that files, folders, patterns, URLs or a run's folder name.

    1. Expand the inputs: patterns to their matches, a run's folder to its checkpoints. Folders are
       searched where frameworks store checkpoints; other files are left out with a note.
    2. Read the step and epoch of each from its name. Where the names have none, open the
       checkpoints and read them from the contents (`key`: see `open_checkpoint`), or for inputs
       such as `checkpoint-500/unet` from the name of the folder that they are in.
    3. Order them by step, else by epoch, else as given.

    `select` then chooses some of them.

    >>> import tempfile
    >>> from pathlib import Path
    >>> run = Path(tempfile.mkdtemp())
    >>> for name in ("step-1000.pt", "step-500.pt", "best.pt", "optimizer.pt"):
    ...     (run / name).touch()
    >>> discovery = find_checkpoints([run])
    >>> [found.label for found in discovery.found]
    ['step 500', 'step 1000']
    >>> print(*discovery.notes, sep="\\n")
    left out: best.pt (no step or epoch in the name)
    """
    expansion = expand(inputs)
    if expansion.run is not None:
        return _order_run(expansion.run, expansion.candidates, expansion.notes, key)
    return _order_given(expansion.candidates, expansion.notes, key)


def _order_run(
    run: Location, candidates: list[Candidate], notes: list[str], key: str | None
) -> Discovery:
    progress = parse_names([candidate.shown.name for candidate in candidates])
    where = "in the name"
    # A name without a step beside others with one is a copy or the best one: not worth opening.
    if not any(found.known for found in progress):
        progress = [_read_progress(candidate.location, key) for candidate in candidates]
        where = "in the name or contents"
    pairs = list(zip(candidates, progress, strict=True))
    unnumbered = [c.shown.name for c, found in pairs if not found.known]
    numbered = [(c, found) for c, found in pairs if found.known]
    if not numbered:
        raise FormatError(
            f"{run}: none of {few(unnumbered)} has a step or epoch {where}, so their order is not "
            "known. Give them one by one, oldest first."
        )
    if where != "in the name":
        notes.append("steps and epochs were read from the checkpoints: their names have none")
    if unnumbered:
        notes.append(f"left out: {few(unnumbered)} (no step or epoch {where})")
    by = _order_of(run, numbered)
    found = _sorted([FoundCheckpoint(c.location, p.step, p.epoch) for c, p in numbered], by)
    _refuse_ties(run, found, by)
    return Discovery(found, by, is_run=True, notes=tuple(notes))


def _order_of(run: Location, numbered: list[tuple[Candidate, TrainingProgress]]) -> Number:
    by_step = [entry.shown.name for entry, found in numbered if found.step is not None]
    by_epoch = [entry.shown.name for entry, found in numbered if found.epoch is not None]
    if len(by_step) == len(numbered):
        return "step"
    if len(by_epoch) == len(numbered):
        return "epoch"
    raise FormatError(
        f"{run}: some checkpoints have a step ({few(by_step)}) and some an epoch "
        f"({few(by_epoch)}), so their order is not known. {_WAYS_OUT}"
    )


def _refuse_ties(run: Location, found: Sequence[FoundCheckpoint], by: Number) -> None:
    for older, newer in pairwise(found):
        number = _number(newer, by)
        if _number(older, by) == number:
            raise FormatError(
                f"{run}: {older.location} and {newer.location} are both {by} {number}. {_WAYS_OUT}"
            )


def _order_given(candidates: list[Candidate], notes: list[str], key: str | None) -> Discovery:
    progress = parse_names([candidate.shown.name for candidate in candidates], alone=False)
    for i, candidate in enumerate(candidates):
        if not progress[i].known:
            progress[i] = _read_progress(candidate.location, key)
        if not progress[i].known:  # checkpoint-500/unet
            progress[i] = parse_name(candidate.shown.parent.name)
    pairs = zip(candidates, progress, strict=True)
    found = tuple(FoundCheckpoint(c.location, p.step, p.epoch) for c, p in pairs)
    for by in _NUMBERS:
        numbers = _numbers(found, by)
        if None in numbers or len(set(numbers)) < len(numbers):
            continue
        ordered = _sorted(found, by)
        if ordered != found:
            notes.append(f"ordered by {by}, which is not the order given")
        return Discovery(ordered, by, is_run=False, notes=tuple(notes))
    if len(found) > 1:
        notes.append(f"in the order given, oldest first: {_why_unordered(progress)}")
    return Discovery(found, "given", is_run=False, notes=tuple(notes))


def _why_unordered(progress: list[TrainingProgress]) -> str:
    if not any(p.known for p in progress):
        return "no step or epoch in the names or contents"
    if any(all(getattr(p, by) is not None for p in progress) for by in _NUMBERS):
        return "several have the same step or epoch"
    return "not all have a step, nor an epoch"


def _read_progress(location: Location, key: str | None) -> TrainingProgress:
    try:
        with open_checkpoint(location, key=key) as checkpoint:
            return checkpoint.progress
    except LawaError as error:
        raise type(error)(
            f"{error} (It was opened to read its step, which is not in its name.)"
        ) from error


def _number(found: FoundCheckpoint, by: Number) -> int | None:
    return found.step if by == "step" else found.epoch


def _numbers(found: Sequence[FoundCheckpoint], by: Number) -> list[int | None]:
    return [_number(each, by) for each in found]


def _sorted(found: Sequence[FoundCheckpoint], by: Number) -> tuple[FoundCheckpoint, ...]:
    """Oldest first; all must have that number."""
    return tuple(sorted(found, key=lambda each: _number(each, by) or 0))


def select(
    discovery: Discovery,
    *,
    last: int | None = None,
    horizon: float | None = None,
    at: int | None = None,
    start: int | None = None,
    stop: int | None = None,
    every: int | None = None,
) -> Discovery:
    """Select checkpoints by the number (step or epoch) that they are ordered by.

    First those from `start` to `stop`, both included, whose number is a multiple of `every`; of
    these the ones up to `at`, which must exist; of these the `last` newest, or those within the
    last share `horizon` of the steps up to the newest (see `num_within`).

    >>> from torch_lawa.checkpoints.storage.paths import LocalPath
    >>> run = [FoundCheckpoint(LocalPath(f"step-{n}.pt"), n, None) for n in range(500, 5001, 500)]
    >>> discovery = Discovery(tuple(run), "step", is_run=True)
    >>> select(discovery, last=3, at=4000, every=1000).numbers
    [2000, 3000, 4000]
    >>> select(discovery, horizon=0.25, at=4000).numbers
    [3500, 4000]
    """
    _check_values({"last": last, "at": at, "from": start, "to": stop, "every": every})
    if start is not None and stop is not None and start > stop:
        raise ConfigError(f"--from {start} --to {stop}: --from must not be greater than --to.")
    if horizon is not None:
        check_share("horizon", horizon)
        if last is not None:
            raise ConfigError(f"--last {last} and --horizon {horizon:g}: pass only one.")
    found = discovery.found
    if not (horizon is at is start is stop is every is None):
        found = _select_numbers(discovery, at, start, stop, every or 1)
    if last is not None and last > len(found):
        count = f"{len(found)} checkpoints were" if len(found) > 1 else "one checkpoint was"
        raise ConfigError(
            f"--last {last}, but only {count} found ({few(each.label for each in found)}). Use "
            f"--last {len(found)}{' or fewer' * (len(found) > 1)}."
        )
    if horizon is not None:
        last = num_within(replace(discovery, found=found).numbers, horizon)
    chosen = replace(discovery, found=found[-(last or 0) :])
    if horizon is not None:
        return chosen  # whatever their spacing
    return replace(chosen, notes=(*discovery.notes, *_describe_gaps(chosen)))


def _select_numbers(
    discovery: Discovery, at: int | None, start: int | None, stop: int | None, every: int
) -> tuple[FoundCheckpoint, ...]:
    if discovery.ordered_by == "given":
        raise ConfigError(
            "these checkpoints have no step or epoch to select by (they are in the order given). "
            "Give only the ones to average."
        )
    kept = [
        (each, number)
        for each, number in zip(discovery.found, discovery.numbers, strict=True)
        if number >= (start or 0) and (stop is None or number <= stop) and number % every == 0
    ]
    if not kept:
        raise ConfigError(f"the selection matches no checkpoint; found {_range(discovery)}.")
    if at is not None:
        require_number(discovery.ordered_by, [number for _, number in kept], at)
    return tuple(each for each, number in kept if at is None or number <= at)


def require_number(ordered_by: str, numbers: Sequence[int], at: int) -> None:
    """Raise if no checkpoint has this step or epoch."""
    if at not in numbers:
        nearest = sorted(sorted(numbers, key=lambda n: abs(n - at))[:2])
        raise ConfigError(
            f"--at {at}: no checkpoint has {ordered_by} {at}. The nearest: {few(nearest)}."
        )


def _check_values(values: dict[str, int | None]) -> None:
    for name, value in values.items():
        least = 1 if name in ("last", "every") else 0  # some count epochs from 0
        if value is not None and not hasattr(value, "__index__"):
            raise ConfigError(f"--{name} {value!r}: it must be a whole number.")
        if value is not None and value < least:
            raise ConfigError(f"--{name} {value}: it must be at least {least}.")


def _range(discovery: Discovery) -> str:
    numbers = discovery.numbers
    if len(numbers) == 1:
        return discovery.found[0].label
    return f"{len(numbers)} from {discovery.ordered_by} {numbers[0]} to {numbers[-1]}"


def _describe_gaps(discovery: Discovery) -> list[str]:
    """Notes on uneven spacing: a window is meant to be evenly spaced."""
    pairs = list(pairwise(discovery.numbers))
    gaps = Counter(newer - older for older, newer in pairs)
    if len(gaps) < 2:
        return []
    usual, count = gaps.most_common(1)[0]
    if 2 * count <= len(pairs):
        return [f"uneven {discovery.ordered_by}s: gaps of {min(gaps)} to {max(gaps)}"]
    others = few((f"{b - a} between {a} and {b}" for a, b in pairs if b - a != usual), limit=3)
    return [f"uneven {discovery.ordered_by}s: mostly {usual} apart, but {others}"]
