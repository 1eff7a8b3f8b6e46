"""Coefficients by hand."""

import pytest
import torch

from torch_lawa import Explicit, Exponential, Uniform
from torch_lawa.errors import ConfigError


def test_exponential_weighs_the_newest_with_alpha_and_sums_to_one() -> None:
    weights = Exponential(0.9).weights(4)
    assert weights.numerators == pytest.approx((0.001, 0.009, 0.09, 0.9))
    assert sum(weights.numerators) == pytest.approx(1.0, abs=1e-15)
    assert weights.divisor == 1.0
    assert Exponential(0.9).weights(1).numerators == (1.0,)
    assert not weights.uniform
    assert Uniform().weights(4).uniform


def test_torch_calls_one_minus_alpha_the_decay() -> None:
    """alpha = 0.9 is decay = 0.1 in `swa_utils`, checked against torch itself."""
    snapshots = [torch.randn(5, dtype=torch.float64) for _ in range(4)]
    update = torch.optim.swa_utils.get_ema_avg_fn(decay=0.1)
    ema = snapshots[0]
    for snapshot in snapshots[1:]:
        ema = update(ema, snapshot, torch.tensor(1))
    weights = Exponential(0.9).weights(4).numerators
    ours = sum(w * s for w, s in zip(weights, snapshots, strict=True))
    torch.testing.assert_close(ours, ema)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Exponential(0.0), r"must lie in \(0, 1\].*alpha = 1 - decay"),
        (lambda: Exponential(1.5), "alpha=1.5"),
        (lambda: Exponential(float("nan")), "alpha=nan"),
        (lambda: Explicit([]), "one weight a snapshot"),
        (lambda: Explicit([1, float("inf")]), "finite"),
        (lambda: Explicit([1, 0]), "the last weight"),
        (lambda: Explicit([1, 2]).weights(3), "2 weights and the window 3"),
        (lambda: Explicit([1, -1]).weights(2), "sum to 0"),
    ],
)
def test_impossible_coefficients(make, message) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match=message):
        make()
