"""The average of one LightningModule: its snapshots, BatchNorm statistics and swaps.

The module itself always keeps the weights that are being trained. Averaged weights are swapped in
for an evaluation and the trained ones restored, whatever happens.
"""

import contextlib
import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import nn

from torch_lawa.averager import LatestWeightAverager
from torch_lawa.batch_norm_cache import BatchNormCache
from torch_lawa.errors import BatchNormError
from torch_lawa.evaluation import evaluating
from torch_lawa.integrations.cadence import Cadence
from torch_lawa.integrations.lightning._compat import LightningModule, Trainer, rank_zero_warn
from torch_lawa.integrations.lightning.loaders import second_pass
from torch_lawa.integrations.lightning.strategies import (
    callable_model,
    release_gathered,
    trained_model,
)
from torch_lawa.integrations.random_state import preserved_rng
from torch_lawa.spike_rescue import SpikeRescue
from torch_lawa.swap import swapped
from torch_lawa.validation import whole_number
from torch_lawa.window_choice import MonitoredWindow, WindowSearch, newest_is_live

__all__ = ["ModuleAverage", "ranks_of"]


class ModuleAverage(MonitoredWindow):
    """What a callback keeps of a run, and what is saved with its checkpoints."""

    def __init__(
        self,
        name: str,
        cadence: Cadence,
        options: Mapping[str, Any],
        batch_norm: BatchNormCache,
        forward: Callable[[Any, Any], Any],
        search: WindowSearch | None,
        monitor: str,
        rescue: SpikeRescue | None,
    ) -> None:
        self.name, self.cadence, self.batch_norm = name, cadence, batch_norm
        self._options, self._forward = options, forward
        self.search, self.monitor, self._rescue = search, monitor, rescue
        self._swap: contextlib.ExitStack | None = None
        self._owner: weakref.ref[LightningModule] | None = None  # whose weights are in the window
        self.latest_step = 0  # optimizer steps that the schedule was asked about
        self.latest_epoch = -1
        self.saved_step: int | None = None  # `latest_step` in the checkpoint that `fit` resumes

    @cached_property
    def averager(self) -> LatestWeightAverager:  # type: ignore[override]  # can be assigned to
        """The averager, made at the first use: all processes of a DiskStore must exist then."""
        schedule = copy.deepcopy(self.cadence.schedule)
        return LatestWeightAverager(**self._options, schedule=schedule)

    @property
    def rescue(self) -> SpikeRescue | None:
        """What watches the loss, if anything does."""
        if self._rescue is not None and self._rescue.averager is not self.averager:
            self._rescue = self._rescue.watching(self.averager)
        return self._rescue

    @property
    def swapped(self) -> bool:
        """Whether the module holds averaged weights for an evaluation in progress."""
        return self._swap is not None

    def begin(self, pl_module: LightningModule) -> None:
        """Begin a new window, of this module."""
        self.averager.reset()
        self.cadence.restart(self.averager)
        self.batch_norm.clear()
        self.choice = None
        for part in (self.search, self.rescue):
            if part is not None:
                part.reset()
        self._owner = weakref.ref(pl_module)

    def belongs_to(self, pl_module: LightningModule) -> bool:
        """Whether the window is of this module; one that a DiskStore found is of any."""
        return self._owner is None or self._owner() is pl_module

    def usable(self, trainer: Trainer) -> bool:
        """Whether there is an average of the trainer's module."""
        if not self.ready:
            return False
        if self.belongs_to(trainer.lightning_module):
            return True
        rank_zero_warn(
            "The window is of another model than the one that is evaluated, which keeps its own "
            "weights: pass the model that was trained, or ckpt_path=... for a checkpoint's average."
        )
        return False

    def collect(self, trainer: Trainer) -> None:
        """Take a snapshot of the trainer's module."""
        model, step = trained_model(trainer), trainer.global_step
        release_gathered(model)
        self.batch_norm.watch(trainer.lightning_module)
        self._owner = weakref.ref(trainer.lightning_module)
        # `global_step` does not move for optimizers that Lightning does not know.
        newest = self.averager.newest_step
        advanced = newest is None or step > newest
        self.averager.collect(model, step=step if advanced else None)

    def swap_in(self, trainer: Trainer) -> None:
        """Give the module the averaged weights, if there are any yet."""
        if self._swap is not None or not self.usable(trainer):
            return
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.averaged(trainer))
            self._swap = stack.pop_all()

    def restore(self) -> None:
        """Give the module its own weights again."""
        swap, self._swap = self._swap, None
        if swap is not None:
            swap.close()

    def newest_is_trained(self, trainer: Trainer) -> bool:
        """Whether the newest snapshot will be validated anyway, as the trained weights."""
        # Schedule-free optimizers change the weights for an evaluation.
        changes = any(callable(getattr(each, "eval", None)) for each in trainer.optimizers)
        if changes or self.batch_norm.needed(trainer.lightning_module):
            return False
        model = trained_model(trainer)
        release_gathered(model)
        return newest_is_live(self.averager, model, ranks_of(trainer))

    @contextlib.contextmanager
    def averaged(self, trainer: Trainer) -> Iterator[None]:
        """The module holds the averaged weights inside the block, or its own if those are best."""
        model = trained_model(trainer)
        release_gathered(model)
        with contextlib.ExitStack() as stack:
            if self.k == 0:
                stack.enter_context(swapped(model, {}, lambda: None))
            else:
                stack.enter_context(self.averager.swapped_into(model, self.k))
                stack.callback(release_gathered, model)  # before its own weights are restored
                self._put_batch_norm(trainer)
            yield

    def state_dict(self) -> dict[str, Any]:
        """What is saved with the window."""
        return {
            "batch_norm": self.batch_norm.state_dict(self.averager, self.k),
            "choice": None if self.search is None else self.search.state_dict(),
            "rescue": None if self.rescue is None else self.rescue.state_dict(),
            "latest_step": self.latest_step,
            "latest_epoch": self.latest_epoch,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what was saved with the window."""
        step, epoch = (whole_number(n, state[n]) for n in ("latest_step", "latest_epoch"))
        self.batch_norm.load_state_dict(state["batch_norm"])
        self.saved_step, self.latest_epoch = step, epoch
        if self.search is not None and state["choice"] is not None:
            self.search.load_state_dict(state["choice"])
        if self.rescue is not None and state.get("rescue") is not None:
            self.rescue.load_state_dict(state["rescue"])

    def __getstate__(self) -> dict[str, Any]:
        """What a copy has: the window, but not the module that it is of or swapped into."""
        return {**vars(self), "_owner": None, "_swap": None, "_trial": None}

    # BatchNorm

    def try_forward(self, trainer: Trainer, batch: Any) -> None:
        """Run a training batch as the re-estimation will, so that it fails at once or never."""
        module = trainer.lightning_module
        self.batch_norm.watch(module)
        with evaluating(module), preserved_rng(module.device):
            self._run(trainer, batch)

    def _put_batch_norm(self, trainer: Trainer) -> None:
        """Give the module, which holds the mean, the statistics for it."""
        module = trainer.lightning_module
        known = self.batch_norm.holds(self.averager, self.k)
        if self.batch_norm.needed(module) and not known and trainer.train_dataloader is None:
            rank_zero_warn(
                "The averaged weights have no BatchNorm statistics of their own: none were saved "
                "with this window, and there is no train loader to estimate them from. Those of "
                "the newest snapshot are used, which can ruin an average."
            )
            return

        def forward(_: nn.Module, batch: Any) -> None:
            # As in the training loop: the hooks may be the data module's.
            batch = trainer.precision_plugin.convert_input(batch)
            batch = module._on_before_batch_transfer(batch, 0)
            self._run(trainer, trainer.strategy.batch_to_device(batch, module.device))

        @contextlib.contextmanager
        def batches() -> Iterator[Iterable[Any]]:
            # A resumed run has other random numbers, and must estimate the same statistics.
            seed = self.averager.num_collected
            with (
                preserved_rng(module.device, seed),
                second_pass(trainer.train_dataloader) as loader,
            ):
                yield loader

        self.batch_norm.put_into(
            module, self.averager, batches, forward, k=self.k, group=ranks_of(trainer)
        )

    def _run(self, trainer: Trainer, batch: Any) -> None:
        try:
            with trainer.precision_plugin.forward_context():
                self._forward(callable_model(trainer), batch)
        except Exception as error:
            raise BatchNormError(
                f"BatchNorm statistics cannot be re-estimated: forward() raised {error!r} for a "
                "batch of the train loader. Override `batch_norm_forward(pl_module, batch)` of the "
                "callback, or set batch_norm_batches=0 to keep the newest snapshot's statistics."
            ) from error


def ranks_of(trainer: Trainer) -> "torch.distributed.ProcessGroup | None":
    """The group of the trainer's ranks, if there are several."""
    return torch.distributed.group.WORLD if trainer.world_size > 1 else None
