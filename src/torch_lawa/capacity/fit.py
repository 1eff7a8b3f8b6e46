"""Whether a window fits on the hardware, why not, and which changes make it fit.

Only changes whose own estimate fits are suggested.
"""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from torch_lawa.capacity.estimate import Cost, TrainingRun, cost_of
from torch_lawa.capacity.machine import GIB
from torch_lawa.units import format_bytes, three_digits

__all__ = ["Fit", "check_fit", "format_seconds", "largest_k", "smallest_nu"]

_MOST_DOUBLINGS = 16


@dataclass(frozen=True)
class Problem:
    """What does not fit: the run itself, GPU memory, RAM, or the time between snapshots."""

    kind: Literal["run", "gpu", "host", "time"]
    text: str


@dataclass(frozen=True)
class Fit:
    """The problems of an estimate, and options that would solve them, if any were found."""

    problems: tuple[Problem, ...]
    advice: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Whether there are no problems."""
        return not self.problems


def check_fit(cost: Cost) -> Fit:
    """Check whether an estimate fits.

    >>> check_fit(cost_of(TrainingRun(params=70_000_000_000, gpus=512))).fits
    True
    >>> for problem in check_fit(cost_of(TrainingRun(params=70_000_000_000, gpus=8))).problems:
    ...     print(problem.kind)
    run
    """
    problems = tuple(_problems(cost))
    return Fit(problems, tuple(_advice(cost.run, problems)) if problems else ())


def _problems(cost: Cost) -> Iterator[Problem]:
    run, machine = cost.run, cost.run.machine
    gpu, ram = machine.gpu_memory_gib * GIB, machine.host_ram_gib * GIB
    if cost.gpu_training > gpu:
        # Then nothing else matters, and averaging is not the cause.
        yield Problem(
            "run",
            f"the run does not fit even without averaging: {machine.state_copies:g} copies of the "
            f"weights (weights, gradients, optimizer state) take "
            f"{format_bytes(cost.gpu_training)} per GPU, which has {format_bytes(gpu)}",
        )
        return
    if cost.gpu_left < 0:
        swapped = ""
        if cost.gpu_swapped:
            swapped = f", plus {format_bytes(cost.gpu_swapped)} while the mean is swapped in,"
        yield Problem(
            "gpu",
            f"GPU memory: training ({format_bytes(cost.gpu_training)}) and averaging "
            f"({format_bytes(cost.gpu_added)}){swapped} take {format_bytes(cost.gpu_peak)} per "
            f"GPU, which has {format_bytes(gpu)}",
        )
    if cost.host_peak > machine.host_share * ram:
        yield Problem(
            "host",
            f"RAM: {format_bytes(cost.host_peak)} per node while the mean is read, but averaging "
            f"may use only {format_bytes(machine.host_share * ram)} "
            f"({machine.host_share:.0%} of {machine.host_ram_gib:g} GiB)",
        )
    interval = run.interval_seconds
    if cost.wait_seconds and interval is not None:
        yield Problem(
            "time",
            f"time: copying a snapshot takes {format_seconds(cost.behind_seconds)}, but the next "
            f"is due after {format_seconds(interval)} (ν = {run.nu} steps of "
            f"{format_seconds(run.step_seconds or 0)}), so training would wait "
            f"{format_seconds(cost.wait_seconds)} per snapshot",
        )


def _advice(run: TrainingRun, problems: tuple[Problem, ...]) -> Iterator[str]:
    changes: dict[str, dict[str, Any]] = {}
    narrow = {"storage_dtype": "bfloat16"}
    if run.stored_bytes == 4 * run.values:
        changes["--storage-dtype bfloat16"] = narrow
    stores = [store for store in ("host", "disk", "device") if store != run.store]
    changes |= {f"--store {store}": {"store": store} for store in stores}
    helpful = [words for words, change in changes.items() if _fits(run, **change)]
    if not helpful and "--storage-dtype bfloat16" in changes:
        helpful = [
            f"--storage-dtype bfloat16 --store {store}"
            for store in stores
            if _fits(run, store=store, **narrow)
        ]
    yield from helpful
    nu = smallest_nu(run)
    if any(p.kind == "time" for p in problems) and nu is not None and _fits(run, nu=nu):
        yield f"--nu {nu} (or more)"
    k = largest_k(run)
    if k is not None and k >= 2:  # the mean of one snapshot is the snapshot
        yield f"--k {k}"
    if _fits(run, sharding="fsdp"):
        yield "--sharding fsdp"
    for doublings in range(1, _MOST_DOUBLINGS + 1):
        gpus = run.gpus << doublings
        if _fits(run, gpus=gpus):
            yield f"--gpus {gpus}"
            return


def largest_k(run: TrainingRun) -> int | None:
    """The largest k that fits; None if not even one snapshot does.

    >>> largest_k(TrainingRun(params=7_000_000_000, gpus=8))
    28
    """
    if not _fits(run, k=1):
        return None
    low, high = 1, 2
    while _fits(run, k=high):
        low, high = high, 2 * high
        if high > 1 << 20:  # a disk is taken as unlimited
            return low
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _fits(run, k=middle) else (low, middle)
    return low


def smallest_nu(run: TrainingRun) -> int | None:
    """The smallest ν for which training never waits; None without `step_seconds`.

    >>> smallest_nu(TrainingRun(params=70_000_000_000, gpus=64, store="disk", step_seconds=2.0))
    4
    """
    if run.step_seconds is None:
        return None
    return max(1, math.ceil(cost_of(run).behind_seconds / run.step_seconds))


def format_seconds(seconds: float) -> str:
    """A duration in a suitable unit.

    >>> format_seconds(0.00037), format_seconds(7.12), format_seconds(5400)
    ('0.37 ms', '7.12 s', '1.5 h')
    """
    for size, unit in ((3600.0, "h"), (60.0, "min"), (1.0, "s")):
        if seconds >= size * (2 if unit == "min" else 1):
            return f"{three_digits(seconds / size)} {unit}"
    if 0 < seconds < 1e-4:
        return "< 0.1 ms"  # below the cost of a kernel launch
    return f"{seconds * 1e3:.2g} ms" if seconds < 0.0995 else f"{seconds * 1e3:.0f} ms"


def _fits(run: TrainingRun, **change: Any) -> bool:
    return not any(_problems(cost_of(dataclasses.replace(run, **change))))
