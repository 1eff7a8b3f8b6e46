"""Follow a live run: keep its k latest checkpoints and write a new average for each new one.

Averages are made only from the window's own folder, so the trainer may delete its checkpoints.
"""

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch_lawa.checkpoints.find.discovery import Discovery, select
from torch_lawa.checkpoints.formats.registry import checkpoint_parts
from torch_lawa.checkpoints.storage.atomic import publish, recover, remove, require_short_name
from torch_lawa.checkpoints.storage.paths import LocalPath
from torch_lawa.errors import ConfigError, FormatError, LawaError, OutputError
from torch_lawa.offline.average import Result, run_average
from torch_lawa.offline.options import DEFAULTS, AverageOptions
from torch_lawa.offline.plan import PlannedInput, plan_found
from torch_lawa.offline.threads import Meter, Stopped
from torch_lawa.offline.watch.admission import Admission
from torch_lawa.offline.watch.checkpoint_files import digest
from torch_lawa.offline.watch.live_run import LiveRun, WatchTarget
from torch_lawa.offline.watch.window_folder import WindowFolder

__all__ = ["Averaged", "Watcher", "watch_run"]


@dataclass(frozen=True)
class Averaged:
    """An average that was written, and its checkpoints."""

    inputs: tuple[PlannedInput, ...]
    result: Result

    def to_json(self) -> dict[str, Any]:
        """The same as JSON values."""
        newest = self.inputs[-1]
        inputs = [{"step": i.step, "epoch": i.epoch, "weight": i.weight} for i in self.inputs]
        made = {"step": newest.step, "epoch": newest.epoch, "inputs": inputs}
        return {**made, **self.result.to_json()}


def watch_run(
    run: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    k: int = 6,
    poll: float = 10.0,
    settle: float | None = None,
    once: bool = False,
    options: AverageOptions = DEFAULTS,
    on_average: Callable[[Averaged], None] = lambda averaged: None,
    on_message: Callable[[str], None] = lambda text: None,
    stop: threading.Event | None = None,
) -> None:
    """Write the average of the k latest checkpoints of `run`, and a new one for each that appears.

    Polls every `poll` seconds until `stop` is set; with `once`, takes what exists and returns. A
    checkpoint is taken when it has not changed for `settle` seconds (default: twice `poll`). With
    `{step}` in `output` every average is kept; otherwise each replaces the last one atomically.

    >>> import tempfile, torch
    >>> from torch_lawa.checkpoints.formats.safetensors_torch import save_tensors
    >>> run = Path(tempfile.mkdtemp())
    >>> for step in (100, 200, 300):
    ...     save_tensors(run / f"step_{step}.safetensors", {"w": torch.ones(2)})
    >>> output = Path(tempfile.mkdtemp()) / "averaged.safetensors"
    >>> watch_run(run, output, k=2, settle=0, once=True, on_message=print)
    step 200: added (1 of 2)
    step 300: added (2 of 2)
    >>> output.exists()
    True
    """
    stop = stop or threading.Event()
    if not poll > 0:
        raise ConfigError(f"poll={poll}: give a number of seconds greater than 0.")
    settle = 2 * poll if settle is None else settle
    with Watcher(
        run,
        output,
        k=k,
        settle=settle,
        once=once,
        options=options,
        on_average=on_average,
        on_message=on_message,
        stop=stop,
    ) as watcher:
        before = watcher.averaged
        watcher.poll()
        if once and watcher.settling and not stop.wait(settle + 0.01):
            watcher.poll()
        if once and watcher.num_kept < k:
            on_message(f"no average yet: {watcher.num_kept} of {k} checkpoints")
        elif once and watcher.averaged == before:
            on_message(f"no new checkpoints: {output} is up to date")
        while not once and not stop.wait(poll):
            watcher.poll()


class Watcher:
    """What `watch_run` does, one poll at a time."""

    def __init__(
        self,
        run: str | os.PathLike[str],
        output: str | os.PathLike[str],
        *,
        k: int,
        settle: float,
        options: AverageOptions,
        once: bool = False,
        on_average: Callable[[Averaged], None] = lambda averaged: None,
        on_message: Callable[[str], None] = lambda text: None,
        stop: threading.Event | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if k < 1 or not settle >= 0:
            raise ConfigError(f"k={k}, settle={settle}: k is at least 1, settle at least 0.")
        options.rule.weights(k)  # explicit weights must match k
        self._options = options
        self._k, self._settle, self._once = k, settle, once
        self._on_average, self._say, self._clock = on_average, on_message, clock
        self._stop = stop or threading.Event()
        self._said: set[str] = set()
        self._trouble = "", 0.0  # an error, and since when
        self._failed = self._hopeless = ""  # windows to average again, and not to
        live = LiveRun(os.fspath(run), key=options.key)
        self._target = WatchTarget(os.fspath(output))
        self._target.refuse_inside(live)
        require_short_name(self._target.path(10**9))
        self._each = self._target.keeps_all and not once
        self._window = WindowFolder(self._target.window, run=live.anchor, k=k)
        self._admission = Admission(
            live,
            self._window,
            k=k,
            each=self._each,
            settle=settle,
            say=self._say,
            stop=self._stop,
            clock=clock,
        )
        try:
            self._greet()
        except BaseException:
            self._window.close()
            raise

    def __enter__(self) -> "Watcher":
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, ConfigError) and self._window.is_new and not self.averaged:
            self._window.discard()
        self._window.close()

    @property
    def settling(self) -> bool:
        """Whether a checkpoint is due that may still be incomplete."""
        return self._admission.settling

    @property
    def num_kept(self) -> int:
        """The number of checkpoints in the window."""
        return len(self._window.state.snapshots)

    @property
    def averaged(self) -> str:
        """Identifies the window that was averaged last; empty before the first one."""
        return self._window.state.averaged

    def poll(self) -> None:
        """Take new complete checkpoints, and average the window if it has changed."""
        try:
            self._admission.poll()
            while not self._stop.is_set() and self._admission.take_next():
                if self._each:
                    self._average()
        except Stopped:
            return
        except (OSError, FormatError) as error:
            if self._once:
                raise
            self._note_trouble(str(error))
        else:
            self._trouble = "", 0.0
        if not self._stop.is_set():
            self._average()

    def _greet(self) -> None:
        if self._window.is_new:
            self._target.refuse_existing()
        state = self._window.state
        if state.snapshots:
            numbers = f"{state.snapshots[0].label} to {state.snapshots[-1].label}"
            count = f"{len(state.snapshots)} of {self._k}"
            self._say(f"resuming from {self._window.folder} ({count}, {numbers})")
            newest = self._target.path(state.snapshots[-1].number)
            recover(newest)
            if not newest.exists():
                self._window.state = replace(state, averaged="")

    def _note_trouble(self, text: str) -> None:
        """Report an error that persists; a file deleted during a poll is none."""
        if self._trouble[0] != text:
            self._trouble = text, self._clock()
        waiting = not (self._window.state.snapshots or self._said)
        if waiting or self._clock() - self._trouble[1] >= self._settle:
            self._say_once(text, "waiting for checkpoints: " if waiting else "")

    def _say_once(self, text: str, before: str = "") -> None:
        if text not in self._said:
            self._said.add(text)
            self._say(before + text)

    def _average(self) -> None:
        state = self._window.state
        window = digest([repr(self._options), [(s.number, s.weights) for s in state.snapshots]])
        if len(state.snapshots) < self._k or window in (state.averaged, self._hopeless):
            return
        newest = state.snapshots[-1]
        path = self._target.path(newest.number)
        try:
            if self._target.keeps_all and path.exists() and newest.number > state.left_at:
                self._say(f"{newest.label}: {path} already exists and is not written again")
                averaged = None
            else:
                averaged = self._make(path)
                if averaged is None:  # a checkpoint changed: the next poll drops it
                    return
            self._window.commit(replace(state, averaged=window))
        except Stopped:
            return
        except (OSError, LawaError) as error:
            if self._once or isinstance(error, ConfigError):
                raise
            self._note_failure(error, newest.label, window)
            return
        if averaged is not None:
            self._on_average(averaged)

    def _note_failure(self, error: Exception, label: str, window: str) -> None:
        may_pass = isinstance(error, OSError | OutputError)  # a full disk, a lost mount
        again = "at the next poll" if may_pass else "with the next checkpoint"
        if window != self._failed:
            self._say(
                f"{label}: no average was written: {error} The window is kept; retrying {again}."
            )
        self._failed, self._hopeless = window, "" if may_pass else window

    def _make(self, path: Path) -> Averaged | None:
        """Average the window into `path`; None if one of its files changed meanwhile."""
        state = self._window.state
        found = tuple(self._window.found(s) for s in state.snapshots)
        by: Any = state.by
        notes = select(Discovery(found, by, is_run=True), last=self._k).notes
        plan = plan_found(found, LocalPath(path), self._options, notes=notes, overwrite=True)
        for note in plan.notes:
            self._say_once(note, "Note: ")
        # Written beside the window first, so that no mean of changed bytes is published.
        aside = self._window.made / path.name
        output = replace(plan.output, location=LocalPath(aside), provisional=True)
        try:
            result = run_average(replace(plan, output=output), meter=_StoppingMeter(self._stop))
        except FormatError:
            if self._window.changed():
                return None
            raise
        if self._window.changed():
            remove(aside)
            return None
        path.parent.mkdir(parents=True, exist_ok=True)
        recover(path)
        # With {step} in the name, what others wrote meanwhile is kept.
        ours = not self._target.keeps_all or path.exists()
        publish(aside, path, overwrite=ours, is_outdated=checkpoint_parts(LocalPath(path)))
        plan.output.announce()
        return Averaged(plan.inputs, replace(result, location=LocalPath(path)))


class _StoppingMeter(Meter):
    """Stops the work between two pieces when the watch ends."""

    def __init__(self, stop: threading.Event) -> None:
        super().__init__()
        self._stop = stop

    def add(self, num_bytes: int) -> None:
        super().add(num_bytes)
        if self._stop.is_set():
            self.stop()
