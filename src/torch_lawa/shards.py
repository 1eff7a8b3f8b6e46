"""Sharded tensors: the local shard, and what it is a shard of.

Averaging is elementwise, so each rank averages its shards without communication. DTensors of any
placement are handled as their local tensors; only what is returned to the user is a DTensor again.
Weights that DeepSpeed flattens are `FlatShard`s instead (`flat_shards.py`).
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from torch_lawa.errors import LayoutError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = [
    "MeshSharding",
    "Sharding",
    "fingerprint",
    "is_fsdp",
    "is_sharded",
    "local",
    "reshard",
    "sharding_of",
]

# Values are gathered as bits: every backend supports these dtypes, none supports all dtypes.
_BITS = {1: torch.uint8, 2: torch.bfloat16, 4: torch.int32, 8: torch.int64}


class Sharding(ABC):
    """What a local tensor is a part of, and how the other ranks' parts are reached."""

    shape: torch.Size  # of the whole tensor

    @abstractmethod
    def whole(self, part: Tensor) -> Tensor:
        """The sharded tensor whose local part this is; nothing is copied, moved or sent."""

    @abstractmethod
    def gather(self, part: Tensor) -> Tensor:
        """All values, on every rank that holds a part; each of them must call it."""

    @property
    @abstractmethod
    def is_split(self) -> bool:
        """Whether this rank may hold less than the whole tensor."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The device on which `gather` works; the snapshots may be in host memory."""

    @property
    @abstractmethod
    def problem(self) -> str | None:
        """Why the values cannot be gathered; None if they can."""

    @abstractmethod
    def layout(self) -> object:
        """How the tensor is cut: equal on all ranks."""

    @abstractmethod
    def part(self) -> object | None:
        """Which part this rank holds, to tell it from others; None if it holds all values."""

    @abstractmethod
    def positions(self, shape: torch.Size) -> Callable[[Sequence[Tensor]], Tensor]:
        """A function from indices into this rank's part, of that shape, to the whole tensor.

        It takes one tensor of indices per dimension, and returns where these values are in the
        whole tensor if that is flattened.
        """

    @abstractmethod
    def groups(self, *, copies: bool) -> "list[ProcessGroup]":
        """The groups of several ranks that hold the other parts, or `copies` of the same one."""


@dataclass(frozen=True)
class MeshSharding(Sharding):
    """How a DTensor is sharded: mesh, placements, and the whole tensor's shape."""

    mesh: Any
    placements: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    def whole(self, part: Tensor) -> Tensor:
        """The DTensor whose local shard this is.

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

    def gather(self, part: Tensor) -> Tensor:
        """All values, on every rank of the mesh."""
        bits = self.whole(part.view(_BITS[part.dtype.itemsize]))
        whole: Tensor = bits.full_tensor()  # type: ignore[attr-defined]
        return whole.view(part.dtype)

    @property
    def is_split(self) -> bool:
        """Whether a placement over several ranks is not `Replicate`."""
        return bool(self.groups(copies=False))

    @property
    def device(self) -> torch.device:
        """A device of the mesh."""
        kind = self.mesh.device_type
        if kind == "cpu":
            return torch.device(kind)
        return torch.device(kind, torch.get_device_module(kind).current_device())

    @property
    def problem(self) -> str | None:
        """Partial sums would be rounded, and a rank outside of the mesh has nothing to gather."""
        if any(placement.is_partial() for placement in self.placements):
            return (
                f"is a partial sum (placements {self.placements}): redistribute it to Shard or "
                "Replicate before it is collected"
            )
        if self.mesh.get_coordinate() is None:
            return (
                f"is on a mesh that does not include this rank ({self.mesh}): export a model of "
                "which every rank holds a part of each tensor"
            )
        return None

    def layout(self) -> object:
        """Placements and the mesh's shape."""
        return self.placements, self.mesh.shape

    def part(self) -> object | None:
        """The rank's coordinates, where the mesh has several."""
        dims = zip(self.placements, self.mesh.get_coordinate() or (), self.mesh.shape, strict=False)
        return [(repr(placement), at, size) for placement, at, size in dims if size > 1] or None

    def groups(self, *, copies: bool) -> "list[ProcessGroup]":
        """One group for each dimension of the mesh."""
        return [
            self.mesh.get_group(dim)
            for dim, placement in enumerate(self.placements)
            if self.mesh.size(dim) > 1 and (copies or not placement.is_replicate())
        ]

    def positions(self, shape: torch.Size) -> Callable[[Sequence[Tensor]], Tensor]:
        """Computed from the indices along each dimension that this rank's shard has."""
        own = self._own_indices()
        if tuple(map(len, own)) != tuple(shape):
            raise LayoutError(
                f"this rank holds a shard of shape {tuple(shape)}, but its placement gives "
                f"{tuple(map(len, own))}; sample without sharding."
            )

        def locate(at: Sequence[Tensor]) -> Tensor:
            whole, stride = torch.zeros_like(at[0]), 1
            for dim in reversed(range(len(self.shape))):
                whole += own[dim].to(at[dim].device)[at[dim]] * stride
                stride *= self.shape[dim]
            return whole

        return locate

    def _own_indices(self) -> list[Tensor]:
        """For each dimension, which indices of the whole tensor this rank's shard has.

        Found by splitting a list of them as the tensor is split, so that it holds for all kinds of
        placements (FSDP on top of tensor parallelism has one of its own).
        """
        coordinate, found = self.mesh.get_coordinate() or (), []
        for dim, size in enumerate(self.shape):
            line = [1] * len(self.shape)
            line[dim] = size
            indices = torch.arange(size, device="cpu").view(line)
            for at, placement, parts in zip(
                coordinate, self.placements, self.mesh.shape, strict=False
            ):
                if getattr(placement, "dim", None) in (dim, dim - len(self.shape)):
                    pieces, _ = placement._split_tensor(indices, parts, with_padding=False)
                    indices = pieces[at]
            found.append(indices.flatten())
        return found


_PLAIN = {Tensor, nn.Parameter}


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor or a `FlatShard`.

    Judged by their attributes, since importing the class of DTensors takes 0.5 s.
    """
    if type(tensor) in _PLAIN:  # saves failing look-ups for each of many tensors
        return False
    return hasattr(tensor, "device_mesh") or hasattr(tensor, "flat_sharding")


def local(tensor: Tensor) -> Tensor:
    """The local part of a sharded tensor; any other tensor itself.

    The tensor inside the DTensor, not `to_local()`: that makes a view for autograd, and waits.
    """
    if is_sharded(tensor):
        return tensor._local_tensor  # type: ignore[attr-defined, no-any-return]
    return tensor


def sharding_of(tensor: Tensor) -> Sharding | None:
    """How a tensor is sharded; None if it is not."""
    if not is_sharded(tensor):
        return None
    flat: Sharding | None = getattr(tensor, "flat_sharding", None)
    if flat is not None:
        return flat
    mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
    return MeshSharding(mesh, tuple(placements), tensor.shape, tuple(tensor.stride()))


def fingerprint(shardings: Mapping[str, Sharding]) -> str:
    """A digest of which shard of each tensor this rank holds; "" if nothing is split.

    Two ranks may hold different shards of the same shapes: only this tells them apart.
    """
    parts = []
    for name, sharding in sorted(shardings.items()):
        part = sharding.part()
        if part is not None:
            parts.append((name, tuple(sharding.shape), part))
    return hashlib.sha256(repr(parts).encode()).hexdigest() if parts else ""


_fsdp: dict[type[nn.Module], bool] = {}


def reshard(model: nn.Module, *, after_exception: bool = False) -> None:
    """Free the gathered parameters of FSDP2, so that the model's parameters are the shards.

    After a forward pass without a backward pass, `fully_shard` keeps some modules unsharded: their
    parameters are plain copies then, and a change of the shards would not reach them.

    If an exception ended a forward pass, FSDP2 takes that pass for unfinished, and its own method
    does nothing. With `after_exception`, no pass can be in progress.
    """
    for module in model.modules():
        if is_fsdp(type(module)):
            module.reshard()  # type: ignore[operator]
            if after_exception:
                state: Any = module._get_fsdp_state()  # type: ignore[operator]
                groups = getattr(state, "_fsdp_param_groups", None)
                if groups is None:  # PyTorch 2.6
                    groups = [getattr(state, "_fsdp_param_group", None)]
                for group in filter(None, groups):
                    group._to_sharded()


def is_fsdp(cls: type[nn.Module]) -> bool:
    """Whether `fully_shard` made this class; by name, since importing it loads half of PyTorch."""
    if cls not in _fsdp:
        _fsdp[cls] = any(
            base.__name__ == "FSDPModule" and base.__module__.startswith("torch.")
            for base in cls.__mro__
        )
    return _fsdp[cls]
