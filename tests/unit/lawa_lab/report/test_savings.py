"""What averaging saved, against curves worked out by hand."""

from collections.abc import Sequence
from typing import Any

import pytest

from lawa_lab.report import savings
from lawa_lab.report.curves import Metric
from lawa_lab.report.runs import Run, Series
from lawa_lab.report.savings import Baseline, Comparison, Saving, baseline_of
from torch_lawa.metrics import Row

LOSS, ACCURACY = Metric("loss", "lower"), Metric("accuracy", "higher")
Values = Sequence[float | None]


def rows_of(
    raw: Values, averaged: Values, *, metric: Metric = LOSS, seed: int = 0, **facts: Any
) -> list[Row]:
    """Epochs count from 1; a missing average has no row, as while the window fills."""
    rows = []
    for epoch, value in enumerate(raw, start=1):
        rows.append({"seed": seed, "epoch": epoch, "weights": "raw", metric.name: value})
    for epoch, value in enumerate(averaged, start=1):
        if value is not None:
            row = {"seed": seed, "epoch": epoch, "weights": "averaged", metric.name: value}
            rows.append({**row, "k": 2, **facts})
    return rows


def compare(
    rows: list[Row],
    metric: Metric,
    *,
    batch_norm: str | None = None,
    baseline: Baseline = "alike",
) -> Comparison:
    """The average of k = 2 against raw weights of the same rows."""
    run = Run("toy", "sgd", tuple(rows))
    series = Series("averaged", 2, "uniform", batch_norm)
    raw = baseline_of(run, series, metric, baseline)
    assert raw is not None
    return savings.compare((run, raw), (run, series), metric)


def facts(saving: Saving | None) -> tuple[float | None, ...]:
    """Target, where the average and the baseline reached it, and what was saved."""
    assert saving is not None
    amount = saving.epochs
    if amount is None:
        return saving.target, None, None, None
    return saving.target, amount.averaged_at.mean, amount.baseline_at.mean, amount.saved.mean


def test_the_headline_is_the_largest_saving_at_a_value_of_the_average() -> None:
    #        epoch  1  2  3  4  5  6
    raw = [9, 8, 7, 6, 5, 3]
    averaged = [None, 7, 5, 4, 3.5, 3]
    headline = compare(rows_of(raw, averaged), LOSS).headline
    # 7: epoch 3 against 2; 5: 5 against 3; 4 and 3.5: 6 against 4 and 5; 3: 6 against 6.
    assert facts(headline) == (4, 4, 6, 2)


def test_higher_is_better_for_accuracy() -> None:
    raw, averaged = [0.1, 0.5, 0.6, 0.7, 0.9], [None, 0.7, 0.8, 0.8, 0.9]
    headline = compare(rows_of(raw, averaged, metric=ACCURACY), ACCURACY).headline
    # 0.7: epoch 4 against 2; 0.8: 5 against 3, as much and the harder of the two; 0.9: none.
    assert facts(headline) == (0.8, 3, 5, 2)
    assert headline is not None
    assert headline.epochs is not None
    assert headline.epochs.percent == 40.0


def test_once_is_enough_to_have_reached_a_value_by_luck_too() -> None:
    raw, averaged = [9, 2, 8, 7, 2], [None, 9, 5, 2, 2]
    assert facts(compare(rows_of(raw, averaged), LOSS).best) == (2, 4, 2, -2)


def test_final_and_best_value_of_the_baseline_are_not_the_same() -> None:
    comparison = compare(rows_of([9, 4, 6], [None, 6, 5]), LOSS)
    assert facts(comparison.final) == (6, 2, 2, 0)
    assert facts(comparison.best) == (4, None, None, None)


def test_where_averaging_was_never_ahead_there_is_no_headline_and_it_is_behind() -> None:
    comparison = compare(rows_of([3, 2, 1], [None, 5, 4]), LOSS)
    assert comparison.headline is None
    assert comparison.behind_by_seed == {0: [2, 3]}
    assert comparison.unmatched is None


def test_equal_is_neither_ahead_nor_behind() -> None:
    comparison = compare(rows_of([3, 2, 1], [3, 2, 1]), LOSS)
    assert comparison.headline is None
    assert comparison.behind_by_seed == {0: []}


def test_values_the_baseline_never_reached_are_separate_from_savings() -> None:
    comparison = compare(rows_of([9, 8, 7, 7], [None, 7, 6, 5]), LOSS)
    assert comparison.unmatched is not None
    assert comparison.unmatched.averaged_from.mean == 3
    assert facts(comparison.headline) == (7, 2, 3, 1)


def test_seeds_share_the_target_and_the_spread_is_theirs() -> None:
    rows = rows_of([9, 8, 7, 6, 5, 4], [None, 6, 6, 6, 6, 6], seed=1)
    rows += rows_of([9, 8, 7, 7, 7, 6], [None, 9, 9, 6, 6, 6], seed=2)
    headline = compare(rows, LOSS).headline
    assert headline is not None
    assert headline.epochs is not None
    assert headline.target == 6
    assert [(s.seed, s.baseline_at, s.averaged_at) for s in headline.by_seed] == [
        (1, 4, 2),
        (2, 6, 4),
    ]
    saved = headline.epochs.saved
    assert (saved.mean, saved.low, saved.high, headline.epochs.percent) == (2, 2, 2, 40.0)
    # Both raw runs reach 8 at epoch 2, the averages at 2 and 4: 0 and -2, whose sd is root 2.
    at_eight = compare(rows, LOSS).saving_at(8).epochs
    assert at_eight is not None
    assert at_eight.saved.sd == pytest.approx(2**0.5)
    alone = compare(rows_of([9, 8], [None, 8]), LOSS).saving_at(8).epochs
    assert alone is not None
    assert alone.saved.sd is None


def test_a_target_that_one_seed_never_reached_is_no_headline() -> None:
    rows = rows_of([9, 8, 7, 1], [None, 1, 1, 1], seed=1)
    rows += rows_of([9, 8, 7, 7], [None, 8, 7, 1], seed=2)
    headline = compare(rows, LOSS).headline
    # At 1, seed 1 alone would save two epochs; 7 and 8 are what both seeds reached.
    assert headline is not None
    assert headline.epochs is not None
    saved = headline.epochs.saved
    assert (headline.target, saved.mean, saved.low, saved.high) == (7, 0.5, 0, 1)


def test_means_are_over_the_seeds_that_reached_the_target_and_say_how_many() -> None:
    rows = rows_of([9, 5], [None, 5], seed=1) + rows_of([9, 5], [None, 6], seed=2)
    final = compare(rows, LOSS).final
    assert (final.num_seeds, final.num_both) == (2, 1)
    assert [seed.seed for seed in final.by_seed if seed.saved is not None] == [1]


def test_a_missing_value_reaches_nothing() -> None:
    comparison = compare(rows_of([9, None, 6, None], [None, 6, 5, 4]), LOSS)
    assert comparison.baseline["epoch"][0].reach(LOSS, 8) == 3
    assert comparison.final.by_seed == ()
    assert comparison.final.epochs is None
    assert comparison.best.target == 6


def test_a_moment_written_twice_counts_as_it_was_written_last() -> None:
    rows = rows_of([9, 8, 7], [None, 7, 6])
    rows.insert(0, {"seed": 0, "epoch": 2, "weights": "raw", "loss": 0.0})
    assert compare(rows, LOSS).baseline["epoch"][0].values == (9, 8, 7)


def test_rows_may_come_in_any_order() -> None:
    rows = rows_of([9, 8, 7], [None, 7, 6])
    assert compare(rows[::-1], LOSS) == compare(rows, LOSS)


def test_steps_are_an_axis_too() -> None:
    rows = [{**row, "step": 100 * row["epoch"]} for row in rows_of([9, 8, 7], [None, 7, 6])]
    headline = compare(rows, LOSS).headline
    assert headline is not None
    assert headline.steps is not None
    assert headline.steps.saved.mean == 100


def test_seconds_charge_every_cost_of_averaging_to_it_and_to_nothing_else() -> None:
    rows = [
        {**row, "train_seconds": 100.0 * row["epoch"], "evaluate_seconds": 1.0}
        for row in rows_of([9, 8, 7], [None, 7, 6])
    ]
    for row in rows:
        row["collect_seconds"] = 0.25 * row["epoch"]
        if row["weights"] == "averaged":
            row.update(average_seconds=2.0, batch_norm_seconds=4.0)
    comparison = compare(rows, LOSS)
    assert comparison.baseline["seconds"][0].at == (101.0, 202.0, 303.0)
    # Two evaluations of the raw weights, two collects, one average of 2 + 4 + 1 seconds; and so on.
    assert comparison.averaged["seconds"][0].at == (202.0 + 0.5 + 7.0, 303.0 + 0.75 + 14.0)
    seconds = comparison.saving_at(7).seconds
    assert seconds is not None
    assert seconds.saved.mean == 303.0 - 209.5
    control = {"seed": 0, "weights": "raw", "batch_norm": "re-estimated", "loss": 7}
    for row in rows:
        if row["weights"] == "averaged":
            row["batch_norm"] = "re-estimated"
    rows.append({**control, "epoch": 1, "train_seconds": 100.0, "evaluate_seconds": 1.0})
    rows[-1]["batch_norm_seconds"] = 4.0
    comparison = compare(rows, LOSS, batch_norm="re-estimated")
    assert comparison.baseline["seconds"][0].at == (105.0,)
    assert comparison.averaged["seconds"][0].at == (209.5, 317.75)


def test_like_is_compared_with_like_unless_the_usual_baseline_is_asked_for() -> None:
    rows = rows_of([9, 8, 7, 6], [None, 6, 6, 6], batch_norm="re-estimated")
    rows += rows_of([], [None, 7, 7, 5], batch_norm="copied")
    for epoch, value in enumerate([8, 7, 6, 5], start=1):
        labels = {"seed": 0, "epoch": epoch, "weights": "raw", "batch_norm": "re-estimated"}
        rows.append({**labels, "loss": value})
    fresh = "re-estimated"
    assert facts(compare(rows, LOSS, batch_norm=fresh).saving_at(6))[-1] == 1
    usual = compare(rows, LOSS, batch_norm=fresh, baseline="usual")
    assert facts(usual.saving_at(6))[-1] == 2
    # No raw row has copied statistics: those are the running ones.
    assert facts(compare(rows, LOSS, batch_norm="copied").saving_at(7))[-1] == 1


def test_behind_looks_at_the_raw_weights_of_that_moment_not_at_their_past() -> None:
    comparison = compare(rows_of([1, 9, 2], [None, 5, 5]), LOSS)
    assert comparison.behind_by_seed == {0: [3]}
