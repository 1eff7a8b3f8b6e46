"""Files that are whole or not there: a temporary name, flushed, renamed."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

__all__ = ["TEMPORARY", "replacing", "sync_folder"]

TEMPORARY = ".partial"


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Write `path` under a temporary name; it takes its place when the block ends well.

    Killed at any moment, the file is the old one or the new one, never half of it.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}{TEMPORARY}")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make renames and removals in `folder` survive a power cut, where the system can."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
