"""Files and folders that are whole or not there: a temporary name, flushed, renamed."""

import contextlib
import ctypes
import errno
import functools
import glob
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from torch_lawa.errors import OutputError

__all__ = [
    "TEMPORARY",
    "clear_stale",
    "publish",
    "remove",
    "replacing",
    "require_space",
    "reserve",
    "start_flushing",
    "sync_file",
    "sync_folder",
    "temporary_name",
]

TEMPORARY = ".partial"


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Write `path` under a temporary name; it takes its place when the block ends well.

    Killed at any moment, the file is the old one or the new one, never half of it.
    """
    temporary = temporary_name(path)
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


def temporary_name(path: Path) -> Path:
    """Where this process writes what will become `path`."""
    return path.with_name(f"{path.name}.{os.getpid()}{TEMPORARY}")


def publish(temporary: Path, path: Path) -> None:
    """Give a finished file or folder its name; an older one of that name is replaced and removed.

    Where the system can, a folder changes places with the older one in a single step, so that a
    reader finds one or the other at any moment.
    """
    if path.is_dir() and not path.is_symlink():
        if not _exchange(temporary, path):
            aside = path.with_name(f"{path.name}.{os.getpid()}.old{TEMPORARY}")
            os.rename(path, aside)
            os.rename(temporary, path)
            temporary = aside
        sync_folder(path.parent)
        remove(temporary)
        return
    if temporary.is_dir() and path.exists():
        path.unlink()
    os.replace(temporary, path)
    sync_folder(path.parent)


def remove(path: Path) -> None:
    """Remove a file or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def clear_stale(path: Path) -> None:
    """Remove what killed processes left behind while they were writing `path`."""
    for left in path.parent.glob(f"{glob.escape(path.name)}.*{TEMPORARY}"):
        pid = left.name.removeprefix(path.name + ".").split(".")[0]
        if pid.isdecimal() and not _is_alive(int(pid)):
            with contextlib.suppress(OSError):
                remove(left)


def reserve(file: int, size: int, path: Path) -> None:
    """Give an open file its final size now, so that a full disk is found before the work."""
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file, 0, size)
        else:
            os.ftruncate(file, size)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise OutputError(
                f"{path}: no room for {size:,} bytes on this disk; nothing was written. Free "
                "some space or write elsewhere."
            ) from None
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise
        os.ftruncate(file, size)  # a file system that cannot reserve


def start_flushing(file: int) -> None:
    """Let the disk begin to take what was written, without waiting, where the system can."""
    begin = _linux_call("sync_file_range")
    if begin is not None:
        start_writing = 2
        begin(file, ctypes.c_longlong(0), ctypes.c_longlong(0), start_writing)


def require_space(folder: Path, size: int) -> None:
    """Refuse before any work where the disk has no room for `size` bytes."""
    free = shutil.disk_usage(folder).free
    if free < size:
        raise OutputError(
            f"{folder}: {size:,} bytes are needed and {free:,} are free; nothing was written. "
            "Free some space or write elsewhere."
        )


def sync_file(path: Path) -> None:
    """Make the contents of a file survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_folder(folder: Path) -> None:
    """Make renames and removals in `folder` survive a power cut, where the system can."""
    if os.name == "posix":
        sync_file(folder)


def _exchange(a: Path, b: Path) -> bool:
    """Let two names change places in one step; False where the system cannot."""
    rename = _linux_call("renameat2")
    if rename is None:
        return False
    at_cwd, exchange = -100, 2
    done: int = rename(at_cwd, os.fsencode(a), at_cwd, os.fsencode(b), exchange)
    return done == 0


@functools.cache
def _linux_call(name: str) -> Any:
    """A function of the C library that Python does not offer; None where there is none."""
    if sys.platform != "linux":
        return None
    try:
        return getattr(ctypes.CDLL(None, use_errno=True), name)
    except (OSError, AttributeError):
        return None


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
