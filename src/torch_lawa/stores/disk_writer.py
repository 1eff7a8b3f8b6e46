"""The work of the thread that writes snapshots."""

from collections.abc import Callable

__all__ = ["Job"]


class Job:
    """Work for the writer thread: done once, however often it is submitted.

    A store knows its job before it submits it, and submits it again to wait for it. So an
    interrupted caller never forgets a write that is still reading the snapshot's memory.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self._work: Callable[[], None] | None = work
        self.error: BaseException | None = None

    @property
    def done(self) -> bool:
        """Whether it has succeeded or failed."""
        return self._work is None

    def run(self) -> None:
        """In the thread, which runs one job at a time."""
        if self._work is None:
            return
        try:
            self._work()
        except BaseException as error:
            # Its traceback refers to the store: the folder would stay locked.
            self.error = error.with_traceback(None)
        self._work = None
