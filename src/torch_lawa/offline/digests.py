"""SHA-256 of files, several at a time."""

import hashlib
from collections.abc import Iterator, Sequence

from torch_lawa.checkpoints.storage.paths import Place
from torch_lawa.offline.engine import Meter, in_threads

__all__ = ["hash_files"]

_HASHED = 1 << 22


def hash_files(places: Sequence[Place], threads: int, meter: Meter) -> dict[str, str]:
    """The SHA-256 of each file, by its name."""
    found: dict[str, str] = {}

    def work(todo: Iterator[Place]) -> None:
        for place in todo:
            source, digest = place.open(), hashlib.sha256()
            for begin in range(0, source.size, _HASHED):
                end = min(begin + _HASHED, source.size)
                digest.update(source.view(begin, end).data)
                meter.add(end - begin)
            source.close()
            found[str(place)] = digest.hexdigest()

    in_threads(threads, iter(places), work, meter)
    return found
