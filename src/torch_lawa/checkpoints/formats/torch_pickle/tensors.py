"""Tensors as the pickles of `torch.save` describe them, and the functions that rebuild them.

Shapes and offsets are checked against the storage. An unreadable tensor is kept with the reason,
which is an error only if it is among the weights.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch_lawa.checkpoints.formats.base import TensorSpec
from torch_lawa.checkpoints.formats.torch_pickle.safe_pickle import Label, Maker
from torch_lawa.checkpoints.formats.torch_pickle.strided import (
    MAX_DIMS,
    copy_strided,
    gather_bytes,
    is_row_major,
)
from torch_lawa.mean.dtypes import DTYPES

if TYPE_CHECKING:
    from torch_lawa.checkpoints.formats.torch_pickle.strided import Values
    from torch_lawa.mean.kernels import Bytes

__all__ = [
    "CODES",
    "MAKERS",
    "STORAGES",
    "DescribedTensor",
    "Storage",
    "StoredTensor",
    "UnusableTensor",
    "as_size",
]

CODES = {f"torch.{dtype.torch_name}": code for code, dtype in DTYPES.items()}

_KINDS = {
    "Double": "float64", "Float": "float32", "Half": "float16", "BFloat16": "bfloat16",
    "Long": "int64", "Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8",
    "Bool": "bool", "ComplexFloat": "complex64", "ComplexDouble": "complex128", "QInt8": "qint8",
    "QUInt8": "quint8", "QInt32": "qint32", "QUInt4x2": "quint4x2", "QUInt2x4": "quint2x4",
}  # fmt: skip
# The dtype that a storage's class implies, for tensors that do not state their own.
STORAGES = {
    f"{module}.{kind}Storage": f"torch.{dtype}"
    for kind, dtype in _KINDS.items()
    for module in ("torch", "torch.cuda")
} | {f"torch.storage.{name}Storage": "torch.uint8" for name in ("Untyped", "_Untyped")}

_MAX_SIZE = 2**48


@dataclass(frozen=True, eq=False, slots=True)
class Storage:
    """The memory that tensors share: an entry of the zip; `nbytes` is None if it is missing."""

    key: str
    dtype: str
    nbytes: int | None
    view: "Callable[[int, int], Bytes]"


class DescribedTensor:
    """A tensor that a pickle describes, whether it can be read or not."""

    __slots__ = ()


@dataclass(frozen=True, eq=False, slots=True)
class StoredTensor(DescribedTensor):
    """A tensor as the file describes it: a storage, the offset in it, and strides."""

    storage: Storage
    spec: TensorSpec
    offset: int  # in elements
    stride: tuple[int, ...]

    @property
    def identity(self) -> object:
        """Equal for names in one file that share the same values (tied weights)."""
        if not self.spec.numel:
            return id(self)
        return self.storage.key, self.spec, self.offset, self.stride

    def read(self, begin: int, end: int) -> "Bytes":
        """Bytes `begin` to `end` in row-major order: a view of the file if it is stored so."""
        if begin >= end or not is_row_major(self.spec.shape, self.stride):
            return gather_bytes(self.spec, self.fill, begin, end)
        start = self.offset * DTYPES[self.spec.dtype].itemsize
        return self.storage.view(start + begin, start + end)

    def fill(self, out: "Values", starts: tuple[int, ...]) -> None:
        """Fill `out` with the box of its shape that begins at `starts`."""
        first = self.offset + sum(i * s for i, s in zip(starts, self.stride, strict=True))
        copy_strided(self.storage.view, first, self.stride, out)


@dataclass(frozen=True, slots=True)
class UnusableTensor(DescribedTensor):
    """A tensor without usable values, and the reason."""

    why: str


def as_size(values: object) -> tuple[int, ...] | None:
    """A valid shape, offset or stride; None if it is not one.

    >>> as_size([2, 3]), as_size((2, -1)), as_size((2.0,))
    ((2, 3), None, None)
    """
    if not isinstance(values, tuple | list) or len(values) > MAX_DIMS:
        return None
    if not all(type(n) is int and 0 <= n < _MAX_SIZE for n in values):
        return None
    return tuple(values)


def _describe(
    storage: object, dtype: str, offset: object, size: object, stride: object, flags: object
) -> StoredTensor | UnusableTensor:
    if not isinstance(storage, Storage):
        raise TypeError("a tensor without a storage")
    if dtype not in CODES:
        return UnusableTensor(f"has dtype {dtype}, which safetensors cannot store")
    shape, steps, first = as_size(size), as_size(stride), as_size([offset])
    if shape is None or steps is None or first is None or len(shape) != len(steps):
        return UnusableTensor("has an invalid shape, stride or offset; the file is damaged")
    if isinstance(flags, dict) and (flags.get("conj") or flags.get("neg")):
        return UnusableTensor("is a lazy conjugate or negative: save tensor.resolve_conj() instead")
    spec = TensorSpec(CODES[dtype], shape)
    if storage.nbytes is None:
        if spec.numel:
            return UnusableTensor(f"has no data: the entry data/{storage.key} is missing")
    elif spec.numel:
        item = DTYPES[spec.dtype].itemsize
        extent = 1 + sum((n - 1) * step for n, step in zip(shape, steps, strict=True))
        if (first[0] + extent) * item > storage.nbytes or spec.nbytes >= 2**62:
            return UnusableTensor(
                f"needs {(first[0] + extent) * item} bytes of the entry data/{storage.key}, which "
                f"has {storage.nbytes}; the file is damaged"
            )
    return StoredTensor(storage, spec, first[0], steps)


def _tensor_v2(
    storage: Any, offset: object, size: object, stride: object, *rest: object
) -> StoredTensor | UnusableTensor:
    """(requires_grad, backward_hooks, flags) may follow."""
    return _describe(
        storage, storage.dtype, offset, size, stride, rest[2] if len(rest) > 2 else None
    )


def _tensor_v3(
    storage: Any, offset: object, size: object, stride: object, *rest: Any
) -> StoredTensor | UnusableTensor:
    """(requires_grad, backward_hooks, dtype, flags) follow."""
    flags = rest[3] if len(rest) > 3 else None
    return _describe(storage, rest[2].path, offset, size, stride, flags)


def _parameter(data: object, *_: object) -> object:
    if not isinstance(data, DescribedTensor):
        raise TypeError("a parameter without a tensor")
    return data


def _from_type(function: Label, kind: Label, args: tuple[object, ...], _state: object) -> object:
    plain = ("torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer")
    maker = MAKERS.get(function.path)
    if maker is None or kind.path not in plain:
        return UnusableTensor(f"is rebuilt as {kind.path} by {function.path}")
    return maker(*args)


def _unusable(why: str) -> Maker:
    return lambda *_: UnusableTensor(why)


def _size(values: object = ()) -> tuple[int, ...]:
    size = as_size(values)
    if size is None:
        raise ValueError("an invalid torch.Size")
    return size


MAKERS: Mapping[str, Maker | None] = {
    "torch.Size": _size,
    "torch._utils._rebuild_tensor": _tensor_v2,
    "torch._utils._rebuild_tensor_v2": _tensor_v2,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._tensor._rebuild_from_type_v2": _from_type,
    "torch._utils._rebuild_sparse_tensor": _unusable("is sparse: save tensor.to_dense()"),
    "torch._utils._rebuild_qtensor": _unusable("is quantized: save tensor.dequantize()"),
    "torch._utils._rebuild_nested_tensor": _unusable("is a nested tensor"),
    "torch._utils._rebuild_meta_tensor_no_storage": _unusable("is on the meta device: no values"),
    "torch._utils._rebuild_wrapper_subclass": _unusable("is of a wrapper subclass of Tensor"),
    "torch._utils._rebuild_device_tensor_from_numpy": _unusable("was not saved from a CPU or GPU"),
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": _unusable(
        "was not saved from a CPU or GPU"
    ),
    **dict.fromkeys(STORAGES),
}
