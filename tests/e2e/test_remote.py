"""Runs in a bucket are averaged and inspected; what goes wrong is told in a line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
import s3fs
import torch
from safetensors.torch import load, save, save_file
from support.s3 import (
    STEPS,
    State,
    assert_equal,
    make_states,
    mean_of,
    names_in,
    read_shards,
    start_server,
    write_shards,
)

from torch_lawa.checkpoints.formats.registry import open_checkpoint
from torch_lawa.checkpoints.storage.paths import parse_location

Lawa = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(fs: Any, bucket: str) -> tuple[str, list[State]]:
    states = make_states()
    for step, state in zip(STEPS, states, strict=True):
        fs.pipe(f"{bucket}/run/step_{step}.safetensors", save(state))
    fs.pipe(f"{bucket}/run/log.txt", b"a line")
    return f"s3://{bucket}", states


def test_from_a_bucket_to_here_and_back(
    fs: Any, run: tuple[str, list[State]], lawa: Lawa, tmp_path: Path
) -> None:
    url, states = run
    here = tmp_path / "mean.safetensors"
    assert lawa("average", f"{url}/run", "--last", 3, "-o", here)[0] == 0
    assert_equal(load(here.read_bytes()), mean_of(states[1:]))
    there = f"{url}/out/mean.safetensors"
    code, said, _ = lawa("average", f"{url}/run", "--last", 3, "-o", there)
    assert code == 0
    assert said.startswith(f"{there}: the mean of 3 checkpoints, step 200 to step 400.")
    assert_equal(load(fs.cat_file(there)), mean_of(states[1:]))
    assert names_in(fs, f"{url}/out") == ["mean.safetensors"]
    for step, state in zip(STEPS, states, strict=True):  # the same from files here, to the byte
        save_file(state, tmp_path / f"step_{step}.safetensors")
    again = tmp_path / "again.safetensors"
    inputs = [tmp_path / f"step_{step}.safetensors" for step in STEPS[1:]]
    assert lawa("average", *inputs, "-o", again)[0] == 0
    tail = sum(t.nbytes for t in states[0].values())
    assert again.read_bytes()[-tail:] == here.read_bytes()[-tail:] == fs.cat_file(there)[-tail:]


def test_patterns_and_pytorch_files(
    fs: Any, run: tuple[str, list[State]], lawa: Lawa, tmp_path: Path
) -> None:
    url, states = run
    out = tmp_path / "a.safetensors"
    assert lawa("average", f"{url}/run/step_[12]*.safetensors", "-o", out)[0] == 0
    assert_equal(load(out.read_bytes()), mean_of(states[:2]))
    for step, state in zip(STEPS, states, strict=True):
        torch.save({"model": state, "step": step}, tmp_path / "a.pt")
        fs.put_file(tmp_path / "a.pt", f"{url}/torch/step_{step}.pt")
    out = tmp_path / "b.safetensors"
    assert lawa("average", f"{url}/torch", "--last", 2, "-o", out)[0] == 0
    assert_equal(load(out.read_bytes()), mean_of(states[2:]))


def test_sharded_folders(fs: Any, bucket: str, lawa: Lawa, tmp_path: Path) -> None:
    states = make_states()[:3]
    for step, state in zip(STEPS, states, strict=False):
        write_shards(fs, f"{bucket}/run/checkpoint-{step}", state, per_shard=2)
    url = f"s3://{bucket}"
    assert lawa("average", f"{url}/run", "--last", 2, "-o", f"{url}/out")[0] == 0
    assert_equal(read_shards(fs, f"{bucket}/out"), mean_of(states[1:]))
    assert names_in(fs, f"{bucket}/out") == [
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    assert lawa("average", f"{url}/run", "--last", 2, "-o", tmp_path / "out")[0] == 0
    code, said, _ = lawa("inspect", f"{url}/out", tmp_path / "out")
    assert (code, said.splitlines()[-1]) == (0, "Identical, bit for bit.")


def test_a_listing_saves_requests(fs: Any, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write_shards(fs, f"{bucket}/sharded", make_states()[0])
    asked: list[str] = []
    original = fs._call_s3

    async def counting(method: str, *args: Any, **kwargs: Any) -> Any:
        asked.append(method)
        return await original(method, *args, **kwargs)

    monkeypatch.setattr(fs, "_call_s3", counting)
    with open_checkpoint(parse_location(f"s3://{bucket}/sharded")) as opened:
        assert len(opened.files) == 4
    # Nothing is asked about a shard before its header, which takes two requests.
    assert asked.count("get_object") == 1 + 2 * 4
    assert len(asked) - asked.count("get_object") <= 5


def test_inspect(run: tuple[str, list[State]], lawa: Lawa) -> None:
    url, states = run
    code, said, _ = lawa("inspect", f"{url}/run")
    assert code == 0
    assert said.startswith(f"{url}/run: 4 checkpoints, oldest first (by step)")
    a, b = f"{url}/run/step_100.safetensors", f"{url}/run/step_200.safetensors"
    assert json.loads(lawa("inspect", a, "--json")[1])["num_values"] == 35 + 1200 + 30 + 1
    found = json.loads(lawa("inspect", a, b, "--json")[1])
    x, y = (s["block.w"].double() for s in states[:2])
    numbers = {t["name"]: t for t in found["tensors"]}
    assert numbers["block.w"]["max_abs"] == (x - y).abs().max().item()
    assert numbers["steps"]["max_abs"] == 100


def test_only_ranges_are_fetched(
    fs: Any, bucket: str, lawa: Lawa, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = torch.arange(1000.0)
    save_file({"big": torch.zeros(5_000_000), "small": small}, tmp_path / "a.safetensors")
    fs.put_file(tmp_path / "a.safetensors", f"{bucket}/a.safetensors")
    fetched: list[int] = []
    original = fs.cat_file

    def counting(*args: Any, **kwargs: Any) -> bytes:
        fetched.append(len(found := original(*args, **kwargs)))
        return found

    monkeypatch.setattr(fs, "cat_file", counting)
    out = tmp_path / "out.safetensors"
    words = ("average", f"s3://{bucket}/a.safetensors", "--include", "small", "-o", out)
    assert lawa(*words)[0] == 0
    assert_equal(load(out.read_bytes()), {"small": small})
    assert small.nbytes < sum(fetched) < small.nbytes + 4000
    assert fs.size(f"{bucket}/a.safetensors") > 20_000_000


def test_what_was_listed_is_not_believed_for_ever(fs: Any, bucket: str) -> None:
    other = s3fs.S3FileSystem(skip_instance_cache=True)  # another process
    other.call_s3("put_object", Bucket=bucket, Key="run/", Body=b"")  # as consoles mark a folder
    other.pipe(f"{bucket}/run/a.bin", b"old")
    run = parse_location(f"s3://{bucket}/run")
    (file,) = run.children()
    before = file.stamp()
    assert file.name == "a.bin"
    assert [p.name for p in run.children()] == ["a.bin"]  # which is remembered
    other.pipe(f"{bucket}/run/a.bin", b"newer")
    other.pipe(f"{bucket}/run/b.bin", b"x")
    assert file.read_bytes() == b"newer"
    assert file.stamp() != before
    assert run.child("b.bin").exists()
    assert [p.name for p in run.children()] == ["a.bin", "b.bin"]
    other.pipe(f"{bucket}/run/c.bin", b"x")
    assert parse_location(f"s3://{bucket}/run/c.bin").is_file()


def complaint(lawa: Lawa, *words: object) -> str:
    code, said, complained = lawa(*words)
    assert (code in (1, 2), said) == (True, "")
    assert complained.startswith("Error: ")
    assert complained.count("\n") == 1
    return complained


def test_what_is_not_there(run: tuple[str, list[State]], lawa: Lawa, tmp_path: Path) -> None:
    url, out = run[0], tmp_path / "out.safetensors"
    for location in (f"{url}/nothing", f"{url}/run/step_900.safetensors"):
        said = complaint(lawa, "average", location, "-o", out)
        assert f"{location}: there is no such file or folder" in said
    said = complaint(lawa, "average", f"{url}/run/nothing_*.pt", "-o", out)
    assert "no checkpoint matches this pattern" in said
    for location in ("s3://no-such-bucket/run", "s3://no-such-bucket", "s3://no-such-bucket/a*.pt"):
        said = complaint(lawa, "average", location, "--last", 2, "-o", out)
        assert f"{location}: the bucket s3://no-such-bucket does not exist" in said
        assert "AWS_ENDPOINT_URL" in said
    # Known before anything is averaged.
    said = complaint(lawa, "average", f"{url}/run", "--last", 2, "-o", "s3://no-such-bucket/out",
                     "--dry-run")  # fmt: skip
    assert "the bucket s3://no-such-bucket does not exist" in said


def test_without_credentials(
    run: tuple[str, list[State]], lawa: Lawa, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    s3fs.S3FileSystem.clear_instance_cache()
    said = complaint(lawa, "inspect", f"{run[0]}/run")
    assert f"{run[0]}/run: no credentials" in said
    assert "AWS_ACCESS_KEY_ID" in said


def test_what_is_not_allowed(
    run: tuple[str, list[State]], lawa: Lawa, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(fsspec.config.conf, "s3", {"anon": True})  # FSSPEC_S3_ANON=true
    said = complaint(lawa, "inspect", f"{run[0]}/run")
    assert "permission denied" in said
    assert f"{run[0]}/run/step_" in said


def test_the_server_goes_away(
    fs: Any, lawa: Lawa, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, url = start_server()
    monkeypatch.setenv("AWS_ENDPOINT_URL", url)
    s3fs.S3FileSystem.clear_instance_cache()
    own = s3fs.S3FileSystem()
    own.mkdir("gone")
    for step in STEPS:
        own.pipe(f"gone/run/step_{step}.safetensors", save({"w": torch.randn(400_000)}))
    original, done = own.cat_file, []

    def until_gone(*args: Any, **kwargs: Any) -> Any:
        done.append(1)
        if len(done) == 20:  # headers of four, twice, and some of the values
            server.stop()
        return original(*args, **kwargs)

    monkeypatch.setattr(own, "cat_file", until_gone)
    out = tmp_path / "mean.safetensors"
    words = ("average", "s3://gone/run", "--last", 4, "--threads", 2, "-o", out)
    said = complaint(lawa, *words)
    assert "the server cannot be reached" in said
    assert "s3://gone/run/step_" in said
    assert "try again" in said
    assert list(tmp_path.iterdir()) == []
