"""How numbers are written."""

import pytest

from lawa_lab.report.curves import Metric
from lawa_lab.report.words import (
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
