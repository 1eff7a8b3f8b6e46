"""Raw and averaged weights, evaluated side by side, with what the averaging cost.

One call after each epoch (or every so many steps) writes a row for the raw weights and one for
each average that was asked for. The seconds that an average costs beyond training stand in its
row, so that a report can charge them to it. Where BatchNorm statistics are re-estimated for the
average, they are for the raw weights too, in a row of its own: at a high learning rate that alone
can lower the loss a lot, and must not pass for a gain of averaging.
"""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from torch_lawa.averager import LatestWeightAverager
from torch_lawa.batch_norm import recalibrate_batch_norm
from torch_lawa.coefficients import Coefficients, name_coefficients
from torch_lawa.errors import ConfigError
from torch_lawa.metrics import MetricsWriter, Row
from torch_lawa.swap import swapped

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["BatchNormPolicy", "evaluate_side_by_side"]

BatchNormPolicy: TypeAlias = Literal["re-estimated", "copied"]


def evaluate_side_by_side(
    model: nn.Module,
    averager: LatestWeightAverager,
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
    """Evaluate a model as it is and with each average that is there; returns and writes the rows.

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
    restored. While fewer than k snapshots were collected there is no row for that k, unless the
    averager was told to average what is there.

    A row holds the `labels`, then `weights` ("raw" or "averaged"), `k`, `coefficients`,
    `batch_norm`, the values that `evaluate` returned, and seconds: `evaluate_seconds`; for an
    average also `average_seconds` (computing the mean, swapping it in and restoring), and
    `batch_norm_seconds`. `batch_norm` is None for weights that were evaluated with the statistics
    they came with.

    Args:
        model: The model that is being trained.
        averager: The averager that collects its snapshots.
        evaluate: Takes the model, returns named values such as `{"test_loss": 0.1}`.
        metrics: Where the rows are written.
        labels: What every row says of this moment. Reports know `seed`, `epoch`, `step`, and the
            seconds since the run began: `train_seconds` (spent training) and `collect_seconds`
            (spent in `averager.collect`).
        ks: Windows to evaluate, the averager's own by default; a pair of k and coefficients
            weighs that window otherwise than the averager would.
        batch_norm: BatchNorm statistics of an average: "re-estimated" from `loader`, "copied"
            from the newest snapshot, or both, a row each. By default re-estimated where a loader
            is given. A model without BatchNorm layers has one row for each k whatever is asked.
        loader: Batches of training data, iterated anew for each average.
        batch_norm_batches: How many of them to use (all by default).
        control: Evaluate the raw weights with re-estimated BatchNorm statistics too, where an
            average is: the baseline that had the same treatment. It costs one more such pass.
        group: The processes that re-estimate BatchNorm together, each with a loader of its own.
    """
    policies = _policies(model, batch_norm, loader)
    averages = _averages(averager, ks)
    clock = _Clock(model)
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
                assert loader is not None  # `_policies` saw to it
                recalibrate_batch_norm(model, loader, batch_norm_batches, group=group)
        return evaluated()

    def evaluated() -> Mapping[str, float]:
        with clock("evaluate"), _evaluating(model):
            values = evaluate(model)
        if not isinstance(values, Mapping):
            raise ConfigError(
                f"evaluate returned a {type(values).__name__}: let it return named values, such "
                "as {'test_loss': 0.1}."
            )
        return values

    raw = {"weights": "raw", "k": None, "coefficients": None}
    values = evaluated()
    note(values, clock.take(), **raw, batch_norm=None)
    if control and "re-estimated" in policies:
        with swapped(model, {}, lambda: None):  # the statistics return at the end
            values = measure("re-estimated")
        note(values, clock.take(), **raw, batch_norm="re-estimated")
    for k, rule in averages:
        num_averaged = min(k, len(averager))
        if num_averaged < k and not averager.ready:
            continue
        measured = {}
        with contextlib.ExitStack() as swap:
            with clock("average"):
                swap.enter_context(averager.swapped_into(model, num_averaged, coefficients=rule))
            spent = clock.take()
            # One swap for both; statistics that are to be copied go first, while they are there.
            for policy in sorted(policies, key=lambda policy: policy == "re-estimated"):
                measured[policy] = measure(policy), clock.take()
            with clock("average"):
                swap.close()
        spent["average"] += clock.take()["average"]
        facts = {"weights": "averaged", "k": k, "coefficients": name_coefficients(rule)}
        for policy in policies:
            values, own = measured[policy]
            note(values, {**spent, **own}, **facts, batch_norm=policy)
    return rows


def _averages(
    averager: LatestWeightAverager, asked: Sequence[int | tuple[int, Coefficients]] | None
) -> list[tuple[int, Coefficients]]:
    own = averager.coefficients
    pairs = [pair if isinstance(pair, tuple) else (pair, own) for pair in asked or (averager.k,)]
    for k, _ in pairs:
        if not 1 <= k <= averager.k:
            raise ConfigError(f"ks={list(asked or ())}: the averager's window holds {averager.k}.")
    return pairs


def _policies(
    model: nn.Module, asked: Sequence[BatchNormPolicy] | None, loader: Iterable[Any] | None
) -> Sequence[BatchNormPolicy | None]:
    for policy in asked or ():
        if policy not in ("re-estimated", "copied"):
            raise ConfigError(
                f"batch_norm={policy!r}: choose from 're-estimated' and 'copied' (a list of them)."
            )
    if not any(isinstance(m, _BatchNorm) and m.track_running_stats for m in model.modules()):
        return (None,)
    if asked is None:
        return ("copied",) if loader is None else ("re-estimated",)
    if "re-estimated" in asked and loader is None:
        raise ConfigError(
            "BatchNorm statistics are to be re-estimated, which takes training data: pass "
            "loader=..., or batch_norm=['copied']."
        )
    return asked


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


class _Clock:
    """Adds up the seconds of each act; work queued on a GPU is waited for, so that it counts."""

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
        begin = self._now()
        yield
        self._spent[act] = self._spent.get(act, 0.0) + self._now() - begin

    def take(self) -> dict[str, float]:
        """The seconds since the last call."""
        spent, self._spent = self._spent, {}
        return spent
