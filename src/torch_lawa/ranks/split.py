"""Cut work into shares of about equal cost, one per rank. Without PyTorch."""

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["Segment", "split_evenly"]


@dataclass(frozen=True)
class Segment:
    """Values that are stored one after the other, and what each of them costs."""

    begin: int  # byte
    num_values: int
    width: int  # bytes per value
    cost: int  # per value


def split_evenly(
    stretches: Iterable[Segment], end: int, num_shares: int, *, block: int
) -> list[int]:
    """The bytes at which each share begins, and `end`: multiples of `block`, of equal cost.

    >>> split_evenly([Segment(0, 100, 1, 1), Segment(100, 100, 1, 3)], 200, 2, block=10)
    [0, 130, 200]
    """
    stretches = list(stretches)
    total = sum(s.num_values * s.cost for s in stretches)
    dues = iter([total * i // num_shares for i in range(1, num_shares)])
    cuts, done, due = [0], 0, next(dues, None)
    for stretch in stretches:
        cost = stretch.num_values * stretch.cost
        while due is not None and due < done + cost:
            at = stretch.begin + (due - done) // stretch.cost * stretch.width
            cuts.append((at + block // 2) // block * block)
            due = next(dues, None)
        done += cost
    return [*cuts, *[end] * (num_shares + 1 - len(cuts))]
