"""The meter of what averaging saved, against curves worked out by hand."""

from collections.abc import Sequence
from typing import Any

import pytest

from lawa_lab.report.savings import Comparison, Metric, compare
from torch_lawa.errors import ConfigError, FormatError
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


def test_the_headline_is_the_longest_stretch_until_the_raw_weights_match() -> None:
    #        epoch  1  2  3  4  5  6
    raw = [9, 8, 7, 6, 5, 3]
    averaged = [None, 7, 5, 4, 3.5, 3]
    headline = compare(rows_of(raw, averaged), LOSS).headline
    # 7: epoch 3 against 2; 5: 5 against 3; 4 and 3.5: 6 against 4 and 5; 3: 6 against 6.
    assert headline is not None
    assert headline.saved == 2
    assert (headline.target, headline.averaged_at, headline.baseline_at) == (4, 4, 6)


def test_higher_is_better_for_accuracy() -> None:
    raw, averaged = [0.1, 0.5, 0.6, 0.7, 0.9], [None, 0.7, 0.8, 0.8, 0.9]
    headline = compare(rows_of(raw, averaged, metric=ACCURACY), ACCURACY).headline
    assert headline is not None
    # 0.7: epoch 4 against 2; 0.8: 5 against 3, as long and the harder of the two; 0.9: none.
    assert (headline.target, headline.averaged_at, headline.baseline_at) == (0.8, 3, 5)
    assert headline.percent == 40.0


def test_once_is_enough_to_have_reached_a_value_by_luck_too() -> None:
    raw, averaged = [9, 2, 8, 7, 2], [None, 9, 5, 2, 2]
    at_best = compare(rows_of(raw, averaged), LOSS).at_best
    assert (at_best.target, at_best.baseline_at, at_best.averaged_at) == (2, 2, 4)
    assert at_best.saved == -2


def test_final_and_best_value_of_the_baseline_are_not_the_same() -> None:
    comparison = compare(rows_of([9, 4, 6], [None, 6, 5]), LOSS)
    assert (comparison.at_final.target, comparison.at_final.saved) == (6, 0)
    assert comparison.at_best.target == 4
    assert comparison.at_best.averaged_at is None
    assert comparison.at_best.saved is None
    assert comparison.at_best.percent is None


def test_where_averaging_never_led_there_is_no_headline_and_it_is_behind() -> None:
    comparison = compare(rows_of([3, 2, 1], [None, 5, 4]), LOSS)
    assert comparison.headline is None
    assert comparison.behind == {0: [2, 3]}
    assert comparison.never_matched == {}


def test_equal_is_neither_ahead_nor_behind() -> None:
    comparison = compare(rows_of([3, 2, 1], [3, 2, 1]), LOSS)
    assert comparison.headline is None
    assert comparison.behind == {0: []}


def test_values_the_baseline_never_reached_are_told_apart_from_savings() -> None:
    comparison = compare(rows_of([9, 8, 7, 7], [None, 7, 6, 5]), LOSS)
    assert comparison.never_matched == {0: 3}
    assert comparison.headline is not None
    assert (comparison.headline.target, comparison.headline.saved) == (7, 1)


def test_seeds_share_the_target_and_the_spread_is_theirs() -> None:
    rows = rows_of([9, 8, 7, 6, 5, 4], [None, 6, 6, 6, 6, 6], seed=1)
    rows += rows_of([9, 8, 7, 7, 7, 6], [None, 9, 9, 6, 6, 6], seed=2)
    headline = compare(rows, LOSS).headline
    assert headline is not None
    assert headline.target == 6
    assert [(r.seed, r.baseline_at, r.averaged_at) for r in headline.reaches] == [
        (1, 4, 2),
        (2, 6, 4),
    ]
    assert (headline.saved, headline.spread, headline.percent) == (2, (2, 2), 40.0)
    # At 8 both raw runs came at epoch 2, the averages at 2 and 4: 0 and -2, whose sd is root 2.
    assert compare(rows, LOSS).saving_at(8).sd == pytest.approx(2**0.5)
    assert compare(rows_of([9, 8], [None, 8]), LOSS).saving_at(8).sd is None


def test_a_target_that_one_seed_never_reached_is_no_headline() -> None:
    rows = rows_of([9, 8, 7, 1], [None, 1, 1, 1], seed=1)
    rows += rows_of([9, 8, 7, 7], [None, 8, 7, 1], seed=2)
    headline = compare(rows, LOSS).headline
    # At 1, seed 1 alone would save two epochs; 7 and 8 are what both seeds reached.
    assert headline is not None
    assert (headline.target, headline.saved, headline.spread) == (7, 0.5, (0, 1))


def test_means_are_over_the_seeds_that_got_there_and_say_how_many() -> None:
    rows = rows_of([9, 5], [None, 5], seed=1) + rows_of([9, 5], [None, 6], seed=2)
    at_final = compare(rows, LOSS).at_final
    assert len(at_final.reaches) == 2
    assert [reach.seed for reach in at_final.both] == [1]


def test_a_missing_value_reaches_nothing() -> None:
    comparison = compare(rows_of([9, None, 6, None], [None, 6, 5, 4]), LOSS)
    assert comparison.baseline[0].reach(LOSS, 8) == 3
    assert comparison.at_final.reaches == ()
    assert comparison.at_final.saved is None
    assert comparison.at_best.target == 6


def test_a_moment_written_twice_counts_as_it_was_written_last() -> None:
    rows = rows_of([9, 8, 7], [None, 7, 6])
    rows.insert(0, {"seed": 0, "epoch": 2, "weights": "raw", "loss": 0.0})
    assert compare(rows, LOSS).baseline[0].values == (9, 8, 7)


def test_rows_may_come_in_any_order() -> None:
    rows = rows_of([9, 8, 7], [None, 7, 6])
    assert compare(rows[::-1], LOSS) == compare(rows, LOSS)


def test_steps_are_an_axis_too() -> None:
    rows = [{**row, "step": 100 * row["epoch"]} for row in rows_of([9, 8, 7], [None, 7, 6])]
    headline = compare(rows, LOSS, axis="step").headline
    assert headline is not None
    assert headline.saved == 100


def test_seconds_charge_every_cost_of_averaging_to_it_and_to_nothing_else() -> None:
    rows = [
        {**row, "train_seconds": 100.0 * row["epoch"], "evaluate_seconds": 1.0}
        for row in rows_of([9, 8, 7], [None, 7, 6])
    ]
    for row in rows:
        row["collect_seconds"] = 0.25 * row["epoch"]
        if row["weights"] == "averaged":
            row.update(average_seconds=2.0, batch_norm_seconds=4.0)
    comparison = compare(rows, LOSS, axis="seconds")
    assert comparison.baseline[0].at == (101.0, 202.0, 303.0)
    # Two evaluations of the raw weights, two collects, one average of 2 + 4 + 1 seconds; and so on.
    assert comparison.averaged[0].at == (202.0 + 0.5 + 7.0, 303.0 + 0.75 + 14.0)
    assert comparison.saving_at(7).saved == 303.0 - 209.5
    control = {"seed": 0, "weights": "raw", "batch_norm": "re-estimated", "loss": 7}
    for row in rows:
        if row["weights"] == "averaged":
            row["batch_norm"] = "re-estimated"
    rows.append({**control, "epoch": 1, "train_seconds": 100.0, "evaluate_seconds": 1.0})
    rows[-1]["batch_norm_seconds"] = 4.0
    comparison = compare(rows, LOSS, axis="seconds")
    assert comparison.baseline[0].at == (105.0,)
    assert comparison.averaged[0].at == (209.5, 317.75)


def test_like_is_compared_with_like_unless_the_usual_baseline_is_asked_for() -> None:
    rows = rows_of([9, 8, 7, 6], [None, 6, 6, 6], batch_norm="re-estimated")
    rows += rows_of([], [None, 7, 7, 5], batch_norm="copied")
    for epoch, value in enumerate([8, 7, 6, 5], start=1):
        facts = {"seed": 0, "epoch": epoch, "weights": "raw", "batch_norm": "re-estimated"}
        rows.append({**facts, "loss": value})
    assert compare(rows, LOSS).saving_at(6).saved == 1
    assert compare(rows, LOSS, baseline="usual").saving_at(6).saved == 2
    # No raw row has copied statistics: those are the running ones.
    assert compare(rows, LOSS, batch_norm="copied").saving_at(7).saved == 1


def test_behind_looks_at_the_raw_weights_of_that_moment_not_at_their_past() -> None:
    comparison = compare(rows_of([1, 9, 2], [None, 5, 5]), LOSS)
    assert comparison.behind == {0: [3]}


def test_several_averages_are_never_mixed() -> None:
    raw = [9, 8, 7]
    rows = rows_of(raw, [None, 8, 7], batch_norm="copied")
    rows += rows_of([], [None, 7, 6], batch_norm="re-estimated")

    def values(comparison: Comparison) -> tuple[float | None, ...]:
        return comparison.averaged[0].values

    assert values(compare(rows, LOSS)) == (7, 6)
    assert values(compare(rows, LOSS, batch_norm="copied")) == (8, 7)
    rows += rows_of([], [None, 5, 5], k=3)
    with pytest.raises(ConfigError, match="k"):
        compare(rows, LOSS)
    assert values(compare(rows, LOSS, k=3)) == (5, 5)


def test_nothing_to_compare_is_an_error_that_says_what_is_missing() -> None:
    with pytest.raises(FormatError, match="'loss' of averaged weights"):
        compare(rows_of([9, 8], []), LOSS)
    with pytest.raises(FormatError, match="'top5' of raw weights"):
        compare(rows_of([9, 8], [None, 7]), Metric("top5", "higher"))
