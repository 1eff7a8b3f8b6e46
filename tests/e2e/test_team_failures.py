"""A team in trouble: whatever happens to one process, the rest end and say who it was.

Under the name of the output there is the old result or the new one at any moment.
"""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.team import AT, Ended, alone, end_all, finish, start

from torch_lawa.offline.team import find_team

NUM_VALUES = 200_000
PATIENCE = 3.0
WORDS: list[object] = ["average", "run", "--last", 2, "-o", "out", "--overwrite"]


@pytest.fixture(autouse=True)
def _nobody_stays() -> Iterator[None]:
    yield
    end_all()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A run, and an older result where the new one is to go."""
    (tmp_path / "run").mkdir()
    for step in (1, 2):
        values = torch.full((NUM_VALUES,), float(step))
        save_file({"w": values}, tmp_path / "run" / f"step_{step}.safetensors")
    (tmp_path / "out").mkdir()
    save_file({"w": torch.zeros(NUM_VALUES)}, tmp_path / "out" / "model.safetensors")
    return tmp_path


def value(home: Path) -> float:
    values = load_file(home / "out" / "model.safetensors")["w"]
    assert values.shape == (NUM_VALUES,)
    assert values.min() == values.max()
    return values[0].item()


def is_tidy(home: Path) -> bool:
    return sorted(p.name for p in home.iterdir()) == ["out", "run"]


def at(moment: str, signal_name: str) -> str:
    module, owner, name = MOMENTS[moment]
    return AT.format(module=module, owner=owner, name=name, signal=signal_name)


MOMENTS = {
    "joining": ("following", "", "_join"),
    "planning": ("plan", "", "match_tensors"),
    "writing": ("output_files", ".SafetensorsSink", "write"),
    "replying": ("following", ".Follower", "reply"),
    "publishing": ("output_files", "", "_deliver"),
}


@pytest.mark.parametrize(
    ("rank", "moment"),
    [
        *((0, moment) for moment in ("planning", "writing", "publishing")),
        *((1, moment) for moment in ("joining", "writing", "replying")),
    ],
)
def test_a_killed_process(home: Path, rank: int, moment: str) -> None:
    hooks = {rank: at(moment, "SIGKILL")}
    ended = finish(start(WORDS, 3, folder=home, patience=PATIENCE, hooks=hooks))
    assert ended[rank].code == -signal.SIGKILL
    for other in {0, 1, 2} - {rank}:
        assert ended[other].code == 1
        assert f"rank {rank} " in ended[other].complained
        known = "did not come" if moment == "joining" else "no sign of life"
        assert known in ended[other].complained
    assert value(home) == 0.0
    assert is_tidy(home) == (rank != 0)  # rank 0 tidies, unless it is the one that was killed
    assert alone(WORDS, home).code == 0
    assert value(home) == 1.5
    assert is_tidy(home)  # the next one does


def test_a_process_that_stands_still(home: Path) -> None:
    """The others name it and end; when it goes on it finds that it is too late and does no harm."""
    processes = start(WORDS, 3, folder=home, patience=PATIENCE, hooks={1: at("writing", "SIGSTOP")})
    still = processes.pop(1)
    before = time.monotonic()
    for ended in finish(processes):
        assert ended.code == 1
        assert "rank 1 (" in ended.complained
        assert f"pid {still.pid}) has given no sign of life for" in ended.complained
    assert time.monotonic() - before < 20 * PATIENCE
    assert (value(home), is_tidy(home)) == (0.0, True)
    still.send_signal(signal.SIGCONT)
    assert finish([still])[0].code == 1
    assert (value(home), is_tidy(home)) == (0.0, True)


def test_rank_0_stands_still(home: Path) -> None:
    hooks = {0: at("publishing", "SIGSTOP")}
    processes = start(WORDS, 2, folder=home, patience=PATIENCE, hooks=hooks)
    assert "rank 0 (" in finish(processes[1:])[0].complained
    assert value(home) == 0.0
    processes[0].send_signal(signal.SIGKILL)
    finish(processes[:1])


def test_a_short_standstill_is_forgiven(home: Path) -> None:
    processes = start(WORDS, 2, folder=home, patience=30, hooks={1: at("writing", "SIGSTOP")})
    time.sleep(3.0)
    processes[1].send_signal(signal.SIGCONT)
    assert [e.code for e in finish(processes)] == [0, 0]
    assert (value(home), is_tidy(home)) == (1.5, True)


OTHER = """
from torch_lawa.offline import following
real = following.parse_location
following.parse_location = lambda name: real(name.replace("step_1", {other!r}))
"""


def test_a_file_that_one_process_does_not_see(home: Path) -> None:
    ended = finish(start(WORDS, 3, folder=home, hooks={2: OTHER.format(other="step_7")}))
    assert [e.code for e in ended] == [1, 1, 1]
    reason = f"{home}/run/step_7.safetensors: there is no such file or folder.\n"
    assert ended[2].complained == f"Error: {reason}"
    assert ended[0].complained == ended[1].complained == f"Error: rank 2 failed: {reason}"
    assert (value(home), is_tidy(home)) == (0.0, True)


def test_another_file_of_the_same_name(home: Path) -> None:
    ended = finish(start(WORDS, 2, folder=home, hooks={1: OTHER.format(other="step_2")}))
    assert [e.code for e in ended] == [1, 1]
    assert "is another checkpoint here than where rank 0 runs" in ended[1].complained
    assert (value(home), is_tidy(home)) == (0.0, True)


def test_rank_0_says_what_was_typed_wrong(home: Path) -> None:
    words = ["average", "run", "--last", 9, "-o", "new/out"]
    ended = finish(start(words, 3, folder=home))
    assert [e.code for e in ended] == [1, 1, 1]
    assert ended[1].complained == ended[0].complained.replace("Error: ", "Error: rank 0 failed: ")
    assert is_tidy(home)  # not even the folder that the output was to lie in


@pytest.mark.parametrize(
    ("rank", "reason"), [(0, "rank 1, 2 of 3 did not come"), (1, "rank 0 gave")]
)
def test_one_that_is_alone(home: Path, rank: int, reason: str) -> None:
    ended = finish(start(WORDS, 3, folder=home, patience=0.5, ranks=[rank]))
    assert ended[0].code == 1
    assert reason in ended[0].complained
    assert (value(home), is_tidy(home)) == (0.0, True)


def test_two_that_say_they_are_one(home: Path) -> None:
    ended = finish(start(WORDS, 3, folder=home, patience=3, ranks=[0, 1, 1]))
    assert ended[0].code == 1
    assert "two processes say that they are rank 1" in ended[0].complained
    assert (value(home), is_tidy(home)) == (0.0, True)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_one_that_is_told_to_end(home: Path, number: int) -> None:
    processes = start(WORDS, 2, folder=home, hooks={1: at("writing", "SIGSTOP")})
    deadline = time.monotonic() + 30
    while not list(home.glob(".out.*.partial/order.1")) and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.5)
    processes[0].send_signal(number)
    processes[1].send_signal(signal.SIGCONT)
    ended = finish(processes)
    assert (ended[0].code, ended[0].complained) == (130, "Stopped.\n")
    assert (ended[1].code, ended[1].complained) == (1, "Error: rank 0 was stopped.\n")
    assert (value(home), is_tidy(home)) == (0.0, True)


def leave_behind(home: Path, pid: int, names: list[str]) -> None:
    """What a killed job of the same name and size might have left."""
    team = find_team({"RANK": "0", "WORLD_SIZE": "2"})
    assert team is not None
    folder = home / f".out.{pid}.{team.job}.0123456789abcdef.partial"
    folder.mkdir()
    for name in names:
        (folder / name).write_text('"rank 1 failed: long ago"')


def test_what_an_earlier_job_left_is_not_believed(home: Path) -> None:
    """Not even where it seems to be in use still, as that of a living process."""
    names = ["finished", "failed.0", "failed.1", "order.1", "welcome.1.aa", "hello.1.bb", "left.1"]
    leave_behind(home, os.getpid(), names)
    ended = finish(start(WORDS, 2, folder=home))
    assert [e.code for e in ended] == [0, 0], ended
    assert value(home) == 1.5
    (left,) = home.glob(".out.*.partial")
    assert left.name.startswith(f".out.{os.getpid()}.")


def test_repeated_after_a_killed_one(home: Path) -> None:
    """At once, while the rest of the killed job waits: neither disturbs the other."""
    hooks = {0: at("writing", "SIGKILL")}
    first = start(WORDS, 2, folder=home, patience=8, hooks=hooks)
    finish(first[:1])
    ended = finish(start(WORDS, 2, folder=home))
    assert [e.code for e in ended] == [0, 0], ended
    assert (value(home), is_tidy(home)) == (1.5, True)
    late: Ended = finish(first[1:])[0]
    assert late.code == 1
    assert (value(home), is_tidy(home)) == (1.5, True)
