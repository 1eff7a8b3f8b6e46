"""A window that is a share of the run: it spans that share, and nothing changes which one it is.

Online, resumed at any step, in any store, with another k or in slots: the same steps and bits.
"""

import copy
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from support.models import round_fraction, true_mean
from torch import Tensor

from torch_lawa import DiskStore, Horizon, LatestWeightAverager
from torch_lawa.errors import ConfigError
from torch_lawa.offline.average import run_average
from torch_lawa.offline.plan import plan_average
from torch_lawa.offline.sweep import sweep_checkpoints
from torch_lawa.offline.sweep_plan import plan_sweep

SHARES = st.floats(0.03, 0.95) | st.sampled_from([0.1, 0.25, 1 / 3, 0.5, 0.29])


def spacing(share: float, k: int, step: int) -> float:
    """The distance of two snapshots around a step, without rounding."""
    return step * ((1 - share) ** (-1 / k) - 1)


@settings(max_examples=20)
@given(share=SHARES, k=st.integers(1, 24), start=st.integers(0, 200))
def test_the_window_spans_its_share_at_any_step(share: float, k: int, start: int) -> None:
    schedule, taken = Horizon(share, k, start=start), []
    for step in range(1, 1500):
        if schedule.due(step):
            taken.append(step)
        n = schedule.num_averaged(taken)
        assert n <= k
        assert n >= bool(taken)
        if step <= start:
            assert not taken
        elif taken and step > start / (1 - share) + 1:
            # What an average takes is the last share of the steps, up to one spacing...
            room = spacing(share, k, step) + 2  # whole steps
            assert abs(taken[-n] - (1 - share) * step) <= room
        oldest = spacing(share, k, round((1 - share) * step))
        if oldest > 2 and step > (start + 1) / (1 - share) ** 2:
            assert n >= k - 1  # ... and all of the window is in it, so nothing is kept for nothing
            assert n == k or step != taken[-1]


@settings(max_examples=40)
@given(share=SHARES, k=st.integers(1, 24), interval=st.integers(2, 60))
def test_a_schedule_that_is_asked_at_saves_only(share: float, k: int, interval: int) -> None:
    """Rounding to the next save does not add up either."""
    schedule = Horizon(share, k)
    taken = [step for step in range(interval, 6000, interval) if schedule.due(step)]
    room = spacing(share, k, 6000) + interval
    used = taken[-k:][-schedule.num_averaged(taken[-k:]) :]
    assert used[0] >= (1 - share) * used[-1]
    assert abs(used[0] - (1 - share) * 6000) <= 2 * room


def weights(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"w": torch.randn(7, generator=generator), "n": torch.tensor(step)}


def run(averager: LatestWeightAverager, first: int, last: int) -> LatestWeightAverager:
    for step in range(first, last + 1):
        averager.step(weights(step))
    return averager


def check(averager: LatestWeightAverager, expected: LatestWeightAverager) -> None:
    assert averager.snapshot_steps == expected.snapshot_steps
    assert averager.schedule == expected.schedule
    assert averager.num_averaged == expected.num_averaged
    for name, tensor in expected.average().items():
        assert torch.equal(averager.average()[name], tensor)


@pytest.mark.parametrize("kind", ["host", "device", "disk"])
@settings(max_examples=4)
@given(
    share=st.sampled_from([0.1, 0.25, 0.6]),
    k=st.integers(1, 6),
    last=st.integers(2, 60),
    cut=st.floats(0, 1),
)
def test_resumed_at_any_step_in_any_store(
    tmp_path_factory: pytest.TempPathFactory,
    kind: str,
    share: float,
    k: int,
    last: int,
    cut: float,
) -> None:
    def make(folder: str) -> LatestWeightAverager:
        store = DiskStore(tmp_path / folder) if kind == "disk" else kind
        return LatestWeightAverager(k=k, horizon=share, store=store)  # type: ignore[arg-type]

    tmp_path = tmp_path_factory.mktemp("law")
    whole = run(LatestWeightAverager(k=k, horizon=share), 1, last)
    stop = 1 + int(cut * (last - 1))
    first = run(make("first"), 1, stop)
    state = copy.deepcopy(first.state_dict())
    rest = make("rest")
    rest.load_state_dict(state)
    check(run(rest, stop + 1, last), whole)
    slots = LatestWeightAverager(k=k, horizon=share)  # the form of torch.distributed.checkpoint
    slots.load_state_dict(state)
    slots.bind(weights(1))
    again = LatestWeightAverager(k=k, horizon=share)
    again.load_state_dict(copy.deepcopy(slots.state_dict()))
    check(run(again, stop + 1, last), whole)
    check(copy.deepcopy(whole), whole)
    # The average is that of the steps in the share, exactly rounded.
    newest = whole.snapshot_steps[-1]
    used = [s for s in whole.snapshot_steps if newest - s < int(share * newest)] or [newest]
    exact = true_mean([weights(step)["w"] for step in used])
    assert whole.average()["w"].tolist() == [round_fraction(m, torch.float32) for m in exact]


@pytest.mark.parametrize("k", [3, 8, 20])
def test_resumed_with_another_k(k: int) -> None:
    """The share stays; after as many steps again the window is as if k had always been this."""
    first = run(LatestWeightAverager(k=8, horizon=0.25), 1, 300)
    resumed = LatestWeightAverager(k=k, horizon=0.25)
    resumed.load_state_dict(first.state_dict())
    assert resumed.snapshot_steps == first.snapshot_steps[-k:]
    run(resumed, 301, 900)
    check(resumed, run(LatestWeightAverager(k=k, horizon=0.25), 1, 900))


def test_labels_of_the_caller_decide_what_is_in_the_share() -> None:
    """An integration labels snapshots itself, such as one per epoch with the step."""
    averager = LatestWeightAverager(k=8, horizon=0.5)
    for epoch in range(1, 7):
        averager.collect(weights(epoch), step=100 * epoch)
    assert len(averager) == 6
    assert averager.num_averaged == 3  # 400, 500, 600
    exact = true_mean([weights(epoch)["w"] for epoch in (4, 5, 6)])
    assert averager.average()["w"].tolist() == [round_fraction(m, torch.float32) for m in exact]
    assert not torch.equal(averager.average(k=4)["w"], averager.average()["w"])


def test_a_sweep_leaves_out_a_share_with_fewer_than_two_checkpoints(tmp_path: Path) -> None:
    for step in range(100, 1001, 100):
        save_file(weights(step), tmp_path / f"step_{step}.safetensors")
    plan = plan_sweep(tmp_path, horizons=[0.1, 0.25, 0.5])
    assert {window.horizon for window in plan.windows} == {0.25, 0.5}
    (note,) = plan.notes
    assert note.startswith("--horizon 0.1 is left out")
    # The hint is the smallest share that has two, and is exact to its digits.
    assert "0.101 or more" in note
    assert plan_sweep(tmp_path, horizons=[0.101]).windows[-1].k == 2
    assert plan_sweep(tmp_path, [2], horizons=[0.1], at=[300]).notes
    with pytest.raises(ConfigError, match=r"--horizon 0\.1,0\.05: .*0\.101 or more"):
        plan_sweep(tmp_path, horizons=[0.1, 0.05])
    with pytest.raises(ConfigError, match=r"0\.337 or more"):  # (100 + 1) / 300
        plan_sweep(tmp_path, [1], horizons=[0.1], at=[300])
    with pytest.raises(ConfigError, match="--at"):
        plan_sweep(tmp_path, horizons=[0.9], at=[100])


@settings(max_examples=15)
@given(
    share=st.sampled_from([0.1, 0.25, 1 / 3, 0.5, 0.8]),
    k=st.integers(1, 8),
    start=st.integers(0, 10),
    last=st.integers(20, 150),
)
def test_offline_takes_the_same_checkpoints(
    tmp_path_factory: pytest.TempPathFactory, share: float, k: int, start: int, last: int
) -> None:
    """If every snapshot is saved: the same steps and the same bits at any step."""
    folder = tmp_path_factory.mktemp("run")
    averager = LatestWeightAverager(k=k, schedule=Horizon(share, k=k, start=start))
    for step in range(1, last + 1):
        if averager.step(weights(step)):
            save_file(weights(step), folder / f"step_{step}.safetensors")
    assume(len(averager))  # the first one may be due after the last step
    made = folder / "mean.safetensors"
    plan = plan_average(folder, made, horizon=share)
    assert [i.step for i in plan.inputs] == averager.snapshot_steps[-averager.num_averaged :]
    run_average(plan)
    found = load_file(made)
    for name, tensor in averager.average().items():
        assert torch.equal(found[name], tensor)
    if len(plan.inputs) > 1:
        sweep_checkpoints(
            folder, horizons=[share], at=[plan.inputs[-1].step or 0], output=folder / "swept"
        )
        (swept,) = (folder / "swept").iterdir()
        assert torch.equal(load_file(swept)["w"], found["w"])
