"""The difference of two checkpoints, as a value that can be printed."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch_lawa.checkpoints.formats.base import TensorSpec, TrainingProgress
from torch_lawa.checkpoints.storage.paths import Location
from torch_lawa.mean.dtypes import DTYPES, averageable
from torch_lawa.offline.inspect.distances import Sums
from torch_lawa.offline.inspect.text import aligned, labelled, plain, wrapped
from torch_lawa.units import counted, few

__all__ = ["Difference", "Side", "TensorDifference"]

_WORST = 10


@dataclass(frozen=True)
class Side:
    """One of the two checkpoints, and what only this one contains."""

    location: Location
    format: str
    progress: TrainingProgress
    only: tuple[str, ...]  # names that are not in the other
    tied: tuple[tuple[str, ...], ...]  # names that are tied here but not there

    def __str__(self) -> str:
        return f"{plain(str(self.location))} ({', '.join([*self.progress.words, self.format])})"


@dataclass(frozen=True)
class TensorDifference:
    """A tensor that both contain in the same shape."""

    name: str
    a: TensorSpec
    b: TensorSpec
    sums: Sums

    @property
    def equal(self) -> bool:
        """Whether both are the same bit for bit."""
        return self.a.dtype == self.b.dtype and not self.sums.num_differing

    @property
    def measured(self) -> bool:
        """Whether its values can be subtracted, not only tested for equality."""
        return DTYPES[self.a.dtype].kind != "opaque"

    @property
    def severity(self) -> tuple[float, float]:
        """What differing tensors are sorted by: relative distance, then largest difference."""
        relative = self.sums.relative if self.measured else None
        return (float("inf") if relative is None else relative, self.sums.largest)

    def to_json(self) -> dict[str, Any]:
        """The same as JSON values."""
        return {
            "name": self.name,
            "shape": list(self.a.shape),
            "dtype_a": self.a.dtype,
            "dtype_b": self.b.dtype,
            "num_values": self.a.numel,
            "num_differing": self.sums.num_differing,
            "max_abs": _finite(self.sums.largest) if self.measured else None,
            "relative_l2": self.sums.relative if self.measured else None,
            "nan": list(self.sums.nan),
            "inf": list(self.sums.inf),
        }


@dataclass(frozen=True)
class Difference:
    """How checkpoints `a` and `b` differ; distances are relative to `a`."""

    a: Side
    b: Side
    compared: tuple[TensorDifference, ...]
    unlike: dict[str, tuple[TensorSpec, TensorSpec]]  # shapes or dtypes that are not comparable

    @cached_property
    def differing(self) -> tuple[TensorDifference, ...]:
        """Tensors with different values, largest difference first."""
        found = [t for t in self.compared if t.sums.num_differing]
        return tuple(sorted(found, key=lambda t: t.severity, reverse=True))

    @cached_property
    def overall(self) -> Sums:
        """The sums over all floating-point tensors, as one vector."""
        return Sums.total([t.sums for t in self.compared if averageable(t.a.dtype)])

    @property
    def identical(self) -> bool:
        """Whether all tensors, names and ties are the same."""
        sides = any((side.only or side.tied) for side in (self.a, self.b))
        return not sides and not self.unlike and all(t.equal for t in self.compared)

    def describe(self, *, worst: int | None = _WORST) -> str:
        """The difference in words, with the `worst` tensors that differ, or all of them."""
        lines = [f"A  {self.a}", f"B  {self.b}"]
        for name, side in ("A", self.a), ("B", self.b):
            if side.only:
                text = few(side.only, limit=worst or len(side.only))
                lines += labelled(f"Only {name}", wrapped(f"{len(side.only):,}: {text}"))
            ties = [" = ".join(tie) for tie in side.tied]
            lines += _listed(f"Tied in {name}", ties, worst)
        pairs = [f"{name}: {a} in A, {b} in B" for name, (a, b) in self.unlike.items()]
        lines += _listed("Unlike", pairs, worst)
        lines += self._counts()
        if self.identical:
            return "\n".join([*lines, "Identical, bit for bit."])
        shown = self.differing[:worst]
        if shown:
            more = len(self.differing) - len(shown)
            rest = f", {more} more with --tensors" if more else ""
            lines += [f"Tensors that differ, largest difference first{rest}:", *_table(shown)]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.describe()

    def to_json(self) -> dict[str, Any]:
        """The same as JSON values."""
        return {
            "kind": "difference",
            "a": str(self.a.location),
            "b": str(self.b.location),
            "identical": self.identical,
            "only_in_a": list(self.a.only),
            "only_in_b": list(self.b.only),
            "tied_in_a_only": [list(tie) for tie in self.a.tied],
            "tied_in_b_only": [list(tie) for tie in self.b.tied],
            "unlike": {name: [str(a), str(b)] for name, (a, b) in self.unlike.items()},
            "num_compared": len(self.compared),
            "num_equal": sum(t.equal for t in self.compared),
            "num_differing": len(self.differing),
            "relative_l2": self.overall.relative,
            "cosine": self.overall.cosine,
            "max_abs": _finite(self.overall.largest),
            "nan": list(self.overall.nan),
            "inf": list(self.overall.inf),
            "tensors": [t.to_json() for t in self.differing],
        }

    def _counts(self) -> list[str]:
        num_equal = sum(t.equal for t in self.compared)
        values = sum(t.a.numel for t in self.compared)
        lines = labelled(
            "Compared", [f"{counted(len(self.compared), 'tensor')}, {counted(values, 'value')}"]
        )
        lines += labelled("Equal", [f"{counted(num_equal, 'tensor')}, bit for bit"])
        pairs = Counter((t.a.dtype, t.b.dtype) for t in self.compared if t.a.dtype != t.b.dtype)
        for (a, b), n in pairs.items():
            lines += labelled(
                "Dtypes", [f"{n:,} tensors are {a} in A, {b} in B: compared by value"]
            )
        if self.differing:
            changed = sum(t.sums.num_differing for t in self.differing)
            lines += labelled(
                "Different",
                [f"{counted(len(self.differing), 'tensor')}, in {counted(changed, 'value')}"],
            )
        overall = self.overall
        if overall.dd:
            rows = [
                ("|a-b| / |a|", _number(overall.relative), "relative L2 distance"),
                ("cosine", _cosine(overall.cosine), "similarity"),
            ]
            lines += labelled("Overall", aligned(rows))
        for at, (nan, inf) in enumerate(zip(overall.nan, overall.inf, strict=True)):
            if nan or inf:
                where = [t.name for t in self.compared if t.sums.nan[at] or t.sums.inf[at]]
                text = f"{nan:,} NaN and {inf:,} Inf, not part of distances: {few(where, 3)}"
                lines += labelled(f"In {'AB'[at]}", wrapped(text))
        return lines


def _listed(label: str, texts: Sequence[str], limit: int | None) -> list[str]:
    lines = [line for text in texts[:limit] for line in labelled(label, wrapped(text))]
    more = len(texts) - len(texts[:limit])
    return lines + labelled(label, [f"{more:,} more with --tensors"] if more else [])


def _table(tensors: Sequence[TensorDifference]) -> list[str]:
    rows = [("differ", "of", "max |a-b|", "|a-b|/|a|", "name")]
    for t in tensors:
        largest = _number(t.sums.largest) if t.measured else "-"
        relative = _number(t.sums.relative) if t.measured else "-"
        rows.append(
            (f"{t.sums.num_differing:,}", f"{t.a.numel:,}", largest, relative, plain(t.name))
        )
    return [f"  {line}" for line in aligned(rows, right={0, 1, 2, 3})]


def _finite(value: float) -> float | None:
    """None for an infinite difference, which JSON cannot express."""
    return value if math.isfinite(value) else None


def _number(value: float | None) -> str:
    if value is None:
        return "-"  # relative to zero
    return f"{value:,}" if isinstance(value, int) or not value else f"{value:.2e}"


def _cosine(value: float | None) -> str:
    return "-" if value is None else f"{value:.8g}"
