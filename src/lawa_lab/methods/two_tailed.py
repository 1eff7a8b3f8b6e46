"""Two-tailed averaging (Melis, 2022): the length of the average chosen by validation."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

from lawa_lab.methods.fitting import FittingData
from lawa_lab.methods.running_average import RunningAverage

__all__ = ["TwoTailedAverage"]


class TwoTailedAverage:
    """Two running means of all steps since their beginnings: a long one, and a short one.

    When the short one has no higher validation loss, it replaces the long one and starts over, so
    the long one always begins about where the average is best. The long one is served.
    """

    validates = True

    def __init__(self, model: nn.Module, *, kind: str) -> None:
        self.kind = kind
        self._long, self._short = (
            RunningAverage(model, lambda step: 1.0 / step, kind=kind) for _ in range(2)
        )

    @property
    def ready(self) -> bool:
        """Whether a step has been averaged."""
        return self._long.ready

    def collect(self, model: nn.Module, *, step: int | None = None) -> None:
        """Take the weights into both means."""
        self._long.collect(model)
        self._short.collect(model)

    def step(self, model: nn.Module, *, loss: float | None = None) -> bool:
        """Count one optimizer step; every one of them is averaged."""
        self.collect(model)
        return True

    def fit(self, data: FittingData) -> None:
        """Compare the two means; the short one may replace the long one."""
        if not self._short.ready:
            return
        losses = []
        for mean in (self._long, self._short):
            with mean.swapped_into(data.model):
                losses.append(data.validate())
        if losses[1] <= losses[0]:  # equal at first, when both have the same steps
            self._long, self._short = self._short, self._long
            self._short.restart()

    def swapped_into(self, model: nn.Module) -> AbstractContextManager[None]:
        """Swap in the long mean."""
        return self._long.swapped_into(model)

    def average(self) -> dict[str, Tensor]:
        """The long mean."""
        return self._long.average()

    def state_dict(self) -> dict[str, Any]:
        """Both means."""
        return {"long": self._long.state_dict(), "short": self._short.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state."""
        self._long.load_state_dict(state["long"])
        self._short.load_state_dict(state["short"])
