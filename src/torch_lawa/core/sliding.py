"""The paper's circular queue: a float64 sum that follows the window at a cost independent of k.

Subtracting the snapshot that left and adding the one that came is exact as long as no rounding
happens, and then the sum has the very bits of adding the window up afresh. Where rounding could
happen the sum is not trusted but added up afresh:

* single values so small beside their block's largest that the sum could need more than 53 bits
  ("rough": about one in 10**7, found when they arrive), and every negative zero, whose sign a
  subtraction loses;
* whole blocks that hold NaN or Inf, or whose values grew past the bound they were checked against.

So `SlidingSum` is always the sum that `mean_blocks` would make, bit for bit, on any input.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from torch_lawa.core.mean import block_length

__all__ = ["SlidingSum"]

# Bits of the significand, the hidden one counted.
_PRECISION = {torch.float32: 24, torch.bfloat16: 8, torch.float16: 11}

_ROUGH_SHARE = 16  # a block with more than 1/16 rough values is summed afresh as a whole


@dataclass
class _Block:
    """What is known of one block: the bound its values were checked against."""

    bound: float = -1.0  # every value of the window is at most this; -1: sum afresh
    num_rough: int = 0


@dataclass
class SlidingSum:
    """The float64 sum of the window over one flat group of values.

    >>> window = [torch.tensor([float(i)]) for i in range(4)]
    >>> total = SlidingSum(k=2)
    >>> total.rebuild([0, 1], window[:2]); total.slide([1, 2], window[1:3], leaving=window[0])
    >>> [(start, block.tolist()) for start, block in total.blocks()]
    [(0, [1.5])]
    """

    k: int
    ids: tuple[int, ...] = ()
    _sum: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.float64))
    _blocks: list[_Block] = field(default_factory=list)
    _rough: dict[int, list[Tensor]] = field(default_factory=dict)  # snapshot id -> positions

    @staticmethod
    def supports(dtype: torch.dtype) -> bool:
        """Whether sums of this dtype can be exact in float64 at all."""
        return dtype in _PRECISION

    def can_slide(self, ids: Sequence[int], has_leaving: bool) -> bool:
        """Whether the window `ids` is one snapshot further than the sum."""
        if not self.ids or len(ids) < 2:
            return False
        grown = self.ids == tuple(ids[:-1])
        moved = has_leaving and self.ids[1:] == tuple(ids[:-1]) and len(self.ids) == len(ids)
        return grown or moved

    def rebuild(self, ids: Sequence[int], window: Sequence[Tensor]) -> None:
        """Add the whole window up afresh."""
        flat = window[0]
        self.ids = tuple(ids)
        self._rough = {}
        self._length = min(block_length(flat.device), max(flat.numel(), 1))
        if self._sum.shape != flat.shape or self._sum.device != flat.device:
            self._sum = torch.empty(flat.numel(), dtype=torch.float64, device=flat.device)
        self._blocks = [_Block() for _ in range(0, flat.numel(), self._length)]
        for index in range(len(self._blocks)):
            self._rebuild_block(index, window)
        self._repair(window, [])

    def slide(self, ids: Sequence[int], window: Sequence[Tensor], leaving: Tensor | None) -> None:
        """Follow the window by one snapshot: `window[-1]` came, `leaving` (if any) left."""
        left = () if leaving is None else (self.ids[0],)
        self.ids = tuple(ids)
        freed = [positions for id_ in left for positions in self._rough.pop(id_, [])]
        for index, block in enumerate(self._blocks):
            part = self._part(index)
            newest = window[-1][part]
            if block.bound < 0 or not self._admit(block, newest, part.start, ids[-1]):
                self._rebuild_block(index, window)
                continue
            total = self._sum[part]
            if leaving is not None:
                total.sub_(leaving[part])
            total.add_(newest)
        self._repair(window, freed)

    def blocks(self) -> Iterator[tuple[int, Tensor]]:
        """Yield `(offset, float64 mean)` block by block, in scratch memory like `mean_blocks`."""
        scratch = torch.empty(self._length, dtype=torch.float64, device=self._sum.device)
        for index in range(len(self._blocks)):
            part = self._part(index)
            mean = scratch[: part.stop - part.start]
            yield part.start, torch.div(self._sum[part], len(self.ids), out=mean)

    def _part(self, index: int) -> slice:
        start = index * self._length
        return slice(start, min(start + self._length, self._sum.numel()))

    def _admit(self, block: _Block, values: Tensor, start: int, id_: int) -> bool:
        """Note the rough values of a new snapshot; False where the block must be summed afresh."""
        size = values.abs()
        low, high = (bound.item() for bound in torch.aminmax(size))
        if not high <= block.bound:  # NaN fails too
            return False
        tiny = block.bound * self.k * 2.0 ** (_PRECISION[values.dtype] - 53)
        if low > tiny:
            return True
        # By its bits, so that -0.0 counts as rough and +0.0 does not.
        bits = values.view(torch.int32 if values.element_size() == 4 else torch.int16)
        rough = ((size <= tiny) & (bits != 0)).nonzero().flatten()
        if rough.numel():
            block.num_rough += rough.numel()
            if block.num_rough > max(values.numel() // _ROUGH_SHARE, 16):
                return False
            self._rough.setdefault(id_, []).append(rough + start)
        return True

    def _rebuild_block(self, index: int, window: Sequence[Tensor]) -> None:
        part, block = self._part(index), self._blocks[index]
        total = self._sum[part]
        total.copy_(window[0][part])
        for snapshot in window[1:]:
            total.add_(snapshot[part])
        self._forget(part)
        block.num_rough = 0
        high = max(float(snapshot[part].abs().max()) for snapshot in window)
        # The next power of two leaves room to grow, so that slow drift does not rebuild each time.
        block.bound = math.ldexp(1.0, math.frexp(high)[1]) if math.isfinite(high) else -1.0
        if block.bound >= 0.0 and not all(
            self._admit(block, snapshot[part], part.start, id_)
            for id_, snapshot in zip(self.ids, window, strict=True)
        ):
            self._forget(part)
            block.bound = -1.0

    def _forget(self, part: slice) -> None:
        """Drop the rough positions of one block: it is summed afresh as a whole."""
        for id_, lists in list(self._rough.items()):
            kept = [p for p in lists if not part.start <= int(p[0]) < part.stop]
            if kept:
                self._rough[id_] = kept
            else:
                del self._rough[id_]

    def _repair(self, window: Sequence[Tensor], freed: list[Tensor]) -> None:
        """Add up afresh the rough values of the window, and those a leaving snapshot had."""
        lists = [p for positions in self._rough.values() for p in positions] + freed
        if not lists:
            return
        positions = torch.cat(lists)
        total = window[0][positions].double()
        for snapshot in window[1:]:
            total.add_(snapshot[positions])
        self._sum[positions] = total
