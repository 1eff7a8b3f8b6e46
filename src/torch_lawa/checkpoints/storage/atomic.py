"""Atomic writes of files and folders: under a temporary name, flushed, then renamed."""

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
    """Write `path` under a temporary name, and rename it when the block succeeds.

    If the process is killed, the file is the old one or the new one, never part of it.
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
    """The temporary name under which this process writes `path`."""
    return path.with_name(f"{path.name}.{os.getpid()}{TEMPORARY}")


def publish(temporary: Path, path: Path) -> None:
    """Rename a finished file or folder to `path`; an older one is replaced and removed.

    Where the system supports it, two folders are exchanged in a single step, so that a reader
    finds one or the other at any moment.
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
    """Remove a file or a folder, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def clear_stale(path: Path) -> None:
    """Remove temporary files that killed processes left while they wrote `path`."""
    for left in path.parent.glob(f"{glob.escape(path.name)}.*{TEMPORARY}"):
        pid = left.name.removeprefix(path.name + ".").split(".")[0]
        if pid.isdecimal() and not _is_alive(int(pid)):
            with contextlib.suppress(OSError):
                remove(left)


def reserve(file: int, size: int, path: Path) -> None:
    """Allocate the final size of an open file, so that a full disk is noticed before the work."""
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file, 0, size)
        else:
            os.ftruncate(file, size)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise OutputError(
                f"{path}: no space for {size:,} bytes on this disk; nothing was written. Free some "
                "space or write elsewhere."
            ) from None
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise
        os.ftruncate(file, size)  # a file system without fallocate


def start_flushing(file: int) -> None:
    """Start writing dirty pages to disk without waiting, where the system supports it."""
    begin = _linux_call("sync_file_range")
    if begin is not None:
        start_writing = 2
        begin(file, ctypes.c_longlong(0), ctypes.c_longlong(0), start_writing)


def require_space(folder: Path, size: int) -> None:
    """Raise an error if the disk has no space for `size` bytes."""
    free = shutil.disk_usage(folder).free
    if free < size:
        raise OutputError(
            f"{folder}: {size:,} bytes are needed and {free:,} are free; nothing was written. "
            "Free some space or write elsewhere."
        )


def sync_file(path: Path) -> None:
    """Flush a file to disk, so that it survives a power failure."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_folder(folder: Path) -> None:
    """Flush renames and removals in `folder` to disk, where the system supports it."""
    if os.name == "posix":
        sync_file(folder)


def _exchange(a: Path, b: Path) -> bool:
    """Exchange two names in one step; False where the system does not support it."""
    rename = _linux_call("renameat2")
    if rename is None:
        return False
    at_cwd, exchange = -100, 2
    done: int = rename(at_cwd, os.fsencode(a), at_cwd, os.fsencode(b), exchange)
    return done == 0


@functools.cache
def _linux_call(name: str) -> Any:
    """A function of the C library that Python has no wrapper for; None if it does not exist."""
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
