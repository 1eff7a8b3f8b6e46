"""Optimizers of the recipes, including Schedule-Free; `lawa_lab.wrappers` wraps them."""

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lawa_lab.recipes.config import TrainConfig
from torch_lawa.errors import LawaError
from torch_lawa.shards import is_sharded

__all__ = ["build_optimizer"]


def build_optimizer(config: TrainConfig, model: nn.Module, *, fused: bool = False) -> Optimizer:
    """The optimizer of a configuration; the warm-up is that of the recipe's learning rate."""
    parameters = model.parameters()
    shared: dict[str, Any] = {"lr": config.learning_rate, "weight_decay": config.weight_decay}
    adam = {**shared, "betas": (config.momentum, config.beta2), "eps": config.epsilon}
    if config.optimizer == "sgd":
        # PyTorch's fused SGD does not support DTensors; the fused Adams do.
        fused = fused and not any(is_sharded(p) for p in model.parameters())
        return torch.optim.SGD(parameters, momentum=config.momentum, fused=fused, **shared)
    if config.optimizer == "adam":
        return torch.optim.Adam(parameters, fused=fused, **adam)
    if config.optimizer == "adamw":
        return torch.optim.AdamW(parameters, fused=fused, **adam)
    try:
        import schedulefree
    except ImportError as error:
        raise LawaError(
            f"optimizer={config.optimizer} comes from the package schedulefree, which could not be "
            f"imported ({error}): pip install 'torch-lawa[lab]'"
        ) from None
    free: Any
    if config.optimizer == "schedule-free-sgd":
        free = schedulefree.SGDScheduleFree(parameters, momentum=config.momentum, **shared)
    else:
        free = schedulefree.AdamWScheduleFree(parameters, **adam)
    free.train()
    optimizer: Optimizer = free
    return optimizer
