"""Go back to the mean of good snapshots when the loss spikes or is no longer a number."""

import copy
import math
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, SupportsFloat, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torch_lawa.averager import LatestWeightAverager
from torch_lawa.averager_state import without_newest
from torch_lawa.batch_norm import layers_with_statistics
from torch_lawa.coefficients import Blend
from torch_lawa.errors import ConfigError, LawaError, StateError
from torch_lawa.masters import masters_of
from torch_lawa.ranks.agreement import rank_and_size
from torch_lawa.ranks.barrier import explain_missing_ranks
from torch_lawa.selection import live_tensors, write_into
from torch_lawa.shards import local
from torch_lawa.swap import ordinary_mode, refuse_if_swapped
from torch_lawa.validation import DAMAGE, check_kind, one_of, whole_number

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["SpikeRescue", "go_to_average", "refuse_masters", "rescue_for"]

OptimizerState: TypeAlias = Literal["keep", "reset"]


class SpikeRescue:
    """Watches the loss; at a spike the weights go back to the mean of the good snapshots.

    Call it with every batch's loss, before the optimizer's step:

    >>> model = nn.Linear(1, 1, bias=False)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> averager = LatestWeightAverager(k=3)
    >>> rescue = SpikeRescue(averager)
    >>> for value, loss in ((1.0, 0.5), (2.0, 0.5), (3.0, 0.5), (9.0, float("nan"))):
    ...     _ = model.weight.data.fill_(value)  # train
    ...     if rescue(model, optimizer, loss):
    ...         continue  # the batch is skipped
    ...     averager.step(model)
    True
    True
    True
    >>> model.weight.item()  # the mean of 1 and 2: nothing shows yet that 3 was good
    1.5

    A snapshot is good once a normal loss was seen after it. Later ones are dropped from the window
    at a spike. The gradients are dropped as well, so that an `optimizer.step()` that follows does
    nothing. All ranks must call it: they decide by the mean of their losses.

    Args:
        averager: Keeps the snapshots. Its `min_snapshots` is not considered. Leave it out for a
            callback, which has one.
        factor: A loss above this multiple of the largest recent one is a spike. Losses must be
            positive.
        history: How many of the latest normal losses count as recent. Before there are so many,
            only NaN and Inf are spikes.
        patience: How many losses in a row must be above. NaN and Inf are never waited for.
        k: How many of the newest good snapshots are averaged; as many as the averager does if None.
        optimizer_state: "reset" the momentum and the like, or "keep" them. What is not finite is
            reset in any case.
        limit: How many rescues there may be without a new good snapshot; then an error says that
            the run has diverged.
        group: The ranks that train together; by default all of the default process group.
    """

    def __init__(
        self,
        averager: LatestWeightAverager | None = None,
        *,
        factor: float = 2.0,
        history: int = 50,
        patience: int = 1,
        k: int | None = None,
        optimizer_state: OptimizerState = "reset",
        limit: int = 10,
        group: "ProcessGroup | None" = None,
    ) -> None:
        if not isinstance(factor, int | float) or not 1.0 < factor < math.inf:
            raise ConfigError(
                f"factor={factor!r}: give a multiple of the largest recent loss, above 1."
            )
        if averager is not None:
            check_kind("averager", averager, "snapshot_steps", "LatestWeightAverager(k=6)")
        one_of("optimizer_state", optimizer_state, ("keep", "reset"))
        self._factor, self._optimizer_state = factor, optimizer_state
        self._history = whole_number("history", history, least=2)
        self._patience = whole_number("patience", patience, least=1)
        self._k = None if k is None else whole_number("k", k, least=1)
        self._limit = whole_number("limit", limit, least=1)
        self._group = group
        self._averager = averager
        self._losses: deque[float] = deque(maxlen=self._history)
        self._num_high = 0  # losses in a row
        self._num_good = 0  # snapshots with a smaller index are good
        self._num_in_vain = 0  # rescues since the last good snapshot
        self.num_rescues = 0
        """How many times the weights went back, or the batch was skipped."""
        self.message = ""
        """What the last rescue did, for a log."""
        self._loss = math.nan  # that was checked last

    def __repr__(self) -> str:
        return (
            f"SpikeRescue(factor={self._factor:g}, history={self._history}, "
            f"patience={self._patience}, {self.num_rescues} rescues)"
        )

    @property
    def averager(self) -> LatestWeightAverager:
        """The averager that keeps the snapshots."""
        if self._averager is None:
            raise ConfigError(
                "this SpikeRescue has no averager: make it as SpikeRescue(averager), or pass it to "
                "a callback as rescue_spikes."
            )
        return self._averager

    def watching(self, averager: LatestWeightAverager) -> "SpikeRescue":
        """One with the same settings and counters, for another averager."""
        made = copy.copy(self)
        made._averager, made._losses = averager, deque(self._losses, maxlen=self._history)
        return made

    def __call__(
        self, model: nn.Module, optimizer: Optimizer | None, loss: SupportsFloat | Tensor
    ) -> bool:
        """Check a loss and go back if it is a spike; returns whether to skip the batch."""
        _check_arguments(model, optimizer)
        if not self.check(loss):
            return False
        self.restore(model, optimizer)
        return True

    def check(self, loss: SupportsFloat | Tensor) -> bool:
        """Whether this loss is a spike; the same on all ranks. Reading it waits for the GPU."""
        value = self._loss = self._shared(loss)
        if not self._is_high(value):
            self._losses.append(value)
            self._num_high = 0
            if self.averager.num_collected != self._num_good:  # fewer after a rollback
                self._num_good, self._num_in_vain = self.averager.num_collected, 0
            return False
        self._num_high += 1
        return not math.isfinite(value) or self._num_high >= self._patience

    def restore(self, model: nn.Module, optimizer: Optimizer | None = None) -> int:
        """Go back to the mean of the good snapshots; returns how many there are.

        Without any the weights stay, and only the batch is skipped. Buffers are those of the newest
        snapshot. BatchNorm statistics that are not finite there, or that a broken batch has already
        spoiled, start anew.
        """
        _check_arguments(model, optimizer)
        refuse_if_swapped(model, "SpikeRescue.restore was called")
        self._num_high, self._num_in_vain = 0, self._num_in_vain + 1
        self.num_rescues += 1
        state = without_newest(self.averager.state_dict(), self._num_good)
        if state is not None:
            self.averager.load_state_dict(state)
        self._num_good = self.averager.num_collected  # those that were dropped never become good
        if self._num_in_vain > self._limit:
            raise LawaError(
                f"the loss spiked {self._limit + 1} times since the last good snapshot "
                f"({self._newest}): the run has diverged. Lower the learning rate, "
                "check the data, or raise factor or limit."
            )
        num_snapshots = len(self.averager)
        if num_snapshots:
            go_to_average(model, self.averager, self._k)
            went = f"the weights went back to the mean of snapshots up to {self._newest}"
        else:
            went = "there is no good snapshot yet, so the weights stay as they are"
        high = f"spiked to {self._loss:.4g}" if math.isfinite(self._loss) else "is NaN or Inf"
        self.message = f"the loss {high}; {went}, and the batch is skipped."
        if _reset_statistics(model):
            self.message += " BatchNorm statistics were not finite and start anew."
        model.zero_grad()
        if optimizer is not None:
            optimizer.zero_grad(set_to_none=True)
            if self._optimizer_state == "reset" or not self._is_finite(optimizer):
                optimizer.state.clear()
        return num_snapshots

    def state_dict(self) -> dict[str, Any]:
        """The losses and counters, as plain numbers; save it with the averager's state."""
        return {
            "losses": list(self._losses),
            "num_high": self._num_high,
            "num_good": self._num_good,
            "num_in_vain": self._num_in_vain,
            "num_rescues": self.num_rescues,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state."""
        names = ("num_high", "num_good", "num_in_vain", "num_rescues")
        try:
            losses = deque(map(float, state["losses"]), maxlen=self._history)
            counts = [whole_number(name, state[name], least=0) for name in names]
        except DAMAGE as error:
            raise StateError(
                f"this is not the state of a SpikeRescue ({error}): pass what state_dict() "
                "returned."
            ) from None
        self._losses = losses
        self._num_high, self._num_good, self._num_in_vain, self.num_rescues = counts

    def reset(self) -> None:
        """Forget the losses: another run begins, or the loss has changed for a good reason.

        Snapshots in the window count as good again after the next normal loss; a spike before that
        drops them.
        """
        self._losses.clear()
        self._num_high = self._num_good = self._num_in_vain = self.num_rescues = 0

    def _is_high(self, value: float) -> bool:
        if not math.isfinite(value):
            return True
        if value < 0.0:
            raise ConfigError(
                f"the loss is {value:g}: a spike is a multiple of recent losses, so they must be "
                "positive. Add a constant, or pass the norm of the gradient."
            )
        # Not the median: where losses are near 0, those of single batches are far above it.
        full = len(self._losses) == self._history
        return full and value > self._factor * max(self._losses)

    def _shared(self, loss: SupportsFloat | Tensor) -> float:
        """The mean over the ranks; Inf if that of any rank is not finite."""
        if isinstance(loss, Tensor) and loss.numel() != 1:
            raise ConfigError(
                f"the loss has shape {tuple(loss.shape)}: give one number, such as loss.mean()."
            )
        value = float(loss.detach() if isinstance(loss, Tensor) else loss)
        return self._mean(value if math.isfinite(value) else math.inf, "SpikeRescue.check")

    def _is_finite(self, optimizer: Optimizer) -> bool:
        """Whether its state is, on all ranks."""
        tensors = (t for state in optimizer.state.values() for t in state.values())
        finite = all(
            bool(local(t).isfinite().all())
            for t in tensors
            if isinstance(t, Tensor) and t.is_floating_point()
        )
        return self._mean(float(finite), "SpikeRescue.restore") == 1.0

    def _mean(self, value: float, where: str) -> float:
        dist, size = torch.distributed, rank_and_size(self._group)[1]
        if size == 1:
            return value
        on_gpu = dist.get_backend(self._group) == "nccl"
        device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else "cpu"
        total = torch.tensor(value, dtype=torch.float64, device=device)
        with explain_missing_ranks(where):
            dist.all_reduce(total, group=self._group)
        return total.item() / size

    @property
    def _newest(self) -> str:
        steps = self.averager.snapshot_steps
        return f"step {steps[-1]}" if steps else "there was none"


def _check_arguments(model: nn.Module, optimizer: Optimizer | None) -> None:
    """Refuse at the first call what the first spike, hours later, would stumble over."""
    has_groups = optimizer is None or hasattr(optimizer, "param_groups")
    if not isinstance(model, nn.Module) or not has_groups:
        raise ConfigError(
            f"got a {type(model).__name__} as the model and a {type(optimizer).__name__} as the "
            "optimizer: pass the model first, then its optimizer."
        )
    refuse_masters(model)


def refuse_masters(model: nn.Module) -> None:
    """Raise for an engine whose step and gradients cannot be stopped from outside."""
    if masters_of(model) is not None:
        raise ConfigError(
            f"SpikeRescue cannot skip the step of a {type(model).__name__}, which keeps gradients "
            "and master weights of its own: train without it, and after a spike resume from a "
            "checkpoint, or from the average of several (lawa average)."
        )


def rescue_for(option: bool | SpikeRescue, averager: LatestWeightAverager) -> SpikeRescue | None:
    """The rescue that a callback's option `rescue_spikes` asks for."""
    if isinstance(option, SpikeRescue):
        return option.watching(averager)
    one_of("rescue_spikes", option, (True, False), " Or give a SpikeRescue(...).")
    return SpikeRescue(averager) if option else None


def _reset_statistics(model: nn.Module) -> bool:
    """Reset BatchNorm statistics that are not finite; whether there were any on this rank.

    The forward pass of a broken batch has written them, and they would be NaN for ever.
    """
    broken = [
        layer
        for layer in layers_with_statistics(model)
        if not all(bool(buffer.isfinite().all()) for buffer in layer.buffers(recurse=False))
    ]
    with ordinary_mode():
        for layer in broken:
            layer.reset_running_stats()
    return bool(broken)


def go_to_average(model: nn.Module, averager: LatestWeightAverager, k: int | None = None) -> None:
    """Make the mean of the window, or of its k newest snapshots, the weights of the model.

    Of a blend it is the mean alone: the live weights are what is given up. Buffers become those of
    the newest snapshot. Takes memory for two copies of the weights, for a moment.
    """
    usual = averager.num_averaged or len(averager)
    n = usual if k is None else min(k, len(averager))
    rule = averager.coefficients
    rule = rule.rule if isinstance(rule, Blend) else rule
    with averager.swapped_into(model, n, coefficients=rule):
        tensors = live_tensors(model)
        with ordinary_mode():
            values = {name: tensor.clone() for name, tensor in tensors.items()}
    with ordinary_mode():
        for name, tensor in tensors.items():
            write_into(tensor, values[name])
