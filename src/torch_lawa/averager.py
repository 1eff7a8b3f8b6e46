"""The averager people put in their training loop."""

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from torch_lawa import averager_state, export
from torch_lawa.coefficients import Coefficients, Uniform
from torch_lawa.errors import ConfigError, NotReadyError, StateError
from torch_lawa.modes import ordinary_mode
from torch_lawa.ranks.agreement import agree, meet
from torch_lawa.schedule import Every, Schedule
from torch_lawa.selection import BufferRule, FrozenRule, Selector, live_tensors
from torch_lawa.stores.base import Snapshot, Store
from torch_lawa.stores.memory import DeviceStore, HostStore
from torch_lawa.swap import find_targets, lend, refuse_if_lent
from torch_lawa.validation import check_float, check_kind, one_of, whole_number
from torch_lawa.window import Sliding, Window

__all__ = ["LatestWeightAverager"]


class LatestWeightAverager:
    """Keeps the `k` latest snapshots of a model and serves their mean.

    >>> model = nn.Linear(2, 1)
    >>> averager = LatestWeightAverager(k=2)
    >>> for epoch in range(3):
    ...     _ = model.weight.data.fill_(epoch)  # train one epoch
    ...     averager.collect(model)
    >>> averager.average()["weight"]
    tensor([[1.5000, 1.5000]])
    >>> with averager.swapped_into(model):
    ...     model.weight[0, 0].item()
    1.5

    Args:
        k: How many snapshots the window holds. The paper's default is 6.
        coefficients: How much each counts: `Uniform()`, `Exponential(alpha)`, `Explicit(weights)`.
        schedule: When `step` takes a snapshot: `Every(n, start=...)` or `OnPlateau(...)`. Without
            one, every call of `step` does.
        min_snapshots: How many snapshots make an average; `k` by default, as in the paper.
            `min_snapshots=1` averages what is there from the first snapshot on.
        store: "host" memory (filled asynchronously from a GPU), the model's "device", or a
            `DiskStore(folder)`.
        storage_dtype: Keep snapshots in `torch.bfloat16` or `torch.float16` to halve their memory.
            Each stored value is then rounded, by up to 0.4 % in bfloat16 (2**-8) and 0.05 % in
            float16 (2**-11, and nothing beyond 65,504); the mean of k is off by about 1/sqrt(k) of
            that. Sums stay float64.
        buffers: Floating-point buffers, such as BatchNorm statistics: from the "newest" snapshot,
            or "average" them. Use `recalibrate_batch_norm` to re-estimate them.
        frozen: Parameters that do not require gradients: "keep" one copy, from the newest
            snapshot, or "omit" them (adapters on a large frozen model).
    """

    def __init__(
        self,
        k: int = 6,
        *,
        coefficients: Coefficients | None = None,
        schedule: Schedule | None = None,
        min_snapshots: int | None = None,
        store: Literal["host", "device"] | Store = "host",
        storage_dtype: torch.dtype | None = None,
        buffers: BufferRule = "newest",
        frozen: FrozenRule = "keep",
        _sliding: Sliding = "auto",
    ) -> None:
        self._options = {name: given for name, given in locals().items() if name != "self"}
        if isinstance(k, bool) or not isinstance(k, int) or k < 1:
            raise ConfigError(f"k={k!r}: the number of snapshots must be an int of at least 1.")
        least = k if min_snapshots is None else whole_number("min_snapshots", min_snapshots)
        if not 1 <= least <= k:
            raise ConfigError(f"min_snapshots={min_snapshots} must lie between 1 and k={k}.")
        one_of("buffers", buffers, ("newest", "average"))
        one_of("frozen", frozen, ("keep", "omit"))
        one_of("_sliding", _sliding, ("auto", True, False))
        one_of("storage_dtype", storage_dtype, (None, torch.bfloat16, torch.float16))
        if not isinstance(store, Store):
            one_of("store", store, ("host", "device"), " Or give a DiskStore(folder).")
            store = HostStore() if store == "host" else DeviceStore()
        self._coefficients: Coefficients = Uniform() if coefficients is None else coefficients
        self._rule(coefficients).weights(k)  # explicit weights must be enough for the window
        self._schedule: Schedule = schedule if schedule is not None else Every(1)
        check_kind("schedule", self._schedule, "due", "Every(n) or OnPlateau()")
        expected = self._schedule.expected()
        if expected is not None and expected < least:
            raise ConfigError(
                f"the schedule {self._schedule} gives {expected} snapshots in the whole run and "
                f"an average needs {least}: it would never be ready. Collect more often, start "
                "earlier, lower k, or set min_snapshots=1."
            )
        self._min_snapshots = least
        self._storage_dtype = storage_dtype
        self._select = Selector(buffers=buffers, frozen=frozen)
        self._window = Window(store, k, storage_dtype, _sliding)
        self._num_steps = 0
        self._num_collected = 0
        self._met = False  # whether the processes of a sharded model have found each other
        self._slots = False  # whether the saved form has a slot for every snapshot of the window
        if self._window.notes:
            self._take_counters(self._window.notes)

    @property
    def k(self) -> int:
        """How many snapshots a full window holds."""
        return self._window.k

    @property
    def min_snapshots(self) -> int:
        """How many snapshots make an average."""
        return self._min_snapshots

    @property
    def coefficients(self) -> Coefficients:
        """How much each snapshot counts where nothing else is asked for."""
        return self._coefficients

    @property
    def schedule(self) -> Schedule:
        """Decides when `step` takes a snapshot; its state is saved with the window."""
        return self._schedule

    @property
    def ready(self) -> bool:
        """Whether there is an average to read."""
        return len(self) >= self._min_snapshots

    @property
    def snapshot_steps(self) -> list[int]:
        """The labels of the snapshots in the window, oldest first."""
        return [snapshot.step for snapshot in self._window.snapshots]

    @property
    def num_collected(self) -> int:
        """How many snapshots were ever collected."""
        return self._num_collected

    def __len__(self) -> int:
        """How many snapshots the window holds now."""
        return len(self._window.snapshots)

    def __bool__(self) -> bool:
        """Always true: `if averager:` asks whether there is one, not whether it is empty."""
        return True

    def __repr__(self) -> str:
        labels = self.snapshot_steps
        steps = f" (steps {labels[0]} to {labels[-1]})" if labels else ""
        stored = f", stored as {self._storage_dtype}" if self._storage_dtype else ""
        return (
            f"LatestWeightAverager(k={self.k}, {len(self)} of {self.k} snapshots{steps}, "
            f"{self._window.describe()}{stored}, {self._coefficients})"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles are averagers of their own, with the same snapshots and options."""
        return averager_state.pickled(self, self._options)

    def bind(self, model: nn.Module | Mapping[str, Tensor]) -> None:
        """Learn the names, shapes and shards of a model without taking a snapshot.

        Needed before `torch.distributed.checkpoint.load`, which loads into what `state_dict`
        returns and so must find every name there; `collect` does it otherwise.
        """
        selection = self._select(model)
        with ordinary_mode():
            self._window.bind(selection, {**self._counters(), "ties": selection.ties})
        self._slots = True

    def collect(self, model: nn.Module | Mapping[str, Tensor], *, step: int | None = None) -> None:
        """Take a snapshot of a model (or of a state dict); the oldest leaves a full window.

        `step` labels it in `snapshot_steps` and in messages; by default it is the number of calls
        of `step` so far, or of `collect` where `step` is not used. Labels must increase.
        """
        refuse_if_lent(model, "collect was called")
        own = self._num_steps or self._num_collected + 1
        label = whole_number("step", step) if step is not None else own
        if self.snapshot_steps and label <= self.snapshot_steps[-1]:
            if step is not None:
                raise ConfigError(
                    f"step={step} is not after the newest snapshot in the window, of step "
                    f"{self.snapshot_steps[-1]}. Did the run go back to an earlier checkpoint? Then "
                    "load the averager's state saved with it, or call averager.reset()."
                )
            label = self.snapshot_steps[-1] + 1
        selection = self._select(model)
        self._meet(model, f"the first call of averager.collect, of step {label},")
        num = self._num_collected
        notes = {**self._counters(), "num_collected": num + 1, "ties": selection.ties}
        with ordinary_mode():
            self._window.put(Snapshot(num, label), selection, notes)
        self._num_collected = num + 1

    def step(self, model: nn.Module | Mapping[str, Tensor], *, loss: float | None = None) -> bool:
        """Count one step (or epoch) and collect if the schedule says so; tells whether it did.

        Of a sharded model every process must collect or none. At the first call they compare their
        schedules, and at every call where a loss decides (`OnPlateau`): give all the same one.

        >>> from torch_lawa import Every
        >>> averager = LatestWeightAverager(k=2, schedule=Every(10))
        >>> sum(averager.step({"w": torch.zeros(1)}) for _ in range(25))
        2
        """
        refuse_if_lent(model, "step was called")
        self._meet(model, f"the first call of averager.step, {self._schedule}")
        due = self._schedule.due(self._num_steps + 1, loss)
        self._num_steps += 1
        if loss is not None:
            agree(model, due, self._num_steps)
        if due:
            self.collect(model)
        return due

    def average(
        self,
        k: int | None = None,
        *,
        coefficients: Coefficients | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> dict[str, Tensor]:
        """The mean of the window as a plain state dict: `model.load_state_dict(...)` takes it.

        `k` averages only the k newest snapshots, `coefficients` weighs them otherwise than the
        averager would. Tensors have their own dtypes unless `dtype` asks for another, lie where
        the snapshots do unless `device` does, and are yours. What is sharded in the model (FSDP2,
        tensor parallel) is a DTensor here, too: nothing is gathered.
        """
        check_float(dtype)
        n = self._window_size(k)
        weights = self._rule(coefficients).weights(n)
        with ordinary_mode():
            home = device or ("cpu" if self._window.on_host else None)
            out = self._window.averaged.allocate(dtype, home)
            out.update(self._window.kept.allocate(None, home))
            self._window.mean_into(out, n, weights)
            for name, sharding in self._window.shardings.items():
                out[name] = sharding.whole(out[name])
        out.update({alias: out[name] for alias, name in self._window.ties.items() if name in out})
        return out

    def swapped_into(
        self,
        model: nn.Module,
        k: int | None = None,
        *,
        coefficients: Coefficients | None = None,
    ) -> AbstractContextManager[None]:
        """Lend the mean to a model for a `with` block; its own values return, whatever happens.

        Values are copied into the model's own tensors, so optimizers, compiled graphs and CUDA
        graphs stay valid. Buffers return as well, so BatchNorm statistics may be re-estimated
        inside the block. It takes one copy of the weights on their device: the one that `collect`
        uses, too, where the store is another place.
        """
        n = self._window_size(k)
        live = live_tensors(model)
        window = self._window
        used = find_targets(live, {**window.averaged.signature(), **window.kept.signature()})
        # Names that were tied when they were collected and are not in this model.
        untied = {a: name for a, name in window.ties.items() if a in live and name in used}
        weights = self._rule(coefficients).weights(n)

        def write() -> None:
            window.mean_into(used, self._window_size(n), weights)  # it may be reset by then
            for alias, name in untied.items():
                live[alias].copy_(used[name])

        touched = {**used, **{alias: live[alias] for alias in untied}}
        return lend(model, touched, write, window.idle_memory())

    def save_pretrained(
        self,
        folder: str | os.PathLike[str],
        model: nn.Module | None = None,
        *,
        k: int | None = None,
        coefficients: Coefficients | None = None,
        dtype: torch.dtype | None = None,
        max_shard_size: int | str = "5GB",
        overwrite: bool = False,
    ) -> None:
        """Write the mean to a folder of safetensors files, as `from_pretrained` loads them.

        One tensor at a time is made, gathered from its shards and written by rank 0, so that no
        process ever holds the whole model. Call it in every process; if it fails in one, it raises
        in all. The folder appears whole or not at all.

        With the `model`, its configuration goes beside the weights (Transformers), and of a
        `PeftModel` only the adapter is written. `dtype` is that of every floating-point tensor in
        the files; above `max_shard_size` there are several, with an index.

        >>> import tempfile
        >>> averager = LatestWeightAverager(k=2)
        >>> for value in (1.0, 4.0):
        ...     averager.collect({"w": torch.full((2,), value)})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     averager.save_pretrained(f"{folder}/averaged")
        ...     os.listdir(f"{folder}/averaged")
        ['model.safetensors']
        """

        def plan() -> export.ExportPlan:
            n = self._window_size(k)
            if model is not None and not self._window.seen:
                selection = self._select(model)
                self._window.bind(selection, {**self._counters(), "ties": selection.ties})
            rule = self._rule(coefficients)
            return export.plan_export(
                self._window, n, rule, model, dtype=dtype, max_shard_size=max_shard_size
            )

        with ordinary_mode():
            export.save(self._window, folder, plan, overwrite=overwrite)

    def wait(self) -> None:
        """Return when every snapshot is where it belongs: host memory, or the disk."""
        self._window.wait()

    def reset(self) -> None:
        """Drop every snapshot and begin a new window; counters go on."""
        self._window.clear()

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on exactly: plain values and tensors, safe to `torch.load`.

        Like a module's, it refers to live memory: save it before the next `collect`, or copy it.
        Of a sharded model, or after `bind`, it is in the form that `torch.distributed.checkpoint`
        wants: the averager is a `Stateful`, saved and loaded on any number of processes.
        """
        self._window.wait()
        if self._slots or self._window.shardings:
            return averager_state.pack_slots(self._counters(), self._window, k=self.k)
        return averager_state.pack(self._counters(), self._window, k=self.k)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state; nothing changes if it cannot be loaded.

        Another `k`, store or storage dtype than it was saved with is fine: the newest snapshots
        that fit are taken.
        """
        saved = averager_state.unpack(state)
        kind = type(self._schedule).__name__
        if saved.counters["schedule_kind"] != kind:
            raise StateError(
                f"the state was saved with the schedule {saved.counters['schedule_kind']} and this "
                f"averager has {kind}: build it with the same one."
            )
        notes = {**saved.counters, "ties": saved.ties}
        before = self._schedule.state_dict()
        try:
            self._schedule.load_state_dict(saved.counters["schedule"])
            with ordinary_mode():
                self._window.load(saved.contents, saved.dtypes, saved.ties, notes)
        except BaseException:
            self._schedule.load_state_dict(before)
            raise
        self._take_counters(saved.counters)

    def _meet(self, model: nn.Module | Mapping[str, Tensor], where: str) -> None:
        """Once, before anything is collected: all processes of a sharded model do the same."""
        if not self._met:
            meet(model, f"{where} with k={self.k}")
            self._met = True

    def _rule(self, asked: Coefficients | None) -> Coefficients:
        rule = self._coefficients if asked is None else asked
        check_kind("coefficients", rule, "weights", "Uniform() or Exponential(0.9)")
        return rule

    def _window_size(self, k: int | None) -> int:
        if k is not None:
            if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= self.k:
                raise ConfigError(
                    f"k={k!r}: the window holds {self.k} snapshots, so ask for 1 to {self.k}."
                )
            if k > len(self):
                raise NotReadyError(
                    f"{len(self)} snapshots were collected and the mean of {k} was asked for; "
                    "collect more, or ask for fewer."
                )
            return k
        if not self.ready:
            hint = "call averager.collect(model) first."
            if len(self):
                hint = "check averager.ready, ask for average(k=...), or set min_snapshots=1."
            raise NotReadyError(f"{len(self)} of {self.k} snapshots were collected; {hint}")
        return len(self)

    def _counters(self) -> dict[str, Any]:
        return {
            "num_steps": self._num_steps,
            "num_collected": self._num_collected,
            "schedule_kind": type(self._schedule).__name__,
            "schedule": self._schedule.state_dict(),
        }

    def _take_counters(self, counters: Mapping[str, Any]) -> None:
        if counters.get("schedule_kind") == type(self._schedule).__name__:
            self._schedule.load_state_dict(dict(counters["schedule"]))
        self._num_steps = int(counters["num_steps"])
        self._num_collected = int(counters["num_collected"])
