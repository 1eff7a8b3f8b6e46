"""`Averager`, the protocol that every averaging method implements."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor, nn

__all__ = ["Averager"]


class Averager(Protocol):
    """What averages the weights of a training run: a window, an EMA, or another method.

    Evaluation, recipes and reports accept any object with these methods, so that methods can be
    compared side by side.

    >>> from torch_lawa import LatestWeightAverager
    >>> averager: Averager = LatestWeightAverager(k=6)
    >>> averager.kind, averager.ready
    ('averaged', False)
    """

    @property
    def kind(self) -> str:
        """The method's name in metrics files and reports, such as "ema"."""
        ...

    @property
    def ready(self) -> bool:
        """Whether there is an average to read."""
        ...

    def collect(self, model: nn.Module, *, step: int | None = None) -> None:
        """Take the model's current weights into the average."""
        ...

    def step(self, model: nn.Module, *, loss: float | None = None) -> bool:
        """Count one step and collect if one is due; returns whether it did."""
        ...

    def swapped_into(self, model: nn.Module) -> AbstractContextManager[None]:
        """Swap the average into the model for a `with` block, then restore its own weights."""
        ...

    def average(self) -> dict[str, Tensor]:
        """The average as a state dict."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Everything that is needed to resume."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state."""
        ...
