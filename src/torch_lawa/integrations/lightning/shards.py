"""What Lightning's strategies make of a model, as far as averaging has to know.

Whole in every process (one device, DDP); DTensors (`ModelParallelStrategy` with FSDP2 or tensor
parallelism), which the averager knows; or the flat shards of the first FSDP (`FSDPStrategy`),
which look like ordinary tensors, belong to one number of processes, and must not be changed while
a gathered copy of them is around.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

from torch_lawa.errors import ConfigError
from torch_lawa.integrations.lightning.names import Trainer, rank_zero_warn
from torch_lawa.shards import is_sharded_model

__all__ = [
    "callable_model",
    "check_strategy",
    "keep_in_step",
    "let_go",
    "num_owners",
    "sharded",
    "trained_model",
    "window_key",
]


def trained_model(trainer: Trainer) -> nn.Module:
    """The model with its strategy's wrapping: where all parameters are, whoever owns them."""
    model = trainer.strategy.model
    return trainer.lightning_module if model is None else model


def callable_model(trainer: Trainer) -> nn.Module:
    """What to call for a forward pass without training.

    The module itself, since DDP would send rank 0's buffers to everyone; the wrapper with FSDP,
    which gathers what the module needs.
    """
    model = trained_model(trainer)
    return model if _is_flat(model) else trainer.lightning_module


def sharded(model: nn.Module) -> bool:
    """Whether every process holds other weights."""
    return is_sharded_model(model) or any(map(_is_flat, model.modules()))


def num_owners(trainer: Trainer) -> int | None:
    """For how many processes flat shards were cut; None for DTensors, which know how to change."""
    return None if is_sharded_model(trained_model(trainer)) else trainer.world_size


def window_key(name: str, trainer: Trainer) -> str:
    """Under which name this process saves its window: one for all, or one for each."""
    if num_owners(trainer) is None:
        return name
    return f"{name} of rank {trainer.global_rank}"


def let_go(model: nn.Module) -> None:
    """Drop gathered copies of flat shards, so that a change of the shards reaches the next pass.

    After a forward pass without a backward one the outermost FSDP module keeps what it gathered,
    and takes it for its weights in the next pass.
    """
    for module in model.modules():
        handle: Any = getattr(module, "_handle", None) if _is_flat(module) else None
        if handle is not None and handle.uses_sharded_strategy and not handle.needs_unshard():
            from torch.distributed.fsdp._runtime_utils import _reshard

            _reshard(module, handle, True)


@contextlib.contextmanager
def keep_in_step(model: nn.Module) -> Iterator[None]:
    """Let DDP forget that there was a forward pass inside.

    It sends the buffers of rank 0 before the first pass after a step. The trained weights, which
    come next, need that as if they had been the first.
    """
    before = vars(model).get("require_forward_param_sync")
    try:
        yield
    finally:
        if before is not None:
            vars(model)["require_forward_param_sync"] = before


def check_strategy(trainer: Trainer) -> None:
    """Refuse a strategy whose weights cannot be reached; warn where the window will be lost."""
    names = {cls.__name__ for cls in type(trainer.strategy).__mro__}
    for name in ("DeepSpeedStrategy", "XLAStrategy", "SingleDeviceXLAStrategy"):
        if name in names:
            raise ConfigError(
                f"{name} keeps the weights where LatestWeightAveraging cannot read and write "
                "them. Use one device, 'ddp', 'fsdp' or ModelParallelStrategy, or average the "
                "run's checkpoints afterwards (`lawa average`)."
            )
    launchers = {cls.__name__ for cls in type(trainer.strategy.launcher).__mro__}
    if "_MultiProcessingLauncher" in launchers and trainer.state.fn == "fit":
        rank_zero_warn(
            "The window stays in the processes that this strategy starts for `fit` and ends with "
            "them: test and predict from a checkpoint (ckpt_path=...), or use strategy='ddp'."
        )


def _is_flat(module: nn.Module) -> bool:
    with contextlib.suppress(ImportError):
        from torch.distributed.fsdp import FullyShardedDataParallel

        return isinstance(module, FullyShardedDataParallel)
    return False
