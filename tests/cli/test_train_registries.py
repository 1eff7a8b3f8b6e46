"""A recipe and a method are added in one place: registered, they appear everywhere."""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from support.training import rows_of
from torch import Tensor, nn

from lawa_lab.methods.registry import METHODS, Method, register_method
from lawa_lab.methods.running_average import RunningAverage
from lawa_lab.recipes.config import TrainConfig, setting
from lawa_lab.recipes.registry import RECIPES, register_recipe
from lawa_lab.recipes.task import Batch, Worker, seeded
from torch_lawa.cli import main as cli
from torch_lawa.errors import ConfigError


def lawa(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        cli.main(list(arguments))
    assert isinstance(caught.value.code, int)
    return caught.value.code


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class LineTask:
    """Fits a line with least squares."""

    num_batches = 5
    metrics: tuple[str, ...] = ("test_loss",)
    strict = True

    def __init__(self, slope: float, seed: int) -> None:
        self._slope, self._seed = slope, seed

    def build_model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def batches(self, epoch: int, first: int = 0) -> Iterator[Batch]:
        for number in range(first, self.num_batches):
            generator = seeded(torch.device("cpu"), self._seed, epoch, number)
            inputs = torch.randn(8, 1, generator=generator)
            yield inputs, self._slope * inputs

    def calibration(self) -> list[Batch]:
        return []

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        inputs, targets = batch
        return (model(inputs) - targets).square().mean()

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        inputs = torch.linspace(-1, 1, 9)[:, None]
        return {"test_loss": self.loss(model, (inputs, self._slope * inputs)).item()}


@pytest.fixture
def toy() -> Iterator[str]:
    @register_recipe
    @dataclass(frozen=True, kw_only=True)
    class LineConfig(TrainConfig):
        """A line."""

        recipe: ClassVar[str] = "toy-line"
        about: ClassVar[str] = "Least squares on a line."
        smoke_values: ClassVar[dict[str, Any]] = {"epochs": 3}

        epochs: int = 6
        ks: tuple[int, ...] = (2,)
        slope: float = setting(2.0, "Slope of the toy line.", minimum=-5)

        def make_task(
            self, data: Path | None, *, seed: int, worker: Worker, smoke: bool
        ) -> LineTask:
            return LineTask(self.slope, seed)

    yield "toy-line"
    RECIPES.remove("toy-line")


@pytest.fixture
def newest() -> Iterator[str]:
    @register_method
    @dataclass(frozen=True)
    class Newest(Method):
        """The newest weights: an average of one step."""

        name: ClassVar[str] = "newest"
        typed: ClassVar[str] = "newest"

        def build(self, model: nn.Module) -> RunningAverage:
            return RunningAverage(model, lambda step: 1.0, kind=str(self))

    yield "newest"
    METHODS.remove("newest")


def test_a_new_recipe_is_trained_from_the_command_line(
    toy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert lawa("train", "--help") == 0
    assert "Least squares on a line." in capsys.readouterr().out
    assert lawa("train", toy, "--help") == 0
    shown = capsys.readouterr().out
    assert "Slope of the toy line." in shown
    assert "Peak learning rate." in shown  # inherited
    assert lawa("train", toy, "--slope", "-9") == 2
    assert "--slope -9.0: must be at least -5" in capsys.readouterr().err
    assert lawa("train", toy, "--slope", "-1", "-o", "run") == 0
    rows = rows_of(Path("run"))
    assert {row["recipe"] for row in rows} == {toy}
    assert {row["weights"] for row in rows} == {"raw", "averaged"}
    assert rows[-1]["test_loss"] < rows[0]["test_loss"]
    stored = json.loads(Path("run/config.json").read_text())
    assert stored["hyperparameters"]["slope"] == -1
    assert lawa("train", toy, "--slope", "-1", "-o", "run", "--resume") == 0


def test_a_name_is_registered_once(toy: str) -> None:
    with pytest.raises(ConfigError, match="toy-line"):
        register_recipe(RECIPES[toy])


def test_methods_are_evaluated_beside_the_window(
    toy: str, newest: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert lawa("train", toy, "--methods", "newest,ema:0.5,ema:0.9", "-o", "run") == 0
    rows = rows_of(Path("run"))
    last = {(row["weights"], row["coefficients"]): row for row in rows if row["epoch"] == 6}
    assert set(last) == {
        ("raw", None), ("averaged", "uniform"), ("newest", ""), ("ema", "0.5"), ("ema", "0.9"),
    }  # fmt: skip
    assert last["newest", ""]["test_loss"] == last["raw", None]["test_loss"]
    losses = [last[key]["test_loss"] for key in (("ema", "0.5"), ("ema", "0.9"), ("raw", None))]
    assert len(set(losses)) == 3
    # Every method is charged its own updates; the window is charged its snapshots.
    charged = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    seconds = {row["coefficients"]: row["collect_seconds"] for row in charged if row["epoch"] == 6}
    assert len(set(seconds.values())) > 3
    assert lawa("train", "--help") == 0
    capsys.readouterr()
    assert lawa("train", toy, "--methods", "ema") == 2
    assert "ema:DECAY" in capsys.readouterr().err


def test_methods_resume_bit_for_bit(toy: str) -> None:
    words = ["train", "digits", "--smoke", "--methods", "ema:0.9", "--json", "-o"]
    assert lawa(*words, "whole") == 0
    from support.training import StopAt

    from lawa_lab.recipes.loop import train
    from lawa_lab.recipes.run_folder import RunFolder

    plan = RunFolder(Path("whole")).read_plan()
    folder = RunFolder(Path("parts"))
    assert not train(plan, folder, Worker(), callback=StopAt(40)).finished
    assert train(plan, folder, Worker()).finished
    assert rows_of(Path("parts")) == rows_of(Path("whole"))


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from lawa_lab.cli.train import command\n"
        "for words in (['--help'], ['cifar100-resnet34', '--help']):\n"
        "    try: command.main(words)\n"
        "    except SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'sklearn', 'PIL', 'transformers'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "imagenet-resnet50" in done.stdout
    assert "--methods" in done.stdout
    assert "ema:DECAY" in done.stdout
