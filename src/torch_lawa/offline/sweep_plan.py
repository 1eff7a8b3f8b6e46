"""The plan of a sweep: which windows of which checkpoints are averaged."""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch_lawa.checkpoints.find.discovery import (
    FoundCheckpoint,
    find_checkpoints,
    require_number,
    select,
)
from torch_lawa.checkpoints.formats.base import TensorSpec
from torch_lawa.checkpoints.storage.paths import LocalPath
from torch_lawa.coefficients import name_coefficients
from torch_lawa.errors import ConfigError
from torch_lawa.offline.options import DEFAULTS, AverageOptions
from torch_lawa.offline.plan import Input, plan_found
from torch_lawa.schedule import check_share, num_within
from torch_lawa.units import counted, few, format_bytes

__all__ = ["SweepPlan", "SweepWindow", "plan_sweep"]


@dataclass(frozen=True)
class SweepWindow:
    """k consecutive checkpoints of the run; k = 1 is a single checkpoint.

    With a `horizon` they are all within that last share of the steps up to the newest.
    """

    k: int
    end: int  # index of the newest among all checkpoints of the sweep
    step: int | None  # of the newest
    epoch: int | None
    horizon: float | None = None

    @property
    def positions(self) -> range:
        """The indices of its checkpoints, oldest first."""
        return range(self.end - self.k + 1, self.end + 1)

    @property
    def name(self) -> str:
        """The stem of its file name, unique in a sweep."""
        number = f"step-{self.step}" if self.step is not None else f"epoch-{self.epoch}"
        if self.horizon is not None:
            return f"{number}-horizon-{self.horizon!r}"
        return f"{number}-k-{self.k}"


@dataclass(frozen=True)
class SweepPlan:
    """Which windows of which checkpoints are averaged. `run_sweep` runs it."""

    found: tuple[FoundCheckpoint, ...]
    windows: tuple[SweepWindow, ...]
    options: AverageOptions
    tensors: Mapping[str, TensorSpec]  # of every result
    notes: tuple[str, ...]

    @property
    def coefficients(self) -> str:
        """The name of the coefficients."""
        return name_coefficients(self.options.rule)

    @property
    def result_bytes(self) -> int:
        """Bytes of one result."""
        return sum(spec.nbytes for spec in self.tensors.values())

    def __str__(self) -> str:
        ks = ", ".join(map(str, sorted({w.k for w in self.windows if w.horizon is None})))
        shares = ", ".join(
            f"{h:.6g}" for h in sorted({w.horizon for w in self.windows if w.horizon})
        )
        what = [f"k = {ks}"] * bool(ks) + [f"horizon = {shares}"] * bool(shares)
        ends = sorted({w.end for w in self.windows})
        first, newest = self.found[ends[0]].label, self.found[ends[-1]].label
        where = newest if len(ends) == 1 else f"{len(ends)} of them ({first} to {newest})"
        lines = [
            f"Sweep of {counted(len(self.found), 'checkpoint')} ({self.coefficients}): "
            f"{', '.join(what)}, ending at {where}.",
            f"Results: {counted(len(self.windows), 'file')}, "
            f"{format_bytes(self.result_bytes)} each.",
        ]
        return "\n".join([*lines, *(f"Note: {note}" for note in self.notes)])

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON values."""
        return {
            "checkpoints": [
                {"path": str(f.location), "step": f.step, "epoch": f.epoch} for f in self.found
            ],
            "windows": [
                {"k": w.k, "horizon": w.horizon, "step": w.step, "epoch": w.epoch}
                for w in self.windows
            ],
            "coefficients": self.coefficients,
            "result_bytes": self.result_bytes,
            "notes": list(self.notes),
        }


def plan_sweep(
    inputs: Input | Sequence[Input],
    ks: Sequence[int] = (),
    *,
    horizons: Sequence[float] = (),
    at: Sequence[int] | None = None,
    start: int | None = None,
    stop: int | None = None,
    every: int | None = None,
    options: AverageOptions = DEFAULTS,
) -> SweepPlan:
    """Plan windows of each length in `ks` that end at the steps `at` (default: every checkpoint).

    A window is planned where all of its k checkpoints exist. Each share of the steps in `horizons`
    gives windows, too, of all checkpoints within it, where these are at least two; a share without
    any window is left out with a note. Results are single safetensors files with the BatchNorm
    statistics of their newest checkpoint, so `layout`, `max_shard_size` and `buffers` of the
    options do not apply.
    """
    _check_arguments(ks, horizons, at, options)
    many = [inputs] if isinstance(inputs, str | os.PathLike) else list(inputs)
    discovery = find_checkpoints(many, key=options.key)
    chosen = select(discovery, start=start, stop=stop, every=every)
    if chosen.ordered_by == "given":
        raise ConfigError(
            f"{many[0]}: a sweep needs checkpoints with a step or epoch in their names or contents."
        )
    found, numbers = chosen.found, chosen.numbers
    for step in at or ():
        require_number(chosen.ordered_by, numbers, step)
    by_step = chosen.ordered_by == "step"
    windows = tuple(
        SweepWindow(k, end, f.step if by_step else None, f.epoch, share)
        for end, f in enumerate(found)
        if at is None or numbers[end] in at
        for k, share in (
            *((k, None) for k in sorted(map(int, ks)) if k <= end + 1),
            *((num_within(numbers[: end + 1], h), h) for h in sorted(set(horizons))),
        )
        if share is None or k > 1
    )
    empty = [h for h in horizons if not any(w.horizon == h for w in windows)]
    # A share has every checkpoint within it, whatever their spacing.
    notes = list((chosen if any(k > 1 for k in ks) else discovery).notes)
    if empty:
        ends = [end for end in range(len(found)) if at is None or numbers[end] in at]
        shares, why = ",".join(f"{share:g}" for share in empty), _too_short(numbers, ends)
        if not any(w.k > 1 for w in windows):
            raise ConfigError(f"--horizon {shares}: {why}.")
        notes.append(f"--horizon {shares} is left out: {why}.")
    too_long = [k for k in ks if not any(w.k == k and w.horizon is None for w in windows)]
    if too_long:
        most = len(found) if at is None else 1 + max(numbers.index(step) for step in at)
        raise ConfigError(
            f"--k {too_long[0]}, but the longest window has {most} of the {len(found)} checkpoints "
            f"that were found ({few(f.label for f in found)}). Use --k {most} or less."
        )
    probe = plan_found([found[windows[-1].end]], LocalPath("sweep.safetensors"), options)
    tensors = {t.written: t.target for t in probe.tensors}
    return SweepPlan(tuple(found), windows, options, tensors, tuple(notes))


def _check_arguments(
    ks: Sequence[int],
    horizons: Sequence[float],
    at: Sequence[int] | None,
    options: AverageOptions,
) -> None:
    """Refuse what is wrong whatever the run contains."""
    if not (ks or horizons):
        raise ConfigError(
            "give the windows of a sweep: lengths with --k or shares of the steps with --horizon."
        )
    if at is not None and not at:
        raise ConfigError("at=[]: give the steps at which windows end, or leave it out for all.")
    wrong = [k for k in ks if not hasattr(k, "__index__") or k < 1 or list(ks).count(k) > 1]
    if wrong:
        raise ConfigError(
            f"--k {','.join(map(str, wrong))}: give distinct whole numbers of at least 1, such as "
            "2,4,6."
        )
    for share in horizons:
        check_share("horizon", share)
    for name in ("layout", "max_shard_size", "buffers"):
        if getattr(options, name) != getattr(DEFAULTS, name):
            raise ConfigError(f"{name}={getattr(options, name)!r}: not supported by a sweep.")


def _too_short(numbers: Sequence[int], ends: Sequence[int]) -> str:
    """Why a share has no window, and the smallest share that has one; see `num_within`."""
    text = "fewer than two checkpoints are within this share of the steps"
    shares = [(1 + numbers[end] - numbers[end - 1]) / numbers[end] for end in ends if end]
    least = math.ceil(1000 * min(shares, default=1.0)) / 1000
    if least < 1:
        return f"{text}. Use {least:g} or more"
    return f"{text}. Use --k, or end the windows at a later step (--at)"
