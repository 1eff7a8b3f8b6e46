"""Which window to serve: nested windows of one ring are evaluated, and the best is remembered.

The best number of snapshots changes during a run, and sometimes the raw weights are best. A
`WindowSearch` decides which windows are measured next and which one is chosen; it knows neither
the model nor how it is evaluated, so that frameworks can run their own validation loops in
between. A `WindowChooser` is the same for a training loop of your own.

In all of this module k = 0 stands for the raw weights, those that are being trained.
"""

import copy
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, SupportsFloat

import torch
from torch import nn

from torch_lawa.averager import LatestWeightAverager
from torch_lawa.batch_norm import layers_with_statistics
from torch_lawa.batch_norm_cache import BatchNormCache
from torch_lawa.errors import ConfigError, StateError
from torch_lawa.evaluation import ActClock, evaluating
from torch_lawa.metrics import mode_by_name
from torch_lawa.ranks.agreement import all_true, check_same_choice
from torch_lawa.selection import live_tensors
from torch_lawa.shards import local
from torch_lawa.swap import refuse_if_swapped
from torch_lawa.units import counted
from torch_lawa.validation import check_kind, one_of, whole_number

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = [
    "MonitoredWindow",
    "WindowChoice",
    "WindowChooser",
    "WindowSearch",
    "newest_is_live",
    "search_for",
]


@dataclass(frozen=True)
class WindowChoice:
    """The window that was chosen, and what was measured for it.

    >>> choice = WindowChoice(k=4, value=0.5, values={0: 0.75, 4: 0.5, 16: 0.625}, seconds=1.5)
    >>> choice.values[0] - choice.value  # what averaging saves
    0.25

    Args:
        k: How many of the newest snapshots are averaged; 0 means the raw weights.
        value: The value measured for this window.
        values: All values measured at this call, by k; `values[0]` is of the raw weights.
        seconds: How long it took: computing the means, swapping, re-estimating BatchNorm
            statistics and evaluating.
    """

    k: int
    value: float
    values: Mapping[int, float]
    seconds: float


class WindowSearch:
    """Decides which windows are measured, and which of them is chosen.

    The chosen window is never worse than the raw weights measured at the same time. It changes
    only if another one is better by more than `margin`, so that it does not alternate between
    windows that are equally good.

    >>> search = WindowSearch()
    >>> search.decide({0: 0.80, 1: 0.80, 4: 0.60, 8: 0.55, 16: 0.70})
    8
    >>> search.decide({0: 0.70, 1: 0.70, 4: 0.55, 8: 0.501, 16: 0.50})  # 16 is hardly better
    8
    >>> search.decide({0: 0.40, 1: 0.40, 4: 0.41, 8: 0.42, 16: 0.43})
    0

    Args:
        ks: The windows to compare. By default 1, k/4, k/2 and k for a ring of k snapshots.
        mode: "min" if lower values are better (a loss), "max" if higher ones are (an accuracy). In
            callbacks the default is what the name of the monitored metric says ("val_accuracy":
            "max"), and "min" otherwise.
        margin: How much better another window must be, as a share of what the best one gains over
            the raw weights. The choice is then within that share of the best one measured.
        full_every: Measure all windows at every so-many-th call. At the other calls only the
            chosen window and its neighbours are measured (all of them if raw weights are
            chosen). The raw weights are measured every time.
    """

    def __init__(
        self,
        ks: Sequence[int] | None = None,
        *,
        mode: Literal["min", "max"] | None = None,
        margin: float = 0.01,
        full_every: int = 1,
    ) -> None:
        one_of("mode", mode, ("min", "max", None))
        if not isinstance(margin, int | float) or not 0.0 <= margin < 1.0:
            raise ConfigError(
                f"margin={margin!r}: give a share of the gain over the raw weights, from 0 to 1."
            )
        if ks is not None and (not isinstance(ks, Iterable) or not len(ks)):
            raise ConfigError(f"ks={ks!r}: give the windows to compare, such as ks=[4, 16].")
        self._ks = None if ks is None else sorted({whole_number("ks", k, least=1) for k in ks})
        self._full_every = whole_number("full_every", full_every, least=1)
        self.mode, self.margin = mode, margin
        self._k = 0
        self._num_decided = 0

    def __repr__(self) -> str:
        ks = "" if self._ks is None else f"{self._ks}, "
        return (
            f"WindowSearch({ks}mode={self.mode!r}, margin={self.margin}, "
            f"full_every={self._full_every})"
        )

    @property
    def smallest(self) -> int:
        """The smallest window that is compared."""
        return 1 if self._ks is None else self._ks[0]

    def check(self, averager: LatestWeightAverager) -> None:
        """Raise if the ring of this averager is too small for the windows to compare."""
        if self._ks is not None and self._ks[-1] > averager.k:
            raise ConfigError(
                f"ks={self._ks}: the averager keeps {averager.k} snapshots. Compare smaller "
                f"windows, or set k={self._ks[-1]}."
            )

    def chosen(self, averager: LatestWeightAverager) -> int:
        """The k that was chosen last; 0 if the averager does not hold that many snapshots."""
        return self._k if self._k <= len(averager) else 0

    def candidates(self, averager: LatestWeightAverager) -> list[int]:
        """The windows to measure now, besides the raw weights; none before the first snapshot."""
        ks = self._ks or (1, max(averager.k // 4, 1), max(averager.k // 2, 1), averager.k)
        found = sorted({k for k in ks if k <= len(averager)})
        if self._ks is None:  # early in a run, a horizon may leave out snapshots of the ring
            found = sorted({min(k, averager.num_averaged) for k in found})
        if self._num_decided % self._full_every and self._k in found:
            at = found.index(self._k)
            return found[max(at - 1, 0) : at + 2]
        return found

    def decide(self, values: Mapping[int, float]) -> int:
        """Choose from what was measured at one time, by k; values that are not finite never win."""
        sign = -1.0 if self.mode == "max" else 1.0
        costs = {k: sign * v if math.isfinite(v) else math.inf for k, v in values.items()}
        best = min(costs, key=lambda k: (costs[k], k))  # equal, or none finite: the smallest k
        raw, least, own = costs[0], costs[best], costs.get(self._k, math.inf)
        # A share below 1 of the gain: what is worse than the raw weights is never kept.
        slack = self.margin * (raw - least) if raw < math.inf else 0.0
        if own < math.inf and own - least <= slack:
            best = self._k
        self._k, self._num_decided = best, self._num_decided + 1
        return best

    def reset(self) -> None:
        """Forget the choice: another run begins."""
        self._k = self._num_decided = 0

    def state_dict(self) -> dict[str, int]:
        """The choice, as plain numbers."""
        return {"k": self._k, "num_decided": self._num_decided}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state."""
        try:
            k, num_decided = (whole_number(n, state[n], least=0) for n in ("k", "num_decided"))
        except (KeyError, TypeError, ConfigError) as error:
            raise StateError(
                f"this is not the state of a window choice ({error}): pass what state_dict() "
                "returned."
            ) from None
        self._k, self._num_decided = k, num_decided


def search_for(option: bool | WindowSearch, monitor: str) -> WindowSearch | None:
    """The search that a callback's option `choose_window` asks for: a new one, or a copy."""
    if not isinstance(option, WindowSearch):
        one_of("choose_window", option, (True, False), " Or give a WindowSearch(...).")
        if not option:
            return None
    search = WindowSearch() if option is True else copy.deepcopy(option)
    search.mode = search.mode or mode_by_name(monitor) or "min"
    return search


def newest_is_live(
    averager: LatestWeightAverager, model: nn.Module, group: "ProcessGroup | None"
) -> bool:
    """Whether the newest snapshot is the weights that a model has now, on all of its ranks.

    Then the window of 1 is the raw weights, and is not evaluated a second time.
    """
    live, newest = live_tensors(model), {}
    if averager.samples == 1:
        newest = {name: local(tensor) for name, tensor in averager.average(1).items()}
    same = bool(newest) and all(
        torch.equal(tensor, newest[name].to(tensor.device))
        for name, tensor in live.items()
        if name in newest
    )
    return all_true("choosing a window", model, same, group)


class MonitoredWindow:
    """The window that a framework's evaluations use; with a `search`, chosen by their `monitor`.

    What an integration inherits: the framework evaluates, and reports the metrics to `choose`.
    """

    averager: LatestWeightAverager
    search: WindowSearch | None
    monitor: str
    choice: WindowChoice | None = None  # of the last validation during training
    _trial: int | None = None  # the window that is being measured

    @property
    def k(self) -> int | None:
        """How many of the newest snapshots are averaged: all if None, 0 for the trained weights."""
        if self.search is None:
            return None
        return self.search.chosen(self.averager) if self._trial is None else self._trial

    @property
    def ready(self) -> bool:
        """Whether evaluations use an average."""
        return self.averager.ready if self.k is None else self.k > 0

    @contextmanager
    def trying(self, k: int) -> Iterator[None]:
        """Inside the block the average is of the k newest snapshots, not of the chosen ones."""
        self._trial = k
        try:
            yield
        finally:
            self._trial = None

    def choose(
        self,
        metrics: Mapping[int, Mapping[str, SupportsFloat]],
        seconds: float,
        model: nn.Module,
        group: "ProcessGroup | None",
    ) -> int:
        """Choose a window by the metrics of each in one evaluation; returns its k."""
        assert self.search is not None
        for found in metrics.values():
            if self.monitor not in found:
                raise ConfigError(
                    f"monitor={self.monitor!r}: the window is chosen by this metric, and the "
                    f"evaluation gives {', '.join(found) or 'none'}. Log it, or set monitor=..."
                )
        values = {k: float(found[self.monitor]) for k, found in metrics.items()}
        k = self.search.decide(values)
        check_same_choice(model, k, group)
        self.choice = WindowChoice(k, values[k], values, seconds)
        return k


class WindowChooser:
    """Chooses how many snapshots of an averager to serve, by evaluating them.

    >>> model = nn.Linear(1, 1, bias=False)
    >>> averager = LatestWeightAverager(k=4)
    >>> for value in (9.0, 9.0, 2.0, 4.0):
    ...     _ = model.weight.data.fill_(value)
    ...     averager.collect(model)
    >>> chooser = WindowChooser(averager, lambda model: (model.weight - 3).square().item())
    >>> choice = chooser.choose(model)
    >>> choice.k, choice.values
    (2, {0: 1.0, 1: 1.0, 2: 0.0, 4: 9.0})
    >>> with chooser.swapped_into(model):
    ...     model.weight.item()
    3.0

    Evaluate on validation data, not on the data that results are reported on: the smallest of
    several measured values is a little too good.

    Args:
        averager: Keeps the snapshots. Windows that it does not hold yet are not measured, and its
            `min_snapshots` is not considered: the evaluation decides.
        evaluate: Takes the model, in evaluation mode without gradients, and returns one number. It
            must return the same number on every rank. Use enough samples: the choice is as noisy
            as the numbers are.
        search: Which windows are compared, and how: `WindowSearch(mode="max")` for an accuracy. The
            chooser works with a copy of it.
        loader: Batches of training data, for models with BatchNorm: the statistics of each window
            are re-estimated from them. The raw weights keep their own. Without a loader such a
            model gets a warning: statistics of the newest snapshot do not fit a window.
        batch_norm_batches: How many of these batches to use (default: all).
        group: The process group whose ranks re-estimate BatchNorm together and must agree. The
            ranks of a sharded model (FSDP2, tensor parallel) are found without it.
    """

    def __init__(
        self,
        averager: LatestWeightAverager,
        evaluate: Callable[[nn.Module], SupportsFloat],
        search: WindowSearch | None = None,
        *,
        loader: Iterable[Any] | None = None,
        batch_norm_batches: int | None = None,
        group: "ProcessGroup | None" = None,
    ) -> None:
        check_kind("averager", averager, "snapshot_steps", "LatestWeightAverager(k=16)")
        check_kind("evaluate", evaluate, "__call__", "a function of the model")
        if search is not None:
            check_kind("search", search, "candidates", "WindowSearch([4, 16])")
        self._averager, self._evaluate, self._loader = averager, evaluate, loader
        self._search = copy.deepcopy(search) if search is not None else WindowSearch()
        self._search.check(averager)
        self._batch_norm = BatchNormCache(0 if loader is None else batch_norm_batches)
        self._group = group
        self._warned = False

    @property
    def k(self) -> int:
        """The window that is served: its number of snapshots, or 0 for the raw weights."""
        return self._search.chosen(self._averager)

    def choose(self, model: nn.Module, *, raw: float | None = None) -> WindowChoice:
        """Measure the raw weights and the windows, and remember the best.

        Give the value of the `raw` weights if you have just evaluated them: it saves one
        evaluation. If `evaluate` fails, the weights are restored and the choice is unchanged.
        """
        refuse_if_swapped(model, "choose was called")
        clock = ActClock(model)
        with clock("choose"):
            values = {0: self._measured(model) if raw is None else _as_number("raw is", raw)}
            known = not self._batch_norm.needed(model)
            candidates = self._search.candidates(self._averager)
            if candidates and self._loader is None and not self._warned:
                self._warned = _warn_of_stale_statistics(model)
            for k in candidates:
                if k == 1 and known and newest_is_live(self._averager, model, self._group):
                    values[1] = values[0]
                    continue
                with self._swapped_into(model, k):
                    values[k] = self._measured(model)
            k = self._search.decide(values)
            check_same_choice(model, k, self._group)
        return WindowChoice(k, values[k], values, clock.take()["choose"])

    def swapped_into(self, model: nn.Module) -> AbstractContextManager[None]:
        """Swap the chosen window into a model for a `with` block; nothing if raw weights are best.

        BatchNorm statistics are those that the window was measured with. If a snapshot was
        collected since, the newest `k` are averaged and their statistics are re-estimated.
        """
        return self._swapped_into(model, self.k) if self.k else nullcontext()

    def state_dict(self) -> dict[str, Any]:
        """The choice, as plain numbers; save it with the averager's state."""
        return self._search.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state."""
        self._search.load_state_dict(state)

    def _swapped_into(self, model: nn.Module, k: int) -> AbstractContextManager[None]:
        def put_statistics() -> None:
            self._batch_norm.put_into(
                model,
                self._averager,
                lambda: nullcontext(() if self._loader is None else self._loader),
                group=self._group,
                k=k,
            )

        return _Served(self._averager.swapped_into(model, k), put_statistics)

    def _measured(self, model: nn.Module) -> float:
        with evaluating(model):
            value = self._evaluate(model)
        return _as_number("evaluate returned", value)


def _warn_of_stale_statistics(model: nn.Module) -> bool:
    """Warn if a model's averages are measured with the statistics of the newest snapshot."""
    layers = len(layers_with_statistics(model))
    if layers:
        warnings.warn(
            f"the windows are measured with the running statistics of the newest snapshot in "
            f"{counted(layers, 'BatchNorm layer')}, which do not fit averaged weights and can "
            "destroy their accuracy. Pass loader=train_loader to re-estimate them.",
            stacklevel=3,
        )
    return bool(layers)


def _as_number(what: str, value: SupportsFloat) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ConfigError(
            f"{what} a {type(value).__name__}: give one number, such as the validation loss."
        ) from None


class _Served(AbstractContextManager[None]):
    """A swap, and the statistics for it. Not a generator, for the reason that a swap is not one."""

    def __init__(self, swap: AbstractContextManager[None], put_statistics: Callable[[], None]):
        self._swap, self._put_statistics = swap, put_statistics

    def __enter__(self) -> None:
        try:
            self._swap.__enter__()
            self._put_statistics()
            return  # here, so that nothing is left to interrupt
        except BaseException:
            self._swap.__exit__(None, None, None)  # which may be called at any moment
            raise

    def __exit__(self, *_: object) -> None:
        try:
            self._swap.__exit__(None, None, None)
        except BaseException:  # a Ctrl-C before the call: restore the weights first
            self._swap.__exit__(None, None, None)
            raise
