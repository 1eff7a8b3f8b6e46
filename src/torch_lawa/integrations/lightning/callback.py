"""`LatestWeightAveraging`, a callback for Lightning: two lines, and evaluation uses the average.

Named and used like Lightning's own `WeightAveraging`. Checkpoints hold the trained weights, and
the window is a file beside them.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from torch import Tensor
from torch.optim import Optimizer

from torch_lawa.averager import LatestWeightAverager
from torch_lawa.batch_norm_cache import BatchNormCache
from torch_lawa.errors import ConfigError, NotReadyError
from torch_lawa.integrations.lightning._compat import (
    Callback,
    LightningModule,
    Trainer,
    rank_zero_warn,
)
from torch_lawa.integrations.lightning.average import ModuleAverage
from torch_lawa.integrations.lightning.cadence import Interval, check_run, make_cadence
from torch_lawa.integrations.lightning.checkpoints import attach_windows
from torch_lawa.integrations.lightning.side_by_side import evaluate_twice
from torch_lawa.integrations.lightning.strategies import (
    check_strategy,
    refuse_reparametrisation,
    release_gathered,
    trained_model,
)
from torch_lawa.ranks.agreement import check_same_decision
from torch_lawa.schedule import Schedule, choose_schedule, smaller_window
from torch_lawa.spike_rescue import SpikeRescue, rescue_for
from torch_lawa.stores.base import Store
from torch_lawa.units import either
from torch_lawa.validation import whole_number
from torch_lawa.window_choice import WindowChoice, WindowSearch, search_for

__all__ = ["LatestWeightAveraging"]


class LatestWeightAveraging(Callback):
    """Keeps the `k` latest snapshots of a run; validation, test and predict use their mean.

    >>> from lightning.pytorch import Trainer
    >>> averaging = LatestWeightAveraging(k=6)  # a snapshot after every epoch
    >>> trainer = Trainer(callbacks=[averaging], logger=False, accelerator="cpu")

    Until there are k snapshots, evaluation uses the weights that are being trained. The model and
    every checkpoint always hold those, also after `fit`: `save_averaged` writes a checkpoint with
    the average, `averager.average()` returns it.

    Override `should_update` to decide in another way when a snapshot is taken, and
    `batch_norm_forward` if the model takes its batches in another way.

    Args:
        k: How many snapshots are averaged. The paper's default is 6.
        update_every_n_steps: Take a snapshot whenever `trainer.global_step` reaches a multiple of
            this (where `ModelCheckpoint(every_n_train_steps=...)` saves).
        update_every_n_epochs: Take a snapshot after every so many complete epochs, before they are
            validated. The default is every epoch.
        update_starting_at_step: Leave out the first so many optimizer steps.
        update_starting_at_epoch: Leave out the first so many epochs. Either start may be given,
            whatever the snapshots are counted in.
        schedule: Any schedule, such as `Every(10)` or `OnPlateau()`, instead of
            `update_every_n_steps` and `update_every_n_epochs`. One that needs a loss is asked
            after each validation of `fit`.
        horizon: Instead of a schedule: the share of the steps (or epochs) so far, such as 1/4, that
            the window spans with its `k` snapshots. The average is then used from the first one on.
        samples: How many collected weights make up a snapshot, which is their mean; see
            `LatestWeightAverager`. With a horizon, 16 is a good value.
        interval: What `schedule` and `horizon` count: optimizer "step"s or complete "epoch"s.
        monitor: The logged metric that is the loss for `schedule`, and that `choose_window`
            compares; the same in every process.
        store: Where snapshots are kept: "host" memory, the model's "device", or a
            `DiskStore(folder)`.
        side_by_side: Validate and test twice, with the trained and with the averaged weights:
            `val_loss` is of the trained weights, `val_loss_averaged` of the average (until it is
            ready, `fit` reports the trained weights under both names).
        choose_window: At each validation in `fit`, validate several windows of the k snapshots one
            after the other, and choose the one with the best `monitor`, or the trained weights if
            they are better. Test, predict and `save_averaged` use the choice. Give a
            `WindowSearch` for other windows than 1, k/4, k/2 and k, or with a `mode` if the name of
            `monitor` does not say whether high values are good. Implies `side_by_side`:
            `val_loss_averaged` is of the chosen window, and `averaged_k` and `averaged_seconds` are
            logged with it.
        rescue_spikes: When the training loss spikes or is NaN, go back to the mean of the good
            snapshots and skip the batch. Give a `SpikeRescue(factor=1.5)` for other settings.
        name: The suffix of those metrics, which also tells two of these callbacks apart.
        batch_norm_batches: How many batches of the train loader the BatchNorm statistics of the
            average are re-estimated from; 0 keeps those of the newest snapshot.
        kwargs: Passed on to `LatestWeightAverager`: `coefficients`, `min_snapshots`,
            `storage_dtype`, `buffers`, `frozen`.
    """

    def __init__(
        self,
        k: int = 6,
        *,
        update_every_n_steps: int | None = None,
        update_every_n_epochs: int | None = None,
        update_starting_at_step: int | None = None,
        update_starting_at_epoch: int | None = None,
        schedule: Schedule | None = None,
        horizon: float | None = None,
        samples: int = 1,
        interval: Interval = "step",
        monitor: str = "val_loss",
        store: Literal["host", "device"] | Store = "host",
        side_by_side: bool = False,
        choose_window: bool | WindowSearch = False,
        rescue_spikes: bool | SpikeRescue = False,
        name: str = "averaged",
        batch_norm_batches: int = 40,
        **kwargs: Any,
    ) -> None:
        k, samples = whole_number("k", k, least=1), whole_number("samples", samples, least=1)
        cadence = make_cadence(
            choose_schedule(schedule, horizon, k * samples),
            interval,
            update_every_n_steps=update_every_n_steps,
            update_every_n_epochs=update_every_n_epochs,
            update_starting_at_step=update_starting_at_step,
            update_starting_at_epoch=update_starting_at_epoch,
        )
        cadence.check_monitor(monitor)
        if not isinstance(name, str) or not name or "/" in name:
            raise ConfigError(f"name={name!r}: give the suffix of metric names, like 'averaged'.")
        # Find mistakes now; a store on disk is opened when the processes have been started.
        tried = LatestWeightAverager(
            k,
            samples=samples,
            store="host" if isinstance(store, Store) else store,
            schedule=cadence.schedule,
            **kwargs,
        )
        search = search_for(choose_window, monitor)
        if search is not None:
            search.check(tried)
        self.side_by_side = side_by_side or search is not None
        self.name, self.monitor = name, monitor
        self._average = ModuleAverage(
            name,
            cadence,
            {"k": k, "samples": samples, "store": store, **kwargs},
            BatchNormCache(batch_norm_batches),
            self.batch_norm_forward,
            search,
            monitor,
            rescue_for(rescue_spikes, tried),
        )
        self._step_loss: Tensor | None = None  # of the batches since the last optimizer step
        self._forward_untried = False  # whether the forward pass for BatchNorm is yet to be tried

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Whether a snapshot is taken now: called after every optimizer step and complete epoch.

        One of the two is given: the zero-based index of the optimizer step, or of the epoch, that
        has just ended.
        """
        average, cadence = self._average, self._average.cadence
        by_steps = cadence.unit == "steps"
        index = step_idx if by_steps else epoch_idx
        if index is None or cadence.schedule.needs_loss:
            return False
        # The complete units of the other kind, of which some may be left out as well.
        others = average.latest_epoch + 1 if by_steps else average.latest_step
        return others >= cadence.other_start and cadence.due(self.averager, index + 1)

    def batch_norm_forward(self, pl_module: Any, batch: Any) -> Any:
        """Run a batch of the train loader through the model, for its BatchNorm layers to see.

        By default this calls `pl_module` with the batch if it is a tensor, with its first item if
        it is a tuple or list, and with its items as keyword arguments if it is a dict.
        """
        if isinstance(batch, Mapping):
            return pl_module(**batch)
        return pl_module(batch[0] if isinstance(batch, tuple | list) else batch)

    @property
    def averager(self) -> LatestWeightAverager:
        """The averager that holds the window."""
        return self._average.averager

    @property
    def choice(self) -> WindowChoice | None:
        """What `choose_window` measured and chose in the last validation of `fit`."""
        return self._average.choice

    def save_averaged(self, trainer: Trainer, filepath: str | Path) -> None:
        """Write a checkpoint whose weights are the average: `load_from_checkpoint` reads it.

        With `choose_window` it is the chosen window, or the trained weights if they were best.
        Like `trainer.save_checkpoint(filepath, weights_only=True)`, it must be called in every
        process.
        """
        if not self.averager.ready and self._average.search is None:
            k, samples, least = self.averager.k, self.averager.samples, self.averager.min_snapshots
            raise NotReadyError(
                f"{len(self.averager)} of {least} snapshots were taken, so there is no average to "
                f"save: {either(['train longer', *smaller_window(k, samples, least)])}."
            )
        swapped = self._average.swapped  # in the middle of an evaluation
        self._average.restore()
        with self._average.averaged(trainer):
            trainer.save_checkpoint(filepath, weights_only=True)
        if swapped:
            self._average.swap_in(trainer)

    # Lightning's hooks

    @property
    def state_key(self) -> str:
        """Distinguishes two callbacks of this class; Lightning refuses equal keys."""
        return self._generate_state_key(name=self.name)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Attach the window to this trainer's checkpoints, before any of them is loaded."""
        if not isinstance(trainer, Trainer):
            raise ConfigError(
                f"the Trainer is of {type(trainer).__module__.split('.')[0]} and this callback was "
                f"made for {Trainer.__module__.split('.')[0]}: import the Trainer's package before "
                "torch_lawa.integrations.lightning, and only that one."
            )
        check_strategy(trainer)
        refuse_reparametrisation(trainer)
        others = [c for c in vars(trainer)["callbacks"] if isinstance(c, LatestWeightAveraging)]
        if not self.side_by_side and len(others) > 1:
            raise ConfigError(
                f"{len(others)} LatestWeightAveraging callbacks would replace the model's weights "
                "in one validation: give each side_by_side=True and a name of its own."
            )
        attach_windows(trainer, self._average)
        if self.side_by_side:
            evaluate_twice(trainer, self._average)
        self._average.saved_step = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check the cadence against the run, and whether the window is of this run."""
        average = self._average
        if type(self).should_update is LatestWeightAveraging.should_update:
            check_run(average.cadence, trainer, self.averager, average.search)
        if average.search is not None and not trainer.enable_validation:
            raise ConfigError(
                "choose_window: this run has no validation to compare windows with. Pass "
                "val_dataloaders to fit, or leave choose_window out."
            )
        step, newest = trainer.global_step, self.averager.newest_step
        if newest is not None and (newest > step or not average.belongs_to(pl_module)):
            rank_zero_warn(
                f"This run is at step {step} and the window was collected up to step {newest} of "
                "another one: a new window begins."
            )
            average.begin(pl_module)
        if step == 0:
            average.latest_epoch = -1
        average.latest_step, self._step_loss = step, None
        saved_after_a_batch = trainer.fit_loop.epoch_loop.restarted_on_train_batch_end
        if saved_after_a_batch and average.saved_step is not None:
            # Perhaps before this callback's hook for that batch. If the batch was the last one of
            # its epoch, Lightning counts the epoch as complete now.
            average.latest_step = average.saved_step
            self._follow(trainer, trainer.current_epoch - 1)
        self._forward_untried = average.batch_norm.needed(pl_module)

    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: Tensor
    ) -> None:
        """Add the loss of a batch, as a share of its optimizer step."""
        if self._average.rescue is None:
            return
        scaler = getattr(trainer.precision_plugin, "scaler", None)  # of float16
        own = loss.detach() if scaler is None else loss.detach() / scaler.get_scale()
        self._step_loss = own if self._step_loss is None else self._step_loss + own

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        """Go back if the loss of this step is a spike; the step then does nothing."""
        (loss, self._step_loss), rescue = (self._step_loss, None), self._average.rescue
        if rescue is not None and loss is not None:
            model = trained_model(trainer)
            release_gathered(model)
            if rescue(model, optimizer, loss):
                rank_zero_warn(f"Step {trainer.global_step + 1}: {rescue.message}")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Take a snapshot if it is due after an optimizer step since the last batch."""
        if self._forward_untried:
            self._average.try_forward(trainer, batch)
            self._forward_untried = False
        # Also ask about the epoch here: at the end of the epoch its validation is over.
        self._follow(trainer, trainer.current_epoch)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take a snapshot if it is due after an epoch that ended early."""
        self._follow(trainer, trainer.current_epoch)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prepare what test and predict will need: written snapshots, BatchNorm statistics."""
        self.averager.wait()
        average, search = self._average, self._average.search
        compared = average.choice is not None and len(average.choice.values) > 1
        if search is not None and search.candidates(self.averager) and not (average.k or compared):
            rank_zero_warn(
                "choose_window: no validation has compared windows since the first snapshot, so "
                "none is chosen, and evaluations use the trained weights. Validate more often "
                "(val_check_interval, check_val_every_n_epoch), or leave choose_window out."
            )
        cache, known = average.batch_norm, average.batch_norm.holds(self.averager, average.k)
        if average.ready and cache.needed(pl_module) and not known:
            with average.averaged(trainer):
                pass

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Swap in the average."""
        if not self.side_by_side and not trainer.sanity_checking:
            self._average.swap_in(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the trained weights, and take a snapshot if the loss says so."""
        self._average.restore()
        in_fit = trainer.state.fn == "fit" and not trainer.sanity_checking
        if in_fit and self._average.cadence.schedule.needs_loss:
            self._follow_loss(trainer)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Swap in the average."""
        if not self.side_by_side:
            self._average.swap_in(trainer)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the trained weights."""
        self._average.restore()

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Swap in the average."""
        self._average.swap_in(trainer)

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the trained weights."""
        self._average.restore()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Restore the trained weights."""
        self._average.restore()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Restore the trained weights."""
        self._average.restore()

    def _follow(self, trainer: Trainer, epoch: int) -> None:
        """Ask about the optimizer steps and the epoch since the last time."""
        average = self._average
        # One batch may be no step (accumulated gradients) or several (manual optimization).
        steps = range(average.latest_step, trainer.global_step)
        due = [self.should_update(step_idx=step) for step in steps]  # a schedule sees each step
        if any(due):
            average.collect(trainer)
        average.latest_step = trainer.global_step
        # An epoch that max_steps cut short is not complete, and continues if the run is resumed.
        if trainer.is_last_batch and epoch > average.latest_epoch:
            average.latest_epoch = epoch
            if self.should_update(epoch_idx=epoch):
                average.collect(trainer)

    def _follow_loss(self, trainer: Trainer) -> None:
        """Ask about the validation that has just ended."""
        average, metrics = self._average, trainer.callback_metrics
        if self.monitor not in metrics:
            raise ConfigError(
                f"monitor={self.monitor!r}: the schedule {average.cadence.schedule} needs this "
                f"loss, and the validation logged {', '.join(metrics) or 'nothing'}. Log it, or "
                "set monitor=..."
            )
        by_steps = average.cadence.unit == "steps"
        position = trainer.global_step if by_steps else average.latest_epoch + 1
        loss = float(metrics[self.monitor])
        due = average.cadence.due(self.averager, position, loss=loss)
        check_same_decision(trained_model(trainer), due, position)
        if due:
            average.collect(trainer)
