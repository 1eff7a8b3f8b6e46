"""Which of the checkpoints that were found are selected."""

from pathlib import Path
from typing import Any

import pytest
from support.layouts import save

from torch_lawa.checkpoints.find.discovery import (
    Discovery,
    FoundCheckpoint,
    find_checkpoints,
    select,
)
from torch_lawa.checkpoints.storage.paths import LocalPath
from torch_lawa.errors import ConfigError


def run_of(*numbers: int, by: str = "step") -> Discovery:
    found = [
        FoundCheckpoint(LocalPath(f"{n}.pt"), *((n, None) if by == "step" else (None, n)))
        for n in numbers
    ]
    return Discovery(tuple(found), "step" if by == "step" else "epoch", True, ("before",))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, [100, 200, 300, 400, 500]),
        ({"last": 2}, [400, 500]),
        ({"last": 5}, [100, 200, 300, 400, 500]),
        ({"at": 300}, [100, 200, 300]),
        ({"at": 300, "last": 2}, [200, 300]),
        ({"start": 200, "stop": 400}, [200, 300, 400]),
        ({"start": 201, "stop": 399}, [300]),
        ({"every": 200}, [200, 400]),
        ({"every": 200, "last": 1}, [400]),
        ({"every": 200, "at": 200, "start": 1}, [200]),
        ({"stop": 250, "last": 1}, [200]),
        ({"stop": 100}, [100]),
        ({"horizon": 0.4}, [400, 500]),  # steps 301 to 500
        ({"horizon": 0.401}, [400, 500]),
        ({"horizon": 0.41, "at": 400}, [300, 400]),
        ({"horizon": 0.99, "start": 150}, [200, 300, 400, 500]),
        ({"horizon": 0.01}, [500]),
        ({"horizon": 0.6, "every": 200}, [200, 400]),
    ],
)
@pytest.mark.parametrize("by", ["step", "epoch"])
def test_a_selection(arguments: dict[str, Any], expected: list[int], by: str) -> None:
    chosen = select(run_of(100, 200, 300, 400, 500, by=by), **arguments)
    assert chosen.numbers == expected
    assert (chosen.ordered_by, chosen.is_run, chosen.notes) == (by, True, ("before",))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"last": 0}, "--last 0: it must be at least 1"),
        ({"every": 0}, "--every 0: it must be at least 1"),
        ({"at": -5}, "--at -5: it must be at least 0"),
        ({"start": -1}, "--from -1: it must be at least 0"),
        ({"stop": -1}, "--to -1: it must be at least 0"),
        ({"start": 300, "stop": 200}, "--from 300 --to 200"),
        ({"last": 6}, r"--last 6, but only 5 .*step 100, .*--last 5"),
        ({"last": 3, "every": 200}, r"--last 3, but only 2 .*\(step 200, step 400\).*--last 2"),
        ({"at": 350}, "step 350. The nearest: 300, 400"),
        ({"at": 600}, "step 600. The nearest: 400, 500"),
        ({"at": 300, "every": 200}, "step 300. The nearest: 200, 400"),
        ({"last": "2"}, "--last '2': it must be a whole number"),
        ({"start": 501}, "no checkpoint; found 5 from step 100 to 500"),
        ({"every": 1000}, "no checkpoint; found 5 from step 100 to 500"),
        ({"last": 2, "horizon": 0.25}, "--last 2 and --horizon 0.25"),
        ({"horizon": 1.0}, "horizon=1.0.*between 0 and 1"),
        ({"horizon": 0.0}, "horizon=0.0.*between 0 and 1"),
    ],
)
def test_an_impossible_selection_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        select(run_of(100, 200, 300, 400, 500), **arguments)


def test_a_list_without_steps_can_only_use_last(tmp_path: Path) -> None:
    given = find_checkpoints([save(tmp_path / f"{name}.safetensors") for name in "cab"])
    assert [f.location.name for f in select(given, last=2).found] == [
        "a.safetensors",
        "b.safetensors",
    ]
    for name in ("at", "start", "stop", "every"):
        with pytest.raises(ConfigError, match="no step or epoch to select by"):
            select(given, **{name: 1})
    with pytest.raises(ConfigError, match="no step or epoch to select by"):
        select(given, horizon=0.25)
    with pytest.raises(ConfigError, match=r"only 3 .*\(c.safetensors, a.safetensors"):
        select(given, last=4)


@pytest.mark.parametrize(
    ("numbers", "note"),
    [
        ((5,), None),
        ((5, 9), None),
        (
            (3000, 4000, 5000, 8000),
            "uneven steps: mostly 1000 apart, but 3000 between 5000 and 8000",
        ),
        (
            (500, 1000, 1500, 1873),
            "uneven steps: mostly 500 apart, but 373 between 1500 and 1873",
        ),
        ((1, 2, 4, 8), "uneven steps: gaps of 1 to 4"),
    ],
)
def test_uneven_gaps_are_noted(numbers: tuple[int, ...], note: str | None) -> None:
    assert select(run_of(*numbers)).notes == (("before",) if note is None else ("before", note))


def test_a_share_may_be_of_any_spacing() -> None:
    assert select(run_of(10, 20, 40, 50, 80), horizon=0.6).numbers == [40, 50, 80]
    assert select(run_of(10, 20, 40, 50, 80), horizon=0.6).notes == ("before",)


def test_gaps_are_those_of_what_is_left() -> None:
    assert select(run_of(1, 50, 100, 200, 300), every=100).notes == ("before",)
    assert select(run_of(1, 2, 3, 9, by="epoch")).notes[1].startswith("uneven epochs: mostly 1")


def test_nothing_after_the_first() -> None:
    assert select(run_of(0, 100, 200), stop=0).numbers == [0]
