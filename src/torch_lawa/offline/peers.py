"""A process among others: it shows that it lives, sees whether they do, waits for their word."""

import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import TypeVar

from torch_lawa.errors import LawaError, OutputError
from torch_lawa.offline.engine import Meter, Stopped
from torch_lawa.offline.meeting import Meeting
from torch_lawa.offline.team import Team

__all__ = ["Peer"]

_T = TypeVar("_T")
_BEATS = 30  # signs of life within the patience of the others
_FIRST_PAUSE, _PAUSE = 0.02, 0.25  # seconds between two looks, growing
_PAUSE_EACH = 0.01  # up to so many for each process, where that is more


class Peer(ABC):
    """What the leader and the others have in common.

    A thread shows that the process lives and looks for news. What goes wrong elsewhere stops the
    work through the meter and is raised by `check`.
    """

    def __init__(self, team: Team, meeting: Meeting, meter: Meter) -> None:
        self.team, self.meeting, self.meter = team, meeting, meter
        self.awaited: set[int] = set()  # those whose silence is a failure
        self.lost: set[int] = set()  # those that failed or fell silent
        self._problem: str | None = None
        self._seen: dict[int, tuple[int, float]] = {}  # the last beat of each, and when it was new
        self._done: dict[int, int] = {}
        self._lock = threading.RLock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._live, daemon=True)

    def start(self) -> None:
        """Begin to show that this process lives."""
        self.meeting.beat(0)
        self._thread.start()

    def end(self) -> None:
        """Show it no more."""
        self._ended.set()
        self._thread.join(1.0)

    def look(self) -> set[str]:
        """What was said so far; who failed or is silent becomes the problem."""
        with self._lock:
            names = self.meeting.names()
            if names is None:
                self.fail(self.gone())
                return set()
            for name in names:
                self.hear(name.split("."))
            for rank in sorted(self.awaited):
                _, when = self._seen.setdefault(rank, (0, time.monotonic()))
                silent = time.monotonic() - when
                if silent > self.team.patience:
                    self.lost.add(rank)
                    since = time.strftime("%H:%M:%S", time.localtime(time.time() - silent))
                    self.fail(
                        f"{self._who(rank)} has given no sign of life for {silent:.0f} s (since "
                        f"{since}): it was killed or stands still. Start again."
                    )
            return names

    def hear(self, words: list[str]) -> None:
        """Understand a name."""
        if words[0] == "beat":
            rank, beat, done = map(int, words[1:])
            if rank != self.team.rank and beat > self._seen.get(rank, (0, 0.0))[0]:
                self._seen[rank] = beat, time.monotonic()
                self.heard_of(rank, done - self._done.get(rank, 0))
                self._done[rank] = done
        elif words[0] == "failed" and int(words[1]) != self.team.rank:
            self.lost.add(int(words[1]))
            with contextlib.suppress(OSError):  # removed meanwhile; the next look says so
                self.fail(str(self.meeting.read(".".join(words))))

    def heard_of(self, rank: int, num_bytes: int) -> None:  # noqa: B027 (may be left as it is)
        """So many more bytes are done there; the leader counts them."""

    @abstractmethod
    def gone(self) -> str:
        """What it means when the folder is no more."""

    def fail(self, problem: str) -> None:
        """Stop the work for this reason, unless there was one before."""
        if self._problem is None:
            self._problem = problem
            self.meter.stop()

    def check(self) -> None:
        """Raise what went wrong elsewhere."""
        if self._problem is not None:
            raise OutputError(self._problem)
        if self.meter.stopped:
            raise Stopped

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """Where the work was stopped because of another process, raise that instead."""
        try:
            yield
        except Stopped:
            self.check()
            raise

    def wait(self, found: Callable[[set[str]], _T | None]) -> _T:
        """Look until there is what is looked for."""
        pause = _FIRST_PAUSE
        while True:
            names = self.look()
            self.check()
            result = found(names)
            if result is not None:
                return result
            time.sleep(pause)
            # Many processes that look often are a burden to whoever keeps the folder.
            pause = min(pause * 1.2, max(_PAUSE, _PAUSE_EACH * self.team.size))

    def confess(self, error: BaseException) -> None:
        """Tell the others why this process gives up."""
        rank = self.team.rank
        if self._problem is not None:
            sentence = self._problem
        elif self.meter.stopped or not isinstance(error, Exception):
            sentence = f"rank {rank} was stopped."
        else:
            kind = "" if isinstance(error, LawaError | OSError) else f"{type(error).__name__}: "
            sentence = f"rank {rank} failed: {kind}{' '.join(str(error).split())}"
        with contextlib.suppress(OSError):
            self.meeting.post(f"failed.{rank}", sentence)

    def _who(self, rank: int) -> str:
        try:
            return f"rank {rank} ({self.meeting.read(f'who.{rank}')})"
        except OSError:
            return f"rank {rank}"

    def _live(self) -> None:
        while not self._ended.wait(self.team.patience / _BEATS):
            # What is wrong with the folder shows in the look, or to the others as silence.
            with contextlib.suppress(OSError):
                self.meeting.beat(self.meter.done)
            self.look()
