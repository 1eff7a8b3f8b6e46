"""Schedules, call by call."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_lawa import Every, OnPlateau
from torch_lawa.errors import ConfigError, StateError


@given(n=st.integers(1, 7), start=st.integers(0, 20), calls=st.integers(1, 60))
def test_every_n_after_the_start(n: int, start: int, calls: int) -> None:
    schedule = Every(n, start=start)
    fired = [i for i in range(1, calls + 1) if schedule.due(None)]
    assert fired == list(range(start + n, calls + 1, n))


@given(n=st.integers(1, 5), start=st.floats(0, 0.9), total=st.integers(10, 60))
def test_expected_is_what_a_whole_run_gives(n: int, start: float, total: int) -> None:
    try:
        schedule = Every(n, start=start, total=total)
    except ConfigError:
        return
    assert sum(schedule.due(None) for _ in range(total)) == schedule.expected()


def test_start_as_a_fraction_of_the_run() -> None:
    schedule = Every(1, start=0.25, total=8)
    assert [schedule.due(None) for _ in range(8)] == [False] * 2 + [True] * 6
    plateau = OnPlateau(start=0.5, total=6)
    assert [plateau.due(1.0) for _ in range(6)] == [False] * 3 + [True] * 3


def test_patience_and_min_delta() -> None:
    schedule = OnPlateau(patience=2, min_delta=0.1)
    losses = [1.0, 0.95, 0.93, 0.5, 0.6, 0.45, 0.3]
    assert [schedule.due(loss) for loss in losses] == [
        False, False, True, False, False, True, False,
    ]  # fmt: skip


def test_a_run_that_diverged_is_not_on_a_plateau() -> None:
    schedule = OnPlateau()
    losses = [math.inf, 1.0, math.inf, math.nan, -math.inf, 0.5, 0.6]
    assert [schedule.due(loss) for loss in losses] == [False] * 6 + [True]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Every(0), "positive"),
        (lambda: Every(1.5), "positive"),
        (lambda: Every(1, start=-1), "negative"),
        (lambda: Every(1, start=0.1), "say how long the run is"),
        (lambda: Every(1, start=1.0, total=5), r"must lie in \[0, 1\)"),
        (lambda: Every(1, start=5, total=5), "not before the end"),
        (lambda: Every(10, total=5), "ends before the first snapshot"),
        (lambda: Every(1, total=0), "total=0"),
        (lambda: Every(1, start="3"), "number of calls"),
        (lambda: Every(1, start=True), "number of calls"),
        (lambda: Every(1, start=0.5, total=7.5), "total=7.5"),
        (lambda: OnPlateau(patience=0), "at least 1"),
        (lambda: OnPlateau(patience=1.5), "an int of at least 1"),
        (lambda: OnPlateau(min_delta=-1), "negative"),
        (lambda: OnPlateau(start=9, total=3), "not before the end"),
    ],
)
def test_impossible_schedules(make, message) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match=message):
        make()


def test_state_of_another_schedule() -> None:
    with pytest.raises(StateError, match="no 'best', which OnPlateau needs"):
        OnPlateau().load_state_dict(Every(2).state_dict())
