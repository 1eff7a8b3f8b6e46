"""The two ends of a watch: a run whose checkpoints come and go, and where its averages go."""

import os
import re
from pathlib import Path

from torch_lawa.checkpoints.find.folders import examine_run
from torch_lawa.checkpoints.find.select import Discovery, FoundCheckpoint, find_checkpoints
from torch_lawa.checkpoints.find.step_names import parse_name
from torch_lawa.checkpoints.formats.base import TrainingProgress
from torch_lawa.checkpoints.storage.paths import LocalPath, is_url, parse_location
from torch_lawa.errors import ConfigError, FormatError, OutputError

__all__ = ["LiveRun", "Target"]

_STEP = "{step}"


class LiveRun:
    """The checkpoints of a run's folder or a pattern, as they are at the moment of asking."""

    def __init__(self, text: str, *, key: str | None = None) -> None:
        self.text, self.key, self.location = text, key, parse_location(text)
        self.is_pattern = any(c in text for c in "*?[") and not self.location.exists()

    @property
    def anchor(self) -> str:
        """What it is called in the window: the same from every folder, for every pattern in it."""
        if not isinstance(self.location, LocalPath):
            return re.split(r"/[^/]*[*?[]", self.text)[0] if self.is_pattern else self.text
        parts = self.location.path.parts
        if self.is_pattern:
            first = next(i for i, part in enumerate(parts) if any(c in part for c in "*?["))
            parts = parts[:first]
        return str(Path(*parts).resolve())

    def discover(self) -> Discovery:
        """What is there now, by step or epoch."""
        if not self.is_pattern and not self.location.exists():
            raise FormatError(f"{self.location}: is not there yet.")
        discovery = find_checkpoints([self.text], key=self.key)
        if not discovery.is_run and not self.is_pattern and self.location.is_folder():
            discovery = self._only_one(discovery)
        if discovery.ordered_by == "given":
            raise FormatError(
                f"{self.text}: no step or epoch in the name or contents of {discovery.found[0]}, "
                "so the order is not known."
            )
        return discovery

    def _only_one(self, discovery: Discovery) -> Discovery:
        """The first checkpoint of a run; discovery may have taken the run's name for its."""
        contents = examine_run(self.location)
        if not contents.entries:
            raise FormatError(f"{self.location}: is one checkpoint; give the folder of its run.")
        entry, progress = contents.entries[0], contents.progress[0]
        if progress != TrainingProgress():
            by = "epoch" if progress.step is None else "step"
            found = FoundCheckpoint(entry.location, progress.step, progress.epoch)
            return Discovery((found,), by, is_run=True)  # type: ignore[arg-type]
        if parse_name(self.location.name) != TrainingProgress():
            raise FormatError(f"{entry.location}: no step or epoch in its name.")
        return discovery  # it was opened to learn its step


class Target:
    """Where averages go: one path, or one a step.

    >>> target = Target("averages/{step}.safetensors")
    >>> target.path(700).as_posix(), target.window.as_posix()
    ('averages/700.safetensors', 'averages/step.safetensors.window')
    """

    def __init__(self, text: str) -> None:
        if is_url(text) and not text.startswith("file://"):
            raise ConfigError(
                f"{text}: a watch keeps links beside its output; give a path, and upload from it."
            )
        self._path = Path(os.path.expanduser(text.removeprefix("file://")))
        self.keeps_all = _STEP in text
        parts = self._path.parts
        at = next((i for i, part in enumerate(parts) if _STEP in part), len(parts) - 1)
        self._first = Path(*parts[: at + 1])  # the first part that differs between averages
        name = self._first.name.replace(_STEP, "step")
        self.window = self._first.with_name(f"{name}.window")

    def __str__(self) -> str:
        return str(self._path)

    def path(self, number: int) -> Path:
        """Where the average goes whose newest checkpoint has this step (or epoch)."""
        return Path(str(self._path).replace(_STEP, str(number)))

    def refuse_inside(self, run: LiveRun) -> None:
        """Averages must not be taken for checkpoints."""
        if not isinstance(run.location, LocalPath):
            return
        ours = self._first.resolve()
        folder = Path(run.anchor)
        if run.is_pattern:
            clash = any(p.resolve().match(str(run.location.path)) for p in (ours, self.window))
        else:
            clash = ours == folder or folder in ours.parents
        if clash or ours in folder.parents:
            raise OutputError(
                f"{self}: lies in the run {run.text}, where it would be taken for a checkpoint. "
                f"Write beside it, such as to {folder.with_name(folder.name + '-averaged')}."
            )

    def refuse_existing(self) -> None:
        """What was there before the first watch is not ours to replace."""
        if not self.keeps_all and self._path.exists():
            raise OutputError(
                f"{self}: exists already, and not from a watch of this run. Remove it, or write "
                "elsewhere."
            )
