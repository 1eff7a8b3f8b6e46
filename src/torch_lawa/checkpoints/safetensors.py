"""The safetensors format: eight bytes of header length, a JSON header, then the values.

Written here rather than through the library so that flat buffers go to disk as they are and come
back as memory maps. Reading checks every claim of the header against the file before use.
"""

import json
import mmap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_lawa.checkpoints.files import replacing
from torch_lawa.errors import FormatError

__all__ = ["Header", "map_flat", "read_header", "save_tensors", "write_flat"]

_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}
_MAX_HEADER = 100 * 1024 * 1024  # the format's own limit


@dataclass(frozen=True)
class Header:
    """What a file says it holds: name -> (dtype, shape, begin, end), and free metadata."""

    tensors: dict[str, tuple[torch.dtype, tuple[int, ...], int, int]]
    metadata: dict[str, str]
    data_start: int


def save_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write named tensors; names that share memory (ties) are written once, under the first.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_tensors(Path(folder) / "a.safetensors", {"w": torch.ones(3)})
    ...     read_header(Path(folder) / "a.safetensors").tensors
    {'w': (torch.float32, (3,), 0, 12)}
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
    """Write `buffers`, whose bytes end to end are the entries in order, as one whole file."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, dtype, shape in entries:
        if dtype not in _CODES:
            raise FormatError(f"tensor {name!r}: safetensors has no code for {dtype}.")
        size = dtype.itemsize
        for n in shape:
            size *= n
        header[name] = {
            "dtype": _CODES[dtype],
            "shape": list(shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)  # so that the data is aligned
    with replacing(path) as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for buffer in buffers:
            if buffer.numel():
                file.write(buffer.contiguous().view(-1).view(torch.uint8).numpy().data)
        if file.tell() != 8 + len(text) + offset:
            raise FormatError(f"{path}: wrote {file.tell()} bytes for a header that says {offset}.")


def read_header(path: Path) -> Header:
    """Read and check a header: lengths, names, dtypes, offsets that tile the file exactly."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little") if len(prefix) == 8 else -1
        if not 2 <= length <= min(_MAX_HEADER, size - 8):
            raise FormatError(
                f"{path}: not a whole safetensors file (header length {length}, file size {size}). "
                "It may be truncated or of another format; write it again."
            )
        text = file.read(length)
    try:
        raw = json.loads(text)
        metadata = {str(k): str(v) for k, v in raw.pop("__metadata__", {}).items()}
        tensors = {name: _read_entry(entry) for name, entry in raw.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise FormatError(f"{path}: the safetensors header is broken ({error}).") from None
    end = 0
    for name, (_, _, begin, stop) in sorted(tensors.items(), key=lambda item: item[1][2:]):
        if begin != end:
            raise FormatError(f"{path}: tensor {name!r} begins at {begin}, expected {end}.")
        end = stop
    if 8 + length + end != size:
        raise FormatError(
            f"{path}: the header speaks of {8 + length + end} bytes and the file has {size}. "
            "It is truncated or damaged; write it again."
        )
    return Header(tensors, metadata, 8 + length)


def _read_entry(entry: Any) -> tuple[torch.dtype, tuple[int, ...], int, int]:
    dtype = _DTYPES[entry["dtype"]]
    shape = tuple(entry["shape"])
    begin, end = entry["data_offsets"]
    numel = 1
    for n in shape:
        if not isinstance(n, int) or n < 0:
            raise ValueError(f"shape {shape}")
        numel *= n
    if not isinstance(begin, int) or not 0 <= begin <= end or end - begin != numel * dtype.itemsize:
        raise ValueError(f"offsets {begin}..{end} do not hold {numel} values of {dtype}")
    return dtype, shape, begin, end


def map_flat(path: Path, header: Header, dtype: torch.dtype, begin: int, numel: int) -> Tensor:
    """Memory-map `numel` values of `dtype` that begin at byte `begin` of the data."""
    if numel == 0:
        return torch.empty(0, dtype=dtype, device="cpu")
    with path.open("rb") as file:
        # A private mapping may be written to without touching the file, which torch insists on.
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    return torch.frombuffer(mapped, dtype=dtype, count=numel, offset=header.data_start + begin)
