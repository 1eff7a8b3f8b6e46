"""Many tensors as one vector: arithmetic on this rank's part of a model."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torch_lawa.errors import StateError
from torch_lawa.shards import is_sharded, local

__all__ = ["Vector"]


class Vector:
    """Named tensors, changed together in a few calls.

    Operations with another vector apply to the names that the other one has.

    >>> a, b = Vector({"w": torch.tensor([1.0, 2.0])}), Vector({"w": torch.tensor([3.0, 4.0])})
    >>> a.add_(b, 0.5)
    >>> a.tensors["w"]
    tensor([2.5000, 4.0000])
    >>> b.norm().item()
    5.0
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = {name: tensor.detach() for name, tensor in tensors.items()}

    def clone(self) -> "Vector":
        """A copy."""
        return Vector({name: tensor.clone() for name, tensor in self.tensors.items()})

    def zeros(self) -> "Vector":
        """Zeros of the same form."""
        return Vector({name: torch.zeros_like(tensor) for name, tensor in self.tensors.items()})

    def copy_(self, other: "Vector") -> None:
        """Take the other's values."""
        torch._foreach_copy_(*self._pairs(other))

    def add_(self, other: "Vector", scale: float = 1.0) -> None:
        """Add the other, scaled."""
        own, others = self._pairs(other)
        torch._foreach_add_(own, others, alpha=scale)

    def lerp_(self, other: "Vector", share: float) -> None:
        """Move towards the other by a share of the way; with 1 it is a copy."""
        own, others = self._pairs(other)
        torch._foreach_lerp_(own, others, share)

    def zero_(self) -> None:
        """Become zeros, also where it is not a number."""
        torch._foreach_zero_(list(self.locals().values()))

    def mul_(self, factor: "float | Tensor") -> None:
        """Multiply by a number."""
        torch._foreach_mul_(list(self.locals().values()), factor)

    def norm(self) -> Tensor:
        """The Euclidean norm over all tensors and all ranks."""
        found = torch.nn.utils.get_total_norm(list(self.tensors.values()))
        return found.full_tensor() if is_sharded(found) else found  # type: ignore[attr-defined]

    def state_dict(self) -> dict[str, Tensor]:
        """The tensors themselves."""
        return dict(self.tensors)

    def load_state_dict(self, state: Mapping[str, Any], owner: str) -> None:
        """Take saved values, which an error says are of `owner`."""
        shapes = {name: tensor.shape for name, tensor in self.tensors.items()}
        if {name: tensor.shape for name, tensor in state.items()} != shapes:
            raise StateError(
                f"the saved state of {owner} is of other parameters than the model's: build the "
                "model as it was when the state was saved."
            )
        for name, tensor in self.tensors.items():
            local(tensor).copy_(local(state[name]))

    def locals(self) -> dict[str, Tensor]:
        """The part of each tensor that this rank has."""
        return {name: local(tensor) for name, tensor in self.tensors.items()}

    def _pairs(self, other: "Vector") -> tuple[list[Tensor], list[Tensor]]:
        return [local(self.tensors[name]) for name in other.tensors], list(other.locals().values())
