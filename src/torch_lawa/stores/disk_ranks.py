"""One window on several ranks: a folder for each rank, and the snapshots that all of them have.

Ranks do not communicate while they write snapshots, so after a crash one may be ahead. A rank that
has written snapshot i + 1 took part in the all-reduce before it. So did every other rank, after its
`collect` of snapshot i had returned, which waits until i - 1 is on disk. Hence a rank is at most
`SPARE` snapshots ahead, and every rank keeps what it needs to go back that far.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch_lawa.errors import StoreError
from torch_lawa.ranks.agreement import all_gather
from torch_lawa.stores.disk_manifest import MANIFEST, Manifest, Mark, is_snapshot_file

__all__ = ["SPARE", "RankContents", "Ranks", "agree"]

SPARE = 2

_RANK_FOLDER = re.compile(r"rank-\d{5}-of-(\d{5})")


@dataclass(frozen=True)
class RankContents:
    """What one rank has on disk."""

    run: int
    began: int
    age: int
    held: tuple[Mark, ...]  # oldest first
    ends: frozenset[Mark]  # those that have everything that the newest of a window needs

    @staticmethod
    def of(manifest: Manifest) -> "RankContents":
        """The report of a rank with this manifest."""
        held = tuple(row.mark for row in manifest.rows)
        ends = frozenset(row.mark for row in manifest.rows if row.kept_file is not None)
        return RankContents(manifest.run, manifest.began, manifest.age, held, ends)


@dataclass(frozen=True)
class Agreement:
    """What every rank resumes with: the snapshots, and the number of the run that starts."""

    snapshots: frozenset[Mark]
    run: int


@dataclass(frozen=True)
class Ranks:
    """One rank of those that share a window."""

    rank: int
    size: int

    def folder(self, root: Path) -> Path:
        """The folder of this rank's files."""
        if self.size == 1:
            return root
        return root / f"rank-{self.rank:05d}-of-{self.size:05d}"

    def refuse_other_windows(self, root: Path) -> None:
        """Refuse a window of another world size, which this run would silently ignore."""
        if not root.is_dir():
            return
        sizes = {1} if _holds_window(root) else set()
        for path in root.iterdir():
            match = _RANK_FOLDER.fullmatch(path.name)
            if match and int(match[1]) != self.size and _holds_window(path):
                sizes.add(int(match[1]))
        for size in sorted(sizes - {self.size}):
            raise StoreError(
                f"{root}: holds the window of {_processes(size)}, but this run has "
                f"{_processes(self.size)}. Resume with {_processes(size)}, use another folder, or "
                "change the world size: save the averager with torch.distributed.checkpoint on "
                f"{_processes(size)} and load it here into another folder."
            )

    def exchange(self, mine: RankContents | str) -> list[RankContents | str]:
        """The report of each rank, or its error, by rank."""
        return [mine] if self.size == 1 else all_gather("the creation of a DiskStore", mine)


def agree(answers: Sequence[RankContents | str], root: Path) -> Agreement:
    """The newest window that every rank can have: only snapshots that all of them hold.

    If some ranks had reset their window (or had no snapshot yet), all of them start empty. If one
    answers with an error, all raise.
    """
    for rank, answer in enumerate(answers):
        if isinstance(answer, str):
            raise StoreError(f"rank {rank} cannot resume its window: {answer}")
    reports = [answer for answer in answers if isinstance(answer, RankContents)]
    run = max(report.run for report in reports) + 1
    held = frozenset(reports[0].held).intersection(*(report.held for report in reports))
    ends = held.intersection(*(report.ends for report in reports))
    if ends:
        return Agreement(frozenset(mark for mark in held if mark <= max(ends)), run)
    latest = max(report.began for report in reports)
    if all(report.age <= SPARE for report in reports if report.began == latest):
        return Agreement(frozenset(), run)
    raise StoreError(
        f"{root}: the windows of the ranks have no newest snapshot in common "
        f"({_summary(reports)}). Was a disk lost, or did one rank run ahead of the others? Restore "
        "its files, or remove the folder on all ranks and start a new window or load the averager "
        "from a checkpoint."
    )


def _summary(reports: Sequence[RankContents]) -> str:
    """What the rank furthest behind holds, and the one furthest ahead."""

    def newest(rank: int) -> int:
        return reports[rank].held[-1].index if reports[rank].held else -1

    ranks = range(len(reports))
    shown = sorted({min(ranks, key=newest), max(ranks, key=newest)})
    lines = []
    for rank in shown:
        steps = [mark.step for mark in reports[rank].held]
        lines.append(f"rank {rank}: {f'steps {steps[0]} to {steps[-1]}' if steps else 'none'}")
    return ", ".join(lines)


def _holds_window(folder: Path) -> bool:
    return (folder / MANIFEST).is_file() and any(
        is_snapshot_file(path.name) for path in folder.iterdir()
    )


def _processes(size: int) -> str:
    return "one process" if size == 1 else f"{size} processes"
