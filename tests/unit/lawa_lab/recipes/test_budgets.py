"""Runs at several budgets: landings branch off one run and equal runs of their own."""

import math
from pathlib import Path
from typing import Any

import pytest
from support.training import StopAt, rows_of, run, smoke_plan

from lawa_lab.recipes.budgets import plan_budgets
from lawa_lab.recipes.learning_rate import learning_rate
from lawa_lab.recipes.loop import Target, train
from lawa_lab.recipes.registry import RECIPES
from lawa_lab.recipes.run_folder import RunFolder, RunPlan
from lawa_lab.recipes.task import Worker
from lawa_lab.report.runs import load_runs
from torch_lawa.errors import ConfigError
from torch_lawa.metrics import Row, read_metrics

METHODS = ("growing-ema:0.1", "horizon:0.5:4:0.6")


def landing_plan(**changes: Any) -> RunPlan:
    changes = {"ks": (2,), "epochs": 3, "schedule": "constant", "land": 0.5, **changes}
    changes = {"methods": METHODS, "quantize": (8,), "horizon": 0.5, "samples": 2, **changes}
    return smoke_plan("digits", **changes)


def test_a_branch_has_the_rows_of_a_run_of_its_own(tmp_path: Path) -> None:
    [budgeted] = plan_budgets(landing_plan(), [1.5, 3], tmp_path / "all", if_used="resume")
    # Stopped inside the first branch: it starts again from its trunk.
    outcome = train(
        budgeted.plan, budgeted.folder, Worker(), branches=budgeted.branches, callback=StopAt(25)
    )
    assert not outcome.finished
    assert train(budgeted.plan, budgeted.folder, Worker(), branches=budgeted.branches).finished
    run(landing_plan(evaluate_at=(1.5, 3)), tmp_path / "own")
    own = rows_of(tmp_path / "own")
    branched = rows_of(tmp_path / "all" / "landing-0.5-epochs-3")
    assert branched == [row for row in own if row["step"] >= branched[0]["step"]]
    assert {row["weights"] for row in branched} == {"raw", "averaged", "growing-ema", "horizon"}
    assert "test_8bit_loss" in branched[-1]
    averages = [tmp_path / "own", tmp_path / "all" / "landing-0.5-epochs-3"]
    first, second = (path / "averaged.safetensors" for path in averages)
    assert first.read_bytes() == second.read_bytes()
    # The trunk is as if it had never branched, and is evaluated at each budget.
    run(landing_plan(land=0.0, evaluate_at=(1.5, 3)), tmp_path / "plain")
    assert rows_of(tmp_path / "all" / "constant") == rows_of(tmp_path / "plain")
    assert {row["epoch"] for row in rows_of(tmp_path / "plain")} == {1, 1.5, 2, 3}


def train_budgets(plan: RunPlan, budgets: list[float], path: Path, stop_at: int = -1) -> None:
    for own in plan_budgets(plan, budgets, path, if_used="resume"):
        at = StopAt(stop_at)
        train(own.plan, own.folder, Worker(), branches=own.branches, callback=at)


def test_landings_of_a_sharded_run_are_refused_before_it_trains(tmp_path: Path) -> None:
    [own] = plan_budgets(landing_plan(), [1.5, 3], tmp_path, if_used="resume")
    with pytest.raises(ConfigError, match="branch off a sharded run"):
        train(own.plan, own.folder, Worker(), parallel="fsdp", branches=own.branches)
    assert not own.folder.used


@pytest.mark.parametrize("stop", [-1, 10])
def test_larger_budgets_are_added_to_a_constant_rate_run(stop: int, tmp_path: Path) -> None:
    """Finished or stopped, all rows are those of a run that had every budget from the start."""
    plan = landing_plan()
    train_budgets(plan, [1.5, 1], tmp_path / "added", stop_at=stop)
    train_budgets(plan, [1, 1.5, 3], tmp_path / "added")
    train_budgets(plan, [3, 1.5, 1], tmp_path / "whole")
    folders = sorted(path.name for path in (tmp_path / "whole").iterdir())
    assert len(folders) == 4
    for name in folders:
        assert rows_of(tmp_path / "added" / name) == rows_of(tmp_path / "whole" / name)


def test_a_landing_that_would_start_in_the_past_is_refused(tmp_path: Path) -> None:
    """It was left out in silence. The run in the folder stays what it was."""
    train_budgets(landing_plan(land=0.0), [1, 2], tmp_path)
    for budgets, missed in (([1, 2], "1 and 2 epochs"), ([1, 2, 3], "1, 2 and 3 epochs")):
        with pytest.raises(ConfigError, match=f"{missed} .* Budgets of 4 epochs or more"):
            train_budgets(landing_plan(), budgets, tmp_path)
    assert RunFolder(tmp_path / "constant").read_plan().config.epochs == 2
    train_budgets(landing_plan(land=0.0), [1, 2], tmp_path)


@pytest.mark.parametrize("budgets", [[1, 1.5, 2], [2], [1, 3], [1]])
def test_budgets_that_cannot_be_added_are_refused(budgets: list[float], tmp_path: Path) -> None:
    train_budgets(landing_plan(land=0.0), [1, 2], tmp_path)
    with pytest.raises(ConfigError, match=r"larger than 2 .* --budgets 1,2,4"):
        train_budgets(landing_plan(land=0.0), budgets, tmp_path)


def test_annealed_budgets_are_runs_of_their_own_and_a_constant_rate_serves_all(
    tmp_path: Path,
) -> None:
    annealed = plan_budgets(smoke_plan("digits"), [2, 4], tmp_path, if_used="refuse")
    assert [r.folder.path.name for r in annealed] == ["epochs-2", "epochs-4"]
    assert [r.plan.config.epochs for r in annealed] == [2, 4]
    constant = smoke_plan("digits", schedule="constant")
    [anytime] = plan_budgets(constant, [2, 4], tmp_path, if_used="refuse")
    assert (anytime.plan.config.epochs, anytime.branches) == (4, ())
    with pytest.raises(ConfigError, match="budgets"):
        plan_budgets(constant, [2, 2], tmp_path, if_used="refuse")


def test_training_stops_at_its_target(tmp_path: Path) -> None:
    plan = smoke_plan("digits", schedule="constant", ks=(2,))
    target = Target.parse("test_loss=1.1")
    outcome = train(plan, RunFolder(tmp_path), Worker(), until=target)
    assert outcome.reached is not None
    averaged = [
        row for row in rows_of(tmp_path) if row["batch_norm"] == "re-estimated" and row["k"]
    ]
    assert [row["test_loss"] <= 1.1 for row in averaged] == [False, True]
    assert outcome.reached["test_loss"] == averaged[-1]["test_loss"]
    assert outcome.step == rows_of(tmp_path)[-1]["step"] < outcome.num_steps
    assert outcome.finished
    assert (tmp_path / "averaged.safetensors").exists()
    wrong = {"accuracy": "METRIC", "test_loss=": "METRIC", "speed=3": "_loss", "=3": "_loss"}
    for text, word in wrong.items():
        with pytest.raises(ConfigError, match=word):
            Target.parse(text)
    with pytest.raises(ConfigError, match="test_loss"):
        Target.parse("valid_loss=1").check(["test_loss"])


def test_a_target_is_one_of_the_main_average(tmp_path: Path) -> None:
    """A window of 1 has a row first, and it is the raw weights."""
    target = Target.parse("test_accuracy=0.2")
    plan = smoke_plan("digits", schedule="constant", ks=(3, 1))
    outcome = train(plan, RunFolder(tmp_path), Worker(), until=target)
    first = next(row for row in rows_of(tmp_path) if row["k"] == 1)
    assert target.reached(first)
    assert outcome.reached is not None
    assert (outcome.reached["k"], outcome.reached["batch_norm"]) == (3, "re-estimated")
    assert outcome.reached["epoch"] == 3


def test_a_target_that_was_reached_is_not_trained_for_again(tmp_path: Path) -> None:
    target = Target.parse("test_accuracy=0.2")
    plan = smoke_plan("digits", schedule="constant", ks=(2,))
    first = train(plan, RunFolder(tmp_path), Worker(), until=target)
    rows, weights = rows_of(tmp_path), (tmp_path / "averaged.safetensors").read_bytes()
    (tmp_path / "averaged.safetensors").unlink()  # as if it was killed before this was written
    again = train(plan, RunFolder(tmp_path), Worker(), until=target)
    assert (again.step, again.num_trained) == (first.step, 0)
    assert first.num_trained == first.step < first.num_steps
    assert again.finished
    assert again.reached is not None
    assert again.reached["step"] == first.step
    assert rows_of(tmp_path) == rows
    assert (tmp_path / "averaged.safetensors").read_bytes() == weights
    # Without the target it goes on.
    assert train(plan, RunFolder(tmp_path), Worker()).step == first.num_steps


def test_a_landing_with_a_root() -> None:
    config = RECIPES.find("digits")(
        schedule="constant", learning_rate=1.0, land=0.5, land_shape="1-sqrt"
    )
    assert [learning_rate(config, step, 8) for step in (3, 4, 5)] == [1.0, 1.0, 0.5]


@pytest.mark.parametrize(
    "changes",
    [
        {"land": 0.2},
        {"optimizer": "schedule-free-sgd"},
        {"schedule": "constant", "land": 1.0},
        {"quantize": (1,)},
        {"quantize": (8, 8)},
        {"coefficients": ("explicit:1,2", "explicit:1,2.0")},
        {"batch_norm": ("copied", "copied")},
        {"evaluate_test": True},
        {"evaluate_at": (-1.0,)},
        {"evaluate_at": (math.nan,)},
        {"epochs": 0},
        {"horizon": 1.0},
    ],
)
def test_settings_that_do_not_fit_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        RECIPES.find("digits")(**{"schedule": "cosine", **changes})


def test_a_run_shorter_than_its_window_averages_what_it_has(tmp_path: Path) -> None:
    plan = smoke_plan("digits", horizon=0.5, ks=(16, 8), epochs=0.1)
    assert run(plan, tmp_path / "short").finished
    with pytest.raises(ConfigError, match="before its warm-up"):
        run(
            smoke_plan("digits", horizon=0.5, warmup_steps=3, epochs=0.1),
            tmp_path / "in-warm-up",
        )


def test_schedule_free_resumes_bit_for_bit(tmp_path: Path) -> None:
    pytest.importorskip("schedulefree")
    plan = smoke_plan("digits", optimizer="schedule-free-sgd", schedule="constant", epochs=2)
    run(plan, tmp_path / "whole")
    run(plan, tmp_path / "stopped", stop_at=40)
    run(plan, tmp_path / "stopped")
    rows = rows_of(tmp_path / "whole")
    assert rows == rows_of(tmp_path / "stopped")
    assert "schedule-free" in {row["weights"] for row in rows}


def test_the_chosen_window_is_the_best_on_validation_data_and_pays_for_all(tmp_path: Path) -> None:
    plan = smoke_plan("wikipedia-decoder", ks=(4, 2, 1), choose_window=True, learning_rate=0.01)
    run(plan, tmp_path / "whole")
    run(plan, tmp_path / "stopped", stop_at=100)
    run(plan, tmp_path / "stopped")
    assert rows_of(tmp_path / "whole") == rows_of(tmp_path / "stopped")
    rows = read_metrics(tmp_path / "whole" / "metrics.jsonl")
    chosen = [row for row in rows if row["weights"] == "chosen"]
    assert len(chosen) == len({row["step"] for row in rows})
    for row in chosen:
        others = [r for r in rows if r["step"] == row["step"] and r["weights"] != "chosen"]
        gain = others[0]["valid_loss"] - min(r["valid_loss"] for r in others)
        assert others[0]["valid_loss"] - row["valid_loss"] >= 0.99 * gain
        paid = sum(r["evaluate_seconds"] + r["average_seconds"] for r in others[1:])
        assert row["average_seconds"] == pytest.approx(paid, abs=1e-4)
    with pytest.raises(ConfigError, match="valid_loss"):
        run(smoke_plan("digits", choose_window=True), tmp_path / "digits")


def chosen_in_digits(path: Path, **changes: Any) -> tuple[list[Row], list[Row]]:
    """The rows of a run that chooses its window: those chosen, and all others."""
    plan = smoke_plan(
        "digits",
        ks=(2, 1),
        schedule="constant",
        validation_fraction=0.3,
        evaluate_test=True,
        choose_window=True,
        **changes,
    )
    run(plan, path)
    rows = read_metrics(path / "metrics.jsonl")
    return [r for r in rows if r["weights"] == "chosen"], [
        r for r in rows if r["weights"] != "chosen"
    ]


def test_the_chosen_window_has_the_first_treatment_of_batch_norm(tmp_path: Path) -> None:
    chosen, others = chosen_in_digits(tmp_path)
    served = 0
    for row in chosen:
        now = [r for r in others if r["step"] == row["step"]]
        wanted = (("averaged", "re-estimated"), ("raw", "re-estimated"), ("raw", None))
        candidates = [r for r in now if (r["weights"], r["batch_norm"]) in wanted]
        values = [r["valid_loss"] for r in candidates if r["k"] in (row["chosen_k"], None)]
        assert row["valid_loss"] in values
        raw = min(r["valid_loss"] for r in now if r["weights"] == "raw")
        gain = raw - min(r["valid_loss"] for r in candidates)
        assert raw - row["valid_loss"] >= 0.99 * gain >= 0.0
        paid = sum(
            r[f"{act}_seconds"]
            for r in candidates
            if r["batch_norm"]  # the usual evaluation of the raw weights is charged to all series
            for act in ("average", "batch_norm", "evaluate")
            if f"{act}_seconds" in r
        )
        assert row["average_seconds"] == pytest.approx(paid, abs=1e-4)
        served += row["chosen_k"] > 0
    assert served  # otherwise nothing was tested


@pytest.mark.parametrize("first", ["re-estimated", "copied"])
def test_chosen_rows_are_one_series(first: str, tmp_path: Path) -> None:
    other = "copied" if first == "re-estimated" else "re-estimated"
    chosen, _ = chosen_in_digits(tmp_path, batch_norm=(first, other))
    assert {row["batch_norm"] for row in chosen} == {first}
    [own] = load_runs([tmp_path])
    assert len([series for series in own.series if series.weights == "chosen"]) == 1
