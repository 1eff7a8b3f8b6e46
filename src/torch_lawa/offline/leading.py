"""Rank 0 of a team: it gathers the others, gives orders, collects replies and says how it ended."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch_lawa.checkpoints.storage.atomic import remove
from torch_lawa.errors import OutputError
from torch_lawa.offline.engine import Meter
from torch_lawa.offline.meeting import Meeting, clear_meetings, new_meeting
from torch_lawa.offline.peers import Peer
from torch_lawa.offline.team import PATIENCE, Team

__all__ = ["Leader", "leading"]

_FAREWELL = 10.0  # seconds for the others to hear how it ended
_PAUSE = 0.05


class Leader(Peer):
    """Speaks with all the others."""

    def __init__(self, team: Team, meeting: Meeting, meter: Meter, target: Path) -> None:
        super().__init__(team, meeting, meter)
        self._target = target
        self._joined: dict[int, str] = {}
        self._began = time.monotonic()
        self._num_orders = 0

    @property
    def others(self) -> range:
        """Every rank but this one."""
        return range(1, self.team.size)

    def gather(self) -> None:
        """Wait until every process has come."""

        def all_here(_: set[str]) -> bool | None:
            missing = [rank for rank in self.others if rank not in self._joined]
            if missing and time.monotonic() - self._began > self.team.patience:
                few = ", ".join(map(str, missing[:8])) + (", …" if len(missing) > 8 else "")
                self.fail(
                    f"rank {few} of {self.team.size} did not come to {self._target} within "
                    f"{self.team.patience:g} s ({PATIENCE}). Give every process the same OUT, on a "
                    "file system that all of them see; for one process alone unset WORLD_SIZE."
                )
                self.lost.update(missing)
                self.check()
            return None if missing else True

        self.wait(all_here)

    def order(self, order: dict[str, Any]) -> None:
        """Give every process the same order."""
        with self._lock:
            self.awaited = set(self.others)
            self._num_orders += 1
        self.meeting.post(f"order.{self._num_orders}", order)

    def collect(self) -> list[Any]:
        """The replies of the others to the last order, by rank, once all are there."""
        wanted = [f"reply.{self._num_orders}.{rank}" for rank in self.others]
        self.wait(lambda names: True if names.issuperset(wanted) else None)
        return [self.meeting.read(name) for name in wanted]

    def hear(self, words: list[str]) -> None:
        """Welcome who comes; who has replied may be silent."""
        super().hear(words)
        if words[0] == "hello" and 0 < (rank := int(words[1])) < self.team.size:
            if rank not in self._joined:
                with contextlib.suppress(OSError):  # else at the next look
                    self.meeting.say("welcome", rank, words[2])
                    self._joined[rank] = words[2]
            elif self._joined[rank] != words[2]:
                self.fail(
                    f"two processes say that they are rank {rank} of the job that writes "
                    f"{self._target}. Are there two such jobs?"
                )
        elif words[0] == "reply" and int(words[1]) == self._num_orders:
            self.awaited.discard(int(words[2]))

    def heard_of(self, rank: int, num_bytes: int) -> None:
        """What others have done is progress, too."""
        self.meter.add(num_bytes)

    def gone(self) -> str:
        """Only another job could have removed it."""
        return f"{self.meeting.folder} was removed. Does another job write {self._target}, too?"

    def say_farewell(self) -> None:
        """Let the others hear how it ended; those that cannot are not waited for."""
        deadline = time.monotonic() + min(_FAREWELL, self.team.patience)
        while time.monotonic() < deadline:
            left = {int(n.split(".")[1]) for n in self.look() if n.startswith("left.")}
            if left | self.lost >= set(self.others) or self.meeting.names() is None:
                return
            time.sleep(_PAUSE)


@contextlib.contextmanager
def leading(team: Team, target: Path, meter: Meter) -> Iterator[Leader]:
    """Meet the others beside `target`; the result is there for them when the block ends well."""
    made = [folder for folder in target.parents if not folder.exists()]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        meeting = new_meeting(target, team)
    except OSError as error:
        raise OutputError(f"{target}: cannot be written ({error}).") from None
    leader = Leader(team, meeting, meter, target)
    try:
        leader.start()
        try:
            yield leader
        except BaseException as error:
            leader.confess(error)
            leader.say_farewell()
            raise
        with contextlib.suppress(OSError):
            meeting.say("finished")
        leader.say_farewell()
    finally:
        leader.end()
        with contextlib.suppress(OSError):
            remove(meeting.folder)
        clear_meetings(target)  # again, where a late word came into the folder meanwhile
        for folder in made:  # unless there is a result in it
            with contextlib.suppress(OSError):
                folder.rmdir()
