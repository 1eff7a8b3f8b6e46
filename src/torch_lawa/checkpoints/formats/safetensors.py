"""The safetensors format: eight bytes of header length, a JSON header, then the values.

Implemented here rather than with the library, so that ranges of bytes can be written in place and
read as views of the file, without PyTorch. Reading checks the header against the file.
"""

import hashlib
import json
import weakref
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_lawa.checkpoints.formats.base import (
    Checkpoint,
    TensorSpec,
    TrainingProgress,
    is_text,
)
from torch_lawa.checkpoints.storage.byte_sources import ByteSource
from torch_lawa.checkpoints.storage.paths import LocalPath, Location
from torch_lawa.errors import FormatError
from torch_lawa.garbage import paused_garbage_collection
from torch_lawa.mean.dtypes import DTYPES

if TYPE_CHECKING:
    from torch_lawa.mean.kernels import Bytes

__all__ = ["Header", "SafetensorsFile", "encode_header", "read_header", "require_name"]

_MAX_HEADER = 100 * 1024 * 1024  # the format's own limit
_MAX_DIMS, _MAX_SIZE = 1024, 2**63
_STEP_KEYS = ("step", "global_step")
_METADATA = "__metadata__"


@dataclass(frozen=True, eq=False)
class Header:
    """A header: name -> spec and (begin, end) in the data; free metadata.

    Files with the same header share one object, as most checkpoints of a run do.
    """

    tensors: Mapping[str, TensorSpec]  # in the order of the file
    ranges: Mapping[str, tuple[int, int]]
    metadata: Mapping[str, str]
    data_start: int
    file_size: int


_headers: "weakref.WeakValueDictionary[bytes, Header]" = weakref.WeakValueDictionary()
# The last header, for the next step: a plan opens the files, and so does the run after it.
_latest: deque[Header] = deque(maxlen=1)


def encode_header(
    entries: Iterable[tuple[str, TensorSpec]], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, int], int]:
    """The first bytes of a file, the offset of each tensor, and the size of the whole file.

    >>> text, starts, size = encode_header([("w", TensorSpec("F32", (3,)))], {})
    >>> (len(text), starts, size)
    (64, {'w': 64}, 76)
    """
    header: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    offset, begins = 0, {}
    with paused_garbage_collection():
        for name, spec in entries:
            require_name(name)
            end = offset + spec.nbytes
            header[name] = {
                "dtype": spec.dtype,
                "shape": list(spec.shape),
                "data_offsets": [offset, end],
            }
            begins[name] = offset
            offset = end
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


def require_name(name: str) -> None:
    """Refuse a name under which safetensors cannot hold a tensor.

    >>> require_name("__metadata__")
    Traceback (most recent call last):
    torch_lawa.errors.FormatError: the tensor '__metadata__' cannot be stored: safetensors...
    """
    if name == _METADATA:
        raise FormatError(
            f"the tensor {name!r} cannot be stored: safetensors reserves this name. Rename or "
            "exclude it."
        )
    if not name.isascii() and not is_text(name):
        raise FormatError(
            f"the tensor {name!r} cannot be stored: its name is not valid Unicode. Rename or "
            "exclude it."
        )


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
    if source.size < 8:
        raise FormatError(
            f"{location}: not a complete safetensors file (it has {source.size} bytes). It was "
            "not written to its end; write it again."
        )
    length = int.from_bytes(source.view(0, 8).tobytes(), "little")
    if not 2 <= length <= min(_MAX_HEADER, source.size - 8):
        raise FormatError(
            f"{location}: not a complete safetensors file (header length {length}, file size "
            f"{source.size}). It may be truncated or of another format; write it again."
        )
    text = source.view(8, 8 + length).tobytes()
    key = hashlib.blake2b(text).digest()
    header = _headers.get(key)
    if header is None:
        with paused_garbage_collection():
            header = _headers.setdefault(key, _parse(text, location))
        _latest.append(header)
    if header.file_size != source.size:
        raise FormatError(
            f"{location}: the header describes {header.file_size} bytes, but the file has "
            f"{source.size}. It is truncated or damaged; write it again."
        )
    return header


def _parse(text: bytes, location: Location) -> Header:
    try:
        raw = _load(text)
        metadata = {str(k): str(v) for k, v in raw.pop(_METADATA, {}).items()}
        entries = _read_entries(raw)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise FormatError(
            f"{location}: the safetensors header is broken ({error}). Write the file again."
        ) from None
    end = 0
    entries.sort(key=itemgetter(2))  # by their ranges
    for name, _, (begin, stop) in entries:
        if begin != end:
            raise FormatError(
                f"{location}: tensor {name!r} begins at {begin}, expected {end}. The file is "
                "damaged; write it again."
            )
        end = stop
    tensors = {name: spec for name, spec, _ in entries}
    ranges = {name: span for name, _, span in entries}
    return Header(tensors, ranges, metadata, 8 + len(text), 8 + len(text) + end)


def _load(text: bytes) -> dict[str, Any]:
    """The JSON of a header; refuses an object in which a name appears twice.

    Looking at every object makes parsing three times slower, and `json` keeps the last of equal
    names. Without escapes a text has two quotation marks per string, so if as many strings as in
    the text are in the result, none was dropped.
    """
    if b"\\" not in text:
        raw = json.loads(text)
        if isinstance(raw, dict) and text.count(b'"') == 2 * _count_strings(raw):
            return raw
    return json.loads(text, object_pairs_hook=_without_duplicates)  # type: ignore[no-any-return]


def _count_strings(raw: Mapping[str, Any]) -> int:
    """How many strings a valid header has, -1 if it is not; `_read_entries` checks the entries."""
    metadata = raw.get(_METADATA)
    pairs = {} if metadata is None else metadata
    num = len(raw) - (_METADATA in raw)
    if sum(map(len, raw.values())) != 3 * num + len(pairs):
        return -1  # some entries have other keys than dtype, shape and data_offsets
    if not all(isinstance(value, str) for value in pairs.values()):
        return -1
    return 5 * num + (_METADATA in raw) + 2 * len(pairs)  # three keys, a name and a dtype


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        counts = Counter(name for name, _ in pairs)
        raise ValueError(f"{counts.most_common(1)[0][0]!r} appears twice")
    return found


_Entry = tuple[str, TensorSpec, tuple[int, int]]


def _read_entries(raw: Mapping[str, Any]) -> list[_Entry]:
    specs: dict[tuple[str, str], tuple[TensorSpec, int]] = {}  # few shapes, many tensors
    entries = []
    for name, entry in raw.items():
        if not name.isascii() and not is_text(name):
            raise ValueError(f"the name {name!r} is not valid text")
        dtype, shape = entry["dtype"], entry["shape"]
        begin, end = entry["data_offsets"]
        known = (dtype, str(shape))  # as text, because 1 and true and 1.0 are equal
        if known not in specs:
            specs[known] = _make_spec(name, dtype, shape)
        spec, size = specs[known]
        if not (type(begin) is int and type(end) is int and 0 <= begin <= end):
            raise ValueError(f"tensor {name!r}: offsets {begin}..{end}")
        if end - begin != size:
            raise ValueError(f"tensor {name!r}: offsets {begin}..{end} do not hold {spec}")
        entries.append((name, spec, (begin, end)))
    return entries


def _make_spec(name: str, dtype: Any, shape: Any) -> tuple[TensorSpec, int]:
    if dtype not in DTYPES:
        raise ValueError(f"tensor {name!r} has the unknown dtype {dtype!r}")
    shape = tuple(shape)
    if len(shape) > _MAX_DIMS or not all(type(n) is int and 0 <= n < _MAX_SIZE for n in shape):
        raise ValueError(f"tensor {name!r}: shape {shape}")
    spec = TensorSpec(dtype, shape)
    return spec, spec.nbytes


class SafetensorsFile(Checkpoint):
    """One safetensors file, as a checkpoint or as a shard of one; it has no entries (`key`)."""

    def __init__(self, location: Location, key: str | None = None) -> None:
        self._file, self._source = location, location.open()
        self._header = header = parse_header(self._source, location)
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
            layout="single",
            tensors=header.tensors,
            aliases=aliases,
            metadata={k: v for k, v in header.metadata.items() if k not in aliases},
            progress=TrainingProgress(
                step=_number(header.metadata, _STEP_KEYS),
                epoch=_number(header.metadata, ("epoch",)),
            ),
        )

    def read(self, name: str, begin: int, end: int) -> "Bytes":
        start = self._header.data_start + self._header.ranges[name][0]
        return self._source.view(start + begin, start + end)

    def read_all(self, names: Sequence[str]) -> "Bytes":
        ranges, start = self._header.ranges, self._header.data_start
        first, end = ranges[names[0]]
        for name in names[1:]:
            begin, stop = ranges[name]
            if begin != end:
                return super().read_all(names)
            end = stop
        return self._source.view(start + first, start + end)

    def file_of(self, name: str) -> Location:
        return self._file

    @property
    def files(self) -> list[Location]:
        return [self._file]

    def close(self) -> None:
        self._source.close()


def _number(metadata: Mapping[str, str], keys: Iterable[str]) -> int | None:
    texts = (metadata.get(key, "") for key in keys)
    return next((int(text) for text in texts if text.isdecimal() and len(text) <= 18), None)
