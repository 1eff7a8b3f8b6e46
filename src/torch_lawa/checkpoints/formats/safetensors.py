"""The safetensors format: eight bytes of header length, a JSON header, then the values.

Implemented here rather than with the library, so that ranges of bytes can be written in place and
read as views of the file, without PyTorch. Reading checks the header against the file.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_lawa.checkpoints.formats.base import (
    Checkpoint,
    CheckpointLayout,
    TensorSpec,
    TrainingProgress,
)
from torch_lawa.checkpoints.storage.paths import ByteSource, LocalPath, Location
from torch_lawa.errors import FormatError
from torch_lawa.mean.dtypes import DTYPES

if TYPE_CHECKING:
    from torch_lawa.mean.kernels import Bytes

__all__ = ["Header", "SafetensorsFile", "encode_header", "parse_header", "read_header"]

_MAX_HEADER = 100 * 1024 * 1024  # the format's own limit
_STEP_KEYS = ("step", "global_step")


@dataclass(frozen=True)
class Header:
    """A header: name -> spec and (begin, end) in the data; free metadata."""

    tensors: dict[str, TensorSpec]
    ranges: dict[str, tuple[int, int]]
    metadata: dict[str, str]
    data_start: int


def encode_header(
    entries: Iterable[tuple[str, TensorSpec]], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, int], int]:
    """The first bytes of a file, the offset of each tensor, and the size of the whole file.

    >>> text, starts, size = encode_header([("w", TensorSpec("F32", (3,)))], {})
    >>> (len(text), starts, size)
    (64, {'w': 64}, 76)
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset, begins = 0, {}
    for name, spec in entries:
        header[name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [offset, offset + spec.nbytes],
        }
        begins[name] = offset
        offset += spec.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)  # so that the data is aligned
    start = 8 + len(text)
    if len(text) > _MAX_HEADER:
        raise FormatError(
            f"a header of {len(text)} bytes is longer than safetensors allows: split the output "
            "into shards."
        )
    starts = {name: start + begin for name, begin in begins.items()}
    return len(text).to_bytes(8, "little") + text, starts, start + offset


def read_header(path: Path) -> Header:
    """Read and check the header of a local file."""
    location = LocalPath(path)
    source = location.open()
    try:
        return parse_header(source, location)
    finally:
        source.close()


def parse_header(source: ByteSource, location: Location) -> Header:
    """Read and check a header: lengths, names, dtypes, and offsets that cover the file exactly."""
    length = -1
    if source.size >= 8:
        length = int.from_bytes(source.view(0, 8).tobytes(), "little")
    if not 2 <= length <= min(_MAX_HEADER, source.size - 8):
        raise FormatError(
            f"{location}: not a complete safetensors file (header length {length}, file size "
            f"{source.size}). It may be truncated or of another format; write it again."
        )
    try:
        raw = json.loads(
            source.view(8, 8 + length).tobytes(), object_pairs_hook=_without_duplicates
        )
        metadata = {str(k): str(v) for k, v in raw.pop("__metadata__", {}).items()}
        entries = {name: _read_entry(name, entry) for name, entry in raw.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise FormatError(f"{location}: the safetensors header is broken ({error}).") from None
    end = 0
    entries = dict(sorted(entries.items(), key=lambda item: item[1][1]))  # in the order of the file
    for name, (_, (begin, stop)) in entries.items():
        if begin != end:
            raise FormatError(f"{location}: tensor {name!r} begins at {begin}, expected {end}.")
        end = stop
    if 8 + length + end != source.size:
        raise FormatError(
            f"{location}: the header describes {8 + length + end} bytes, but the file has "
            f"{source.size}. It is truncated or damaged; write it again."
        )
    tensors = {name: spec for name, (spec, _) in entries.items()}
    ranges = {name: span for name, (_, span) in entries.items()}
    return Header(tensors, ranges, metadata, 8 + length)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(n for n in names if names.count(n) > 1)!r} appears twice")
    return found


def _read_entry(name: str, entry: Any) -> tuple[TensorSpec, tuple[int, int]]:
    if entry["dtype"] not in DTYPES:
        raise ValueError(f"tensor {name!r} has the unknown dtype {entry['dtype']!r}")
    shape = tuple(entry["shape"])
    begin, end = entry["data_offsets"]
    if not all(type(n) is int for n in (*shape, begin, end)) or min(shape, default=0) < 0:
        raise ValueError(f"tensor {name!r}: shape {shape}, offsets {begin}..{end}")
    spec = TensorSpec(entry["dtype"], shape)
    if not 0 <= begin <= end or end - begin != spec.nbytes:
        raise ValueError(f"tensor {name!r}: offsets {begin}..{end} do not hold {spec}")
    return spec, (begin, end)


class SafetensorsFile(Checkpoint):
    """One safetensors file, as a checkpoint or as a shard of one."""

    def __init__(self, location: Location, layout: CheckpointLayout = "single") -> None:
        self._file, self._source = location, location.open()
        header = parse_header(self._source, location)
        self._starts = {n: header.data_start + begin for n, (begin, _) in header.ranges.items()}
        # The convention of safetensors' own `save_model`: the metadata maps each tied name that is
        # not in the file to the name that is.
        aliases = {
            name: kept
            for name, kept in header.metadata.items()
            if kept in header.tensors and name not in header.tensors
        }
        super().__init__(
            location=location,
            format="safetensors",
            layout=layout,
            tensors=header.tensors,
            aliases=aliases,
            metadata={k: v for k, v in header.metadata.items() if k not in aliases},
            progress=TrainingProgress(
                step=_number(header.metadata, _STEP_KEYS),
                epoch=_number(header.metadata, ("epoch",)),
            ),
        )

    def read(self, name: str, begin: int, end: int) -> "Bytes":
        start = self._starts[name]
        return self._source.view(start + begin, start + end)

    def file_of(self, name: str) -> Location:
        return self._file

    @property
    def files(self) -> list[Location]:
        return [self._file]

    def close(self) -> None:
        self._source.close()


def _number(metadata: Mapping[str, str], keys: Iterable[str]) -> int | None:
    return next((int(metadata[k]) for k in keys if metadata.get(k, "").isdecimal()), None)
