"""SAM, sharpness-aware minimisation: the gradient of the worst point nearby."""

from dataclasses import dataclass
from typing import ClassVar

from lawa_lab.wrappers.base import BuiltWrapper, Gradient, Step, WrappedRun
from lawa_lab.wrappers.registry import Wrapper, register_wrapper


@register_wrapper
@dataclass(frozen=True)
class Sam(Wrapper):
    """The optimizer gets the gradient at w + rho * g / |g|, where g is the gradient at w.

    Two gradients per step, of the same batch and with the same dropout. Norm layers keep the
    running statistics of the first.
    """

    name: ClassVar[str] = "sam"
    typed: ClassVar[str] = "sam[:RHO]"
    gradients: ClassVar[int] = 2
    moves_weights: ClassVar[bool] = False  # they are back before the optimizer's step
    rivals: ClassVar[bool] = False

    rho: float = 0.05

    def __post_init__(self) -> None:
        self.require(self.rho > 0, "sam:0.05")

    def build(self, run: WrappedRun) -> BuiltWrapper:
        """Nothing is kept between steps."""
        return _SamSteps(self, run)


class _SamSteps(BuiltWrapper):
    def __init__(self, settings: Sam, run: WrappedRun) -> None:
        self._settings, self._run = settings, run

    def step(self, gradient: Gradient, inner: Step) -> None:
        def at_the_worst_point() -> None:
            run, weights = self._run, self._run.weights
            gradient()
            way, before = run.gradients(), weights.clone()
            way.mul_(self._settings.rho / (way.norm() + 1e-12))
            weights.add_(way)
            with run.preserved_buffers():
                gradient()
            weights.copy_(before)

        inner(at_the_worst_point)
