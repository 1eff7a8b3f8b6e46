"""The interface of an open checkpoint of any format: named tensors, read in ranges of bytes."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Self

from torch_lawa.errors import FormatError
from torch_lawa.mean.dtypes import DTYPES
from torch_lawa.units import format_bytes

if TYPE_CHECKING:
    from torch_lawa.checkpoints.storage.paths import Location
    from torch_lawa.mean.kernels import Bytes

__all__ = [
    "Checkpoint",
    "CheckpointLayout",
    "TensorSpec",
    "TrainingProgress",
    "check_claims",
    "is_plain_name",
    "is_text",
]

_EXPANDED = 1 << 30  # bytes

CheckpointLayout = str  # "single", "sharded", "distributed", or one that a format adds


@dataclass(frozen=True)
class TensorSpec:
    """The dtype (as safetensors names it) and shape of a tensor.

    >>> TensorSpec("BF16", (2, 3)).nbytes
    12
    """

    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    @cached_property
    def nbytes(self) -> int:
        """Number of bytes."""
        return self.numel * DTYPES[self.dtype].itemsize

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class TrainingProgress:
    """The step and epoch of a checkpoint; None if unknown."""

    step: int | None = None
    epoch: int | None = None

    @property
    def known(self) -> bool:
        """Whether there is a step or an epoch."""
        return self.step is not None or self.epoch is not None

    @property
    def words(self) -> list[str]:
        """What is known, such as "step 500" and "epoch 3"."""
        numbers = {"step": self.step, "epoch": self.epoch}
        return [f"{name} {number}" for name, number in numbers.items() if number is not None]


@dataclass
class Checkpoint(ABC):
    """An open checkpoint: its tensors are known, their values are read on request.

    `tensors` has every tensor once; `aliases` are the other names of tied ones. `read` returns
    bytes of a tensor's values in row-major order, little-endian, as a view of the file where
    possible. It may be called from several threads.
    """

    location: "Location"
    format: str  # for messages: "safetensors", "PyTorch file", ...
    layout: CheckpointLayout
    tensors: Mapping[str, TensorSpec]
    aliases: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    progress: TrainingProgress = field(default_factory=TrainingProgress)
    notes: tuple[str, ...] = ()  # decisions that the user should know about
    beside: "Location | None" = None  # the folder of config and tokenizer files, if another one

    @abstractmethod
    def read(self, name: str, begin: int, end: int) -> "Bytes":
        """Bytes `begin` to `end` of the tensor `name`."""

    def read_all(self, names: Sequence[str]) -> "Bytes":
        """The bytes of several (small) tensors, one after the other."""
        import numpy as np  # not above: the command's options import this module

        return np.concatenate([self.read(n, 0, self.tensors[n].nbytes) for n in names])

    @abstractmethod
    def file_of(self, name: str) -> "Location":
        """The file that contains the tensor `name`: for messages, and to keep the layout."""

    @property
    @abstractmethod
    def files(self) -> "list[Location]":
        """Every file that contains weights."""

    @abstractmethod
    def close(self) -> None:
        """Close files and mappings; views that were read stay valid."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(spec.nbytes for spec in self.tensors.values())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def is_text(name: str) -> bool:
    """Whether a name is valid Unicode: other readers refuse lone surrogates.

    >>> is_text("größe"), is_text("a\\ud800")
    (True, False)
    """
    return not any("\ud800" <= character <= "\udfff" for character in name)


def is_plain_name(name: str) -> bool:
    """Whether a name that a file gives is that of an entry of its folder, and leads nowhere else.

    >>> is_plain_name("model.safetensors"), is_plain_name("../model.safetensors")
    (True, False)
    """
    return name not in ("", ".", "..") and not any(c in name for c in "/\\\0")


def check_claims(checkpoint: Checkpoint, num_stored: int) -> None:
    """Refuse tensors that are much larger than the `num_stored` bytes of their files.

    An expanded tensor (stride 0) has more values than its file. A little of that is in use, but a
    file of 500 bytes can also claim terabytes.
    """
    claimed = checkpoint.num_bytes
    if claimed > num_stored + _EXPANDED:
        largest = max(checkpoint.tensors, key=lambda name: checkpoint.tensors[name].nbytes)
        raise FormatError(
            f"{checkpoint.location}: its tensors claim {format_bytes(claimed)}, but the files have "
            f"{format_bytes(num_stored)}. Tensors such as {largest!r} may be expanded: save "
            "tensor.contiguous() instead."
        )
