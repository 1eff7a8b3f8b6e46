"""The hardware constants of an estimate, each with its unit and source. Pure Python.

Measured constants name what they were measured on; the others are "assumed".
"""

import dataclasses
import math
from dataclasses import dataclass, field

from torch_lawa.errors import ConfigError

__all__ = ["GIB", "RECORD", "Constant", "Machine", "constants"]

GIB = 1 << 30
RECORD = "results/2026-11-15-gpu-h200"  # the record that sources call "H200"


def _constant(
    default: float, unit: str, what: str, source: str, *, least: float = 0.0, open: bool = True
) -> float:
    """A documented field; `least` is its lower bound, excluded if `open`."""
    metadata = {"unit": unit, "what": what, "source": source, "least": least, "open": open}
    value: float = field(default=default, metadata=metadata)
    return value


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Memory sizes, bandwidths and fixed costs. GB are 10**9 bytes, GiB are 2**30.

    >>> Machine(disk_gbs=2).disk_gbs
    2
    """

    host_ram_gib: float = _constant(1024.0, "GiB", "RAM per node.", "assumed")
    gpu_memory_gib: float = _constant(80.0, "GiB", "Memory per GPU.", "assumed")
    host_share: float = _constant(
        0.75,
        "",
        "Share of a node's RAM that averaging may use; data loaders need the rest.",
        "assumed",
    )
    state_copies: float = _constant(
        4.0,
        "copies",
        "Copies of the weights in GPU memory: weights, gradients, Adam's moments.",
        "assumed",
        least=2.0,
        open=False,
    )
    pcie_gbs: float = _constant(
        55.0, "GB/s", "Bandwidth per GPU to page-locked RAM, all GPUs at once.", "H200, one GPU"
    )
    disk_gbs: float = _constant(5.0, "GB/s", "Disk bandwidth per node, read or write.", "assumed")
    device_gbs: float = _constant(
        2970.0,
        "GB/s",
        "Bandwidth of a copy within the GPU, read plus write.",
        "H200, 998 MB in 0.336 ms",
    )
    mean_gvalues: float = _constant(
        132.0,
        "billion/s",
        "Stored values that a GPU sums in float64 per second.",
        "H200, fit of swaps at k = 6",
    )
    collect_ms: float = _constant(
        3.0,
        "ms",
        "Time one collect blocks Python; depends on the number of modules, not their size.",
        "H200, slowest of three models (0.5 to 3.0)",
        open=False,
    )
    read_ms: float = _constant(
        5.0, "ms", "Fixed cost of reading the mean into a model.", "H200, same fit", open=False
    )
    lock_s_per_gb: float = _constant(
        0.3,
        "s/GB",
        "Time to page-lock RAM, once for each of the k snapshots of the window.",
        "H200, slowest of three",
        open=False,
    )

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            value, least = getattr(self, item.name), item.metadata["least"]
            low = value <= least if item.metadata["open"] else value < least
            if not math.isfinite(value) or low:
                bound = "more than" if item.metadata["open"] else "at least"
                raise ConfigError(f"{item.name}={value}: give a number of {bound} {least:g}.")
        if self.host_share > 1:
            raise ConfigError(
                f"host_share={self.host_share}: give a fraction of at most 1, such as 0.75."
            )


@dataclass(frozen=True)
class Constant:
    """One constant with its value, unit, meaning and source."""

    name: str
    value: float
    unit: str
    what: str
    source: str

    @property
    def measured(self) -> bool:
        """Whether the value was measured; False once the user gives another."""
        return self.source.startswith("H200")


def constants(machine: Machine) -> list[Constant]:
    """Every constant of `machine` with its source, "given" if it is not the default.

    >>> [c.source for c in constants(Machine(disk_gbs=2)) if c.name == "disk_gbs"]
    ['given']
    """
    found = []
    for item in dataclasses.fields(machine):
        value = getattr(machine, item.name)
        source = item.metadata["source"] if value == item.default else "given"
        found.append(
            Constant(item.name, value, item.metadata["unit"], item.metadata["what"], source)
        )
    return found
