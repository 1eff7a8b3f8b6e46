"""What a wrapper is built from and what it is asked: one optimizer step at a time.

Imports no torch, so that the catalog can use it.
"""

import abc
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeAlias

from torch_lawa.errors import StateError

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from lawa_lab.vector import Vector
    from torch_lawa.averager import LatestWeightAverager

__all__ = ["BuiltWrapper", "Gradient", "Step", "WrappedRun"]

Gradient: TypeAlias = Callable[[], None]  # computes the gradient of the batch at the weights
Step: TypeAlias = Callable[[Gradient], None]  # calls it, then moves the weights


class WrappedRun(Protocol):
    """What a wrapper may read and change of the run that it is in."""

    model: "nn.Module"
    optimizer: "Optimizer"
    averager: "LatestWeightAverager"
    weights: "Vector"
    """The model's parameters themselves, not copies."""

    rate_share: float
    """The learning rate of this step as a share of its peak."""
    loss: "Tensor"
    """The loss of this step's batch on this rank, of its first gradient, as float64."""

    def gradients(self) -> "Vector":
        """The gradients themselves, of the parameters that have one."""
        ...

    def preserved_buffers(self) -> AbstractContextManager[None]:
        """Restore the buffers after the block, such as BatchNorm's running statistics."""
        ...

    def mean_loss(self) -> float:
        """The mean of `loss` over all ranks."""
        ...

    def skip(self) -> NoReturn:
        """End this step with the weights as they are; its loss does not count."""
        ...

    def go_to_average(self) -> None:
        """Make the weights the average of the run's window; buffers stay."""
        ...

    def reset_optimizer(self) -> None:
        """Reset the optimizer state (momentum and so on)."""
        ...


class BuiltWrapper(abc.ABC):
    """A wrapper at work: `step` is one optimizer step.

    What must be saved is in attributes named by `vectors` and `numbers`; both are fixed, so that a
    sharded checkpoint can be loaded into a run that has not begun.
    """

    vectors: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()

    @abc.abstractmethod
    def step(self, gradient: Gradient, inner: Step) -> None:
        """Take one step: call `inner` once, with `gradient` or with another one."""

    def restart(self) -> None:  # noqa: B027  # not every wrapper has something to forget
        """The weights were replaced: what belongs to those before is no longer of use."""

    @property
    def facts(self) -> dict[str, int]:
        """What rows say about the run so far."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Everything that the rest of the run depends on."""
        return {
            "numbers": {name: getattr(self, name) for name in self.numbers},
            "vectors": {name: getattr(self, name).state_dict() for name in self.vectors},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state."""
        try:
            for name in self.vectors:
                getattr(self, name).load_state_dict(state["vectors"][name], type(self).__name__)
            for name in self.numbers:
                setattr(self, name, state["numbers"][name])
        except KeyError as error:
            raise StateError(
                f"this is not a state of {type(self).__name__} for these parameters ({error} is "
                "missing): build the run as it was when it was saved."
            ) from None
