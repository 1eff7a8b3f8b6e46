"""Sharded folders: what is read, and what an index may not claim."""

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from torch_lawa.checkpoints.formats.registry import open_checkpoint
from torch_lawa.checkpoints.storage.paths import LocalPath
from torch_lawa.errors import FormatError

INDEX = "model.safetensors.index.json"
GOOD = {"a": "one.safetensors", "b": "two.safetensors"}


def folder(path: Path, weight_map: Any = GOOD) -> Path:
    save_file({"a": torch.ones(2)}, path / "one.safetensors")
    save_file({"b": torch.zeros(3)}, path / "two.safetensors")
    (path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return path


def test_shards_are_one_checkpoint(tmp_path: Path) -> None:
    with open_checkpoint(LocalPath(folder(tmp_path))) as found:
        assert {name: str(spec) for name, spec in found.tensors.items()} == {
            "a": "F32[2]",
            "b": "F32[3]",
        }
        assert found.layout == "sharded"
        assert found.file_of("b").name == "two.safetensors"
        assert found.read("a", 0, 8).tobytes() == torch.ones(2).numpy().tobytes()


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": "/etc/passwd"}, "a shard must be a file in the same folder"),
        ({"a": "../one.safetensors"}, "a shard must be a file in the same folder"),
        ({"a": "sub/one.safetensors"}, "a shard must be a file in the same folder"),
        ({"a": "..\\one.safetensors"}, "a shard must be a file in the same folder"),
        ({"a": ".."}, "a shard must be a file in the same folder"),
        ({"a": ""}, "a shard must be a file in the same folder"),
        ({"a": 3}, "a shard must be a file in the same folder"),
        ({"a": "gone.safetensors"}, "names the shard 'gone.safetensors', which does not exist"),
        ({"a": "long" * 100 + ".safetensors"}, "names the shard .* does not exist"),
        ({**GOOD, "c": "one.safetensors"}, "names 'c', which is not in this file"),
        ({"b": "one.safetensors", "a": "one.safetensors"}, "names 'b', which is not in this file"),
        ({}, "no weight_map"),
        ([1], "no weight_map"),
        (None, "no weight_map"),
    ],
)
def test_an_index_that_lies(tmp_path: Path, weight_map: Any, message: str) -> None:
    with pytest.raises(FormatError, match=message) as caught:
        open_checkpoint(LocalPath(folder(tmp_path, weight_map)))
    assert str(tmp_path) in str(caught.value)


def test_a_tensor_that_the_index_forgot(tmp_path: Path) -> None:
    folder(tmp_path)
    save_file({"a": torch.ones(2), "x": torch.ones(1)}, tmp_path / "one.safetensors")
    with pytest.raises(FormatError, match=r"one.safetensors: contains 'x', which"):
        open_checkpoint(LocalPath(tmp_path))


def test_a_shard_that_is_broken_is_named(tmp_path: Path) -> None:
    folder(tmp_path)
    (tmp_path / "two.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(FormatError, match=r"two.safetensors: not a complete safetensors file"):
        open_checkpoint(LocalPath(tmp_path))


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.binary(max_size=60)
    | st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inside: (
            st.lists(inside, max_size=3)
            | st.dictionaries(st.sampled_from(["weight_map", "a", "b"]), inside, max_size=3)
        ),
        max_leaves=8,
    ).map(lambda value: json.dumps(value).encode())
)
def test_any_index_is_read_or_refused(tmp_path: Path, content: bytes) -> None:
    folder(tmp_path)
    (tmp_path / INDEX).write_bytes(content)
    with contextlib.suppress(FormatError):
        open_checkpoint(LocalPath(tmp_path)).close()


def test_a_file_that_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("")
    for name, message in (
        ("notes.txt", "not a checkpoint by its name"),
        ("gone", "no such file or folder"),
        (".", "no checkpoint here"),
    ):
        with pytest.raises(FormatError, match=message):
            open_checkpoint(LocalPath(tmp_path / name))


def test_progress_of_the_trainer(tmp_path: Path) -> None:
    folder(tmp_path)
    (tmp_path / "trainer_state.json").write_text('{"global_step": 70, "epoch": 2.5}')
    with open_checkpoint(LocalPath(tmp_path)) as found:
        assert (found.progress.step, found.progress.epoch) == (70, None)
    (tmp_path / "trainer_state.json").write_text('{"global_step": "x", "epoch": 2.0}')
    with open_checkpoint(LocalPath(tmp_path)) as found:
        assert (found.progress.step, found.progress.epoch) == (None, 2)
    (tmp_path / "trainer_state.json").write_text('{"epoch": NaN}')
    with open_checkpoint(LocalPath(tmp_path)) as found:
        assert (found.progress.step, found.progress.epoch) == (None, None)
