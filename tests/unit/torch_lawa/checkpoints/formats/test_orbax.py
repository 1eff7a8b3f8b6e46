"""Orbax checkpoints without tensorstore: how they are found, what their trees say, and errors.

The folders in tests/jax_checkpoints/recorded were written by Orbax; tests/jax_checkpoints reads
and writes such folders with tensorstore.
"""

import json
import math
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.damage import damaged_documents

from torch_lawa import AverageOptions, average_checkpoints
from torch_lawa.checkpoints.find.discovery import find_checkpoints
from torch_lawa.checkpoints.formats.base import TensorSpec
from torch_lawa.checkpoints.formats.orbax import Rows
from torch_lawa.checkpoints.formats.orbax_tree import choose_weights, find_step, read_items
from torch_lawa.checkpoints.formats.registry import checkpoint_parts, open_checkpoint
from torch_lawa.checkpoints.formats.safetensors_torch import save_tensors
from torch_lawa.checkpoints.replacement import require_replaceable
from torch_lawa.checkpoints.storage.paths import LocalPath
from torch_lawa.errors import ConfigError, FormatError, LawaError, OutputError

RECORDED = Path(__file__).parents[4] / "jax_checkpoints" / "recorded"
RUN, FILES = RECORDED / "run", RECORDED / "files"


def write_item(folder: Path, *paths: str) -> Path:
    """An item without arrays: paths have slashes between their keys."""
    folder.mkdir(parents=True)
    tree = {
        path: {
            "key_metadata": [{"key": key, "key_type": 2} for key in path.split("/")],
            "value_metadata": {"value_type": "jax.Array", "skip_deserialize": False},
        }
        for path in paths
    }
    (folder / "_METADATA").write_text(json.dumps({"tree_metadata": tree}))
    return folder


def chosen(folder: Path, key: str | None = None) -> tuple[str, list[str]]:
    found = choose_weights(read_items(LocalPath(folder)), folder, key)
    return found.key, list(found.leaves)


def test_a_run_is_found_and_unfinished_checkpoints_are_not(tmp_path: Path) -> None:
    run = shutil.copytree(RUN, tmp_path / "run")
    shutil.copytree(RUN / "20", run / "30.orbax-checkpoint-tmp")
    shutil.copytree(RUN / "20", run / "40.orbax-checkpoint-tmp-1700000000")
    found = find_checkpoints([run])
    assert [each.step for each in found.found] == [10, 20]
    assert found.is_run
    assert "unfinished" in found.notes[0]
    single = find_checkpoints([shutil.copytree(FILES, tmp_path / "step-30")])
    assert not single.is_run
    assert [each.label for each in single.found] == ["step 30"]


@pytest.mark.parametrize("command", ["average", "open"])
def test_without_tensorstore_the_error_says_what_to_install(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorstore", None)
    with pytest.raises(ConfigError, match=r"tensorstore.*torch-lawa\[orbax\]"):
        if command == "open":
            open_checkpoint(LocalPath(FILES))
        else:
            average_checkpoints(RUN, tmp_path / "out", last=2)
    assert not list(tmp_path.iterdir())


def test_the_params_of_a_train_state_are_the_weights() -> None:
    items = read_items(LocalPath(RUN / "20"))
    found = choose_weights(items, RUN)
    assert list(found.leaves) == ["dense.bias", "dense.kernel"]
    assert found.key == "params"
    assert "'opt_state', 'step'" in found.notes[0]
    assert find_step(items[0], found.key) is not None
    assert json.loads(found.key_map)["dense.kernel"] == ["params", "dense", "kernel"]


def test_lists_keep_their_numbers_and_texts_are_no_arrays() -> None:
    items = read_items(LocalPath(FILES))
    found = choose_weights(items, FILES)
    paths = json.loads(found.key_map)
    assert paths["layers.1"] == ["params", "layers", 1]
    assert paths["a.b"] == ["params", "a.b"]
    assert found.leaves["a.b"].stored == "params.a.b"
    assert "note" not in [leaf.keys[0] for leaf in items[0].leaves]


@pytest.mark.parametrize(
    ("paths", "key", "expected"),
    [
        (["w", "b/c"], None, ("", ["w", "b.c"])),
        (["state/params/w", "state/opt_state/w"], None, ("state.params", ["w"])),
        (["model/w", "opt_state/w", "step"], None, ("model", ["w"])),
        (["params/params/w", "opt_state/w"], None, ("params", ["params.w"])),
        (["params/w", "ema/w"], "ema", ("ema", ["w"])),
        (["params/w", "opt_state/w"], ".", ("", ["params.w", "opt_state.w"])),
        (["params/a.b/w", "step"], "params.a.b", ("params.a.b", ["w"])),
    ],
)
def test_which_part_of_a_tree_is_chosen(
    paths: list[str], key: str | None, expected: tuple[str, list[str]], tmp_path: Path
) -> None:
    assert chosen(write_item(tmp_path / "item", *paths), key) == expected


@pytest.mark.parametrize(
    ("paths", "key", "message"),
    [
        (["weights/w", "opt_state/w"], None, "choose with --key from: 'opt_state', 'weights'"),
        (["weights/w", "step"], None, "choose with --key"),
        (["params/w"], "ema", "no arrays under the key 'ema'"),
        (["a/b/c", "a.b/c"], None, r"two arrays have the name 'a\.b\.c'"),
    ],
)
def test_unclear_trees_are_refused(
    paths: list[str], key: str | None, message: str, tmp_path: Path
) -> None:
    with pytest.raises(FormatError, match=message):
        chosen(write_item(tmp_path / "item", *paths), key)


def test_arrays_outside_of_the_folder_are_refused(tmp_path: Path) -> None:
    folder = write_item(tmp_path / "item", "params/w")
    file = folder / "_METADATA"
    file.write_text(file.read_text().replace('"key": "w"', '"key": "w/../../other"'))
    with pytest.raises(FormatError, match="damaged"):
        chosen(folder)


def test_items_of_a_step(tmp_path: Path) -> None:
    step = tmp_path / "100"
    write_item(step / "params", "dense/w")
    write_item(step / "optimizer", "mu/w")
    assert chosen(step) == ("params", ["dense.w"])
    assert chosen(step, "optimizer.mu") == ("optimizer.mu", ["w"])
    write_item(step / "state", "params/w", "step")
    with pytest.raises(FormatError, match=r"'state\.params'"):
        chosen(step)
    assert chosen(step, "state.params") == ("state.params", ["w"])
    (tmp_path / "old").mkdir()
    with pytest.raises(FormatError, match="Orbax older"):
        read_items(LocalPath(tmp_path / "old"))


def test_damaged_trees_are_errors(tmp_path: Path) -> None:
    folder = write_item(tmp_path / "item", "params/w", "step")
    text = (folder / "_METADATA").read_text()
    errors = []
    for damaged in damaged_documents(text):
        (folder / "_METADATA").write_text(damaged)
        try:
            chosen(folder)
        except LawaError as error:
            errors.append(str(error))
    assert len(errors) > 10
    assert all("item" in error for error in errors)


def test_parts_of_a_folder_may_be_replaced_and_nothing_else(tmp_path: Path) -> None:
    step = shutil.copytree(RUN / "20", tmp_path / "20")
    require_replaceable(LocalPath(step), is_file=False)
    require_replaceable(LocalPath(shutil.copytree(FILES, tmp_path / "files")), is_file=False)
    is_part = checkpoint_parts(LocalPath(step))
    assert is_part("default")
    assert is_part("_CHECKPOINT_METADATA")
    assert not is_part("d")  # an item has it, a step does not
    (step / "plots").mkdir()
    with pytest.raises(OutputError, match="plots"):
        require_replaceable(LocalPath(step), is_file=False)


def test_other_inputs_cannot_become_orbax_checkpoints(tmp_path: Path) -> None:
    import torch

    save_tensors(tmp_path / "a.safetensors", {"w": torch.ones(2)})
    save_tensors(tmp_path / "b.safetensors", {"w": torch.ones(2)})
    inputs = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    with pytest.raises(ConfigError, match="another format"):
        average_checkpoints(inputs, tmp_path / "out", options=AverageOptions(layout="orbax"))


class Stored(np.ndarray):
    """An array with chunks, as far as `Rows` looks at it."""

    chunk_layout: Any


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 4)), max_size=4),
    st.sampled_from([1, 16, 200, 1 << 23]),
)
def test_rows_of_chunks_are_the_values_in_order(axes: list[tuple[int, int]], target: int) -> None:
    shape, chunk = tuple(n for n, _ in axes), tuple(min(n, c) for n, c in axes)
    values = np.arange(math.prod(shape), dtype=np.int32).reshape(shape).view(Stored)
    values.chunk_layout = SimpleNamespace(read_chunk=SimpleNamespace(shape=chunk))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch_lawa.checkpoints.formats.orbax._ROWS", target)
        rows = Rows(values, TensorSpec("I32", shape))
    end = 0
    for at in range(rows.num):
        begin, stop = rows.span(at)
        part = np.asarray(rows.box(at))
        assert begin == end
        assert part.tobytes() == values.tobytes()[begin:stop]
        assert {rows.around(offset) for offset in range(begin, stop)} == {(at, begin, stop)}
        end = stop
    assert end == values.nbytes
