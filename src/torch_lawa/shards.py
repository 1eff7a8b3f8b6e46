"""Sharded tensors: the local shard, and what it is a shard of.

Averaging is elementwise, so each rank averages its shards without communication. DTensors of any
placement are handled as their local tensors; only what is returned to the user is a DTensor again.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = [
    "Sharding",
    "fingerprint",
    "is_fsdp",
    "is_sharded",
    "is_sharded_model",
    "local",
    "reshard",
    "sharding_of",
]


@dataclass(frozen=True)
class Sharding:
    """What a local tensor is a shard of: mesh, placements, and the whole tensor's shape."""

    mesh: Any
    placements: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    def whole(self, part: Tensor) -> Tensor:
        """The DTensor whose local shard this is; nothing is copied, moved or sent.

        Not by `DTensor.from_local`, which would move a shard in host memory to the device of the
        mesh.
        """
        from torch.distributed.tensor import DTensor
        from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
        from torch.utils.dlpack import from_dlpack

        if part.storage_offset():
            # The same memory as a storage of its own: `dcp.async_save` treats a DTensor whose shard
            # has a storage offset as a plain tensor, and fails.
            # Not all one-byte dtypes (float8) can be shared this way; they are copied.
            shared = part.numel() and part.dtype.itemsize > 1
            part = from_dlpack(part) if shared else part.clone()
        meta = TensorMeta(self.shape, self.stride, part.dtype)
        spec = DTensorSpec(self.mesh, self.placements, tensor_meta=meta)
        return DTensor(part, spec, requires_grad=False)  # type: ignore[no-untyped-call]

    def own_indices(self) -> list[Tensor]:
        """For each dimension, which indices of the whole tensor this rank's shard has.

        Found by splitting a list of them as the tensor is split, so that it holds for all kinds of
        placements (FSDP on top of tensor parallelism has one of its own).
        """
        coordinate, found = self.mesh.get_coordinate() or (), []
        for dim, size in enumerate(self.shape):
            line = [1] * len(self.shape)
            line[dim] = size
            indices = torch.arange(size).view(line)
            for at, placement, parts in zip(
                coordinate, self.placements, self.mesh.shape, strict=False
            ):
                if getattr(placement, "dim", None) in (dim, dim - len(self.shape)):
                    pieces, _ = placement._split_tensor(indices, parts, with_padding=False)
                    indices = pieces[at]
            found.append(indices.flatten())
        return found


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor; judged by its mesh, since importing the class takes 0.5 s."""
    return hasattr(tensor, "device_mesh")


def is_sharded_model(model: nn.Module | Mapping[str, Tensor]) -> bool:
    """Whether any parameter of a module, or tensor of a state dict, is sharded."""
    tensors = model.parameters() if isinstance(model, nn.Module) else model.values()
    return any(map(is_sharded, tensors))


def local(tensor: Tensor) -> Tensor:
    """The local shard of a DTensor; any other tensor itself.

    The tensor inside the DTensor, not `to_local()`: that makes a view for autograd, and waits.
    """
    if is_sharded(tensor):
        return tensor._local_tensor  # type: ignore[attr-defined, no-any-return]
    return tensor


def sharding_of(tensor: Tensor) -> Sharding | None:
    """How a DTensor is sharded; None for any other tensor."""
    if not is_sharded(tensor):
        return None
    mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
    return Sharding(mesh, tuple(placements), tensor.shape, tuple(tensor.stride()))


def fingerprint(shardings: Mapping[str, Sharding]) -> str:
    """A digest of which shard of each tensor this rank holds; "" if nothing is split.

    Two ranks may hold different shards of the same shapes: only this tells them apart.
    """
    parts = []
    for name, sharding in sorted(shardings.items()):
        mesh = sharding.mesh
        dims = zip(sharding.placements, mesh.get_coordinate() or (), mesh.shape, strict=False)
        cut = [(repr(placement), at, size) for placement, at, size in dims if size > 1]
        if cut:
            parts.append((name, tuple(sharding.shape), cut))
    return hashlib.sha256(repr(parts).encode()).hexdigest() if parts else ""


_fsdp: dict[type[nn.Module], bool] = {}


def reshard(model: nn.Module) -> None:
    """Free the gathered parameters of FSDP2, so that the model's parameters are the shards.

    After a forward pass without a backward pass, `fully_shard` keeps some modules unsharded: their
    parameters are plain copies then, and a change of the shards would not reach them.
    """
    for module in model.modules():
        if is_fsdp(type(module)):
            module.reshard()  # type: ignore[operator]


def is_fsdp(cls: type[nn.Module]) -> bool:
    """Whether `fully_shard` made this class; by name, since importing it loads half of PyTorch."""
    if cls not in _fsdp:
        _fsdp[cls] = any(
            base.__name__ == "FSDPModule" and base.__module__.startswith("torch.")
            for base in cls.__mro__
        )
    return _fsdp[cls]
