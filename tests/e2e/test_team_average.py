"""`lawa average` in several processes: the bytes of one, and said once."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.team import alone, contents, end_all, environment, finish, make_run, start


@pytest.fixture(autouse=True)
def _nobody_stays() -> Iterator[None]:
    yield
    end_all()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("team")
    make_run(folder / "run")
    tiny = folder / "tiny"
    tiny.mkdir()
    for step in (1, 2):
        save_file({"w": torch.full((3,), float(step))}, tiny / f"step_{step}.safetensors")
    return folder


CASES = {
    "a file": (["run", "--last", 3, "-o", "OUT.safetensors"], 2),
    "shards": (["run", "--last", 3, "-o", "OUT", "--max-shard-size", "400KB", "--digests"], 3),
    "another dtype": (
        ["run", "--last", 2, "-o", "OUT.safetensors", "--dtype", "bfloat16", "--exclude", "ids"],
        3,
    ),
    "weights": (
        ["run", "--last", 3, "-o", "OUT.safetensors", "--coefficients", "explicit:0,0.1,0.7"],
        2,
    ),
    "less than there are processes": (["tiny", "--last", 2, "-o", "OUT"], 3),
}


@pytest.mark.parametrize("case", CASES)
def test_the_same_bytes(home: Path, tmp_path: Path, case: str) -> None:
    words, size = CASES[case]
    outs = [tmp_path / f"{n}/{words[words.index('-o') + 1]}" for n in (1, size)]
    one, many = (
        ["average", *(out if str(w).startswith("OUT") else w for w in words)] for out in outs
    )
    expected = alone(one, home)
    assert expected.code == 0, expected.complained
    ended = finish(start(many, size, folder=home))
    assert [e.code for e in ended] == [0] * size, ended
    assert contents(outs[1]) == contents(outs[0])
    assert [p.name for p in outs[1].parent.iterdir()] == [outs[1].name]
    assert ended[0].said.startswith(f"{outs[1]}: the mean of")
    assert ended[0].complained == expected.complained
    assert all((e.said, e.complained) == ("", "") for e in ended[1:])


def test_torchrun(home: Path, tmp_path: Path) -> None:
    words = ["average", "run", "--last", "3", "--json", "-o"]
    assert alone([*words, tmp_path / "one"], home).code == 0
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         "-m", "torch_lawa", *words, str(tmp_path / "two")],
        cwd=home, env=environment(), capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["output"] == str(tmp_path / "two")
    assert contents(tmp_path / "two") == contents(tmp_path / "one")


def test_formats_of_pytorch(home: Path, tmp_path: Path) -> None:
    """Read without PyTorch by all, written with it by rank 0."""
    for step in (1, 2):
        weight = torch.randn(400, 300)
        torch.save({"model": {"w": weight, "tied": weight}}, tmp_path / f"step_{step}.pt")
    save_file({"w": torch.randn(400, 300)}, tmp_path / "a.safetensors")
    assert (
        alone(["average", "a.safetensors", "--layout", "distributed", "-o", "dcp"], tmp_path).code
        == 0
    )
    for words in (["step_1.pt", "step_2.pt", "-o", "OUT.pt"], ["dcp", "-o", "OUT.safetensors"]):
        one, many = ([w.replace("OUT", n) for w in words] for n in ("one", "many"))
        assert alone(["average", *one], tmp_path).code == 0
        ended = finish(start(["average", *many], 2, folder=tmp_path))
        assert [e.code for e in ended] == [0, 0], ended
        made = [tmp_path / names[-1] for names in (one, many)]
        if made[0].suffix == ".pt":  # a file of PyTorch has its own name inside
            a, b = (torch.load(path)["model"] for path in made)
            assert a.keys() == b.keys() == {"w", "tied"}
            assert torch.equal(a["w"], b["w"])
            assert b["w"].data_ptr() == b["tied"].data_ptr()
        else:
            assert contents(made[0]) == contents(made[1])


COUNT = """
import atexit, os, sys
from torch_lawa.offline import output_files, following, average
num_bytes, real_write = [], output_files.SafetensorsSink.write
real_run = average.run
def write(self, name, begin, piece):
    num_bytes.append(len(piece))
    real_write(self, name, begin, piece)
def run(*args, threads, **kwargs):
    globals()["num_threads"] = threads
    return real_run(*args, threads=threads, **kwargs)
output_files.SafetensorsSink.write = write
average.run = following.run = run
def say():
    assert 'torch' not in sys.modules
    print(sum(num_bytes), num_threads, file=sys.stderr)
atexit.register(say)
"""


def test_work_is_shared_and_needs_no_torch(home: Path, tmp_path: Path) -> None:
    """There is but one tensor, and still each makes about a third."""
    words = ["average", "run", "--last", 3, "--include", "embed", "-o", tmp_path / "m.safetensors"]
    ended = finish(start(words, 3, folder=home, hooks=dict.fromkeys(range(3), COUNT)))
    assert [e.code for e in ended] == [0, 0, 0], ended
    shares = [int(e.complained.split()[0]) for e in ended]
    assert sum(shares) == 700 * 511 * 4
    assert max(shares) - min(shares) <= 2 * 65536
    threads = [int(e.complained.split()[1]) for e in ended]
    cores = len(os.sched_getaffinity(0))
    assert threads == [max(1, min(8, cores // 3))] * 3


def test_what_rank_1_finds_is_said_by_rank_0(home: Path, tmp_path: Path) -> None:
    values = torch.ones(200_000)
    values[-1] = torch.nan
    save_file({"w": values}, tmp_path / "step_1.safetensors")
    words = ["average", "step_1.safetensors", "-o", "m.safetensors"]
    ended = finish(start(words, 2, folder=tmp_path))
    assert [e.code for e in ended] == [0, 0]
    assert "the mean of 'w' contains NaN or Inf" in ended[0].complained
    assert ended[1].complained == ""


def test_overwriting_follows_the_same_rules(home: Path, tmp_path: Path) -> None:
    words = ["average", "tiny", "--last", 2, "-o", tmp_path / "m"]
    (tmp_path / "m").mkdir()
    save_file({"w": torch.zeros(3)}, tmp_path / "m" / "model.safetensors")
    ended = finish(start(words, 2, folder=home))
    assert [e.code for e in ended] == [1, 1]
    assert ended[0].complained.startswith(f"Error: {tmp_path / 'm'}: already exists")
    assert ended[1].complained.startswith(f"Error: rank 0 failed: {tmp_path / 'm'}: already exists")
    ended = finish(start([*words, "--overwrite"], 2, folder=home))
    assert [e.code for e in ended] == [0, 0]
    assert load_file(tmp_path / "m" / "model.safetensors")["w"].tolist() == [1.5] * 3
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_a_dry_run_is_printed_once(home: Path) -> None:
    words = ["average", "tiny", "--last", 2, "-o", "m", "--dry-run", "--json"]
    ended = finish(start(words, 2, folder=home))
    assert [e.code for e in ended] == [0, 0]
    assert len(json.loads(ended[0].said)["inputs"]) == 2
    assert (ended[1].said, ended[1].complained) == ("", "")


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["average", "tiny", "--last", 2, "-o", "memory://m"], "writing to a URL"),
        (["sweep", "tiny", "--k", 2, "-o", "s"], "a sweep"),
        (["watch", "tiny", "-o", "w", "--once"], "watching a run"),
    ],
)
def test_the_work_of_one_process_is_refused_once(
    home: Path, words: list[object], what: str
) -> None:
    ended = finish(start(words, 2, folder=home))
    assert [e.code for e in ended] == [1, 1]
    assert f"{what} is the work of one process" in ended[0].complained
    assert (ended[1].said, ended[1].complained) == ("", "")
    assert sorted(p.name for p in home.iterdir()) == ["run", "tiny"]
