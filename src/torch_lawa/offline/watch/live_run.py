"""The input and the output of a watch: a run whose checkpoints come and go, and a target path."""

import os
import re
from pathlib import Path

from torch_lawa.checkpoints.find.discovery import Discovery, FoundCheckpoint, find_checkpoints
from torch_lawa.checkpoints.find.folders import examine_run
from torch_lawa.checkpoints.find.step_names import parse_name
from torch_lawa.checkpoints.storage.paths import LocalPath, is_url, parse_location
from torch_lawa.errors import ConfigError, FormatError, OutputError

__all__ = ["LiveRun", "WatchTarget"]

_STEP = re.compile(r"\{step(?::(0[0-9]{1,2}))?\}")  # {step}, or {step:07} for seven digits


class LiveRun:
    """The checkpoints of a run's folder or a pattern, as they are now."""

    def __init__(self, text: str, *, key: str | None) -> None:
        self.text, self.key, self.location = text, key, parse_location(text)
        self.is_pattern = any(c in text for c in "*?[") and not self.location.exists()

    @property
    def anchor(self) -> str:
        """Its name in the window's manifest: absolute, the same for all patterns in a folder."""
        if not isinstance(self.location, LocalPath):
            return re.split(r"/[^/]*[*?[]", self.text)[0] if self.is_pattern else self.text
        parts = self.location.path.parts
        if self.is_pattern:
            first = next(i for i, part in enumerate(parts) if any(c in part for c in "*?["))
            parts = parts[:first]
        return str(Path(*parts).resolve())

    def find_checkpoints(self) -> Discovery:
        """The checkpoints that exist now, by step or epoch."""
        if not self.is_pattern and not self.location.exists():
            raise FormatError(f"{self.location}: does not exist yet.")
        discovery = find_checkpoints([self.text], key=self.key)
        if not discovery.is_run and not self.is_pattern and self.location.is_folder():
            discovery = self._only_one(discovery)
        if discovery.ordered_by == "given":
            raise FormatError(
                f"{self.text}: no step or epoch in the name or contents of "
                f"{discovery.found[0].location}, so the order is unknown."
            )
        return discovery

    def _only_one(self, discovery: Discovery) -> Discovery:
        """The only checkpoint of a run; discovery may have taken the run's name for its name."""
        contents = examine_run(self.location)
        if not contents.entries:
            raise FormatError(
                f"{self.location}: this is one checkpoint. Give the folder of its run."
            )
        entry, progress = contents.entries[0], contents.progress[0]
        if progress.known:
            by = "epoch" if progress.step is None else "step"
            found = FoundCheckpoint(entry.location, progress.step, progress.epoch)
            return Discovery((found,), by, is_run=True)  # type: ignore[arg-type]
        if parse_name(self.location.name).known:
            raise FormatError(
                f"{entry.location}: no step or epoch in its name. Name checkpoints like step-500."
            )
        return discovery  # its step was read from its contents


class WatchTarget:
    """Where averages are written: one path, or one path per step.

    >>> target = WatchTarget("averages/{step}.safetensors")
    >>> target.path(700).as_posix(), target.window.as_posix()
    ('averages/700.safetensors', 'averages/step.safetensors.window')
    >>> WatchTarget("averages/iter_{step:07}").path(700).as_posix()
    'averages/iter_0000700'
    """

    def __init__(self, text: str) -> None:
        if is_url(text) and not text.startswith("file://"):
            raise ConfigError(
                f"{text}: a watch keeps hard links beside its output, so the output must be a "
                "path, not a URL. Write to a path and upload from there."
            )
        self._path = Path(os.path.expanduser(text.removeprefix("file://")))
        self.keeps_all = _STEP.search(text) is not None
        if other := re.search(r"\{\w+[^{}]*\}", _STEP.sub("", self._path.name)):
            raise ConfigError(
                f"{text}: {other[0]} would not be replaced. Only {{step}} is, or {{step:07}} with "
                "leading zeros; it stands for the epoch if checkpoints are numbered by epochs."
            )
        parts = self._path.parts
        at = next((i for i, part in enumerate(parts) if _STEP.search(part)), len(parts) - 1)
        self._first = Path(*parts[: at + 1])  # the first part that differs between averages
        name = _STEP.sub("step", self._first.name)
        self.window = self._first.with_name(f"{name}.window")

    def __str__(self) -> str:
        return str(self._path)

    def path(self, number: int) -> Path:
        """The path of the average whose newest checkpoint has this step (or epoch)."""
        return Path(_STEP.sub(lambda found: format(number, found[1] or ""), str(self._path)))

    def refuse_inside(self, run: LiveRun) -> None:
        """Refuse an output inside the run, where averages would be read as checkpoints."""
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
                f"{self}: the output is inside the run {run.text}, where an average would be read "
                f"as a checkpoint. Write beside the run, such as to "
                f"{folder.with_name(folder.name + '-averaged')}."
            )

    def refuse_existing(self) -> None:
        """Refuse to replace what existed before the first watch."""
        if not self.keeps_all and self._path.exists():
            raise OutputError(
                f"{self}: already exists, and was not written by a watch of this run. Remove it, "
                "or write elsewhere."
            )
