"""`rescue_spikes` in the Transformers Trainer: a poisoned batch, and a resumed run."""

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.transformers import TRAIN, Recorder, arguments, same, tiny_model, weights_of

from torch_lawa import SpikeRescue
from torch_lawa.errors import ConfigError, NonFiniteWarning
from torch_lawa.integrations.transformers import (
    LatestWeightAveragingCallback,
    LatestWeightAveragingTrainer,
)


class PoisonedTrainer(LatestWeightAveragingTrainer):
    """The loss of the first batch of some optimizer steps is no number, or huge."""

    poisoned: dict[int, float] = {}  # noqa: RUF012

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        factor = self.poisoned.pop(self.state.global_step, 1.0) if self.model.training else 1.0
        if isinstance(loss, tuple):
            return loss[0] * factor, *loss[1:]
        return loss * factor


def made(
    folder: Path, poisoned: dict[int, float], rescue: Any, *callbacks: Any, **options: Any
) -> tuple[PoisonedTrainer, LatestWeightAveragingCallback]:
    averaging = LatestWeightAveragingCallback(
        3, collect_strategy="steps", min_snapshots=1, rescue_spikes=rescue
    )
    run = PoisonedTrainer(
        tiny_model(),
        arguments(folder, max_grad_norm=1e9, **options),
        train_dataset=TRAIN,
        eval_dataset=TRAIN[:4],
        callbacks=[averaging, *callbacks],
    )
    run.poisoned = poisoned
    return run, averaging


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_poisoned_batch_takes_the_weights_back(
    accumulate: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder()
    options = {"max_steps": 7, "gradient_accumulation_steps": accumulate}
    run, averaging = made(tmp_path, {6: math.nan}, True, recorder, **options)
    with caplog.at_level(logging.WARNING):
        run.train()
    assert "Step 7: the loss is NaN or Inf" in caplog.text
    assert same(weights_of(run.model), recorder.mean(4, 5))  # nothing shows that 6 was good
    assert averaging.averager.snapshot_steps == [4, 5, 7]
    assert not run.optimizer.state  # of AdamW


def test_another_run_begins_without_the_losses_of_the_first(tmp_path: Path) -> None:
    run, averaging = made(tmp_path, {6: math.nan}, True, max_steps=7)
    run.train()
    run.args.max_steps = 3
    run.train()
    assert averaging.rescue is not None
    state = averaging.rescue.state_dict()
    assert (len(state["losses"]), state["num_rescues"]) == (3, 0)


def test_without_it_the_run_is_lost(tmp_path: Path) -> None:
    run, _ = made(tmp_path, {6: math.nan}, False, max_steps=7)
    with pytest.warns(NonFiniteWarning):
        run.train()
    assert not any(bool(t.isfinite().all()) for t in weights_of(run.model).values())


def test_it_resumes_exactly(tmp_path: Path) -> None:
    """The recent losses are saved with the window."""
    found = []
    for name, resumed in (("whole", False), ("parts", True)):
        options = {"save_steps": 6, "max_steps": 10}
        rescue = SpikeRescue(factor=3, history=4, optimizer_state="keep")
        if resumed:
            first, _ = made(tmp_path / name, {7: 1e3}, rescue, **{**options, "max_steps": 6})
            first.train()
        run, averaging = made(tmp_path / name, {7: 1e3}, rescue, **options)
        run.train(resume_from_checkpoint=resumed or None)
        assert averaging.rescue is not None
        assert averaging.rescue.num_rescues == 1
        found.append(weights_of(run.model))
    assert same(*found)


def test_a_run_without_spikes_is_unchanged(tmp_path: Path) -> None:
    found = []
    for rescue in (False, SpikeRescue(factor=100)):
        run, _ = made(tmp_path, {}, rescue)
        run.train()
        found.append(weights_of(run.model))
    assert same(*found)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in found[0].values())


def test_another_option_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"SpikeRescue\(\.\.\.\)"):
        LatestWeightAveragingCallback(rescue_spikes="yes")  # type: ignore[arg-type]
