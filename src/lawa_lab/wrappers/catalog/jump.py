"""Jump forward: continue training from the average, and go back if that was a mistake."""

from dataclasses import dataclass
from typing import ClassVar

from lawa_lab.wrappers.base import BuiltWrapper, Gradient, Step, WrappedRun
from lawa_lab.wrappers.registry import Wrapper, register_wrapper


@register_wrapper
@dataclass(frozen=True)
class Jump(Wrapper):
    """Every `every` steps the weights become the average of the run's window.

    If the mean training loss of the next `patience` steps is above that of the last `patience`
    steps before the jump, the weights of the moment before it return. `patience` 0 never goes back.
    With `reset` 1 the optimizer state is reset after each jump and each return; with 0 it keeps its
    momentum.
    """

    name: ClassVar[str] = "jump"
    typed: ClassVar[str] = "jump:EVERY[:PATIENCE[:RESET]]"

    every: float
    patience: float = 20
    reset: float = 0

    def __post_init__(self) -> None:
        whole = self.every == int(self.every) and self.patience == int(self.patience)
        valid = whole and self.every >= 1 and self.patience >= 0 and self.reset in (0, 1)
        self.require(valid, "jump:500:20:0")
        apart = 2 * self.patience <= self.every
        self.require(apart, "jump:500:20", "two jumps are at least twice the patience apart")

    def build(self, run: WrappedRun) -> BuiltWrapper:
        """One copy: the weights before the jump."""
        return _JumpSteps(self, run)


class _JumpSteps(BuiltWrapper):
    vectors = ("before",)
    numbers = ("num_steps", "jumps", "returns", "trial", "loss_before", "num_before", "loss_since")

    def __init__(self, settings: Jump, run: WrappedRun) -> None:
        self._every, self._patience = int(settings.every), int(settings.patience)
        self._reset, self._run = bool(settings.reset), run
        self.before = run.weights.clone()
        self.num_steps = self.jumps = self.returns = 0
        self.trial = False  # whether the last jump may still be undone
        self.loss_before = self.loss_since = 0.0  # sums over `patience` steps
        self.num_before = 0  # fewer, if a rescue came between them

    @property
    def facts(self) -> dict[str, int]:
        return {"jumps": self.jumps, "returns": self.returns}

    def step(self, gradient: Gradient, inner: Step) -> None:
        inner(gradient)
        self.num_steps += 1
        since, left = self.num_steps % self._every, -self.num_steps % self._every
        if self.trial and since <= self._patience:
            self.loss_since += self._run.mean_loss()
            if since == self._patience:
                self._decide()
        if left < self._patience:
            self.loss_before += self._run.mean_loss()
            self.num_before += 1
        if left == 0:
            self._jump()

    def restart(self) -> None:
        self.trial = False
        self.loss_before = self.loss_since = 0.0
        self.num_before = 0

    def _jump(self) -> None:
        if not self._run.averager.ready:
            self.restart()
            return
        self.before.copy_(self._run.weights)
        self._run.go_to_average()
        self.jumps += 1
        self.trial, self.loss_since = self._patience > 0, 0.0
        if self._reset:
            self._run.reset_optimizer()

    def _decide(self) -> None:
        if self.loss_since * self.num_before > self.loss_before * self._patience:
            self._run.weights.copy_(self.before)
            self.returns += 1
            if self._reset:
                self._run.reset_optimizer()
        self.restart()
