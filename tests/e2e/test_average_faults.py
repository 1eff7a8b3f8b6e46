"""`lawa average` on ranks of which one fails: the others end, and say which one it was.

At any moment OUT is the old result or the new one.
"""

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.command import at, end_all, finish, one_process, start

NUM_VALUES = 200_000
TIMEOUT = 2.0
WORDS: list[object] = ["average", "run", "--last", 2, "-o", "out", "--overwrite"]
MOMENTS = {
    "planning": "torch_lawa.offline.plan:match_tensors",
    "opening": "torch_lawa.offline.multi_process:open_checkpoint",
    "writing": "torch_lawa.offline.output_files:SafetensorsSink.write",
    "flushing": "torch_lawa.offline.output_files:SafetensorsSink.flush",
    "publishing": "torch_lawa.offline.output_files:_deliver",
}


@pytest.fixture(autouse=True)
def _end_all() -> Iterator[None]:
    yield
    end_all()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A run, and an older result where the new one will be."""
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


@pytest.mark.parametrize(
    ("rank", "moment"),
    [
        *((0, moment) for moment in ("planning", "writing", "publishing")),
        *((1, moment) for moment in ("opening", "writing", "flushing")),
    ],
)
def test_a_killed_rank_is_named(home: Path, rank: int, moment: str) -> None:
    hooks = {rank: at(MOMENTS[moment], "SIGKILL")}
    ended = finish(start(WORDS, 3, folder=home, hooks=hooks))  # long before the timeout of 60 s
    assert ended[rank].code == -signal.SIGKILL
    for other in {0, 1, 2} - {rank}:
        assert ended[other].code == 1
        assert f"rank {rank} of 3 ended before reaching" in ended[other].stderr
    assert value(home) == 0.0
    # Rank 0 cleans up, unless it is the one that was killed.
    assert is_tidy(home) == (rank != 0 or moment == "planning")
    assert one_process(WORDS, home).code == 0
    assert value(home) == 1.5
    assert is_tidy(home)  # the next run does


def test_a_rank_that_hangs_is_named(home: Path) -> None:
    """When it continues it finds that it is too late, and does no harm."""
    hooks = {1: at(MOMENTS["writing"], "SIGSTOP")}
    started = start(WORDS, 3, folder=home, timeout=TIMEOUT, hooks=hooks)
    hanging = started.pop(1)
    before = time.monotonic()
    for ended in finish(started):
        assert ended.code == 1
        assert f"rank 1 of 3 did not reach the end of writing within {TIMEOUT:g} s" in ended.stderr
        assert f"(pid {hanging.pid} on " in ended.stderr
    assert time.monotonic() - before < 20 * TIMEOUT
    assert (value(home), is_tidy(home)) == (0.0, True)
    hanging.signal(signal.SIGCONT)
    assert finish([hanging])[0].code == 1
    assert (value(home), is_tidy(home)) == (0.0, True)


def test_rank_0_hangs(home: Path) -> None:
    hooks = {0: at(MOMENTS["publishing"], "SIGSTOP")}
    started = start(WORDS, 2, folder=home, timeout=TIMEOUT, hooks=hooks)
    assert "rank 0 of 2 did not reach" in finish(started[1:])[0].stderr
    assert value(home) == 0.0


def test_a_slow_rank_is_waited_for(home: Path) -> None:
    """For longer than the timeout, as long as it is alive."""
    slow = "import time\nfrom torch_lawa.offline.output_files import SafetensorsSink as S\n"
    slow += "flush = S.flush\nS.flush = lambda self: (time.sleep(4.0), flush(self))\n"
    ended = finish(start(WORDS, 2, folder=home, timeout=TIMEOUT, hooks={1: slow}))
    assert [e.code for e in ended] == [0, 0], ended
    assert (value(home), is_tidy(home)) == (1.5, True)


OTHER = """
from torch_lawa.offline import multi_process
real = multi_process.{function}
def {function}(first, *rest):
    return real({changed}, *rest)
multi_process.{function} = {function}
"""
OTHER_INPUT = OTHER.format(function="parse_location", changed="first.replace('step_1', 'step_{}')")
OTHER_FOLDER = OTHER.format(function="Path", changed="first.replace('out', 'elsewhere')")


@pytest.mark.parametrize(
    ("hook", "reason"),
    [
        (OTHER_INPUT.format(7), "step_7.safetensors: there is no such file or folder."),
        (OTHER_INPUT.format(2), "is not the same checkpoint as on rank 0"),
        (OTHER_FOLDER, "Write to a file system that all ranks share."),
    ],
)
def test_a_rank_that_sees_other_files(home: Path, hook: str, reason: str) -> None:
    ended = finish(start(WORDS, 3, folder=home, hooks={2: hook}))
    assert [e.code for e in ended] == [1, 1, 1]
    assert reason in ended[2].stderr
    assert ended[2].stderr.startswith(f"Error: {home}")
    assert ended[0].stderr == ended[1].stderr
    assert ended[0].stderr.startswith(f"Error: rank 2 failed, so nothing was written: {home}")
    assert reason in ended[0].stderr
    assert (value(home), is_tidy(home)) == (0.0, True)


def test_a_failed_rank_stops_the_others(home: Path) -> None:
    """They do not complete their shares first: here that would take minutes."""
    slow = "import time\nfrom torch_lawa.offline.output_files import SafetensorsSink as S\n"
    slow += "S.write = lambda *_: time.sleep(1.0)\n"
    broken = "from torch_lawa.offline.output_files import SafetensorsSink as S\n"
    broken += "def write(*_):\n    raise OSError('broken disk')\nS.write = write\n"
    words: list[object] = [*WORDS, "--threads", 1]
    big = torch.zeros(8_000_000)
    for step in (1, 2):
        save_file({"w": big}, home / "run" / f"step_{step}.safetensors")
    before = time.monotonic()
    ended = finish(start(words, 2, folder=home, hooks={0: slow, 1: broken}))
    assert time.monotonic() - before < 40
    assert [e.code for e in ended] == [1, 1]
    assert "rank 1 failed, so nothing was written: broken disk" in ended[0].stderr


def test_rank_0_prints_what_was_typed_wrong(home: Path) -> None:
    words: list[object] = ["average", "run", "--last", 9, "-o", "new/out"]
    ended = finish(start(words, 3, folder=home))
    assert [e.code for e in ended] == [2, 1, 1]
    problem = ended[0].stderr.removeprefix("Error: ")
    assert ended[1].stderr == f"Error: rank 0 failed, so nothing was written: {problem}"
    assert is_tidy(home)  # not even the folder that would hold the output


@pytest.mark.parametrize(("rank", "missing"), [(0, "ranks 1, 2"), (1, "ranks 0, 2")])
def test_ranks_that_were_not_started(home: Path, rank: int, missing: str) -> None:
    ended = finish(start(WORDS, 3, folder=home, timeout=0.5, ranks=[rank]))
    assert ended[0].code == 1
    assert f"{missing} of 3 did not reach the start within 0.5 s" in ended[0].stderr
    assert (value(home), is_tidy(home)) == (0.0, True)


def test_rank_0_is_killed_with_the_store(home: Path) -> None:
    hooks = {0: at(MOMENTS["writing"], "SIGKILL")}
    ended = finish(start(WORDS, 2, folder=home, hooks=hooks, rank_0_hosts=True))
    assert ended[1].code == 1
    assert "rank 0" in ended[1].stderr
    assert value(home) == 0.0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_interrupted(home: Path, number: int, rank: int) -> None:
    """While it waits for the other one."""
    started = start(WORDS, 2, folder=home, hooks={1 - rank: at(MOMENTS["writing"], "SIGSTOP")})
    deadline = time.monotonic() + 30
    while not list(home.glob("out.*.partial/*")) and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.3)
    for _ in range(2):  # torchrun repeats what the terminal sends
        started[rank].signal(number)
        time.sleep(0.4)
    started[1 - rank].signal(signal.SIGCONT)
    ended = finish(started)
    assert (ended[rank].code, ended[rank].stderr) == (130, "Stopped.\n")
    assert ended[1 - rank].code == 1
    assert ended[1 - rank].stderr.startswith(f"Error: rank {rank} ")
    assert "stopped by a signal" in ended[1 - rank].stderr
    assert (value(home), is_tidy(home)) == (0.0, True)
