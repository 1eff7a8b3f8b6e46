"""Which checkpoints of a live run are taken into the window, and when.

They are taken in order, none while it is still being written and none before an older one. A run
may go back: what is written after a checkpoint of a greater step leaves that one on an abandoned
branch.
"""

import contextlib
import threading
from collections.abc import Callable
from dataclasses import replace

from torch_lawa.checkpoints.find.select import FoundCheckpoint
from torch_lawa.checkpoints.find.step_names import few
from torch_lawa.errors import ConfigError, FormatError, LawaError
from torch_lawa.offline.live_run import LiveRun
from torch_lawa.offline.snapshots import Source, inspect, signature_of
from torch_lawa.offline.window_folder import Snapshot, WindowFolder

__all__ = ["Intake"]


class Intake:
    """Looks at the run, remembers since when each checkpoint is unchanged, takes what is due.

    `each`: every checkpoint passes through the window. Otherwise just the newest count, where many
    landed at once.
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
        self._observed: dict[int, tuple[str, float]] = {}  # signature, and since when
        self._broken: dict[int, str] = {}
        self._by = ""
        self._newest = -1  # of the window, before this look

    @property
    def settling(self) -> bool:
        """Whether something is wanted that has still to prove that it is complete."""
        return any(not self._is_settled(n) for n in self._wanted(self._eligible()))

    def look(self) -> None:
        """See what is there."""
        self._newest = max((s.number for s in self._window.state.snapshots), default=-1)
        self._drop_changed()
        discovery = self._run.discover()
        by = self._window.state.by
        if by not in ("", discovery.ordered_by):
            raise FormatError(
                f"{self._run.text}: its checkpoints were ordered by {by}, and now just by "
                f"{discovery.ordered_by}; the window cannot go on."
            )
        if not self._by:  # the first look; what is left out later on is mostly half-written
            for note in discovery.notes:
                self._say(f"note: {note}")
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
        """Take the next that is due; False where there is none (yet)."""
        eligible = self._eligible()
        blocking = next((n for n in self._wanted(eligible) if not self._is_settled(n)), None)
        wanted = self._wanted([n for n in eligible if blocking is None or n < blocking])
        return bool(wanted) and self._is_settled(wanted[0]) and self._judge(wanted[0])

    def _is_settled(self, number: int) -> bool:
        return self._clock() - self._observed[number][1] >= self._settle

    def _eligible(self) -> list[int]:
        """What may be taken: not what is too old, of an abandoned branch, or broken."""
        state = self._window.state
        ruled_out = (state.passed, state.abandoned, self._broken)
        return sorted(
            number
            for number, (signature, _) in self._observed.items()
            if all(known.get(number) != signature for known in ruled_out)
        )

    def _wanted(self, eligible: list[int]) -> list[int]:
        """What of it is to be taken, in order."""
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
                # Lower, and not known although the window was full: the run may have gone back.
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
                f"{s.label}: {self._window.folder / s.folder} changed after it was taken, as when "
                f"{s.source} is written in place; dropped from the window"
            )

    def _judge(self, number: int) -> bool:
        """Open a checkpoint and find its place in the window, if any; False: look again first."""
        found, signature = self._found[number], self._observed[number][0]
        try:
            source = inspect(found, signature, self._run.key)
        except (LawaError, PermissionError) as error:
            if isinstance(error, ConfigError) and not found.location.local:
                raise  # a server's refusal says nothing about the file
            self._broken[number] = signature
            self._say(f"{found.label}: skipped, as it cannot be read: {error}")
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
                f"{found.label}: written after {few(labels)}: the run went back, so they are no "
                "longer counted"
            )
        if member is None or rewritten:
            notes = ["written again"] if rewritten else []
            notes += ["copied: it cannot be linked from here"] if taken.copied else []
            count = f"{len(self._window.state.snapshots)} of {self._k}"
            self._say(f"{found.label}: taken ({', '.join([count, *notes])})")
        return True

    def _stranded(self, source: Source, number: int) -> list[int]:
        """What was never taken and lies on the branch that the run went back from."""
        taken = [s.number for s in self._window.state.snapshots]
        found = []
        for n in self._eligible():
            if n <= number or n in taken:
                continue
            with contextlib.suppress(LawaError, OSError):
                other = inspect(self._found[n], "", self._run.key).written
                if other is not None and source.written is not None and other < source.written:
                    found.append(n)
        return found

    def _admit(
        self,
        taken: Snapshot,
        others: list[Snapshot],
        left: list[Snapshot],
        stranded: list[int],
        rewritten: bool,
    ) -> None:
        state = self._window.state
        ordered = sorted([*others, taken], key=lambda s: s.number)
        snapshots = tuple(ordered[-self._k :])
        # Where the run went back, what lies before is the trunk of the new branch.
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


def _leaves(source: Source, number: int, member: Snapshot | None, other: Snapshot) -> bool:
    """Whether a checkpoint leaves `other` on a branch that the run has abandoned."""
    if other.number <= number or (member is not None and member.weights == source.stamps):
        return False
    if source.written is None or other.written is None:
        return member is not None  # written again, so what followed the first is void
    return source.written > other.written
