"""Optimizers of the recipes, including Schedule-Free; `lawa_lab.wrappers` wraps them."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lawa_lab.recipes.config import TrainConfig
from torch_lawa.errors import LawaError
from torch_lawa.shards import is_sharded

__all__ = ["build_optimizer"]


def build_optimizer(config: TrainConfig, model: nn.Module, *, fused: bool = False) -> Optimizer:
    """The optimizer of a configuration."""
    shared: dict[str, Any] = {
        "lr": config.learning_rate,
        "weight_decay": config.weight_decay,
        "fused": fused,
    }
    betas = (config.momentum, config.beta2)
    parameters = model.parameters()
    if config.optimizer == "sgd":
        # PyTorch's fused SGD does not support DTensors; the fused Adams do.
        shared["fused"] = fused and not any(is_sharded(p) for p in model.parameters())
        return torch.optim.SGD(parameters, momentum=config.momentum, **shared)
    if config.optimizer == "adam":
        return torch.optim.Adam(parameters, betas=betas, eps=config.epsilon, **shared)
    if config.optimizer == "adamw":
        return torch.optim.AdamW(parameters, betas=betas, eps=config.epsilon, **shared)
    return _schedule_free(config, parameters)


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
