"""The window: a store, the layout of what is in it, and the mean read out of it."""

import hashlib
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from torch_lawa.coefficients import Weights
from torch_lawa.errors import LayoutError, NonFiniteWarning
from torch_lawa.mean.blocks import mean_blocks, round_into
from torch_lawa.mean.sliding_sum import SlidingSum
from torch_lawa.selection import Selection, write_into
from torch_lawa.shards import Sharding
from torch_lawa.stores.base import Content, Group, Layout, Snapshot, Store, flat_view
from torch_lawa.window_by_tensor import OneByOne, as_real

__all__ = ["Sliding", "Window"]

Sliding = Literal["auto", True, False]

# From here on, sliding pays for its memory (a float64 sum and one more snapshot) where the mean is
# read after every snapshot; below, adding up the window is as fast or nearly so.
_SLIDING_FROM = 16


class Window:
    """The k latest snapshots and their mean."""

    def __init__(
        self, store: Store, k: int, storage_dtype: torch.dtype | None, sliding: Sliding
    ) -> None:
        self.k = k
        self.ties: dict[str, str] = {}
        self.shardings: dict[str, Sharding] = {}  # known once a model was seen
        self._store, self._storage_dtype, self._sliding = store, storage_dtype, sliding
        self._sums: dict[int, SlidingSum] = {}  # by group
        self._last_read: tuple[int, ...] = ()
        self._reported: set[int] = set()  # snapshots with NaN or Inf that were warned of
        self._bound = False  # whether the last model was checked against the layouts
        self.averaged, self.kept = Layout(()), Layout(())
        store.serve(self)
        store.keep_evicted = sliding is True
        found = store.find(k)
        self.notes: dict[str, Any] = {}
        self._shards = ""  # which parts of a sharded model lie in this process
        if found is not None:
            self.averaged, self.kept, self.notes = found.averaged, found.kept, found.notes
            self.ties = dict(found.notes.get("ties", {}))
            self._shards = str(found.notes.get("shards", ""))

    @property
    def snapshots(self) -> list[Snapshot]:
        """Oldest first."""
        return self._store.snapshots

    @property
    def on_host(self) -> bool:
        """Whether the snapshots lie in host memory whatever the model's device."""
        return self._store.on_host

    @property
    def per_process(self) -> bool:
        """Whether this window is that of one process among several, which asks nobody."""
        return bool(getattr(self._store, "per_process", False))

    @property
    def seen(self) -> bool:
        """Whether a model said what the tensors are parts of; not yet where a state was loaded."""
        return self._bound or bool(self.shardings)

    def put(self, snapshot: Snapshot, selection: Selection, notes: Mapping[str, Any]) -> None:
        """Take one snapshot of a model."""
        self._store.check(self)
        if not (selection.known and self._bound):
            self._bound = False  # until it was checked: a bad model stays bad the second time
            self._bind(selection, notes)
        tensors = selection.all()
        content = Content(
            snapshot,
            {name: tensors[name] for name in self._names[0]},
            {name: tensors[name] for name in self._names[1]},
        )
        self._store.put(content, {**notes, "shards": self._shards})

    def bind(self, selection: Selection, notes: Mapping[str, Any]) -> None:
        """Learn names, shapes and shardings of a model without a snapshot."""
        self._bound = False
        self._bind(selection, notes)

    def mean_into(self, targets: Mapping[str, Tensor], n: int, weights: Weights) -> None:
        """Write the mean of the `n` newest snapshots, and the kept tensors, into `targets`."""
        self._store.check(self)
        used = self.snapshots[-n:]
        ids = tuple(snapshot.index for snapshot in used)
        slide = self._may_slide(ids, weights)
        finite: list[Tensor] = []
        for i, group in enumerate(self.averaged.groups):
            deliver = _Delivery(group, targets)
            if slide and SlidingSum.supports(group.stored):
                blocks = self._slid(i, ids)
            else:
                flats = [as_real(self._store.flats(snapshot)[i]) for snapshot in used]
                device = deliver.device if deliver.device.type == "cuda" else None
                blocks = mean_blocks(flats, weights, device) if group.numel else iter(())
            for start, mean in blocks:
                finite.append(mean.sum().isfinite())
                deliver(start, mean)
            deliver.finish()
            if deliver.device.type == "cuda":
                # Host buffers that were streamed from may be overwritten by the next snapshot.
                torch.cuda.current_stream(deliver.device).synchronize()
        for name, value in self.kept.views(self._store.kept_flats()).items():
            write_into(targets[name], value)
        if n == len(self.snapshots):
            self._last_read = ids
        if not all(bool(f) for f in finite):
            self._report(used)

    def one_by_one(self, n: int, weights: Weights) -> OneByOne:
        """The mean of the `n` newest snapshots, and the kept tensors, to be made tensor by tensor.

        It reads the snapshots as they are now: use it before the next one is put.
        """
        used = self.snapshots[-n:]
        snapshots = [self._store.flats(snapshot) for snapshot in used]
        newest = self._store.kept_flats()
        report = partial(self._report, used)
        return OneByOne(self.averaged, self.kept, snapshots, newest, weights, report)

    def contents(self) -> list[Content]:
        """Every snapshot as named views into the store, oldest first; kept ones in the last."""
        newest = self.kept.views(self._store.kept_flats()) if self.snapshots else {}
        return [
            Content(s, self.averaged.views(self._store.flats(s)), newest) for s in self.snapshots
        ]

    def load(
        self,
        contents: list[Content],
        dtypes: Mapping[str, torch.dtype],
        ties: dict[str, str],
        notes: Mapping[str, Any],
    ) -> None:
        """Replace everything by saved contents, oldest first."""
        self._forget()
        if contents:
            newest = contents[-1]
            layouts = self._layouts(newest.averaged, newest.kept, dtypes)
            self._store.refill(*layouts, self.k, contents[-self.k :], notes)
            self.averaged, self.kept = layouts
        else:
            self.clear()
        self.ties = ties

    def clear(self) -> None:
        """Drop every snapshot."""
        self._store.clear()
        self.averaged, self.kept, self.ties = Layout(()), Layout(()), {}
        self._forget()

    def _forget(self) -> None:
        """What was learned from the snapshots that are gone."""
        self._sums, self._last_read, self._reported, self._bound = {}, (), set(), False
        self._shards = ""

    def wait(self) -> None:
        """Return when every snapshot is where it belongs."""
        self._store.wait()

    def idle_memory(self) -> AbstractContextManager[Mapping[str, Tensor]]:
        """Room on the model's device, by tensor, that nothing else uses while the block lasts."""
        return self._store.idle_memory()

    def describe(self) -> str:
        """Size and place, in a few words."""
        where = self._store.describe()
        if not self.averaged.groups:
            return where
        held = len(self.snapshots) * self.averaged.nbytes + self.kept.nbytes
        return f"{self.averaged.numel:,} values each, {held / 1e6:,.1f} MB in {where}"

    def _layouts(
        self,
        averaged: Mapping[str, Tensor],
        kept: Mapping[str, Tensor],
        dtypes: Mapping[str, torch.dtype] | None = None,
    ) -> tuple[Layout, Layout]:
        packed = self._store.packed
        return (
            Layout.of(averaged, storage_dtype=self._storage_dtype, packed=packed, dtypes=dtypes),
            Layout.of(kept, packed=packed),
        )

    def _bind(self, selection: Selection, notes: Mapping[str, Any]) -> None:
        """Check a model against what was collected before, and follow where it may change."""
        shards = _parts(selection.shardings)
        if not self.averaged.groups:
            layouts = self._layouts(selection.averaged, selection.kept)
            self._store.open(*layouts, self.k)
            self.averaged, self.kept = layouts
        else:
            if self._shards and shards and self._shards != shards:
                raise LayoutError(
                    "this process holds other parts of the model than when the window was "
                    "collected, on another mesh or with other placements. Resume on the same "
                    "ones, or call averager.reset() to begin a new window."
                )
            self._follow(selection, notes)
        self.ties, self.shardings = selection.ties, selection.shardings
        self._shards = shards
        self._names = (list(self.averaged.signature()), list(self.kept.signature()))
        self._bound = True

    def _follow(self, selection: Selection, notes: Mapping[str, Any]) -> None:
        old_averaged, old_kept = self.averaged.signature(), self.kept.signature()
        live = selection.all()
        _check_same({**old_averaged, **old_kept}, live, selection)
        # Once averaged, always averaged. A frozen tensor that is trained now joins; until now it
        # stood still, so its one copy is its value in every snapshot of the window.
        joined = [name for name in selection.averaged if name in old_kept]
        averaged = {name: live[name] for name in (*old_averaged, *joined)}
        kept = {name: live[name] for name in old_kept if name not in joined}
        layouts = self._layouts(averaged, kept)
        if layouts == (self.averaged, self.kept):
            return
        if self._store.on_host and _but_for_device(layouts) == _but_for_device(
            (self.averaged, self.kept)
        ):
            self.averaged, self.kept = layouts
            self._store.retarget(*layouts)
            return
        contents = [
            Content(
                c.snapshot,
                {**c.averaged, **{name: c.kept[name] for name in joined}},
                {name: c.kept[name] for name in kept},
            )
            for c in self.contents()
        ]
        self._sums = {}
        self._store.refill(*layouts, self.k, contents, notes, relaid=True)
        self.averaged, self.kept = layouts

    def _may_slide(self, ids: tuple[int, ...], weights: Weights) -> bool:
        """Whether this read goes through the sliding sum; in auto mode, learn from the last."""
        whole = weights.uniform and ids == tuple(s.index for s in self.snapshots)
        if self._sliding is not False and not whole:
            return False
        if self._sliding == "auto":
            followed = ids == self._last_read or ids[:-1] in (self._last_read, self._last_read[1:])
            wanted = self.k >= _SLIDING_FROM and len(ids) > 1 and followed
            if not wanted:
                self._sums = {}
            self._store.keep_evicted = wanted
            return wanted
        return self._sliding

    def _slid(self, i: int, ids: tuple[int, ...]) -> Iterator[tuple[int, Tensor]]:
        total = self._sums.setdefault(i, SlidingSum(self.k))
        flats = [self._store.flats(snapshot)[i] for snapshot in self.snapshots]
        evicted = self._store.evicted
        leaving = self._store.flats(evicted)[i] if evicted is not None else None
        if total.ids != ids:
            if total.can_slide(ids, leaving is not None):
                total.slide(ids, flats, leaving)
            else:
                total.rebuild(ids, flats)
        return total.blocks()

    def _report(self, used: list[Snapshot]) -> None:
        """Warn, once a snapshot, which tensors hold NaN or Inf."""
        for snapshot in used:
            if snapshot.index in self._reported:
                continue
            views = self.averaged.views(self._store.flats(snapshot))
            bad = [name for name, value in views.items() if not bool(value.isfinite().all())]
            if not bad:
                continue
            self._reported.add(snapshot.index)
            left = self.k - (self.snapshots[-1].index - snapshot.index)
            more = f" and {len(bad) - 1} more tensors" if len(bad) > 1 else ""
            warnings.warn(
                f"the snapshot of step {snapshot.step} holds NaN or Inf in {bad[0]!r}{more}; the "
                f"mean does too, until that snapshot leaves the window ({left} more to collect). "
                "Look for a diverging step; averager.reset() begins a new window at once.",
                NonFiniteWarning,
                stacklevel=4,
            )


class _Delivery:
    """Rounds float64 blocks of one group into the tensors they belong to."""

    def __init__(self, group: Group, targets: Mapping[str, Tensor]) -> None:
        self._pieces: list[tuple[int, int, Tensor]] = []
        self._detours: list[tuple[Tensor, Tensor]] = []
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
                self._detours.append((target, flat.as_strided(entry.shape, entry.stride)))
            begin = entry.offset * scale
            self._pieces.append((begin, begin + entry.numel * scale, as_real(flat)))
        self._next = 0

    def __call__(self, start: int, mean: Tensor) -> None:
        """Deliver one block; blocks come in order."""
        stop = start + mean.numel()
        while self._next < len(self._pieces):
            begin, end, flat = self._pieces[self._next]
            low, high = max(begin, start), min(end, stop)
            if low < high:
                part, values = flat[low - begin : high - begin], mean[low - start : high - start]
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
        """Deliver what needed a detour: targets whose memory is laid out otherwise."""
        for target, value in self._detours:
            write_into(target, value)


def _parts(shardings: Mapping[str, Sharding]) -> str:
    """Which part of each tensor lies here, in one short text; other parts may look the same."""
    parts = []
    for name, sharding in sorted(shardings.items()):
        mesh = sharding.mesh
        dims = zip(sharding.placements, mesh.get_coordinate() or (), mesh.shape, strict=False)
        cut = [(repr(placement), place, size) for placement, place, size in dims if size > 1]
        if cut:
            parts.append((name, tuple(sharding.shape), cut))
    return hashlib.sha256(repr(parts).encode()).hexdigest() if parts else ""


def _but_for_device(layouts: tuple[Layout, Layout]) -> list[Any]:
    return [
        (group.dtype, group.stored, group.entries) for layout in layouts for group in layout.groups
    ]


def _check_same(
    before: Mapping[str, tuple[torch.Size, torch.dtype]],
    live: Mapping[str, Tensor],
    selection: Selection,
) -> None:
    advice = "call averager.reset() to begin a new window with this model."
    for name, (shape, dtype) in before.items():
        tensor = live.get(name)
        if tensor is None:
            raise LayoutError(f"tensor {name!r} was collected before and is gone; {advice}")
        if tensor.shape != shape:
            raise LayoutError(
                f"tensor {name!r} has shape {tuple(tensor.shape)} and had {tuple(shape)} when it "
                f"was collected before; {advice}"
            )
        if tensor.dtype != dtype:
            raise LayoutError(
                f"tensor {name!r} is {tensor.dtype} and was {dtype} when it was collected before; "
                f"{advice}"
            )
    for name in (*selection.averaged, *selection.kept):
        if name not in before:
            raise LayoutError(
                f"tensor {name!r} is new: it was not there, or was frozen and omitted, when the "
                f"window began; {advice}"
            )
