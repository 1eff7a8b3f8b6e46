"""Atomic publication of files and folders: under a temporary name, flushed, then renamed.

A temporary name is `NAME.<16 random digits>.partial`, beside the target, so no two writers share
one. Its writer holds a lock on it: whatever is not locked was left by a process that was killed,
in this container or another one, and the next writer of the same target removes it (`recover`).

A new result takes its name in a single step. Only where the file system cannot exchange two names
(`renameat2`; some network file systems lack it) is an older folder moved aside first. If the
writer is killed or fails at that moment, `recover` puts the older folder back.
"""

import contextlib
import ctypes
import errno
import functools
import io
import os
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from torch_lawa.checkpoints.storage.folder_lock import LOCK, try_lock
from torch_lawa.errors import OutputError
from torch_lawa.system_errors import named_errors

__all__ = [
    "TEMPORARY",
    "final_name",
    "making",
    "publish",
    "recover",
    "recover_all",
    "remove",
    "replacing",
    "require_short_name",
    "require_space",
    "reserve",
    "staging",
    "start_flushing",
    "sync_file",
    "sync_folder",
    "target_of",
]

TEMPORARY = ".partial"

_NAME = re.compile(rf"(.+)\.[0-9a-f]{{16}}{re.escape(TEMPORARY)}", re.DOTALL)
_NEW, _OLD = "new", "old"  # the entries of a temporary folder, beside its lock
_INSIDE = re.compile(rf"\.[0-9a-f]{{16}}{re.escape(TEMPORARY)}(/{_NEW}\b)?")
_NO_REPLACE, _EXCHANGE = 1, 2  # flags of renameat2
_ATTEMPTS = 100  # to replace what other processes keep replacing, too
_UNSUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP)


def final_name(path: str) -> str:
    """A path with the temporary names in it replaced by those that users know.

    >>> final_name("runs/averaged.0123456789abcdef.partial/new/model.safetensors")
    'runs/averaged/model.safetensors'
    """
    return _INSIDE.sub("", path)


def target_of(name: str) -> str | None:
    """The name that a temporary file or folder is for; None if it is not one of ours.

    >>> target_of("a.pt.0123456789abcdef.partial"), target_of("a.pt.partial")
    ('a.pt', None)
    """
    match = _NAME.fullmatch(name)
    return match[1] if match else None


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Write `path` under a temporary name, and rename it when the block succeeds.

    If the process is killed, the file is the old one or the new one, never part of it. Whatever
    killed writers of `path` left is removed first.
    """
    recover(path)
    temporary = _unused_name(path)
    try:
        while (file := _create_file(temporary)) is None:
            temporary = _unused_name(path)
        with file:
            yield cast(BinaryIO, file)
            file.flush()
            with named_errors(temporary):
                os.fsync(file.fileno())
            if os.name == "nt":
                file.close()  # an open file cannot be renamed there
            os.replace(temporary, path)  # before the lock is released
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    sync_folder(path.parent)


@contextlib.contextmanager
def making(folder: Path) -> Iterator[None]:
    """Create the folder and its parents for the block; at the end remove those that are empty."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    finally:
        with contextlib.suppress(OSError):  # it is not empty
            for path in made:
                path.rmdir()


@contextlib.contextmanager
def staging(path: Path, *, mode: int = 0o777) -> Iterator[Path]:
    """An empty folder on the disk of `path`, for what will be published there; removed at the end.

    The parents of `path` are made, and stay if something is published there. Whatever killed
    writers of `path` left is recovered or removed first.
    """
    with making(path.parent):
        recover(path)
        folder, lock = _unused_name(path), None
        try:
            while (lock := _create_folder(folder, mode)) is None:
                folder = _unused_name(path)
            (folder / _NEW).mkdir()
            yield folder / _NEW
        finally:
            try:
                _retire(folder, path)
            except OSError as error:  # `recover` tries again
                warnings.warn(f"{folder}: cannot be removed ({error}).", stacklevel=3)
            except BaseException:  # Ctrl-C
                with contextlib.suppress(OSError):
                    _retire(folder, path)
                raise
            finally:
                if lock is not None:
                    os.close(lock)


def publish(
    made: Path,
    path: Path,
    *,
    overwrite: bool = True,
    is_outdated: Callable[[str], bool] | None = None,
) -> None:
    """Rename a finished file or folder to `path`, in one step where the system supports it.

    Without `overwrite`, raise `FileExistsError` if anything exists there. Otherwise it is replaced
    and removed. With `is_outdated`, of an older folder only what has such names and what the new
    folder has is removed: other files stay, and another sub-folder is an error.
    """
    for attempts_left in reversed(range(_ATTEMPTS)):
        with contextlib.suppress(FileExistsError):
            _move(made, path)
            break
        if not overwrite:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        try:
            _replace(made, path, is_outdated)
            break
        except (FileExistsError, FileNotFoundError):  # another process wrote or removed it
            if not os.path.lexists(made) or not attempts_left:
                raise
    try:
        sync_folder(path.parent)
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror} after it was written", str(path)) from error


def recover(path: Path) -> None:
    """Remove what killed writers of `path` left; put back what they had moved aside."""
    _recover(path.parent, path.name)


def recover_all(folder: Path) -> None:
    """`recover` every target in `folder`."""
    _recover(folder, None)


def remove(path: Path) -> None:
    """Remove a file or a folder, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def reserve(file: int, size: int, path: Path) -> None:
    """Allocate the final size of an open file, so that a full disk is noticed before the work."""
    with named_errors(path):
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file, 0, size)
            else:
                os.ftruncate(file, size)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise OutputError(
                    f"{path}: no space for {size:,} bytes on this disk; nothing was written. Free "
                    "some space or write elsewhere."
                ) from None
            if error.errno not in _UNSUPPORTED:
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
        with named_errors(path):
            os.fsync(handle)
    finally:
        os.close(handle)


def sync_folder(folder: Path) -> None:
    """Flush renames and removals in `folder` to disk, where that is supported and permitted."""
    if os.name == "posix":
        try:
            sync_file(folder)
        except OSError as error:
            if error.errno not in (*_UNSUPPORTED, errno.EACCES, errno.EBADF):
                raise


class _NamedFile(io.FileIO):
    """A file whose errors name it."""

    def write(self, data: Any, /) -> int:
        with named_errors(Path(str(self.name))):
            return super().write(data)


def require_short_name(path: Path) -> None:
    """Refuse a target whose temporary name would be longer than the file system allows."""
    try:
        longest = os.pathconf(path.parent, "PC_NAME_MAX")
    except (OSError, ValueError, AttributeError):  # not there yet, or not on this system
        longest = 255
    longest -= len(f".{'0' * 16}{TEMPORARY}")
    if (length := len(os.fsencode(path.name))) > longest:
        raise OutputError(
            f"{path}: the name has {length} bytes, and at most {longest} are possible, because "
            "results are written under a longer temporary name first. Choose a shorter name."
        )


def _unused_name(path: Path) -> Path:
    require_short_name(path)
    return path.with_name(f"{path.name}.{os.urandom(8).hex()}{TEMPORARY}")


def _create_file(temporary: Path) -> io.BufferedWriter | None:
    """Create and lock a temporary file; None if `recover` took it for a leftover before that."""
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(_NamedFile(str(temporary), "xb"))
        if try_lock(file.fileno(), temporary) is False:
            return None
        stack.pop_all()
        return io.BufferedWriter(file)


def _create_folder(folder: Path, mode: int) -> int | None:
    """Create and lock a temporary folder, until the file returned is closed; None as above."""
    folder.mkdir(mode)
    try:
        handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    except FileNotFoundError:
        return None
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, handle)
        if try_lock(handle, folder / LOCK) is False:
            return None
        stack.pop_all()
        return handle


def _recover(folder: Path, name: str | None) -> None:
    try:
        names = os.listdir(folder)
    except OSError:  # does not exist yet
        return
    for left in names:
        target = target_of(left)
        if target is not None and name in (None, target):
            with contextlib.suppress(OSError):  # of another user, or removed meanwhile
                _recover_one(folder / left, folder / target)


def _recover_one(left: Path, path: Path) -> None:
    is_folder = left.is_dir() and not left.is_symlink()
    lock = left / LOCK if is_folder else left
    try:
        handle = os.open(lock, os.O_RDWR | getattr(os, "O_NOFOLLOW", 0))
    except FileNotFoundError:  # a folder is empty before it has a lock and after it had one
        left.rmdir()
        return
    try:
        locked = try_lock(handle, lock)
        if locked:
            _retire(left, path)
        elif locked is None:  # unknown whether its writer is alive; it could go on after this
            _put_back(left, path)
    finally:
        os.close(handle)


def _retire(temporary: Path, path: Path) -> None:
    """Remove a temporary file or folder; what it holds of `path` is put back first."""
    _put_back(temporary, path)
    if not temporary.is_dir():
        temporary.unlink(missing_ok=True)
        return
    for name in set(os.listdir(temporary)) - {LOCK}:
        remove(temporary / name)
    (temporary / LOCK).unlink(missing_ok=True)
    with contextlib.suppress(FileNotFoundError):  # `recover` may remove an empty folder
        temporary.rmdir()


def _put_back(temporary: Path, path: Path) -> None:
    """Restore what was moved aside, unless something else has its name now."""
    if os.path.lexists(temporary / _OLD):
        with contextlib.suppress(FileExistsError):
            _move(temporary / _OLD, path)
            sync_folder(path.parent)


def _move(source: Path, path: Path) -> None:
    """Rename; raise `FileExistsError` if `path` exists."""
    if _renameat2(source, path, _NO_REPLACE):
        return
    exists = FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    if not source.is_dir() or source.is_symlink():
        try:
            os.link(source, path, follow_symlinks=False)
        except FileExistsError:
            raise
        except (OSError, NotImplementedError):  # no links here: the next lines are two steps
            pass
        else:
            source.unlink()
            return
    if os.path.lexists(path):
        raise exists
    try:
        os.rename(source, path)  # of a folder: replaces nothing but an empty folder
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise exists from None
        raise


def _replace(made: Path, path: Path, is_outdated: Callable[[str], bool] | None) -> None:
    """Rename `made` to `path`, which exists, and remove what was there."""
    replaces_folder = path.is_dir() and not path.is_symlink()
    if not made.is_dir() and not replaces_folder:
        os.replace(made, path)
        return
    if not replaces_folder:
        is_outdated = None
    if is_outdated is not None:
        _carry_over(path, made, is_outdated)
    if _renameat2(made, path, _EXCHANGE):
        _discard(made, path, is_outdated)
        return
    with staging(path) as new:
        old = new.with_name(_OLD)
        os.rename(path, old)
        _move(made, path)
        _discard(old, path, is_outdated)


def _carry_over(path: Path, made: Path, is_outdated: Callable[[str], bool]) -> None:
    """Link (or copy) what stays of an older folder into the new one."""
    with os.scandir(path) as found:
        entries = list(found)
    for entry in entries:
        if entry.is_dir(follow_symlinks=False) and not is_outdated(entry.name):
            raise OutputError(
                f"{path}: contains the folder {entry.name}, which is not part of a checkpoint and "
                "would be removed. Write elsewhere, or move that folder."
            )
        kept = made / entry.name
        if is_outdated(entry.name) or os.path.lexists(kept):
            continue
        try:
            os.link(entry.path, kept, follow_symlinks=False)
        except (OSError, NotImplementedError):  # no links here, or not permitted
            shutil.copy2(entry.path, kept, follow_symlinks=False)
    sync_folder(made)


def _discard(old: Path, path: Path, is_outdated: Callable[[str], bool] | None) -> None:
    """Remove what was at `path`. The result is published, so a failure is only a warning."""
    try:
        for name in os.listdir(old) if is_outdated is not None else ():
            if is_outdated is not None and not is_outdated(name):
                with contextlib.suppress(FileExistsError):  # it was carried over
                    _move(old / name, path / name)
        remove(old)
    except OSError as error:
        warnings.warn(
            f"{path}: was replaced, but its older files in {old} cannot be removed ({error}).",
            stacklevel=4,
        )


def _renameat2(source: Path, target: Path, flag: int) -> bool:
    """Rename in one step with a flag; False where the system does not support it."""
    rename = _linux_call("renameat2")
    if rename is None:
        return False
    at_cwd = -100
    if rename(at_cwd, os.fsencode(source), at_cwd, os.fsencode(target), flag) == 0:
        return True
    code = ctypes.get_errno()
    if code in _UNSUPPORTED:
        return False
    raise OSError(code, os.strerror(code), str(source), None, str(target))


@functools.cache
def _linux_call(name: str) -> Any:
    """A function of the C library that Python has no wrapper for; None if it does not exist."""
    if sys.platform != "linux":
        return None
    try:
        return getattr(ctypes.CDLL(None, use_errno=True), name)
    except (OSError, AttributeError):
        return None
