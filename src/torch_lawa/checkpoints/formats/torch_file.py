"""Files of `torch.save`, read without PyTorch and without executing anything.

Tensors are views of the file. `torch_write` writes such files.
"""

from typing import TYPE_CHECKING

from torch_lawa.checkpoints.formats.base import Checkpoint, check_claims
from torch_lawa.checkpoints.formats.torch_pickle.archive import load_archive
from torch_lawa.checkpoints.formats.torch_pickle.state_dicts import find_progress, find_weights
from torch_lawa.checkpoints.formats.torch_pickle.tensors import (
    DescribedTensor,
    StoredTensor,
    UnusableTensor,
)
from torch_lawa.checkpoints.storage.paths import Location
from torch_lawa.errors import FormatError

if TYPE_CHECKING:
    from torch_lawa.mean.kernels import Bytes

__all__ = ["TorchFile"]


class TorchFile(Checkpoint):
    """A file of `torch.save`; `key` is the dotted entry with the weights ("" for the top)."""

    def __init__(self, location: Location, key: str | None = None) -> None:
        self._source = location.open()
        try:
            top = load_archive(self._source, location)
            weights = find_weights(top, DescribedTensor, location, key=key)
            stored = {n: _check(n, value, location) for n, value in weights.tensors.items()}
        except BaseException:
            self._source.close()
            raise
        first: dict[object, str] = {}
        names = {name: first.setdefault(t.identity, name) for name, t in stored.items()}
        self.key = weights.key
        self._stored = {name: stored[name] for name in first.values()}
        super().__init__(
            location=location,
            format="PyTorch file",
            layout="single",
            tensors={name: t.spec for name, t in self._stored.items()},
            aliases={name: kept for name, kept in names.items() if name != kept},
            metadata=weights.metadata,
            progress=find_progress(top),
            notes=weights.notes,
        )
        self._file = location
        try:
            check_claims(self, self._source.size)
        except FormatError:
            self._source.close()
            raise

    def read(self, name: str, begin: int, end: int) -> "Bytes":
        return self._stored[name].read(begin, end)

    def file_of(self, name: str) -> Location:
        return self._file

    @property
    def files(self) -> list[Location]:
        return [self._file]

    def close(self) -> None:
        self._source.close()


def _check(name: str, value: DescribedTensor, location: Location) -> StoredTensor:
    if isinstance(value, UnusableTensor):
        raise FormatError(f"{location}: tensor {name!r} {value.why}.")
    assert isinstance(value, StoredTensor)
    return value
