"""Models whose parameters are not plain tensors, so that they cannot be averaged."""

from torch import nn

from torch_lawa.errors import ConfigError

__all__ = ["require_visible_parameters"]


def require_visible_parameters(model: nn.Module) -> None:
    """Refuse a model with flattened parameters (FSDP 1) or empty ones (ZeRO-3).

    Both are recognised by their names, so neither library needs to be installed.
    """
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        raise ConfigError(
            "DeepSpeed ZeRO-3 keeps parameters empty while they are not in use, so they cannot be "
            "averaged: use FSDP2 or ZeRO-2."
        )
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise ConfigError(
            "FSDP version 1 flattens the parameters, so they cannot be averaged: use version 2 "
            "(fsdp_config={'version': 2} in Transformers, fsdp_version=2 in Accelerate's plugin)."
        )
