"""Spike rescue: at a loss spike the weights go back to the mean of the good snapshots."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from lawa_lab.wrappers.base import BuiltWrapper, Gradient, Step, WrappedRun
from lawa_lab.wrappers.registry import Wrapper, register_wrapper


@register_wrapper
@dataclass(frozen=True)
class Rescue(Wrapper):
    """The library's `SpikeRescue` on the run's own window."""

    name: ClassVar[str] = "rescue"
    typed: ClassVar[str] = "rescue[:FACTOR:HISTORY:PATIENCE:RESET]"
    rivals: ClassVar[bool] = False

    factor: float = 2.0
    history: float = 50
    patience: float = 1
    reset: float = 1

    def __post_init__(self) -> None:
        whole = self.history == int(self.history) and self.patience == int(self.patience)
        valid = whole and self.history >= 2 and self.patience >= 1 and self.reset in (0, 1)
        self.require(valid and self.factor > 1, "rescue:2:50:1:1")

    def build(self, run: WrappedRun) -> BuiltWrapper:
        """It has the snapshots of the run's averager."""
        return _RescueSteps(self, run)


class _RescueSteps(BuiltWrapper):
    def __init__(self, settings: Rescue, run: WrappedRun) -> None:
        from torch_lawa.spike_rescue import SpikeRescue

        self._run = run
        self._rescue = SpikeRescue(
            run.averager,
            factor=settings.factor,
            history=int(settings.history),
            patience=int(settings.patience),
            optimizer_state="reset" if settings.reset else "keep",
        )

    @property
    def facts(self) -> dict[str, int]:
        return {"rescues": self._rescue.num_rescues}

    def step(self, gradient: Gradient, inner: Step) -> None:
        checked = False

        def watched() -> None:
            nonlocal checked
            gradient()
            # Only once: the loss of a step is that of its first gradient.
            if not checked and self._rescue(self._run.model, self._run.optimizer, self._run.loss):
                self._run.skip()
            checked = True

        inner(watched)

    def state_dict(self) -> dict[str, Any]:
        return self._rescue.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._rescue.load_state_dict(state)
