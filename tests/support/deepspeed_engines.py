"""DeepSpeed engines on CPU ranks, and what DeepSpeed itself says their weights are."""

import copy
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from support.ranks import on_ranks

sys.path.insert(0, str(Path(__file__).parents[1] / "recorded"))
from record_deepspeed import Net, environment, to_universal

__all__ = [
    "ENGINES",
    "TOKENS",
    "Engine",
    "Net",
    "masters",
    "on_engines",
    "to_universal",
    "train_step",
    "whole",
    "working_weights",
]

TOKENS = torch.arange(11)


@dataclass(frozen=True)
class Engine:
    """A configuration: the stage of ZeRO, the dtype, and what else differs."""

    stage: int
    bf16: bool = False
    persistent: int = 0  # parameters of up to this size stay gathered in stage 3
    empty: bool = False  # whether the model has an empty parameter, with which stage 3 fails
    more: dict[str, Any] = field(default_factory=dict)  # in the configuration
    zero: dict[str, Any] = field(default_factory=dict)  # in its section about ZeRO

    def __call__(self, seed: int = 7) -> Any:
        """A new engine with a new model."""
        import deepspeed

        torch.manual_seed(seed)
        model = self.model()
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.groups(), config=self.config()
        )
        return engine

    def model(self) -> Net:
        """The model of the engine."""
        return Net(1 if self.empty else 3)

    def config(self) -> dict[str, Any]:
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.05, "torch_adam": True}},
            "zero_optimization": {
                "stage": self.stage,
                "stage3_param_persistence_threshold": self.persistent,
                "sub_group_size": 40,  # several flat groups for each group of parameters
                **self.zero,
            },
            "bf16": {"enabled": self.bf16},
            **self.more,
        }
        return copy.deepcopy(config)  # DeepSpeed changes it


OFFLOAD: dict[str, Any] = {"offload_optimizer": {"device": "cpu"}}
ENGINES = {
    "zero0": Engine(0),
    "zero0-bf16": Engine(0, bf16=True),
    "zero1": Engine(1, empty=True),
    "zero1-bf16": Engine(1, bf16=True, more={"data_types": {"grad_accum_dtype": "fp32"}}),
    "zero2": Engine(2, bf16=True, empty=True),
    "zero2-fp32": Engine(2),
    "zero2-offload": Engine(2, bf16=True, zero=OFFLOAD),
    "zero3": Engine(3, bf16=True, persistent=40),
    "zero3-fp32": Engine(3),
    "zero3-offload": Engine(3, bf16=True, zero={**OFFLOAD, "offload_param": {"device": "cpu"}}),
}


def on_engines(ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Run a function of a test on ranks that can use DeepSpeed."""
    before = dict(os.environ)
    os.environ.update(environment())
    try:
        return on_ranks(ranks, function, *arguments)
    finally:
        os.environ.clear()
        os.environ.update(before)


def train_step(engine: Any, step: int) -> None:
    """One step, with the data of that step; the same on all ranks."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 11, (4,), generator=generator)
    loss = nn.functional.cross_entropy(engine(tokens).float(), tokens.flip(0))
    engine.backward(loss)
    engine.step()


def masters(engine: Any) -> dict[str, Tensor]:
    """The whole float32 masters, by DeepSpeed's own function; without ZeRO its own lists."""
    from deepspeed.utils import safe_get_full_fp32_param

    found = {}
    for name, parameter in engine.module.named_parameters():
        if not parameter.requires_grad:
            continue
        value = safe_get_full_fp32_param(parameter)
        found[name] = parameter if value is None else value
    if hasattr(engine.optimizer, "fp32_groups"):
        by_id = {id(p): name for name, p in engine.module.named_parameters()}
        pairs = zip(engine.optimizer.fp16_groups, engine.optimizer.fp32_groups, strict=True)
        for copies, own in pairs:
            found.update({by_id[id(c)]: m for c, m in zip(copies, own, strict=True)})
    return {name: tensor.detach().clone() for name, tensor in found.items()}


def working_weights(engine: Any) -> dict[str, Tensor]:
    """Every parameter and buffer as forward passes on this rank see it."""
    from deepspeed import zero

    parameters = list(engine.module.parameters())
    if engine.zero_optimization_stage() == 3:
        with zero.GatheredParameters(parameters):
            return {n: t.detach().clone() for n, t in engine.module.state_dict().items()}
    return {n: t.detach().clone() for n, t in engine.module.state_dict().items()}


def whole(average: dict[str, Tensor]) -> dict[str, Tensor]:
    """Every sharded tensor gathered."""
    return {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in average.items()}
