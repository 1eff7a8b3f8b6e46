"""The thread that writes snapshots, and its work."""

import queue
import threading
import weakref
from collections.abc import Callable

__all__ = ["Job", "WriterThread"]


class Job:
    """Work for the writer thread: done once, however often it is submitted.

    A store knows its job before it submits it, and submits it again to wait for it. So an
    interrupted caller never forgets a write that is still reading the snapshot's memory.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self._work: Callable[[], None] | None = work
        self._ended = threading.Event()
        self.error: BaseException | None = None

    @property
    def done(self) -> bool:
        """Whether it has succeeded or failed."""
        return self._work is None

    def run(self) -> None:
        """Do the work, unless it is done; called in the thread, for one job at a time."""
        if self._work is None:
            return
        try:
            self._work()
        except BaseException as error:
            # Its traceback refers to the store: the folder would stay locked.
            self.error = error.with_traceback(None)
        self._work = None
        self._ended.set()

    def wait(self) -> None:
        """Return when it is done."""
        self._ended.wait()


class WriterThread:
    """Runs jobs in their order; the process ends after the last of them.

    An interrupt (Ctrl-C) may arrive while the thread is being started. A `ThreadPoolExecutor` then
    has a thread that it does not know of and never ends: the process would hang at its end.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._turn = threading.Lock()
        self._threads: list[threading.Thread] = []
        weakref.finalize(self, _end, self._jobs, self._threads)

    def submit(self, job: Job) -> None:
        """Let the thread run a job after those before it."""
        self._jobs.put(job)
        if not any(thread.is_alive() for thread in self._threads):
            # One whose start was interrupted may run all the same: they take turns.
            arguments = self._jobs, self._turn
            thread = threading.Thread(target=_work, args=arguments, name="lawa-disk", daemon=True)
            self._threads.append(thread)
            thread.start()


def _work(jobs: "queue.SimpleQueue[Job | None]", turn: threading.Lock) -> None:
    while True:
        with turn:
            job = jobs.get()
            if job is None:
                jobs.put(None)  # for a thread that waits for its turn
                return
            job.run()
            del job  # it refers to the store: the folder would stay locked


def _end(jobs: "queue.SimpleQueue[Job | None]", threads: list[threading.Thread]) -> None:
    """End the threads, after the jobs that are left: the store is gone, or the process ends."""
    jobs.put(None)
    for thread in threads:
        if thread.is_alive() and thread is not threading.current_thread():
            thread.join()
