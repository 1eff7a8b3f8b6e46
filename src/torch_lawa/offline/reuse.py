"""Whether a result that is there already is the one that would be made: then it need not be."""

from collections.abc import Sequence
from pathlib import Path

from torch_lawa.checkpoints.find.select import FoundCheckpoint
from torch_lawa.checkpoints.formats.registry import open_checkpoint
from torch_lawa.checkpoints.storage.paths import LocalPath, Location
from torch_lawa.coefficients import Weights
from torch_lawa.errors import FormatError, OutputError
from torch_lawa.offline.origin import read_provenance

__all__ = ["is_made"]


def is_made(
    location: Location,
    found: Sequence[FoundCheckpoint],
    weights: Weights,
    name: str,
    key: str | None,
) -> bool:
    """Whether `location` is the mean of these checkpoints, by what it says itself and its date.

    False where there is nothing; what is there and something else is refused.
    """
    if not location.exists():
        return False
    wanted = [
        (str(f.location), f.step, f.epoch, w / weights.divisor)
        for f, w in zip(found, weights.numerators, strict=True)
    ]
    if _made_of(location) != (name, key, wanted) or not _is_newer(location, found):
        raise OutputError(
            f"{location}: exists already, and is not the mean of these checkpoints as they are "
            "now. Remove it, or write elsewhere."
        )
    return True


def _made_of(location: Location) -> tuple[object, object, object]:
    try:
        with open_checkpoint(location) as opened:
            made = read_provenance(opened) or {}
    except FormatError:
        made = {}
    rows = made.get("inputs") or []
    columns = ("path", "step", "epoch", "weight")
    inputs = [tuple(row.get(c) for c in columns) for row in rows if isinstance(row, dict)]
    return made.get("coefficients"), made.get("key"), inputs


def _is_newer(location: Location, found: Sequence[FoundCheckpoint]) -> bool:
    """Written after all that it was made of; not known of what lies on a server."""
    if not isinstance(location, LocalPath):
        return False
    written = location.path.stat().st_mtime_ns
    return all(
        isinstance(f.location, LocalPath) and _last_written(f.location.path) <= written
        for f in found
    )


def _last_written(path: Path) -> int:
    files = [path, *path.iterdir()] if path.is_dir() else [path]
    return max(file.stat().st_mtime_ns for file in files)
