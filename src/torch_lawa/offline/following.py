"""Every rank of a team but 0: it finds the leader, does what it is told, and waits for the end."""

import contextlib
import secrets
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from torch_lawa.checkpoints.formats.registry import open_checkpoint
from torch_lawa.checkpoints.storage.paths import parse_location
from torch_lawa.errors import OutputError
from torch_lawa.offline.digests import hash_files
from torch_lawa.offline.engine import Meter, Stopped, default_threads, run
from torch_lawa.offline.filling import Filling, check_same
from torch_lawa.offline.meeting import Meeting, find_meetings
from torch_lawa.offline.peers import Peer
from torch_lawa.offline.team import PATIENCE, Team
from torch_lawa.offline.writing import SafetensorsSink

__all__ = ["follow"]

_PAUSE, _PAUSE_EACH = 0.05, 0.002  # seconds between two looks, at least and for each process


def follow(team: Team, target: Path, *, threads: int | None = None, meter: Meter) -> None:
    """Make this process's share of what rank 0 writes to `target`; returns when it is there."""
    follower = Follower(team, _join(team, target, meter), meter)
    try:
        follower.start()
        with follower.answering():
            for order in follower.orders():
                act = _digest if order["act"] == "digest" else _fill
                follower.reply(act(order, follower, threads))
    except BaseException as error:
        follower.confess(error)
        raise
    finally:
        follower.end()
        with contextlib.suppress(OSError):
            follower.meeting.say("left", team.rank)


class Follower(Peer):
    """Listens to rank 0."""

    def __init__(self, team: Team, meeting: Meeting, meter: Meter) -> None:
        super().__init__(team, meeting, meter)
        self.awaited = {0}
        self._num_orders = 0

    def orders(self) -> Iterator[dict[str, Any]]:
        """One after the other, until the result is there."""
        while True:
            name = f"order.{self._num_orders + 1}"
            news = self.wait(partial(_any_of, {name, "finished"}))
            if "finished" in news:
                return
            self._num_orders += 1
            yield self.meeting.read(name)

    def reply(self, reply: dict[str, Any]) -> None:
        """Say what came of the last order."""
        self.check()
        self.meeting.post(f"reply.{self._num_orders}.{self.team.rank}", reply)

    def gone(self) -> str:
        """Rank 0 removes it at its end, when this process was too slow to hear how it ended."""
        return "rank 0 ended while this process did not listen; see what rank 0 said."


def _any_of(wanted: set[str], names: set[str]) -> set[str] | None:
    return wanted & names or None


def _join(team: Team, target: Path, meter: Meter) -> Meeting:
    """The meeting that rank 0 of this very job made: just that one welcomes this process."""
    own = secrets.token_hex(8)
    heard: dict[Path, set[str]] = {}
    last = time.monotonic()
    while not meter.stopped:
        for meeting in find_meetings(target, team):
            names = meeting.names()
            if names is None:
                continue
            if f"welcome.{team.rank}.{own}" in names:
                return meeting
            beats = {name for name in names if name.startswith("beat.0.")}
            if meeting.folder not in heard:
                try:
                    meeting.introduce()
                    meeting.say("hello", team.rank, own)
                except OSError:  # it is just being removed, or there is trouble for a moment
                    continue
            elif heard[meeting.folder] != beats:
                last = time.monotonic()
            heard[meeting.folder] = beats
        if time.monotonic() - last > team.patience:
            raise OutputError(
                f"rank 0 gave no sign of life at {target} for {team.patience:g} s ({PATIENCE}): it "
                "failed or was killed, or it does not see this folder. OUT must lie on a file "
                "system that all processes share."
            )
        time.sleep(max(_PAUSE, _PAUSE_EACH * team.size))
    raise Stopped


def _digest(order: dict[str, Any], follower: Follower, threads: int | None) -> dict[str, Any]:
    team = follower.team
    locations = [parse_location(name) for name in order["files"][team.rank :: team.size]]
    threads = threads or default_threads([], team.size_here)
    found = hash_files(locations, threads, follower.meter)
    return {"digests": [found[str(location)] for location in locations]}


def _fill(order: dict[str, Any], follower: Follower, threads: int | None) -> dict[str, Any]:
    filling, team = Filling.from_json(order), follower.team
    with ExitStack() as stack:
        opened = [
            stack.enter_context(open_checkpoint(parse_location(name), key=filling.key))
            for name in filling.inputs
        ]
        check_same(filling, opened)
        sink = SafetensorsSink(follower.meeting.values, filling.files_of(team.rank))
        stack.callback(sink.close)
        not_finite = run(
            opened,
            filling.weights,
            filling.spans(team.rank),
            sink,
            threads=threads or default_threads(opened, team.size_here),
            meter=follower.meter,
        )
        sink.flush()
    return {"not_finite": not_finite}
