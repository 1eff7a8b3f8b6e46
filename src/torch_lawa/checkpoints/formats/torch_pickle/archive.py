"""The zip files of `torch.save`: a pickle that describes tensors, and one entry per storage.

PyTorch is not needed and nothing in the file is executed. Entries are not compressed, so a tensor
is a view of the file.
"""

import struct
import zipfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch_lawa.checkpoints.formats.torch_pickle.safe_pickle import MAX_PICKLE, Label, load_pickle
from torch_lawa.checkpoints.formats.torch_pickle.tensors import MAKERS, STORAGES, Storage
from torch_lawa.checkpoints.storage.byte_sources import ByteSource, SourceFile
from torch_lawa.checkpoints.storage.paths import Location
from torch_lawa.errors import FormatError

if TYPE_CHECKING:
    from torch_lawa.mean.kernels import Bytes

__all__ = ["StorageEntry", "find_storage", "load_archive"]

_LEGACY = bytes.fromhex("80028a0a6cfc9c46f9206aa850192e")  # the magic number before PyTorch 1.6
_EDGE = 64 * 1024
_DIRECTORY_ENTRY = struct.Struct("<4s24xHHH12x")  # signature, ..., lengths of what follows
_CHECKSUM_IN_HEADER, _CHECKSUM_IN_ENTRY = 14, 16  # positions
_DESCRIBED_AFTER = 0x8  # a flag: the checksum is after the bytes
_DESCRIPTOR = b"PK\7\x08"
_LOCAL_HEADER = struct.Struct("<4s22xHH")  # signature, ..., lengths of the name and of the extra
_SAVE_AGAIN = "load it with torch and save model.state_dict() again with torch.save"


def load_archive(
    source: ByteSource,
    location: Location,
    begin: int = 0,
    end: int | None = None,
    *,
    any_name: bool = False,
) -> Any:
    """Load the object in a zip of `torch.save`, which may be a range of a file.

    Tensors become `StoredTensor` or `UnusableTensor`; dicts, lists and plain values stay what they
    are; anything else becomes a `Record`. Objects of unknown classes are an error, unless
    `any_name` makes them records too (see `load_pickle`).
    """
    section = _ArchiveSection(source, begin, source.size if end is None else end)
    _check_kind(section, location)
    entries = _read_directory(section, location)

    def content(name: str) -> "Bytes":
        entry = entries[name]
        if entry.size > MAX_PICKLE:
            raise FormatError(f"{location}: {name} in it is too large: save only the weights.")
        start = entry.find_start(section, location, 0)
        return section.view(start, start + entry.size)

    if "byteorder" in entries and content("byteorder").tobytes() != b"little":
        raise FormatError(
            f"{location}: not written on a little-endian machine: {_SAVE_AGAIN} on one."
        )

    def load_storage(pid: Any) -> Storage:
        kind, label, key, _location, _numel = pid
        if kind != "storage" or not isinstance(label, Label) or not isinstance(key, str):
            raise ValueError("a persistent id that is not a storage")
        entry = entries.get(f"data/{key}")
        data = _EntryData(source, location, begin, entry)
        if entry and section.is_at_hand(entry.header, entry.header + entry.header_size):
            data.start = begin + entry.find_start(section, location, 0)
        return Storage(key, STORAGES[label.path], entry.size if entry else None, data.view)

    return load_pickle(content("data.pkl"), location, MAKERS, load_storage, any_name=any_name)


@dataclass(frozen=True, slots=True)
class StorageEntry:
    """Where a storage is in a file: its first byte, its size, and its CRC-32 (in two places)."""

    start: int
    size: int
    checksums: tuple[int, ...]


def find_storage(
    source: ByteSource, location: Location, begin: int, end: int, key: str
) -> StorageEntry:
    """Find the storage `key` of the zip that is in the bytes `begin` to `end` of a file."""
    section = _ArchiveSection(source, begin, end)
    entry = _read_directory(section, location)[f"data/{key}"]
    start = entry.find_start(section, location, 0)
    flags = int.from_bytes(section.view(entry.header + 6, entry.header + 8).tobytes(), "little")
    local = entry.header + _CHECKSUM_IN_HEADER
    if flags & _DESCRIBED_AFTER:
        local = start + entry.size
        local += 4 * (section.view(local, local + 4).tobytes() == _DESCRIPTOR)
    at = entry.limit
    while True:
        head = section.view(at, at + _DIRECTORY_ENTRY.size).tobytes()
        signature, *lengths = _DIRECTORY_ENTRY.unpack(head)
        name_at = at + _DIRECTORY_ENTRY.size
        if signature != b"PK\1\2":
            raise FormatError(f"{location}: the directory of a zip in it is damaged.")
        if section.view(name_at, name_at + lengths[0]).tobytes() == entry.name:
            checksums = begin + local, begin + at + _CHECKSUM_IN_ENTRY
            return StorageEntry(begin + start, entry.size, checksums)
        at = name_at + sum(lengths)


class _ArchiveSection(ByteSource):
    """A range of a source; its first and last bytes, where a zip is described, are fetched once."""

    def __init__(self, source: ByteSource, begin: int, end: int) -> None:
        self._source, self._begin, self.size = source, begin, end - begin
        edge = min(_EDGE, self.size)
        self._tail_begin = self.size - edge
        self._tail = source.view(end - edge, end)
        self._head = self._tail if edge == self.size else source.view(begin, begin + edge)

    def is_at_hand(self, begin: int, end: int) -> bool:
        """Whether these bytes have been fetched."""
        return end <= len(self._head) or begin >= self._tail_begin

    def view(self, begin: int, end: int) -> "Bytes":
        if end <= len(self._head):
            return self._head[begin:end]
        if begin >= self._tail_begin:
            return self._tail[begin - self._tail_begin : end - self._tail_begin]
        return self._source.view(self._begin + begin, self._begin + end)

    def close(self) -> None:
        """The caller owns the source."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """A file in the zip, as the central directory describes it."""

    name: bytes
    header: int
    size: int
    limit: int  # where the entries end and the directory begins

    @property
    def header_size(self) -> int:
        """Size of the local header, without the extra field."""
        return _LOCAL_HEADER.size + len(self.name)

    def find_start(self, source: ByteSource, location: Location, base: int) -> int:
        """Read from the local header where the bytes begin; the zip begins at `base`."""
        at, limit = base + self.header, base + self.limit
        header = source.view(at, min(at + self.header_size, limit)).tobytes()
        if len(header) == self.header_size:
            signature, name_length, extra_length = _LOCAL_HEADER.unpack_from(header)
            start: int = at + self.header_size + extra_length
            named = name_length == len(self.name) and header.endswith(self.name)
            if signature == b"PK\3\4" and named and start + self.size <= limit:
                return start
        raise FormatError(
            f"{location}: the entry {self.name.decode(errors='replace')!r} is not where the "
            "directory of the zip says. The file is damaged; write it again."
        )


class _EntryData:
    """The bytes of an entry; its header is read with the first of them."""

    __slots__ = ("_base", "_entry", "_location", "_source", "start")

    def __init__(
        self, source: ByteSource, location: Location, base: int, entry: _Entry | None
    ) -> None:
        self._source, self._location, self._base, self._entry = source, location, base, entry
        self.start: int | None = None

    def view(self, begin: int, end: int) -> "Bytes":
        """Bytes `begin` to `end`."""
        start = self.start
        if start is None:
            assert self._entry is not None
            start = self.start = self._entry.find_start(self._source, self._location, self._base)
        return self._source.view(start + begin, start + end)


def _check_kind(section: _ArchiveSection, location: Location) -> None:
    head = section.view(0, min(512, section.size)).tobytes()
    if head.startswith(b"PK\3\4"):
        return
    if head.startswith(_LEGACY) or head[257:262] == b"ustar":
        raise FormatError(
            f"{location}: written in the format of PyTorch before 1.6: {_SAVE_AGAIN}."
        )
    raise FormatError(
        f"{location}: not a file of torch.save (not a zip). It may be truncated or of another "
        "format; write it again."
    )


def _read_directory(section: _ArchiveSection, location: Location) -> dict[str, _Entry]:
    """Every entry, by its name within the only folder of the archive."""
    try:
        with zipfile.ZipFile(SourceFile(section)) as archive:
            infos, limit = archive.infolist(), archive.start_dir
    except Exception as error:  # a damaged zip can raise nearly anything
        raise FormatError(
            f"{location}: not a complete zip file ({error}). It is truncated or damaged; "
            "write it again."
        ) from None
    tops = [i.orig_filename.removesuffix("data.pkl") for i in infos]
    tops = [top for top in tops if top.endswith("/") and top.count("/") == 1]
    if len(tops) != 1:
        raise FormatError(f"{location}: a zip, but not from torch.save, which writes one data.pkl.")
    found: dict[str, _Entry] = {}
    for info in infos:
        name = info.orig_filename.removeprefix(tops[0])
        if name == "constants.pkl" or name.startswith("code/"):
            raise FormatError(
                f"{location}: a TorchScript program, not a state dict: load it with torch.jit.load "
                "and save its state_dict() with torch.save."
            )
        found[name] = _check_entry(info, limit, location)
    if len(found) != len(infos):
        raise FormatError(f"{location}: the zip contains an entry twice. Write the file again.")
    return found


def _check_entry(info: zipfile.ZipInfo, limit: int, location: Location) -> _Entry:
    problem = None
    if info.compress_type != zipfile.ZIP_STORED:
        problem = "is compressed"
    elif info.flag_bits & 1:
        problem = "is encrypted"
    elif info.compress_size != info.file_size or not 0 <= info.header_offset < limit:
        problem = "has inconsistent sizes"
    if problem:
        raise FormatError(f"{location}: the entry {info.orig_filename!r} {problem}: {_SAVE_AGAIN}.")
    name = info.orig_filename.encode("utf-8" if info.flag_bits & 0x800 else "cp437")
    return _Entry(name, info.header_offset, info.file_size, limit)
