"""Results in a bucket: replaced when asked, and never half there."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load
from support.s3 import assert_equal, make_states, names_in, read_shards, write_shards

Lawa = Callable[..., tuple[int, str, str]]

KILLED = """
import os, signal, sys
from torch_lawa.checkpoints.storage.paths import RemoteURL
from torch_lawa.cli.main import main
upload, done = RemoteURL.upload, []
def until_killed(self, path):
    if len(done) == int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGKILL)
    done.append(upload(self, path))
RemoteURL.upload = until_killed
main(sys.argv[2:])
"""


def test_overwriting(fs: Any, bucket: str, lawa: Lawa, tmp_path: Path) -> None:
    url, states = f"s3://{bucket}", make_states()
    write_shards(fs, f"{bucket}/a/checkpoint-1", states[0])
    write_shards(fs, f"{bucket}/b/checkpoint-1", states[1], per_shard=2)
    torch.save(states[1], tmp_path / "old.bin")
    fs.put_file(tmp_path / "old.bin", f"{bucket}/out/pytorch_model.bin")  # another's, and stale
    fs.pipe(f"{bucket}/out/README.md", b"keep me")
    fs.pipe(f"{bucket}/out/trainer_state.json", b'{"global_step": 7}')
    first = ("average", f"{url}/a/checkpoint-1", "-o", f"{url}/out")
    code, _, complained = lawa(*first)
    assert code == 1
    assert f"{url}/out: already exists. Pass --overwrite to replace it." in complained
    assert lawa(*first, "--overwrite")[0] == 0
    assert_equal(read_shards(fs, f"{bucket}/out"), states[0])
    assert names_in(fs, f"{bucket}/out")[0] == "README.md"
    assert not fs.exists(f"{bucket}/out/pytorch_model.bin")
    assert not fs.exists(f"{bucket}/out/trainer_state.json")
    assert lawa("average", f"{url}/b/checkpoint-1", "-o", f"{url}/out", "--overwrite")[0] == 0
    assert_equal(read_shards(fs, f"{bucket}/out"), states[1])
    assert [n for n in names_in(fs, f"{bucket}/out") if n.endswith("safetensors")] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    one = f"{url}/one.safetensors"
    assert lawa("average", f"{url}/a/checkpoint-1", "-o", one)[0] == 0
    assert lawa("average", f"{url}/b/checkpoint-1", "-o", one)[0] == 1
    assert_equal(load(fs.cat_file(one)), states[0])
    assert lawa("average", f"{url}/b/checkpoint-1", "-o", one, "--overwrite")[0] == 0
    assert_equal(load(fs.cat_file(one)), states[1])


@pytest.mark.parametrize("uploads", [0, 2, 5])
def test_a_failed_upload_leaves_nothing(
    fs: Any, bucket: str, lawa: Lawa, uploads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_shards(fs, f"{bucket}/a/checkpoint-1", make_states()[0])  # 4 shards, config and index
    put, done = fs.put_file, []

    def failing(*args: Any, **kwargs: Any) -> None:
        if len(done) == uploads:
            raise OSError("Internal Error")
        done.append(put(*args, **kwargs))

    monkeypatch.setattr(fs, "put_file", failing)
    words = ("average", f"s3://{bucket}/a/checkpoint-1", "-o", f"s3://{bucket}/out")
    code, _, complained = lawa(*words)
    assert code == 1
    assert "the server failed (OSError: Internal Error). Try again. The file was not written" in (
        complained
    )
    assert len(done) == uploads
    assert names_in(fs, f"{bucket}/out") == []


@pytest.mark.parametrize("older", [False, True])
def test_killed_while_uploading(
    fs: Any, bucket: str, lawa: Lawa, older: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, states = f"s3://{bucket}", make_states()
    write_shards(fs, f"{bucket}/a/checkpoint-1", states[0])
    if older:
        write_shards(fs, f"{bucket}/out", states[1])
    words = ["average", f"{url}/a/checkpoint-1", "-o", f"{url}/out", "--overwrite"]
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    done = subprocess.run([sys.executable, "-c", KILLED, "3", *words], capture_output=True)
    assert done.returncode == -9, done.stderr
    assert len(list(tmp_path.glob("lawa-upload.*"))) == 1
    left = names_in(fs, f"{bucket}/out")
    assert sum(name.endswith(".safetensors") for name in left) == (4 if older else 2)
    assert "model.safetensors.index.json" not in left  # so half old, half new is no checkpoint
    code, _, complained = lawa("inspect", f"{url}/out")
    assert code == 1
    assert "no checkpoint here" in complained
    done = subprocess.run([sys.executable, "-m", "torch_lawa", *words], capture_output=True)
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.glob("lawa-upload.*"))  # what the killed one left on this disk, too
