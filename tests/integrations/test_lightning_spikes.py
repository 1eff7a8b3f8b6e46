"""`rescue_spikes` in runs of Lightning: a poisoned batch, and a resumed run."""

import math
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from support.lightning import QUIET, Net, Watch, loader, mean, same, trainer, weights

from torch_lawa import SpikeRescue
from torch_lawa.errors import ConfigError
from torch_lawa.integrations.lightning import LatestWeightAveraging

pytestmark = [*QUIET, pytest.mark.filterwarnings("ignore:Step .*the loss (spiked|is NaN)")]


class Poisoned(Net):
    """The loss of the first batch of some optimizer steps is no number, or huge."""

    def __init__(self, steps: dict[int, float], **options: Any) -> None:
        super().__init__(**options)
        self.steps, self.seen = steps, list[dict[str, torch.Tensor]]()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(weights(self))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self._loss(batch) * self.steps.pop(self.trainer.global_step, 1.0)


def averaging(**options: Any) -> LatestWeightAveraging:
    settings: dict[str, Any] = {"k": 3, "update_every_n_steps": 1, "min_snapshots": 1, **options}
    return LatestWeightAveraging(**settings)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_poisoned_batch_takes_the_weights_back(tmp_path, accumulate):
    model = Poisoned({6: math.nan}, batch_norm=True)
    callback = averaging(rescue_spikes=True)
    run = trainer(tmp_path, callback, max_steps=7, max_epochs=-1,
                  accumulate_grad_batches=accumulate)  # fmt: skip
    run.fit(model, loader())
    # Batches start with the weights after as many steps. Step 6 has no normal loss: 3 to 5 are
    # good, 4 and 5 are still in the window of three.
    after = {step: model.seen[step * accumulate] for step in (4, 5)}
    expected = mean([after[4], after[5]])
    parameters = dict(model.named_parameters())
    assert all(torch.equal(parameters[name], expected[name]) for name in parameters)
    assert all(bool(buffer.isfinite().all()) for buffer in model.buffers())
    assert callback.averager.snapshot_steps == [4, 5, 7]
    assert not run.optimizers[0].state  # of Adam


@pytest.mark.filterwarnings("ignore:This run is at step")
def test_another_run_begins_without_the_losses_of_the_first(tmp_path):
    callback = averaging(rescue_spikes=True)
    for model, steps in ((Poisoned({6: math.nan}), 7), (Net(), 3)):
        trainer(tmp_path, callback, max_steps=steps, max_epochs=-1).fit(model, loader())
    state = callback._average.state_dict()["rescue"]
    assert (len(state["losses"]), state["num_rescues"]) == (3, 0)


def test_without_it_the_run_is_lost(tmp_path):
    model = Poisoned({6: math.nan})
    trainer(tmp_path, averaging(), max_steps=7, max_epochs=-1).fit(model, loader())
    assert all(bool(p.isnan().all()) for p in model.parameters())


def test_it_resumes_exactly(tmp_path):
    """The recent losses are saved with the window."""

    def rescue() -> SpikeRescue:
        return SpikeRescue(factor=3, history=4, optimizer_state="keep")

    def fit(folder: Any, last: int, resume: str | None = None) -> tuple[Net, LatestWeightAveraging]:
        model, callback = Poisoned({7: 1e3}), averaging(rescue_spikes=rescue())
        saving = ModelCheckpoint(folder, every_n_train_steps=6, save_top_k=-1, filename="{step}")
        run = trainer(folder, callback, saving, max_steps=last, max_epochs=-1)
        run.fit(model, loader(), ckpt_path=resume)
        return model, callback

    whole, callback = fit(tmp_path / "whole", 10)
    assert callback._average.rescue is not None
    assert callback._average.rescue.num_rescues == 1
    fit(tmp_path / "parts", 6)
    parts, callback = fit(tmp_path / "parts", 10, str(tmp_path / "parts" / "step=6.ckpt"))
    assert callback._average.rescue is not None
    assert callback._average.rescue.num_rescues == 1
    assert same(weights(parts), weights(whole))


def test_a_run_without_spikes_is_unchanged(tmp_path):
    final = []
    for extra in ({}, {"rescue_spikes": True}):
        model, watch = Net(), Watch()
        trainer(tmp_path, averaging(**extra), watch, max_epochs=3).fit(model, loader())
        final.append(weights(model))
    assert same(*final)


def test_another_option_is_refused():
    with pytest.raises(ConfigError, match=r"SpikeRescue\(\.\.\.\)"):
        averaging(rescue_spikes="yes")
