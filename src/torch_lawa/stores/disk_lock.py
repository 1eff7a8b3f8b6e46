"""One owner of a snapshot folder at a time: this process, until it ends or lets go."""

import contextlib
import os
import weakref
from pathlib import Path

from torch_lawa.errors import StoreError

__all__ = ["FolderLock"]


class FolderLock:
    """Held from its making; it goes with the process, however that ends.

    Forked processes (workers of a `DataLoader`) have the lock's file open as well. They neither
    own the folder nor keep the lock when its owner lets go.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._owner = folder, os.getpid()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            handle = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise StoreError(f"{folder}: cannot be used for snapshots ({error}).") from error
        closing = weakref.finalize(self, _release, handle, self._owner)
        with contextlib.suppress(ImportError):
            import fcntl

            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                closing()
                raise StoreError(
                    f"{folder}: another averager, here or in another process, is using this "
                    "snapshot folder. Give each run a folder of its own; if its processes share "
                    "one, initialise torch.distributed before the averager is made."
                ) from None

    def check(self) -> None:
        """Refuse to work in a process that was forked: the thread that writes is not there."""
        if os.getpid() != self._owner:
            raise StoreError(
                f"{self._folder}: this process was forked from the one that owns the window (pid "
                f"{self._owner}) and cannot change it: collect there, or give this process an "
                "averager and a folder of its own."
            )


def _release(handle: int, owner: int) -> None:
    if os.getpid() == owner:
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            # For all who have it open: closing it here would leave it to forked processes.
            fcntl.flock(handle, fcntl.LOCK_UN)
    os.close(handle)
