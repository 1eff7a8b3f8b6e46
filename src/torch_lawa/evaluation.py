"""Evaluate raw and averaged weights side by side, and record what averaging costs.

One call after each epoch (or every n steps) writes one row for the raw weights and one per
average. The seconds that an average costs on top of training are in its row, so that a report can
charge them to it. If BatchNorm statistics are re-estimated for the average, they are re-estimated
for the raw weights too, in a row of its own: at a high learning rate that alone can lower the loss
a lot, and must not be counted as a gain of averaging.
"""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import nn

from torch_lawa.averager import LatestWeightAverager
from torch_lawa.averager_protocol import Averager
from torch_lawa.batch_norm import layers_with_statistics, recalibrate_batch_norm
from torch_lawa.coefficients import Coefficients, name_coefficients
from torch_lawa.errors import ConfigError
from torch_lawa.metrics import MetricsWriter, Row
from torch_lawa.swap import swapped

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["ActClock", "evaluate_side_by_side", "evaluating"]

BatchNormPolicy: TypeAlias = Literal["re-estimated", "copied"]


def evaluate_side_by_side(
    model: nn.Module,
    averager: Averager | Sequence[Averager],
    evaluate: Callable[[nn.Module], Mapping[str, float]],
    *,
    metrics: MetricsWriter | None = None,
    labels: Mapping[str, Any] | None = None,
    ks: Sequence[int | tuple[int, Coefficients]] | None = None,
    batch_norm: Sequence[BatchNormPolicy] | None = None,
    loader: Iterable[Any] | None = None,
    batch_norm_batches: int | None = None,
    control: bool = True,
    group: "ProcessGroup | None" = None,
) -> list[Row]:
    """Evaluate a model's raw weights and each average; return the rows, and write them.

    >>> model = nn.Linear(1, 1)
    >>> averager = LatestWeightAverager(k=2)
    >>> for value in (1.0, 3.0):
    ...     _ = model.weight.data.fill_(value)
    ...     averager.collect(model)
    >>> rows = evaluate_side_by_side(
    ...     model, averager, lambda model: {"weight": model.weight.item()}, labels={"epoch": 2}
    ... )
    >>> [(row["weights"], row["k"], row["weight"]) for row in rows]
    [('raw', None, 3.0), ('averaged', 2, 2.0)]

    The model is in evaluation mode without gradients while `evaluate` runs; modes and weights are
    restored. A window gets its row once it holds enough snapshots, any other averager once it is
    `ready`.

    A row has the `labels`, then `weights` ("raw", or the averager's `kind`: "averaged" for the
    window), `k`, `coefficients`, `batch_norm`, the values that `evaluate` returned, and seconds:
    `evaluate_seconds`; for an average also `average_seconds` (computing the mean, swapping it in
    and restoring) and `batch_norm_seconds`. `batch_norm` is None if the weights were evaluated with
    the statistics they came with. `k` and `coefficients` are None for averagers without a window.

    Args:
        model: The model that is being trained.
        averager: What averages its weights: a `LatestWeightAverager`, any other `Averager`, or a
            list of them to compare. Each must have a `kind` of its own.
        evaluate: Takes the model, returns named values such as `{"test_loss": 0.1}`.
        metrics: Where the rows are written.
        labels: Entries of every row. Reports use `seed`, `epoch`, `step`, and the seconds since the
            run began: `train_seconds` (spent training) and `collect_seconds` (spent in
            `averager.collect`).
        ks: Windows to evaluate, by default the averager's own; a pair of k and coefficients
            replaces the averager's coefficients. Only for averagers with a window.
        batch_norm: BatchNorm statistics of an average: "re-estimated" from `loader`, "copied"
            from the newest snapshot, or both, one row each. Default: re-estimated if a loader is
            given. A model without BatchNorm layers gets one row per average in any case.
        loader: Batches of training data, iterated anew for each average.
        batch_norm_batches: How many of them to use (default: all).
        control: Also evaluate the raw weights with re-estimated BatchNorm statistics if an average
            is: the baseline with the same treatment. It costs one more such pass.
        group: The process group that re-estimates BatchNorm together, each rank from its own
            loader.
    """
    policies = _policies(model, batch_norm, loader)
    averages = _averages(averager if isinstance(averager, Sequence) else [averager], ks)
    clock = ActClock(model)
    rows = []

    def note(values: Mapping[str, float], seconds: Mapping[str, float], **facts: Any) -> None:
        row = {**(labels or {}), **facts, **{name: float(v) for name, v in values.items()}}
        row.update({f"{act}_seconds": spent for act, spent in seconds.items()})
        rows.append(row)
        if metrics is not None:
            metrics.write(row)

    def measure(policy: BatchNormPolicy | None) -> Mapping[str, float]:
        with clock("batch_norm"):
            if policy == "re-estimated":
                assert loader is not None  # checked by `_policies`
                recalibrate_batch_norm(model, loader, batch_norm_batches, group=group)
        return evaluated()

    def evaluated() -> Mapping[str, float]:
        with clock("evaluate"), evaluating(model):
            values = evaluate(model)
        if not isinstance(values, Mapping):
            raise ConfigError(
                f"evaluate returned a {type(values).__name__}: return a dict of named values, "
                "such as {'test_loss': 0.1}."
            )
        return values

    raw = {"weights": "raw", "k": None, "coefficients": None}
    values = evaluated()
    note(values, clock.take(), **raw, batch_norm=None)
    if control and "re-estimated" in policies:
        with swapped(model, {}, lambda: None):  # restores the statistics
            values = measure("re-estimated")
        note(values, clock.take(), **raw, batch_norm="re-estimated")
    for average in averages:
        measured = {}
        with contextlib.ExitStack() as swap:
            with clock("average"):
                swap.enter_context(average.swapped_into(model))
            spent = clock.take()
            # One swap serves all policies; "copied" goes first, while those statistics are there.
            for policy in sorted(policies, key=lambda policy: policy == "re-estimated"):
                measured[policy] = measure(policy), clock.take()
            with clock("average"):
                swap.close()
        spent["average"] += clock.take()["average"]
        for policy in policies:
            values, own = measured[policy]
            note(values, {**spent, **own}, **average.facts, batch_norm=policy)
    return rows


@dataclass(frozen=True)
class _Average:
    """One average to evaluate: how to swap it in, and what its row says of it."""

    swapped_into: Callable[[nn.Module], AbstractContextManager[None]]
    facts: dict[str, Any]


def _averages(
    averagers: Sequence[Averager], ks: Sequence[int | tuple[int, Coefficients]] | None
) -> list[_Average]:
    """The averages that can be read now."""
    kinds = [averager.kind for averager in averagers]
    for kind in kinds:
        if kind == "raw" or kinds.count(kind) > 1:
            raise ConfigError(
                f"kind={kind!r}: rows are identified by the averager's kind, so each averager "
                "needs one of its own, other than 'raw'."
            )
    found: list[_Average] = []
    windows = 0
    for averager in averagers:
        if isinstance(averager, LatestWeightAverager):
            windows += 1
            found += _windows(averager, ks)
        elif averager.ready:
            facts = {"weights": averager.kind, "k": None, "coefficients": None}
            found.append(_Average(averager.swapped_into, facts))
    if ks is not None and not windows:
        raise ConfigError(
            f"ks={list(ks)}: only a LatestWeightAverager has a window to choose k of."
        )
    return found


def _windows(
    averager: LatestWeightAverager, ks: Sequence[int | tuple[int, Coefficients]] | None
) -> Iterator[_Average]:
    ks = ks or [averager.k]
    for entry in ks:
        k, rule = entry if isinstance(entry, tuple) else (entry, averager.coefficients)
        if not 1 <= k <= averager.k:
            raise ConfigError(
                f"ks={list(ks)}: the averager's window holds {averager.k}, so ask for 1 to "
                f"{averager.k}."
            )
        num_averaged = averager.num_averaged if k == averager.k else min(k, len(averager))
        if num_averaged == k or averager.ready:
            swap = partial(averager.swapped_into, k=num_averaged, coefficients=rule)
            facts = {"weights": averager.kind, "k": k, "coefficients": name_coefficients(rule)}
            yield _Average(swap, facts)


def _policies(
    model: nn.Module, asked: Sequence[BatchNormPolicy] | None, loader: Iterable[Any] | None
) -> Sequence[BatchNormPolicy | None]:
    for policy in asked or ():
        if policy not in ("re-estimated", "copied"):
            raise ConfigError(
                f"batch_norm={policy!r}: choose from 're-estimated' and 'copied' (a list of them)."
            )
    if not layers_with_statistics(model):
        return (None,)
    if asked is None:
        return ("copied",) if loader is None else ("re-estimated",)
    if "re-estimated" in asked and loader is None:
        raise ConfigError(
            "batch_norm='re-estimated' needs training data: pass loader=..., or choose "
            "batch_norm=['copied']."
        )
    return asked


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model is in evaluation mode without gradients; its modes are restored."""
    modes = [(module, module.training) for module in model.modules()]

    def restore() -> None:
        for module, training in modes:
            module.training = training

    try:
        model.eval()
        with torch.no_grad():
            yield
    finally:
        try:
            restore()
        except BaseException:  # Ctrl-C in the middle: once more, and whole
            restore()
            raise


class ActClock:
    """Adds up the seconds of each act; synchronises with GPUs, so that queued work counts."""

    def __init__(self, model: nn.Module) -> None:
        devices = {p.device for p in model.parameters()}
        self._cuda = [device for device in devices if device.type == "cuda"]
        self._spent: dict[str, float] = {}

    def _now(self) -> float:
        for device in self._cuda:
            torch.cuda.synchronize(device)
        return time.perf_counter()

    @contextlib.contextmanager
    def __call__(self, act: str) -> Iterator[None]:
        """Add the seconds of the block to those of `act`."""
        begin = self._now()
        yield
        self._spent[act] = self._spent.get(act, 0.0) + self._now() - begin

    def take(self) -> dict[str, float]:
        """The seconds since the last call."""
        spent, self._spent = self._spent, {}
        return spent
