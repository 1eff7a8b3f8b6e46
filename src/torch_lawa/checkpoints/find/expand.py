"""From what a user typed (paths, URLs, patterns, a run's folder) to the checkpoints that are meant.

No order yet, and no numbers: `discovery` sees to those.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from torch_lawa.checkpoints.find.folders import Contents, Entry, describe_left_out, examine_run
from torch_lawa.checkpoints.find.step_names import (
    UNFINISHED,
    few,
    is_temporary,
    parse_name,
    reason_against,
)
from torch_lawa.checkpoints.formats.base import Progress
from torch_lawa.checkpoints.storage.atomic import TEMPORARY
from torch_lawa.checkpoints.storage.paths import LocalPlace, Place, parse_place
from torch_lawa.errors import ConfigError, FormatError

__all__ = ["Gathered", "gather"]


@dataclass(frozen=True)
class Gathered:
    """Every checkpoint once; `run` is the folder that was expanded to find them, if one was."""

    entries: list[Entry]
    run: Place | None
    notes: list[str]


def gather(inputs: Sequence[str | os.PathLike[str]]) -> Gathered:
    """Expand the inputs, in the order given; a pattern's matches are in the order of their names.

    >>> import tempfile
    >>> from pathlib import Path
    >>> run = Path(tempfile.mkdtemp())
    >>> for name in ("step-500.pt", "step-1000.pt", "optimizer.pt"):
    ...     (run / name).touch()
    >>> gathered = gather([run / "*.pt"])
    >>> [entry.place.name for entry in gathered.entries], gathered.run
    (['step-500.pt', 'step-1000.pt'], None)
    """
    if isinstance(inputs, str | os.PathLike) or not inputs:
        raise ConfigError(
            f"inputs={inputs!r}: give a list with a run's folder, or with checkpoints or patterns."
        )
    notes: list[str] = []
    typed: list[Entry | Contents] = []
    everything: list[Entry | Contents] = []
    for text in inputs:
        place = parse_place(text)
        if any(c in os.fspath(text) for c in "*?[") and not place.exists():
            everything += _match(place, notes)
        else:
            typed.append(_look(place, notes))
            everything.append(typed[-1])
    runs = [found for found in everything if isinstance(found, Contents)]
    entries = [found for found in everything if isinstance(found, Entry)]
    _refuse_twice([found for found in typed if isinstance(found, Entry)])
    if not runs:
        return Gathered(_once(entries, notes), None, notes)
    if len(everything) > 1:
        raise ConfigError(
            f"{runs[0].folder} is a run's folder, and {len(everything) - 1} more inputs are given. "
            "Give one run's folder alone, or checkpoints and patterns alone "
            f"(such as {runs[0].folder.child('*')})."
        )
    notes += _describe_run(runs[0])
    return Gathered(_once(runs[0].entries, notes), runs[0].folder, notes)


def _match(pattern: Place, notes: list[str]) -> list[Entry | Contents]:
    """The checkpoints that match; what is none is left out with a note."""
    found: list[Entry | Contents] = []
    others: dict[str, str] = {}
    errors: list[str] = []
    for place in sorted(pattern.glob(), key=_natural):
        why = None if place.is_folder() else reason_against(place.name)
        why = UNFINISHED if is_temporary(place.name) else why
        if why is not None:
            others[place.name] = why
            continue
        try:
            found.append(_look(place, notes))
        except FormatError as error:
            errors.append(str(error))
    if not found:
        why = " ".join(errors[:1]) or (f"It matches {describe_left_out(others)}." if others else "")
        raise FormatError(f"{pattern}: no checkpoint matches this pattern. {why}".rstrip())
    notes += [f"left out: {describe_left_out(others)}"] if others else []
    notes += [f"left out: {text}" for text in errors]
    return found


def _look(place: Place, notes: list[str]) -> Entry | Contents:
    """One checkpoint, or what lies in a run's folder."""
    if not place.is_folder():
        why = reason_against(place.name) if place.is_file() else "there is no such file or folder"
        if why is not None:
            raise FormatError(f"{place}: {why}.")
        return Entry(place, place)
    if place.name.endswith(TEMPORARY):
        raise FormatError(f"{place}: unfinished; whatever wrote it was stopped. Write it again.")
    contents = examine_run(place)
    if contents.is_run:
        return contents
    if contents.checkpoint is None:
        raise FormatError(contents.explain())
    beside = [entry.shown.name for entry in contents.entries]
    if contents.checkpoint != place:
        notes.append(f"{place}: taken as one checkpoint, {contents.checkpoint}")
    elif beside:
        notes.append(
            f"{place}: taken as one checkpoint ({contents.own[0]}); not looked at: {few(beside)}"
        )
    if contents.left_out:
        notes.append(f"left out: {describe_left_out(contents.left_out)}")
    return Entry(contents.checkpoint, place)


def _describe_run(contents: Contents) -> list[str]:
    notes = []
    if contents.own:
        notes.append(
            f"{contents.folder}: a run's folder; the weights in the folder itself "
            f"({contents.own[0]}) are left out"
        )
    if contents.runs:
        notes.append(f"left out: {few(contents.runs)} (several checkpoints inside)")
    if contents.left_out:
        notes.append(f"left out: {describe_left_out(contents.left_out)}")
    return notes


def _refuse_twice(entries: list[Entry]) -> None:
    seen: dict[str, Entry] = {}
    for entry in entries:
        first = seen.setdefault(_identity(entry.place), entry)
        if first is not entry:
            other = "" if first.shown == entry.shown else f", also as {first.shown}"
            raise ConfigError(f"{entry.shown}: given twice{other}. Give each checkpoint once.")


def _once(entries: list[Entry], notes: list[str]) -> list[Entry]:
    """Each checkpoint under one name: one that says its step, and rather not a link's."""
    names: dict[str, list[Entry]] = {}
    for entry in entries:
        names.setdefault(_identity(entry.place), []).append(entry)
    kept = []
    for same in names.values():
        same.sort(key=lambda e: (parse_name(e.shown.name) == Progress(), _is_link(e.shown)))
        kept.append(same[0])
        others = {str(entry.shown): None for entry in same[1:] if entry.shown != same[0].shown}
        if others:
            notes.append(f"counted once: {same[0].shown} is also {few(others)}")
        elif len(same) > 1:
            notes.append(f"counted once: {same[0].shown} was matched {len(same)} times")
    return kept


def _identity(place: Place) -> str:
    return os.path.realpath(place.path) if isinstance(place, LocalPlace) else str(place)


def _is_link(place: Place) -> bool:
    return isinstance(place, LocalPlace) and place.path.is_symlink()


def _natural(place: Place) -> list[tuple[int, str]]:
    """So that `step-1000` comes after `step-500`."""
    parts = re.split(r"([0-9]+)", str(place))
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]
