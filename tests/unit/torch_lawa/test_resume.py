"""Train, save, stop, load, go on: equal to the run that was never interrupted, bit for bit."""

import copy
import gc
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models import assert_same_state, shake, small_net
from torch import nn

from torch_lawa import DiskStore, Every, LatestWeightAverager, OnPlateau
from torch_lawa.errors import ConfigError, LayoutError, StateError, StoreError


class Run:
    """A small training run whose whole state can be saved."""

    def __init__(self, averager: LatestWeightAverager) -> None:
        torch.manual_seed(11)
        self.model = small_net()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.averager = averager
        self.num_done = 0

    def train(self, num_steps: int) -> list[dict[str, torch.Tensor]]:
        averages = []
        for _ in range(num_steps):
            data = torch.Generator().manual_seed(self.num_done)
            x = torch.randn(8, 1, 8, 8, generator=data)
            loss = self.model(x).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.num_done += 1
            self.averager.step(self.model, loss=loss.item())
            if self.averager.ready:
                averages.append(self.averager.average())
        return averages

    def save(self) -> bytes:
        buffer = io.BytesIO()
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "averager": self.averager.state_dict(),
            "num_done": self.num_done,
        }
        torch.save(state, buffer)
        return buffer.getvalue()

    def load(self, saved: bytes) -> None:
        state: dict[str, Any] = torch.load(io.BytesIO(saved), weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.averager.load_state_dict(state["averager"])
        self.num_done = state["num_done"]


SCHEDULES = {
    "every": lambda: Every(3, start=2),
    "plateau": lambda: OnPlateau(patience=2),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("sliding", [True, False])
@settings(max_examples=15)
@given(stop=st.integers(0, 24))
def test_an_interrupted_run_equals_an_uninterrupted_one(
    schedule: str, sliding: bool, stop: int
) -> None:
    """`stop` falls before, in and after the filling of the window, and inside a period of 3."""

    def averager() -> LatestWeightAverager:
        return LatestWeightAverager(k=4, schedule=SCHEDULES[schedule](), _sliding=sliding)

    whole = Run(averager()).train(25)
    first = Run(averager())
    averages = first.train(stop)
    second = Run(averager())
    second.load(first.save())
    averages += second.train(25 - stop)
    assert len(averages) == len(whole)
    for a, b in zip(averages, whole, strict=True):
        assert_same_state(a, b)


def test_every_store_loads_what_every_store_saved(tmp_path: Path) -> None:
    def stores() -> list[Any]:
        n = len(list(tmp_path.iterdir()))
        return ["host", "device", DiskStore(tmp_path / str(n))]

    source = Run(LatestWeightAverager(k=3))
    source.train(5)
    expected = source.averager.average()
    for i in range(3):
        saver = LatestWeightAverager(k=3, store=stores()[i])
        saver.load_state_dict(source.averager.state_dict())
        assert_same_state(saver.average(), expected)
        for store in stores():
            loader = LatestWeightAverager(k=3, store=store)
            loader.load_state_dict(copy.deepcopy(saver.state_dict()))
            assert_same_state(loader.average(), expected)
            assert loader.snapshot_steps == [3, 4, 5]


def test_loading_replaces_and_does_not_alias() -> None:
    averager = LatestWeightAverager(k=2)
    averager.collect({"old": torch.ones(3)})
    state = LatestWeightAverager(k=2)
    state.collect({"w": torch.zeros(2)})
    saved = state.state_dict()
    averager.load_state_dict(saved)
    saved["snapshots"][0]["tensors"]["w"].fill_(9)
    averager.collect({"w": torch.ones(2)})
    assert averager.average()["w"].tolist() == [0.5, 0.5]


def test_another_k_takes_the_newest_that_fit() -> None:
    averager = LatestWeightAverager(k=4)
    for value in range(6):
        averager.collect({"w": torch.tensor([float(value)])})
    smaller, larger = LatestWeightAverager(k=2), LatestWeightAverager(k=6)
    for other in (smaller, larger):
        other.load_state_dict(averager.state_dict())
    assert smaller.average()["w"].item() == 4.5
    assert len(larger) == 4
    assert not larger.ready
    for value in (6, 7):
        larger.collect({"w": torch.tensor([float(value)])})
    assert larger.average()["w"].item() == 4.5


def test_ties_frozen_parameters_and_dtypes_survive() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    model["b"].weight = model["a"].weight
    model["c"] = nn.Linear(2, 2, bias=False).requires_grad_(False)
    averager = LatestWeightAverager(k=1, storage_dtype=torch.bfloat16)
    averager.collect(model)
    other = LatestWeightAverager(k=1, storage_dtype=torch.bfloat16)
    other.load_state_dict(averager.state_dict())
    average = other.average()
    assert set(average) == {"a.weight", "b.weight", "c.weight"}
    assert average["a.weight"] is average["b.weight"]
    assert average["a.weight"].dtype == torch.float32
    assert torch.equal(average["c.weight"], model["c"].weight)
    assert torch.equal(average["a.weight"], model["a"].weight.bfloat16().float())


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda s: s.update(version=99), "version 99"),
        (lambda s: s.pop("kept"), "damaged"),
        (lambda s: s["counters"].pop("schedule"), "damaged"),
        (lambda s: s["snapshots"][1]["tensors"].pop("w"), "step 2.*'w'"),
        (lambda s: s["snapshots"][1]["tensors"].update(w=torch.ones(5)), "step 2.*'w'"),
        (lambda s: s["snapshots"][1]["tensors"].update(w="text"), "step 2.*'w'"),
        (lambda s: s["snapshots"].reverse(), "not in order"),
        (lambda s: s["dtypes"].update(w="no_such_dtype"), "damaged"),
    ],
)
def test_a_damaged_state_is_refused_and_changes_nothing(damage, message) -> None:  # type: ignore[no-untyped-def]
    averager = LatestWeightAverager(k=2)
    for value in (1.0, 3.0):
        averager.collect({"w": torch.tensor([value]), "n": torch.tensor(7)})
    state = copy.deepcopy(averager.state_dict())
    damage(state)
    with pytest.raises(StateError, match=message):
        averager.load_state_dict(state)
    assert averager.average()["w"].item() == 2.0
    assert averager.num_collected == 2


@pytest.mark.parametrize("slots", [False, True])
def test_excluded_tensors_resume_and_other_patterns_are_refused(slots: bool) -> None:
    """Else a raw tensor would be averaged with one value for all snapshots, or the reverse."""
    model = small_net()

    def fresh(**options: Any) -> LatestWeightAverager:
        averager = LatestWeightAverager(k=3, **options)
        if slots:
            averager.bind(model)
        return averager

    straight, first = fresh(exclude="0.*"), fresh(exclude="0.*")
    torch.manual_seed(0)
    for _ in range(2):
        shake(model)
        straight.collect(model)
        first.collect(model)
    state = copy.deepcopy(first.state_dict())
    resumed, without, other = fresh(exclude="0.*"), fresh(), fresh(exclude=["0.*", "4.*"])
    for averager in (resumed, without, other):
        averager.load_state_dict(copy.deepcopy(state))
    shake(model)
    straight.collect(model)
    resumed.collect(model)
    assert_same_state(resumed.average(), straight.average())
    with pytest.raises(LayoutError, match=r"'0.weight' is excluded.*include and exclude"):
        without.collect(model)
    with pytest.raises(LayoutError, match=r"'4.weight' is averaged.*include and exclude"):
        other.collect(model)


def test_a_window_found_on_disk_has_its_excluded_tensors(tmp_path: Path) -> None:
    model = small_net()
    averager = LatestWeightAverager(k=2, store=DiskStore(tmp_path), exclude="0.*")
    averager.collect(model)
    averager.wait()
    del averager
    gc.collect()
    with pytest.raises(LayoutError, match=r"'0.weight' is excluded"):
        LatestWeightAverager(k=2, store=DiskStore(tmp_path)).collect(model)
    gc.collect()
    again = LatestWeightAverager(k=2, store=DiskStore(tmp_path), exclude="0.*")
    newest = shake(model)
    again.collect(model)
    assert torch.equal(again.average()["0.weight"], newest["0.weight"])


@pytest.mark.parametrize("store", ["host", "device", "disk"])
@pytest.mark.parametrize("samples", [1, 2])
def test_an_empty_window_is_saved_with_its_names(tmp_path: Path, store: str, samples: int) -> None:
    """`torch.distributed.checkpoint` can only load what was saved under the same names."""

    def bound(folder: str) -> LatestWeightAverager:
        where = DiskStore(tmp_path / folder) if store == "disk" else store
        averager = LatestWeightAverager(2, samples=samples, min_snapshots=1, store=where)  # type: ignore[arg-type]
        averager.bind(model)
        return averager

    def facts(state: dict[str, Any]) -> Any:
        slots = [(age, t) for age, slot in state["slots"].items() for t in slot.items()]
        named = [*slots, *enumerate(state["kept"].items()), *enumerate(state.get("block", {}))]
        return [(age, str(entry)) for age, entry in named]

    model = small_net()
    first, resumed = bound("first"), bound("resumed")
    empty = facts(first.state_dict())
    assert len(empty) > 10
    resumed.load_state_dict(first.state_dict())
    assert facts(resumed.state_dict()) == empty
    for _ in range(5):
        resumed.collect(model)
    resumed.reset()
    assert facts(resumed.state_dict()) == empty
    for _ in range(samples):
        resumed.collect(model)  # the window that was reset continues
    assert_same_state(resumed.average(), dict(model.state_dict()))


def test_foreign_objects_are_refused() -> None:
    averager = LatestWeightAverager(k=2)
    for foreign in ({}, {"w": torch.ones(1)}, [1], None):
        with pytest.raises(StateError, match=r"averager.state_dict\(\)"):
            averager.load_state_dict(foreign)  # type: ignore[arg-type]


def test_another_schedule_is_refused() -> None:
    state = LatestWeightAverager(k=2, schedule=Every(2)).state_dict()
    with pytest.raises(StateError, match=r"Every.*OnPlateau"):
        LatestWeightAverager(k=2, schedule=OnPlateau()).load_state_dict(state)


@pytest.mark.parametrize("store", ["host", "device"])
@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda a: pickle.loads(pickle.dumps(a))]
)
def test_a_copy_goes_on_by_itself(copied: Callable[[Any], Any], store: str) -> None:
    model, options = small_net(), {"k": 3, "storage_dtype": torch.bfloat16, "_sliding": True}
    first, alone = (
        LatestWeightAverager(schedule=Every(2), store=store, **options)  # type: ignore[arg-type]
        for _ in range(2)
    )
    for averager in (first, alone):
        torch.manual_seed(0)
        for _ in range(9):
            shake(model)
            averager.step(model)
    before = {name: tensor.clone() for name, tensor in first.average().items()}
    other = copied(first)
    assert repr(other) == repr(first)
    for averager in (other, alone):
        torch.manual_seed(1)
        for _ in range(3):
            shake(model)
            averager.step(model)
    assert other.snapshot_steps == alone.snapshot_steps == [8, 10, 12]
    assert_same_state(other.average(), alone.average())
    assert first.snapshot_steps == [4, 6, 8]
    assert_same_state(first.average(), before)
    assert first.step(model)  # the schedule is its own, too


def test_a_window_on_disk_has_one_owner(tmp_path: Path) -> None:
    averager = LatestWeightAverager(store=DiskStore(tmp_path / "window"))
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(StoreError, match=r"cannot be copied or pickled"):
            copied(averager)


@pytest.mark.parametrize(
    "damage",
    [
        lambda state: state["counters"]["schedule"].pop("best"),
        lambda state: state["counters"].update(schedule=5),
        lambda state: state["dtypes"].update({"0.weight": "load"}),
    ],
)
def test_a_damaged_state_changes_nothing(damage: Callable[[dict[str, Any]], Any]) -> None:
    def collected(k: int, losses: list[float]) -> LatestWeightAverager:
        averager = LatestWeightAverager(k=k, schedule=OnPlateau())
        model = small_net()
        for loss in losses:
            shake(model)
            averager.step(model, loss=loss)
        return averager

    state = copy.deepcopy(collected(2, [3.0, 3.0, 3.0]).state_dict())
    damage(state)
    averager = collected(3, [1.0, 2.0, 2.0, 2.0])
    before = copy.deepcopy(averager.state_dict())
    with pytest.raises(StateError):
        averager.load_state_dict(state)
    after = averager.state_dict()
    assert after["counters"] == before["counters"]
    assert averager.snapshot_steps == [2, 3, 4]
    for then, now in zip(before["snapshots"], after["snapshots"], strict=True):
        assert_same_state(now["tensors"], then["tensors"])


@pytest.mark.parametrize("step", [np.int64(7), torch.tensor(7)])
def test_labels_of_other_libraries_can_be_saved(step: Any, tmp_path: Path) -> None:
    for store in ("host", DiskStore(tmp_path)):
        averager = LatestWeightAverager(k=1, store=store)  # type: ignore[arg-type]
        averager.collect({"w": torch.ones(1)}, step=step)
        torch.save(averager.state_dict(), file := io.BytesIO())
        file.seek(0)
        (row,) = torch.load(file, weights_only=True)["snapshots"]
        assert row["step"] == 7
        assert type(row["step"]) is int
    with pytest.raises(ConfigError, match=r"step=7\.5"):
        averager.collect({"w": torch.ones(1)}, step=7.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("samples", [1, 2])
def test_slots_have_the_same_names_however_much_was_collected(samples: int) -> None:
    """And the samples after the newest snapshot are among them."""
    model = nn.Linear(1, 1, bias=False)
    averager = LatestWeightAverager(k=3, samples=samples)
    averager.bind(model)
    empty = averager.state_dict()
    assert list(empty["slots"]) == ["0", "1", "2"]
    assert ("block" in empty) == (samples > 1)
    for value in (1.0, 2.0, 4.0):
        model.weight.data.fill_(value)
        averager.collect(model)
    state = averager.state_dict()
    assert state.keys() == empty.keys()
    assert state["slots"].keys() == empty["slots"].keys()
    again = LatestWeightAverager(k=3, samples=samples)
    again.load_state_dict(state)
    n = 3 // samples
    assert again.average(n)["weight"] == averager.average(n)["weight"] == pytest.approx(7 / 3)
