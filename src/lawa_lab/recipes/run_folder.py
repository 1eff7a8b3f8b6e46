"""The folder of one run: what it was asked to do, its metrics, its checkpoint, its trajectory."""

import contextlib
import dataclasses
import json
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lawa_lab.recipes.configs import TrainConfig, find_recipe
from torch_lawa._version import __version__
from torch_lawa.checkpoints.formats.safetensors_torch import save_tensors
from torch_lawa.checkpoints.storage.atomic import TEMPORARY, clear_stale, publish, remove, replacing
from torch_lawa.errors import ConfigError, StateError
from torch_lawa.metrics import read_metrics

__all__ = ["RunFolder", "RunPlan"]

_FORMAT = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunPlan:
    """What one run is asked to do; written to its folder, and read from there."""

    config: TrainConfig
    seed: int = 0
    data: str | None = None
    smoke: bool = False

    @property
    def num_threads(self) -> int | None:
        """On a CPU; a smoke run is too small for more than one."""
        return 1 if self.smoke else self.config.num_threads

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as in `config.json`."""
        return {
            "recipe": self.config.recipe,
            "run": self.config.run_name,
            "seed": self.seed,
            "data": self.data,
            "smoke": self.smoke,
            "hyperparameters": dataclasses.asdict(self.config),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "RunPlan":
        """The plan that `as_dict` wrote."""
        given: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in values["hyperparameters"].items()
        }
        config = find_recipe(values["recipe"])(**given)
        return cls(config=config, seed=values["seed"], data=values["data"], smoke=values["smoke"])


class RunFolder:
    """Reads and writes the files of one run; each is whole or not there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.json"
        self.metrics = path / "metrics.jsonl"
        self.checkpoint = path / "checkpoint.pt"
        self.shards = path / "checkpoint"  # of a run in shards, a folder
        self.unfinished = path / f"checkpoint{TEMPORARY}"  # the next one, while it is written
        self.averaged = path / "averaged.safetensors"
        self.trajectory = path / "trajectory"

    @property
    def used(self) -> bool:
        """Whether a run is in it."""
        there = (self.config, self.metrics, self.checkpoint, self.shards)
        return any(path.exists() for path in there)

    def clear(self) -> None:
        """Remove the run; files of others stay."""
        for path in (self.metrics, self.checkpoint, self.averaged):
            path.unlink(missing_ok=True)
        remove(self.shards)
        remove(self.unfinished)
        for path in self.trajectory.glob("step-*.safetensors"):
            path.unlink()
        self.config.unlink(missing_ok=True)

    def recover(self) -> None:
        """Put right what a killed process left; called before a checkpoint is looked for."""
        # Where two folders cannot change places in one step, the old checkpoint goes first.
        if not self.shards.exists() and (self.unfinished / ".metadata").exists():
            publish(self.unfinished, self.shards)  # its index is written last, so it is whole
        for path in (self.config, self.metrics, self.checkpoint, self.shards, self.averaged):
            clear_stale(path)
        for left in self.trajectory.glob(f"*{TEMPORARY}"):
            clear_stale(left.with_name(f"{left.name.partition('.')[0]}.safetensors"))

    def write_plan(self, plan: RunPlan, facts: Mapping[str, Any]) -> None:
        """Say what the run is, and where it began."""
        self.path.mkdir(parents=True, exist_ok=True)
        text = json.dumps({**plan.as_dict(), **facts, **_versions()}, indent=2)
        with replacing(self.config) as file:
            file.write(text.encode() + b"\n")

    def read_plan(self) -> RunPlan:
        """What the run was asked to do."""
        try:
            return RunPlan.from_dict(json.loads(self.config.read_bytes()))
        except OSError as error:
            raise ConfigError(f"{self.path}: no run of `lawa train` ({error.strerror}).") from None
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{self.config}: not a configuration of this version's `lawa train` ({error})."
            ) from None

    def require_same(self, plan: RunPlan) -> None:
        """Refuse to go on with a run that was asked to do something else."""
        before, now = (_flat(p.as_dict()) for p in (self.read_plan(), plan))
        differing = [
            f"{name} was {before.get(name)} and is {now.get(name)}"
            for name in (before | now)
            if before.get(name) != now.get(name)
        ]
        if differing:
            raise ConfigError(
                f"{self.path} holds another run: {'; '.join(differing)}. Resume with the same "
                "options, or choose another folder."
            )

    def save(self, state: Mapping[str, Any]) -> None:
        """Write the checkpoint to resume from."""
        with replacing(self.checkpoint) as file:
            torch.save({"format": _FORMAT, **state}, file)

    def load(self) -> dict[str, Any] | None:
        """The checkpoint, None where there is none yet."""
        if not self.checkpoint.exists():
            return None
        try:
            state = torch.load(self.checkpoint, map_location="cpu", weights_only=True)
            known = state["format"] == _FORMAT
        except Exception as error:
            raise StateError(
                f"{self.checkpoint} cannot be read ({error}). Remove it to begin anew."
            ) from None
        if not known:
            raise StateError(f"{self.checkpoint} is of another version of torch-lawa.")
        return dict(state)

    def cut_metrics(self, step: int) -> None:
        """Drop rows later than `step`: the resumed run writes them again."""
        if not self.metrics.exists():
            return
        rows = [row for row in read_metrics(self.metrics) if row.get("step", 0) <= step]
        with replacing(self.metrics) as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows).encode())

    def save_snapshot(self, tensors: Mapping[str, Tensor], step: int, epoch: float) -> None:
        """Add a checkpoint to the trajectory, for `lawa sweep` and its kin."""
        self.trajectory.mkdir(exist_ok=True)
        notes = {"step": str(step), "epoch": f"{epoch:g}"}
        at = f"-epoch-{epoch:g}" if epoch == int(epoch) else ""
        save_tensors(self.trajectory / f"step-{step:08d}{at}.safetensors", tensors, notes)

    def cut_trajectory(self, step: int) -> None:
        """Drop snapshots later than `step`: the resumed run takes them again."""
        for path in self.trajectory.glob("step-*.safetensors"):
            if int(path.stem.split("-")[1]) > step:
                path.unlink()


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    return {**values["hyperparameters"], **{n: v for n, v in values.items() if n in _IDENTITY}}


_IDENTITY = ("recipe", "seed", "data", "smoke")


def _versions() -> dict[str, Any]:
    return {
        "commit": _commit(),
        "versions": {
            "torch_lawa": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }


def _commit() -> str | None:
    """The commit of the checkout that this package runs from, where it does."""
    checkout = Path(__file__).resolve().parents[3]
    if not (checkout / ".git").exists():
        return os.environ.get("LAWA_COMMIT")
    git = ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"]
    with contextlib.suppress(OSError):
        return subprocess.run(git, capture_output=True, text=True).stdout.strip() or None
    return None
