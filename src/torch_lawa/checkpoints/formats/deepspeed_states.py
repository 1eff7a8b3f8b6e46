"""The dicts in the files of a DeepSpeed checkpoint; entries are checked as they are used."""

from typing import Any

from torch_lawa.checkpoints.formats.base import is_text
from torch_lawa.checkpoints.formats.torch_pickle.archive import load_archive
from torch_lawa.checkpoints.formats.torch_pickle.tensors import (
    DescribedTensor,
    StoredTensor,
    UnusableTensor,
    as_size,
)
from torch_lawa.checkpoints.storage.byte_sources import ByteSource
from torch_lawa.checkpoints.storage.paths import Location
from torch_lawa.errors import FormatError

__all__ = ["StateFile", "as_counts", "as_tensor", "open_archive"]

_MAX_NAMES = 1_000_000
_AGAIN = "Save or copy the checkpoint again."


def open_archive(file: Location) -> tuple[Any, ByteSource]:
    """Read what is in a file of `torch.save`; objects of any class become records."""
    if not file.is_file():
        raise FormatError(f"{file}: does not exist, but belongs to the checkpoint. {_AGAIN}")
    source = file.open()
    try:
        return load_archive(source, file, any_name=True), source
    except BaseException:
        source.close()
        raise


class StateFile:
    """The dict of a file. Every method checks what it returns and names the file in errors."""

    def __init__(self, file: Location, entries: Any, path: str = "") -> None:
        self.file, self._path = file, path
        if not isinstance(entries, dict):
            raise self.damaged(f"{path!r} is not a dict" if path else "it has no dict")
        self.entries = entries

    def damaged(self, why: str) -> FormatError:
        """The error to raise."""
        return FormatError(f"{self.file}: not a file of a DeepSpeed checkpoint: {why}. {_AGAIN}")

    def below(self, key: str) -> "StateFile":
        """The dict under a key; empty if it is missing or None."""
        found = self.entries.get(key)
        return StateFile(self.file, {} if found is None else found, f"{self._path}{key}.")

    def items(self, key: str) -> list[Any]:
        """The list under a key."""
        found = self.entries.get(key)
        if not isinstance(found, list | tuple) or len(found) > _MAX_NAMES:
            raise self.damaged(f"{self._path + key!r} is not a list")
        return list(found)

    def count(self, key: str) -> int | None:
        """The number under a key; None if it is not one."""
        found = self.entries.get(key)
        return found if type(found) is int and 0 <= found < 2**63 else None

    def names(self) -> list[str]:
        """The keys of the dict, which name tensors."""
        for name in self.entries:
            if not isinstance(name, str) or not is_text(name):
                raise self.damaged(f"{self._path!r} has the name {name!r:.200}")
        return list(self.entries)

    def sizes(self) -> dict[str, tuple[int, ...]]:
        """The dict, as shapes by the names of tensors."""
        found = {name: as_size(self.entries[name]) for name in self.names()}
        for name, size in found.items():
            if size is None:
                raise self.damaged(f"{self._path!r} has no shape for {name!r}")
        return {name: size for name, size in found.items() if size is not None}

    def tensor_names(self) -> list[str]:
        """The keys of tensors; other values, such as extra states, are left out."""
        return [n for n in self.names() if isinstance(self.entries[n], DescribedTensor)]

    def tensor(self, name: str) -> StoredTensor:
        """The tensor of a name."""
        return as_tensor(self.entries.get(name), self.file, name)


def as_tensor(value: object, file: Location, name: str) -> StoredTensor:
    """The value, which must be a tensor that can be read."""
    if isinstance(value, UnusableTensor):
        raise FormatError(f"{file}: tensor {name!r} {value.why}.")
    if not isinstance(value, StoredTensor):
        raise FormatError(f"{file}: {name!r} is not a tensor, or missing. {_AGAIN}")
    return value


def as_counts(values: object) -> list[int]:
    """The value as a list of numbers that are not negative; empty if it is not one."""
    if not isinstance(values, list) or not all(type(n) is int and n >= 0 for n in values):
        return []
    return values
