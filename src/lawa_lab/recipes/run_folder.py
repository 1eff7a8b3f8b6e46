"""The folder of one run: its plan, metrics, checkpoint and trajectory, and who may write there."""

import contextlib
import dataclasses
import json
import os
import platform
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from lawa_lab.recipes.config import TrainConfig
from lawa_lab.recipes.quantization import is_rounded
from lawa_lab.recipes.registry import RECIPES
from lawa_lab.wrappers.registry import name_wrapped
from torch_lawa._version import __version__
from torch_lawa.checkpoints.formats.safetensors_torch import save_tensors
from torch_lawa.checkpoints.storage.atomic import (
    TEMPORARY,
    making,
    publish,
    recover_all,
    remove,
    replacing,
)
from torch_lawa.errors import ConfigError, LawaError, StateError
from torch_lawa.metrics import Row, read_metrics
from torch_lawa.system_errors import unwrapped_errors
from torch_lawa.validation import DAMAGE

__all__ = ["RunFolder", "RunPlan"]

_FORMAT = 1
_IDENTITY = ("recipe", "seed", "data", "smoke")  # which a resumed run must share
# Settings of the optimizer that are in a run's name, if they are not the recipe's defaults.
_NAMED = ("batch_size", "weight_decay", "momentum", "beta2", "epsilon", "clip_norm")
_FIELDS = {"recipe", "run", "seed", "data", "smoke", "hyperparameters"}
_SNAPSHOT = re.compile(r"step-([0-9]{8,18})(-epoch-[0-9e+]+)?\.safetensors")
_SHARD = re.compile(r"(\.metadata|__[0-9]+_[0-9]+\.distcp)(\.tmp)?")

IfUsed: TypeAlias = Literal["resume", "overwrite", "refuse"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunPlan:
    """The recipe, settings, seed and data of one run, as stored in its folder."""

    config: TrainConfig
    seed: int = 0
    data: str | None = None
    smoke: bool = False

    @property
    def num_threads(self) -> int | None:
        """Number of threads on a CPU; a smoke run is too small for more than one."""
        return 1 if self.smoke else self.config.num_threads

    @property
    def run_name(self) -> str:
        """The name of the run in reports, which distinguishes runs of one recipe."""
        config, usual = self.config, type(self.config)()
        if self.smoke:
            usual = usual.smoke()
        name = name_wrapped(config.wrap, config.optimizer)
        settings = [
            f"{setting.replace('_', ' ')} {value}"
            for setting in _NAMED
            if (value := getattr(config, setting)) != getattr(usual, setting)
        ]
        # Without a comma: for reports this is a part of the optimizer.
        name += f" with {' and '.join(settings)}" if settings else ""
        if config.schedule != usual.schedule and not config.schedule_free:
            name += f", {config.schedule} rate"
        if config.land:
            shape = "" if config.land_shape == "linear" else f" {config.land_shape}"
            name += f", landing {config.land:g}{shape}"
        return name

    def extends(self, other: "RunPlan") -> bool:
        """Whether this is the other plan with more epochs at a constant rate, without a landing.

        Nothing that the other run has done depends on its length. Evaluations may be added after
        its end.
        """
        config, epochs = self.config, other.config.epochs
        if config.epochs <= epochs or config.schedule != "constant" or config.land:
            return False
        before = tuple(at for at in config.evaluate_at if at <= epochs)
        return before == other.config.evaluate_at and self.differs_only_in_length(other)

    def differs_only_in_length(self, other: "RunPlan") -> bool:
        """Whether the plans are equal but for their epochs, and those that are evaluated."""
        length = {name: getattr(other.config, name) for name in ("epochs", "evaluate_at")}
        return dataclasses.replace(self, config=dataclasses.replace(self.config, **length)) == other

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as in `config.json`."""
        return {
            "recipe": self.config.recipe,
            "run": self.run_name,
            "seed": self.seed,
            "data": self.data,
            "smoke": self.smoke,
            "hyperparameters": dataclasses.asdict(self.config),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "RunPlan":
        """The plan from the values of `as_dict`."""
        given: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in values["hyperparameters"].items()
        }
        recipe = RECIPES.find(values["recipe"])
        if unknown := sorted(given.keys() - recipe.settings().keys()):
            raise ValueError(f"it does not know the settings {', '.join(unknown)}")
        config = recipe(**given)
        return cls(config=config, seed=values["seed"], data=values["data"], smoke=values["smoke"])


class RunFolder:
    """Reads and writes the files of one run; each file is complete or absent.

    `if_used` says what happens to a run that the folder already contains: "resume" it, if it has
    the same plan or a shorter one at a constant rate, "overwrite" it, or "refuse".
    """

    def __init__(self, path: Path, *, if_used: IfUsed = "resume") -> None:
        self.path, self._if_used = path, if_used
        self.config = path / "config.json"
        self.metrics = path / "metrics.jsonl"
        self.checkpoint = path / "checkpoint.pt"
        self.shards = path / "checkpoint"  # a folder, for a sharded run
        self.unfinished = path / f"checkpoint{TEMPORARY}"  # the next shards, while they are written
        self.averaged = path / "averaged.safetensors"
        self.trajectory = path / "trajectory"

    @property
    def is_run(self) -> bool:
        """Whether `config.json` is that of a run, of this version or another one."""
        try:
            found = json.loads(self.config.read_bytes())
        except (OSError, ValueError, RecursionError):
            return False
        return isinstance(found, dict) and found.keys() >= _FIELDS

    @property
    def used(self) -> bool:
        """Whether the folder contains a run."""
        return self._found() is not None

    def clear(self) -> None:
        """Remove the run's files, if this is a run; other files are kept."""
        if not self.is_run:
            return
        for path in (self.metrics, self.checkpoint, self.averaged):
            path.unlink(missing_ok=True)
        for folder in (self.shards, self.unfinished):
            if not _others(folder):
                remove(folder)
        for path, _ in self._snapshots():
            path.unlink()
        self.config.unlink(missing_ok=True)

    @contextlib.contextmanager
    def reserved(self, plan: RunPlan) -> Iterator[None]:
        """Create the folder for the block, and remove it after that if it is still empty.

        Raises if it contains a run that this one may not continue or replace.
        """
        self._check(plan)
        with making(self.path):
            yield

    def begin(self, plan: RunPlan, *, world_size: int) -> None:
        """Prepare the folder for training: resume its run, or clear it and write the plan."""
        self._check(plan)  # again: another run may have started while the data was loaded
        if self.used and self._if_used == "overwrite":
            self.clear()
        if not self.used:
            self.write_plan(plan, {"world_size": world_size})
        self.recover()

    def extend(self, plan: RunPlan, *, world_size: int) -> None:
        """Write the plan, if it extends that of the run in the folder."""
        if plan.extends(self.read_plan()):
            self.write_plan(plan, {"world_size": world_size})

    def _check(self, plan: RunPlan) -> None:
        if not self.used:
            return
        if self._if_used == "resume":
            self.require_same(plan)
        elif self._if_used == "refuse":
            raise LawaError(
                f"{self.path} already contains a run: pass --resume to continue it, --overwrite to "
                "replace it, or choose another folder with -o."
            )
        elif not self.is_run:
            raise LawaError(
                f"{self.path} contains files of something else ({self._found()}), which are not "
                "overwritten: choose another folder with -o."
            )
        for folder in (self.shards, self.unfinished):
            if others := _others(folder):
                raise LawaError(
                    f"{folder} contains {others[0]}, which `lawa train` did not write and would "
                    "remove: move it, or choose another folder with -o."
                )

    def _found(self) -> str | None:
        """A file of a run, ours or not; None if there is none."""
        there = (self.config, self.metrics, self.checkpoint, self.shards)
        return next((path.name for path in there if path.exists()), None)

    def recover(self) -> None:
        """Clean up after a killed process, before a checkpoint is loaded."""
        # If two folders cannot be exchanged atomically, the old checkpoint is moved aside first.
        if not self.shards.exists() and (self.unfinished / ".metadata").exists():
            publish(self.unfinished, self.shards)  # its index is written last, so it is complete
        for folder in (self.path, self.trajectory):
            recover_all(folder)

    def write_plan(self, plan: RunPlan, facts: Mapping[str, Any]) -> None:
        """Store the plan, with versions and other facts."""
        self.path.mkdir(parents=True, exist_ok=True)
        text = json.dumps({**plan.as_dict(), **facts, **_versions()}, indent=2)
        with replacing(self.config) as file:
            file.write(text.encode() + b"\n")

    def read_plan(self) -> RunPlan:
        """The plan of the run in the folder."""
        try:
            return RunPlan.from_dict(json.loads(self.config.read_bytes()))
        except OSError as error:
            raise ConfigError(
                f"{self.path}: contains no run of `lawa train` ({error.strerror})."
            ) from None
        except DAMAGE as error:
            raise ConfigError(
                f"{self.config}: not a configuration of this version of `lawa train` ({error}). "
                "Resume with the version that wrote it, or choose another folder with -o."
            ) from None

    def require_same(self, plan: RunPlan) -> None:
        """Refuse to continue a run that has a different plan, except one that this extends."""
        there = self.read_plan()
        if plan.extends(there):
            return
        before, now = (_flat(p.as_dict()) for p in (there, plan))
        differing = [
            f"{name} was {before.get(name)} and is {now.get(name)}"
            for name in (before | now)
            if before.get(name) != now.get(name)
        ]
        if differing:
            raise ConfigError(
                f"{self.path} contains a different run: {'; '.join(differing)}. Resume with "
                "the same options, or choose another folder."
            )

    def save(self, state: Mapping[str, Any]) -> None:
        """Write the checkpoint to resume from."""
        with unwrapped_errors(self.checkpoint), replacing(self.checkpoint) as file:
            torch.save({"format": _FORMAT, **state}, file)

    def load(self) -> dict[str, Any] | None:
        """The checkpoint, or None if there is none yet."""
        if not self.checkpoint.exists():
            return None
        try:
            state = torch.load(self.checkpoint, map_location="cpu", weights_only=True)
            known = state["format"] == _FORMAT
        except Exception as error:
            raise StateError(
                f"{self.checkpoint} cannot be read ({error}). Remove it to start over."
            ) from None
        if not known:
            raise StateError(
                f"{self.checkpoint} was written by another version of torch-lawa. Remove it to "
                "start over."
            )
        return dict(state)

    def cut(self, step: int, *, epochs: float) -> None:
        """Drop rows and snapshots after `step`, which the resumed run writes again.

        Rows name the length of the run, so those of an extended run get the new one. Values of
        rounded weights (`--quantize`) are those of the end of a run: the old end loses them.
        """
        self._cut_metrics(step, epochs)
        self._cut_trajectory(step)

    def _cut_metrics(self, step: int, epochs: float) -> None:
        if not self.metrics.exists():
            return
        name = self.read_plan().run_name  # earlier versions left settings out of it
        rows = [
            _lengthened(row if "run" not in row else {**row, "run": name}, epochs)
            for row in read_metrics(self.metrics)
            if (row.get("step") or 0) <= step
        ]
        with replacing(self.metrics) as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows).encode())

    def save_snapshot(self, tensors: Mapping[str, Tensor], step: int, epoch: float) -> None:
        """Add a snapshot to the trajectory, for `lawa sweep` and `lawa average`."""
        self.trajectory.mkdir(exist_ok=True)
        notes = {"step": str(step), "epoch": f"{epoch:g}"}
        at = f"-epoch-{epoch:g}" if epoch == int(epoch) else ""
        save_tensors(self.trajectory / f"step-{step:08d}{at}.safetensors", tensors, notes)

    def _cut_trajectory(self, step: int) -> None:
        for path, at in self._snapshots():
            if at > step:
                path.unlink()

    def _snapshots(self) -> list[tuple[Path, int]]:
        """The files that `save_snapshot` wrote, and their steps."""
        found = [(path, _SNAPSHOT.fullmatch(path.name)) for path in self.trajectory.glob("step-*")]
        return [(path, int(match[1])) for path, match in found if match]


def _lengthened(row: Row, epochs: float) -> Row:
    """The row as a run of that many epochs would have written it."""
    if row.get("budget_epochs", epochs) == epochs:
        return row
    whole = {name: value for name, value in row.items() if not is_rounded(name)}
    return {**whole, "budget_epochs": epochs}


def _others(folder: Path) -> list[str]:
    """What `torch.distributed.checkpoint` did not write into the folder of a checkpoint."""
    if folder.is_symlink() or not folder.is_dir():
        return []
    return sorted(p.name for p in folder.iterdir() if not _SHARD.fullmatch(p.name) or p.is_dir())


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    return {**values["hyperparameters"], **{n: v for n, v in values.items() if n in _IDENTITY}}


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
    """The commit, if this package runs from a git checkout."""
    checkout = Path(__file__).resolve().parents[3]
    if not (checkout / ".git").exists():
        return os.environ.get("LAWA_COMMIT")
    git = ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"]
    with contextlib.suppress(OSError):
        return subprocess.run(git, capture_output=True, text=True).stdout.strip() or None
    return None
