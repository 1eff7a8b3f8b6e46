"""Ctrl-C at every place in averager, window, stores and swap: the state is the old or the new one.

After each interrupt the weights are the model's own, no lock is held, and everything works on.
"""

import copy
import functools
import gc
import itertools
import os
import random
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from support.campaign import Campaign, CountTrials
from support.interrupts import Interrupt, is_free
from torch import Tensor, nn

from torch_lawa import Blend, DiskStore, Every, Horizon, LatestWeightAverager, OnPlateau
from torch_lawa import swap as swaps

pytestmark = [
    pytest.mark.faults,
    pytest.mark.filterwarnings("ignore:collect takes a snapshot at every call"),
]

STORES = ["host", "device", "disk"]
K = 3


class Net(nn.Module):
    """Two dtypes, a transposed, a tied and a frozen tensor, a buffer that may grow, a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(130))
        self.h = nn.Parameter(torch.zeros(3, 2, dtype=torch.bfloat16))
        self.transposed = nn.Parameter(torch.zeros(2, 3).t())
        self.tied = self.w
        self.frozen = nn.Parameter(torch.full((2,), 7.0), requires_grad=False)
        self.register_buffer("seen", torch.zeros(1))
        self.register_buffer("count", torch.tensor(0))

    def set(self, value: float) -> None:
        with torch.no_grad():
            self.w.fill_(value)
            self.h.fill_(value)
            self.transposed.fill_(value)
            self.seen.fill_(value)
            self.count.fill_(int(value))


@dataclass
class Case:
    """An averager with a model, made anew for each trial."""

    folder: Path
    kind: str
    options: dict[str, Any]
    model: Net = field(default_factory=Net)

    def __post_init__(self) -> None:
        self.averager = self.make()

    def make(self, folder: str = "window") -> LatestWeightAverager:
        store = DiskStore(self.folder / folder) if self.kind == "disk" else self.kind
        options = {"schedule": Every(1), **self.options}
        return LatestWeightAverager(k=K, store=store, **copy.deepcopy(options))  # type: ignore[arg-type]

    def collect(self, *values: float) -> None:
        for value in values:
            self.model.set(value)
            self.averager.step(self.model, loss=1.0)


def facts(averager: LatestWeightAverager) -> dict[str, Any]:
    """Everything that can be observed."""
    averages: list[dict[str, list[float]]] = [
        {name: tensor.flatten().tolist() for name, tensor in averager.average(k=n).items()}
        for n in range(1, len(averager) + 1)
    ]
    return {
        "steps": averager.snapshot_steps,
        "num_collected": averager.num_collected,
        "num_steps": averager._num_steps,
        "schedule": averager.schedule.state_dict(),
        "averages": averages,
    }


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


# Each act: what comes before, and the act itself.
Act = tuple[Callable[[Case], None], Callable[[Case], Any]]


def _state(case: Case) -> dict[str, Any]:
    """A saved state with another window, other counters and other shapes."""
    schedule = copy.deepcopy(case.averager.schedule)
    if isinstance(schedule, Horizon):  # whose k is that of the window
        schedule = Horizon(schedule.share, k=5)
    other = LatestWeightAverager(k=5, schedule=schedule)
    for value in (11.0, 12.0, 13.0, 14.0, 15.0):
        other.step({"w": torch.full((9,), value), "n": torch.tensor(3)}, loss=value)
    return other.state_dict()


def _grow(case: Case) -> None:
    case.model.seen = torch.full((4,), 5.0)
    case.averager.step(case.model, loss=2.0)


def _unfreeze(case: Case) -> None:
    case.model.frozen.requires_grad_(True)
    case.averager.step(case.model, loss=2.0)


def _swap(case: Case) -> None:
    with case.averager.swapped_into(case.model, 2):
        assert case.model.w[0].item() == 2.5  # values 2 and 3
        case.model.seen.fill_(99)


def _swap_blended(case: Case) -> None:
    with case.averager.swapped_into(case.model, 2, coefficients=Blend(0.5)):
        assert case.model.w[0].item() == 2.75  # 3, and the mean of 2 and 3


def _open(case: Case) -> None:
    """As a later process does."""
    case.averager.wait()
    case.averager = None  # type: ignore[assignment]
    gc.collect()
    case.averager = case.make()


def _step_and_read(case: Case) -> None:
    _step(case)
    if len(case.averager):
        case.averager.average(k=len(case.averager))


def _step(case: Case) -> None:
    case.model.set(9.0)
    case.averager.step(case.model, loss=2.0)


def _full(case: Case) -> None:
    case.collect(1.0, 2.0, 3.0)


def _read(case: Case) -> None:
    case.collect(1.0, 2.0, 3.0)
    case.averager.average()
    case.collect(4.0)


ACTS: dict[str, Act] = {
    "step, first": (lambda case: case.model.set(5.0), _step),
    "step, growing": (lambda case: case.collect(1.0), _step),
    "step, full": (_full, _step),
    "step, after a swap": (lambda case: (_full(case), _swap(case), None)[-1], _step),
    "step, larger buffer": (_full, _grow),
    "step, unfrozen": (_full, _unfreeze),
    "step and average, first": (lambda case: case.model.set(5.0), _step_and_read),
    "step and average, growing": (lambda case: case.collect(1.0), _step_and_read),
    "step and average, full": (_read, _step_and_read),
    "swap": (_full, _swap),
    "swap, blended": (_full, _swap_blended),
    "average": (_read, lambda case: case.averager.average()),
    "average, one snapshot": (_read, lambda case: case.averager.average(k=1)),
    "average, blended": (_read, lambda case: case.averager.average(coefficients=Blend(0.5))),
    "bind": (lambda _: None, lambda case: case.averager.bind(case.model)),
    "save": (_full, lambda case: case.averager.state_dict()),
    "export": (
        _full,
        lambda case: case.averager.save_pretrained(case.folder / "exported", case.model),
    ),
    "load": (_full, lambda case: case.averager.load_state_dict(_state(case))),
    "load, into none": (lambda _: None, lambda case: case.averager.load_state_dict(_state(case))),
    "load none": (
        _full,
        lambda case: case.averager.load_state_dict(
            LatestWeightAverager(k=K, schedule=copy.deepcopy(case.averager.schedule)).state_dict()
        ),
    ),
    "reset": (_full, lambda case: case.averager.reset()),
    "wait": (_full, lambda case: case.averager.wait()),
}


MORE: dict[str, dict[str, Act]] = {
    "disk": {"open": (_full, _open)},
    "host": {"copy": (_full, lambda case: copy.deepcopy(case.averager))},
    "device": {"copy": (_full, lambda case: copy.deepcopy(case.averager))},
}


@functools.cache
def before_and_after(kind: str, options: str, act: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What can be observed before an act, and after it."""
    prepare, do = {**ACTS, **MORE[kind]}[act]
    with tempfile.TemporaryDirectory() as folder:
        case = Case(Path(folder), kind, OPTIONS[options])
        prepare(case)
        old = facts(case.averager)
        do(case)
        return old, facts(case.averager)


def trial(folder: Path, kind: str, options: str, act: str, at: int | None) -> int:
    """Interrupt the act at one place and check everything; returns how many places there are."""
    prepare, do = {**ACTS, **MORE[kind]}[act]
    old, new = before_and_after(kind, options, act)
    case = Case(folder, kind, OPTIONS[options])
    prepare(case)
    facts(case.averager)
    own = values(case.model)
    interrupt, caught = Interrupt(at), None
    try:
        with interrupt:
            do(case)
    except KeyboardInterrupt as error:
        caught = error  # kept, as an interactive session keeps it
    where = interrupt.where
    if interrupt.entering == "_Swap.__exit__":
        caught = None  # no code of ours can run before it: the weights return with this exception
    if case.averager is None:
        caught = None  # type: ignore[unreachable]  # it holds the store, which holds the folder
        case.averager = case.make()
    averager, model = case.averager, case.model
    assert torch.is_grad_enabled(), where
    assert not torch.is_inference_mode_enabled(), where
    assert is_free(averager._lock), where
    assert not swaps._swapped, where
    found = facts(averager)
    assert found in (old, new), (where, found, old, new)
    if not act.startswith("step"):
        assert all(torch.equal(value, own[name]) for name, value in values(model).items()), where
    if at is None:
        assert found == new
    if kind == "disk":
        averager.wait()  # its thread uses the folder
        case.averager = averager = None  # type: ignore[assignment]
        del caught
        gc.collect()
        again = case.make()
        found = facts(again)
        on_disk = [{**state, "num_steps": None, "schedule": None} for state in (old, new)]
        if found["steps"] or found["num_collected"]:
            assert {**found, "num_steps": None, "schedule": None} in on_disk, (where, found)
        averager = again
    works_on(averager, where)
    return interrupt.count


def works_on(averager: LatestWeightAverager, where: str) -> None:
    """Collect, average, swap and save, with the right values."""
    averager.reset()
    model, taken = Net(), [21.0, 23.0, 28.0, 30.0]
    for value in taken:
        model.set(value)
        averager.collect(model)
    mean = averager.average(k=K)
    assert mean["w"].unique().tolist() == [27.0], where
    assert mean["h"].unique().tolist() == [27.0], where
    assert mean["count"].item() == 30, where
    with averager.swapped_into(model, K):
        assert model.w.unique().tolist() == [27.0], where
    assert model.w.unique().tolist() == [30.0], where
    fresh = LatestWeightAverager(k=K, schedule=copy.deepcopy(averager.schedule))
    fresh.load_state_dict(averager.state_dict())
    assert facts(fresh) == facts(averager), where


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sliding": {"_sliding": True},
    "plateau": {"schedule": OnPlateau(patience=1), "min_snapshots": 1},
    "horizon": {"schedule": Horizon(0.5, k=K), "min_snapshots": 1},
    "narrow": {"storage_dtype": torch.bfloat16, "buffers": "average"},
}


@pytest.fixture
def folders(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Path]]:
    monkeypatch.setattr(os, "fsync", lambda _: None)  # nobody pulls the plug here
    with tempfile.TemporaryDirectory() as name:
        serial = iter(range(10**9))
        yield lambda: Path(name, str(next(serial)))


@pytest.mark.parametrize("kind", STORES)
def test_an_interrupt_anywhere_leaves_the_old_state_or_the_new_one(
    kind: str, folders: Callable[[], Path], campaign: Campaign, trials: CountTrials
) -> None:
    draw, counts = random.Random(campaign.seed), {}
    acts = [*ACTS, *MORE[kind]]
    choices = [(options, act) for options in ("plain", "sliding", "narrow") for act in acts]
    changing = [act for act in ACTS if act.startswith(("step", "load"))]
    choices += [(options, act) for options in ("plateau", "horizon") for act in changing]
    choices.remove(("narrow", "step, larger buffer"))  # averaged buffers have one shape
    for options, act in campaign.until_time_is_up(draw.choice(choices) for _ in itertools.count()):
        if (options, act) not in counts:
            counts[options, act] = trial(folders(), kind, options, act, None)
        at = draw.randrange(counts[options, act])
        try:
            trial(folders(), kind, options, act, at)
        except BaseException as error:
            error.add_note(f"{kind}, {options}, {act!r}, interrupted at place {at}")
            raise
        trials("interrupts", 1)
