"""One loop for all recipes: it learns, stops, goes on bit for bit, and averages what it says."""

import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from support.training import StopAt, rows_of, run, smoke_plan
from torch import Tensor, nn

from lawa_lab.recipes import loop
from lawa_lab.recipes.learning_rate import learning_rate
from lawa_lab.recipes.loop import make_task, train
from lawa_lab.recipes.optimizers import build_optimizer
from lawa_lab.recipes.registry import RECIPES
from lawa_lab.recipes.run_evaluator import RunEvaluator
from lawa_lab.recipes.run_folder import RunFolder, RunPlan
from lawa_lab.recipes.task import Worker
from lawa_lab.recipes.trainer import Trainer
from torch_lawa.errors import ConfigError, LawaError, StateError
from torch_lawa.metrics import read_metrics

pytestmark = pytest.mark.slow

STEPS = 4 * 9  # of the plan of the digits


def digits_plan() -> RunPlan:
    """Shorter than the smoke run: large batches, so few steps."""
    return smoke_plan("digits", wrap=("lookahead",), batch_size=96)


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_runs_in_seconds_and_learns(recipe: str, tmp_path: Path) -> None:
    outcome = run(smoke_plan(recipe, coefficients=("uniform",)), tmp_path)
    assert outcome.finished
    rows = rows_of(tmp_path)
    first, last = (row["train_loss"] for row in (rows[0], rows[-1]))
    assert last < first
    assert {row["weights"] for row in rows} == {"raw", "averaged"}
    assert {row["recipe"] for row in rows} == {recipe}
    assert len({row["epoch"] for row in rows}) == 4


@pytest.mark.parametrize(
    ("recipe", "changes"),
    [
        *((recipe, {}) for recipe in RECIPES),
        ("digits", {"validation_fraction": 0.3}),
        ("digits", {"validation_fraction": 0.3, "evaluate_test": True}),
        ("cifar100-resnet34", {"held_out": 16, "evaluate_test": True}),
    ],
)
def test_a_task_says_what_it_measures(recipe: str, changes: dict[str, Any]) -> None:
    task = make_task(smoke_plan(recipe, **changes), Worker())
    with torch.no_grad():
        assert list(task.evaluate(task.build_model().eval())) == list(task.metrics)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole")
    run(digits_plan(), path, save_trajectory=True)
    return path


@settings(max_examples=6, deadline=None)
@given(stop=st.integers(min_value=1, max_value=STEPS - 1))
def test_stopped_anywhere_it_goes_on_bit_for_bit(
    stop: int, whole: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("stopped")
    plan = digits_plan()
    outcome = run(plan, path, stop_at=stop, save_trajectory=True)
    assert (outcome.step, outcome.finished) == (stop, False)
    torch.manual_seed(stop)  # whatever the process drew meanwhile
    assert run(plan, path, save_trajectory=True).finished
    assert rows_of(path) == rows_of(whole)
    for name in ("averaged.safetensors", "trajectory/step-00000027-epoch-3.safetensors"):
        assert (path / name).read_bytes() == (whole / name).read_bytes(), name


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "digits"])
def test_other_recipes_resume_too(recipe: str, tmp_path: Path) -> None:
    plan = smoke_plan(recipe, epochs=2, ks=(2,), coefficients=("uniform",))
    for path, stop in ((tmp_path / "a", -1), (tmp_path / "b", 4)):
        while not run(plan, path, stop_at=stop).finished:
            stop = -1
    assert rows_of(tmp_path / "a") == rows_of(tmp_path / "b")


def test_the_rows_of_a_killed_run_are_made_again(tmp_path: Path, whole: Path) -> None:
    """Killed after an evaluation, the checkpoint is older than the last rows and snapshots."""
    plan = digits_plan()
    run(plan, tmp_path, stop_at=13, save_trajectory=True)
    (tmp_path / "trajectory" / "step-00000018-epoch-2.safetensors").write_bytes(b"later")
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 18, "weights": "raw", "test_loss": 9.0}) + '\n{"step": 5')
    run(plan, tmp_path, save_trajectory=True)
    assert rows_of(tmp_path) == rows_of(whole)
    assert len(list((tmp_path / "trajectory").iterdir())) == 4
    load_file(tmp_path / "trajectory" / "step-00000018-epoch-2.safetensors")


def test_a_checkpoint_is_saved_every_so_many_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[int] = []
    save = Trainer.save
    clock = itertools.count(step=40)  # seconds; it is read once per step and once per checkpoint
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(Trainer, "save", lambda t, to: (saved.append(t.step), save(t, to))[1])
    run(digits_plan(), tmp_path, save_minutes=2.0)
    assert saved == [*range(4, STEPS + 1, 4)]


def test_the_average_is_the_mean_of_the_trajectory(whole: Path) -> None:
    paths = sorted((whole / "trajectory").iterdir())[-2:]
    made = load_file(whole / "averaged.safetensors")
    snapshots = [load_file(path) for path in paths]
    for name in ("0.weight", "9.bias", "12.weight"):
        if name in made:
            mean = torch.stack([s[name].double() for s in snapshots]).mean(0).float()
            assert torch.equal(made[name], mean), name


def test_rows_say_where_and_how(whole: Path) -> None:
    rows = read_metrics(whole / "metrics.jsonl")
    last = rows[-1]
    name = "lookahead(sgd) with batch size 96"
    assert (last["run"], last["seed"], last["step"]) == (name, 3, STEPS)
    assert (last["device"], last["num_devices"]) == ("cpu", 1)
    rate = 0.2 * 0.5 * (1 + math.cos(math.pi * (STEPS - 1) / STEPS))
    assert last["learning_rate"] == pytest.approx(rate)
    assert 0 < rows[0]["train_seconds"] < last["train_seconds"]
    assert [(r["weights"], r["batch_norm"]) for r in rows[:2]] == [
        ("raw", None),
        ("raw", "re-estimated"),
    ]


def test_variants_are_evaluated_now_and_then_and_at_the_end(tmp_path: Path) -> None:
    plan = smoke_plan(
        "digits",
        epochs=5,
        ks=(2, 1),
        coefficients=("uniform", "exponential:0.5"),
        evaluate_every=2,
        variants_every=2,
    )
    run(plan, tmp_path)
    found: dict[Any, list[Any]] = {}
    for row in rows_of(tmp_path):
        if row["weights"] == "averaged":
            key = (row["k"], row["coefficients"], row["batch_norm"])
            found.setdefault(key, []).append(row["epoch"])
    every, some = [2, 4, 5], [4, 5]
    assert found == {
        (2, "uniform", "re-estimated"): every,
        (2, "uniform", "copied"): some,
        (1, "uniform", "re-estimated"): some,
        (1, "uniform", "copied"): some,
        (2, "exponential:0.5", "re-estimated"): some,
        (2, "exponential:0.5", "copied"): some,
    }


def test_snapshots_every_nu_steps(tmp_path: Path) -> None:
    run(smoke_plan("digits", epochs=1, nu=10, ks=(2,)), tmp_path, save_trajectory=True)
    steps = sorted({row["step"] for row in rows_of(tmp_path)})
    assert steps == [10, 20, 28]  # the end is evaluated, too
    epochs = sorted({row["epoch"] for row in rows_of(tmp_path)})
    assert epochs == [pytest.approx(10 / 28), pytest.approx(20 / 28), 1]
    assert len(list((tmp_path / "trajectory").iterdir())) == 2


def test_micro_batches_add_up_to_the_batch(tmp_path: Path) -> None:
    """Without BatchNorm: the same gradient but for rounding, in one piece or four."""
    for name, size in (("one", None), ("four", 2)):
        changes = {"micro_batch_size": size, "dropout": 0.0, "epochs": 1, "ks": (1,)}
        plan = smoke_plan("wikitext103-roberta", **changes)
        run(plan, tmp_path / name)
    one, four = (rows_of(tmp_path / name)[-1] for name in ("one", "four"))
    assert one["valid_loss"] == pytest.approx(four["valid_loss"], rel=1e-4)
    assert one["valid_loss"] != four["valid_loss"]  # it was really split


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"ks": (9,)}, "window would never be full.* lower --ks or --nu"),
        ({"ks": (1,), "samples": 99}, "lower --samples, --ks or --nu"),
        ({"batch_size": 2000}, "fewer examples"),
        ({"micro_batch_size": 5}, "micro_batch_size=5"),
    ],
)
def test_what_cannot_be_run_is_refused(changes: dict[str, Any], error: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=error):
        run(smoke_plan("digits", **changes), tmp_path)


def test_processes_get_equal_parts_of_a_batch() -> None:
    plan, worker = smoke_plan("cifar100-resnet34"), Worker(rank=1, world_size=3)
    with pytest.raises(ConfigError, match="batch_size=32: must be a multiple of the 3 processes"):
        Trainer(plan, make_task(plan, worker), worker)


def test_a_run_that_diverges_says_so(tmp_path: Path) -> None:
    with pytest.raises(LawaError, match="diverged"):
        run(smoke_plan("digits", learning_rate=1e30), tmp_path)


def test_a_damaged_checkpoint_is_no_beginning(tmp_path: Path) -> None:
    plan = smoke_plan("digits")
    run(plan, tmp_path, stop_at=3)
    checkpoint = tmp_path / "checkpoint.pt"
    content = checkpoint.read_bytes()
    checkpoint.write_bytes(content[: len(content) // 2])
    with pytest.raises(StateError, match=r"checkpoint\.pt cannot be read"):
        run(plan, tmp_path)


def test_another_run_is_not_gone_on_with(tmp_path: Path) -> None:
    run(smoke_plan("digits"), tmp_path, stop_at=3)
    folder = RunFolder(tmp_path)
    folder.require_same(smoke_plan("digits"))
    with pytest.raises(ConfigError, match=r"learning_rate was 0\.2 and is 0\.3"):
        folder.require_same(smoke_plan("digits", learning_rate=0.3))
    with pytest.raises(ConfigError, match="seed was 3 and is 4"):
        folder.require_same(smoke_plan("digits", seed=4))


@pytest.mark.parametrize("stop", [-1, 13])
@pytest.mark.parametrize("horizon", [None, 0.5])
def test_a_constant_rate_run_is_extended(stop: int, horizon: float | None, tmp_path: Path) -> None:
    """Finished or stopped, it ends with the bits of a run that was longer from the start."""

    def plan(epochs: int) -> RunPlan:
        changes = {"schedule": "constant", "ks": (2,), "horizon": horizon, "batch_size": 96}
        changes |= {"choose_window": True, "validation_fraction": 0.3}
        return smoke_plan("digits", epochs=epochs, **changes)

    run(plan(3), tmp_path / "extended", stop_at=stop, save_trajectory=True)
    run(plan(5), tmp_path / "extended", save_trajectory=True)
    run(plan(5), tmp_path / "whole", save_trajectory=True)
    assert rows_of(tmp_path / "extended") == rows_of(tmp_path / "whole")
    assert RunFolder(tmp_path / "extended").read_plan() == plan(5)
    made, expected = (
        {path.name: path.read_bytes() for path in (tmp_path / name).rglob("*.safetensors")}
        for name in ("extended", "whole")
    )
    assert made == expected
    with pytest.raises(ConfigError, match="epochs was 5 and is 4"):
        run(plan(4), tmp_path / "extended")


def test_a_run_that_is_extended_keeps_one_name(tmp_path: Path) -> None:
    """Rows of an earlier version may have another name for it."""

    def plan(epochs: int) -> RunPlan:
        changes = {"schedule": "constant", "momentum": 0.8, "ks": (2,)}
        return smoke_plan("digits", epochs=epochs, **changes)

    run(plan(3), tmp_path)
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace(" with momentum 0.8", ""))
    run(plan(5), tmp_path)
    assert {row["run"] for row in read_metrics(metrics)} == {plan(5).run_name}


@pytest.mark.parametrize("changes", [{"schedule": "cosine"}, {"schedule": "constant", "land": 0.5}])
def test_a_run_whose_rate_falls_is_not_extended(changes: dict[str, Any], tmp_path: Path) -> None:
    run(smoke_plan("digits", epochs=2, **changes), tmp_path, stop_at=3)
    with pytest.raises(ConfigError, match="epochs was 2 and is 3"):
        run(smoke_plan("digits", epochs=3, **changes), tmp_path)


def test_only_the_length_may_change(tmp_path: Path) -> None:
    run(smoke_plan("digits", schedule="constant", epochs=2), tmp_path, stop_at=3)
    longer = smoke_plan("digits", schedule="constant", epochs=3, learning_rate=0.3)
    with pytest.raises(ConfigError, match="epochs was 2 and is 3; learning_rate"):
        run(longer, tmp_path)


def test_a_run_of_another_version_names_the_settings(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.write_plan(smoke_plan("digits"), {})
    text = folder.config.read_text()
    folder.config.write_text(text.replace('"batch_norm_batches"', '"calibration_batches"'))
    with pytest.raises(ConfigError, match=r"settings calibration_batches.*that wrote it"):
        folder.read_plan()


def test_a_plan_returns_from_its_file(tmp_path: Path) -> None:
    for recipe in RECIPES:
        plan = smoke_plan(recipe)
        RunFolder(tmp_path).write_plan(plan, {"world_size": 1})
        assert RunFolder(tmp_path).read_plan() == plan


def test_settings_and_random_numbers_return(tmp_path: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    run(smoke_plan("digits"), tmp_path)
    assert torch.equal(torch.rand(1), expected)
    assert not torch.are_deterministic_algorithms_enabled()
    assert not torch.backends.cudnn.deterministic


def test_a_step_is_not_cut_in_two_by_ctrl_c(tmp_path: Path) -> None:
    """The same Ctrl-C may arrive twice: from the terminal and from a launcher."""
    plan = smoke_plan("digits")
    folder = RunFolder(tmp_path)
    folder.write_plan(plan, {})
    outcome = train(plan, folder, Worker(), callback=StopAt(7, 7))
    assert outcome.step == 7


def test_ctrl_c_at_the_last_step_comes_too_late(tmp_path: Path) -> None:
    assert run(digits_plan(), tmp_path, stop_at=STEPS).finished
    assert (tmp_path / "averaged.safetensors").exists()


def test_optimizers_are_the_ones_asked_for() -> None:
    plan = smoke_plan("digits")
    net = nn.Linear(1, 1)

    def built(**changes: Any) -> Any:
        return build_optimizer(smoke_plan("digits", **changes).config, net)

    assert isinstance(built(), torch.optim.SGD)
    assert type(built(optimizer="adam")) is torch.optim.Adam
    adamw = built(optimizer="adamw", beta2=0.98, epsilon=1e-6)
    assert type(adamw) is torch.optim.AdamW
    assert (adamw.defaults["betas"], adamw.defaults["eps"]) == ((0.9, 0.98), 1e-6)
    assert adamw.defaults["weight_decay"] == plan.config.weight_decay


def test_the_rate_rises_in_a_line_and_falls_as_asked() -> None:
    def rates(schedule: str) -> list[float]:
        changes = {"schedule": schedule, "warmup_steps": 4, "learning_rate": 2.0}
        config = smoke_plan("digits", **changes).config
        return [learning_rate(config, step, 12) for step in range(12)]

    up = [0.5, 1.0, 1.5, 2.0]
    assert rates("constant") == [*up, *[2.0] * 8]
    assert rates("linear") == [*up, *(2.0 * (1 - i / 8) for i in range(8))]
    cosine = [1 + math.cos(math.pi * i / 8) for i in range(8)]
    assert rates("cosine") == pytest.approx([*up, *cosine])


def test_a_plan_names_its_run() -> None:
    def name(**changes: Any) -> str:
        return smoke_plan("wikitext103-roberta", **changes).run_name

    assert name() == "adamw"
    assert name(schedule="constant") == "adamw, constant rate"
    assert name(wrap=("lookahead",), optimizer="sgd") == "lookahead(sgd)"
    assert name(batch_size=16, schedule="constant") == "adamw with batch size 16, constant rate"
    both = RunPlan(config=RECIPES["cifar100-resnet34"](batch_size=64, weight_decay=2e-4))
    assert both.run_name == "sgd with batch size 64 and weight decay 0.0002"
    assert name(momentum=0.8, schedule="constant") == "adamw with momentum 0.8, constant rate"
    several = "adamw with beta2 0.95 and epsilon 1e-07 and clip norm 1.0"
    assert name(beta2=0.95, epsilon=1e-7, clip_norm=1.0) == several


def test_low_precision_rows_are_those_of_the_trajectory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: every row, evaluated again by itself from the files, has the same values."""
    low = torch.autocast("cpu", torch.bfloat16)
    monkeypatch.setattr(Trainer, "autocast", lambda self: low)
    run(smoke_plan("digits", ks=(2, 3)), tmp_path, save_trajectory=True)
    again = RunEvaluator(tmp_path, device="cpu")
    snapshots = [load_file(path) for path in sorted((tmp_path / "trajectory").iterdir())]
    checked = 0
    for row in rows_of(tmp_path):
        if row["batch_norm"] == "re-estimated":
            window = snapshots[row["epoch"] - (row["k"] or 1) : row["epoch"]]
            mean = {
                name: torch.stack([s[name].double() for s in window]).mean(0).to(tensor.dtype)
                if tensor.is_floating_point()
                else tensor
                for name, tensor in window[-1].items()
            }
            values = again(mean)
            names = ("test_loss", "test_accuracy")
            assert [values[name] for name in names] == [row[name] for name in names], row
            checked += 1
    assert checked == 4 + 3 + 2


@pytest.mark.parametrize(
    ("recipe", "lenient"), [("wikitext103-roberta", False), ("cifar100-resnet34", True)]
)
def test_gradients_repeat_strictly_where_they_can(
    recipe: str, lenient: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On both ways: forward chooses a fused attention, and not all of them repeat their bits."""
    seen: set[tuple[str, bool, bool]] = set()

    def recorded(what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            on = torch.are_deterministic_algorithms_enabled()
            seen.add((what, on, torch.is_deterministic_algorithms_warn_only_enabled()))
            return function(*arguments)

        return call

    plan = smoke_plan(recipe)
    task = type(make_task(plan, Worker()))
    monkeypatch.setattr(task, "loss", recorded("loss", task.loss))
    monkeypatch.setattr(Tensor, "backward", recorded("gradient", Tensor.backward))
    run(plan, tmp_path, stop_at=2)
    assert seen == {("loss", True, lenient), ("gradient", True, lenient)}
    assert not torch.are_deterministic_algorithms_enabled()
