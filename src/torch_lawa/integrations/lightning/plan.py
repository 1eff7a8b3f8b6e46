"""When a Lightning run gives a snapshot: every n optimizer steps, or every n epochs."""

import math
from dataclasses import dataclass

from torch_lawa.errors import ConfigError
from torch_lawa.integrations.lightning.names import Trainer, rank_zero_warn

__all__ = ["Plan"]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The arguments of the callback, checked.

    >>> plan = Plan(update_every_n_steps=10, update_starting_at_step=15)
    >>> [step for step in range(45) if plan.due(step, None)]
    [19, 29, 39]
    """

    update_every_n_steps: int | None = None
    update_every_n_epochs: int | None = None
    update_starting_at_step: int | None = None
    update_starting_at_epoch: int | None = None

    def __post_init__(self) -> None:
        for name, least in (
            ("update_every_n_steps", 1),
            ("update_every_n_epochs", 1),
            ("update_starting_at_step", 0),
            ("update_starting_at_epoch", 0),
        ):
            value = getattr(self, name)
            if value is not None and (
                isinstance(value, bool) or not isinstance(value, int) or value < least
            ):
                raise ConfigError(f"{name}={value!r}: it must be an int of at least {least}.")
        if self.update_every_n_steps is not None and self.update_every_n_epochs is not None:
            raise ConfigError(
                f"update_every_n_steps={self.update_every_n_steps} and "
                f"update_every_n_epochs={self.update_every_n_epochs}: give one of them."
            )
        wrong = "update_starting_at_epoch" if self.by_steps else "update_starting_at_step"
        if getattr(self, wrong) is not None:
            unit = "steps" if self.by_steps else "epochs"
            raise ConfigError(
                f"{wrong}={getattr(self, wrong)}: snapshots are taken every so many {unit} here, "
                f"so give the start as update_starting_at_{unit[:-1]}, or set "
                f"update_every_n_{'epochs' if self.by_steps else 'steps'}."
            )

    @property
    def by_steps(self) -> bool:
        """Whether optimizer steps are counted, and not epochs."""
        return self.update_every_n_steps is not None

    @property
    def every(self) -> int:
        """The distance of two snapshots."""
        return self.update_every_n_steps or self.update_every_n_epochs or 1

    @property
    def start(self) -> int:
        """How many steps or epochs are left out."""
        return self.update_starting_at_step or self.update_starting_at_epoch or 0

    def due(self, step_idx: int | None, epoch_idx: int | None) -> bool:
        """Whether the step or epoch with this index ends with a snapshot."""
        index = step_idx if self.by_steps else epoch_idx
        return index is not None and index >= self.start and (index + 1) % self.every == 0

    def check(self, trainer: Trainer, wanted: int) -> None:
        """Refuse a run that ends before the first snapshot; warn if it ends before the last."""
        total = self._length(trainer)
        if total is None or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        unit = "steps" if self.by_steps else "epochs"
        expected = total // self.every - self.start // self.every
        if expected < 1:
            name = f"update_starting_at_{unit[:-1]}={self.start}, " if self.start else ""
            raise ConfigError(
                f"this run of {total} {unit} ends before the first snapshot ({name}"
                f"update_every_n_{unit}={self.every}): begin earlier, take them more often, or "
                "train longer."
            )
        if expected < wanted:
            rank_zero_warn(
                f"This run of {total} {unit} gives {expected} snapshot(s) and k={wanted} are "
                "waited for: evaluation will use the trained weights to its end. Take them more "
                "often, lower k, or set min_snapshots=1."
            )

    def _length(self, trainer: Trainer) -> int | None:
        """How long the run is, in steps or epochs, where that is known."""
        batches = trainer.num_training_batches
        steps_an_epoch = math.inf
        if trainer.lightning_module.automatic_optimization and batches < math.inf:
            steps_an_epoch = math.ceil(batches / trainer.accumulate_grad_batches)
        max_epochs = math.inf if trainer.max_epochs in (None, -1) else trainer.max_epochs
        max_steps = math.inf if trainer.max_steps == -1 else trainer.max_steps
        if self.by_steps:
            length = min(max_steps, max_epochs * steps_an_epoch)
        elif math.isinf(steps_an_epoch):
            length = max_epochs
        else:
            length = min(max_epochs, max_steps // steps_an_epoch)
        return None if math.isinf(length) else int(length)
