"""`window.json`: the checkpoints in the window of a watch, and those that it has passed."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch_lawa.checkpoints.find.discovery import FoundCheckpoint
from torch_lawa.checkpoints.storage.paths import LocalPath
from torch_lawa.checkpoints.storage.state_files import (
    StateRow,
    a_flag,
    a_list,
    a_name,
    a_number,
    a_path,
    a_text,
    a_whole_number,
    read_state,
)

__all__ = ["KEPT_FOLDER", "KeptCheckpoint", "WindowManifest", "WindowState"]

KEPT_FOLDER = r"(step|epoch)-[0-9]+(\.[0-9]+)?"  # the names of our folders
_FORMAT = 1


@dataclass(frozen=True)
class KeptCheckpoint:
    """A checkpoint in the window: its files in the run, and ours."""

    number: int  # step or epoch, whichever the run is ordered by
    step: int | None
    epoch: int | None
    folder: str  # name inside the window's folder
    file: str  # name inside `folder`; empty if the folder is the checkpoint
    source: str  # path or URL in the run
    signature: str  # of all its files in the run
    weights: dict[str, str]  # stamps of its weights in the run, by file
    kept: dict[str, str]  # stamps of our links or copies
    written: float | None  # time of the last write
    copied: bool  # instead of linked

    @property
    def label(self) -> str:
        """Its step or epoch in words."""
        return FoundCheckpoint(LocalPath(self.source), self.step, self.epoch).label


@dataclass(frozen=True)
class WindowState:
    """What the manifest stores. Numbers are steps or epochs; they map to signatures."""

    snapshots: tuple[KeptCheckpoint, ...] = ()  # oldest first
    by: str = ""  # "step" or "epoch"
    filled: bool = False  # it was full once: all lower numbers are in `passed`
    passed: Mapping[int, str] = field(default_factory=dict)  # too old for the window
    abandoned: Mapping[int, str] = field(default_factory=dict)  # on branches that the run left
    left_at: int = -1  # greatest number on such a branch: averages up to it are outdated
    averaged: str = ""  # hash of the window and options of the last average


@dataclass(frozen=True)
class WindowManifest:
    """The contents of the file: which run, how many checkpoints, and the state of the window."""

    run: str
    k: int
    state: WindowState

    def text(self) -> str:
        """The manifest as JSON."""
        head = {"format": _FORMAT, "run": self.run, "k": self.k}
        return json.dumps({**asdict(self.state), **head}, indent=1)

    @staticmethod
    def read(path: Path) -> "WindowManifest":
        """Read it and check every field; a `ValueError` says what is wrong."""
        return read_state(path, _parse)


def _parse(row: StateRow) -> WindowManifest:
    if row.take("format", a_whole_number()) != _FORMAT:
        raise ValueError(f"it has another format than {_FORMAT}")
    run, k = row.take("run", a_text(".+")), row.take("k", a_whole_number(1))
    state = WindowState(
        snapshots=tuple(row.take("snapshots", a_list(_snapshot))),
        by=row.take("by", a_text("(step|epoch)?")),
        filled=row.take("filled", a_flag),
        passed=row.take("passed", _signatures),
        abandoned=row.take("abandoned", _signatures),
        left_at=row.take("left_at", a_whole_number(-1)),
        averaged=row.take("averaged", a_text()),
    )
    row.end()
    numbers = [s.number for s in state.snapshots]
    folders = {s.folder for s in state.snapshots}
    if numbers != sorted(set(numbers)) or len(folders) < len(numbers) or len(numbers) > k:
        raise ValueError("its checkpoints are not in order, or too many")
    if numbers and not state.by:
        raise ValueError("its checkpoints have no order")
    return WindowManifest(run, k, state)


def _snapshot(found: Any) -> KeptCheckpoint:
    row = StateRow(found)
    kept = KeptCheckpoint(
        number=row.take("number", a_whole_number()),
        step=row.take("step", a_whole_number(optional=True)),
        epoch=row.take("epoch", a_whole_number(optional=True)),
        folder=row.take("folder", a_text(KEPT_FOLDER)),
        file=row.take("file", lambda name: name if name == "" else a_name(name)),
        source=row.take("source", a_text(".+")),
        signature=row.take("signature", a_text()),
        weights=row.take("weights", _stamps),
        kept=row.take("kept", _stamps),
        written=row.take("written", a_number),
        copied=row.take("copied", a_flag),
    )
    row.end()
    if kept.number not in (kept.step, kept.epoch):
        raise ValueError(f"{kept.number}, which is neither its step nor its epoch")
    return kept


def _signatures(found: Any) -> dict[int, str]:
    return StateRow(found).take_all(lambda name: int(a_text("[0-9]{1,18}")(name)), a_text())


def _stamps(found: Any) -> dict[str, str]:
    return StateRow(found).take_all(a_path, a_text())
