"""PyTorch tensors in safetensors files: written, and read as memory maps."""

import mmap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_lawa.checkpoints.formats.base import TensorSpec
from torch_lawa.checkpoints.formats.safetensors import Header, encode_header
from torch_lawa.checkpoints.storage.atomic import replacing
from torch_lawa.errors import FormatError
from torch_lawa.mean.dtypes import DTYPES
from torch_lawa.system_errors import named_errors

__all__ = [
    "dtype_of",
    "load_tensors",
    "map_privately",
    "save_tensors",
    "spec_of",
    "view_flat",
    "write_flat",
]

_TORCH: dict[str, torch.dtype | None] = {
    code: getattr(torch, d.torch_name, None) for code, d in DTYPES.items()
}
_CODES = {dtype: code for code, dtype in _TORCH.items() if dtype is not None}


def dtype_of(code: str) -> torch.dtype:
    """PyTorch's dtype for a safetensors code.

    >>> dtype_of("BF16")
    torch.bfloat16
    """
    found = _TORCH[code]
    if found is None:
        raise FormatError(f"this version of PyTorch has no dtype for {code}; update PyTorch.")
    return found


def spec_of(name: str, dtype: torch.dtype, shape: Iterable[int]) -> TensorSpec:
    """The spec of a tensor; an error names it if safetensors has no such dtype."""
    if dtype not in _CODES:
        raise FormatError(f"tensor {name!r}: safetensors has no code for {dtype}.")
    return TensorSpec(_CODES[dtype], tuple(shape))


def save_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write named tensors; names that share memory (ties) are written once, under the first.

    >>> import tempfile
    >>> from torch_lawa.checkpoints.formats.safetensors import read_header
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_tensors(Path(folder) / "a.safetensors", {"w": torch.ones(3)})
    ...     str(read_header(Path(folder) / "a.safetensors").tensors["w"])
    'F32[3]'
    """
    unique: dict[tuple[Any, ...], tuple[str, Tensor]] = {}
    for name, tensor in tensors.items():
        key = (tensor.data_ptr(), tensor.shape, tensor.stride()) if tensor.numel() else (name,)
        unique.setdefault(key, (name, tensor))
    # Widest first keeps every tensor aligned without gaps, which the format does not allow.
    ordered = sorted(unique.values(), key=lambda item: -item[1].element_size())
    entries = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in ordered]
    write_flat(path, entries, (tensor.detach().cpu() for _, tensor in ordered), metadata or {})


def write_flat(
    path: Path,
    entries: Sequence[tuple[str, torch.dtype, tuple[int, ...]]],
    buffers: Iterable[Tensor],
    metadata: Mapping[str, str],
) -> None:
    """Write one file from `buffers`, whose concatenated bytes are the entries in order."""
    specs = [(name, spec_of(name, dtype, shape)) for name, dtype, shape in entries]
    header, _, size = encode_header(specs, metadata)
    with replacing(path) as file:
        file.write(header)
        for buffer in buffers:
            if buffer.numel():
                file.write(buffer.contiguous().view(-1).view(torch.uint8).numpy().data)
        if file.tell() != size:
            raise FormatError(f"{path}: wrote {file.tell()} bytes, but the header says {size}.")


def view_flat(buffer: Any, header: Header, dtype: torch.dtype, begin: int, numel: int) -> Tensor:
    """View `numel` values of `dtype` that begin at byte `begin` of the data of a mapped file."""
    if numel == 0:
        return torch.empty(0, dtype=dtype, device="cpu")
    return torch.frombuffer(buffer, dtype=dtype, count=numel, offset=header.data_start + begin)


def load_tensors(path: Path, header: Header) -> dict[str, Tensor]:
    """Every tensor of a file as a view of one memory map; writes do not reach the file."""
    mapped, found = map_privately(path), {}
    for name, spec in header.tensors.items():
        dtype, start = dtype_of(spec.dtype), header.data_start + header.ranges[name][0]
        if spec.numel == 0:
            found[name] = torch.empty(spec.shape, dtype=dtype, device="cpu")
            continue
        flat = torch.frombuffer(mapped, dtype=dtype, count=spec.numel, offset=start)
        found[name] = flat.view(spec.shape)
    return found


def map_privately(path: Path) -> mmap.mmap:
    """Map a file, so that writes do not reach it. If it is truncated, reading ends the process."""
    with named_errors(path), path.open("rb") as file:
        # PyTorch requires a writable buffer; writes to a private mapping do not reach the file.
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
