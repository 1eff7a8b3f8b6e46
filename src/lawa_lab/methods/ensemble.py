"""Ensembles of weights: their predictions are averaged, and scored as they grow."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Scores", "calibration_error", "ensemble_scores"]


@dataclass(frozen=True)
class Scores:
    """Accuracy, mean negative log-likelihood, and expected calibration error."""

    accuracy: float
    loss: float
    calibration_error: float


def calibration_error(probabilities: Tensor, labels: Tensor, bins: int = 15) -> float:
    """The expected calibration error: how far confidence is from accuracy, in equal-width bins.

    A prediction's confidence is the largest probability. In each bin of confidence (above its lower
    end, up to its upper end), the mean confidence is compared with the accuracy, and the
    differences are averaged over all predictions.

    >>> sure = torch.tensor([[0.9, 0.1], [0.9, 0.1]])
    >>> round(calibration_error(sure, torch.tensor([0, 1])), 3)  # 90 % sure, 50 % right
    0.4
    """
    confidence, guess = probabilities.double().max(1)
    right = (guess == labels).double()
    bin_of = (confidence * bins).ceil().long().clamp(1, bins) - 1
    gaps = torch.zeros(bins, dtype=torch.float64, device=probabilities.device)
    gaps.index_add_(0, bin_of, confidence - right)
    return float(gaps.abs().sum() / len(labels))


def score_probabilities(probabilities: Tensor, labels: Tensor) -> Scores:
    """The scores of class probabilities, one row per example."""
    of_label = probabilities.double().gather(1, labels[:, None])
    return Scores(
        accuracy=float((probabilities.argmax(1) == labels).double().mean()),
        loss=float(-of_label.clamp(min=torch.finfo(torch.float64).tiny).log().mean()),
        calibration_error=calibration_error(probabilities, labels),
    )


def ensemble_scores(
    members: Iterable[AbstractContextManager[None]],
    predict: Callable[[], Tensor],
    labels: Tensor,
) -> list[Scores]:
    """The scores of the first member, of the first two, and so on to all of them.

    A member is a swap, such as `averager.sampled_into(model, seed=0)`. `predict` returns the class
    probabilities of the weights that are swapped in; it re-estimates BatchNorm statistics first if
    the model has any.
    """
    total: Tensor | None = None
    found = []
    for count, member in enumerate(members, 1):
        with member:
            probabilities = predict().double()
        total = probabilities if total is None else total + probabilities
        found.append(score_probabilities(total / count, labels))
    return found
