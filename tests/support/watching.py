"""A trainer that writes small checkpoints, and a watch of it in a time of its own."""

import os
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save, save_file

from torch_lawa.offline.options import AverageOptions
from torch_lawa.offline.watch.watcher import Averaged, Watcher

Weights = dict[str, NDArray[Any]]


class Trainer:
    """Writes checkpoints into `folder`, each a minute after the last, and remembers the values."""

    def __init__(self, folder: Path, seed: int = 0) -> None:
        self.folder, self.values = folder, dict[int, Weights]()
        self._random = np.random.default_rng(seed)
        self._time = 1_700_000_000
        folder.mkdir(parents=True, exist_ok=True)

    def draw(self, step: int) -> Weights:
        """New weights for a step."""
        shapes = {"a.weight": (3, 5), "b.weight": (7,)}
        self.values[step] = {
            name: self._random.normal(size=shape).astype(np.float32)
            for name, shape in shapes.items()
        }
        return self.values[step]

    def path(self, step: int) -> Path:
        """The file of a step."""
        return self.folder / f"step-{step}.safetensors"

    def date(self, *paths: Path, minutes: int = 1) -> None:
        """Files get the time of this simulation, so that no two writes have the same."""
        self._time += 60 * minutes
        for path in paths:
            os.utime(path, (self._time, self._time))

    def write(self, *steps: int) -> None:
        """Whole files, under new names or replacing older ones."""
        for step in steps:
            new = self.folder / f".{step}.new"
            save_file(self.draw(step), new)
            self.date(new)
            os.replace(new, self.path(step))

    def write_in_place(self, step: int) -> None:
        """New values into the file that is there."""
        with self.path(step).open("r+b") as file:
            file.write(save(self.draw(step)))
        self.date(self.path(step))

    def delete(self, *steps: int) -> None:
        """As with a limit of checkpoints."""
        for step in steps:
            self.path(step).unlink()

    def mean(self, *steps: int) -> Weights:
        """float64, one rounding: NumPy and nothing else."""
        return mean_of([self.values[step] for step in steps])


def mean_of(many: Sequence[Weights]) -> Weights:
    """The mean in float64, rounded once."""
    return {
        name: (sum(w[name].astype(np.float64) for w in many) / len(many)).astype(np.float32)
        for name in many[0]
    }


def assert_file(path: Path, expected: Weights) -> None:
    """A safetensors file, or the one in a folder, holds exactly these values."""
    found = load_file(path / "model.safetensors" if path.is_dir() else path)
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert found[name].tobytes() == value.tobytes(), name


class Watch:
    """A watcher with a clock of its own, and what it said and wrote."""

    def __init__(self, run: Path | str, output: Path | str, *, k: int = 3, **how: Any) -> None:
        self.now, self.said, self.averaged = 0.0, list[str](), list[Averaged]()
        self.stop: threading.Event = how.pop("stop", threading.Event())
        self._watcher = Watcher(
            run,
            output,
            k=k,
            settle=how.pop("settle", 20.0),
            once=how.pop("once", False),
            on_message=self.said.append,
            on_average=self.averaged.append,
            stop=self.stop,
            clock=lambda: self.now,
            options=AverageOptions(**how),
        )
        self.window = self._watcher._window

    def look(self, times: int = 1) -> list[str]:
        """Poll several times, ten seconds apart; what was said."""
        before = len(self.said)
        for _ in range(times):
            self._watcher.poll()
            self.now += 10
        return self.said[before:]

    def settle(self) -> list[str]:
        """Poll often enough for all checkpoints to be taken."""
        return self.look(3)

    @property
    def steps(self) -> list[int]:
        """The window."""
        return [s.number for s in self.window.state.snapshots]

    @property
    def made(self) -> list[list[int | None]]:
        """The steps of each average so far."""
        return [[i.step for i in each.inputs] for each in self.averaged]

    def close(self) -> None:
        """As when its process ends."""
        self._watcher.__exit__(None, None, None)

    def __enter__(self) -> "Watch":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def folders_of(window: Path) -> set[str]:
    """The names in a window's folder."""
    return {path.name for path in window.iterdir()}


def remove_folder(path: Path) -> None:
    """As a trainer does with a checkpoint that is a folder."""
    shutil.rmtree(path)
