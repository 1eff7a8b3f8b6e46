"""Input files that change while they are read are refused."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from torch_lawa.checkpoints.formats.base import Checkpoint
from torch_lawa.checkpoints.storage.byte_sources import find_damaged
from torch_lawa.checkpoints.storage.paths import LocalPath, Location
from torch_lawa.errors import FormatError

__all__ = ["refuse_damaged", "refusing_changes"]


@contextmanager
def refusing_changes(opened: Sequence[Checkpoint]) -> Iterator[None]:
    """Fail if a local input file was written to during the block: the bytes read may be mixed.

    A file that was deleted or replaced by another of its name was read as it had been, so that is
    no error. Remote files are not checked.
    """
    locations = [location for checkpoint in opened for location in checkpoint.files]
    local = [location for location in locations if isinstance(location, LocalPath)]
    before = [(location, _stamp(location)) for location in local]
    yield
    refuse_damaged(local)
    for location, (inode, *stamp) in before:
        try:
            inode_now, *stamp_now = _stamp(location)
        except FileNotFoundError:
            continue
        if inode_now == inode and stamp_now != stamp:
            raise FormatError(
                f"{location}: was written to while it was being read, so nothing was made of it. "
                "Try again when it is complete; `lawa watch` waits for that by itself."
            )


def refuse_damaged(locations: Iterable[Location]) -> None:
    """Fail if one of these files, which are still open, was truncated while it was read."""
    paths = [location.path for location in locations if isinstance(location, LocalPath)]
    for path in find_damaged(paths):
        raise FormatError(
            f"{path}: was truncated while it was being read, so nothing was made of it. Try again "
            "when it is complete; `lawa watch` waits for that by itself."
        )


def _stamp(location: LocalPath) -> tuple[int, int, int]:
    found = location.path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns
