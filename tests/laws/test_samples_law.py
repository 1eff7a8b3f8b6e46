"""Snapshots that are means of samples: the mean of every point, also resumed and exported."""

import copy
import io
import itertools
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from support.models import assert_same_state
from torch import Tensor, nn

from torch_lawa import Blend, DiskStore, Horizon, LatestWeightAverager, Recent
from torch_lawa.errors import (
    ConfigError,
    LayoutError,
    NonFiniteWarning,
    NotReadyError,
    StateError,
)
from torch_lawa.stores.memory import HostStore

TOLERANCE = {torch.float64: 1e-15, torch.float32: 1e-6, torch.bfloat16: 1e-2}


class Run:
    """A model whose weights are known at every step."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).to(dtype)
        self.points: list[Tensor] = []

    def step(self) -> None:
        generator = torch.Generator().manual_seed(len(self.points))
        with torch.no_grad():
            for tensor in self.model.parameters():
                tensor.copy_(torch.randn(tensor.shape, generator=generator))
        self.points.append(self.model[0].weight.detach().double().clone())

    def collect(self, averager: LatestWeightAverager, count: int) -> None:
        for _ in range(count):
            self.step()
            averager.collect(self.model)


def averager_of(k: int, samples: int, store: Any = "host", **options: Any) -> LatestWeightAverager:
    return LatestWeightAverager(k, samples=samples, store=store, min_snapshots=1, **options)


def test_an_early_average_says_how_many_samples_there_are() -> None:
    run, averager = Run(), averager_of(2, samples=4)
    run.collect(averager, 3)
    assert (averager.newest_step, averager.ready) == (3, False)
    with pytest.raises(NotReadyError, match="3 of its 4 samples"):
        averager.average()


@pytest.mark.parametrize("store", ["host", "device", "disk"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_the_mean_of_every_point(tmp_path: Path, store: str, dtype: torch.dtype) -> None:
    """Blocks of the window count as often as they have samples, and so do the points since."""
    run = Run(dtype)
    averager = averager_of(3, 4, DiskStore(tmp_path / "window") if store == "disk" else store)
    for collected in range(1, 31):
        run.collect(averager, 1)
        blocks = min(3, collected // 4)
        assert len(averager) == blocks
        if not blocks:
            assert not averager.ready
            continue
        points = run.points[4 * (collected // 4 - blocks) :]
        wanted = torch.stack(points).mean(0)
        found = averager.average()["0.weight"]
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), wanted, rtol=0, atol=TOLERANCE[dtype])
    assert averager.snapshot_steps == [20, 24, 28]


@settings(max_examples=40, deadline=None)
@given(stop=st.integers(0, 20), how=st.sampled_from(["saved", "bound", "copied", "pickled"]))
def test_resumed_at_any_point_it_is_the_same(stop: int, how: str) -> None:
    whole, run = averager_of(2, 3), Run()
    run.collect(whole, 21)
    first, again = averager_of(2, 3), Run()
    if how == "bound":
        first.bind(again.model)
    again.collect(first, stop)
    second = first
    for _ in range(2):  # the second time before anything new was collected
        if how in ("copied", "pickled"):
            second = (
                copy.deepcopy(second) if how == "copied" else pickle.loads(pickle.dumps(second))
            )
            continue
        buffer = io.BytesIO()
        torch.save(second.state_dict(), buffer)
        buffer.seek(0)
        second = averager_of(2, 3, "device")
        second.load_state_dict(torch.load(buffer, weights_only=True))
    again.collect(second, 21 - stop)
    assert second.snapshot_steps == whole.snapshot_steps
    assert_same_state(second.average(), whole.average())


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_swapped_and_exported_it_is_the_same(tmp_path: Path, dtype: torch.dtype) -> None:
    run, averager = Run(dtype), averager_of(3, 4)
    run.collect(averager, 18)
    average = averager.average()
    with averager.swapped_into(run.model):
        assert_same_state(dict(run.model.state_dict()), average)
    averager.save_pretrained(tmp_path / "out")
    assert_same_state(load_file(tmp_path / "out" / "model.safetensors"), average)


def test_a_blend_takes_the_live_weights_instead_of_the_points_since() -> None:
    run, averager = Run(torch.float64), averager_of(3, 4)
    run.collect(averager, 14)
    with averager.swapped_into(run.model, coefficients=Blend(0.5)):
        found = run.model[0].weight.detach().clone()
    wanted = 0.5 * torch.stack(run.points[:12]).mean(0) + 0.5 * run.points[-1]
    torch.testing.assert_close(found, wanted)


class Full(HostStore):
    """A store that cannot take a snapshot now and then."""

    fails = False

    def put(self, *arguments: Any) -> None:
        if self.fails:
            raise OSError(28, "No space left on device")
        super().put(*arguments)


@pytest.mark.parametrize("samples", [1, 16])
def test_recent_is_an_ema_that_grows_with_the_run(samples: int) -> None:
    """Also while the window fills, and from the newest snapshots alone."""
    averager = LatestWeightAverager(16, horizon=1 / 4, samples=samples, coefficients=Recent(0.05))
    ema = torch.zeros(1, dtype=torch.float64)
    for step in range(1, 3001):
        point = torch.tensor([float(step)], dtype=torch.float64)
        averager.step({"w": point})
        ema.lerp_(point, min(1.0, 1 / (0.05 * step)))
        if step in (150, 300, 1000, 3000):
            age = (step - averager.average()["w"].item()) / (step - ema.item())
            # At step 150 a snapshot has 16 steps, more than twice the time constant.
            assert 0.7 < age < (1.2 if step >= 300 else 1.5), (step, age)
            # A quarter of the snapshots, with a fifteenth of the steps: the tail is cut off.
            part = (step - averager.average(k=4)["w"].item()) / (step - ema.item())
            assert 0.4 < part < age or step < 300, (step, part)


@pytest.mark.parametrize("step", [17, 18, 40, 3046])
def test_recent_weighs_one_snapshot_and_new_samples_by_their_steps(step: int) -> None:
    """A single new sample is not half of the average."""
    averager = LatestWeightAverager(16, horizon=1 / 4, samples=16, coefficients=Recent(0.1))
    taken: list[int] = []
    for now in range(1, step + 1):
        averager.step({"w": torch.tensor([float(now == step)], dtype=torch.float64)})
        if averager.newest_step == now:
            taken.append(now)
    newest = averager.average(k=1)["w"].item()
    if taken[-1] < step:  # no sample was taken at this step
        assert newest == 0.0
        return
    snapshot = averager.snapshot_steps[-1]
    samples = [s for s in taken if s > snapshot]
    begin = taken[-len(samples) - 17] if len(taken) > len(samples) + 16 else 0
    edge = [(s / step) ** 10 for s in (begin, snapshot, step)]
    assert samples
    expected = (edge[2] - edge[1]) / (edge[2] - edge[0]) / len(samples)
    assert newest == pytest.approx(expected, rel=0.3)


def test_a_snapshot_that_could_not_be_stored_loses_no_sample() -> None:
    store, run = Full(), Run(torch.float64)
    averager = averager_of(2, 4, store)
    run.collect(averager, 7)
    store.fails = True
    with pytest.raises(OSError, match="space"):
        run.collect(averager, 1)
    store.fails = False
    run.collect(averager, 1)
    assert len(averager) == 2
    blocks = torch.stack(run.points[:4]).mean(0), torch.stack(run.points[4:]).mean(0)
    torch.testing.assert_close(averager.average()["0.weight"], torch.stack(blocks).mean(0))


def test_a_new_window_and_another_model_begin_with_no_samples() -> None:
    run, averager = Run(torch.float64), averager_of(2, 4)
    run.collect(averager, 6)
    averager.reset()
    run.collect(averager, 4)
    torch.testing.assert_close(averager.average()["0.weight"], torch.stack(run.points[6:]).mean(0))
    averager.load_state_dict(averager_of(2, 4).state_dict())
    assert not averager.ready


@pytest.mark.parametrize("k", [4, 8, 64])
def test_a_horizon_that_does_not_fit_its_samples_is_refused(k: int) -> None:
    LatestWeightAverager(k=4, samples=4, schedule=Horizon(1 / 4, k=16))
    with pytest.raises(ConfigError, match="k to 16"):
        LatestWeightAverager(k=4, samples=4, schedule=Horizon(1 / 4, k=k))


def test_a_horizon_spreads_its_samples_over_the_share() -> None:
    averager, model = LatestWeightAverager(k=4, horizon=0.5, samples=8), nn.Linear(2, 1)
    due = [step for step in range(1, 2001) if averager.step(model)]
    last = [step for step in due if step > 1000]
    assert len(last) == 32
    gaps = [b - a for a, b in itertools.pairwise(last)]
    assert max(gaps) < 2.5 * min(gaps)
    assert averager.snapshot_steps[0] >= 1000


def test_damaged_samples_are_refused_and_nothing_changes() -> None:
    run, averager = Run(), averager_of(2, 3)
    run.collect(averager, 7)
    average, state = averager.average(), averager.state_dict()
    for change in ({"count": 0}, {"count": "many"}, {"total": {}}, {"total": {"w": 1}}):
        with pytest.raises(StateError):
            averager.load_state_dict({**state, "block": {**state["block"], **change}})
    assert_same_state(averager.average(), average)
    with pytest.raises(ConfigError, match="samples"):
        averager_of(2, 0)


@pytest.mark.parametrize("first", [2, 6])
def test_samples_of_other_tensors_are_dropped_before_they_are_read(first: int) -> None:
    """A parameter is unfrozen, and the model is shown without taking a sample."""
    run, averager = Run(torch.float64), averager_of(2, 4)
    run.model[0].bias.requires_grad_(False)
    run.collect(averager, first)
    run.model[0].bias.requires_grad_(True)
    averager.bind(run.model)
    if averager.ready:
        averager.average()
    averager_of(2, 4).load_state_dict(averager.state_dict())
    run.collect(averager, 4)
    assert averager.snapshot_steps[-1] == 4 * (first // 4) + 4


@pytest.mark.parametrize("slots", [False, True])
@pytest.mark.parametrize("bound", [False, True])
@pytest.mark.parametrize("num_samples", [2, 6])
def test_samples_of_another_model_are_refused(slots: bool, bound: bool, num_samples: int) -> None:
    """Also before the first snapshot."""
    run, averager = Run(), averager_of(2, 4)
    if slots:
        averager.bind(run.model)
    run.collect(averager, num_samples)
    others = {
        "'0.weight' has shape": nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5)),
        "no longer has it": nn.Sequential(nn.Linear(3, 2, bias=False), nn.BatchNorm1d(2)),
        "'2.weight' is new": nn.Sequential(*run.model, nn.Linear(2, 1)),
        "'0.weight' is torch.float64": copy.deepcopy(run.model).double(),
    }
    for problem, other in others.items():
        resumed = averager_of(2, 4)
        if bound:
            resumed.bind(other)
        resumed.load_state_dict(averager.state_dict())
        with pytest.raises(LayoutError, match=problem):
            resumed.collect(other)
        run.collect(resumed, 2)  # nothing was lost
        assert resumed.snapshot_steps[-1] == num_samples + 2


@pytest.mark.parametrize("frozen_first", [False, True])
@pytest.mark.parametrize("resumed", [False, True])
def test_sampling_starts_again_when_parameters_are_frozen(
    frozen_first: bool, resumed: bool
) -> None:
    run, averager = Run(), averager_of(2, 4)
    run.model[0].bias.requires_grad_(not frozen_first)
    run.collect(averager, 2)
    if resumed:
        state, averager = averager.state_dict(), averager_of(2, 4)
        averager.load_state_dict(state)
    run.model[0].bias.requires_grad_(frozen_first)
    run.collect(averager, 4)
    assert averager.snapshot_steps == [6]


def test_a_state_in_slots_is_loaded_without_samples() -> None:
    run, averager, plain = Run(), averager_of(2, 4), averager_of(2, 1)
    averager.bind(run.model)
    run.collect(averager, 11)
    state = averager.state_dict()
    assert "block" in state
    # `torch.distributed.checkpoint` loads only what this averager would save.
    plain.load_state_dict({name: value for name, value in state.items() if name != "block"})
    assert plain.snapshot_steps == [4, 8]


def test_samples_in_float8() -> None:
    averager = averager_of(1, 2)
    for value in (1.0, 2.0):
        averager.collect({"w": torch.tensor([value]).to(torch.float8_e4m3fn)})
    assert averager.average(dtype=torch.float32)["w"].item() == 1.5


def test_all_the_weight_may_be_that_of_new_samples(tmp_path: Path) -> None:
    """A share so small that the weight of the snapshot is 0: it is below the smallest float."""
    averager = averager_of(2, 2, coefficients=Recent(0.001))
    for step in (5, 10, 30):
        averager.collect({"w": torch.tensor([float(step)])}, step=step)
    assert averager.average()["w"].item() == 30.0
    averager.save_pretrained(tmp_path / "out")
    assert load_file(tmp_path / "out/model.safetensors")["w"].item() == 30.0


@pytest.mark.parametrize("way", ["average", "swapped_into", "save_pretrained"])
def test_nan_in_new_samples_is_warned_of_once(tmp_path: Path, way: str) -> None:
    run, averager = Run(), averager_of(2, 4)

    def read() -> None:
        if way == "average":
            averager.average()
        elif way == "swapped_into":
            with averager.swapped_into(run.model):
                pass
        else:
            averager.save_pretrained(tmp_path / "out")

    run.collect(averager, 5)
    with torch.no_grad():
        run.model[0].bias.fill_(torch.nan)
    averager.collect(run.model)
    with pytest.warns(NonFiniteWarning, match="samples since step 4 .*'0.bias'"):
        read()
    averager.average()  # warnings are errors in tests
    run.collect(averager, 2)
    averager.average()  # in the snapshot now


@pytest.mark.parametrize("count", [2, 6])
def test_samples_of_a_pipeline_stage_are_loaded_with_the_notes_of_another(count: int) -> None:
    states = []
    for name in ("layers_0", "layers_1"):
        model, averager = nn.ModuleDict({name: nn.Linear(2, 1)}), averager_of(2, 4)
        averager.bind(model)
        for _ in range(count):
            averager.collect(model)
        states.append(averager.state_dict())
    again = averager_of(2, 4)
    again.bind(model)
    again.load_state_dict({**states[1], "notes": states[0]["notes"]})
    for _ in range(8 - count):
        again.collect(model)
    assert again.snapshot_steps == [4, 8]
