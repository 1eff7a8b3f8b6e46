"""`lawa average` on several ranks: the bytes of one process, and rank 0 alone prints."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.command import contents, end_all, environment, finish, make_run, one_process, start


@pytest.fixture(autouse=True)
def _end_all() -> Iterator[None]:
    yield
    end_all()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
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
    "fewer values than ranks": (["tiny", "--last", 2, "-o", "OUT"], 4),
}


@pytest.mark.parametrize("case", CASES)
def test_the_same_bytes_as_one_process(home: Path, tmp_path: Path, case: str) -> None:
    words, size = CASES[case]
    outs = [tmp_path / f"{n}/{words[words.index('-o') + 1]}" for n in (1, size)]
    one, many = (
        ["average", *(out if str(w).startswith("OUT") else w for w in words)] for out in outs
    )
    expected = one_process(one, home)
    assert expected.code == 0, expected.stderr
    ended = finish(start(many, size, folder=home))
    assert [e.code for e in ended] == [0] * size, ended
    assert contents(outs[1]) == contents(outs[0])
    assert [p.name for p in outs[1].parent.iterdir()] == [outs[1].name]
    assert ended[0].stdout.startswith(f"{outs[1]}: the mean of")
    assert ended[0].stderr == expected.stderr
    assert all((e.stdout, e.stderr) == ("", "") for e in ended[1:])


def test_a_checkpoint_with_nan_is_named_as_by_one_process(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    for step, last in ((1, 0.0), (2, torch.nan)):
        tensors = {name: torch.zeros(100_000) for name in "abcd"}
        for tensor in tensors.values():
            tensor[-1] = last
        save_file(tensors, tmp_path / f"run/step_{step}.safetensors")
    words = ["average", "run", "--last", 2, "-o", "mean.safetensors"]
    expected = one_process(words, tmp_path).stderr
    assert "so does run/step_2.safetensors." in expected
    ended = finish(start([*words, "--overwrite"], 2, folder=tmp_path))
    assert [(e.code, e.stderr) for e in ended] == [(0, expected), (0, "")]


def test_torchrun(home: Path, tmp_path: Path) -> None:
    words = ["average", "run", "--last", "3", "--json", "-o"]
    assert one_process([*words, tmp_path / "one"], home).code == 0
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         "-m", "torch_lawa", *words, str(tmp_path / "two")],
        cwd=home, env=environment(), capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["output"] == str(tmp_path / "two")
    assert contents(tmp_path / "two") == contents(tmp_path / "one")


def test_without_torchrun_rank_0_hosts_the_store(home: Path, tmp_path: Path) -> None:
    words = ["average", "tiny", "--last", 2, "-o", tmp_path / "m.safetensors"]
    ended = finish(start(words, 3, folder=home, rank_0_hosts=True))
    assert [(e.code, e.stderr) for e in ended] == [(0, "")] * 3
    assert load_file(tmp_path / "m.safetensors")["w"].tolist() == [1.5] * 3


def test_formats_of_pytorch(home: Path, tmp_path: Path) -> None:
    """All ranks read them, rank 0 writes them."""
    for step in (1, 2):
        weight = torch.randn(400, 300)
        torch.save({"model": {"w": weight, "tied": weight}}, tmp_path / f"step_{step}.pt")
    save_file({"w": torch.randn(400, 300)}, tmp_path / "a.safetensors")
    words: list[object] = ["average", "a.safetensors", "--layout", "distributed", "-o", "dcp"]
    assert one_process(words, tmp_path).code == 0
    for words in (["step_1.pt", "step_2.pt", "-o", "OUT.pt"], ["dcp", "-o", "OUT.safetensors"]):
        one, many = ([str(w).replace("OUT", n) for w in words] for n in ("one", "many"))
        assert one_process(["average", *one], tmp_path).code == 0
        ended = finish(start(["average", *many], 2, folder=tmp_path))
        assert [e.code for e in ended] == [0, 0], ended
        made = [tmp_path / names[-1] for names in (one, many)]
        if made[0].suffix == ".pt":  # the name of a PyTorch file is also inside it
            a, b = (torch.load(path)["model"] for path in made)
            assert a.keys() == b.keys() == {"w", "tied"}
            assert torch.equal(a["w"], b["w"])
            assert b["w"].data_ptr() == b["tied"].data_ptr()
        else:
            assert contents(made[0]) == contents(made[1])


@pytest.mark.parametrize("size", [1, 3])
def test_digests_belong_to_their_checkpoint(tmp_path: Path, size: int) -> None:
    """Though the name of one checkpoint is the beginning of another's."""
    for step in (5, 50, 500):
        folder = tmp_path / "run" / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        save_file({"w": torch.full((9,), float(step))}, folder / "model.safetensors")
    words: list[object] = ["average", "run", "--last", 3, "--digests", "-o", "m.safetensors"]
    if size == 1:
        assert one_process(words, tmp_path).code == 0
    else:
        assert [e.code for e in finish(start(words, size, folder=tmp_path))] == [0] * size
    with safe_open(tmp_path / "m.safetensors", "pt") as file:
        inputs = json.loads(file.metadata()["torch_lawa"])["inputs"]
    for step, entry in zip((5, 50, 500), inputs, strict=True):
        path = f"run/checkpoint-{step}/model.safetensors"
        digest = hashlib.sha256((tmp_path / path).read_bytes()).hexdigest()
        assert entry["sha256"] == {path: digest}


COUNT = """
import atexit, sys
from torch_lawa.offline import multi_process, output_files
num_bytes, real_write = [], output_files.SafetensorsSink.write
real_average = multi_process.average_spans
def write(self, name, begin, piece):
    num_bytes.append(len(piece))
    real_write(self, name, begin, piece)
def average(*args, threads, **kwargs):
    made = real_average(*args, threads=threads, **kwargs)
    print(sum(num_bytes), threads, file=sys.stderr)
    return made
output_files.SafetensorsSink.write = write
multi_process.average_spans = average
"""


def test_the_work_is_shared(home: Path, tmp_path: Path) -> None:
    """There is only one tensor, and still each rank makes about a third of it."""
    words = ["average", "run", "--last", 3, "--include", "embed", "-o", tmp_path / "m.safetensors"]
    ended = finish(start(words, 3, folder=home, hooks=dict.fromkeys(range(3), COUNT)))
    assert [e.code for e in ended] == [0, 0, 0], ended
    shares = [int(e.stderr.split()[0]) for e in ended]
    assert sum(shares) == 700 * 511 * 4
    assert max(shares) - min(shares) <= 2 * 65536
    threads = [int(e.stderr.split()[1]) for e in ended]
    cores = len(os.sched_getaffinity(0))
    assert threads == [max(1, min(8, cores // 3))] * 3


def test_rank_0_reports_what_rank_1_finds(home: Path, tmp_path: Path) -> None:
    values = torch.ones(200_000)
    values[-1] = torch.nan
    save_file({"w": values}, tmp_path / "step_1.safetensors")
    words: list[object] = ["average", "step_1.safetensors", "-o", "m.safetensors"]
    ended = finish(start(words, 2, folder=tmp_path))
    assert [e.code for e in ended] == [0, 0]
    assert "the mean of 'w' contains NaN or Inf" in ended[0].stderr
    assert ended[1].stderr == ""


def test_overwriting_follows_the_same_rules(home: Path, tmp_path: Path) -> None:
    words: list[object] = ["average", "tiny", "--last", 2, "-o", tmp_path / "m"]
    (tmp_path / "m").mkdir()
    save_file({"w": torch.zeros(3)}, tmp_path / "m" / "model.safetensors")
    ended = finish(start(words, 2, folder=home))
    assert [e.code for e in ended] == [1, 1]
    assert ended[0].stderr.startswith(f"Error: {tmp_path / 'm'}: already exists")
    assert ended[1].stderr.startswith("Error: rank 0 failed")
    assert "already exists" in ended[1].stderr
    ended = finish(start([*words, "--overwrite"], 2, folder=home))
    assert [e.code for e in ended] == [0, 0]
    assert load_file(tmp_path / "m" / "model.safetensors")["w"].tolist() == [1.5] * 3
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_a_dry_run_is_printed_once(home: Path) -> None:
    words: list[object] = ["average", "tiny", "--last", 2, "-o", "m", "--dry-run", "--json"]
    ended = finish(start(words, 2, folder=home))
    assert [e.code for e in ended] == [0, 0]
    assert len(json.loads(ended[0].stdout)["inputs"]) == 2
    assert (ended[1].stdout, ended[1].stderr) == ("", "")


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
    assert [e.code for e in ended] == [2, 1]
    assert f"{what} is the work of one process" in ended[0].stderr
    assert (ended[1].stdout, ended[1].stderr) == ("", "")
    assert sorted(p.name for p in home.iterdir()) == ["run", "tiny"]
