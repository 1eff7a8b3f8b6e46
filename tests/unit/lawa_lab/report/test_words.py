"""How numbers are written."""

import pytest

from lawa_lab.report.curves import Metric
from lawa_lab.report.runs import Series
from lawa_lab.report.savings import Amount, Mean, Saving
from lawa_lab.report.summary import WindowRow
from lawa_lab.report.window_words import seen_in_windows
from lawa_lab.report.words import (
    say_amount,
    say_duration,
    say_number,
    say_spread,
    say_value,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0.0000"),
        (0.000125, "0.000125"),
        (2.59e-07, "2.59e-07"),
        (-0.5, "-0.5000"),
        (99_999.0, "99999.0000"),
        (259_129_452.5, "2.591e+08"),
    ],
)
def test_tiny_and_huge_losses_keep_their_digits(value: float, text: str) -> None:
    assert say_value(Metric("test_loss", "lower"), value) == text


@pytest.mark.parametrize(
    ("name", "mean", "sd", "text"),
    [
        ("test_loss", 0.9136, 0.0009171, "0.0009"),
        ("test_loss", 0.9136, 0.0012, "0.0012"),
        ("test_loss", 0.9136, 3e-6, "3e-06"),
        ("test_loss", 0.9136, 0.0, "0.0000"),
        ("test_loss", 2e-5, 3e-6, "3e-06"),
        ("test_accuracy", 0.7844, 0.0037, "0.37"),
    ],
)
def test_a_spread_ends_where_its_mean_does(name: str, mean: float, sd: float, text: str) -> None:
    assert say_spread(Metric(name, "lower"), sd, mean) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-0.01, "0.0 s"),
        (59.94, "59.9 s"),
        (59.96, "0:01:00"),
        (3599.6, "1:00:00"),
        (-90.0, "-0:01:30"),
        (245_000.0, "68:03:20"),
    ],
)
def test_time_is_hours_minutes_seconds(seconds: float, text: str) -> None:
    assert say_duration(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"), [(-0.01, "0"), (0.96, "1"), (2.5, "2.5"), (1234.5, "1,234"), (-7, "-7")]
)
def test_counts_are_whole_where_they_nearly_are(number: float, text: str) -> None:
    assert say_number(number) == text


def window(k: int, final: float, saved: float) -> WindowRow:
    def mean(value: float) -> Mean:
        return Mean(mean=value, sd=None, low=value, high=value, num_seeds=1)

    amount = Amount(
        saved=mean(saved), baseline_at=mean(20), averaged_at=mean(20 - saved), percent=None
    )
    saving = Saving(
        what="headline",
        target=0.9,
        epochs=amount,
        steps=None,
        seconds=None,
        gpu_hours=None,
        num_seeds=1,
        num_both=1,
        by_seed=(),
    )
    return WindowRow(
        run="sgd",
        series=Series("averaged", k, "uniform"),
        default=False,
        headline=saving,
        unmatched=None,
        final=mean(final),
        best=None,
        behind=(),
        num_behind=0,
        num_compared=1,
        charged_seconds=None,
    )


def test_windows_with_equal_printed_values_are_not_ranked() -> None:
    accuracy = Metric("test_accuracy", "higher")

    def said(*rows: WindowRow) -> str:
        return seen_in_windows(accuracy, rows, "epoch", lambda series: f"k = {series.k}")

    text = said(window(4, 0.98781, 9), window(8, 0.98779, 9.01), window(16, 0.9878, 9))
    assert text == (
        "The largest saving is 9 epochs for each of them. At the end each of them has 98.78%."
    )
    text = said(window(4, 0.98, 5), window(8, 0.99, 9), window(16, 0.99, 9), window(32, 0.97, 2))
    assert text == (
        "The largest saving ranges from 2 epochs for k = 32 to 9 epochs for k = 8 and k = 16. "
        "At the end k = 8 and k = 16 are best (99.00%) and k = 32 is worst (97.00%)."
    )
    text = said(window(4, 0.98, 5), window(8, 0.99, 9))
    assert text == (
        "The largest saving ranges from 5 epochs for k = 4 to 9 epochs for k = 8. "
        "At the end k = 8 is best (99.00%) and k = 4 is worst (98.00%)."
    )


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [(3, 5, "4 epochs saved (44%; 3 to 5 by seed)"), (4, 4, "4 epochs saved (44%; in every seed)")],
)
def test_a_saving_that_is_the_same_in_every_seed_has_no_range(
    low: float, high: float, text: str
) -> None:
    saved = Mean(mean=4, sd=(high - low) / 2, low=low, high=high, num_seeds=2)
    amount = Amount(baseline_at=saved, averaged_at=saved, saved=saved, percent=44.4)
    assert say_amount(amount, "epoch") == text
