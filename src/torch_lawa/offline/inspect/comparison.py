"""Compare two checkpoints: both are read once, in pieces, by a few threads."""

import os
import threading
from collections.abc import Iterator, Sequence

from torch_lawa.checkpoints.find.step_names import parse_name
from torch_lawa.checkpoints.formats.base import Checkpoint
from torch_lawa.checkpoints.formats.registry import open_checkpoint
from torch_lawa.mean.kernels import PIECE
from torch_lawa.offline.changes import refusing_changes
from torch_lawa.offline.engine import read_piece, value_width
from torch_lawa.offline.inspect.difference import Difference, Side, TensorDifference
from torch_lawa.offline.inspect.distances import PieceDifference, Sums, comparable
from torch_lawa.offline.inspect.inspection import find_one
from torch_lawa.offline.options import check_threads
from torch_lawa.offline.threads import Meter, default_threads, in_threads

__all__ = ["compare_checkpoints"]


def compare_checkpoints(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    key: str | None = None,
    *,
    threads: int | None = None,
    meter: Meter | None = None,
) -> Difference:
    """Compare two checkpoints of any format; the result does not depend on the threads.

    >>> import tempfile, torch
    >>> from pathlib import Path
    >>> from torch_lawa.checkpoints.formats.safetensors_torch import save_tensors
    >>> a, b = (Path(tempfile.mkdtemp()) / "model.safetensors" for _ in range(2))
    >>> save_tensors(a, {"w": torch.tensor([3.0, 4.0])})
    >>> save_tensors(b, {"w": torch.tensor([3.0, 4.5])})
    >>> found = compare_checkpoints(a, b)
    >>> found.overall.relative, found.differing[0].sums.num_differing
    (0.1, 1)
    """
    check_threads(threads)
    locations = [find_one(path, key).found[0].location for path in (a, b)]
    with (
        open_checkpoint(locations[0], key=key) as old,
        open_checkpoint(locations[1], key=key) as new,
    ):
        names_old, names_new = _names(old), _names(new)
        pairs: dict[tuple[str, str], str] = {}
        for name, kept in names_old.items():
            if name in names_new:
                pairs.setdefault((kept, names_new[name]), name)
        unlike = {}
        matched = []
        for (x, y), name in pairs.items():
            specs = old.tensors[x], new.tensors[y]
            if specs[0].shape == specs[1].shape and comparable(specs[0].dtype, specs[1].dtype):
                matched.append((name, x, y))
            else:
                unlike[name] = specs
        with refusing_changes([old, new]):
            num_threads = threads or default_threads([old, new])
            sums = _run(old, new, matched, num_threads, meter or Meter())
        return Difference(
            a=_side(old, names_old, names_new, _ties(new)),
            b=_side(new, names_new, names_old, _ties(old)),
            compared=tuple(
                TensorDifference(name, old.tensors[x], new.tensors[y], found)
                for (name, x, y), found in zip(matched, sums, strict=True)
            ),
            unlike=unlike,
        )


def _run(
    a: Checkpoint,
    b: Checkpoint,
    matched: Sequence[tuple[str, str, str]],
    threads: int,
    meter: Meter,
) -> list[Sums]:
    """The sums of each pair of tensors; those of pieces are added when the last is done."""
    lengths = [a.tensors[x].nbytes // value_width(a.tensors[x].dtype) for _, x, _ in matched]
    waiting: dict[int, list[Sums]] = {}
    done: dict[int, Sums] = {}
    lock = threading.Lock()
    meter.total = sum(a.tensors[x].nbytes + b.tensors[y].nbytes for _, x, y in matched)

    def pieces() -> Iterator[tuple[int, int, int]]:
        for at, length in enumerate(lengths):
            for first in range(0, length, PIECE):
                yield at, first, min(first + PIECE, length)

    def work(todo: Iterator[tuple[int, int, int]]) -> None:
        piece = PieceDifference()
        for at, first, last in todo:
            raws, codes = [], []
            for checkpoint, name in zip((a, b), matched[at][1:], strict=True):
                code = checkpoint.tensors[name].dtype
                begin, end = first * value_width(code), last * value_width(code)
                raws.append(read_piece(checkpoint, name, begin, end))
                codes.append(code)
                meter.add(end - begin)
            found = piece.compare(raws[0], codes[0], raws[1], codes[1])
            with lock:
                parts = waiting.setdefault(at, [])
                parts.append(found)
                if len(parts) == -(-lengths[at] // PIECE):
                    done[at] = Sums.total(waiting.pop(at))

    in_threads(threads, pieces(), work, meter)
    return [done.get(at, Sums()) for at in range(len(matched))]


def _names(checkpoint: Checkpoint) -> dict[str, str]:
    """Every name of a tensor, and the name it is stored under."""
    return {**{name: name for name in checkpoint.tensors}, **checkpoint.aliases}


def _ties(checkpoint: Checkpoint) -> set[tuple[str, ...]]:
    groups: dict[str, list[str]] = {}
    for name, kept in checkpoint.aliases.items():
        groups.setdefault(kept, [kept]).append(name)
    return {tuple(sorted(group)) for group in groups.values()}


def _side(
    checkpoint: Checkpoint,
    names: dict[str, str],
    others: dict[str, str],
    other_ties: set[tuple[str, ...]],
) -> Side:
    progress = checkpoint.progress
    return Side(
        location=checkpoint.location,
        format=checkpoint.format,
        progress=progress if progress.known else parse_name(checkpoint.location.name),
        only=tuple(name for name in names if name not in others),
        tied=tuple(sorted(_ties(checkpoint) - other_ties)),
    )
