"""`LatestWeightAverager`, the averager for a training loop."""

import copy
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from torch_lawa import averager_state
from torch_lawa.coefficients import Coefficients, Uniform, blended
from torch_lawa.errors import StateError
from torch_lawa.mutex import one_at_a_time
from torch_lawa.ranks.agreement import check_same_call, check_same_decision
from torch_lawa.schedule import Every, Horizon, Schedule, check_window, choose_schedule
from torch_lawa.selection import BufferRule, FrozenRule, Selector, live_shardings
from torch_lawa.stores.base import Counters, Snapshot, Store
from torch_lawa.stores.memory import DeviceStore, HostStore
from torch_lawa.swag import Draw
from torch_lawa.swap import ordinary_mode, refuse_if_swapped
from torch_lawa.units import counted
from torch_lawa.validation import check_kind, one_of, whole_number
from torch_lawa.window import Window
from torch_lawa.window_mean import Sliding

if TYPE_CHECKING:
    from torch_lawa.export import ExportPlan

__all__ = ["LatestWeightAverager"]


class LatestWeightAverager:
    """Keeps the `k` latest snapshots of a model and provides their mean.

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
        coefficients: The weights of the mean: `Uniform()`, `Recent(share)`, `Exponential(alpha)`,
            `Explicit(weights)`, `Annealing(curve)` or `Blend(blend, rule)`.
        blend: Blend the mean with the live weights: `(1 - blend) * live + blend * mean`, as with
            `Blend(blend, coefficients)`.
        schedule: When `step` takes a snapshot: `Every(n, start=...)` or `OnPlateau(...)`; by
            default at every call. The averager works with a copy of it.
        horizon: Instead of a schedule: the window spans this share of the steps so far, such as
            1/4, however long the run will be (see `Horizon`). It has no effect on `collect`.
        samples: How many collected weights make up a snapshot, which is their mean. `samples=16`
            averages 16 times as many points of the run, also those since the newest snapshot, for
            one more copy of the weights in memory (float32, on the model's device).
        min_snapshots: How many snapshots an average needs; `k` by default, as in the paper, and 1
            with a horizon.
        store: Where snapshots are kept: "host" memory (filled in the background from a GPU), the
            model's "device", or a `DiskStore(folder)`.
        storage_dtype: Store snapshots in `torch.bfloat16` or `torch.float16` to halve their memory.
            This rounds values by up to 0.4 % (`2**-8`) and 0.05 % (`2**-11`, up to 65,504). The
            error of the mean of k is about 1/sqrt(k) of that. Sums are float64 in any case.
        buffers: Floating-point buffers, such as BatchNorm statistics: from the "newest" snapshot,
            or "average" them. Use `recalibrate_batch_norm` to re-estimate them.
        frozen: Parameters that do not require gradients: "keep" one copy, from the newest
            snapshot, or "omit" them (adapters on a large frozen model).
        include: Average only tensors whose name matches one of these patterns, such as `*.lora_*`
            (the whole name; `*` matches dots, too). Tied weights match by any of their names.
        exclude: Do not average tensors whose name matches one of these patterns, such as
            `*embed*`. Tensors that are not averaged stay raw: the average has their values of the
            newest snapshot, of which one copy is stored. `lawa average` has the same options, but
            leaves such tensors out of its result.
    """

    kind = "averaged"  # in metrics files: see `Averager`

    def __init__(
        self,
        k: int = 6,
        *,
        coefficients: Coefficients | None = None,
        blend: float | None = None,
        schedule: Schedule | None = None,
        horizon: float | None = None,
        samples: int = 1,
        min_snapshots: int | None = None,
        store: Literal["host", "device"] | Store = "host",
        storage_dtype: torch.dtype | None = None,
        buffers: BufferRule = "newest",
        frozen: FrozenRule = "keep",
        include: str | Sequence[str] = (),
        exclude: str | Sequence[str] = (),
        _sliding: Sliding = "auto",
    ) -> None:
        k, samples = whole_number("k", k, least=1), whole_number("samples", samples, least=1)
        schedule = choose_schedule(schedule, horizon, k * samples)
        usual = 1 if isinstance(schedule, Horizon) else k
        least = usual if min_snapshots is None else min_snapshots
        self._min_snapshots = whole_number("min_snapshots", least, least=1, most=k)
        one_of("buffers", buffers, ("newest", "average"))
        one_of("frozen", frozen, ("keep", "omit"))
        one_of("_sliding", _sliding, ("auto", True, False))
        one_of("storage_dtype", storage_dtype, (None, torch.bfloat16, torch.float16))
        if not isinstance(store, Store):
            one_of("store", store, ("host", "device"), " Or give a DiskStore(folder).")
            store = HostStore() if store == "host" else DeviceStore()
        self._coefficients: Coefficients = Uniform()
        self._coefficients = blended(self._rule(coefficients), blend)
        self._coefficients.weights(k)  # raises if there are too few explicit weights
        # A copy: a schedule counts calls, and the same object may be given to two averagers.
        self._schedule: Schedule = Every(1) if schedule is None else copy.deepcopy(schedule)
        check_kind("schedule", self._schedule, "due", "Every(n) or OnPlateau()")
        check_window(self._schedule, k, samples, self._min_snapshots)
        self._select = Selector(buffers=buffers, frozen=frozen, include=include, exclude=exclude)
        self._lock, self._num_steps = threading.RLock(), 0
        self._window = Window(store, k, storage_dtype, _sliding, samples)
        self._ranks_agreed = False  # whether those of a sharded model have been compared
        self._slots = False  # whether `state_dict` has a slot for every snapshot
        if (found := self._window.found) is not None:
            self._take_counters(found)

    @property
    def k(self) -> int:
        """How many snapshots a full window holds."""
        return self._window.k

    @property
    def samples(self) -> int:
        """How many collected weights make up a snapshot."""
        return self._window.samples

    @property
    def min_snapshots(self) -> int:
        """How many snapshots an average needs."""
        return self._min_snapshots

    @property
    def coefficients(self) -> Coefficients:
        """The default weights of the mean."""
        return self._coefficients

    @property
    def schedule(self) -> Schedule:
        """Decides when `step` takes a snapshot; its state is saved with the window."""
        return self._schedule

    @property
    def ready(self) -> bool:
        """Whether there are enough snapshots for an average."""
        return self.num_averaged >= self._min_snapshots

    @property
    def num_averaged(self) -> int:
        """How many of the newest snapshots an average takes: all, or those within the horizon."""
        return self._schedule.num_averaged(self.snapshot_steps)

    @property
    def snapshot_steps(self) -> list[int]:
        """The step labels of the snapshots in the window, oldest first."""
        return self._window.steps

    @property
    def newest_step(self) -> int | None:
        """The step label of what was collected last: a snapshot, or a sample of the next one."""
        return self._window.newest_step

    @property
    def window_key(self) -> object:
        """Identifies the window: another object after one was loaded, or after `reset`."""
        return self._window.identity

    @property
    def num_collected(self) -> int:
        """How many snapshots were collected in total."""
        return self._window.num_collected

    def __len__(self) -> int:
        """How many snapshots the window holds now."""
        return len(self._window.snapshots)

    def __bool__(self) -> bool:
        """Always true: `if averager:` asks whether there is one, not whether it is empty."""
        return True

    def __repr__(self) -> str:
        labels, dtype = self.snapshot_steps, self._window.storage_dtype
        steps = f" (steps {labels[0]} to {labels[-1]})" if labels else ""
        stored = f", stored as {dtype}" if dtype else ""
        return (
            f"LatestWeightAverager(k={self.k}, {len(self)} of {self.k} snapshots{steps}, "
            f"{self._window.describe()}{stored}, {self._coefficients}, {self._schedule})"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles are independent averagers with the same snapshots and arguments."""
        arguments = {
            "k": self.k,
            "coefficients": self._coefficients,
            "schedule": self._schedule,
            "samples": self.samples,
            "min_snapshots": self._min_snapshots,
            "store": self._window.store,
            "storage_dtype": self._window.storage_dtype,
            "buffers": self._select.buffers,
            "frozen": self._select.frozen,
            "include": self._select.include,
            "exclude": self._select.exclude,
            "_sliding": self._window.sliding,
        }
        return averager_state.pickled(type(self), arguments, self._counters(), self._window)

    @one_at_a_time
    def bind(self, model: nn.Module | Mapping[str, Tensor]) -> None:
        """Learn the names, shapes and shards of a model without taking a snapshot.

        Required before `torch.distributed.checkpoint.load`, which loads into what `state_dict`
        returns and so must find every name there. Otherwise `collect` does it.
        """
        with ordinary_mode():
            self._window.bind(self._select(model))
        self._slots = True

    @one_at_a_time
    def collect(self, model: nn.Module | Mapping[str, Tensor], *, step: int | None = None) -> None:
        """Take a snapshot of a model (or of a state dict); the oldest leaves a full window.

        `step` labels it in `snapshot_steps` and in messages; labels must increase. The default is
        the number of calls of `step` so far, or of `collect` if `step` is not used.
        """
        refuse_if_swapped(model, "collect was called")
        index = self.num_collected
        label = self._window.next_label(step, self._num_steps or index + 1)
        if step is None and not self._num_steps and not index:
            self._schedule.warn_if_bypassed()
        selection = self._select(model)
        self._compare_ranks(model, f"the first call of averager.collect, of step {label},")
        counters: Counters = {**self._counters(), "num_collected": index + 1}
        with ordinary_mode():
            self._window.put(Snapshot(index, label), selection, counters)

    @one_at_a_time
    def step(self, model: nn.Module | Mapping[str, Tensor], *, loss: float | None = None) -> bool:
        """Count one step (or epoch) and collect if the schedule says so; returns whether it did.

        All ranks of a sharded model must collect at the same steps. They compare their schedules at
        the first call, and their decisions at every call with a `loss` (`OnPlateau`): pass the same
        loss on all ranks.

        >>> from torch_lawa import Every
        >>> averager = LatestWeightAverager(k=2, schedule=Every(10))
        >>> sum(averager.step({"w": torch.zeros(1)}) for _ in range(25))
        2
        """
        refuse_if_swapped(model, "step was called")
        self._compare_ranks(model, f"the first call of averager.step, {self._schedule}")
        before = self._counters()
        try:
            due = self._schedule.due(self._num_steps + 1, loss)
            self._num_steps += 1
            if loss is not None:
                check_same_decision(model, due, self._num_steps)
            if due:
                self.collect(model)
            return due
        except BaseException:
            if self.num_collected == before["num_collected"]:  # else the snapshot was taken
                self._take_counters(before)
            raise

    @one_at_a_time
    def average(
        self,
        k: int | None = None,
        *,
        coefficients: Coefficients | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> dict[str, Tensor]:
        """The mean of the window as a plain state dict, for `model.load_state_dict`.

        `k` averages only the k newest snapshots; `coefficients` replaces the averager's own. A
        blend takes the newest snapshot as the live weights, since no model is given. Tensors are
        new; they have their own dtypes and the device of the snapshots unless you give others. What
        is sharded in the model (FSDP2, tensor parallel) is a DTensor here: nothing is gathered.
        """
        n, rule = self._window_size(k), self._rule(coefficients)
        return self._window.read(dtype, device, lambda out: self._window.mean_into(out, n, rule))

    @one_at_a_time
    def sample(
        self,
        k: int | None = None,
        *,
        seed: int,
        scale: float = 0.5,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> dict[str, Tensor]:
        """A random sample of weights around the mean, as a plain state dict: SWAG.

        Snapshots differ by the noise of training; a sample differs from their mean in the same way.
        The predictions of several samples are averaged, to calibrate an over-confident model.
        Samples of one `seed` are equal bit for bit, on every store and any number of ranks; `scale`
        scales their variance. Only whole snapshots count, all the same, whatever the coefficients
        are. Re-estimate BatchNorm for each sample. Other arguments are those of `average`.

        >>> averager = LatestWeightAverager(k=2)
        >>> for value in (1.0, 3.0):
        ...     averager.collect({"w": torch.full((1,), value)})
        >>> [round(averager.sample(seed=seed)["w"].item(), 3) for seed in (0, 1, 0)]
        [3.412, 1.663, 3.412]
        """
        n, draw = self._window_size(k), Draw(seed, scale, self._window.shardings)
        return self._window.read(dtype, device, lambda out: self._window.sample_into(out, n, draw))

    def swapped_into(
        self,
        model: nn.Module,
        k: int | None = None,
        *,
        coefficients: Coefficients | None = None,
    ) -> AbstractContextManager[None]:
        """Swap the mean into a model for a `with` block; restores the weights on any exit.

        Values are copied into the model's own tensors, so optimizers, compiled graphs and CUDA
        graphs stay valid. Buffers are restored as well, so BatchNorm statistics may be re-estimated
        inside the block. A blend takes this model's weights as the live ones. It takes memory for
        one copy of the weights on their device; with a store on the host or on disk this is the
        staging memory of `collect`.
        """
        n, rule = self._window_size(k), self._rule(coefficients)
        rule.weights(n)  # raises if there are too few explicit weights
        return self._swapped(model, n, lambda to, n: self._window.mean_into(to, n, rule, live=True))

    def sampled_into(
        self, model: nn.Module, k: int | None = None, *, seed: int, scale: float = 0.5
    ) -> AbstractContextManager[None]:
        """Swap a random `sample` into a model for a `with` block, as `swapped_into` does the mean.

        >>> model = nn.Linear(1, 1)
        >>> averager = LatestWeightAverager(k=2)
        >>> for value in (1.0, 3.0):
        ...     _ = model.weight.data.fill_(value)
        ...     averager.collect(model)
        >>> with averager.sampled_into(model, seed=0):
        ...     bool(model.weight == averager.sample(seed=0)["weight"])
        True
        """
        draw, window = Draw(seed, scale, live_shardings(model)), self._window
        draw.check(n := self._window_size(k))
        return self._swapped(model, n, lambda to, n: window.sample_into(to, n, draw))

    def _swapped(
        self, model: nn.Module, n: int, fill: Callable[[Mapping[str, Tensor], int], None]
    ) -> AbstractContextManager[None]:
        def write(targets: Mapping[str, Tensor]) -> None:
            with self._lock:  # it may have been reset since
                fill(targets, self._window_size(n))

        return self._window.swapped(model, write)

    @one_at_a_time
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
        """Write the mean to a folder of safetensors files that `from_pretrained` can load.

        One tensor at a time is computed, gathered from its shards and written by rank 0, so that no
        rank ever holds the whole model. Call it on every rank; if it fails on one, it raises on
        all. The folder appears complete or not at all.

        If the `model` is given, its configuration is saved with the weights (Transformers), and
        only the adapter of a `PeftModel` is written. `dtype` is the dtype of every floating-point
        tensor in the files. Above `max_shard_size` there are several files, with an index.

        >>> import tempfile
        >>> averager = LatestWeightAverager(k=2)
        >>> for value in (1.0, 4.0):
        ...     averager.collect({"w": torch.full((2,), value)})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     averager.save_pretrained(f"{folder}/averaged")
        ...     os.listdir(f"{folder}/averaged")
        ['model.safetensors']
        """
        # Here, since it imports the checkpoint formats, which a training loop does not need.
        from torch_lawa import export

        def plan() -> "ExportPlan":
            n = self._window_size(k)
            if model is not None and not self._window.seen:
                self._window.bind(self._select(model))
            rule = self._rule(coefficients)
            return export.plan_export(
                self._window, n, rule, model, dtype=dtype, max_shard_size=max_shard_size
            )

        with ordinary_mode():
            export.export_average(self._window, folder, plan, overwrite=overwrite)

    @one_at_a_time
    def wait(self) -> None:
        """Return when every snapshot has reached the store: host memory, or the disk."""
        self._window.wait()

    @one_at_a_time
    def reset(self) -> None:
        """Drop every snapshot and begin a new window; counters continue."""
        self._window.clear(self._counters())

    @one_at_a_time
    def state_dict(self) -> dict[str, Any]:
        """Everything needed to resume exactly: plain values and tensors, safe to `torch.load`.

        It contains all snapshots, that is up to k models. Like a module's state dict, it refers to
        live memory: save it before the next `collect`, or copy it. For a sharded model, or after
        `bind`, it has the form that `torch.distributed.checkpoint` needs: the averager is a
        `Stateful` that can be saved and loaded on any number of ranks.
        """
        self._window.wait()
        if self._slots or self._window.shardings:
            return averager_state.pack_slots(self._counters(), self._window)
        return averager_state.pack(self._counters(), self._window)

    @one_at_a_time
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state; nothing changes if it cannot be loaded.

        `k`, store and storage dtype may differ: the newest snapshots that fit are taken.
        """
        saved = averager_state.unpack(state, self._window)
        kind = type(self._schedule).__name__
        if saved.counters["schedule_kind"] != kind:
            raise StateError(
                f"the state was saved with the schedule {saved.counters['schedule_kind']}, but "
                f"this averager has {kind}: make the averager with the same schedule."
            )
        before, window = self._counters(), self._window.identity
        try:
            self._schedule.load_state_dict(saved.counters["schedule"])
            with ordinary_mode():
                self._window.load(saved)
            self._take_counters(saved.counters)
        except BaseException:
            self._take_counters(before if self._window.identity is window else saved.counters)
            raise

    def _compare_ranks(self, model: nn.Module | Mapping[str, Tensor], call: str) -> None:
        """Once, before anything is collected: all ranks of a sharded model must do the same."""
        if not self._ranks_agreed:
            check_same_call(model, f"{call} with k={self.k}")
            self._ranks_agreed = True

    def _rule(self, given: Coefficients | None) -> Coefficients:
        if given is None:
            return self._coefficients
        check_kind("coefficients", given, "weights", "Uniform() or Exponential(0.9)")
        return given

    def _window_size(self, k: int | None) -> int:
        """How many snapshots to average; raises if there are too few."""
        none_yet = "call averager.collect(model) first."
        if self._num_steps and not self.num_collected:  # else `reset` or a rescue dropped them
            none_yet = f"none was due in {counted(self._num_steps, 'step')}, by {self._schedule}."
        return self._window.num_to_average(k, self.num_averaged, self._min_snapshots, none_yet)

    def _counters(self) -> Counters:
        return {
            "num_steps": self._num_steps,
            "num_collected": self.num_collected,
            "schedule_kind": type(self._schedule).__name__,
            "schedule": self._schedule.state_dict(),
        }

    def _take_counters(self, counters: Counters) -> None:
        if counters["schedule_kind"] == type(self._schedule).__name__:
            self._schedule.load_state_dict(counters["schedule"])
        self._num_steps = counters["num_steps"]
