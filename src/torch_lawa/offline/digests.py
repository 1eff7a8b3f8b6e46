"""SHA-256 of files, several at a time."""

import hashlib
from collections.abc import Iterator, Sequence

from torch_lawa.checkpoints.storage.paths import Location
from torch_lawa.offline.engine import Meter, in_threads

__all__ = ["hash_files"]

_HASHED = 1 << 22


def hash_files(locations: Sequence[Location], threads: int, meter: Meter) -> dict[str, str]:
    """The SHA-256 of each file, by its name."""
    found: dict[str, str] = {}

    def work(todo: Iterator[Location]) -> None:
        for location in todo:
            source, digest = location.open(), hashlib.sha256()
            for begin in range(0, source.size, _HASHED):
                end = min(begin + _HASHED, source.size)
                digest.update(source.view(begin, end).data)
                meter.add(end - begin)
            source.close()
            found[str(location)] = digest.hexdigest()

    in_threads(threads, iter(locations), work, meter)
    return found
