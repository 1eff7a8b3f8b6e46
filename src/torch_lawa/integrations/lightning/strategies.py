"""How Lightning's strategies store a model, as far as averaging needs to know.

A model is whole in every process (one device, DDP), or its parameters are DTensors
(`ModelParallelStrategy` with FSDP2 or tensor parallelism), which the averager supports, or they
are the flat shards of FSDP 1 (`FSDPStrategy`). Flat shards look like ordinary tensors, fit one
number of processes only, and must not change while a gathered copy of them exists.
"""

import contextlib
from typing import Any

from torch import nn

from torch_lawa.errors import ConfigError
from torch_lawa.integrations.lightning._compat import Trainer, rank_zero_warn
from torch_lawa.masters import is_sharded_model

__all__ = [
    "callable_model",
    "check_strategy",
    "has_flat_shards",
    "refuse_reparametrisation",
    "release_gathered",
    "sharded",
    "trained_model",
]


def refuse_reparametrisation(trainer: Trainer) -> None:
    """Raise if a callback will replace parameters during training, as pruning does."""
    for callback in vars(trainer)["callbacks"]:
        kinds = [kind.__name__ for kind in type(callback).__mro__]
        if "ModelPruning" in kinds:
            raise ConfigError(
                f"{type(callback).__name__} replaces parameters by new ones with masks during "
                "training, and snapshots from before and after have different tensors: average a "
                "run without pruning, and prune the average afterwards."
            )


def trained_model(trainer: Trainer) -> nn.Module:
    """The model as its strategy wraps it, which has all parameters."""
    model = trainer.strategy.model
    return trainer.lightning_module if model is None else model


def callable_model(trainer: Trainer) -> nn.Module:
    """The model to call for a forward pass outside training.

    That is the module itself, since DDP would broadcast the buffers of rank 0. With FSDP 1 it is
    the wrapper, which gathers what the module needs.
    """
    model = trained_model(trainer)
    return model if _is_flat(model) else trainer.lightning_module


def sharded(model: nn.Module) -> bool:
    """Whether each process holds a different part of the weights."""
    return is_sharded_model(model) or has_flat_shards(model)


def has_flat_shards(model: nn.Module) -> bool:
    """Whether FSDP 1 sharded the model, for this number of processes only."""
    return not is_sharded_model(model) and any(map(_is_flat, model.modules()))


def release_gathered(model: nn.Module) -> None:
    """Free gathered copies of flat shards, so that the next pass sees changes of the shards.

    After a forward pass without a backward pass the outermost FSDP module keeps what it gathered
    and uses it as its weights in the next pass.
    """
    for module in model.modules():
        handle: Any = getattr(module, "_handle", None) if _is_flat(module) else None
        if handle is not None and handle.uses_sharded_strategy and not handle.needs_unshard():
            from torch.distributed.fsdp._runtime_utils import _reshard

            _reshard(module, handle, True)


def check_strategy(trainer: Trainer) -> None:
    """Refuse a strategy whose weights are out of reach; warn if the window will be lost."""
    names = {cls.__name__ for cls in type(trainer.strategy).__mro__}
    for name in ("DeepSpeedStrategy", "XLAStrategy", "SingleDeviceXLAStrategy"):
        if name in names:
            raise ConfigError(
                f"{name} keeps the weights where LatestWeightAveraging cannot read or write them. "
                "Use one device, 'ddp', 'fsdp' or ModelParallelStrategy, or average the run's "
                "checkpoints afterwards (`lawa average`)."
            )
    launchers = {cls.__name__ for cls in type(trainer.strategy.launcher).__mro__}
    if "_MultiProcessingLauncher" in launchers and trainer.state.fn == "fit":
        rank_zero_warn(
            "This strategy starts processes for `fit`, and the window is lost when they end: test "
            "and predict from a checkpoint (ckpt_path=...), or use strategy='ddp'."
        )


def _is_flat(module: nn.Module) -> bool:
    with contextlib.suppress(ImportError):
        from torch.distributed.fsdp import FullyShardedDataParallel

        return isinstance(module, FullyShardedDataParallel)
    return False
