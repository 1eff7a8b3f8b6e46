"""`LatestWeightAveraging`, a callback for Lightning: two lines, and evaluation uses the average.

Named and called like Lightning's own `WeightAveraging`. The model itself always keeps the weights
that are being trained: averaged ones are lent to it for an evaluation and taken back, whatever
happens. Checkpoints hold the trained weights, and the window in a file beside them.
"""

import contextlib
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from torch_lawa.averager import LatestWeightAverager
from torch_lawa.errors import ConfigError, NotReadyError
from torch_lawa.integrations.lightning.batch_norm import Statistics
from torch_lawa.integrations.lightning.checkpoints import accompany
from torch_lawa.integrations.lightning.names import (
    Callback,
    LightningModule,
    Trainer,
    rank_zero_warn,
)
from torch_lawa.integrations.lightning.plan import Plan
from torch_lawa.integrations.lightning.shards import (
    check_strategy,
    keep_in_step,
    let_go,
    trained_model,
)
from torch_lawa.integrations.lightning.side_by_side import evaluate_twice
from torch_lawa.stores.base import Store

__all__ = ["LatestWeightAveraging"]


class LatestWeightAveraging(Callback):
    """Keeps the `k` latest snapshots of a run; validation, test and predict use their mean.

    >>> from lightning.pytorch import Trainer
    >>> averaging = LatestWeightAveraging(k=6)  # a snapshot after every epoch
    >>> trainer = Trainer(callbacks=[averaging], logger=False, accelerator="cpu")

    Until there are k snapshots, evaluation uses the weights that are being trained. They are what
    the model and every checkpoint hold at any time, after `fit` as well: `save_averaged` writes a
    checkpoint with the average, `averager.average()` returns it.

    Override `should_update` to decide otherwise when a snapshot is taken, and
    `batch_norm_forward` where the model takes its batches in another way.

    Args:
        k: How many snapshots are averaged. The paper's default is 6.
        update_every_n_steps: Take a snapshot whenever `trainer.global_step` has reached another
            multiple of this (so where `ModelCheckpoint(every_n_train_steps=...)` saves).
        update_every_n_epochs: Take one after every so many complete epochs, before they are
            validated. The default is every epoch.
        update_starting_at_step: Leave out the first so many optimizer steps.
        update_starting_at_epoch: Leave out the first so many epochs.
        store: Where snapshots live: "host" memory, the model's "device", or a `DiskStore(folder)`.
        side_by_side: Validate and test twice, with the trained and with the averaged weights:
            `val_loss` is of the trained ones, `val_loss_averaged` of the average (until it is
            ready, `fit` reports the trained weights under both names).
        name: The ending of those metrics, and what tells two of these callbacks apart.
        batch_norm_batches: From how many batches of the train loader the BatchNorm statistics of
            averaged weights are re-estimated; 0 keeps those of the newest snapshot.
        kwargs: Passed on to `LatestWeightAverager`: `coefficients`, `min_snapshots`,
            `storage_dtype`, `buffers`, `frozen`, `sliding`.
    """

    def __init__(
        self,
        k: int = 6,
        *,
        update_every_n_steps: int | None = None,
        update_every_n_epochs: int | None = None,
        update_starting_at_step: int | None = None,
        update_starting_at_epoch: int | None = None,
        store: Literal["host", "device"] | Store = "host",
        side_by_side: bool = False,
        name: str = "averaged",
        batch_norm_batches: int = 40,
        **kwargs: Any,
    ) -> None:
        self._plan = Plan(
            update_every_n_steps=update_every_n_steps,
            update_every_n_epochs=update_every_n_epochs,
            update_starting_at_step=update_starting_at_step,
            update_starting_at_epoch=update_starting_at_epoch,
        )
        if "schedule" in kwargs:
            raise ConfigError(
                "schedule=...: here update_every_n_steps, update_every_n_epochs or an overridden "
                "should_update decide when a snapshot is taken."
            )
        if not isinstance(name, str) or not name or "/" in name:
            raise ConfigError(f"name={name!r}: give the ending of metric names, like 'averaged'.")
        # Mistakes are told now; a store on disk is opened when the processes know each other.
        LatestWeightAverager(k, store="host" if isinstance(store, Store) else store, **kwargs)
        self._options: Mapping[str, Any] = {"k": k, "store": store, **kwargs}
        self._averager: LatestWeightAverager | None = None
        self.side_by_side, self.name = side_by_side, name
        self.statistics = Statistics(batch_norm_batches, self.batch_norm_forward)
        self._lent: contextlib.ExitStack | None = None
        self._owner: weakref.ref[LightningModule] | None = None  # whose weights are in the window
        self._latest_update_step = 0  # optimizer steps that were asked about
        self._latest_update_epoch = -1
        self._saved_step: int | None = None  # the former in the checkpoint that `fit` goes on from
        self._untried = False  # whether the forward pass for BatchNorm is yet to be tried

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Whether a snapshot is taken now: asked after every optimizer step and complete epoch.

        One of the two is given: the zero-based index of the optimizer step, or of the epoch, that
        has just ended.
        """
        return self._plan.due(step_idx, epoch_idx)

    def batch_norm_forward(self, pl_module: Any, batch: Any) -> Any:
        """Run a batch of the train loader through the model, for its BatchNorm layers to see.

        By default `pl_module(...)` of the batch if it is a tensor, of its first item if it is a
        tuple or list, of its items as keyword arguments if it is a dict.
        """
        if isinstance(batch, Mapping):
            return pl_module(**batch)
        return pl_module(batch[0] if isinstance(batch, tuple | list) else batch)

    @property
    def averager(self) -> LatestWeightAverager:
        """The averager that holds the window."""
        if self._averager is None:
            self._averager = LatestWeightAverager(**self._options)
        return self._averager

    @property
    def lending(self) -> bool:
        """Whether the model holds averaged weights for an evaluation that is going on."""
        return self._lent is not None

    def save_averaged(self, trainer: Trainer, filepath: str | Path) -> None:
        """Write a checkpoint whose weights are the average: `load_from_checkpoint` reads it.

        Like `trainer.save_checkpoint(filepath, weights_only=True)`, and like that it must be
        called in every process.
        """
        if not self.averager.ready:
            raise NotReadyError(
                f"{len(self.averager)} of {self.averager.k} snapshots were taken, so there is no "
                "average to save: train longer, lower k, or set min_snapshots=1."
            )
        lending = self.lending  # in the middle of an evaluation
        self.take_back()
        with self._averaged(trainer):
            trainer.save_checkpoint(filepath, weights_only=True)
        if lending:
            self.lend(trainer)

    # What Lightning calls.

    @property
    def state_key(self) -> str:
        """Under which the state stands in a checkpoint."""
        return self._generate_state_key(name=self.name)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stand beside the checkpoints of this trainer, before any is loaded."""
        if not isinstance(trainer, Trainer):
            raise ConfigError(
                f"the Trainer is of {type(trainer).__module__.split('.')[0]} and this callback was "
                f"made for {Trainer.__module__.split('.')[0]}: import the Trainer's package before "
                "torch_lawa.integrations.lightning, and only that one."
            )
        check_strategy(trainer)
        others = [c for c in vars(trainer)["callbacks"] if isinstance(c, LatestWeightAveraging)]
        if not self.side_by_side and len(others) > 1:
            raise ConfigError(
                f"{len(others)} LatestWeightAveraging callbacks would replace the model's weights "
                "in one validation: give each side_by_side=True and a name of its own."
            )
        accompany(trainer, self)
        if self.side_by_side:
            evaluate_twice(trainer, self)
        self._saved_step = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check the plan against the run, and whether the window is of this run."""
        if type(self).should_update is LatestWeightAveraging.should_update:
            self._plan.check(trainer, self.averager.min_snapshots)
        step, steps = trainer.global_step, self.averager.snapshot_steps
        if steps and (steps[-1] > step or not self._is_of(pl_module)):
            rank_zero_warn(
                f"This run is at step {step} and the window was collected up to step {steps[-1]} "
                "of another one: a new window begins."
            )
            self.begin_again(pl_module)
        if step == 0:
            self._latest_update_epoch = -1
        self._latest_update_step = step
        saved_after_a_batch = trainer.fit_loop.epoch_loop.restarted_on_train_batch_end
        if saved_after_a_batch and self._saved_step is not None:
            # Maybe before this callback was told of that batch. If it was the last one of its
            # epoch, Lightning counts that as over now.
            self._latest_update_step = self._saved_step
            self._follow(trainer, trainer.current_epoch - 1)
        self._untried = self.statistics.wanted(pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Take a snapshot if one of the optimizer steps since the last batch asks for it."""
        if self._untried:
            self.statistics.check(trainer, batch)
            self._untried = False
        # The epoch now rather than when it ends: its validation comes in between.
        self._follow(trainer, trainer.current_epoch)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take a snapshot if the epoch asks for it and was left early."""
        self._follow(trainer, trainer.current_epoch)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Have everything that test and predict will want: files, BatchNorm statistics."""
        self.averager.wait()
        missing = self.statistics.wanted(pl_module) and not self.statistics.known(self.averager)
        if self.averager.ready and missing:
            with self._averaged(trainer):
                pass

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Lend the average to the model."""
        if not self.side_by_side and not trainer.sanity_checking:
            self.lend(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take it back."""
        self.take_back()

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Lend the average to the model."""
        if not self.side_by_side:
            self.lend(trainer)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take it back."""
        self.take_back()

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Lend the average to the model."""
        self.lend(trainer)

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take it back."""
        self.take_back()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Whatever happened: the model has its own weights again."""
        self.take_back()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Whatever happened: the model has its own weights again."""
        self.take_back()

    def state_dict(self) -> dict[str, Any]:
        """How far the run was followed; snapshots are in the file beside the checkpoint."""
        return {
            "latest_update_step": self._latest_update_step,
            "latest_update_epoch": self._latest_update_epoch,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there."""
        self._saved_step = state_dict.get("latest_update_step")
        self._latest_update_epoch = state_dict["latest_update_epoch"]

    def __getstate__(self) -> dict[str, Any]:
        """What a pickle holds: the window, and not whose it is or was lent to."""
        return {**vars(self), "_owner": None, "_lent": None}

    # How it is done.

    def begin_again(self, pl_module: LightningModule) -> None:
        """Begin a new window, of this model."""
        self.averager.reset()
        self.statistics.load_state_dict({})
        self._owner = weakref.ref(pl_module)

    def serves(self, trainer: Trainer) -> bool:
        """Whether there is an average of the trainer's model."""
        if not self.averager.ready:
            return False
        if self._is_of(trainer.lightning_module):
            return True
        rank_zero_warn(
            "The window is of another model than the one that is evaluated, which keeps its own "
            "weights: give the one that was trained, or ckpt_path=... for a checkpoint's average."
        )
        return False

    def lend(self, trainer: Trainer) -> None:
        """Give the model the averaged weights, if there are any yet."""
        if self._lent is not None or not self.serves(trainer):
            return
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._averaged(trainer))
            self._lent = stack.pop_all()

    def take_back(self) -> None:
        """Give the model its own weights again."""
        lent, self._lent = self._lent, None
        if lent is not None:
            lent.close()

    @contextlib.contextmanager
    def _averaged(self, trainer: Trainer) -> Iterator[None]:
        model = trained_model(trainer)
        let_go(model)
        with contextlib.ExitStack() as lent:
            lent.enter_context(keep_in_step(model))
            lent.enter_context(self.averager.swapped_into(model))
            lent.callback(let_go, model)  # before its own weights return
            self.statistics.put_into(trainer, self.averager)
            yield

    def _collect(self, trainer: Trainer) -> None:
        model, step = trained_model(trainer), trainer.global_step
        let_go(model)
        self._owner = weakref.ref(trainer.lightning_module)
        # Steps of an optimizer that Lightning does not know of do not count; snapshots do.
        known = not self.averager.snapshot_steps or step > self.averager.snapshot_steps[-1]
        self.averager.collect(model, step=step if known else None)

    def _is_of(self, pl_module: LightningModule) -> bool:
        # A window that a DiskStore found in its folder is of whoever comes.
        return self._owner is None or self._owner() is pl_module

    def _follow(self, trainer: Trainer, epoch: int) -> None:
        """Ask about what has happened since the last time."""
        # One batch may be no step (accumulated gradients) or several (manual optimization).
        steps = range(self._latest_update_step, trainer.global_step)
        if any(self.should_update(step_idx=step) for step in steps):
            self._collect(trainer)
        self._latest_update_step = trainer.global_step
        # An epoch that max_steps cut short is not complete, and goes on if the run is resumed.
        if trainer.is_last_batch and epoch > self._latest_update_epoch:
            self._latest_update_epoch = epoch
            if self.should_update(epoch_idx=epoch):
                self._collect(trainer)
