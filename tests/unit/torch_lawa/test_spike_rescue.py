"""Spikes are found, the weights go back to what was good, and a run that is hopeless says so."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from torch_lawa import DiskStore, Every, LatestWeightAverager, SpikeRescue, spike_rescue
from torch_lawa.errors import ConfigError, LawaError, StateError, SwapError


def net(value: float = 0.0) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(2, 1, bias=False), nn.BatchNorm1d(1))
    put(model, value)
    return model


def put(model: nn.Module, value: float) -> None:
    with torch.no_grad():
        model[0].weight.fill_(value)  # type: ignore[index]
        model[1].running_mean.fill_(10 * value)  # type: ignore[index]


def weight(model: nn.Module) -> float:
    return model[0].weight[0, 0].item()  # type: ignore[index, no-any-return]


def ready(**options: Any) -> tuple[nn.Module, LatestWeightAverager, SpikeRescue]:
    """Snapshots of 1, 2 and 3, each followed by a normal loss, and enough losses."""
    model, averager = net(), LatestWeightAverager(k=4)
    rescue = SpikeRescue(averager, history=4, **options)
    for value in (1.0, 2.0, 3.0):
        put(model, value)
        averager.collect(model)
        assert not rescue(model, None, 1.0)
    assert not rescue(model, None, 1.1)
    return model, averager, rescue


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf, 2.3, torch.tensor(9.0)])
def test_a_spike_takes_the_weights_back_to_the_mean(loss: Any) -> None:
    model, averager, rescue = ready()
    put(model, 50.0)
    assert rescue(model, None, loss)
    assert weight(model) == 2.0
    assert model[1].running_mean.item() == 30.0  # type: ignore[index]  # of the newest snapshot
    assert averager.snapshot_steps == [1, 2, 3]
    assert rescue.num_rescues == 1
    assert "up to step 3" in rescue.message
    what = f"spiked to {loss:.4g};" if math.isfinite(loss) else "is NaN or Inf;"
    assert f"the loss {what}" in rescue.message


@pytest.mark.parametrize("loss", [0.1, 1.0, 2.2])
def test_a_normal_loss_changes_nothing(loss: float) -> None:
    model, _, rescue = ready()  # the largest loss so far is 1.1
    put(model, 50.0)
    assert not rescue(model, None, loss)
    assert weight(model) == 50.0


def test_a_blend_goes_back_to_its_mean_alone() -> None:
    """The live weights are those of the spike."""
    model, averager = net(), LatestWeightAverager(k=2, blend=0.5)
    rescue = SpikeRescue(averager)
    for value in (1.0, 2.0):
        put(model, value)
        averager.collect(model)
        rescue(model, None, 1.0)
    put(model, math.nan)
    assert rescue(model, None, math.nan)
    assert weight(model) == 1.5


def test_only_what_is_not_a_number_is_a_spike_at_first() -> None:
    model, averager = net(), LatestWeightAverager(k=2)
    rescue = SpikeRescue(averager, history=3)
    assert [rescue.check(loss) for loss in (1.0, 9.0, 1.0, 18.1)] == [False] * 3 + [True]
    rescue = SpikeRescue(averager, history=3)
    put(model, 7.0)
    assert rescue(model, None, math.nan)
    assert weight(model) == 7.0  # there is nothing to go back to
    assert "no good snapshot" in rescue.message


def test_a_hard_batch_is_no_spike() -> None:
    """Near 0, losses of single batches are many times the median."""
    rescue = SpikeRescue(LatestWeightAverager(k=2), history=10)
    assert not any(rescue.check(loss) for loss in (0.01,) * 9 + (0.08, 0.15, 0.29))
    assert not any(rescue.check(0.01) for _ in range(10))  # the hard ones are no longer recent
    assert rescue.check(0.021)


def test_a_snapshot_since_the_last_normal_loss_is_dropped() -> None:
    model, averager, rescue = ready()
    put(model, math.nan)  # the step after the last normal loss
    averager.collect(model)
    assert rescue(model, None, math.nan)
    assert weight(model) == 2.0
    assert averager.snapshot_steps == [1, 2, 3]
    assert averager.num_collected == 4
    averager.collect(model)  # goes on
    assert averager.snapshot_steps == [1, 2, 3, 5]
    assert averager.average()["0.weight"][0, 0] == 2.0


def test_samples_since_the_newest_snapshot_are_dropped() -> None:
    model, averager = net(), LatestWeightAverager(k=2, samples=2, min_snapshots=1)
    rescue = SpikeRescue(averager)
    for value in (1.0, 3.0, 9.0):  # a snapshot of 2, and a sample
        put(model, value)
        averager.collect(model)
        rescue(model, None, 1.0)
    assert averager.average()["0.weight"][0, 0] > 2
    assert rescue(model, None, math.nan)
    assert weight(model) == 2.0
    assert averager.average()["0.weight"][0, 0] == 2.0


@pytest.mark.parametrize("snapshots", [0, 3])
def test_statistics_that_a_broken_batch_has_spoiled_start_anew(snapshots: int) -> None:
    model, averager = net(), LatestWeightAverager(k=4)
    rescue = SpikeRescue(averager)
    for value in range(snapshots):
        put(model, float(value))
        averager.collect(model)
        assert not rescue(model, None, 1.0)
    model.train()
    model(torch.full((4, 2), math.nan))  # the forward pass of the broken batch
    averager.collect(model)  # of which nothing is known yet: its buffers replace those before
    assert rescue(model, None, math.nan)
    assert "start anew" in rescue.message
    statistics = model[1].running_mean, model[1].running_var  # type: ignore[index]
    assert [t.item() for t in statistics] == [0.0, 1.0]
    assert weight(model) == (1.0 if snapshots else 0.0)
    assert model.eval()(torch.ones(4, 2)).isfinite().all()


def test_finite_statistics_stay() -> None:
    model, _, rescue = ready()
    assert rescue(model, None, math.nan)
    assert "anew" not in rescue.message
    assert model[1].running_mean.item() == 30.0  # type: ignore[index]


def test_patience_and_k() -> None:
    model, _, rescue = ready(patience=2, k=2)
    put(model, 50.0)
    assert [rescue(model, None, loss) for loss in (9.0, 1.0, 9.0)] == [False] * 3
    assert weight(model) == 50.0
    assert rescue(model, None, 9.0)
    assert weight(model) == 2.5
    put(model, 50.0)
    assert not rescue(model, None, 9.0)  # the first in a row again
    assert rescue(model, None, math.nan)  # is not waited for


def test_a_k_above_the_number_of_good_snapshots_takes_all_of_them() -> None:
    model, _, rescue = ready(k=4)
    assert rescue(model, None, math.nan)
    assert weight(model) == 2.0


@pytest.mark.parametrize("optimizer_state", ["keep", "reset"])
@pytest.mark.parametrize("finite", [True, False])
def test_the_optimizer(optimizer_state: Any, finite: bool) -> None:
    model, _, rescue = ready(optimizer_state=optimizer_state)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.randn(5, 2)).sum().backward()
    optimizer.step()
    if not finite:
        optimizer.state[model[0].weight]["exp_avg"].fill_(math.nan)  # type: ignore[index]
    assert rescue(model, optimizer, math.nan)
    assert bool(optimizer.state) == (optimizer_state == "keep" and finite)
    before = weight(model)
    optimizer.step()  # the gradient is gone
    assert weight(model) == before == 2.0


def test_gradients_are_dropped_of_the_model_and_of_all_that_the_optimizer_has() -> None:
    model, _, rescue = ready()
    others = [*net().parameters()]
    for optimizer, parameters in (
        (None, [*model.parameters()]),
        (torch.optim.SGD(others), others),
    ):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        assert rescue(model, optimizer, math.nan)
        assert all(parameter.grad is None for parameter in parameters)


def test_a_run_that_has_diverged_is_not_rescued_for_ever() -> None:
    model, averager, rescue = ready(limit=2)
    for _ in range(2):
        assert rescue(model, None, math.nan)
    put(model, 4.0)
    averager.collect(model)
    assert not rescue(model, None, 1.0)  # a new good snapshot
    for _ in range(2):
        assert rescue(model, None, math.nan)
    resumed = SpikeRescue(averager, history=4, limit=2)
    resumed.load_state_dict(rescue.state_dict())
    for each in (rescue, resumed):
        with pytest.raises(LawaError, match=r"3 times since the last good snapshot.*step 4"):
            each(model, None, math.nan)


def test_a_snapshot_that_was_dropped_is_not_a_new_good_one() -> None:
    """The mean itself has a normal loss; every step from it ends in a spike."""
    model, averager, rescue = ready(limit=2)
    with pytest.raises(LawaError, match=r"3 times since the last good snapshot.*step 3"):
        for _ in range(4):
            assert not rescue(model, None, 1.0)
            averager.collect(model)
            assert rescue(model, None, math.nan)


def test_after_a_rollback_a_snapshot_is_not_good_before_a_normal_loss() -> None:
    """Also if only the averager went back, to fewer snapshots than were good before."""
    model, averager = nn.Linear(1, 1), LatestWeightAverager(k=2, min_snapshots=1)
    rescue, start = SpikeRescue(averager), averager.state_dict()
    for _ in range(4):
        assert not rescue(model, None, 1.0)
        averager.step(model)
    averager.load_state_dict(start)
    for _ in range(2):
        assert not rescue(model, None, 1.0)
        averager.step(model)
    assert rescue(model, None, math.nan)
    assert averager.snapshot_steps == [1]


def test_it_resumes_exactly() -> None:
    """Stopped anywhere, the same decisions and weights."""
    losses = [1.0, 1.2, 0.9, 1.1, 5.0, 1.0, 5.0, 5.0, 1.0, math.nan, 1.0, 5.0, 5.0]
    ends = []
    for stop in (*range(len(losses)), None):
        model, averager = net(), LatestWeightAverager(k=3, schedule=Every(2), min_snapshots=1)
        rescue = SpikeRescue(averager, history=4, patience=2)
        spikes = []
        for i, loss in enumerate(losses):
            if i == stop:
                states = copy.deepcopy([averager.state_dict(), rescue.state_dict()])
                averager = LatestWeightAverager(k=3, schedule=Every(2), min_snapshots=1)
                rescue = SpikeRescue(averager, history=4, patience=2)
                averager.load_state_dict(states[0])
                rescue.load_state_dict(states[1])
            put(model, weight(model) + i)
            spikes.append(rescue(model, None, loss))
            averager.step(model)
        ends.append((spikes, weight(model), averager.snapshot_steps, rescue.num_rescues))
    assert all(end == ends[0] for end in ends)
    assert ends[0][0] == [i in (7, 9, 12) for i in range(len(losses))]


def test_one_for_another_averager_continues_by_itself() -> None:
    _, _, rescue = ready()
    other = rescue.watching(LatestWeightAverager(k=2))
    before = rescue.state_dict()
    assert other.state_dict() == before
    other.check(5.0)
    other.check(1.0)
    assert rescue.state_dict() == before


def test_reset_forgets_everything() -> None:
    _, averager, rescue = ready()
    rescue(net(), None, math.nan)
    rescue.check(9.0)
    rescue.reset()
    assert rescue.state_dict() == SpikeRescue(averager).state_dict()


def test_a_window_on_disk(tmp_path: Path) -> None:
    model = net()
    averager = LatestWeightAverager(k=3, store=DiskStore(tmp_path))
    rescue = SpikeRescue(averager)
    for value in (1.0, 2.0):
        put(model, value)
        averager.collect(model)
        rescue(model, None, 1.0)
    put(model, math.nan)
    averager.collect(model)
    assert rescue(model, None, math.nan)
    assert weight(model) == 1.5
    del averager, rescue  # the folder is free
    again = LatestWeightAverager(k=3, store=DiskStore(tmp_path))
    assert again.snapshot_steps == [1, 2]


def test_mistakes_are_explained() -> None:
    averager = LatestWeightAverager(k=2)
    wrong: list[dict[str, Any]] = [{"factor": 1}, {"factor": "2"}, {"factor": math.inf}]
    wrong += [{"history": 1}, {"patience": 0}, {"optimizer_state": "drop"}, {"limit": 0}, {"k": 0}]
    for options in wrong:
        with pytest.raises(ConfigError, match=f"{next(iter(options))}="):
            SpikeRescue(averager, **options)
    with pytest.raises(ConfigError, match="averager=Linear"):
        SpikeRescue(nn.Linear(1, 1))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="norm of the gradient"):
        SpikeRescue(averager).check(-1.0)
    with pytest.raises(ConfigError, match=r"SpikeRescue\(averager\)"):
        SpikeRescue().check(1.0)
    with pytest.raises(StateError, match="SpikeRescue"):
        SpikeRescue(averager).load_state_dict({"losses": [1.0]})
    model, averager, rescue = ready()
    averager.collect(model)
    with averager.swapped_into(model), pytest.raises(SwapError, match="SpikeRescue"):
        rescue(model, None, math.nan)


def test_wrong_arguments_are_refused_at_once() -> None:
    """Not at the first spike, when the newest snapshots have left the window."""
    model, averager = net(), LatestWeightAverager(k=2)
    optimizer, rescue = torch.optim.SGD(model.parameters(), lr=0.1), SpikeRescue(averager)
    wrong: tuple[Any, ...] = ((optimizer, model), (optimizer, None), (model, model))
    for pair in wrong:
        with pytest.raises(ConfigError, match="the model first"):
            rescue(*pair, 1.0)
        with pytest.raises(ConfigError, match="the model first"):
            rescue.restore(*pair)
    with pytest.raises(ConfigError, match=r"shape \(3,\).*one number"):
        rescue(model, optimizer, torch.ones(3))
    assert not rescue(model, optimizer, torch.ones(1))
    assert rescue.num_rescues == 0


def test_an_engine_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at the first spike, hours later."""
    monkeypatch.setattr(spike_rescue, "masters_of", lambda model: object())
    rescue = SpikeRescue(LatestWeightAverager(k=2))
    with pytest.raises(ConfigError, match="cannot skip the step of a Sequential"):
        rescue(net(), None, 1.0)
    with pytest.raises(ConfigError, match="cannot skip"):
        rescue.restore(net())
