"""Optimizers of the recipes, including Lookahead and Schedule-Free."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lawa_lab.recipes.config import TrainConfig
from torch_lawa.errors import LawaError, StateError
from torch_lawa.shards import is_sharded, local

__all__ = ["Lookahead", "build_optimizer"]


class Lookahead:
    """The Lookahead optimizer (Zhang et al., 2019): slow weights follow `k` steps of fast weights.

    The inner optimizer updates the fast weights, which are the model's. After every k steps the
    slow weights move towards them by a fraction `alpha`, and the fast weights are reset to the slow
    ones. Buffers such as BatchNorm statistics and the inner optimizer's momentum are unchanged.

    >>> weight = nn.Parameter(torch.zeros(1))
    >>> optimizer = Lookahead(torch.optim.SGD([weight], lr=1.0), alpha=0.5, k=2)
    >>> for _ in range(2):
    ...     weight.grad = torch.tensor([-1.0])
    ...     optimizer.step()
    >>> weight.item()
    1.0
    """

    def __init__(self, inner: Optimizer, *, alpha: float = 0.8, k: int = 5) -> None:
        self.inner, self.alpha, self.k = inner, alpha, k
        self._fast = [p for group in inner.param_groups for p in group["params"]]
        self.slow = [p.detach().clone() for p in self._fast]
        self._num_steps = 0

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of the inner optimizer; set the learning rate there."""
        return self.inner.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients."""
        self.inner.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self) -> None:
        """One step of the fast weights, and every k-th time one of the slow weights."""
        self.inner.step()
        self._num_steps += 1
        if self._num_steps % self.k == 0:
            fast, slow = ([local(p) for p in each] for each in (self._fast, self.slow))
            torch._foreach_lerp_(slow, fast, self.alpha)
            torch._foreach_copy_(fast, slow)

    @torch.no_grad()
    def load_slow(self, slow: Iterable[Tensor], num_steps: int) -> None:
        """Set the slow weights and the number of steps."""
        torch._foreach_copy_([local(p) for p in self.slow], [local(p) for p in slow])
        self._num_steps = num_steps

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state, the slow weights and the number of steps."""
        return {
            "inner": self.inner.state_dict(),
            "slow": list(self.slow),
            "num_steps": self._num_steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state."""
        slow: list[Tensor] = state.get("slow", [])
        shapes = [tensor.shape for tensor in self.slow]
        if "inner" not in state or [tensor.shape for tensor in slow] != shapes:
            raise StateError(
                "this is not a state of Lookahead for these parameters: build the model and the "
                "optimizer as they were when it was saved."
            )
        self.inner.load_state_dict(state["inner"])
        self.load_slow(slow, int(state["num_steps"]))


def build_optimizer(
    config: TrainConfig, model: nn.Module, *, fused: bool = False
) -> Optimizer | Lookahead:
    """The optimizer of a configuration."""
    shared: dict[str, Any] = {
        "lr": config.learning_rate,
        "weight_decay": config.weight_decay,
        "fused": fused,
    }
    betas = (config.momentum, config.beta2)
    parameters = model.parameters()
    optimizer: Optimizer
    if config.optimizer == "sgd":
        # PyTorch's fused SGD does not support DTensors; the fused Adams do.
        shared["fused"] = fused and not any(is_sharded(p) for p in model.parameters())
        optimizer = torch.optim.SGD(parameters, momentum=config.momentum, **shared)
    elif config.optimizer == "adam":
        optimizer = torch.optim.Adam(parameters, betas=betas, eps=config.epsilon, **shared)
    elif config.optimizer == "adamw":
        optimizer = torch.optim.AdamW(parameters, betas=betas, eps=config.epsilon, **shared)
    else:
        optimizer = _schedule_free(config, parameters)
    if not config.lookahead:
        return optimizer
    return Lookahead(optimizer, alpha=config.lookahead_alpha, k=config.lookahead_k)


def _schedule_free(config: TrainConfig, parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Schedule-Free SGD or AdamW; the warm-up is that of the recipe's learning rate."""
    try:
        import schedulefree
    except ImportError as error:
        raise LawaError(
            f"optimizer={config.optimizer} comes from the package schedulefree, which could not be "
            f"imported ({error}): pip install 'torch-lawa[lab]'"
        ) from None
    shared = {"lr": config.learning_rate, "weight_decay": config.weight_decay}
    optimizer: Any
    if config.optimizer == "schedule-free-sgd":
        optimizer = schedulefree.SGDScheduleFree(parameters, momentum=config.momentum, **shared)
    else:
        betas = (config.momentum, config.beta2)
        optimizer = schedulefree.AdamWScheduleFree(
            parameters, betas=betas, eps=config.epsilon, **shared
        )
    optimizer.train()
    trained: Optimizer = optimizer
    return trained
