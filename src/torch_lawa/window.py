"""The window: a store, the layout of its snapshots, and the check that models match it."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from torch_lawa.coefficients import Weights
from torch_lawa.errors import ConfigError, LayoutError, NotReadyError
from torch_lawa.selection import Selection, write_into
from torch_lawa.shards import Sharding, fingerprint
from torch_lawa.stores.base import Content, Counters, FlatLayout, Notes, Snapshot, Store
from torch_lawa.validation import whole_number
from torch_lawa.window_mean import MeanReader, Sliding, TensorMeans

__all__ = ["Window"]


class Window:
    """The k latest snapshots and their mean."""

    def __init__(
        self, store: Store, k: int, storage_dtype: torch.dtype | None, sliding: Sliding
    ) -> None:
        self.k = k
        self.store = store
        self.storage_dtype = storage_dtype
        self.ties: dict[str, str] = {}
        self.excluded: tuple[str, ...] = ()  # kept, and not averaged, because of their names
        self.shardings: dict[str, Sharding] = {}  # known once a model was seen
        self.averaged, self.kept = FlatLayout(()), FlatLayout(())
        self._mean = MeanReader(store, k, sliding)
        # The version of the selection that the layouts were checked against; see `Selection`. None
        # after the window was loaded, cleared or a model did not match: then the next is checked.
        self._bound: int | None = None
        self._shards = ""  # which shards this rank holds
        store.claim(self)
        self._found = store.find(k)
        if self._found is not None:
            self.averaged, self.kept = self._found.averaged, self._found.kept
            notes = self._found.notes
            self.ties, self._shards = notes["ties"], notes["shards"]
            self.excluded = tuple(notes["excluded"])

    @property
    def found(self) -> Counters | None:
        """The counters of the averager whose window was found in the store, if one was."""
        return None if self._found is None else self._found.notes

    @property
    def sliding(self) -> Sliding:
        """Whether means are read from sliding sums."""
        return self._mean.sliding

    @property
    def snapshots(self) -> list[Snapshot]:
        """Oldest first."""
        return self.store.snapshots

    @property
    def on_host(self) -> bool:
        """Whether the snapshots are in host memory on any device of the model."""
        return self.store.on_host

    @property
    def per_process(self) -> bool:
        """Whether this window is independent of those of the other ranks."""
        return bool(getattr(self.store, "per_process", False))

    @property
    def seen(self) -> bool:
        """Whether the shardings are known from a model; not yet after a state was loaded."""
        return self._bound is not None or bool(self.shardings)

    @property
    def steps(self) -> list[int]:
        """The step labels of the snapshots, oldest first."""
        return [snapshot.step for snapshot in self.snapshots]

    def next_label(self, step: int | None, count: int) -> int:
        """The label of the next snapshot: `step`, or `count` if none is given. Labels increase."""
        newest = self.steps[-1] if self.snapshots else None
        if step is None:
            return count if newest is None else max(count, newest + 1)
        label = whole_number("step", step)
        if newest is not None and label <= newest:
            raise ConfigError(
                f"step={step} is not after step {newest}, the newest snapshot of the window. If "
                "the run went back to an earlier checkpoint, load the averager state saved with "
                "it, or call averager.reset()."
            )
        return label

    def num_averaged(self, k: int | None, usual: int, needed: int) -> int:
        """How many snapshots to average: `k`, or the `usual` number; raises if there are too few.

        The usual number is too small if it is below `needed`.
        """
        held = len(self.snapshots)
        if k is not None:
            k = whole_number("k", k, least=1, most=self.k)
            if k > held:
                raise NotReadyError(
                    f"the mean of {k} snapshots was requested, but only {held} snapshots were "
                    "collected: collect more, or request fewer."
                )
            return k
        if usual < needed:
            hint = "call averager.collect(model) first."
            if held:
                hint = "check averager.ready, request average(k=...), or set min_snapshots=1."
            raise NotReadyError(f"only {usual} of {self.k} snapshots were collected: {hint}")
        return usual

    def put(self, snapshot: Snapshot, selection: Selection, counters: Counters) -> None:
        """Take one snapshot of a model."""
        self.store.check_owner(self)
        if selection.version != self._bound:
            self.bind(selection, counters)
        tensors = selection.all()
        content = Content(
            snapshot,
            {name: tensors[name] for name in self._names[0]},
            {name: tensors[name] for name in self._names[1]},
        )
        self.store.put(content, self._notes(counters))

    def bind(self, selection: Selection, counters: Counters) -> None:
        """Check a model against the layouts, or learn them from it; follow permitted changes."""
        self._bound = None
        shards = fingerprint(selection.shardings)
        if not self.averaged.groups:
            layouts = self._layouts(selection.averaged, selection.kept)
            self.store.open(*layouts, self.k)
            self.averaged, self.kept = layouts
        else:
            if self._shards and shards and self._shards != shards:
                raise LayoutError(
                    "this rank holds other shards of the model than when the window was collected: "
                    "the mesh or the placements differ. Resume on the same mesh and placements, or "
                    "call averager.reset() to begin a new window."
                )
            self._follow(selection, counters)
        self.ties, self.shardings = selection.ties, selection.shardings
        self.excluded, self._shards = selection.excluded, shards
        self._names = (list(self.averaged.signature()), list(self.kept.signature()))
        self._bound = selection.version

    def mean_into(self, targets: Mapping[str, Tensor], n: int, weights: Weights) -> None:
        """Write the mean of the `n` newest snapshots, and the kept tensors, into `targets`.

        With n + 1 weights the present values of `targets` are averaged, too, as the last member.
        """
        self.store.check_owner(self)
        self._mean.read_into(targets, self.averaged, n, weights)
        for name, value in self.kept.views(self.store.kept_flats()).items():
            write_into(targets[name], value)

    def mean_by_tensor(self, n: int, weights: Weights) -> TensorMeans:
        """The mean of the `n` newest snapshots and the kept tensors, made one by one.

        It reads the snapshots as they are now: use it before the next one is collected.
        """
        return self._mean.by_tensor(self.averaged, self.kept, n, weights)

    def contents(self) -> list[Content]:
        """Every snapshot as named views into the store, oldest first; all with the newest kept."""
        newest = self.kept.views(self.store.kept_flats()) if self.snapshots else {}
        return [
            Content(s, self.averaged.views(self.store.flats(s)), newest) for s in self.snapshots
        ]

    def load(
        self,
        contents: list[Content],
        dtypes: Mapping[str, torch.dtype],
        ties: dict[str, str],
        excluded: tuple[str, ...],
        counters: Counters,
    ) -> None:
        """Replace everything by saved contents, oldest first."""
        self._forget()
        if contents:
            newest = contents[-1]
            layouts = self._layouts(newest.averaged, newest.kept, dtypes)
            notes: Notes = {**counters, "ties": ties, "excluded": list(excluded), "shards": ""}
            self.store.refill(*layouts, self.k, contents[-self.k :], notes)
            self.averaged, self.kept = layouts
        else:
            self.clear()
        self.ties, self.excluded = ties, excluded

    def clear(self) -> None:
        """Drop every snapshot."""
        self.store.clear()
        self.averaged, self.kept = FlatLayout(()), FlatLayout(())
        self.ties, self.excluded = {}, ()
        self._forget()

    def wait(self) -> None:
        """Return when every snapshot has reached the store."""
        self.store.wait()

    def idle_memory(self) -> AbstractContextManager[Mapping[str, Tensor]]:
        """Unused memory on the model's device, by tensor, for the duration of the block."""
        return self.store.idle_memory()

    def describe(self) -> str:
        """Size and store, in a few words."""
        where = self.store.describe()
        if not self.averaged.groups:
            return where
        held = len(self.snapshots) * self.averaged.nbytes + self.kept.nbytes
        return f"{self.averaged.numel:,} values each, {held / 1e6:,.1f} MB in {where}"

    def _notes(self, counters: Counters) -> Notes:
        kept = list(self.excluded)
        return {**counters, "ties": self.ties, "excluded": kept, "shards": self._shards}

    def _forget(self) -> None:
        """Forget everything about snapshots that are gone."""
        self._mean.forget()
        self._bound, self._shards = None, ""

    def _layouts(
        self,
        averaged: Mapping[str, Tensor],
        kept: Mapping[str, Tensor],
        dtypes: Mapping[str, torch.dtype] | None = None,
    ) -> tuple[FlatLayout, FlatLayout]:
        packed = self.store.packed
        return (
            FlatLayout.of(averaged, storage_dtype=self.storage_dtype, packed=packed, dtypes=dtypes),
            FlatLayout.of(kept, packed=packed),
        )

    def _follow(self, selection: Selection, counters: Counters) -> None:
        """Adapt the layouts to a model that was moved, or whose tensors were (un)frozen."""
        old_averaged, old_kept = self.averaged.signature(), self.kept.signature()
        live = selection.all()
        _check_same({**old_averaged, **old_kept}, live, selection)
        excluded = set(selection.excluded)
        for name in (*old_averaged, *self.excluded):
            if (name in old_averaged) == (name in excluded):
                raise LayoutError(
                    f"tensor {name!r} is {'averaged' if name in old_averaged else 'excluded'} in "
                    "the window, but no longer: use the same include and exclude patterns, or call "
                    "averager.reset() to begin a new window."
                )
        # A tensor that was averaged once is always averaged. A frozen tensor that is trained now
        # joins: it did not change before, so its one copy is its value in every snapshot.
        joined = [name for name in selection.averaged if name in old_kept]
        averaged = {name: live[name] for name in (*old_averaged, *joined)}
        kept = {name: live[name] for name in old_kept if name not in joined}
        layouts = self._layouts(averaged, kept)
        if layouts == (self.averaged, self.kept):
            return
        moved_only = _without_devices(layouts) == _without_devices((self.averaged, self.kept))
        if moved_only and self.store.retarget(*layouts):
            self.averaged, self.kept = layouts
            return
        contents = [
            Content(
                c.snapshot,
                {**c.averaged, **{name: c.kept[name] for name in joined}},
                {name: c.kept[name] for name in kept},
            )
            for c in self.contents()
        ]
        self._mean.drop_sums()
        self.store.refill(*layouts, self.k, contents, self._notes(counters), relaid=True)
        self.averaged, self.kept = layouts


def _without_devices(layouts: tuple[FlatLayout, FlatLayout]) -> list[Any]:
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
            raise LayoutError(
                f"tensor {name!r} is in the window, but the model no longer has it; {advice}"
            )
        if tensor.shape != shape:
            raise LayoutError(
                f"tensor {name!r} has shape {tuple(tensor.shape)}, but {tuple(shape)} in the "
                f"window; {advice}"
            )
        if tensor.dtype != dtype:
            raise LayoutError(
                f"tensor {name!r} is {tensor.dtype}, but {dtype} in the window; {advice}"
            )
    for name in (*selection.averaged, *selection.kept):
        if name not in before:
            raise LayoutError(
                f"tensor {name!r} is new: when the window began, the model did not have it or it "
                f"was frozen and omitted; {advice}"
            )
