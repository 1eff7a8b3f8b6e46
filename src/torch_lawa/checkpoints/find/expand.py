"""Inputs as a user types them (paths, URLs, patterns, a run's folder), expanded to candidates.

Candidates have no order and no steps yet: `find_checkpoints` adds those.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from torch_lawa.checkpoints.find.folders import (
    Candidate,
    FolderContents,
    describe_left_out,
    examine_run,
)
from torch_lawa.checkpoints.find.step_names import (
    UNFINISHED,
    is_temporary,
    parse_name,
    reason_against,
)
from torch_lawa.checkpoints.formats.base import is_plain_name
from torch_lawa.checkpoints.storage.atomic import TEMPORARY
from torch_lawa.checkpoints.storage.paths import LocalPath, Location, parse_location
from torch_lawa.errors import ConfigError, FormatError
from torch_lawa.units import counted, few

__all__ = ["POINTERS", "expand"]

POINTERS = ("latest", "latest_universal")  # with the name of DeepSpeed's newest checkpoint
_MAX_NAME = 4096


@dataclass(frozen=True)
class Expansion:
    """Every candidate once; `run` is the run's folder that was expanded, if one was given."""

    candidates: list[Candidate]
    run: Location | None
    notes: list[str]


def expand(inputs: Sequence[str | os.PathLike[str]]) -> Expansion:
    """Expand the inputs, in the order given; a pattern's matches are in the order of their names.

    >>> import tempfile
    >>> from pathlib import Path
    >>> run = Path(tempfile.mkdtemp())
    >>> for name in ("step-500.pt", "step-1000.pt", "optimizer.pt"):
    ...     (run / name).touch()
    >>> found = expand([run / "*.pt"])
    >>> [candidate.location.name for candidate in found.candidates], found.run
    (['step-500.pt', 'step-1000.pt'], None)
    """
    if isinstance(inputs, str | os.PathLike) or not inputs:
        raise ConfigError(
            f"inputs={inputs!r}: give a list with a run's folder, or with checkpoints or patterns."
        )
    notes: list[str] = []
    typed: list[Candidate | FolderContents] = []
    everything: list[Candidate | FolderContents] = []
    for text in inputs:
        location = parse_location(text)
        if any(c in os.fspath(text) for c in "*?[") and not location.exists():
            everything += _match(location, notes)
        else:
            typed.append(_look(location, notes))
            everything.append(typed[-1])
    runs = [found for found in everything if isinstance(found, FolderContents)]
    candidates = [found for found in everything if isinstance(found, Candidate)]
    _refuse_duplicates([found for found in typed if isinstance(found, Candidate)])
    if not runs:
        return Expansion(_unique(candidates, notes), None, notes)
    if len(everything) > 1:
        more = len(everything) - 1
        given = f"{counted(more, 'more input')} {'was' if more == 1 else 'were'} given"
        raise ConfigError(
            f"{runs[0].folder} is a run's folder, but {given}."
            " Give one run's folder alone, or only checkpoints and patterns "
            f"(such as {runs[0].folder.child('*')})."
        )
    notes += _describe_run(runs[0])
    return Expansion(_unique(runs[0].entries, notes), runs[0].folder, notes)


def _match(pattern: Location, notes: list[str]) -> list[Candidate | FolderContents]:
    """The checkpoints that match a pattern; other matches are left out with a note."""
    found: list[Candidate | FolderContents] = []
    others: dict[str, str] = {}
    errors: list[str] = []
    for location in sorted(pattern.glob(), key=_natural):
        why = None if location.is_folder() else reason_against(location.name)
        why = UNFINISHED if is_temporary(location.name) else why
        if why is not None:
            others[location.name] = why
            continue
        try:
            found.append(_look(location, notes))
        except FormatError as error:
            errors.append(str(error))
    if not found:
        why = " ".join(errors[:1]) or (f"It matches {describe_left_out(others)}." if others else "")
        raise FormatError(f"{pattern}: no checkpoint matches this pattern. {why}".rstrip())
    notes += [f"left out: {describe_left_out(others)}"] if others else []
    notes += [f"left out: {text}" for text in errors]
    return found


def _look(location: Location, notes: list[str]) -> Candidate | FolderContents:
    """One checkpoint, or the contents of a run's folder."""
    if not location.is_folder():
        if not location.is_file():
            raise FormatError(f"{location}: there is no such file or folder.")
        if location.name in POINTERS and (named := _follow(location)) is not None:
            return _look(named, notes)
        if (why := reason_against(location.name)) is not None:
            raise FormatError(f"{location}: {why}.")
        return Candidate(location, location)
    if location.name.endswith(TEMPORARY):
        raise FormatError(
            f"{location}: unfinished; the process that wrote it was stopped. Write it again."
        )
    contents = examine_run(location)
    if contents.is_run:
        return contents
    if contents.checkpoint is None:
        raise FormatError(contents.explain())
    beside = [entry.shown.name for entry in contents.entries]
    if contents.checkpoint != location:
        notes.append(f"{location}: taken as one checkpoint, {contents.checkpoint}")
    elif beside:
        notes.append(
            f"{location}: taken as one checkpoint ({contents.own[0]}); ignored: {few(beside)}"
        )
    if contents.left_out:
        notes.append(f"left out: {describe_left_out(contents.left_out)}")
    return Candidate(contents.checkpoint, location)


def _follow(pointer: Location) -> Location | None:
    """The folder beside a file that the file names; None if it names none."""
    name = pointer.read_bytes()[:_MAX_NAME].decode(errors="replace").strip()
    if not is_plain_name(name):
        return None
    folder = pointer.parent.child(name)
    return folder if folder.is_folder() else None


def _describe_run(contents: FolderContents) -> list[str]:
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


def _refuse_duplicates(candidates: list[Candidate]) -> None:
    seen: dict[str, Candidate] = {}
    for candidate in candidates:
        first = seen.setdefault(_identity(candidate.location), candidate)
        if first is not candidate:
            other = "" if first.shown == candidate.shown else f", also as {first.shown}"
            raise ConfigError(f"{candidate.shown}: given twice{other}. Give each checkpoint once.")


def _unique(candidates: list[Candidate], notes: list[str]) -> list[Candidate]:
    """Each checkpoint under one name: preferably one with a step, and not a symbolic link."""
    names: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        names.setdefault(_identity(candidate.location), []).append(candidate)
    kept = []
    for same in names.values():
        same.sort(key=lambda c: (not parse_name(c.shown.name).known, _is_link(c.shown)))
        kept.append(same[0])
        others = {str(c.shown): None for c in same[1:] if c.shown != same[0].shown}
        if others:
            notes.append(f"counted once: {same[0].shown} is also {few(others)}")
        elif len(same) > 1:
            notes.append(f"counted once: {same[0].shown} was matched {len(same)} times")
    return kept


def _identity(location: Location) -> str:
    return os.path.realpath(location.path) if isinstance(location, LocalPath) else str(location)


def _is_link(location: Location) -> bool:
    return isinstance(location, LocalPath) and location.path.is_symlink()


def _natural(location: Location) -> list[tuple[int, str]]:
    """A sort key that puts `step-1000` after `step-500`."""
    parts = re.split(r"([0-9]+)", str(location))
    # Without leading zeros, numbers sort by their length and then as text, however long they are.
    digits = [part.lstrip("0") if part.isdecimal() else None for part in parts]
    return [
        (-1, part) if number is None else (len(number), number)
        for part, number in zip(parts, digits, strict=True)
    ]
