"""Annealed runs of several lengths against the averages of constant-rate runs."""

import dataclasses
import io
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.report import frontier_rows

from lawa_lab.cli.report_tables import show_report
from lawa_lab.report import frontier_words
from lawa_lab.report.curves import Metric
from lawa_lab.report.figures import drawings
from lawa_lab.report.figures.axes import Line, matplotlib
from lawa_lab.report.figures.files import draw
from lawa_lab.report.figures.frontier import _ANNEALED, _RIGHT, _arrow, _free_spot
from lawa_lab.report.figures.scene import Scene
from lawa_lab.report.figures.style import Style
from lawa_lab.report.frontier import Frontier
from lawa_lab.report.page import _MARKERS, render_page
from lawa_lab.report.runs import Run, load_runs
from lawa_lab.report.summary import Report, summarise
from torch_lawa.metrics import Row


def runs_of(tmp_path: Path, rows: list[Row]) -> list[Run]:
    """Through files, one per run and seed, as `lawa train --budgets` writes them."""
    files: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        names = ("run", "seed", "budget_epochs", "peak_learning_rate")
        files.setdefault(tuple(row[name] for name in names), []).append(row)
    for number, own in enumerate(files.values()):
        folder = tmp_path / "runs" / f"nested-{number}"
        folder.mkdir(parents=True)
        text = "".join(json.dumps(row) + "\n" for row in own)
        (folder / "metrics.jsonl").write_text(text)
    return load_runs([tmp_path / "runs"])


def report_on(tmp_path: Path, rows: list[Row]) -> Report:
    return summarise(runs_of(tmp_path, rows))


def frontier_in(report: Report, metric: str = "test_loss") -> Frontier:
    (found,) = (m for m in report.recipes[0].metrics if m.metric.name == metric)
    assert found.frontier is not None
    return found.frontier


@pytest.fixture
def frontier(tmp_path: Path) -> Frontier:
    return frontier_in(report_on(tmp_path, frontier_rows()))


def test_runs_that_differ_in_length_alone_are_told_apart(tmp_path: Path) -> None:
    runs = runs_of(tmp_path, frontier_rows(budgets=(8, 16)))
    names = [run.name for run in runs]
    landing = "sgd, constant rate, landing 0.25"
    assert names[0] == "sgd, constant rate"
    assert set(names[1:3]) == {"sgd, 8 epochs", f"{landing}, 8 epochs"}
    assert set(names[3:]) == {"sgd, 16 epochs", f"{landing}, 16 epochs"}
    assert [run.seeds for run in runs] == [(0, 1)] * 5
    assert [run.annealed for run in runs] == [False, True, True, True, True]


def test_a_run_of_one_epoch_is_not_of_one_epochs(tmp_path: Path) -> None:
    names = {run.name for run in runs_of(tmp_path, frontier_rows(budgets=(1, 2)))}
    assert {"sgd, 1 epoch", "sgd, 2 epochs"} < names


def test_a_rate_is_named_only_beside_another_of_the_same_length(tmp_path: Path) -> None:
    rows = frontier_rows(budgets=(8,), peaks=(0.1,)) + frontier_rows(budgets=(16,), peaks=(0.2,))
    names = {run.name for run in runs_of(tmp_path, rows)}
    assert {"sgd, 8 epochs", "sgd, 16 epochs"} < names
    assert not any("rate 0" in name for name in names)


def test_annealed_runs_are_points_with_an_envelope_and_averages_are_curves(
    frontier: Frontier,
) -> None:
    assert frontier.budgets == (8, 16, 32)
    found = {(p.label, p.budget): p for p in frontier.annealed}
    assert set(found) == {(s, b) for s in ("cosine", "25% linear decay") for b in (8, 16, 32)}
    point = found["cosine", 16]
    assert point.raw.mean == pytest.approx(1 + 0.1 * 1.005)
    assert (point.raw.low, point.raw.num_seeds) == (pytest.approx(1.1), 2)
    assert point.average is not None
    assert point.average.mean > point.raw.mean
    assert (point.epochs and point.epochs.mean, point.steps and point.steps.mean) == (16, 160)
    assert frontier.envelope == tuple((b, pytest.approx(1 + 0.9 / b * 1.005)) for b in (8, 16, 32))
    [main] = (curve for curve in frontier.curves if curve.main)
    assert (main.label, main.at[0], main.at[-1]) == ("average, k = 4", 1, 32)
    assert main.low[3] == pytest.approx(1.25)
    assert main.high[3] == pytest.approx(1.2525)
    assert [c.label for c in frontier.curves if not c.series.averaged] == ["raw weights"]


def test_annealed_runs_without_averages_have_batch_norm_treated_like_the_average(
    tmp_path: Path,
) -> None:
    rows = []
    for row in frontier_rows():
        if row["weights"] == "averaged":
            if row["schedule"] == "constant":
                rows.append({**row, "batch_norm": "re-estimated"})
            continue
        rows.append(row)
        rows.append({**row, "batch_norm": "re-estimated", "test_loss": row["test_loss"] - 0.05})
    found = {(p.label, p.budget): p for p in frontier_in(report_on(tmp_path, rows)).annealed}
    for label, excess in (("cosine", 1.6), ("25% linear decay", 0.9)):
        assert found[label, 16].raw.mean == pytest.approx(1 + excess / 16 * 1.005 - 0.05)


def test_an_average_with_two_treatments_of_batch_norm_is_one_curve(tmp_path: Path) -> None:
    rows = [
        {**row, "batch_norm": treatment}
        for row in frontier_rows()
        for treatment in ("copied", "re-estimated")[row["weights"] == "raw" :]
    ]
    curves = frontier_in(report_on(tmp_path, rows)).curves
    assert [curve.series.batch_norm for curve in curves] == ["re-estimated"] * 2


def test_quality_at_equal_budget_has_one_row_per_method(frontier: Frontier) -> None:
    rows = {(row.label, row.kind): row for row in frontier.equal_budget}
    assert {kind for _, kind in rows} == {"annealed", "annealed average", "anytime", "raw"}
    average = rows["average, k = 4", "anytime"]
    assert [v.mean for v in average.values if v] == pytest.approx(
        [1 + 1.005 / b for b in (8, 16, 32)]
    )
    assert average.by_seed[1] == pytest.approx([1 + 1.01 / b for b in (8, 16, 32)])


def test_a_seed_or_length_without_averages_is_left_out_of_their_ends(tmp_path: Path) -> None:
    rows = [
        row
        for row in frontier_rows()
        if not (row["k"] and row["run"] == "sgd" and (row["seed"] or row["budget_epochs"] == 8))
    ]
    ends = {row.label: row.by_seed for row in frontier_in(report_on(tmp_path, rows)).equal_budget}
    assert set(ends["cosine"]) == {0, 1}
    assert set(ends["cosine, its average"]) == {0}
    assert ends["cosine, its average"][0] == (
        None,
        pytest.approx(1 + 1.7 / 16),
        pytest.approx(1 + 1.7 / 32),
    )


def test_the_main_average_is_the_first_row_of_its_kind(tmp_path: Path) -> None:
    """Although the run of another peak, which comes before it, is best for another method."""
    rows = [row for row in frontier_rows(peaks=(0.1, 0.2)) if not row["land"]]
    anytime = [row for row in rows if row["run"] != "sgd" and row["weights"] == "averaged"]
    first = [row for row in anytime if row["peak_learning_rate"] == 0.1]
    rows += [{**row, "weights": "ema", "k": None, "coefficients": "0.9"} for row in first]
    for row in first:
        row["test_loss"] += 0.1
    found = frontier_in(report_on(tmp_path, rows)).equal_budget
    labels = [row.label for row in found if row.kind == "anytime"]
    assert labels == ["average, k = 4", "ema, 0.9"]


def test_budget_at_equal_quality_is_counted_from_the_end_of_annealed_runs(
    frontier: Frontier,
) -> None:
    (row,) = (
        row
        for row in frontier.equal_quality
        if (row.annealed, row.budget, row.kind) == ("cosine", 32, "annealed")
    )
    saving = row.saving.on("epoch")
    assert saving is not None
    # 1 / epoch <= 1.6 / 32 from epoch 20 on
    assert (saving.baseline_at.mean, saving.averaged_at.mean, saving.percent) == (32, 20, 37.5)
    assert row.saving.steps is not None
    assert row.saving.steps.saved.mean == 120
    # The average pays for its snapshots: 20 * (2 + 0.1) against 32 * 2 seconds.
    assert row.saving.seconds is not None
    assert row.saving.seconds.saved.mean == pytest.approx(64 - 42)
    assert row.saving.gpu_hours is not None


@pytest.mark.parametrize("alone", [False, True])
def test_a_landing_costs_the_same_whether_it_branches_off_or_is_trained_alone(
    alone: bool, tmp_path: Path
) -> None:
    rows = [{**row, "evaluate_seconds": 1.0} for row in frontier_rows(budgets=(16, 32), seeds=(0,))]
    if alone:
        landing = next(row for row in rows if row["land"] and row["budget_epochs"] == 32)
        plan = {name: landing[name] for name in ("run", "land")}
        trunk = [row for row in rows if row["run"] == "sgd, constant rate" and row["epoch"] <= 24]
        rows += [{**row, **plan} for row in trunk]
    found = frontier_in(report_on(tmp_path, rows)).annealed
    seconds = {(point.label, point.budget): point.seconds for point in found}
    spent = seconds["25% linear decay", 32]
    assert spent is not None
    assert spent.mean == pytest.approx(32 * 2.0 + 32 * 1.0)  # it trains and evaluates 32 epochs
    assert spent == seconds["cosine", 32]


def test_a_landing_does_not_pay_for_evaluations_after_its_branch(tmp_path: Path) -> None:
    rows = [{**row, "evaluate_seconds": 1.0} for row in frontier_rows(budgets=(16, 32), seeds=(0,))]
    rows = [row for row in rows if not row["land"] or row["epoch"] == row["budget_epochs"]]
    found = frontier_in(report_on(tmp_path, rows)).annealed
    seconds = {(point.label, point.budget): point.seconds for point in found}
    spent = seconds["25% linear decay", 32]
    assert spent is not None
    assert spent.mean == pytest.approx(32 * 2.0 + 24 * 1.0 + 1.0)


def test_what_is_not_reached_is_said_and_the_headline_is_not_chosen_in_favour_of_averaging(
    frontier: Frontier,
) -> None:
    headline = frontier.headline
    assert headline is not None
    assert (headline.annealed, headline.budget) == ("25% linear decay", 32)
    assert [seed.averaged_at for seed in headline.saving.by_seed] == [None, None]
    assert headline.saving.num_both == 0
    (short,) = (
        row
        for row in frontier.equal_quality
        if (row.annealed, row.budget) == ("25% linear decay", 8)
    )
    assert [seed.averaged_at for seed in short.saving.by_seed] == [9, 9]
    assert [seed.saved for seed in short.saving.by_seed] == [-1, -1]


def test_the_lead_at_equal_budget_is_over_the_best_annealed_run_there(frontier: Frontier) -> None:
    assert [(lead.annealed, lead.budget) for lead in frontier.leads] == [
        ("25% linear decay", b) for b in (8, 16, 32)
    ]
    first = frontier.leads[0]
    assert first.lead == pytest.approx(-0.1 / 8 * 1.005)
    assert (first.num_ahead, first.num_behind, first.num_seeds) == (0, 2, 2)


def test_a_seed_in_which_both_are_equal_is_neither_ahead_nor_behind(tmp_path: Path) -> None:
    rows = [row for row in frontier_rows(budgets=(8, 16, 32)) if not row["land"]]
    ends = {
        (row["seed"], row["budget_epochs"]): row["test_loss"]
        for row in rows
        if row["run"] == "sgd" and row["weights"] == "raw" and row["epoch"] == row["budget_epochs"]
    }
    behind = {8: (0.0, 0.25), 16: (0.35, -0.35), 32: (-0.25, 0.0)}  # by seed
    for row in rows:
        if row["run"] != "sgd" and row["weights"] == "averaged" and row["epoch"] in behind:
            loss = ends[row["seed"], row["epoch"]]
            row["test_loss"] = loss + behind[row["epoch"]][row["seed"]]
    said = frontier_words.leads(
        Metric("test_loss", "lower"), frontier_in(report_on(tmp_path, rows))
    )
    assert "ahead of the best annealed run at 32 epochs (by 0.12, 1 of 2 seeds)" in said
    assert "behind it at 8 epochs (by 0.12, 1 of 2 seeds)" in said
    assert "level with it at 16 epochs." in said


def test_a_shorter_annealed_run_that_is_as_good_is_named(tmp_path: Path) -> None:
    rows = [row for row in frontier_rows(budgets=(8, 16, 32)) if not row["land"]]
    for row in rows:
        if row["run"] == "sgd" and row["budget_epochs"] == 32:
            row["test_loss"] += 0.06  # worse than 16 epochs
    frontier = frontier_in(report_on(tmp_path, rows))
    assert frontier.headline is not None
    assert (frontier.headline.budget, frontier.headline.cheapest) == (32, 16)
    said = frontier_words.headline("toy", Metric("test_loss", "lower"), frontier)
    assert "annealed runs of 16 epochs are as good" in said


@pytest.mark.parametrize(
    ("percent", "said", "drawn"),
    [
        (38.4, ": 38% less", ": 38% less"),
        (-0.4, ": the same amount of", None),
        (-2.0, ": 2% more", ": 2% more"),
    ],
)
def test_the_headline_says_what_is_saved_as_a_person_would(
    tmp_path: Path, percent: float, said: str, drawn: str | None
) -> None:
    rows = [row for row in frontier_rows(budgets=(4, 8, 32)) if not row["land"]]
    frontier = frontier_in(report_on(tmp_path, rows))
    assert frontier.headline is not None
    assert frontier.headline.saving.epochs is not None
    amount = dataclasses.replace(frontier.headline.saving.epochs, percent=percent)
    saving = dataclasses.replace(frontier.headline.saving, epochs=amount)
    row = dataclasses.replace(frontier.headline, saving=saving)
    changed = dataclasses.replace(frontier, headline=row)
    found = frontier_words.headline("toy", Metric("test_loss", "lower"), changed)
    assert f"{said} training" in found
    arrow = _arrow(changed)
    assert (None if arrow is None else f": {arrow.text.partition(' training')[0]}") == drawn


def test_averages_forecast_the_landings_that_start_there(frontier: Frontier) -> None:
    (forecast,) = frontier.forecasts
    assert (forecast.annealed, len(forecast.branches)) == ("25% linear decay", 6)
    first = forecast.branches[0]
    assert (first.peak, first.at, first.budget) == (0.1, 6, 8)
    assert first.average == pytest.approx(1 + 1 / 6)
    expected = sum((1 / (0.75 * b) - 0.9 / b) * 1.005 for b in (8, 16, 32)) / 3
    assert forecast.mean_error == pytest.approx(expected)
    assert forecast.mean_absolute_error == pytest.approx(expected)
    assert forecast.rank_correlation == 1.0
    said = frontier_words.forecast(Metric("test_loss", "lower"), forecast)
    assert "where a decay starts, the k = " in said
    assert "(mean of 6 branches; mean absolute error" in said


def test_a_landing_starts_from_the_run_of_its_own_optimizer(tmp_path: Path) -> None:
    rows = [row for row in frontier_rows() if row["schedule"] == "constant"]
    for row in rows:
        row["run"] = row["run"].replace("sgd, constant rate", "adamw")
    trunk = [row for row in rows if not row["land"]]
    rows += [{**row, "run": "adam", "test_loss": row["test_loss"] + 0.5} for row in trunk]
    (forecast,) = frontier_in(report_on(tmp_path, rows)).forecasts
    assert (forecast.average, len(forecast.branches)) == ("adamw, average, k = 4", 6)


def test_two_branches_are_too_few_for_a_forecast(tmp_path: Path) -> None:
    rows = frontier_rows(budgets=(8, 16), seeds=(0,))
    assert frontier_in(report_on(tmp_path, rows)).forecasts == ()


def test_with_several_peaks_each_side_has_its_best_one(tmp_path: Path) -> None:
    rows = frontier_rows(budgets=(8, 16), peaks=(0.2, 0.1))
    report = report_on(tmp_path, rows)
    frontier = frontier_in(report)
    assert frontier.several_peaks
    assert not frontier.repeated
    assert {p.peak for p in frontier.annealed if p.best_peak} == {0.2}
    assert {p.peak for p in frontier.annealed if not p.best_peak} == {0.1}
    assert {c.peak for c in frontier.curves if c.best_peak} == {0.2}
    (forecast,) = frontier.forecasts
    assert {branch.peak for branch in forecast.branches} == {0.2, 0.1}
    inside = {row.averaged_run for row in report.recipes[0].metrics[0].main}
    assert inside == {"sgd, constant rate, rate 0.2", "sgd, 16 epochs, rate 0.2"}


@pytest.mark.parametrize(
    ("at_the_end", "best"),
    [
        ({0.1: 1.3, 0.2: 1.25}, 0.1),  # 0.1 has 1.2 where 0.2 ends: the loss of both rises
        ({0.1: 1.15, 0.2: 1.1}, 0.2),  # better than 0.1 ever is
        ({0.1: 1.05, 0.2: 1.1}, 0.1),  # better in the end
    ],
)
def test_peaks_of_runs_of_different_lengths_are_compared_at_equal_budget(
    at_the_end: dict[float, float], best: float, tmp_path: Path
) -> None:
    rows = [
        row
        for row in frontier_rows(budgets=(8, 16), seeds=(0,), peaks=(0.1, 0.2))
        if row["schedule"] == "cosine" or row["peak_learning_rate"] == 0.1 or row["epoch"] <= 8
    ]
    for row in rows:
        if row["schedule"] == "constant":
            peak, length = row["peak_learning_rate"], 8 if row["peak_learning_rate"] == 0.2 else 16
            row["test_loss"] = 1.2 if row["epoch"] < length else at_the_end[peak]
    frontier = frontier_in(report_on(tmp_path, rows))
    assert {c.peak for c in frontier.curves if c.best_peak} == {best}
    assert {c.peak for c in frontier.curves if c.main} == {best}


def test_runs_of_one_peak_are_not_said_to_have_several(tmp_path: Path) -> None:
    """A constant-rate run of two lengths: nothing sets them apart but how far they went.

    Raw weights of the shorter one were not evaluated, so that only its average is repeated.
    """
    rows = frontier_rows(budgets=(8, 16))
    constant = [row for row in rows if row["run"] == "sgd, constant rate" and row["k"]]
    shorter = [{**row, "budget_epochs": 8} for row in constant if row["epoch"] <= 8]
    metric, frontier = (
        Metric("test_loss", "lower"),
        frontier_in(report_on(tmp_path, rows + shorter)),
    )
    assert not frontier.several_peaks
    assert "same schedule, length and peak rate" in frontier_words.notes(metric, frontier)[0]
    assert {curve.at[-1] for curve in frontier.curves if curve.best_peak} == {16}


def test_schedule_free_is_one_curve_and_does_not_make_the_optimizer_worth_naming(
    tmp_path: Path,
) -> None:
    rows = frontier_rows(budgets=(8, 16))
    free = {"run": "schedule-free-sgd", "k": None, "coefficients": None}
    rows += [
        {**row, **free, "weights": "schedule-free" if row["k"] else "raw"}
        for row in rows
        if row["run"] == "sgd, constant rate"
    ]
    frontier = frontier_in(report_on(tmp_path, rows))
    assert {c.label for c in frontier.curves} == {"average, k = 4", "raw weights", "schedule-free"}
    assert {p.label for p in frontier.annealed} == {"cosine", "25% linear decay"}
    plain = [row for row in rows if row["run"] != "schedule-free-sgd"]
    rows += [{**row, "run": row["run"].replace("sgd", "adamw")} for row in plain]
    several = frontier_in(report_on(tmp_path / "several", rows))
    labels = {c.label for c in several.curves if c.series.averaged}
    assert labels == {"sgd, average, k = 4", "adamw, average, k = 4", "schedule-free"}


def test_schedule_free_curves_of_several_settings_are_named(tmp_path: Path) -> None:
    rows = frontier_rows(budgets=(8, 16))
    free = {"k": None, "coefficients": None, "weights": "schedule-free"}
    names = ("schedule-free-sgd", "schedule-free-sgd with weight decay 0.0002")
    averages = [row for row in rows if row["run"] == "sgd, constant rate" and row["k"]]
    rows += [{**row, **free, "run": name} for row in averages for name in names]
    runs = runs_of(tmp_path, rows)
    report = summarise(runs)
    frontier = frontier_in(report)
    assert {c.label for c in frontier.curves} == {"average, k = 4", "raw weights", *names}
    assert set(names) <= {row.label for row in frontier.equal_budget}
    panel = drawings(Scene(report.recipes[0], runs))[0].panels[0]
    styles = {line.label: (line.style.colour, line.style.dashes) for line in panel.lines}
    assert styles[names[0]] != styles[names[1]]


def test_rows_of_a_sweep_join_the_only_run_of_their_name(tmp_path: Path) -> None:
    rows = [row for row in frontier_rows(budgets=(8,), seeds=(0,)) if row["run"] == "sgd"]
    plan = ("schedule", "land", "budget_epochs", "peak_learning_rate", "train_seconds")
    swept = [
        {**{k: v for k, v in row.items() if k not in plan}, "k": 2, "run": "sgd"}
        for row in rows
        if row["k"]
    ]
    (tmp_path / "sweep.jsonl").write_text("".join(json.dumps(row) + "\n" for row in swept))
    runs_of(tmp_path, rows)
    (run,) = load_runs([tmp_path / "runs", tmp_path / "sweep.jsonl"])
    assert {series.k for series in run.series} == {None, 4, 2}


def test_rows_without_their_peak_have_the_highest_rate_of_their_run(tmp_path: Path) -> None:
    rows = frontier_rows(budgets=(8, 16), peaks=(0.2, 0.1))
    runs = runs_of(tmp_path, rows)
    for file in tmp_path.rglob("metrics.jsonl"):
        own = [json.loads(line) for line in file.read_text().splitlines()]
        for row in own:
            row["learning_rate"] = row.pop("peak_learning_rate")
        file.write_text("".join(json.dumps(row) + "\n" for row in own))
    assert [run.name for run in load_runs([tmp_path])] == [run.name for run in runs]


def test_an_annealed_run_that_was_interrupted_is_left_out(tmp_path: Path) -> None:
    rows = [
        row
        for row in frontier_rows()
        if not (row["run"] == "sgd" and row["budget_epochs"] == 32 and row["epoch"] > 30)
    ]
    frontier = frontier_in(report_on(tmp_path, rows))
    assert frontier.unfinished == ("sgd, 32 epochs",)
    assert [p.budget for p in frontier.annealed if p.label == "cosine"] == [8, 16]


def test_annealed_runs_whose_planned_length_is_unknown_count_as_finished(tmp_path: Path) -> None:
    rows = [
        {**row, "run": f"{row['run']}, {row['budget_epochs']}", "budget_epochs": None}
        for row in frontier_rows()
    ]
    frontier = frontier_in(report_on(tmp_path, rows))
    assert frontier.unfinished == ()
    assert [p.budget for p in frontier.annealed if p.label == "cosine"] == [8, 16, 32]


def test_accuracies_are_better_when_higher(tmp_path: Path) -> None:
    frontier = frontier_in(report_on(tmp_path, frontier_rows()), "test_accuracy")
    values = [value for _, value in frontier.envelope]
    assert values == sorted(values)
    (row,) = (r for r in frontier.equal_quality if (r.annealed, r.budget) == ("cosine", 32))
    saving = row.saving.on("epoch")
    assert saving is not None
    assert saving.averaged_at.mean == 20


@pytest.mark.parametrize(
    "kept",
    [
        lambda row: row["run"] == "sgd, constant rate",
        lambda row: row["run"] == "sgd" and row["budget_epochs"] == 8,
    ],
)
def test_without_annealed_runs_to_compare_there_is_no_frontier(tmp_path: Path, kept: Any) -> None:
    report = report_on(tmp_path, [row for row in frontier_rows() if kept(row)])
    assert report.recipes[0].metrics[0].frontier is None
    assert "frontier" not in report.as_dict()["recipes"][0]["metrics"][0]


def test_a_frontier_is_json(tmp_path: Path) -> None:
    report = report_on(tmp_path, frontier_rows())
    found = json.loads(json.dumps(report.as_dict()))["recipes"][0]["metrics"][0]["frontier"]
    assert found["headline"]["saving"]["num_both"] == 0
    assert found["equal_budget"][0]["by_seed"]["1"][0] > 1


def test_the_headline_is_about_every_schedule_and_names_what_was_lost(frontier: Frontier) -> None:
    loss = Metric("test_loss", "lower")
    text = frontier_words.headline("toy", loss, frontier)
    assert "does not reach the final test loss of 25% linear decay runs of 32 epochs" in text
    assert "cosine runs of 32 epochs (1.0503) after 20 epochs: 38% less" in text
    assert "behind the best annealed run at 8 (by 0.013, 2 of 2 seeds), 16" in (
        frontier_words.leads(loss, frontier)
    )
    (row,) = (r for r in frontier.equal_quality if (r.annealed, r.budget) == ("cosine", 32))
    assert frontier_words.reached(row, "epoch") == "20"  # in both seeds
    assert frontier.headline is not None
    assert frontier_words.reached(frontier.headline, "epoch") == "not reached"
    assert "rank correlation 1.00)" in frontier_words.forecast(loss, frontier.forecasts[0])


def test_the_figure_has_points_curves_direct_labels_and_a_log_axis(tmp_path: Path) -> None:
    runs = runs_of(tmp_path, [row for row in frontier_rows(budgets=(4, 8, 32)) if not row["land"]])
    report = summarise(runs)
    drawing = drawings(Scene(report.recipes[0], runs))[0]
    assert drawing.kind.name == "frontier"
    panel = drawing.panels[1]
    assert panel.title == "test loss, 2 seeds"
    assert (panel.x_log, panel.x_ticks) == (True, (4, 8, 32))
    lines = {line.end_label: line for line in panel.lines if line.end_label}
    assert lines["cosine"].marker
    assert lines["cosine"].at == (4, 8, 32)
    assert not lines["average, k = 4"].marker
    assert panel.arrow is not None
    assert (panel.arrow.begin, panel.arrow.end) == (32, 20)
    assert "38% less training" in panel.arrow.text
    _, axes = draw(drawing).axes
    assert axes.get_xscale() == "log"
    texts = {text.get_text() for text in axes.texts}
    assert {"cosine", "average, k = 4"} <= texts
    assert "raw weights" not in texts  # far off: it leaves the panel


def test_the_average_of_each_schedule_has_its_own_marker_in_the_legend(tmp_path: Path) -> None:
    rows = frontier_rows()
    for row in [row for row in rows if row["land"] and row["weights"] == "raw"]:
        rows.append({**row, "weights": "averaged", "k": 4, "coefficients": "uniform"})
    for row in rows:
        if row["schedule"] == "cosine" or row["land"]:
            row["test_loss"] -= 0.02 * (row["weights"] == "averaged")
    runs = runs_of(tmp_path, rows)
    drawing = drawings(Scene(summarise(runs).recipes[0], runs))[0]
    looks = {x.end_label or x.label: (x.style.colour, x.marker) for x in drawing.panels[1].lines}
    names = [f"{schedule}, its average if better" for schedule in ("cosine", "25% linear decay")]
    for name in names:
        assert looks[name] == looks[name.removesuffix(", its average if better")]
    assert looks[names[0]] != looks[names[1]]
    (box,) = draw(drawing).legends
    shown = dict(zip([t.get_text() for t in box.get_texts()], box.legend_handles, strict=True))
    assert [shown[name].get_markeredgecolor() for name in names] == [looks[n][0] for n in names]
    assert {marker for _, marker in _ANNEALED} <= set(_MARKERS)  # of the page's legend


def test_many_methods_are_named_in_the_legend(tmp_path: Path) -> None:
    """Beside their curves, which end close together, names would be written over each other."""
    rows = frontier_rows(budgets=(4, 8, 32))
    names = ["ema", "swa", "dense", *(f"method-{number}" for number in range(15))]
    for name in names:
        for row in [row for row in rows if row["weights"] == "averaged" and not row["land"]]:
            if row["schedule"] == "constant":
                rows.append({**row, "weights": name, "k": None, "coefficients": ""})
    runs = runs_of(tmp_path, rows)
    [accuracy, *_] = drawings(Scene(summarise(runs).recipes[0], runs))[0].panels
    styles = {x.label: (x.style.colour, x.style.dashes) for x in accuracy.lines if x.label}
    assert set(names) <= set(styles)
    assert len(set(styles.values())) == len(styles)
    ends = {line.end_label for line in accuracy.lines}
    assert "average, k = 4" in ends
    assert "ema" not in ends


def test_a_method_has_one_curve_although_its_averages_are_best_at_different_rates(
    tmp_path: Path,
) -> None:
    rows = frontier_rows(budgets=(4, 8, 32), peaks=(0.1, 0.2))
    for row in [row for row in rows if row["weights"] == "averaged" and not row["land"]]:
        if row["schedule"] == "constant":
            rate = row["peak_learning_rate"]
            for decay, best, worst in ((0.9, 0.1, 0.2), (0.99, 0.2, 0.3)):
                loss = 1 + (best if (rate == 0.1) is (decay == 0.9) else worst)
                ema = {"weights": "ema", "k": None, "coefficients": str(decay), "test_loss": loss}
                rows.append({**row, **ema})
    runs = runs_of(tmp_path, rows)
    panel = drawings(Scene(summarise(runs).recipes[0], runs))[0].panels[1]
    names = [line.label or line.end_label for line in panel.lines]
    assert [name for name in names if name.startswith("ema")] == ["ema, 0.9"]


def test_an_average_that_was_evaluated_once_has_no_curve(tmp_path: Path) -> None:
    """Nothing of it would be seen but its name, in place of another average of its method."""
    rows = frontier_rows(budgets=(4, 8, 32))
    for row in [row for row in rows if row["weights"] == "averaged" and not row["land"]]:
        if row["schedule"] == "constant":
            for decay, own in ((0.9, 0.0), (0.99, -0.01)):  # the second is better at the end
                if decay == 0.9 or row["epoch"] == 32:
                    ema = {"weights": "ema", "k": None, "coefficients": str(decay)}
                    rows.append({**row, **ema, "test_loss": row["test_loss"] + own})
    runs = runs_of(tmp_path, rows)
    panel = drawings(Scene(summarise(runs).recipes[0], runs))[0].panels[1]
    names = [line.label or line.end_label for line in panel.lines]
    assert [name for name in names if name.startswith("ema")] == ["ema, 0.9"]


def test_a_method_looks_the_same_in_all_panels_although_its_best_rate_differs(
    tmp_path: Path,
) -> None:
    """The panels have one legend."""
    rows = frontier_rows(budgets=(4, 8, 32), peaks=(0.1, 0.2))
    for row in [row for row in rows if row["weights"] == "averaged" and not row["land"]]:
        if row["schedule"] == "constant":
            sign = 1 if row["peak_learning_rate"] == 0.1 else -1
            for name, own in (("ema", 0.05 * sign), ("swa", -0.05 * sign)):
                values = {"test_loss": 1.1 + own, "test_accuracy": 0.7 + own}
                rows.append({**row, "weights": name, "k": None, "coefficients": "", **values})
    runs = runs_of(tmp_path, rows)
    panels = drawings(Scene(summarise(runs).recipes[0], runs))[0].panels
    styles = [{x.label: x.style for x in panel.lines if x.label} for panel in panels]
    for name in ("ema", "swa"):
        assert styles[0][name] == styles[1][name]
    assert styles[0]["ema"] != styles[0]["swa"]


def test_the_window_of_another_optimizer_has_a_curve_and_its_other_methods_have_none(
    tmp_path: Path,
) -> None:
    """Names as long as these, beside the ends of curves, would leave no room for the axes."""
    rows = [row for row in frontier_rows(budgets=(4, 8, 32)) if not row["land"]]
    for row in [row for row in rows if row["schedule"] == "constant"]:
        own = [row, {**row, "run": "lookahead(sgd), constant rate"}]
        rows.append(own[1])
        if row["weights"] == "averaged":
            rows += [{**each, "weights": "ema", "k": None, "coefficients": ""} for each in own]
    for row in [row for row in rows if row["schedule"] == "cosine"]:
        rows.append({**row, "run": "lookahead(sgd)"})
    runs = runs_of(tmp_path, rows)
    drawing = drawings(Scene(summarise(runs).recipes[0], runs))[0]
    for panel in drawing.panels:
        names = {line.label or line.end_label for line in panel.lines}
        windows = {"sgd, average, k = 4", "lookahead(sgd), average, k = 4", "sgd, ema"}
        assert windows | {"sgd, cosine", "lookahead(sgd), cosine"} <= names
        assert "lookahead(sgd), ema" not in names
    figure = draw(drawing)
    matplotlib("backends.backend_agg").FigureCanvasAgg(figure).draw()
    assert all(axes.get_position().width > 0.3 for axes in figure.axes)
    (box,) = figure.legends
    assert "lookahead(sgd), cosine" in {text.get_text() for text in box.get_texts()}


def test_the_text_of_the_arrow_covers_no_line() -> None:
    style, unit = Style(colour="black"), ((0.0, 1.0), False)

    def line(*points: tuple[float, float]) -> Line:
        at, mean = zip(*points, strict=True)
        return Line(label="", style=style, at=at, mean=mean)

    falling, low = line((0.0, 1.0), (1.0, 0.0)), line((0.0, 0.1), (1.0, 0.1))
    assert _free_spot([low], unit, unit)[1] > 0.5
    assert _free_spot([line((0.0, 0.9), (1.0, 0.9))], unit, unit)[1] < 0.5
    assert _free_spot([falling], unit, unit) == (_RIGHT[1], 0.04)
    assert _free_spot([falling, low], unit, unit) == (0.97, 0.97)
    longest = dataclasses.replace(line((1.0, 0.9)), marker="o")  # 3% from the edge
    steep = line((0.0, 1.0), (0.3, 0.6))  # one piece of it is there instead
    assert _free_spot([low, longest, steep], ((0.0, 1.03), False), unit) == (_RIGHT[1], 0.97)


def test_the_text_of_the_arrow_stays_inside_the_axes(tmp_path: Path) -> None:
    rows = [row for row in frontier_rows(budgets=(4, 8, 48)) if not row["land"]]
    runs = runs_of(tmp_path, rows)
    drawing = drawings(Scene(summarise(runs).recipes[0], runs))[0]
    moved = [dataclasses.replace(panel, text_at=(min(_RIGHT), 0.04)) for panel in drawing.panels]
    figure = draw(dataclasses.replace(drawing, panels=tuple(moved)))
    matplotlib("backends.backend_agg").FigureCanvasAgg(figure).draw()
    for axes in figure.axes:
        (text,) = (text for text in axes.texts if "less training" in text.get_text())
        assert text.get_window_extent().x0 >= axes.get_window_extent().x0


def test_a_mean_over_seeds_that_differ_is_whole_in_text_table_and_figure(tmp_path: Path) -> None:
    rows = [row for row in frontier_rows(seeds=(0, 1, 2)) if not row["land"]]
    for row in rows:  # the averages of the seeds have 1.05 at epochs 20, 24 and 30
        if row["weights"] == "averaged" and row["schedule"] == "constant":
            row["test_loss"] = 1 + (1.0, 1.2, 1.5)[row["seed"]] / row["epoch"]
        elif row["epoch"] == 32:
            row["test_loss"] = 1.05
    runs = runs_of(tmp_path, rows)
    report = summarise(runs)
    frontier = frontier_in(report)
    said = frontier_words.headline("toy", Metric("test_loss", "lower"), frontier)
    assert "after 25 epochs (20 to 30 by seed): 23% less" in said
    assert frontier.headline is not None
    assert frontier_words.reached(frontier.headline, "epoch") == "25 (20, 24, 30)"
    arrow = drawings(Scene(report.recipes[0], runs))[0].panels[1].arrow
    assert arrow is not None
    assert "(25 for 32 epochs)" in arrow.text


def test_what_limits_the_budget_at_equal_quality_is_noted(tmp_path: Path) -> None:
    loss, rows = Metric("test_loss", "lower"), frontier_rows()

    def notes(name: str, rows: list[Row]) -> list[str]:
        return frontier_words.notes(loss, frontier_in(report_on(tmp_path / name, rows)))

    assert notes("all", rows) == []
    constant = "sgd, constant rate"
    alone = [row for row in rows if row["run"] != constant or row["seed"] == 0]
    (note,) = notes("alone", alone)
    assert "seeds that the annealed run and the average share" in note
    # The average has the final value of cosine runs of 16 epochs at epoch 10.
    late = [row for row in rows if row["run"] != constant or row["epoch"] >= 12]
    (note,) = notes("late", late)
    assert note.startswith("The first evaluation of the average is at 12 epochs.")


def test_budgets_that_are_close_have_a_linear_axis(tmp_path: Path) -> None:
    runs = runs_of(tmp_path, frontier_rows(budgets=(16, 32)))
    panels = drawings(Scene(summarise(runs).recipes[0], runs))[0].panels
    assert not any(panel.x_log for panel in panels)


def test_the_page_begins_with_the_frontier_and_goes_on_inside_one_run(tmp_path: Path) -> None:
    runs = runs_of(tmp_path, frontier_rows(budgets=(8, 32)))
    page = render_page(runs, summarise(runs), title="Frontier")
    for first, second in itertools.pairwise(
        [
            '<p class="finding">toy: the average of one constant-rate run does not reach',
            "Quality at equal budget: test accuracy",
            "Budget at equal quality: test accuracy",
            "not reached",
            "seed by seed",
            "Does the average forecast the result of a decay?",
            "What averaging saved inside one run",
        ]
    ):
        assert page.index(first) < page.index(second)
    assert page.count('class="finding"') == 1
    assert "Run against run" not in page


def shown(report: Report, width: int = 80) -> str:
    console = Console(width=width, file=io.StringIO(), color_system=None)
    show_report(report, console)
    return str(console.file.getvalue())  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", [80, 120])
def test_the_tables_fit_the_terminal(tmp_path: Path, width: int) -> None:
    report = report_on(tmp_path, frontier_rows())
    text = shown(report, width)
    assert all(len(line) <= width for line in text.splitlines())
    for part in ("Quality at equal budget", "Budget at equal quality", "not reached", "-o FOLDER"):
        assert part in text
    assert "\n25% linear decay  " in text
    assert "\n  its average     " in text  # below its run, in one line


def test_the_terminal_leaves_single_runs_to_the_page(tmp_path: Path) -> None:
    """A reader of several runs wants a screen per metric, not every table."""
    report = report_on(tmp_path, frontier_rows())
    text = shown(report)
    num_metrics = len(report.recipes[0].metrics)
    assert len(text.splitlines()) <= 40 * num_metrics + 10
    assert "epochs to reach" not in text
    assert "\nraw  " not in text


def test_annealed_runs_alone_are_shown_one_by_one(tmp_path: Path) -> None:
    """There is nothing to compare them with, so what is inside each run is all there is."""
    annealed = [row for row in frontier_rows() if row["schedule"] != "constant"]
    text = shown(report_on(tmp_path, annealed))
    assert text.index("Quality at equal budget") < text.index("Inside one run")
    assert "epochs to reach" in text
    assert "\nraw  " in text


def test_no_run_is_shown_at_its_end_without_its_averages(tmp_path: Path) -> None:
    annealed = [row for row in frontier_rows() if row["schedule"] == "cosine"]
    text = shown(report_on(tmp_path, annealed))
    ends = text.partition("At the end, and most")[2]
    assert "\nsgd, 32 epochs\n" in ends
    assert "\nk = 4 " in ends
    assert "8 epochs" not in ends  # its end and that of its average are in the first table
    assert ends.count("\nraw ") == 1
