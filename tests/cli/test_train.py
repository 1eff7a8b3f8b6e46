"""`lawa train`: options are the fields; runs are kept, resumed, replaced only when asked."""

import dataclasses
import json
import os
import re
import signal
import time
from pathlib import Path

import click
import pytest
import torch
from click.shell_completion import ShellComplete
from support.programs import LAWA, Program
from support.ranks import free_port
from support.training import rows_of

from lawa_lab.cli.train import command
from lawa_lab.recipes.registry import RECIPES
from torch_lawa.cli import main as cli

DIGITS = ["train", "digits", "--smoke", "--seed", "2"]


def lawa(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        cli.main(list(arguments))
    assert isinstance(caught.value.code, int)
    return caught.value.code


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_field_is_an_option_with_its_default(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert lawa("train", recipe, "--dry-run") == 0
    shown = json.loads(capsys.readouterr().out)
    config = RECIPES[recipe]()
    expected = json.loads(json.dumps(dataclasses.asdict(config)))
    assert {name: shown[name] for name in expected} == expected
    options = command.get_command(click.Context(command), recipe).params  # type: ignore[union-attr]
    helps = {option.name: option.help for option in options if isinstance(option, click.Option)}
    assert not [name for name in expected if name not in helps]


def test_help_says_where_defaults_are_from(capsys: pytest.CaptureFixture[str]) -> None:
    def shown(recipe: str) -> str:
        assert lawa("train", recipe, "--help") == 0
        return " ".join(capsys.readouterr().out.split())

    digits, cifar = shown("digits"), shown("cifar100-resnet34")
    assert "Defaults are the paper's values" in cifar
    assert "paper" not in digits  # which did not train it
    assert "--data" in cifar
    assert "--data" not in digits
    assert "swa:START_STEP" in digits


def test_options_reach_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "--learning-rate",
        "0.3",
        "--ks",
        "4,2",
        "--wrap",
        "lookahead",
        "--schedule",
        "constant",
    )
    assert lawa("train", "digits", *words, "--nu", "7", "--dry-run") == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["learning_rate"], shown["ks"], shown["nu"]) == (0.3, [4, 2], 7)
    assert (shown["wrap"], shown["schedule"]) == (["lookahead"], "constant")


def test_numbers_may_be_fractions(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--horizon", "1/3", "--evaluate-at", "1/4,1/2", "--methods", "horizon:1/2:8")
    assert lawa("train", "digits", *words, "--epochs", "3/2", "--dry-run") == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["horizon"], shown["evaluate_at"], shown["epochs"]) == (1 / 3, [0.25, 0.5], 1.5)


def test_what_belongs_to_a_rule_is_not_another_rule(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rules = ("--ks", "2", "--coefficients", "uniform,explicit:1,2e0,3, blend:0.4:recent:0.1")
    assert lawa("train", *DIGITS[1:], *rules, "-o", "run", "--json") == 0
    expected = ["uniform", "explicit:1,2e0,3", "blend:0.4:recent:0.1"]
    assert json.loads(Path("run/config.json").read_text())["hyperparameters"]["coefficients"] == (
        expected
    )
    averaged = [row for row in rows_of(Path("run")) if row["weights"] == "averaged"]
    assert {row["coefficients"] for row in averaged} == {
        "uniform", "explicit:1,2,3", "blend:0.4:recent:0.1"
    }  # fmt: skip


def test_what_is_asked_for_goes_before_the_smoke_values(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert lawa("train", "cifar100-resnet34", "--smoke", "--epochs", "7", "--dry-run") == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["epochs"], shown["width"]) == (7, 4)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["no-such-recipe"], 2, "choose from cifar100-resnet34, digits"),
        (["digits", "--ks", "two"], 2, "is not a list"),
        (["digits", "--ks", "0"], 2, "--ks 0"),
        (["digits", "--learning-rate", "-1"], 2, "--learning-rate -1.0"),
        (["digits", "--optimizer", "rmsprop"], 2, "rmsprop"),
        (["digits", "--coefficients", "best"], 2, "coefficients 'best'"),
        (["digits", "--epochs", "-3"], 2, "--epochs -3: must be positive"),
        (["digits", "--horizon", "1/0"], 2, "'1/0' is not a number"),
        (["digits", "--horizon", "5/4"], 2, "--horizon 1.25: must be below 1"),
        (["digits", "--methods", "horizon:1/0:8"], 2, "horizon:SHARE:K"),
        (["digits", "--land", "0.2"], 2, "Set --schedule constant"),
        (["digits", "--quantize", "8,8"], 2, "--quantize 8,8: give distinct"),
        (["digits", "--coefficients", "uniform,uniform"], 2, "each rule once"),
        (["digits", "--evaluate-test"], 2, "--validation-fraction"),
        (["cifar100-resnet34", "--evaluate-test"], 2, "--held-out"),
        (
            ["digits", "--evaluate-at", "20,50,60,70"],
            2,
            "--evaluate-at 60,70: the run ends after 50",
        ),
        (["digits", "--evaluate-at", "7", "--budgets", "3,5"], 2, "the run ends after 5 epochs"),
        (
            ["digits", "--evaluate-at", "2", "--budgets", "3,5", "--schedule", "constant"],
            2,
            "Pass only --budgets",
        ),
        (["digits", "--budgets", ""], 2, "distinct, positive numbers"),
        (["digits", "--resume", "--overwrite"], 2, "pass only one"),
        (["digits", "--wrap", "lookahead:5:2"], 2, "lookahead[:K:ALPHA]"),
        (["digits", "--test-fraction", "0.9999"], 2, "--test-fraction 0.9999: both"),
        (["digits", "--batch-size", "2000"], 2, "--batch-size 2000: the training"),
        (["digits", "--device", "tpu"], 2, "--device 'tpu': use cpu"),
        (["digits", "--parallel", "fsdp", "--device", "cpu"], 2, "torchrun"),
        (["digits", "--device", "cuda"], 2, "no CUDA device"),
        (["digits", "--budgets", "2,3", "--epochs", "50"], 2, "--epochs"),
        (["digits", "--data", "data"], 2, "--data"),
        (["cifar100-resnet34"], 1, "cifar-100-binary"),
        (["imagenet-resnet50", "--data", "nowhere"], 1, "nowhere"),
        (["wikitext103-roberta", "--data", "nowhere"], 1, "nowhere"),
    ],
)
def test_mistakes_are_told(
    words: list[str],
    code: int,
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert lawa("train", *words) == code
    assert said in capsys.readouterr().err
    assert not list(Path().rglob("metrics.jsonl"))


def test_a_shell_that_completes_behind_an_unknown_recipe_is_told_nothing() -> None:
    completion = ShellComplete(command, {}, "lawa", "_LAWA_COMPLETE")
    assert completion.get_completions(["no-such-recipe"], "--ep") == []
    assert "--epochs" in [item.value for item in completion.get_completions(["digits"], "--ep")]


def test_a_run_from_begin_to_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert lawa(*DIGITS) == 0
    shown = capsys.readouterr().out
    assert "digits, sgd, seed 2: 4 epochs on cpu" in shown
    assert "\nepoch 4  " in shown
    assert shown.endswith("lawa report runs/digits-sgd-seed-2\n")
    run = Path("runs/digits-sgd-seed-2")
    last = rows_of(run)[-1]
    config = json.loads((run / "config.json").read_text())
    assert (config["seed"], config["hyperparameters"]["width"]) == (2, 4)
    assert last["epoch"] == 4

    assert lawa(*DIGITS) == 1  # the run is there
    assert "--resume" in capsys.readouterr().err
    assert lawa(*DIGITS, "--resume") == 0
    assert "It is finished" in capsys.readouterr().out
    assert lawa(*DIGITS, "--resume", "--learning-rate", "0.1") == 2
    assert "learning_rate was 0.2 and is 0.1" in capsys.readouterr().err
    assert lawa(*DIGITS, "--overwrite", "--json") == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert rows[-1]["test_loss"] == last["test_loss"]
    assert lawa("report", "runs") == 0
    assert "digits: test loss" in capsys.readouterr().out


def test_the_guide_s_landing_blends() -> None:
    guide = Path(__file__).parents[2] / "docs" / "guides" / "choosing.md"
    found = re.search(r"`lawa train RECIPE (--schedule constant --land [^`]*)`", guide.read_text())
    assert found is not None
    assert lawa(*DIGITS, *found[1].split(), "-o", "run") == 0
    averaged = [row for row in rows_of(Path("run")) if row["weights"] == "averaged"]
    facts = {(row["land"], row["k"], row["coefficients"]) for row in averaged}
    assert facts == {(0.1, 16, "blend:0.4")}


def test_a_target_is_a_loss_or_an_accuracy(capsys: pytest.CaptureFixture[str]) -> None:
    assert lawa(*DIGITS, "--until", "test_perplexity=3", "-o", "run") == 2
    assert "_loss or _accuracy" in capsys.readouterr().err
    assert lawa(*DIGITS, "--until", "test_loss", "-o", "run") == 2
    assert "METRIC=VALUE" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--until", "valid_loss=0.1"], "this run measures test_loss, test_accuracy"),
        (["--until", "tst_accuracy=0.1"], "this run measures test_loss, test_accuracy"),
        (["--until", "test_accuracy=95"], "0.95"),
        (["--until", "test_loss=nan"], "METRIC=VALUE"),
        (["--choose-window"], "valid_loss"),
        (["--methods", "greedy-soup"], "valid_loss"),
    ],
)
def test_what_a_recipe_does_not_measure_is_refused_before_training(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert lawa(*DIGITS, *words, "-o", "run") == 2
    assert said in capsys.readouterr().err
    assert not Path("run").exists()
    assert lawa(*DIGITS, "--until", "test_accuracy=0.1", "-o", "run") == 0  # the folder is free


def test_a_refused_landing_leaves_no_folder(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*DIGITS, "--schedule", "constant", "--land", "0.2", "-o", "all/run", "--budgets"]
    assert lawa(*words, "1,2", "--choose-window") == 2  # known when the data is loaded
    assert not Path("all").exists()
    assert lawa(*words, "1,2") == 0
    before = sorted(Path().rglob("*"))
    assert lawa(*words, "1,2,2.1", "--resume") == 2
    assert "would start before that" in capsys.readouterr().err
    assert sorted(Path().rglob("*")) == before


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--warmup-steps", "113"], "--warmup-steps 113: longer than the 112 steps of a"),
        (["--land", "0.5", "--warmup-steps", "57"], "longer than the 56 steps before the landing"),
        (["--land", "0.5", "--budgets", "4,1", "--warmup-steps", "15"], "14 steps before"),
    ],
)
def test_a_warm_up_longer_than_the_run_is_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert lawa(*DIGITS, "--schedule", "constant", *words, "-o", "run") == 2
    assert said in capsys.readouterr().err
    assert not Path("run").exists()


def test_a_reached_target_is_told_again(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*DIGITS, "--ks", "2,1", "--until", "test_accuracy=0.2", "-o", "run"]
    assert lawa(*words) == 0
    shown = capsys.readouterr().out
    assert "The average reached test_accuracy 0.2" in shown
    first = next(line for line in shown.splitlines() if line.startswith("epoch 1"))
    assert first.endswith("→      -")  # the average of 2, not of 1
    rows = rows_of(Path("run"))
    assert f" {rows[1]['test_loss']:.4f} → " in first  # BatchNorm is treated alike in all lines
    assert lawa(*words, "--resume") == 0
    shown = capsys.readouterr().out
    assert "already reached test_accuracy 0.2" in shown
    assert f"after {rows[-1]['step']} of" in shown
    assert rows_of(Path("run")) == rows


def test_a_target_reached_at_the_end_saves_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "digits", "--epochs", "2", "--ks", "2", "--until", "test_accuracy=0.2"]
    assert lawa(*words, "-o", "run") == 0
    assert "epoch 2: nothing was saved" in capsys.readouterr().out


def test_a_target_and_landings_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--schedule", "constant", "--land", "0.5", "--budgets", "1,2"]
    assert lawa(*DIGITS, *words, "--until", "test_accuracy=0.2", "-o", "run") == 2
    assert "--until" in capsys.readouterr().err
    assert not Path("run").exists()


def test_a_mistake_neither_costs_nor_leaves_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    cifar = ["train", "cifar100-resnet34", "--smoke", "--epochs", "3"]
    assert lawa(*cifar[:2]) == 1  # no data yet
    assert lawa(*cifar) == 0  # the folder is free
    metrics = Path("runs/cifar100-resnet34-sgd-seed-0/metrics.jsonl")
    before = metrics.read_text()
    assert lawa(*cifar[:2], "--overwrite") == 1
    assert lawa(*cifar, "--overwrite", "--ks", "60") == 2
    assert "never be full" in capsys.readouterr().err
    other = ["-o", str(metrics.parent.rename("runs/epochs=3")), "--resume"]
    assert lawa(*cifar, *other, "--learning-rate", "1") == 2
    assert "runs/epochs=3 contains a different run" in capsys.readouterr().err
    Path("runs/epochs=3").rename(metrics.parent)
    assert metrics.read_text() == before


def test_a_budget_that_is_too_short_is_refused_before_the_others_are_trained(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert lawa(*DIGITS, "--ks", "3", "--budgets", "4,2", "-o", "run") == 2
    assert "takes 2 snapshots" in capsys.readouterr().err
    assert not Path("run").exists()


def test_each_recipe_names_the_data_that_it_wants(capsys: pytest.CaptureFixture[str]) -> None:
    for recipe, said in (
        ("wikipedia-decoder", "Wikipedia"),
        ("wikitext103-roberta", "WikiText-103"),
    ):
        assert lawa("train", recipe, "--data", "nowhere") == 1
        assert said in capsys.readouterr().err


def test_runs_that_reports_tell_apart_have_folders_of_their_own() -> None:
    smoke = ["train", "digits", "--smoke", "--epochs", "2"]
    assert (
        lawa(*smoke)
        == lawa(*smoke, "--schedule", "constant")
        == lawa(*smoke, "--wrap", "lookahead")
        == 0
    )
    found = sorted(path.name for path in Path("runs").iterdir())
    assert found == [
        "digits-lookahead-sgd-seed-0",
        "digits-sgd-constant-rate-seed-0",
        "digits-sgd-seed-0",
    ]


def test_runs_of_other_settings_of_the_optimizer_are_reported_apart(
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = ("batch size 64", "weight decay 0.02", "momentum 0.8", "clip norm 5.0")
    for setting in ("", *settings):
        name, _, value = setting.rpartition(" ")
        words = [f"--{name.replace(' ', '-')}", value] if name else []
        assert lawa(*DIGITS, *words) == 0
    capsys.readouterr()
    assert lawa("report", "runs", "--metric", "test_loss") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert [setting for setting in settings if f"sgd with {setting}" not in shown] == []


def test_metrics_of_something_else_are_not_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine").mkdir()
    Path("mine/metrics.jsonl").write_text("precious\n")
    assert lawa(*DIGITS, "-o", "mine", "--overwrite") == 1
    assert "something else" in capsys.readouterr().err
    assert Path("mine/metrics.jsonl").read_text() == "precious\n"


def test_a_sweep_of_the_trajectory_gives_the_rows_of_the_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert lawa(*DIGITS, "--ks", "2,3", "-o", "run", "--save-trajectory") == 0
    words = ("--k", "2,3", "--evaluator", "run", "--metrics", "swept/metrics.jsonl")
    assert lawa("sweep", "run/trajectory", *words) == 0
    key = ("epoch", "step", "seed", "weights", "k", "batch_norm", "test_loss", "test_accuracy")
    swept = {tuple(row[name] for name in key) for row in rows_of(Path("swept"))}
    online = {tuple(row[name] for name in key) for row in rows_of(Path("run"))}
    assert swept == {row for row in online if row[5] == "re-estimated"}
    assert len(swept) == 4 + 3 + 2


@pytest.mark.skipif(os.name != "posix", reason="sends SIGINT")
def test_ctrl_c_saves_and_resume_goes_on(tmp_path: Path) -> None:
    long = ["train", "digits", "--epochs", "400", "-o", "run"]
    metrics = tmp_path / "run" / "metrics.jsonl"
    with Program(LAWA, *long) as process:
        deadline = time.monotonic() + 120
        while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate()
    assert process.returncode == 130
    assert "checkpoint in run" in said
    assert "--resume" in said
    done = json.loads((tmp_path / "run" / "config.json").read_text())
    assert done["hyperparameters"]["epochs"] == 400
    with Program(LAWA, *long, "--resume") as again:
        assert "digits" in again.stdout.readline()
        assert "Resumed after step" in again.stdout.readline()


def test_two_processes_train_as_one() -> None:
    """DDP, started as torchrun does: every process sees its half.

    The net has no BatchNorm to differ by.
    """
    words = ["train", "wikitext103-roberta", "--smoke", "--dropout", "0.0"]
    words += ["--epochs", "2", "--ks", "2"]
    assert lawa(*words, "-o", "one") == 0
    port = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    started = [Program(LAWA, *words, "-o", "two", environ={**port, **rank}) for rank in ranks]
    for process in started:
        with process:
            _, said = process.communicate(timeout=120)
            assert process.returncode == 0, said
    one, two = rows_of(Path("one")), rows_of(Path("two"))
    assert [row["num_devices"] for row in two] == [2] * len(one)
    for a, b in zip(one, two, strict=True):
        assert (a["step"], a["k"]) == (b["step"], b["k"])
        # The masks of the two halves are drawn apart, so only about the same.
        assert b["valid_loss"] == pytest.approx(a["valid_loss"], rel=0.1)
    assert two[-1]["train_loss"] < two[0]["train_loss"]


FOREIGN = ("checkpoint/sub/x", "checkpoint.pt", "trajectory/step-best.safetensors", "config.json")


def test_a_folder_of_another_program_is_not_overwritten(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in FOREIGN:
        path = Path("mine", name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('{"model_type": "llama"}')
    assert lawa(*DIGITS, "-o", "mine", "--overwrite") == 1
    assert "something else" in capsys.readouterr().err
    assert {Path("mine", name).read_text() for name in FOREIGN} == {'{"model_type": "llama"}'}
    assert len([path for path in Path("mine").rglob("*") if path.is_file()]) == len(FOREIGN)


def test_overwrite_removes_only_files_of_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    short = [*DIGITS, "-o", "run", "--save-trajectory"]
    assert lawa(*short) == 0
    theirs = [Path("run/trajectory", f"step-{name}.safetensors") for name in ("best", "9-mine")]
    for path in (*theirs, Path("run/notes.txt")):
        path.write_text("precious")
    stale = Path("run/trajectory/step-00009999-epoch-7.safetensors")
    stale.write_text("of the older run")
    shards = Path("run/checkpoint")
    shards.mkdir()
    for name in (".metadata", "__0_0.distcp", "notes.txt"):
        (shards / name).write_text("shard")
    assert lawa(*short, "--overwrite") == 1
    assert "notes.txt" in capsys.readouterr().err
    assert stale.exists()
    (shards / "notes.txt").unlink()
    assert lawa(*short, "--overwrite") == 0
    assert not stale.exists()
    assert not shards.exists()
    assert {path.read_text() for path in (*theirs, Path("run/notes.txt"))} == {"precious"}


def test_a_demo_does_not_share_the_folder_of_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    Path("run").mkdir()
    Path("run/metrics.jsonl").write_text("of a run\n")
    assert lawa("demo", "-o", "run", "--epochs", "1", "--k", "1") == 1
    assert "metrics.jsonl" in capsys.readouterr().err
    assert [path.name for path in Path("run").iterdir()] == ["metrics.jsonl"]
