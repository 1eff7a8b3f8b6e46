"""Models that are trained through master weights kept elsewhere, as DeepSpeed's engine does.

For such a model the averager collects, and swaps, the masters in place of the parameters. The
module that knows the framework is imported when the first model of that kind is seen.
"""

import importlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from torch import Tensor, nn

from torch_lawa.errors import ConfigError, LayoutError
from torch_lawa.shards import is_sharded

__all__ = [
    "Masters",
    "check_own_weights",
    "is_sharded_model",
    "masters_of",
    "require_visible_parameters",
    "weights_of",
]

# By the class of the model: the module with a function `masters_of(model)`.
_ADAPTERS = {"DeepSpeedEngine": "torch_lawa.integrations.deepspeed"}
_adapters: dict[type[nn.Module], str | None] = {}


class Masters(Protocol):
    """The master weights of one model."""

    def of(self, tensor: Tensor) -> Tensor:
        """What is averaged in place of a parameter or buffer of the model, or the tensor itself.

        The same object every time, for as long as nothing has changed.
        """
        ...

    def working_copies(self) -> Sequence[Tensor]:
        """This rank's part of the weights that forward passes use, and that masters round to."""
        ...

    def round_into_copies(self) -> None:
        """After the masters were written: give all ranks what they round to. A collective."""
        ...

    def share_copies(self) -> None:
        """After the working copies were written: give them to all ranks. A collective."""
        ...


def masters_of(model: object) -> Masters | None:
    """The master weights of a model; None if its parameters are what is trained."""
    if not isinstance(model, nn.Module):
        return None
    cls = type(model)
    if cls not in _adapters:
        names = (base.__name__ for base in cls.__mro__ if base.__module__.startswith("deepspeed."))
        _adapters[cls] = next((_ADAPTERS[name] for name in names if name in _ADAPTERS), None)
    adapter = _adapters[cls]
    if adapter is None:
        return None
    found: Masters | None = importlib.import_module(adapter).masters_of(model)
    return found


def weights_of(model: nn.Module) -> Iterator[Tensor]:
    """The parameters of a model, or the masters in place of them."""
    masters = masters_of(model)
    return model.parameters() if masters is None else map(masters.of, model.parameters())


def is_sharded_model(model: nn.Module | Mapping[str, Tensor]) -> bool:
    """Whether any weight of a module, or tensor of a state dict, is sharded."""
    tensors = weights_of(model) if isinstance(model, nn.Module) else model.values()
    return any(map(is_sharded, tensors))


def check_own_weights(name: str, tensor: Tensor) -> None:
    """Refuse a parameter whose master is elsewhere: the model was taken out of its engine."""
    if hasattr(tensor, "ds_id") or hasattr(tensor, "_hp_mapping"):
        raise LayoutError(
            f"tensor {name!r} is a parameter of a DeepSpeed engine, which keeps its master weights "
            "elsewhere: pass the engine that deepspeed.initialize returned, not its module."
        )


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
