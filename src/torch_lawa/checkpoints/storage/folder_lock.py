"""Locks on files and folders, held until their owner releases them or its process ends."""

import contextlib
import os
import weakref
from pathlib import Path

from torch_lawa.errors import StoreError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["LOCK", "FolderLock", "try_lock"]

LOCK = "lock"  # the name of the lock file
_open_locks: "weakref.WeakSet[FolderLock]" = weakref.WeakSet()


def try_lock(handle: int, path: Path) -> bool | None:
    """Lock the open file at `path` without waiting; closing it releases the lock.

    False if somebody else holds the lock, in this process or another one, on this machine or in
    another container, or has removed the file. None where the file system has no locks.
    """
    if fcntl is None:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:
        return None
    try:
        # Whoever removes a locked file does so while holding its lock, so this one is current.
        return os.path.samestat(os.fstat(handle), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


class FolderLock:
    """Held until `release`, until it is garbage-collected, or until the process ends in any way.

    Forked processes (workers of a `DataLoader`) close the lock file that they inherit, because the
    lock lasts as long as it is open anywhere: workers outlive an owner that is killed for seconds.

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
        _open_locks.add(self)
        if fcntl is not None and not try_lock(handle, folder / LOCK):
            self.release()
            raise StoreError(f"{folder}: {busy}")

    def check(self) -> None:
        """Raise in a forked process: the thread that writes does not exist there."""
        if os.getpid() != self._owner:
            raise StoreError(
                f"{self._folder}: this process was forked from the owner of the window (pid "
                f"{self._owner}) and cannot change it. Collect there, or make an averager with a "
                "folder of its own in this process."
            )


def _close_in_fork() -> None:
    for lock in list(_open_locks):
        if (held := lock.release.detach()) is not None:
            os.close(held[2][0])


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_close_in_fork)


def _release(handle: int, owner: int) -> None:
    if os.getpid() == owner and fcntl is not None:
        with contextlib.suppress(OSError):
            # For every process that has the file open: closing it would leave the lock to forks.
            fcntl.flock(handle, fcntl.LOCK_UN)
    os.close(handle)
