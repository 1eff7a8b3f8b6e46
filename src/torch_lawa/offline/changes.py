"""Whether files stayed as they were while they were read."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch_lawa.checkpoints.formats.base import Checkpoint
from torch_lawa.checkpoints.storage.paths import LocalPath
from torch_lawa.errors import FormatError

__all__ = ["refusing_changes"]


@contextmanager
def refusing_changes(opened: Sequence[Checkpoint]) -> Iterator[None]:
    """Refuse what the block made where a file was written to meanwhile: it may be half of each.

    One that was deleted, or replaced by another under its name, was read as it had been. Files of
    servers are not asked again.
    """
    before = [(path, _stamp(path)) for path in _paths(opened)]
    yield
    for path, (inode, *rest) in before:
        try:
            now, *since = _stamp(path)
        except FileNotFoundError:
            continue
        if now == inode and since != rest:
            raise FormatError(
                f"{path}: was written to while it was read, so nothing was made of it. Try again "
                "when it is complete; `lawa watch` waits for that by itself."
            )


def _paths(opened: Sequence[Checkpoint]) -> list[LocalPath]:
    locations = (location for checkpoint in opened for location in checkpoint.files)
    return [location for location in locations if isinstance(location, LocalPath)]


def _stamp(location: LocalPath) -> tuple[int, int, int]:
    found = location.path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns
