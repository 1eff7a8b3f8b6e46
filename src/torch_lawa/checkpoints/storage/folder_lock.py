"""A lock on a folder: one owner at a time, until its process ends or releases it."""

import contextlib
import os
import weakref
from pathlib import Path

from torch_lawa.errors import StoreError

__all__ = ["LOCK", "FolderLock"]

LOCK = "lock"  # the name of the lock file


class FolderLock:
    """Held until `release`, until it is garbage-collected, or until the process ends in any way.

    Forked processes (workers of a `DataLoader`) inherit the open lock file. They neither own the
    folder nor keep the lock when its owner releases it.

    Args:
        folder: The folder to lock; it is created.
        busy: What to tell somebody who finds the folder locked, and what to do next.
    """

    def __init__(self, folder: Path, busy: str) -> None:
        self._folder, self._owner = folder, os.getpid()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise StoreError(
                f"{folder}: cannot be used for snapshots ({error}). Choose a folder that this "
                "process can write to."
            ) from error
        self.release = weakref.finalize(self, _release, handle, self._owner)
        with contextlib.suppress(ImportError):
            import fcntl

            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                self.release()
                raise StoreError(f"{folder}: {busy}") from None

    def check(self) -> None:
        """Raise in a forked process: the thread that writes does not exist there."""
        if os.getpid() != self._owner:
            raise StoreError(
                f"{self._folder}: this process was forked from the owner of the window (pid "
                f"{self._owner}) and cannot change it. Collect there, or make an averager with a "
                "folder of its own in this process."
            )


def _release(handle: int, owner: int) -> None:
    if os.getpid() == owner:
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            # For every process that has the file open: closing it would leave the lock to forks.
            fcntl.flock(handle, fcntl.LOCK_UN)
    os.close(handle)
