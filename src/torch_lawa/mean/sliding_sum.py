"""The paper's circular queue: a float64 sum that follows the window at a cost independent of k.

If no rounding occurs, subtracting the snapshot that leaves and adding the new one gives the same
bits as summing the window again. No rounding occurs if every value of the window is zero or its
magnitude is between `bound * k * 2**(p - 53)` and `bound`, where p is the number of significand
bits: every partial sum is then a multiple of the smallest value's last bit, and less than 2**53 of
them.

So each row of 64 values has a bound, and every new snapshot is checked against it. A row with a
value out of bounds is marked and summed again until that snapshot has left the window. This covers
NaN and Inf, values that grew, about one in 10**7 values that are tiny, and negative zeros, whose
sign a subtraction loses. `SlidingSum` therefore has the same bits as `mean_blocks` on any input.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from torch_lawa.mean.blocks import block_length, divide

__all__ = ["SlidingSum"]

# Bits of the significand, including the hidden one.
_PRECISION = {torch.float32: 24, torch.bfloat16: 8, torch.float16: 11}

_ROW = 64
_ROOM = 1.5  # how far values may grow before their row is marked
_SLACK = 256.0  # a bound this many times too large is lowered, after a spike


class SlidingSum:
    """The float64 sum of the window over one flat group of values.

    `ids` are the snapshots that are summed. They are empty after a failed or interrupted update:
    the next one sums the window again.

    >>> window = [torch.tensor([float(i)]) for i in range(4)]
    >>> total = SlidingSum(k=2)
    >>> total.rebuild([0, 1], window[:2]); total.slide([1, 2], window[1:3], leaving=window[0])
    >>> [(start, block.tolist()) for start, block in total.blocks()]
    [(0, [1.5])]
    """

    def __init__(self, k: int) -> None:
        self.ids: tuple[int, ...] = ()
        self._k = k
        self._sum = torch.empty(0, dtype=torch.float64)

    @staticmethod
    def supports(dtype: torch.dtype) -> bool:
        """Whether sums of this dtype can be exact in float64."""
        return dtype in _PRECISION

    def can_slide(self, ids: Sequence[int], has_leaving: bool) -> bool:
        """Whether the window `ids` is one snapshot ahead of the sum."""
        if not self.ids or len(ids) < 2:
            return False
        grown = self.ids == tuple(ids[:-1])
        moved = has_leaving and self.ids[1:] == tuple(ids[:-1]) and len(self.ids) == len(ids)
        return grown or moved

    def rebuild(self, ids: Sequence[int], window: Sequence[Tensor]) -> None:
        """Sum the whole window again."""
        self.ids = ()  # while the values change, the sum is of no window
        flat = window[0]
        num_rows, device = flat.numel() // _ROW, flat.device
        if self._sum.shape != flat.shape or self._sum.device != device:
            self._sum = torch.empty(flat.numel(), dtype=torch.float64, device=device)
        self._bound = torch.zeros(num_rows, dtype=torch.float64, device=device)
        self._until = torch.full((num_rows,), -1, dtype=torch.int64, device=device)
        for part in self._parts():
            total = self._sum[part].copy_(window[0][part])
            for snapshot in window[1:]:
                total.add_(snapshot[part])
            for id_, snapshot in zip(ids, window, strict=True):
                self._check_bounds(part, snapshot[part], id_, first=id_ == ids[0])
        self.ids = tuple(ids)

    def slide(self, ids: Sequence[int], window: Sequence[Tensor], leaving: Tensor | None) -> None:
        """Follow the window by one snapshot: `window[-1]` is new, `leaving` (if any) has left."""
        oldest_touched = self.ids[0]
        self.ids = ()  # while the values change, the sum is of no window
        for part in self._parts():
            total, newest = self._sum[part], window[-1][part]
            if leaving is not None:
                total.sub_(leaving[part])
            total.add_(newest)
            self._check_bounds(part, newest, ids[-1])
        self._sum_again((self._until >= oldest_touched).nonzero().flatten(), window)
        self.ids = tuple(ids)

    def blocks(self) -> Iterator[tuple[int, Tensor]]:
        """Yield `(offset, float64 mean)` block by block, in scratch memory."""
        scratch = torch.empty_like(self._sum[: block_length(self._sum.device)])
        for part in self._parts():
            mean = scratch[: part.stop - part.start]
            yield part.start, divide(self._sum[part], float(len(self.ids)), out=mean)

    def _parts(self) -> Iterator[slice]:
        """Blocks of whole rows; only the last one may end inside a row."""
        numel = self._sum.numel()
        length = max(block_length(self._sum.device) // _ROW, 1) * _ROW
        for start in range(0, numel, length):
            yield slice(start, min(start + length, numel))

    def _check_bounds(self, part: slice, values: Tensor, id_: int, *, first: bool = False) -> None:
        """Mark the rows where values of snapshot `id_` are out of bounds, until it has left.

        The `first` snapshot of a window sets the bounds: it is out of them only if not finite.
        """
        rows = slice(part.start // _ROW, part.stop // _ROW)
        bound, until = self._bound[rows], self._until[rows]
        if not bound.numel():
            return
        size = values[: bound.numel() * _ROW].view(-1, _ROW).abs()
        high, low = size.amax(1).double(), size.amin(1).double()
        # Not finite: the bound is zero until the next snapshot.
        roomy = torch.where(high.isfinite(), high * _ROOM, 0.0)
        if first:
            bound.copy_(roomy)
        fits = (high <= bound) & (high * _SLACK >= bound)  # false for NaN
        bound.copy_(torch.where(fits, bound, roomy))
        until.masked_fill_(~fits, id_)
        smallest = self._k * 2.0 ** (_PRECISION[values.dtype] - 53)
        doubtful = (fits & (low <= bound * smallest)).nonzero().flatten()
        if doubtful.numel():
            # Compare bits, not values: +0.0 is harmless, -0.0 is not.
            kind = torch.int32 if values.element_size() == 4 else torch.int16
            bits = values[: bound.numel() * _ROW].view(kind).view(-1, _ROW)[doubtful]
            tiny = size[doubtful].double() <= (bound[doubtful] * smallest).unsqueeze(1)
            until[doubtful[(tiny & (bits != 0)).any(1)]] = id_

    def _sum_again(self, rows: Tensor, window: Sequence[Tensor]) -> None:
        """Sum the given rows again, and the end that does not fill a row."""
        end = self._sum.numel() // _ROW * _ROW
        at_a_time = max(block_length(self._sum.device) // _ROW, 1)
        for first in range(0, rows.numel(), at_a_time):
            some = rows[first : first + at_a_time]
            total = window[0][:end].view(-1, _ROW)[some].double()
            for snapshot in window[1:]:
                total.add_(snapshot[:end].view(-1, _ROW)[some])
            self._sum[:end].view(-1, _ROW)[some] = total
        tail = self._sum[end:].copy_(window[0][end:])
        for snapshot in window[1:]:
            tail.add_(snapshot[end:])
