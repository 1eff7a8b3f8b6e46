"""Models whose parameters cannot be averaged, because they are not tensors of their own."""

from torch import nn

from torch_lawa.errors import ConfigError
from torch_lawa.masters import masters_of

__all__ = ["require_visible_parameters"]


def require_visible_parameters(model: nn.Module) -> None:
    """Refuse a model with flattened parameters (FSDP 1), or without the engine that has them.

    Both are recognised by their names, so neither library needs to be installed.
    """
    masters = masters_of(model)  # raises for an engine that is not supported
    if masters is None and any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        raise ConfigError(
            "DeepSpeed ZeRO-3 keeps parameters empty while they are not in use: give the engine "
            "that deepspeed.initialize (or accelerator.prepare) returned, not its module."
        )
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise ConfigError(
            "FSDP version 1 flattens the parameters, so they cannot be averaged: use version 2 "
            "(fsdp_config={'version': 2} in Transformers, fsdp_version=2 in Accelerate's plugin)."
        )
