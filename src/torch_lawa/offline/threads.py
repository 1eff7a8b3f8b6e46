"""Background threads: sharing work among them, counting what is done, and stopping them."""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

from torch_lawa.checkpoints.formats.base import Checkpoint

__all__ = ["BackgroundTask", "Meter", "Stopped", "default_threads", "in_threads"]

_T = TypeVar("_T")
_LOCAL_THREADS, _REMOTE_THREADS = 8, 16


class Stopped(Exception):
    """The work was stopped before it was complete."""

    def __str__(self) -> str:
        return "it was stopped by a signal."


class Meter:
    """Bytes done and in total, for a progress bar; also how to stop the work."""

    def __init__(self) -> None:
        self.total = self.done = 0
        self.stopped = False
        self._lock = threading.Lock()

    def add(self, num_bytes: int) -> None:
        """Count `num_bytes` more as done."""
        with self._lock:
            self.done += num_bytes

    def stop(self) -> None:
        """Make every thread end after its current piece."""
        self.stopped = True

    def proceed(self) -> None:
        """Raise `Stopped` once the work is to stop."""
        if self.stopped:
            raise Stopped


def default_threads(checkpoints: Sequence[Checkpoint], processes: int = 1) -> int:
    """One thread per core, shared among the `processes` on this machine; more for remote files.

    Threads that read from a server spend most of their time waiting.
    """
    if not all(c.location.local for c in checkpoints):
        return max(1, _REMOTE_THREADS // processes)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(_LOCAL_THREADS, (cores or 1) // processes))


class BackgroundTask(Generic[_T]):
    """A function that runs in a daemon thread.

    >>> BackgroundTask(lambda: 6 * 7).start().result()
    42
    """

    def __init__(self, act: Callable[[], _T]) -> None:
        self._act = act
        self._made: list[_T] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        # After a Ctrl-C neither `Thread.join` nor `Thread.ident` can tell whether it is running.
        self._begun = threading.Lock()
        self._ended = threading.Event()

    def _run(self) -> None:
        if not self._begun.acquire(blocking=False):
            return
        try:
            self._made.append(self._act())
        except BaseException as error:
            self._error = error
        finally:
            self._ended.set()

    @property
    def succeeded(self) -> bool:
        """Whether the function has returned."""
        return bool(self._made)

    def start(self) -> "BackgroundTask[_T]":
        """Start the thread."""
        self._thread.start()
        return self

    def wait(self, timeout: float) -> bool:
        """Wait for at most `timeout` seconds; whether it has ended."""
        return self._ended.wait(timeout)

    def end(self) -> None:
        """Wait for the end, or keep it from beginning if it has not."""
        if not self._begun.acquire(blocking=False):
            self._ended.wait()

    def result(self) -> _T:
        """Wait for the end; what the function returned, or the error that it raised."""
        while not self._ended.wait(1.0):  # in slices, so that signals are handled meanwhile
            pass
        if self._error is not None:
            raise self._error
        return self._made[0]


def in_threads(
    num_threads: int,
    todo: Iterator[_T],
    work: Callable[[Iterator[_T]], None],
    meter: Meter,
) -> None:
    """Share `todo` among threads; the first error stops all of them and is raised here."""
    lock = threading.Lock()
    errors: list[BaseException] = []

    def share() -> Iterator[_T]:
        while not (meter.stopped or errors):
            with lock:
                item = next(todo, None)
            if item is None:
                return
            yield item

    def guarded() -> None:
        try:
            work(share())
        except BaseException as error:
            errors.append(error)

    tasks = [BackgroundTask(guarded) for _ in range(num_threads)]
    try:
        for task in tasks:
            task.start()
        for task in tasks:
            task.result()
    except BaseException:  # Ctrl-C: let every thread finish its piece
        meter.stop()
        for task in tasks:
            task.wait(10.0)
        raise
    if errors:
        raise errors[0]
    if meter.stopped:
        raise Stopped
