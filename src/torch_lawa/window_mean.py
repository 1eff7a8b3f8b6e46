"""Read the mean out of a window: into given tensors, or one tensor at a time.

Both ways give the same bits; which one is used depends on whether the whole average fits in memory.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from torch_lawa.coefficients import Uniform, Weights
from torch_lawa.errors import NonFiniteWarning
from torch_lawa.mean.blocks import divide, mean_blocks, round_into, warn_if_flushing
from torch_lawa.mean.sliding_sum import SlidingSum
from torch_lawa.selection import write_into
from torch_lawa.stores.base import FlatEntry, FlatGroup, FlatLayout, Snapshot, Store, flat_view
from torch_lawa.swag import Draw
from torch_lawa.units import counted

__all__ = ["MeanReader", "Sliding", "TensorMeans"]

Sliding = Literal["auto", True, False]

# From this k on, the sliding sum is worth its memory (float64 sums and one more snapshot) if the
# mean is read after every snapshot; below it, adding up the window is about as fast.
_SLIDING_FROM = 16


class MeanReader:
    """Computes means of the snapshots in a store, afresh or from sliding sums."""

    def __init__(self, store: Store, k: int, sliding: Sliding) -> None:
        self._store, self._k, self.sliding = store, k, sliding
        self._sums: dict[int, SlidingSum] = {}  # by index of the group
        self._layout: FlatLayout | None = None  # that the sums are of
        self._window: object = None  # that the facts below are about: see `Held.window`
        self._last_read: tuple[int, ...] = ()
        self._reported: set[int] = set()  # snapshots with NaN or Inf that were warned about
        store.keep_evicted = sliding is True

    def read_into(
        self,
        targets: Mapping[str, Tensor],
        layout: FlatLayout,
        n: int,
        weights: Weights,
        last: Mapping[str, Tensor] | None = None,
        draw: Draw | None = None,
    ) -> None:
        """Write the mean of the `n` newest snapshots, or a sample around it, into `targets`.

        If there are n + 1 weights, the last is that of the tensors `last`; by default those are the
        values that `targets` have now.
        """
        self._forget_others(layout)
        if any(target.device.type == "cpu" for target in targets.values()):
            warn_if_flushing()
        used = self._store.snapshots[-n:]
        ids = tuple(snapshot.index for snapshot in used)
        weights, term = _split(weights, n)
        slide = term is None and draw is None and self._may_slide(ids, weights)
        finite: list[Tensor] = []
        for i, group in enumerate(layout.groups):
            writer = _BlockWriter(group, targets, term, targets if last is None else last)
            if slide and SlidingSum.supports(group.stored):
                blocks = self._slid(i, ids)
            else:
                flats = [_as_real(self._store.flats(snapshot)[i]) for snapshot in used]
                device = writer.device if writer.device.type == "cuda" else None
                blocks = mean_blocks(flats, weights, device) if group.numel else iter(())
                blocks = blocks if draw is None else draw.around(blocks, flats, group)
            for start, mean in blocks:
                writer.write(start, mean)  # adds the last term
                finite.append(mean.sum().isfinite())
            writer.finish()
            if writer.device.type == "cuda":
                # Host buffers that were streamed from may be overwritten by the next snapshot.
                torch.cuda.current_stream(writer.device).synchronize()
        try:
            self._store.check_read()
        except BaseException:
            self._sums = {}
            raise
        if n == len(self._store.snapshots):
            self._last_read = ids
        if not all(bool(f) for f in finite):
            self._warn_not_finite(used, layout, last)

    def by_tensor(
        self,
        averaged: FlatLayout,
        kept: FlatLayout,
        n: int,
        weights: Weights,
        last: Mapping[str, Tensor] | None = None,
    ) -> "TensorMeans":
        """The mean of the `n` newest snapshots and the kept tensors, made one by one.

        It reads the snapshots, and `last` if there are n + 1 weights, as they are now: use it
        before the next one is collected.
        """
        self._forget_others(averaged)
        warn_if_flushing()
        used = self._store.snapshots[-n:]
        return TensorMeans(
            averaged,
            kept,
            [self._store.flats(snapshot) for snapshot in used],
            self._store.kept_flats(),
            weights,
            lambda: self._warn_not_finite(used, averaged, last),
            self._store.check_read,
            last or {},
        )

    def _forget_others(self, layout: FlatLayout) -> None:
        """Forget everything about another window, and sums of another layout."""
        window = self._store.held.window
        if self._window is not window:
            self._sums, self._last_read, self._reported = {}, (), set()
            self._window = window
        if self._layout is not layout:
            self._sums = {}
            self._layout = layout

    def _may_slide(self, ids: tuple[int, ...], weights: Weights) -> bool:
        """Whether this read uses the sliding sums; "auto" decides by the reads before it."""
        whole = weights.uniform and ids == tuple(s.index for s in self._store.snapshots)
        if self.sliding is not False and not whole:
            return False
        if self.sliding == "auto":
            followed = ids == self._last_read or ids[:-1] in (self._last_read, self._last_read[1:])
            wanted = self._k >= _SLIDING_FROM and len(ids) > 1 and followed
            if not wanted:
                self._sums = {}
            self._store.keep_evicted = wanted
            return wanted
        return self.sliding

    def _slid(self, i: int, ids: tuple[int, ...]) -> Iterator[tuple[int, Tensor]]:
        total = self._sums.setdefault(i, SlidingSum(self._k))
        flats = [self._store.flats(snapshot)[i] for snapshot in self._store.snapshots]
        evicted = self._store.evicted
        if total.ids != ids:
            if total.can_slide(ids, evicted is not None):
                leaving = self._store.flats(evicted)[i] if evicted is not None else None
                total.slide(ids, flats, leaving)
            else:
                total.rebuild(ids, flats)
        return total.blocks()

    def _warn_not_finite(
        self, used: Sequence[Snapshot], layout: FlatLayout, last: Mapping[str, Tensor] | None
    ) -> None:
        """Warn, once per snapshot, which tensors have NaN or Inf; also of `last`, the next one."""
        newest = self._store.snapshots[-1]
        for snapshot in (*used, replace(newest, index=newest.index + 1)):
            if snapshot.index in self._reported:
                continue
            what, views = f"the snapshot of step {snapshot.step} has", last or {}
            if snapshot.index <= newest.index:
                views = layout.views(self._store.flats(snapshot))
            else:
                what = f"the samples since step {newest.step} have"
            bad = [name for name, value in views.items() if not _all_finite(value)]
            if not bad:
                continue
            self._reported.add(snapshot.index)
            left = self._k - (newest.index - snapshot.index)
            more = f" and {counted(len(bad) - 1, 'more tensor')}" if len(bad) > 1 else ""
            narrow = any(group.stored == torch.float16 for group in layout.groups)
            limit = " Values above 65,504 do not fit into float16 storage." if narrow else ""
            warnings.warn(
                f"{what} NaN or Inf in {bad[0]!r}{more}; so has the mean until that snapshot "
                f"leaves the window, after {left} more. Check the run for a diverging step; "
                "averager.reset() begins a new window at once."
                f"{limit}",
                NonFiniteWarning,
                stacklevel=5,
            )


class TensorMeans:
    """Makes single tensors of an average, with the same bits as in the whole of it.

    `snapshots` has the flat buffers of each snapshot, oldest first, `newest` those of the kept
    tensors. `not_finite` is called if a mean is not finite, and `check` after every mean. `last`
    has what one weight more than there are snapshots is the weight of.
    """

    def __init__(
        self,
        averaged: FlatLayout,
        kept: FlatLayout,
        snapshots: Sequence[Sequence[Tensor]],
        newest: Sequence[Tensor],
        weights: Weights,
        not_finite: Callable[[], None],
        check: Callable[[], None],
        last: Mapping[str, Tensor],
    ) -> None:
        self._weights, self._not_finite, self._last = weights, not_finite, last
        self._check = check
        self._averaged = _buffers_by_name(
            averaged, [list(flats) for flats in zip(*snapshots, strict=True)]
        )
        self._kept = _buffers_by_name(kept, [[flat] for flat in newest])

    def make(self, name: str, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
        """One tensor of the average in `dtype`, on the snapshots' device unless `device` is given.

        A kept tensor that has that dtype and device already is a view of the store: do not write
        to it.
        """
        if name in self._averaged:
            entry, flats = self._averaged[name]
            return self._mean(entry, flats, self._weights, dtype, device)
        entry, flats = self._kept[name]
        if flats[0].dtype != dtype:
            return self._mean(entry, flats, Uniform().weights(1), dtype, device)
        return entry.view(flats[0]).to(device or flats[0].device)

    def _mean(
        self,
        entry: FlatEntry,
        flats: Sequence[Tensor],
        weights: Weights,
        dtype: torch.dtype,
        device: torch.device | None,
    ) -> Tensor:
        home = device or flats[0].device
        out = torch.empty_strided(entry.shape, entry.stride, dtype=dtype, device=home)
        if not entry.numel:
            return out
        to = _as_real(out.as_strided((entry.numel,), (1,)))
        parts = [_as_real(flat[entry.offset : entry.offset + entry.numel]) for flat in flats]
        weights, term = _split(weights, len(flats))
        last = None if term is None else _as_real(_flattened(self._last[entry.name], entry))
        finite = []
        for start, mean in mean_blocks(parts, weights, home if home.type == "cuda" else None):
            stop = start + mean.numel()
            if term is not None and last is not None:
                mean = term.added(mean, last[start:stop])
            finite.append(mean.sum().isfinite())
            round_into(to[start:stop], mean)
        if home.type == "cuda":
            # Host buffers that were streamed from may be overwritten by the next snapshot.
            torch.cuda.current_stream(home).synchronize()
        self._check()
        if not all(bool(f) for f in finite):
            self._not_finite()
        return out


@dataclass(frozen=True)
class _LastTerm:
    """The last term of a sum, of values that are not in a snapshot."""

    weight: float
    divisor: float

    def added(self, total: Tensor, values: Tensor) -> Tensor:
        """The mean: `(total + weight * values) / divisor`, each operation rounded to float64."""
        total.add_(values.to(total.device, torch.float64).mul(self.weight))
        return divide(total, self.divisor, out=total)


def _split(weights: Weights, n: int) -> tuple[Weights, _LastTerm | None]:
    """The weights of n snapshots, and the term of what is left; then they are only added up."""
    if len(weights.numerators) == n:
        return weights, None
    return Weights(weights.numerators[:n], 1.0), _LastTerm(weights.numerators[n], weights.divisor)


class _BlockWriter:
    """Rounds float64 blocks of one group into the tensors that they belong to.

    With a `term` the blocks are sums, and the tensors `last` are added to them first.
    """

    def __init__(
        self,
        group: FlatGroup,
        targets: Mapping[str, Tensor],
        term: _LastTerm | None,
        last: Mapping[str, Tensor],
    ) -> None:
        self._term = term
        # Begin and end in the group, the target, and the tensor that is added.
        self._pieces: list[tuple[int, int, Tensor, Tensor]] = []
        self._copied: list[tuple[Tensor, Tensor]] = []  # targets with another memory layout
        self.device = torch.device("cpu")
        scale = 2 if group.dtype.is_complex else 1
        for entry in group.entries:
            if entry.numel == 0:
                continue
            target = targets[entry.name]
            self.device = target.device
            flat = flat_view(target, entry)
            if flat is None:
                flat = torch.empty(entry.numel, dtype=target.dtype, device=target.device)
                shaped = flat.as_strided(entry.shape, entry.stride)
                self._copied.append((target, shaped))
            added = flat if term is None else _flattened(last[entry.name], entry)
            begin = entry.offset * scale
            end = begin + entry.numel * scale
            self._pieces.append((begin, end, _as_real(flat), _as_real(added)))
        self._next = 0

    def write(self, start: int, mean: Tensor) -> None:
        """Write one block; blocks come in order."""
        stop = start + mean.numel()
        while self._next < len(self._pieces):
            begin, end, flat, added = self._pieces[self._next]
            low, high = max(begin, start), min(end, stop)
            if low < high:
                part, values = flat[low - begin : high - begin], mean[low - start : high - start]
                if self._term is not None:
                    values = self._term.added(values, added[low - begin : high - begin])
                if part.device == values.device:
                    round_into(part, values)
                else:
                    rounded = torch.empty(values.shape, dtype=part.dtype, device=values.device)
                    round_into(rounded, values)
                    part.copy_(rounded)
            if end > stop:
                return
            self._next += 1

    def finish(self) -> None:
        """Copy to the targets whose memory layout differs."""
        for target, value in self._copied:
            write_into(target, value)


def _buffers_by_name(
    layout: FlatLayout, flats: Sequence[Sequence[Tensor]]
) -> dict[str, tuple[FlatEntry, Sequence[Tensor]]]:
    """Name -> where in the flat buffers of its group the tensor is, and those buffers."""
    return {
        entry.name: (entry, of_group)
        for group, of_group in zip(layout.groups, flats, strict=True)
        for entry in group.entries
    }


def _flattened(tensor: Tensor, entry: FlatEntry) -> Tensor:
    """The values in the order of the flat buffer: a view if the memory is laid out like that."""
    flat = flat_view(tensor, entry)
    if flat is None:
        flat = torch.empty(entry.numel, dtype=tensor.dtype, device=tensor.device)
        flat.as_strided(entry.shape, entry.stride).copy_(tensor)
    return flat


def _all_finite(tensor: Tensor) -> bool:
    """Whether it has no NaN or Inf; PyTorch cannot say it of every float8 dtype."""
    return bool((tensor.float() if tensor.itemsize == 1 else tensor).isfinite().all())


def _as_real(flat: Tensor) -> Tensor:
    """Complex numbers as pairs of real ones, which are averaged separately."""
    return torch.view_as_real(flat).flatten() if flat.is_complex() else flat
