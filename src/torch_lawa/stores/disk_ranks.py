"""One window over several processes: a folder for each rank, and what all of them still have.

Nothing is said between ranks while snapshots are written, so after a crash one may be ahead. How
far: a rank that has written snapshot i + 1 took part in the gradients before it, and so did every
other after its `collect` of i returned, which had waited until i - 1 was on disk. Hence every rank
keeps what it takes to go back by `SPARE` snapshots.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from torch_lawa.errors import StoreError
from torch_lawa.ranks.agreement import all_gather
from torch_lawa.stores.disk_manifest import MANIFEST, Manifest, Mark

__all__ = ["SPARE", "Agreement", "Ranks", "Report", "agree"]

SPARE = 2

_RANK_FOLDER = re.compile(r"rank-\d{5}-of-(\d{5})")


@dataclass(frozen=True)
class Report:
    """What one rank has on disk."""

    run: int
    began: int
    age: int
    held: tuple[Mark, ...]  # oldest first
    ends: frozenset[Mark]  # those with everything that the newest of a window needs

    @staticmethod
    def of(manifest: Manifest) -> "Report":
        """Of a rank with this manifest."""
        held = tuple(row.mark for row in manifest.rows)
        ends = frozenset(row.mark for row in manifest.rows if row.kept_file is not None)
        return Report(manifest.run, manifest.began, manifest.age, held, ends)


@dataclass(frozen=True)
class Agreement:
    """What every rank goes on with: the snapshots, and the number of the run to come."""

    snapshots: frozenset[Mark]
    run: int


@dataclass(frozen=True)
class Ranks:
    """This process among those that share a window."""

    rank: int
    size: int

    @staticmethod
    def now() -> "Ranks":
        """By torch.distributed, if it is initialised; else a process by itself."""
        dist = torch.distributed
        if dist.is_available() and dist.is_initialized():
            return Ranks(dist.get_rank(), dist.get_world_size())
        return Ranks(0, 1)

    def folder(self, root: Path) -> Path:
        """Where this rank keeps its files."""
        if self.size == 1:
            return root
        return root / f"rank-{self.rank:05d}-of-{self.size:05d}"

    def refuse_other_windows(self, root: Path) -> None:
        """A window of another number of ranks would be lost to this run without a word."""
        if not root.is_dir():
            return
        sizes = {1} if _holds_window(root) else set()
        for path in root.iterdir():
            match = _RANK_FOLDER.fullmatch(path.name)
            if match and int(match[1]) != self.size and _holds_window(path):
                sizes.add(int(match[1]))
        for size in sorted(sizes - {self.size}):
            raise StoreError(
                f"{root}: holds the window of {_processes(size)} and this run has "
                f"{_processes(self.size)}. Resume on as many, give this run another folder, or "
                "change their number by saving the averager with torch.distributed.checkpoint on "
                f"{_processes(size)} and loading it here into another folder."
            )

    def exchange(self, mine: Report | str) -> list[Report | str]:
        """What each rank has, or what is wrong there, by rank."""
        return [mine] if self.size == 1 else all_gather("the creation of a DiskStore", mine)


def agree(answers: Sequence[Report | str], root: Path) -> Agreement:
    """The newest window that every rank can have: only snapshots that all hold.

    Where some had begun anew (or not yet begun) and the others not, all begin anew. Where a rank
    answered with what is wrong, all raise.
    """
    for rank, answer in enumerate(answers):
        if isinstance(answer, str):
            raise StoreError(f"rank {rank} cannot take over its window: {answer}")
    reports = [answer for answer in answers if isinstance(answer, Report)]
    run = max(report.run for report in reports) + 1
    held = frozenset(reports[0].held).intersection(*(report.held for report in reports))
    ends = held.intersection(*(report.ends for report in reports))
    if ends:
        return Agreement(frozenset(mark for mark in held if mark <= max(ends)), run)
    latest = max(report.began for report in reports)
    if all(report.age <= SPARE for report in reports if report.began == latest):
        return Agreement(frozenset(), run)
    raise StoreError(
        f"{root}: the processes hold windows that have no end in common ({_summary(reports)}). Was "
        "a disk lost, or did one run ahead of the others? Restore its files, or remove the folder "
        "everywhere and begin a new window or load the averager from a checkpoint."
    )


def _summary(reports: Sequence[Report]) -> str:
    """What the rank that is furthest behind holds, and the one that is furthest ahead."""

    def newest(rank: int) -> int:
        return reports[rank].held[-1].index if reports[rank].held else -1

    ranks = range(len(reports))
    told = sorted({min(ranks, key=newest), max(ranks, key=newest)})
    lines = []
    for rank in told:
        steps = [mark.step for mark in reports[rank].held]
        lines.append(f"rank {rank}: {f'steps {steps[0]} to {steps[-1]}' if steps else 'none'}")
    return ", ".join(lines)


def _holds_window(folder: Path) -> bool:
    return (folder / MANIFEST).is_file() and any(folder.glob("window-*.safetensors"))


def _processes(size: int) -> str:
    return "one process" if size == 1 else f"{size} processes"
