"""Schedules, step by step, and their registry."""

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torch_lawa import Every, Horizon, LatestWeightAverager, OnPlateau
from torch_lawa.errors import ConfigError, StateError
from torch_lawa.schedule import (
    SCHEDULES,
    Schedule,
    register_schedule,
)


@given(n=st.integers(1, 7), start=st.integers(0, 20), total=st.integers(1, 60))
def test_every_n_after_the_start(n: int, start: int, total: int) -> None:
    schedule = Every(n, start=start)
    due = [step for step in range(1, total + 1) if schedule.due(step)]
    assert due == list(range(start + n, total + 1, n))
    assert schedule.expected(range(1, total + 1)) == len(due)


@given(n=st.integers(1, 5), start=st.floats(0, 0.9), total=st.integers(10, 60))
def test_expected_is_what_a_whole_run_gives(n: int, start: float, total: int) -> None:
    try:
        schedule = Every(n, start=start, total=total)
    except ConfigError:
        return
    assert sum(map(schedule.due, range(1, total + 1))) == schedule.expected()


def test_a_time_that_began_as_zero_is_resumed_exactly() -> None:
    @dataclass
    class EveryHours(Schedule):
        hours: float = 1.5
        last: float = field(default=0, init=False)

        def due(self, step: int, loss: float | None = None) -> bool:
            if 0.7 * step - self.last < self.hours:
                return False
            self.last = 0.7 * step
            return True

    first, resumed = EveryHours(), EveryHours()
    for step in range(1, 10):
        first.due(step)
    resumed.load_state_dict(first.state_dict())
    assert resumed.last == first.last == 0.7 * 9


def test_every_needs_no_history() -> None:
    """A run that is resumed, or only asks now and then, collects where others do."""
    asked_late = Every(5)
    assert [step for step in (8, 10, 13, 20) if asked_late.due(step)] == [10, 20]
    assert asked_late.expected((8, 10, 13, 20)) == 2
    assert asked_late.state_dict() == {}


def test_start_as_a_fraction_of_the_run() -> None:
    schedule = Every(1, start=0.25, total=8)
    assert [step for step in range(1, 9) if schedule.due(step)] == [3, 4, 5, 6, 7, 8]
    plateau = OnPlateau(start=0.5, total=6)
    assert [plateau.due(step, 1.0) for step in range(1, 7)] == [False] * 3 + [True] * 3


def test_a_horizon_begins_after_its_start_and_counts_from_the_first_step() -> None:
    schedule = Horizon(0.5, k=2, start=10)
    assert [step for step in range(1, 70) if schedule.due(step)] == [12, 16, 23, 32, 46, 64]
    assert not Horizon(0.5, k=2).due(0)  # before training
    assert not Horizon(0.5, k=2, start=10).due(0)
    averager = LatestWeightAverager(k=2, schedule=Horizon(0.5, k=2, start=10))
    assert averager.min_snapshots == 1
    assert sum(averager.step({"w": torch.zeros(1)}) for _ in range(12)) == 1
    assert averager.ready
    assert LatestWeightAverager(k=4, horizon=0.5, min_snapshots=3).min_snapshots == 3


def due_with(schedule: Schedule, losses: list[float]) -> list[bool]:
    return [schedule.due(step, loss) for step, loss in enumerate(losses, 1)]


def test_patience_and_min_delta() -> None:
    losses = [1.0, 0.95, 0.93, 0.5, 0.6, 0.45, 0.3]
    assert due_with(OnPlateau(patience=2, min_delta=0.1), losses) == [
        False, False, True, False, False, True, False,
    ]  # fmt: skip


def test_a_run_that_diverged_is_not_on_a_plateau() -> None:
    losses = [math.inf, 1.0, math.inf, math.nan, -math.inf, 0.5, 0.6]
    assert due_with(OnPlateau(), losses) == [False] * 6 + [True]


@given(losses=st.lists(st.floats(0, 3), min_size=2, max_size=20), cut=st.integers(1, 19))
def test_a_saved_schedule_continues(losses: list[float], cut: int) -> None:
    first, whole = OnPlateau(patience=2), OnPlateau(patience=2)
    expected = due_with(whole, losses)
    due_with(first, losses[:cut])
    resumed = OnPlateau(patience=2)
    resumed.load_state_dict(first.state_dict())
    rest = [resumed.due(step, loss) for step, loss in enumerate(losses[cut:], cut + 1)]
    assert rest == expected[cut:]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Every(0), "positive"),
        (lambda: Every(1.5), "positive"),
        (lambda: Every(1, start=-1), "negative"),
        (lambda: Every(1, start=0.1), "length of the run"),
        (lambda: Every(1, start=1.0, total=5), r"in \[0, 1\)"),
        (lambda: Every(1, start=5, total=5), "not before the end"),
        (lambda: Every(10, total=5), "ends before the first snapshot"),
        (lambda: Every(1, total=0), "total=0"),
        (lambda: Every(1, start="3"), "number of steps"),
        (lambda: Every(1, start=True), "number of steps"),
        (lambda: Every(1, start=0.5, total=7.5), "total=7.5"),
        (lambda: OnPlateau(patience=0), "at least 1"),
        (lambda: OnPlateau(patience=1.5), "an int of at least 1"),
        (lambda: OnPlateau(min_delta=-1), "negative"),
        (lambda: OnPlateau(start=9, total=3), "not before the end"),
        (lambda: Horizon(0.0), "between 0 and 1"),
        (lambda: Horizon(1), "between 0 and 1"),
        (lambda: Horizon("0.5"), "between 0 and 1"),
        (lambda: Horizon(0.25, 0), "at least 1"),
        (lambda: Horizon(0.25, start=0.1), "length of the run"),
        (lambda: LatestWeightAverager(k=4, horizon=25), "horizon=25"),
        (lambda: LatestWeightAverager(k=4, horizon=0.5, schedule=Every(2)), "pass only one"),
        (lambda: LatestWeightAverager(k=4, schedule=Horizon(0.5, k=8)), "set the schedule.s k"),
        (lambda: LatestWeightAverager(k=16, schedule=Horizon(0.25, k=8)), "set the schedule.s k"),
        (lambda: LatestWeightAverager(k=9, schedule=Every(1, total=5)), "k=9, or set min_snap"),
        (
            lambda: LatestWeightAverager(k=1, samples=9, schedule=Every(1, total=5)),
            "needs 1. Collect more often, start earlier, or lower samples=9.$",
        ),
    ],
)
def test_impossible_schedules(make, message) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match=message):
        make()


def test_state_of_another_schedule() -> None:
    schedule = OnPlateau()
    for state in (Every(2).state_dict(), {"best": "low", "num_waited": 1}):
        with pytest.raises(StateError, match="'best', which OnPlateau needs"):
            schedule.load_state_dict(state)
    with pytest.raises(StateError, match="'num_waited'"):
        schedule.load_state_dict({"best": 1.0})
    assert schedule == OnPlateau()


@pytest.fixture
def growing() -> Iterator[Callable[[float], Schedule]]:
    """A window that spans a share of the run so far: the spacing grows with the step."""

    @register_schedule("growing", "when the step has grown by RATIO")
    @dataclass
    class Growing(Schedule):
        ratio: float = 1.5
        last: int = field(default=0, init=False)

        def due(self, step: int, loss: float | None = None) -> bool:
            if step < self.ratio * self.last:
                return False
            self.last = step
            return True

    yield Growing
    del SCHEDULES["growing"]


def test_a_registered_schedule_is_described(growing: Callable[[float], Schedule]) -> None:
    schedule = growing(2)
    assert SCHEDULES["growing"].usage == "growing:RATIO"
    assert schedule.expected(range(1, 33)) == 6  # 1, 2, 4, 8, 16, 32
    assert schedule.state_dict() == {"last": 0}  # counting changed nothing
    with pytest.raises(ConfigError, match="'growing' is registered already"):
        register_schedule("growing", "")


def test_a_registered_schedule_decides_in_the_averager(
    growing: Callable[[float], Schedule],
) -> None:
    def averager() -> LatestWeightAverager:
        return LatestWeightAverager(k=3, schedule=growing(2))

    whole, first, rest = averager(), averager(), averager()
    for step in range(1, 40):
        whole.step({"w": torch.full((1,), float(step))})
    for step in range(1, 12):
        first.step({"w": torch.full((1,), float(step))})
    rest.load_state_dict(copy.deepcopy(first.state_dict()))
    for step in range(12, 40):
        rest.step({"w": torch.full((1,), float(step))})
    assert whole.snapshot_steps == rest.snapshot_steps == [8, 16, 32]
    assert rest.schedule.state_dict() == {"last": 32}
    assert torch.equal(whole.average()["w"], rest.average()["w"])
