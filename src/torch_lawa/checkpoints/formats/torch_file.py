"""Files of `torch.save` (`.pt`, `.pth`, `.bin`, `.ckpt`, `.tar`), read without PyTorch.

Nothing in them is executed, and their tensors are views of the file.
"""

from typing import TYPE_CHECKING

from torch_lawa.checkpoints.formats.base import Checkpoint
from torch_lawa.checkpoints.formats.state_dicts import find_progress, find_weights
from torch_lawa.checkpoints.formats.torch_archive import load_archive
from torch_lawa.checkpoints.formats.torch_tensors import Described, StoredTensor, Unusable
from torch_lawa.checkpoints.storage.paths import Place
from torch_lawa.errors import FormatError

if TYPE_CHECKING:
    from torch_lawa.checkpoints.formats.base import Bytes

__all__ = ["TorchFile"]


class TorchFile(Checkpoint):
    """One file of `torch.save`; `key` is the dotted entry with the weights ("" for the top)."""

    def __init__(self, place: Place, *, key: str | None = None) -> None:
        self._source = place.open()
        try:
            top = load_archive(self._source, place)
            weights = find_weights(top, Described, place, key=key)
            stored = {n: _check(n, value, place) for n, value in weights.tensors.items()}
        except BaseException:
            self._source.close()
            raise
        first: dict[object, str] = {}
        names = {name: first.setdefault(t.identity, name) for name, t in stored.items()}
        self.key = weights.key
        self._stored = {name: stored[name] for name in first.values()}
        super().__init__(
            place=place,
            format="PyTorch file",
            layout="single",
            tensors={name: t.spec for name, t in self._stored.items()},
            aliases={name: kept for name, kept in names.items() if name != kept},
            metadata=weights.metadata,
            progress=find_progress(top),
            notes=weights.notes,
        )
        self._file = place

    def read(self, name: str, begin: int, end: int) -> "Bytes":
        return self._stored[name].read(begin, end)

    def file_of(self, name: str) -> Place:
        return self._file

    @property
    def files(self) -> list[Place]:
        return [self._file]

    def close(self) -> None:
        self._source.close()


def _check(name: str, value: Described, place: Place) -> StoredTensor:
    if isinstance(value, Unusable):
        raise FormatError(f"{place}: tensor {name!r} {value.why}.")
    assert isinstance(value, StoredTensor)
    return value
