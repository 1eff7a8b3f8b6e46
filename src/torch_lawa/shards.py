"""Tensors that are sharded over processes: the part that lies here, and what it is a part of.

Averaging is elementwise, so a shard is averaged where it lies and nobody is asked. DTensors of any
placement are seen as their local tensors; only what is given back to the user is a DTensor again.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = [
    "Sharding",
    "is_fsdp",
    "is_sharded",
    "is_sharded_model",
    "local",
    "reshard",
    "sharding_of",
]


@dataclass(frozen=True)
class Sharding:
    """What a local tensor is a part of: mesh, placements, and the whole tensor's shape."""

    mesh: Any
    placements: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    def whole(self, part: Tensor) -> Tensor:
        """The DTensor whose local part this is; nothing is copied, moved or sent.

        Not `DTensor.from_local`, which would move a part that lies in host memory to the device of
        the mesh.
        """
        from torch.distributed.tensor import DTensor
        from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
        from torch.utils.dlpack import from_dlpack

        if part.storage_offset():
            # The same memory as a storage of its own: `dcp.async_save` takes a DTensor whose part
            # lies further inside a storage for a plain tensor, and fails.
            # Types of one byte (float8) cannot all be shared that way; they are copied.
            shared = part.numel() and part.dtype.itemsize > 1
            part = from_dlpack(part) if shared else part.clone()
        meta = TensorMeta(self.shape, self.stride, part.dtype)
        spec = DTensorSpec(self.mesh, self.placements, tensor_meta=meta)
        return DTensor(part, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor; told by its mesh, since importing the class takes half a second."""
    return hasattr(tensor, "device_mesh")


def is_sharded_model(model: nn.Module | Mapping[str, Tensor]) -> bool:
    """Whether any parameter of a module, or tensor of a state dict, is sharded."""
    tensors = model.parameters() if isinstance(model, nn.Module) else model.values()
    return any(map(is_sharded, tensors))


def local(tensor: Tensor) -> Tensor:
    """The part of a DTensor that lies in this process; any other tensor itself.

    The very tensor inside, not `to_local()`: that makes a view for autograd, and waits.
    """
    if is_sharded(tensor):
        return tensor._local_tensor  # type: ignore[attr-defined, no-any-return]
    return tensor


def sharding_of(tensor: Tensor) -> Sharding | None:
    """How a DTensor is sharded, None for any other tensor."""
    if not is_sharded(tensor):
        return None
    mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
    return Sharding(mesh, tuple(placements), tensor.shape, tuple(tensor.stride()))


_fsdp: dict[type[nn.Module], bool] = {}


def reshard(model: nn.Module) -> None:
    """Let go of gathered parameters of FSDP2, so that the shards are what the model has.

    After a forward pass without a backward one, `fully_shard` keeps some modules gathered: their
    parameters are plain copies then, and a change of the shards would not reach them.
    """
    for module in model.modules():
        if is_fsdp(type(module)):
            module.reshard()  # type: ignore[operator]


def is_fsdp(cls: type[nn.Module]) -> bool:
    """Whether `fully_shard` made this class; by name: importing it would load half of PyTorch."""
    if cls not in _fsdp:
        _fsdp[cls] = any(
            base.__name__ == "FSDPModule" and base.__module__.startswith("torch.")
            for base in cls.__mro__
        )
    return _fsdp[cls]
