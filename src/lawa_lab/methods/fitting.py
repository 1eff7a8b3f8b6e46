"""What a method that needs data is given before each evaluation.

Training data for methods that learn, validation data for methods that choose; never test data. The
time that a method spends in `fit` is charged to it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

__all__ = ["Fitted", "FittingData"]


@dataclass(frozen=True)
class FittingData:
    """The model and its data, at one point of a run.

    Args:
        model: The model that is trained, with its own weights.
        batches: Training batches, as many as are wanted; the same at each call.
        loss: The training loss of the model on a batch. The model is in training mode.
        validate: The validation loss of the weights that the model has now. BatchNorm statistics
            are re-estimated first, so swap weights in before the call.
        mean: The means of numbers over all ranks.
    """

    model: nn.Module
    batches: Callable[[], Iterator[Sequence[Tensor]]]
    loss: Callable[[Sequence[Tensor]], Tensor]
    validate: Callable[[], float]
    mean: Callable[[Sequence[float]], Sequence[float]] = tuple


@runtime_checkable
class Fitted(Protocol):
    """An averager that learns or chooses something from data before it is evaluated.

    One that calls `validate` sets `validates = True`: a run without validation data then refuses
    it before it trains.
    """

    def fit(self, data: FittingData) -> Any:
        """Decide what `swapped_into` will swap in; the model must have its weights again after."""
        ...
