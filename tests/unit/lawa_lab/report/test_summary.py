"""A report against runs small enough to work out by hand."""

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from lawa_lab.report.curves import Metric
from lawa_lab.report.runs import Run, Series
from lawa_lab.report.saving_words import finding, seen_at_targets
from lawa_lab.report.savings import Stretch, compare
from lawa_lab.report.summary import MainRow, MetricReport, summarise
from torch_lawa.errors import ConfigError, FormatError
from torch_lawa.metrics import Row

Values = Sequence[float | None]
FRESH = "re-estimated"


def rows_of(values: Values, k: int | None = None, *, seed: int = 0, **facts: Any) -> list[Row]:
    """Epochs count from 1 and take ten steps; None stands for an epoch without a row."""
    row: Row = {"seed": seed, "weights": "averaged" if k else "raw", "k": k, **facts}
    return [
        {**row, "epoch": epoch, "step": 10 * epoch, "loss": value}
        for epoch, value in enumerate(values, start=1)
        if value is not None
    ]


def run_of(*rows: list[Row], name: str = "sgd", recipe: str = "toy") -> Run:
    return Run(recipe, name, tuple(row for group in rows for row in group))


def report_on(*runs: Run, **options: Any) -> MetricReport:
    report = summarise(runs, **options)
    assert len(report.recipes) == len(report.recipes[0].metrics) == 1
    return report.recipes[0].metrics[0]


def epochs_saved(row: MainRow) -> list[float | None]:
    savings = (row.headline, row.final, row.best)
    return [s.epochs.saved.mean if s is not None and s.epochs else None for s in savings]


def test_an_average_stands_against_its_own_baselines_and_those_of_other_runs() -> None:
    sgd = run_of(
        rows_of([9, 8, 7, 6]),
        rows_of([9, 7, 6, 6], batch_norm=FRESH),
        rows_of([None, 6, 5, 5], 2, batch_norm=FRESH),
    )
    lookahead = run_of(rows_of([9, 6, 6, 5]), name="lookahead(sgd)")
    main = report_on(sgd, lookahead).main
    found = [(row.label, row.against, *epochs_saved(row)) for row in main]
    fresh = "both BatchNorm re-estimated"
    assert found == [
        (f"sgd, k = 2 against raw, {fresh}", "alike", 1, 1, 1),  # 6 at 2, not 3
        ("sgd, k = 2, BatchNorm re-estimated against raw", "usual", 2, 2, 2),  # 6 at 2, not 4
        # Lookahead has no such rows: 5 at 3, not 4.
        ("sgd, k = 2, BatchNorm re-estimated against lookahead(sgd), raw", "other run", 1, 1, 1),
    ]


def test_every_axis_tells_of_the_headline_s_own_target_with_costs_charged() -> None:
    facts = {"num_devices": 2, "device": "NVIDIA H200"}
    rows = rows_of([9, 8, 7, 6], **facts) + rows_of([None, 7, 6, 6], 2, **facts)
    for row in rows:
        row |= {"train_seconds": 360.0 * row["epoch"], "evaluate_seconds": 36.0}
        if row["k"]:
            row |= {"collect_seconds": 3.6 * row["epoch"], "average_seconds": 18.0}
    headline = report_on(run_of(rows)).main[0].headline
    # 6 is the harder of two targets that save one epoch: epoch 3 against 4.
    assert headline is not None
    assert headline.target == 6
    assert headline.epochs is not None
    assert (headline.epochs.baseline_at.mean, headline.epochs.averaged_at.mean) == (4, 3)
    assert headline.epochs.percent == 25.0
    assert headline.steps is not None
    assert headline.steps.saved.mean == 10
    baseline = 4 * 360.0 + 4 * 36.0
    averaged = 3 * 360.0 + 3 * 36.0 + 3 * 3.6 + 2 * (36.0 + 18.0)
    assert headline.seconds is not None
    assert headline.seconds.saved.mean == pytest.approx(baseline - averaged)
    assert headline.gpu_hours is not None
    assert headline.gpu_hours.saved.mean == pytest.approx(2 * (baseline - averaged) / 3600)


def test_seeds_give_mean_standard_deviation_and_range() -> None:
    rows = [
        *rows_of([9, 8, 7, 6, 5], seed=0),
        *rows_of([None, 5, 5, 5, 5], 2, seed=0),
        *rows_of([9, 8, 7, 6, 5], seed=1),
        *rows_of([None, 9, 9, 5, 5], 2, seed=1),
    ]
    headline = report_on(run_of(rows)).main[0].headline
    assert headline is not None
    assert headline.epochs is not None
    saved = headline.epochs.saved
    assert (saved.mean, saved.low, saved.high, saved.num_seeds) == (2, 1, 3, 2)
    assert saved.sd == pytest.approx(2**0.5)
    assert [(s.seed, s.saved) for s in headline.by_seed] == [(0, 3), (1, 1)]


def test_what_the_baseline_never_matched_has_a_lower_bound() -> None:
    rows = rows_of([9, 8, 7, 7, 7, 7]) + rows_of([None, 7, 6, 5, 5, 5], 2)
    row = report_on(run_of(rows)).main[0]
    assert row.unmatched is not None
    assert row.unmatched.averaged_from.mean == 3
    assert (row.unmatched.baseline_end.mean, row.unmatched.at_least.mean) == (6, 3)
    assert report_on(run_of(rows_of([9, 5]) + rows_of([9, 5], 2))).main[0].unmatched is None


def test_the_curve_of_saving_against_target_says_how_many_seeds_it_is_of() -> None:
    rows = [
        *rows_of([9, 7, 5], seed=0),
        *rows_of([None, 5, 4], 2, seed=0),
        *rows_of([9, 7, 6], seed=1),
        *rows_of([None, 7, 7], 2, seed=1),
    ]
    curve = report_on(run_of(rows)).main[0].curve
    assert curve.target == (9, 7, 6, 5, 4)
    assert curve.saved == (-1, 0, 1, 1, None)  # 6 and 5: seed 0 alone
    assert curve.num_both == (2, 2, 1, 1, 0)
    assert curve.num_averaged == (2, 2, 1, 1, 1)
    assert (curve.low, curve.high) == ((-1, 0, 1, 1, None), (-1, 0, 1, 1, None))
    assert curve.sd == (0, 0, None, None, None)


def test_a_saving_at_the_baseline_s_best_that_is_longer_than_the_longest_is_explained() -> None:
    average = rows_of([None, 7, 5, 5, 5, 5], 2)
    report = report_on(run_of(rows_of([9, 8, 7, 7, 7, 6]) + average))
    [row] = report.main
    assert epochs_saved(row) == [1, 3, 3]  # at 7, which the average had; at 6, which it passed
    said = seen_at_targets(report.metric, row)
    assert "largest, 3 epochs, at 6.0000, the hardest value that both reached." in said
    assert "values that the average had" in said
    [row] = report_on(run_of(rows_of([9, 8, 7, 7, 7, 5]) + average)).main
    assert "values that the average had" not in seen_at_targets(report.metric, row)


def test_stretches_are_evaluations_in_a_row_in_which_most_seeds_were_behind() -> None:
    raw = [9, 8, 7, 6, 5, 4, 3]
    rows = [row for seed in range(3) for row in rows_of(raw, seed=seed)]
    rows += rows_of([None, 8.5, 9, 5, 4, 5, 2], 2, seed=0)
    rows += rows_of([None, 8.5, 8, 5, 6, 4, 2], 2, seed=1)
    rows += rows_of([None, 7.5, 7, 7, 4, 4, 4], 2, seed=2)
    window = report_on(run_of(rows)).windows[0]
    assert window.behind == (Stretch(begin=2, end=3, num_evaluations=2, worst_at=3, worst_by=1.0),)
    # Besides, one seed alone at epochs 4, 5, 6 and 7.
    assert (window.num_behind, window.num_compared) == (8, 18)


def test_an_average_that_is_not_finite_is_behind() -> None:
    rows = rows_of([9, 8, 7]) + rows_of([None, 9, 6], 2)
    rows[3]["loss"] = None
    window = report_on(run_of(rows)).windows[0]
    [stretch] = window.behind
    assert (stretch.begin, stretch.end, stretch.worst_by) == (2, 2, None)
    assert (window.num_behind, window.num_compared) == (1, 2)


def test_every_average_has_a_row_in_the_order_of_its_window() -> None:
    facts = {"train_seconds": 1.0, "collect_seconds": 0.5, "evaluate_seconds": 0.25}
    rows = rows_of([9, 8, 7], **facts)
    rows += rows_of([None, None, 6], 3, batch_norm=FRESH, batch_norm_seconds=2.0, **facts)
    rows += rows_of([None, 7, 6.5], 2, batch_norm="copied", **facts)
    rows += rows_of([None, 6, 6.5], 2, coefficients="exponential:0.9", batch_norm=FRESH, **facts)
    rows += rows_of([None, 6, 5], 2, batch_norm=FRESH, **facts)
    windows = report_on(run_of(rows)).windows
    assert [(w.series, w.default) for w in windows] == [
        (Series("averaged", 2, "uniform", FRESH), False),
        (Series("averaged", 2, "uniform", "copied"), False),
        (Series("averaged", 2, "exponential:0.9", FRESH), False),
        (Series("averaged", 3, "uniform", FRESH), True),
    ]
    first, last = windows[0], windows[-1]
    assert first.final is not None
    assert first.best is not None
    assert (first.final.mean, first.best.mean) == (5, 5)
    assert windows[2].best is not None
    assert windows[2].best.mean == 6
    assert last.charged_seconds is not None
    assert last.charged_seconds.mean == 0.5 + 0.25 + 2.0  # collected, evaluated, re-estimated


def test_of_the_first_window_uniform_coefficients_and_fresh_statistics_are_the_default() -> None:
    rows = rows_of([9, 8]) + rows_of([None, 7], 2, coefficients="exponential:0.9", batch_norm=FRESH)
    copied = rows_of([None, 7], 2, batch_norm="copied")
    fresh = rows_of([None, 7], 2, batch_norm=FRESH)
    for averages, expected in (
        (copied + fresh, Series("averaged", 2, "uniform", FRESH)),
        (copied, Series("averaged", 2, "uniform", "copied")),
        ([], Series("averaged", 2, "exponential:0.9", FRESH)),
    ):
        assert report_on(run_of(rows, averages)).main[0].averaged == expected


def test_the_default_average_can_be_chosen_by_k() -> None:
    rows = rows_of([9, 8, 7]) + rows_of([None, None, 6], 3) + rows_of([None, 7, 6], 2)
    run = run_of(rows)
    assert report_on(run).main[0].averaged.k == 3
    chosen = report_on(run, k=2)
    assert chosen.main[0].averaged.k == 2
    assert [w.series.k for w in chosen.windows if w.default] == [2]
    with pytest.raises(ConfigError, match=r"--k 4: .* there are \[2, 3\]"):
        summarise([run], k=4)


def test_raw_weights_have_a_row_each_for_how_batch_norm_was_treated() -> None:
    facts = {"device": "NVIDIA H200", "num_devices": 4}
    rows = [
        row
        for seed, end in ((0, 7), (1, 5))
        for row in [
            *rows_of([9, 4, end], seed=seed, train_seconds=60.0, **facts),
            *rows_of([9, 3, end], seed=seed, batch_norm=FRESH, train_seconds=60.0, **facts),
        ]
    ]
    rows += rows_of([None, 6, 5], 2, batch_norm=FRESH, train_seconds=60.0, **facts)
    usual, fresh = report_on(run_of(rows)).runs
    assert usual.final is not None
    assert usual.best is not None
    assert (usual.final.mean, usual.final.sd) == (6, pytest.approx(2**0.5))
    assert (usual.best.mean, usual.seeds) == (4, (0, 1))
    assert usual.epochs is not None
    assert usual.steps is not None
    assert usual.train_seconds is not None
    assert (usual.epochs.mean, usual.steps.mean, usual.train_seconds.mean) == (3, 30, 60)
    assert (usual.device, usual.num_devices) == ("NVIDIA H200", 4)
    assert fresh.series == Series(batch_norm=FRESH)
    assert fresh.best is not None
    assert fresh.best.mean == 3


def test_a_series_that_is_evaluated_more_often_gains_nothing_by_it() -> None:
    """Raw weights at epochs 2, 4, 6: other evaluations neither count nor cost anything."""
    raw = [row for row in rows_of([9, 9, 8, 8, 6, 6]) if row["epoch"] % 2 == 0]
    rows = raw + rows_of([None, None, 6, 6, 5, 5], 3)
    for row in rows:
        row |= {"train_seconds": 100.0 * row["epoch"], "evaluate_seconds": 1.0}
    main = report_on(run_of(rows)).main[0]
    assert main.headline is not None
    assert main.headline.epochs is not None
    assert main.headline.epochs.averaged_at.mean == 4  # not 3
    assert main.headline.epochs.saved.mean == 2
    assert main.headline.seconds is not None
    assert main.headline.seconds.averaged_at.mean == 400.0 + 2 * 1.0 + 1.0
    [note] = main.notes
    assert "baseline was evaluated every 2 epochs, the average every epoch" in note


def test_evaluations_of_raw_weights_that_do_not_count_are_not_charged_to_the_average() -> None:
    rows = rows_of([9, 8, 8, 7, 7, 6]) + rows_of([None, None, 6, None, None, 5], 3)
    for row in rows:
        row |= {"train_seconds": 100.0 * row["epoch"], "evaluate_seconds": 1.0}
    run = run_of(rows)
    lines = (run, Series()), (run, Series("averaged", 3, "uniform"))
    compared = compare(*lines, Metric("loss", "lower"))
    # Raw weights evaluated in epochs 1, 2, 3 and 6; the average in 3 and 6.
    assert compared.baseline["seconds"][0].at == (101.0, 202.0, 303.0, 604.0)
    assert compared.averaged["seconds"][0].at == (303.0 + 1.0, 604.0 + 2.0)


def test_an_average_that_starts_later_is_not_evaluated_less_often() -> None:
    """The last epoch is a part of one, so the distances in the whole run have another median."""
    rows = rows_of([9, 8, 7]) + rows_of([None, 7, 6], 2)
    ends = {1: 28, 2: 56, 3: 70}
    run = run_of([{**row, "step": ends[row["epoch"]], "epoch": None} for row in rows])
    assert report_on(run).main[0].notes == ()


def test_limits_are_named_seeds_ends_and_unknown_time() -> None:
    sgd = run_of(rows_of([9, 8, 7]) + rows_of([None, 7], 2))
    other = run_of(rows_of([9, 8, 7]), rows_of([9, 8], seed=1), name="adam")
    [recipe] = summarise([sgd, other]).recipes
    own, against = recipe.metrics[0].main
    assert "baseline ended at epoch 3, the average at 2" in own.notes[0]
    assert "left out: 1." in against.notes[0]
    one_seed, time, ends = recipe.notes
    assert one_seed.startswith("sgd: only one seed")
    assert time.startswith("all runs: time and GPU-hours are unknown")
    assert ends.startswith("adam: seeds ended at different epochs (3, 2)")


@pytest.mark.parametrize(("schedule", "ends", "said"), [("cosine", 2, True), ("cosine", 3, False),
                                                       ("constant", 2, False)])  # fmt: skip
def test_an_annealed_run_that_is_not_finished_is_named(
    schedule: str, ends: int, said: bool
) -> None:
    rows = rows_of([9, 8, 7][:ends]) + rows_of([None, 7, 6][:ends], 2)
    run = run_of([{**row, "schedule": schedule, "budget_epochs": 3} for row in rows])
    [recipe] = summarise([run]).recipes
    assert (
        any("not finished: its rows end at epoch 2 of 3" in note for note in recipe.notes) == said
    )


def test_a_limit_of_many_runs_is_a_number_with_an_example() -> None:
    several = run_of(rows_of([9, 8]) + rows_of([None, 7], 2), rows_of([9, 8], seed=1), name="two")
    for number, said in ((4, "a; b; c; d: only"), (5, "5 of 6 runs, such as a: only")):
        alone = [run_of(rows_of([9, 8]) + rows_of([None, 7], 2), name=n) for n in "abcde"[:number]]
        [recipe] = summarise([*alone, several]).recipes
        assert recipe.notes[0].startswith(f"{said} one seed")


def test_rows_of_a_sweep_are_counted_in_steps_and_have_no_time() -> None:
    rows = rows_of([9, 8, 7, 6]) + rows_of([None, 7, 6, 6], 2, coefficients="uniform")
    for row in rows:
        del row["epoch"], row["seed"]
    [recipe] = summarise([run_of(rows)]).recipes
    assert recipe.axis == "step"
    [main] = recipe.metrics[0].main
    assert main.headline is not None
    assert main.headline.steps is not None
    assert main.headline.steps.saved.mean == 10
    assert main.headline.epochs is main.headline.seconds is main.headline.gpu_hours is None
    assert recipe.metrics[0].windows[0].charged_seconds is None


def test_evaluations_inside_epochs_are_counted_in_steps() -> None:
    rows = rows_of([9, 8, 7, 6]) + rows_of([None, 7, 6, 6], 2)
    assert summarise([run_of(rows)]).recipes[0].axis == "epoch"
    parts = [{**row, "epoch": row["epoch"] / 4} for row in rows]
    [recipe] = summarise([run_of(parts)]).recipes
    assert recipe.axis == "step"
    for row in parts:
        del row["step"]
    assert summarise([run_of(parts)]).recipes[0].axis == "epoch"


def test_where_it_lost_is_one_sentence_per_run() -> None:
    rows = [row for seed in (0, 1) for row in rows_of([9, 5, 3, 2, 2], seed=seed)]
    rows += rows_of([None, 7, 4, 3, 2], 2, seed=0) + rows_of([None, 7, 4, 3, 2.5], 2, seed=1)
    rows += rows_of([None, None, 6, 4, 3], 3, seed=0) + rows_of([None, None, 6, 4, 3], 3, seed=1)
    [said] = report_on(run_of(rows), k=2).losses
    for part in (
        "k = 2: behind its raw weights in 7 of 8 evaluations, at worst by 2 at epoch 2",
        "reached no value earlier",
        "the final raw value later in 1 of 2 seeds and never in 1",
        "the best raw value later in 1 of 2 seeds and never in 1",
    ):
        assert part in said
    rows = rows_of([9, 8, 7]) + rows_of([None, 7, 6], 2)
    assert report_on(run_of(rows)).losses == ("k = 2: never behind its raw weights.",)


def test_a_seed_that_saved_something_is_not_denied() -> None:
    """Seed 0 had 7 and 6 an epoch early; seed 1 reached neither, so there is no mean."""
    rows = rows_of([9, 8, 7, 6], seed=0) + rows_of([9, 7, 6, 6], 2, seed=0)
    rows += rows_of([8, 7, 6, 5], seed=1) + rows_of([9, 9, 9, 8], 2, seed=1)
    report = report_on(run_of(rows))
    assert [seed.saved for seed in report.main[0].final.by_seed] == [1, None]
    [lost] = report.losses
    for said in (lost, finding("toy", report.metric, report.main[0])):
        assert re.search(r"reached no .* earlier than .* \(mean of 2 seeds\)", said)


def test_an_average_of_a_run_that_gets_worse_saves_nothing_but_is_not_behind() -> None:
    rows = rows_of([2, 3, 4, 5]) + rows_of([None, 2.5, 3.5, 4.5], 2)
    [said] = report_on(run_of(rows)).losses
    assert "never behind its raw weights; reached no value earlier" in said


def test_other_methods_stand_beside_the_window() -> None:
    rows = rows_of([9, 8, 7, 6]) + rows_of([None, 7, 6, 6], 2)
    rows += rows_of([None, 6, 6, 5], weights="ema") + rows_of([9, 9, 9, 9], weights="swa")
    report = report_on(run_of(rows))
    found = [(row.label, *epochs_saved(row)) for row in report.main]
    assert found == [
        ("sgd, k = 2 against raw", 1, 1, 1),
        ("sgd, ema against raw", 2, 2, 2),  # 6 at 2, not 4
        ("sgd, swa against raw", None, None, None),
    ]
    assert [(row.series.weights, row.default) for row in report.windows] == [
        ("averaged", True),
        ("ema", False),
        ("swa", False),
    ]
    assert len(report.losses) == 1  # of the window
    # --k chooses a window; other methods have none and stay.
    assert [row.averaged.weights for row in report_on(run_of(rows), k=2).main] == [
        "averaged",
        "ema",
        "swa",
    ]
    alone = report_on(run_of([row for row in rows if row["weights"] in ("raw", "ema")]))
    assert [row.default for row in alone.windows] == [True]


def test_a_method_pays_for_its_evaluations_as_the_window_does() -> None:
    rows = rows_of([9, 8]) + rows_of([9, 8], weights="ema")
    for row in rows:
        row |= {"train_seconds": 100.0 * row["epoch"], "evaluate_seconds": 1.0}
        if row["weights"] == "ema":
            row["collect_seconds"] = 0.5 * row["epoch"]
    best = report_on(run_of(rows)).main[0].best
    assert best.seconds is not None
    assert best.seconds.averaged_at.mean == 200.0 + 2 * 1.0 + 2 * 1.0 + 1.0


def test_recipes_are_reported_apart_and_a_metric_can_be_chosen() -> None:
    def run(recipe: str) -> Run:
        rows = rows_of([9, 8]) + rows_of([None, 7], 2)
        return run_of([{**row, "top5_accuracy": 0.5} for row in rows], recipe=recipe)

    report = summarise([run("a"), run("b")])
    found = [(r.recipe, [m.metric.name for m in r.metrics]) for r in report.recipes]
    assert found == [("a", ["loss", "top5_accuracy"]), ("b", ["loss", "top5_accuracy"])]
    assert len(report.recipes[0].metrics[0].main) == 1  # not against the other recipe's
    assert report_on(run("a"), metric="top5_accuracy").metric.better == "higher"
    with pytest.raises(ConfigError, match=r"'speed' is not .* there are loss, top5_accuracy"):
        summarise([run("a")], metric="speed")


def test_figures_show_test_data_where_methods_may_have_chosen_on_validation_data() -> None:
    names = ("valid_loss", "valid_accuracy", "test_top5_accuracy", "test_accuracy", "test_loss")

    def shown(names: Sequence[str]) -> list[str]:
        values = dict.fromkeys(names, 0.5)
        rows = [{"weights": "raw", "epoch": 1, **values}, {"weights": "ema", "epoch": 1, **values}]
        [recipe] = summarise([run_of(rows)]).recipes
        return [each.metric.name for each in recipe.shown]

    assert shown(names) == ["test_accuracy", "test_loss"]
    assert shown(names[:2]) == ["valid_accuracy", "valid_loss"]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (rows_of([9, 8]), "only rows of raw weights"),
        (rows_of([9, 8], 2), "no metric has both raw and averaged"),
        (
            [
                {"weights": w, "k": k, "epoch": 1, "speed": 1}
                for w, k in (("raw", 0), ("averaged", 2))
            ],
            "name ends in loss, perplexity, error or accuracy",
        ),
    ],
)
def test_nothing_to_compare_is_an_error(rows: list[Row], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        summarise([run_of(rows)])


def test_rows_that_share_no_axis_are_an_error() -> None:
    epochs = [{**row, "step": None} for row in rows_of([9, 8])]
    steps = [{**row, "epoch": None} for row in rows_of([None, 8], 2)]
    with pytest.raises(FormatError, match="no `epoch` and others no `step`"):
        summarise([run_of(epochs, steps)])


def test_a_report_is_json_and_needs_neither_torch_nor_matplotlib() -> None:
    rows = rows_of([9, 8, 7]) + rows_of([None, 7, 6], 2)
    told = json.loads(json.dumps(summarise([run_of(rows)]).as_dict(), allow_nan=False))
    headline = told["recipes"][0]["metrics"][0]["main"][0]["headline"]
    assert headline["epochs"]["saved"]["mean"] == 1
    probe = (
        "import sys, lawa_lab.report.summary; "
        "sys.exit(bool({'torch', 'matplotlib', 'numpy', 'rich'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", probe], check=False).returncode == 0
