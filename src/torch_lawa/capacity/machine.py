"""The machine that a plan is made for: each constant with its unit and where it comes from.

What was measured names its record; what was not says "assumed". Pure Python.
"""

import dataclasses
import math
from dataclasses import dataclass, field

from torch_lawa.errors import ConfigError

__all__ = ["GIB", "RECORD", "Constant", "Machine", "constants"]

GIB = 1 << 30
RECORD = "results/2026-11-15-gpu-h200"  # what sources call "H200"


def _(
    default: float, unit: str, what: str, source: str, *, least: float = 0.0, open: bool = True
) -> float:
    """A field with what it means; `least` is its lower bound, left out where `open`."""
    metadata = {"unit": unit, "what": what, "source": source, "least": least, "open": open}
    value: float = field(default=default, metadata=metadata)
    return value


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Nodes, links and disks. Gigabytes are 10**9 bytes, GiB are 2**30.

    >>> Machine(disk_gbs=2).disk_gbs
    2
    """

    host_ram_gib: float = _(1024.0, "GiB", "RAM of a node.", "assumed")
    gpu_memory_gib: float = _(80.0, "GiB", "Memory of a GPU.", "assumed")
    host_share: float = _(
        0.75,
        "",
        "Share of a node's RAM that averaging may take; the rest is for loaders.",
        "assumed",
    )
    state_copies: float = _(
        4.0,
        "copies",
        "Of the weights, that training keeps on the GPUs: weights, gradients, Adam's moments.",
        "assumed",
        least=2.0,
        open=False,
    )
    pcie_gbs: float = _(
        55.0, "GB/s", "Between a GPU and page-locked RAM, all GPUs at once.", "H200, one GPU"
    )
    disk_gbs: float = _(5.0, "GB/s", "A node's disk, written or read.", "assumed")
    device_gbs: float = _(
        2970.0, "GB/s", "Read and written by a copy on the GPU.", "H200, 998 MB in 0.336 ms"
    )
    mean_gvalues: float = _(
        132.0,
        "billion/s",
        "Stored values that a GPU sums in float64.",
        "H200, fit of swaps at k = 6",
    )
    collect_ms: float = _(
        3.0,
        "ms",
        "Python of one collect: the walk through the modules, not the size of the weights.",
        "H200, 0.5 to 3.0 on three models",
        open=False,
    )
    read_ms: float = _(
        5.0, "ms", "Fixed cost of reading a mean into a model.", "H200, same fit", open=False
    )
    lock_s_per_gb: float = _(
        0.3,
        "s/GB",
        "Page-locking the RAM of a snapshot, once for each place in the window.",
        "H200, the slowest of three",
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
            raise ConfigError(f"host_share={self.host_share}: give a share of 1, such as 0.75.")


@dataclass(frozen=True)
class Constant:
    """One field of a machine, as it is shown."""

    name: str
    value: float
    unit: str
    what: str
    source: str

    @property
    def measured(self) -> bool:
        """Whether a record has it; not so once it was given by hand."""
        return self.source.startswith("H200")


def constants(machine: Machine) -> list[Constant]:
    """Every constant of `machine` with its source, "given" where it is not the default.

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
