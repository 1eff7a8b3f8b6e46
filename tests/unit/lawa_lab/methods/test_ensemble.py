"""Calibration and ensembles against plain loops."""

import contextlib
import math

import numpy as np
import pytest
import torch

from lawa_lab.methods.ensemble import calibration_error, ensemble_scores


def probabilities(seed: int) -> np.ndarray:
    drawn = np.random.default_rng(seed).gamma(0.3, size=(200, 4)) + 1e-9
    return drawn / drawn.sum(1, keepdims=True)


def expected_error(values: np.ndarray, labels: np.ndarray, bins: int) -> float:
    """Guo et al., as written: for each bin |accuracy - confidence| times its share."""
    confidence, right = values.max(1), values.argmax(1) == labels
    total = 0.0
    for low in np.arange(bins) / bins:
        inside = (confidence > low) & (confidence <= low + 1 / bins)
        if inside.any():
            total += inside.mean() * abs(right[inside].mean() - confidence[inside].mean())
    return float(total)


@pytest.mark.parametrize("bins", [1, 7, 15])
def test_the_calibration_error_is_the_published_one(bins: int) -> None:
    values, labels = probabilities(0), np.random.default_rng(1).integers(4, size=200)
    found = calibration_error(torch.from_numpy(values), torch.from_numpy(labels), bins)
    assert found == pytest.approx(expected_error(values, labels, bins), abs=1e-12)
    assert found > 0.05


def test_an_ensemble_averages_probabilities() -> None:
    members, labels = [probabilities(seed) for seed in range(3)], np.arange(200) % 4
    now: list[np.ndarray] = []

    @contextlib.contextmanager
    def member(values: np.ndarray):  # type: ignore[no-untyped-def]
        now.append(values)
        yield
        now.pop()

    found = ensemble_scores(
        map(member, members), lambda: torch.from_numpy(now[-1]), torch.from_numpy(labels)
    )
    for count, scores in enumerate(found, 1):
        mean = sum(members[:count]) / count
        loss = -sum(math.log(row[label]) for row, label in zip(mean, labels, strict=True)) / 200
        assert scores.loss == pytest.approx(loss, rel=1e-12)
        assert scores.accuracy == pytest.approx(float((mean.argmax(1) == labels).mean()))
        assert scores.calibration_error == pytest.approx(expected_error(mean, labels, 15))
    assert len(found) == 3
