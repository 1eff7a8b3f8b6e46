"""Which checkpoints of a live run are taken into the window, and when.

They are taken in order of their steps, each once it is complete. A run may go back to an earlier
step: a checkpoint that is written after one with a greater step leaves that one on an abandoned
branch, and it no longer counts.
"""

import contextlib
import threading
from collections.abc import Callable
from dataclasses import replace

from torch_lawa.checkpoints.find.discovery import FoundCheckpoint
from torch_lawa.errors import ConfigError, FormatError, LawaError
from torch_lawa.offline.watch.checkpoint_files import LiveCheckpoint, open_live, signature_of
from torch_lawa.offline.watch.live_run import LiveRun
from torch_lawa.offline.watch.window_folder import WindowFolder
from torch_lawa.offline.watch.window_manifest import KeptCheckpoint
from torch_lawa.units import few

__all__ = ["Admission"]


class Admission:
    """Polls the run, tracks since when each checkpoint is unchanged, and takes those that are due.

    With `each`, every checkpoint passes through the window; otherwise, if many appear at once, only
    the newest k are taken.
    """

    def __init__(
        self,
        run: LiveRun,
        window: WindowFolder,
        *,
        k: int,
        each: bool,
        settle: float,
        say: Callable[[str], None],
        stop: threading.Event,
        clock: Callable[[], float],
    ) -> None:
        self._run, self._window, self._k, self._each = run, window, k, each
        self._settle, self._say, self._stop, self._clock = settle, say, stop, clock
        self._found: dict[int, FoundCheckpoint] = {}
        self._observed: dict[int, tuple[str, float]] = {}  # signature, and when it was first seen
        self._broken: dict[int, str] = {}
        self._by = ""
        self._newest = -1  # number of the newest in the window before this poll

    @property
    def settling(self) -> bool:
        """Whether a checkpoint is due that may still be incomplete."""
        return any(not self._is_settled(n) for n in self._wanted(self._eligible()))

    def poll(self) -> None:
        """List the checkpoints that exist now."""
        self._newest = max((s.number for s in self._window.state.snapshots), default=-1)
        self._drop_changed()
        discovery = self._run.find_checkpoints()
        by = self._window.state.by
        if by not in ("", discovery.ordered_by):
            raise FormatError(
                f"{self._run.text}: the checkpoints were ordered by {by}, and now only by "
                f"{discovery.ordered_by}, so the window cannot be continued. Put the {by} into all "
                f"names again, or remove {self._window.folder} to begin a new window."
            )
        if not self._by:  # only the first time: later, files left out are mostly incomplete
            for note in discovery.notes:
                self._say(f"Note: {note}")
        self._by = discovery.ordered_by
        self._found = dict(zip(discovery.numbers, discovery.found, strict=True))
        now, before, self._observed = self._clock(), self._observed, {}
        for number, found in self._found.items():
            try:
                signature = signature_of(found.location)
            except OSError:  # deleted meanwhile
                continue
            known = before.get(number, ("", now))
            self._observed[number] = (signature, known[1] if known[0] == signature else now)

    def take_next(self) -> bool:
        """Take the next checkpoint that is due; False if there is none yet."""
        eligible = self._eligible()
        blocking = next((n for n in self._wanted(eligible) if not self._is_settled(n)), None)
        wanted = self._wanted([n for n in eligible if blocking is None or n < blocking])
        return bool(wanted) and self._is_settled(wanted[0]) and self._consider(wanted[0])

    def _is_settled(self, number: int) -> bool:
        return self._clock() - self._observed[number][1] >= self._settle

    def _eligible(self) -> list[int]:
        """Checkpoints that may be taken: not too old, on an abandoned branch or unreadable."""
        state = self._window.state
        ruled_out = (state.passed, state.abandoned, self._broken)
        return sorted(
            number
            for number, (signature, _) in self._observed.items()
            if all(known.get(number) != signature for known in ruled_out)
        )

    def _wanted(self, eligible: list[int]) -> list[int]:
        """Those of them to be taken, in order."""
        state = self._window.state
        members = {s.number: s.signature for s in state.snapshots}
        newest = max(members, default=-1)
        latest = sorted({*members, *eligible})[-self._k :]
        return [
            n
            for n in eligible
            if members.get(n) != self._observed[n][0]
            and (
                n in latest
                # Lower, and new although the window was full: the run may have gone back.
                or (n < self._newest and state.filled)
                or (n > newest >= 0 and self._each)
            )
        ]

    def _drop_changed(self) -> None:
        state, changed = self._window.state, self._window.changed()
        if not changed:
            return
        left_at = max(state.left_at, *(s.number for s in changed))
        kept = tuple(s for s in state.snapshots if s not in changed)
        self._window.commit(replace(state, snapshots=kept, left_at=left_at))
        for s in changed:
            self._say(
                f"{s.label}: dropped from the window: {self._window.folder / s.folder} changed "
                f"after it was taken (was {s.source} written in location?)"
            )

    def _consider(self, number: int) -> bool:
        """Open a checkpoint and take it if it belongs in the window; False: poll again first."""
        found, signature = self._found[number], self._observed[number][0]
        try:
            source = open_live(found, signature, self._run.key)
        except (LawaError, PermissionError) as error:
            if isinstance(error, ConfigError):
                raise  # an error of the server, or a missing package, says nothing about the file
            self._broken[number] = signature
            self._say(f"{found.label}: skipped, because it is not readable: {error}")
            return True
        state = self._window.state
        member = next((s for s in state.snapshots if s.number == number), None)
        rewritten = member is not None and member.weights != source.stamps
        left = [s for s in state.snapshots if _leaves(source, number, member, s)]
        others = [s for s in state.snapshots if s is not member and s not in left]
        if member is None and len(others) >= self._k and number < others[0].number:
            self._window.commit(replace(state, passed={**state.passed, number: signature}))
            return True
        taken = self._window.take(
            source, number, self._by, key=self._run.key, stopped=self._stop.is_set
        )
        if taken is None:
            return False
        went_back = bool(left) or rewritten or number <= state.left_at
        stranded = self._stranded(source, number) if went_back else []
        self._admit(taken, others, left, stranded, rewritten)
        labels = [*(s.label for s in left), *(self._found[n].label for n in stranded)]
        if labels:
            self._say(
                f"{found.label}: written after {few(labels)}: the run went back to an earlier "
                "step, so they no longer count"
            )
        if member is None or rewritten:
            notes = ["rewritten"] if rewritten else []
            notes += ["copied, not linked"] if taken.copied else []
            count = f"{len(self._window.state.snapshots)} of {self._k}"
            self._say(f"{found.label}: added ({', '.join([count, *notes])})")
        return True

    def _stranded(self, source: LiveCheckpoint, number: int) -> list[int]:
        """Checkpoints on the abandoned branch that were never taken."""
        taken = [s.number for s in self._window.state.snapshots]
        found = []
        for n in self._eligible():
            if n <= number or n in taken:
                continue
            with contextlib.suppress(LawaError, OSError):
                other = open_live(self._found[n], "", self._run.key).written
                if other is not None and source.written is not None and other < source.written:
                    found.append(n)
        return found

    def _admit(
        self,
        taken: KeptCheckpoint,
        others: list[KeptCheckpoint],
        left: list[KeptCheckpoint],
        stranded: list[int],
        rewritten: bool,
    ) -> None:
        state = self._window.state
        ordered = sorted([*others, taken], key=lambda s: s.number)
        snapshots = tuple(ordered[-self._k :])
        # If the run went back, earlier checkpoints belong to the new branch too.
        passed = {
            n: signature
            for n, signature in state.passed.items()
            if n in self._observed and not (left and n < taken.number)
        }
        filled = len(snapshots) == self._k
        if filled:
            lower = [n for n in self._observed if n < snapshots[0].number]
            passed |= {n: self._observed[n][0] for n in lower}
        abandoned = {**state.abandoned, **{s.number: s.signature for s in left}}
        abandoned |= {n: self._observed[n][0] for n in stranded}
        outdated = [*(s.number for s in left), *([taken.number] if rewritten else [])]
        self._window.commit(
            replace(
                state,
                snapshots=snapshots,
                by=self._by,
                filled=filled,
                passed=passed,
                abandoned=abandoned,
                left_at=max([state.left_at, *outdated]),
            )
        )


def _leaves(
    source: LiveCheckpoint, number: int, member: KeptCheckpoint | None, other: KeptCheckpoint
) -> bool:
    """Whether a checkpoint leaves `other` on an abandoned branch."""
    if other.number <= number or (member is not None and member.weights == source.stamps):
        return False
    if source.written is None or other.written is None:
        return member is not None  # it was rewritten, so what followed it is outdated
    return source.written > other.written
