"""The rules `recency` and `trend`: equal to what they are named after."""

import numpy as np
import pytest

from torch_lawa.coefficients import (
    Recency,
    Trend,
    Uniform,
    name_coefficients,
    parse_coefficients,
)
from torch_lawa.errors import ConfigError


@pytest.mark.parametrize("ahead", [-0.5, 0.0, 0.7, 3.0])
@pytest.mark.parametrize("n", [2, 3, 16])
def test_a_trend_is_numpys_line_of_every_weight(ahead: float, n: int) -> None:
    snapshots = np.random.default_rng(n).normal(size=(n, 5))
    weights = Trend(ahead).weights(n)
    found = np.array(weights.numerators) @ snapshots / weights.divisor
    slope, start = np.polyfit(np.arange(n), snapshots, 1)
    np.testing.assert_allclose(found, start + slope * (n - 1) * (1 + ahead), atol=1e-12)
    assert sum(weights.numerators) == pytest.approx(1)
    if ahead == -0.5:
        np.testing.assert_allclose(found, snapshots.mean(0), atol=1e-12)


def test_recency_begins_at_the_uniform_mean() -> None:
    assert Recency(0.0).weights(5) == Uniform().weights(5)
    assert Recency(2.0).weights(3).numerators == (1.0, 4.0, 9.0)
    assert Trend(1.0).weights(1).numerators == (1.0,)


def test_the_largest_power_of_a_long_window_is_a_number() -> None:
    assert Recency(20.0).weights(10_000).divisor == pytest.approx(1e84 / 21, rel=2e-3)


@pytest.mark.parametrize("text", ["recency:1", "recency:0.5", "trend:0", "trend:-0.25"])
def test_a_name_parses_back_to_its_rule(text: str) -> None:
    assert name_coefficients(parse_coefficients(text)) == text


@pytest.mark.parametrize("text", ["recency:-1", "recency:21", "recency:x", "trend:-2", "trend:inf"])
def test_mistakes_are_told(text: str) -> None:
    with pytest.raises(ConfigError, match=r"(?i)recency|trend"):
        parse_coefficients(text)
