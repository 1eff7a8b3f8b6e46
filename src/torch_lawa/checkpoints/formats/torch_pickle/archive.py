"""The zip files of `torch.save`: a pickle that describes tensors, and an entry for each storage.

Nothing of PyTorch is needed and nothing in the file is executed. Entries are stored, so a tensor is
a view of the file.
"""

import struct
import zipfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch_lawa.checkpoints.formats.torch_pickle.safe_pickle import MAX_PICKLE, Label, load_pickle
from torch_lawa.checkpoints.formats.torch_pickle.tensors import MAKERS, STORAGES, Storage
from torch_lawa.checkpoints.storage.paths import ByteSource, Location, SourceFile
from torch_lawa.errors import FormatError

if TYPE_CHECKING:
    from torch_lawa.mean.kernels import Bytes

__all__ = ["load_archive"]

_LEGACY = bytes.fromhex("80028a0a6cfc9c46f9206aa850192e")  # the magic number of before 1.6
_EDGE = 64 * 1024
_LOCAL_HEADER = struct.Struct("<4s22xHH")  # signature, ..., lengths of the name and of the extra
_SAVE_AGAIN = "load it with torch and save model.state_dict() again with torch.save"


def load_archive(
    source: ByteSource, location: Location, begin: int = 0, end: int | None = None
) -> Any:
    """The object in a zip of `torch.save`, which may be a range of a file.

    Tensors in it are `StoredTensor` or `Unusable`, dicts and lists are themselves, anything else
    is inert.
    """
    section = _Section(source, begin, source.size if end is None else end)
    _check_kind(section, location)
    entries = _read_directory(section, location)

    def content(name: str) -> "Bytes":
        entry = entries[name]
        if entry.size > MAX_PICKLE:
            raise FormatError(f"{location}: {name} in it is too large: save the weights alone.")
        start = entry.find_start(section, location, 0)
        return section.view(start, start + entry.size)

    if "byteorder" in entries and content("byteorder").tobytes() != b"little":
        raise FormatError(
            f"{location}: not written by a little-endian machine: {_SAVE_AGAIN} on one."
        )

    def load_storage(pid: Any) -> Storage:
        kind, label, key, _location, _numel = pid
        if kind != "storage" or not isinstance(label, Label) or not isinstance(key, str):
            raise ValueError("a persistent id that is no storage")
        entry = entries.get(f"data/{key}")
        data = _EntryData(source, location, begin, entry)
        if entry and section.is_at_hand(entry.header, entry.header + entry.header_size):
            data.start = begin + entry.find_start(section, location, 0)
        return Storage(key, STORAGES[label.path], entry.size if entry else None, data.view)

    return load_pickle(content("data.pkl"), location, MAKERS, load_storage)


class _Section(ByteSource):
    """A range of a source whose first and last bytes are fetched once: a zip begins at its end."""

    def __init__(self, source: ByteSource, begin: int, end: int) -> None:
        self._source, self._begin, self.size = source, begin, end - begin
        edge = min(_EDGE, self.size)
        self._tail_begin = self.size - edge
        self._tail = source.view(end - edge, end)
        self._head = self._tail if edge == self.size else source.view(begin, begin + edge)

    def is_at_hand(self, begin: int, end: int) -> bool:
        """Whether these bytes are fetched already."""
        return end <= len(self._head) or begin >= self._tail_begin

    def view(self, begin: int, end: int) -> "Bytes":
        if end <= len(self._head):
            return self._head[begin:end]
        if begin >= self._tail_begin:
            return self._tail[begin - self._tail_begin : end - self._tail_begin]
        return self._source.view(self._begin + begin, self._begin + end)

    def close(self) -> None:
        """The source belongs to someone else."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """A file in the zip, as the directory tells of it."""

    name: bytes
    header: int
    size: int
    limit: int  # where the entries end and the directory begins

    @property
    def header_size(self) -> int:
        """Of the local header, without the extra part that it may end with."""
        return _LOCAL_HEADER.size + len(self.name)

    def find_start(self, source: ByteSource, location: Location, base: int) -> int:
        """Where its bytes begin in a source where the zip begins at `base`: its header says it."""
        at, limit = base + self.header, base + self.limit
        header = source.view(at, min(at + self.header_size, limit)).tobytes()
        if len(header) == self.header_size:
            signature, name_length, extra_length = _LOCAL_HEADER.unpack_from(header)
            start: int = at + self.header_size + extra_length
            named = name_length == len(self.name) and header.endswith(self.name)
            if signature == b"PK\3\4" and named and start + self.size <= limit:
                return start
        raise FormatError(
            f"{location}: the entry {self.name.decode(errors='replace')!r} does not lie where the "
            "directory of the zip says. The file is damaged; write it again."
        )


class _EntryData:
    """The bytes of an entry; its header is looked at when the first are asked for."""

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


def _check_kind(section: _Section, location: Location) -> None:
    head = section.view(0, min(512, section.size)).tobytes()
    if head.startswith(b"PK\3\4"):
        return
    if head.startswith(_LEGACY) or head[257:262] == b"ustar":
        raise FormatError(
            f"{location}: written in the format of PyTorch before 1.6: {_SAVE_AGAIN}."
        )
    raise FormatError(
        f"{location}: not a file of torch.save (it is no zip). It may be truncated or of another "
        "format; write it again."
    )


def _read_directory(section: _Section, location: Location) -> dict[str, _Entry]:
    """Every entry by its name within the archive's one folder."""
    try:
        with zipfile.ZipFile(SourceFile(section)) as archive:
            infos, limit = archive.infolist(), archive.start_dir
    except Exception as error:  # a broken zip can raise nearly anything
        raise FormatError(
            f"{location}: not a whole zip file ({error}). It is truncated or damaged; "
            "write it again."
        ) from None
    tops = [i.orig_filename.removesuffix("data.pkl") for i in infos]
    tops = [top for top in tops if top.endswith("/") and top.count("/") == 1]
    if len(tops) != 1:
        raise FormatError(f"{location}: a zip, but not of torch.save, which has one data.pkl.")
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
        raise FormatError(f"{location}: an entry of the zip is there twice. Write the file again.")
    return found


def _check_entry(info: zipfile.ZipInfo, limit: int, location: Location) -> _Entry:
    problem = None
    if info.compress_type != zipfile.ZIP_STORED:
        problem = "is compressed"
    elif info.flag_bits & 1:
        problem = "is encrypted"
    elif info.compress_size != info.file_size or not 0 <= info.header_offset < limit:
        problem = "has sizes that cannot be"
    if problem:
        raise FormatError(f"{location}: the entry {info.orig_filename!r} {problem}: {_SAVE_AGAIN}.")
    name = info.orig_filename.encode("utf-8" if info.flag_bits & 0x800 else "cp437")
    return _Entry(name, info.header_offset, info.file_size, limit)
