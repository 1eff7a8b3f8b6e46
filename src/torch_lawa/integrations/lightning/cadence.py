"""When a Lightning run takes a snapshot: from the callback's arguments to a `Cadence`."""

import math
from typing import Literal, TypeAlias

from torch_lawa.averager import LatestWeightAverager
from torch_lawa.errors import ConfigError
from torch_lawa.integrations.cadence import Cadence, Unit
from torch_lawa.integrations.lightning._compat import Trainer, rank_zero_warn
from torch_lawa.schedule import Every, Schedule
from torch_lawa.units import either
from torch_lawa.validation import one_of, whole_number
from torch_lawa.window_choice import WindowSearch

__all__ = ["Interval", "check_run", "make_cadence"]

Interval: TypeAlias = Literal["step", "epoch"]


def make_cadence(
    schedule: Schedule | None,
    interval: Interval,
    *,
    update_every_n_steps: int | None,
    update_every_n_epochs: int | None,
    update_starting_at_step: int | None,
    update_starting_at_epoch: int | None,
) -> Cadence:
    """The cadence that the callback's arguments describe.

    >>> cadence = make_cadence(
    ...     None,
    ...     "step",
    ...     update_every_n_steps=10,
    ...     update_every_n_epochs=None,
    ...     update_starting_at_step=15,
    ...     update_starting_at_epoch=None,
    ... )
    >>> cadence.schedule, cadence.unit, cadence.start
    (Every(n=10, start=0, total=None), 'steps', 15)
    """
    update_every_n_steps = _checked("update_every_n_steps", update_every_n_steps, 1)
    update_every_n_epochs = _checked("update_every_n_epochs", update_every_n_epochs, 1)
    update_starting_at_step = _checked("update_starting_at_step", update_starting_at_step, 0)
    update_starting_at_epoch = _checked("update_starting_at_epoch", update_starting_at_epoch, 0)
    one_of("interval", interval, ("step", "epoch"))
    if sum(g is not None for g in (schedule, update_every_n_steps, update_every_n_epochs)) > 1:
        raise ConfigError(
            "schedule, horizon, update_every_n_steps and update_every_n_epochs: pass only one."
        )
    by_steps = update_every_n_steps is not None or (schedule is not None and interval == "step")
    unit: Unit = "steps" if by_steps else "epochs"
    start, other = update_starting_at_step, update_starting_at_epoch
    if not by_steps:
        start, other = other, start
    every = Every(update_every_n_steps or update_every_n_epochs or 1)
    return Cadence(schedule if schedule is not None else every, unit, start or 0, other or 0)


def check_run(
    cadence: Cadence,
    trainer: Trainer,
    averager: LatestWeightAverager,
    search: WindowSearch | None,
) -> None:
    """Warn about a run that is too short for an average: it is trained as if without averaging."""
    if trainer.fast_dev_run:  # type: ignore[attr-defined]
        return
    found = cadence.shortfall(_run_length(trainer, cadence.unit), averager, search=search)
    if found is not None:
        message, fewer = found
        ways = ("train longer", f"collect more often than {cadence.schedule}", "start earlier")
        rank_zero_warn(
            f"{message}, so evaluation will use the trained weights throughout. For an average, "
            f"{either([*ways, *fewer])}."
        )


def _checked(name: str, value: int | None, least: int) -> int | None:
    return None if value is None else whole_number(name, value, least=least)


def _run_length(trainer: Trainer, unit: Unit) -> int | None:
    """The length of the run in steps or epochs; None if that is not known."""
    batches = trainer.num_training_batches
    steps_per_epoch = math.inf
    if trainer.lightning_module.automatic_optimization and batches < math.inf:
        steps_per_epoch = math.ceil(batches / trainer.accumulate_grad_batches)
    max_epochs = math.inf if trainer.max_epochs in (None, -1) else trainer.max_epochs
    max_steps = math.inf if trainer.max_steps == -1 else trainer.max_steps
    if unit == "steps":
        length = min(max_steps, max_epochs * steps_per_epoch)
    elif math.isinf(steps_per_epoch):
        length = max_epochs
    else:
        length = min(max_epochs, max_steps // steps_per_epoch)
    return None if math.isinf(length) else int(length)
