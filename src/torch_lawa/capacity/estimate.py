"""What a window of k snapshots costs a training run: bytes and seconds, per GPU, node and in total.

Arithmetic only, in pure Python, so that `lawa plan` is fast. What each store does with a snapshot
is in `torch_lawa.stores`; the constants are in `capacity.machine`.
"""

import re
from dataclasses import dataclass, field
from decimal import Decimal

from torch_lawa.capacity.machine import GIB, Machine
from torch_lawa.errors import ConfigError
from torch_lawa.validation import one_of

__all__ = ["Cost", "Sizes", "TrainingRun", "cost_of", "parse_count"]

_ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
_STORES = ("host", "device", "disk")
_SHARDINGS = ("fsdp", "ddp")
_COUNT = re.compile(r"([0-9][0-9_]*(?:\.[0-9]+)?(?:[eE]\+?[0-9]{1,2})?)\s*([kKmMbBtT]?)")
_POWERS = {"": 0, "k": 3, "m": 6, "b": 9, "t": 12}


def parse_count(text: str) -> int:
    """A number of parameters such as 70e9, 70B or 1.3B.

    >>> parse_count("70e9"), parse_count("1.3B"), parse_count("7_000_000")
    (70000000000, 1300000000, 7000000)
    """
    found = _COUNT.fullmatch(text.strip())
    if found:
        count = Decimal(found[1].replace("_", "")).scaleb(_POWERS[found[2].lower()])
        if count >= 1 and count == int(count):
            return int(count)
    raise ConfigError(f"{text!r} is not a number of parameters: write it like 70e9, 70B or 1.3B.")


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """A training run and its window of k snapshots, taken every `nu` steps.

    >>> TrainingRun(params=7_000_000_000, gpus=64).num_nodes
    8
    """

    params: int
    gpus: int
    gpus_per_node: int = 8
    k: int = 6
    dtype: str = "float32"
    storage_dtype: str | None = None
    store: str = "host"
    sharding: str = "fsdp"
    nu: int | None = None
    step_seconds: float | None = None
    machine: Machine = field(default_factory=Machine)

    def __post_init__(self) -> None:
        for name in ("params", "gpus", "gpus_per_node", "k", "nu"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or value < 1):
                raise ConfigError(f"{name}={value}: give a whole number of at least 1.")
        if self.gpus % self.gpus_per_node:
            raise ConfigError(
                f"gpus={self.gpus} is not a multiple of gpus_per_node={self.gpus_per_node}. Give "
                "whole nodes, or change gpus_per_node (--gpus-per-node)."
            )
        one_of("dtype", self.dtype, tuple(_ITEMSIZE))
        one_of("store", self.store, _STORES)
        one_of("sharding", self.sharding, _SHARDINGS)
        if self.storage_dtype == "float32":
            relation = "as wide as" if self.dtype == "float32" else "wider than"
            raise ConfigError(
                f"storage_dtype=float32 is {relation} the weights ({self.dtype}) and saves "
                "nothing. Leave it out, or give bfloat16 or float16."
            )
        if self.storage_dtype is not None:
            one_of("storage_dtype", self.storage_dtype, ("bfloat16", "float16"))
        if self.step_seconds is not None and not 0 < self.step_seconds < float("inf"):
            raise ConfigError(f"step_seconds={self.step_seconds}: give a number greater than 0.")

    @property
    def num_nodes(self) -> int:
        """The number of nodes."""
        return self.gpus // self.gpus_per_node

    @property
    def values(self) -> int:
        """Parameters on one GPU: its shard, or all of them. Padding is ignored."""
        return -(-self.params // self.gpus) if self.sharding == "fsdp" else self.params

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights on one GPU."""
        return self.values * _ITEMSIZE[self.dtype]

    @property
    def stored_bytes(self) -> int:
        """Bytes of one snapshot of one GPU."""
        return self.values * _ITEMSIZE[self.storage_dtype or self.dtype]

    @property
    def interval_seconds(self) -> float | None:
        """The time between two snapshots, if known."""
        if self.nu is None or self.step_seconds is None:
            return None
        return self.nu * self.step_seconds


@dataclass(frozen=True)
class Sizes:
    """Bytes per GPU (or its process), per node and in total."""

    gpu: int
    node: int
    total: int

    @staticmethod
    def of(run: TrainingRun, gpu: int) -> "Sizes":
        """The sizes if every GPU has `gpu` bytes."""
        return Sizes(gpu, gpu * run.gpus_per_node, gpu * run.gpus)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What the window of a run costs."""

    run: TrainingRun
    snapshot: Sizes
    window: Sizes
    gpu_training: int  # weights, gradients, optimizer state: without averaging
    gpu_added: int  # while the averager exists
    gpu_swapped: int  # more, while the mean is swapped in: the raw weights, beyond idle staging
    host: Sizes  # while the averager exists
    host_result: Sizes  # more, for the result of average()
    disk: Sizes  # at most: the old window and the new file
    collect_seconds: float  # Python is blocked
    stream_seconds: float  # the copy on the training stream
    behind_seconds: float  # the copy to host or disk, in the background
    write_seconds: float  # the part of that spent writing files
    lock_seconds: float  # more, when the memory of a snapshot is first used
    num_locked: int  # how often that happens
    wait_seconds: float | None  # training waits this long per snapshot; None: unknown
    read_seconds: float  # swap the mean of all k in, and restore the weights
    checkpoint_plain: int  # weights and optimizer state, in total
    checkpoint_window: int  # more, if it includes the window
    checkpoint_seconds: float  # to write the window

    @property
    def gpu_peak(self) -> int:
        """GPU memory of training and averaging, before activations."""
        return self.gpu_training + self.gpu_added + self.gpu_swapped

    @property
    def gpu_left(self) -> int:
        """GPU memory left for activations and gathered layers; negative if it does not fit."""
        return int(self.run.machine.gpu_memory_gib * GIB) - self.gpu_peak

    @property
    def host_peak(self) -> int:
        """RAM per node while the mean is read."""
        return self.host.node + self.host_result.node

    @property
    def held_share(self) -> float | None:
        """The share of training time spent on snapshots, if ν and the step time are known."""
        interval = self.run.interval_seconds
        if interval is None or self.wait_seconds is None:
            return None
        held = self.collect_seconds + self.stream_seconds + self.wait_seconds
        return held / (interval + held)

    @property
    def saved_by_sharing(self) -> int:
        """RAM a node would save if one rank kept the window for all (not implemented)."""
        return self.window.node - self.window.gpu if self.run.sharding == "ddp" else 0

    @property
    def sliding_bytes(self) -> int:
        """What a sliding sum adds to each rank's window: float64 sums and one snapshot."""
        return 8 * self.run.values + self.run.stored_bytes


def cost_of(run: TrainingRun) -> Cost:
    """Estimate what the window of a run costs.

    >>> cost = cost_of(TrainingRun(params=70_000_000_000, gpus=512))
    >>> cost.snapshot.gpu, cost.window.node
    (546875000, 26250000000)
    """
    machine, snapshot, weights = run.machine, run.stored_bytes, run.weight_bytes
    window = run.k * snapshot
    on_disk, on_device = run.store == "disk", run.store == "device"
    staged = 0 if on_device else snapshot  # one buffer on the GPU, for any k

    carry = staged / (machine.pcie_gbs * 1e9)
    # All ranks of a node write to its disk at the same time.
    write = _disk_seconds(run, snapshot * run.gpus_per_node) if on_disk else 0.0
    fetch = 0.0 if on_device else window / (machine.pcie_gbs * 1e9)
    if on_disk:
        fetch += _disk_seconds(run, window * run.gpus_per_node)
    interval = run.interval_seconds
    locked = {"host": run.k, "disk": 1, "device": 0}[run.store]
    # Under DDP one rank saves for all; with shards, each rank saves its own.
    savers = run.gpus if run.sharding == "fsdp" else 1
    savers_per_node = min(savers, run.gpus_per_node)
    return Cost(
        run=run,
        snapshot=Sizes.of(run, snapshot),
        window=Sizes.of(run, window),
        gpu_training=round(machine.state_copies * weights),
        gpu_added=window if on_device else staged,
        gpu_swapped=weights - staged,
        host=Sizes.of(run, {"host": window, "disk": snapshot, "device": 0}[run.store]),
        host_result=Sizes.of(run, 0 if on_device else weights),
        disk=Sizes.of(run, window + snapshot if on_disk else 0),
        collect_seconds=machine.collect_ms / 1e3,
        stream_seconds=(weights + snapshot) / (machine.device_gbs * 1e9),
        behind_seconds=carry + write,
        write_seconds=write,
        lock_seconds=machine.lock_s_per_gb * snapshot / 1e9 if locked else 0.0,
        num_locked=locked,
        wait_seconds=None if interval is None else max(0.0, carry + write - interval),
        read_seconds=machine.read_ms / 1e3
        + fetch
        + run.k * run.values / (machine.mean_gvalues * 1e9),
        checkpoint_plain=round((machine.state_copies - 1) * weights) * savers,
        checkpoint_window=window * savers,
        checkpoint_seconds=_disk_seconds(run, window * savers_per_node),
    )


def _disk_seconds(run: TrainingRun, num_bytes: int) -> float:
    return num_bytes / (run.machine.disk_gbs * 1e9)
