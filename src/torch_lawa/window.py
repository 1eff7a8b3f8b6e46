"""The window: a store, the layout of its snapshots, and the check that models match it."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torch_lawa.block_mean import Block, BlockMean
from torch_lawa.coefficients import Blend, Coefficients, Uniform, Weights, weights_at
from torch_lawa.errors import ConfigError, LayoutError, NotReadyError
from torch_lawa.selection import Selection, check_same, live_tensors, write_into
from torch_lawa.shards import Sharding, fingerprint
from torch_lawa.stores.base import Content, Counters, FlatLayout, Notes, Snapshot, Store
from torch_lawa.swag import Draw
from torch_lawa.swap import ordinary_mode, swap_targets, swapped
from torch_lawa.validation import check_float, whole_number
from torch_lawa.window_mean import MeanReader, Sliding, TensorMeans

__all__ = ["SavedWindow", "Window"]


@dataclass(frozen=True)
class SavedWindow:
    """The validated contents of a saved state."""

    contents: list[Content]  # oldest first
    dtypes: dict[str, torch.dtype]  # of the averaged tensors in the model
    ties: dict[str, str]
    excluded: tuple[str, ...]
    kept: dict[str, Tensor]  # zeros if there is no snapshot
    block: Block | None  # the samples after the newest snapshot
    counters: Counters


@dataclass(frozen=True)
class _Bound:
    """A model that was checked against the layouts of a window."""

    window: object  # see `Held.window`
    version: int  # of the selection: see `Selection`
    ties: dict[str, str]
    excluded: tuple[str, ...]
    shards: str
    shardings: dict[str, Sharding]
    names: tuple[list[str], list[str]]  # of averaged and kept tensors
    kept: FlatLayout  # as in the model: a kept tensor may have another shape than before


class Window:
    """The k latest snapshots and their mean.

    What it holds is in its store, which changes it in one step.
    """

    def __init__(
        self,
        store: Store,
        k: int,
        storage_dtype: torch.dtype | None,
        sliding: Sliding,
        samples: int = 1,
    ) -> None:
        self.k = k
        self.block = BlockMean(samples) if samples > 1 else None
        self.store = store
        self.storage_dtype = storage_dtype
        self._mean = MeanReader(store, k, sliding)
        self._bound: _Bound | None = None
        store.claim(self)
        # The counters of the averager whose window was found in the store, if one was.
        self.found: Counters | None = store.find(k)

    @property
    def averaged(self) -> FlatLayout:
        """Where the averaged tensors are in a snapshot."""
        return self.store.held.averaged

    @property
    def kept(self) -> FlatLayout:
        """Where the kept tensors of the newest snapshot are."""
        return self.store.held.kept

    @property
    def identity(self) -> object:
        """Another object after the window was replaced or dropped."""
        return self.store.held.window

    @property
    def ties(self) -> dict[str, str]:
        """Other names of tensors."""
        bound = self._valid_bound()
        return bound.ties if bound is not None else self.store.held.notes["ties"]

    @property
    def excluded(self) -> tuple[str, ...]:
        """Tensors that are kept, and not averaged, because of their names."""
        bound = self._valid_bound()
        return bound.excluded if bound is not None else tuple(self.store.held.notes["excluded"])

    @property
    def shardings(self) -> dict[str, Sharding]:
        """What the sharded tensors are shards of; known once a model was seen."""
        return {} if self._bound is None else self._bound.shardings

    @property
    def num_collected(self) -> int:
        """How many snapshots were collected in total."""
        return self.store.held.notes["num_collected"]

    @property
    def samples(self) -> int:
        """How many collected weights make up a snapshot."""
        return 1 if self.block is None else self.block.size

    @property
    def sliding(self) -> Sliding:
        """Whether means are read from sliding sums."""
        return self._mean.sliding

    @property
    def snapshots(self) -> list[Snapshot]:
        """Oldest first."""
        return self.store.snapshots

    @property
    def seen(self) -> bool:
        """Whether the shardings are known from a model; not yet after a state was loaded."""
        return self._valid_bound() is not None or bool(self.shardings)

    @property
    def steps(self) -> list[int]:
        """The step labels of the snapshots, oldest first."""
        return [snapshot.step for snapshot in self.snapshots]

    @property
    def _key(self) -> object:
        """Identifies the snapshot that samples are collected for."""
        return self.identity, self.num_collected

    @property
    def num_sampled(self) -> int:
        """How many samples were collected since the newest snapshot."""
        return 0 if self.block is None else self.block.count(self._key)

    @property
    def newest_step(self) -> int | None:
        """The label of what was collected last; None if nothing was."""
        sampled = None if self.block is None else self.block.step(self._key)
        return self.steps[-1] if sampled is None and self.snapshots else sampled

    def next_label(self, step: int | None, count: int) -> int:
        """The label of the next snapshot: `step`, or `count` if none is given. Labels increase."""
        newest = self.newest_step
        if step is None:
            return count if newest is None else max(count, newest + 1)
        label = whole_number("step", step)
        if newest is not None and label <= newest:
            raise ConfigError(
                f"step={step} is not after step {newest}, which was collected last. If "
                "the run went back to an earlier checkpoint, load the averager state saved with "
                "it, or call averager.reset()."
            )
        return label

    def num_to_average(self, k: int | None, usual: int, needed: int, none_yet: str) -> int:
        """How many snapshots to average: `k`, or the `usual` number; raises if there are too few.

        The usual number is too small if it is below `needed`; `none_yet` says why there are none.
        """
        held = len(self.snapshots)
        if k is not None:
            k = whole_number("k", k, least=1, most=self.k)
            if k > held:
                raise NotReadyError(
                    f"k={k}, but the window holds {held} of {self.k} snapshots so far: collect "
                    "more, or request a smaller k."
                )
            return k
        if usual < needed:
            hint = none_yet
            if self.num_sampled and not held:
                hint = f"the first one has {self.num_sampled} of its {self.samples} samples so far."
            elif held:
                hint = "check averager.ready, request average(k=...), or set min_snapshots=1."
            raise NotReadyError(f"no average yet, with {usual} of {needed} snapshots: {hint}")
        return usual

    def put(self, snapshot: Snapshot, selection: Selection, counters: Counters) -> None:
        """Take one snapshot of a model, or the sample that may complete one."""
        self.store.check_owner(self)
        bound = self._valid_bound()
        if bound is None or selection.version != bound.version:
            bound = self.bind(selection)
        tensors = selection.all()
        averaged = {name: tensors[name] for name in bound.names[0]}
        if self.block is not None:
            self.block.add(averaged, key=self._key, step=snapshot.step)
            if self.num_sampled < self.block.size:
                return
            averaged = self.block.mean()
        kept = {name: tensors[name] for name in bound.names[1]}
        content = Content(snapshot, averaged, kept, bound.kept)
        self.store.put(content, self._notes(counters, bound))

    def bind(self, selection: Selection) -> _Bound:
        """Check a model against the layouts, or learn them from it; follow permitted changes."""
        shards, sampled = fingerprint(selection.shardings), self.num_sampled
        if not self.snapshots:
            if not selection.averaged:
                raise LayoutError(
                    "there is nothing to average: the model has no trainable floating-point tensors"
                    f"{' that include and exclude select' if selection.excluded else ''}. "
                    "Pass the module that is being trained, while its parameters require "
                    "gradients, or a state dict with its weights."
                )
            if sampled:
                self._check_samples(selection)
            layouts = self._layouts(selection.averaged, selection.kept)
            if layouts != (self.averaged, self.kept):
                self.store.open(*layouts, self.k)
        else:
            before = self._shards
            if before and shards and before != shards:
                raise LayoutError(
                    "this rank holds other shards of the model than when the window was collected: "
                    "the mesh or the placements differ. Resume on the same mesh and placements, or "
                    "call averager.reset() to begin a new window."
                )
            self._follow(selection)
        names = list(self.averaged.signature()), list(self.kept.signature())
        tensors = selection.all()
        if self.block is not None and sampled:
            self.block.carry(self._key, {name: tensors[name] for name in names[0]})
        bound = _Bound(
            self.identity,
            selection.version,
            selection.ties,
            selection.excluded,
            shards,
            selection.shardings,
            names,
            FlatLayout.of({name: tensors[name] for name in names[1]}, packed=self.store.packed),
        )
        self._bound = bound
        return bound

    def weights(self, n: int, rule: Coefficients) -> Weights:
        """The weights of the `n` newest snapshots, and of the samples since then if there are any.

        A blend has the newest snapshot as the live weights.
        """
        steps = self.steps[-n:]
        if self.block is None or not self.num_sampled or isinstance(rule, Blend):
            return weights_at(rule, steps)
        return self.block.weights(rule, steps, self._key)

    def mean_into(
        self, targets: Mapping[str, Tensor], n: int, rule: Coefficients, *, live: bool = False
    ) -> None:
        """Write the mean of the `n` newest snapshots, and the kept tensors, into `targets`.

        Kept tensors without a target are left out. With `live`, the targets have the live weights
        that a blend needs.
        """
        self.store.check_owner(self)
        if live and isinstance(rule, Blend):
            self._mean.read_into(targets, self.averaged, n, rule.live_weights(self.steps[-n:]))
        else:
            weights, last = self.weights(n, rule), self._last()
            self._mean.read_into(targets, self.averaged, n, weights, last)
        self._write_kept(targets)

    def sample_into(self, targets: Mapping[str, Tensor], n: int, draw: Draw) -> None:
        """Write a sample around the mean of the `n` newest snapshots, and the kept tensors."""
        self.store.check_owner(self)
        draw.check(n)
        self._mean.read_into(targets, self.averaged, n, Uniform().weights(n), draw=draw)
        self._write_kept(targets)

    def swapped(
        self, model: nn.Module, write: Callable[[Mapping[str, Tensor]], None]
    ) -> AbstractContextManager[None]:
        """Context manager that swaps what `write` writes into the model, and restores it."""
        live = live_tensors(model)
        used = swap_targets(live, self.averaged.signature(), self.kept.signature())
        # Names that were tied when they were collected, but are separate tensors in this model.
        untied = {a: name for a, name in self.ties.items() if a in live and name in used}

        def write_all() -> None:
            write(used)
            for alias, name in untied.items():
                write_into(live[alias], used[name])

        touched = {**used, **{alias: live[alias] for alias in untied}}
        return swapped(model, touched, write_all, self.idle_memory())

    def read(
        self,
        dtype: torch.dtype | None,
        device: torch.device | str | None,
        write_into: Callable[[dict[str, Tensor]], None],
    ) -> dict[str, Tensor]:
        """A state dict of new tensors, which `write_into` fills."""
        check_float(dtype)
        with ordinary_mode():
            home = device or ("cpu" if self.store.on_host else None)
            out = self.averaged.allocate(dtype, home)
            out.update(self.kept.allocate(None, home))
            write_into(out)
            for name, sharding in self.shardings.items():
                out[name] = sharding.whole(out[name])
        out.update({alias: out[name] for alias, name in self.ties.items() if name in out})
        return out

    def mean_by_tensor(self, n: int, weights: Weights) -> TensorMeans:
        """The mean of the `n` newest snapshots and the kept tensors, made one by one.

        It reads the snapshots as they are now: use it before the next one is collected.
        """
        return self._mean.by_tensor(self.averaged, self.kept, n, weights, self._last())

    def _write_kept(self, targets: Mapping[str, Tensor]) -> None:
        for name, value in self.kept.views(self.store.kept_flats()).items():
            if name in targets:
                write_into(targets[name], value)
        self.store.check_read()

    def sampled(self) -> Block | None:
        """The samples since the newest snapshot; None if there are none."""
        return None if self.block is None else self.block.saved(self._key)

    def _last(self) -> dict[str, Tensor] | None:
        block = self.sampled()
        return None if block is None else block.total

    def contents(self) -> list[Content]:
        """Every snapshot as named views into the store, oldest first; all with the newest kept."""
        newest = self.kept.views(self.store.shared_kept_flats()) if self.snapshots else {}
        return [
            Content(s, self.averaged.views(self.store.shared_flats(s)), newest)
            for s in self.snapshots
        ]

    def load(self, saved: SavedWindow) -> None:
        """Replace everything by what was saved; of the snapshots by the newest that fit."""
        layouts = self.averaged, self.kept  # without snapshots, a bound model's names stay known
        if saved.contents:
            newest = saved.contents[-1]
            layouts = self._layouts(newest.averaged, newest.kept, saved.dtypes)
        elif saved.block is not None:
            layouts = self._layouts(saved.block.total, saved.kept, saved.dtypes)
        ties, excluded = saved.ties, list(saved.excluded)
        notes: Notes = {**saved.counters, "ties": ties, "excluded": excluded, "shards": ""}
        self.store.refill(*layouts, self.k, saved.contents[-self.k :], notes)
        if self.block is not None and saved.block is not None:
            self.block.load(saved.block, self._key)

    def clear(self, counters: Counters) -> None:
        """Drop every snapshot. The names of the tensors are still known, for a state in slots."""
        notes: Notes = {**counters, "ties": {}, "excluded": [], "shards": ""}
        self.store.refill(self.averaged, self.kept, self.k, [], notes)

    def wait(self) -> None:
        """Return when every snapshot has reached the store."""
        self.store.wait()

    def idle_memory(self) -> AbstractContextManager[Mapping[str, Tensor]]:
        """Unused memory on the model's device, by tensor, for the duration of the block."""
        return self.store.idle_memory()

    def describe(self) -> str:
        """Size and store, in a few words."""
        where = self.store.describe()
        if self.samples > 1:
            where += f", {self.samples} samples each"
        if not self.averaged.groups:
            return where
        held = len(self.snapshots) * self.averaged.nbytes + self.kept.nbytes
        return f"{self.averaged.numel:,} values each, {held / 1e6:,.1f} MB in {where}"

    def _valid_bound(self) -> _Bound | None:
        """The model that was checked against the present window."""
        bound = self._bound
        return bound if bound is not None and bound.window is self.identity else None

    @property
    def _shards(self) -> str:
        """Which shards this rank holds in the window; "" if unknown."""
        bound = self._valid_bound()
        return bound.shards if bound is not None else self.store.held.notes["shards"]

    def _notes(self, counters: Counters, bound: _Bound) -> Notes:
        excluded = list(bound.excluded)
        return {**counters, "ties": bound.ties, "excluded": excluded, "shards": bound.shards}

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

    def _check_samples(self, selection: Selection) -> None:
        """Raise if the samples of the first snapshot are of another model.

        Its tensors may have been frozen or unfrozen since.
        """
        sampled = self.averaged.signature()
        others = {*self.kept.signature(), *selection.kept} - set(sampled)
        kept = {n: (t.shape, t.dtype) for n, t in selection.all().items() if n in others}
        check_same(sampled, kept, (), selection)

    def _follow(self, selection: Selection) -> None:
        """Adapt the layouts to a model that was moved, or whose tensors were (un)frozen."""
        old_averaged, old_kept = self.averaged.signature(), self.kept.signature()
        live = selection.all()
        # A tensor that was averaged once is always averaged. A frozen tensor that is trained now
        # joins: it did not change before, so its one copy is its value in every snapshot.
        joined = [name for name in selection.averaged if name in old_kept]
        check_same(old_averaged, old_kept, joined, selection)
        excluded = set(selection.excluded)
        for name in (*old_averaged, *self.excluded):
            if (name in old_averaged) == (name in excluded):
                raise LayoutError(
                    f"tensor {name!r} is {'averaged' if name in old_averaged else 'excluded'} in "
                    "the window, but no longer: use the same include and exclude patterns, or call "
                    "averager.reset() to begin a new window."
                )
        averaged = {name: live[name] for name in (*old_averaged, *joined)}
        kept = {
            name: _shaped(live[name], *facts)
            for name, facts in old_kept.items()
            if name not in joined
        }
        layouts = self._layouts(averaged, kept)
        if layouts == (self.averaged, self.kept):
            return
        moved_only = _without_devices(layouts) == _without_devices((self.averaged, self.kept))
        if moved_only and self.store.retarget(*layouts):
            return
        contents = [
            Content(
                c.snapshot,
                {**c.averaged, **{name: c.kept[name] for name in joined}},
                {name: c.kept[name] for name in kept},
            )
            for c in self.contents()
        ]
        self.store.refill(*layouts, self.k, contents, self.store.held.notes, relaid=True)


def _without_devices(layouts: tuple[FlatLayout, FlatLayout]) -> list[Any]:
    return [
        (group.dtype, group.stored, group.entries) for layout in layouts for group in layout.groups
    ]


def _shaped(like: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """`like`, or a tensor on its device with the given shape and dtype if it has others."""
    if like.shape == shape and like.dtype == dtype:
        return like
    return torch.zeros((), dtype=dtype, device=like.device).expand(shape)
