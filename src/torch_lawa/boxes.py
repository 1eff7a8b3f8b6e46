"""Ranges of a flattened tensor as boxes of the tensor. Pure Python: no tensors here."""

import math
from collections.abc import Iterator
from typing import TypeAlias

__all__ = ["Box", "boxes"]

Box: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]  # where it begins, and its sizes


def boxes(shape: tuple[int, ...], begin: int, end: int) -> Iterator[Box]:
    """The boxes that the values `begin` to `end`, in row-major order, make up, in their order.

    There are at most `2 * dimensions - 1`.

    >>> list(boxes((3, 4), 2, 9))
    [((0, 2), (1, 2)), ((1, 0), (1, 4)), ((2, 0), (1, 1))]
    """
    if begin >= end:
        return
    if not shape:
        yield (), ()
        return
    inner = math.prod(shape[1:])
    row = begin // inner
    if begin % inner:
        stop = min(end, (row + 1) * inner)
        yield from _in_row(shape, row, begin, stop)
        begin, row = stop, row + 1
    whole = (end - begin) // inner
    if whole > 0:
        yield (row, *(0 for _ in shape[1:])), (whole, *shape[1:])
        begin, row = begin + whole * inner, row + whole
    if begin < end:
        yield from _in_row(shape, row, begin, end)


def _in_row(shape: tuple[int, ...], row: int, begin: int, end: int) -> Iterator[Box]:
    """The boxes of values that are all in the row of this index."""
    before = row * math.prod(shape[1:])
    for starts, sizes in boxes(shape[1:], begin - before, end - before):
        yield (row, *starts), (1, *sizes)
