"""How checkpoints are averaged and written: the options that average, sweep and watch share."""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, get_args

from torch_lawa.checkpoints.formats.base import CheckpointLayout
from torch_lawa.checkpoints.formats.registry import output_layouts
from torch_lawa.coefficients import Coefficients, blended, parse_coefficients
from torch_lawa.errors import ConfigError
from torch_lawa.mean.dtypes import parse_dtype
from torch_lawa.validation import one_of

__all__ = ["DEFAULTS", "MAX_THREADS", "AverageOptions", "Buffers", "check_threads"]

Buffers = Literal["newest", "average"]
MAX_THREADS = 256  # each has buffers of its own


@dataclass(frozen=True, kw_only=True)
class AverageOptions:
    """Options of `average_checkpoints`, `sweep_checkpoints` and `watch_run`, checked when made.

    - `coefficients`: how much each checkpoint counts, as a rule or as on the command line.
    - `blend`: weight of the mean; the rest, `1 - blend`, goes to the newest checkpoint.
    - `key`: the entry of a PyTorch file that holds the weights; found by itself in most files.
    - `dtype`: write floating-point tensors as this dtype, such as `"bfloat16"`.
    - `include`, `exclude`: shell-style patterns of tensor names to write or to leave out.
    - `buffers`: take BatchNorm's running statistics from the newest checkpoint, or average them.
    - `strip_prefix`: remove this prefix from every tensor name.
    - `layout`, `max_shard_size`: of the output; by default that of the newest checkpoint.

    >>> AverageOptions(coefficients="exponential:0.5", exclude="*.bias").coefficients
    Exponential(alpha=0.5)
    """

    coefficients: Coefficients | str = "uniform"
    blend: float | None = None
    key: str | None = None
    dtype: str | None = None
    include: Sequence[str] | str = ()
    exclude: Sequence[str] | str = ()
    buffers: Buffers = "newest"
    strip_prefix: str = ""
    layout: CheckpointLayout | None = None
    max_shard_size: int | None = None  # bytes

    def __post_init__(self) -> None:
        one_of("buffers", self.buffers, get_args(Buffers))
        one_of("layout", self.layout, (None, *output_layouts()))
        size = self.max_shard_size
        if size is not None and (not isinstance(size, int) or size < 1):
            raise ConfigError(f"max_shard_size={size!r}: give a number of bytes, at least 1.")
        changes = {
            "coefficients": self._coefficients,
            "dtype": self.dtype if self.dtype is None else parse_dtype(self.dtype),
            "include": _patterns(self.include),
            "exclude": _patterns(self.exclude),
        }
        for name, value in changes.items():
            object.__setattr__(self, name, value)
        _ = self.rule  # raises if the blend is not valid

    @property
    def rule(self) -> Coefficients:
        """How much each checkpoint counts: the coefficients, blended if `blend` is given."""
        return blended(self._coefficients, self.blend)

    @property
    def _coefficients(self) -> Coefficients:
        if isinstance(self.coefficients, str):
            return parse_coefficients(self.coefficients)
        return self.coefficients

    @property
    def patterns(self) -> tuple[str, ...]:
        """All patterns of tensor names."""
        return (*self.include, *self.exclude)

    def includes(self, name: str) -> bool:
        """Whether the tensor `name` is to be written."""
        if self.include and not any(fnmatchcase(name, pattern) for pattern in self.include):
            return False
        return not any(fnmatchcase(name, pattern) for pattern in self.exclude)


def _patterns(given: Sequence[str] | str) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)


DEFAULTS = AverageOptions()


def check_threads(threads: int | None) -> None:
    """Refuse fewer than one thread, and more than any machine needs; None means the default."""
    if threads is not None and not 1 <= threads <= MAX_THREADS:
        raise ConfigError(f"threads={threads}: give 1 to {MAX_THREADS}.")
