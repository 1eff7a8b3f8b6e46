"""Our reader of distributed checkpoints against what PyTorch writes, and against broken folders."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkpoints import assert_holds, raw
from support.distributed import cut_up, quietly, rows, save, save_shards, sharded
from support.models import small_net
from torch import Tensor

from torch_lawa.checkpoints.formats.base import TrainingProgress
from torch_lawa.checkpoints.formats.dcp import DistributedCheckpoint
from torch_lawa.checkpoints.formats.registry import open_checkpoint
from torch_lawa.checkpoints.storage.paths import LocalPath, parse_location
from torch_lawa.errors import FormatError
from torch_lawa.mean.kernels_native import native_library

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
    torch.complex64, torch.int64, torch.int8, torch.uint8, torch.uint16, torch.uint64, torch.bool,
]  # fmt: skip


def test_shards_of_all_kinds_are_put_together(tmp_path: Path) -> None:
    tensors, boxes = sharded()
    save_shards(tmp_path / "a", tensors, boxes)
    with open_checkpoint(LocalPath(tmp_path / "a")) as found:
        assert_holds(found, tensors)
        assert (found.format, found.layout) == ("PyTorch distributed checkpoint", "distributed")
        assert (found.notes, found.aliases) == ((), {})
        files = [tmp_path / "a" / "__0_0.distcp", tmp_path / "a" / "__1_0.distcp"]
        assert found.files == [LocalPath(path) for path in files]
        assert found.file_of("uneven") == LocalPath(files[0])
    # PyTorch agrees that these are such checkpoints.
    again = {name: torch.zeros_like(t) for name, t in tensors.items()}
    quietly(dcp.load, again, checkpoint_id=tmp_path / "a")
    assert all(torch.equal(again[name], t) for name, t in tensors.items())


@pytest.mark.skipif(native_library() is None, reason="files are read, not mapped")
def test_pieces_of_one_chunk_are_views(tmp_path: Path) -> None:
    tensors, boxes = sharded()
    save_shards(tmp_path / "a", tensors, boxes)
    found = DistributedCheckpoint(LocalPath(tmp_path / "a"))
    for begin, end, view in ((0, 80, True), (80, 140, True), (76, 84, False), (0, 140, False)):
        piece = found.read("uneven", begin, end)
        assert piece.tobytes() == raw(tensors["uneven"])[begin:end]
        assert (not piece.flags.writeable) == view
    found.close()


def test_remote_chunks_take_two_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, boxes = sharded()
    save_shards(tmp_path / "a", tensors, boxes)
    fs = fsspec.filesystem("memory")
    for path in (tmp_path / "a").iterdir():
        fs.pipe_file(f"/distributed/{path.name}", path.read_bytes())
    found = open_checkpoint(parse_location("memory://distributed"))
    asked: list[str] = []
    original = type(fs).cat_file

    def cat_file(self: Any, path: str, **kwargs: int) -> bytes:
        asked.append(path)
        return bytes(original(self, path, **kwargs))

    monkeypatch.setattr(type(fs), "cat_file", cat_file)
    found.read("uneven", 0, 40)
    assert asked == ["/distributed/__0_0.distcp"] * 2  # what describes the chunk, its values
    found.read("uneven", 40, 80)
    assert len(asked) == 3
    assert_holds(found, tensors)


@settings(max_examples=60)
@given(data=st.data())
def test_any_boxes_and_any_range(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    tensor = torch.rand(shape)
    boxes = [box for box in cut_up(shape, data) if 0 not in box[1]]
    folder = tmp_path_factory.mktemp("d") / "a"
    save_shards(folder, {"w": tensor}, {"w": boxes}, ranks=3)
    begin = data.draw(st.integers(0, tensor.nbytes))
    end = data.draw(st.integers(begin, tensor.nbytes))
    with DistributedCheckpoint(LocalPath(folder)) as found:
        assert found.read("w", begin, end).tobytes() == raw(tensor)[begin:end]


def test_every_dtype(tmp_path: Path) -> None:
    tensors = {str(d): (torch.rand(3, 5) * 3).to(d) for d in DTYPES}
    assert_holds(save(tmp_path / "a", tensors), tensors)
    with pytest.raises(FormatError, match=r"b/\.metadata: tensor 'z' is of torch\.complex128"):
        save(tmp_path / "b", {"z": torch.ones(2, dtype=torch.complex128)})


# Which tensors.


def training(key: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    model = small_net()
    adam = torch.optim.AdamW(model.parameters())
    model(torch.rand(2, 1, 8, 8)).sum().backward()
    adam.step()
    weights = {name: t.clone() for name, t in model.state_dict().items()}
    return {key: weights, "optimizer": adam.state_dict(), "step": 12, "epoch": 3}, weights


def test_the_weights_of_a_nested_save(tmp_path: Path) -> None:
    for key in ("model", "state_dict"):
        state, weights = training(key)
        found = save(tmp_path / key, state)
        assert_holds(found, weights)
        assert (found.key, found.progress) == (key, TrainingProgress(12, 3))
        assert found.notes == (f"weights under {key!r}",)
    adam = DistributedCheckpoint(LocalPath(tmp_path / "model"), key="optimizer.state.0")
    assert set(adam.tensors) == {"step", "exp_avg", "exp_avg_sq"}
    assert adam.notes == ()
    with pytest.raises(FormatError, match=r"no weights under the key 'x'; .* 'model', 'optim"):
        DistributedCheckpoint(LocalPath(tmp_path / "model"), key="x")


def test_other_ways_of_nesting(tmp_path: Path) -> None:
    state, weights = training("net")
    with pytest.raises(
        FormatError, match=r"not clear which .*--key from: 'net', 'optimizer\.state'"
    ):
        save(tmp_path / "a", state)
    assert_holds(DistributedCheckpoint(LocalPath(tmp_path / "a"), key="net"), weights)
    # The pattern of PyTorch's own tutorial.
    state, weights = training("model")
    found = save(tmp_path / "b", {"app": {"model": state["model"], "optim": state["optimizer"]}})
    assert_holds(found, weights)
    assert found.key == "app.model"
    # torchtitan: the weights at the top, the rest under keys.
    found = save(tmp_path / "c", {**weights, "optimizer": state["optimizer"]})
    assert_holds(found, weights)
    assert found.notes == ("left out, not weights: 'optimizer'",)
    # Nothing in it but weights.
    parts = {"encoder": {"w": torch.rand(2)}, "decoder": {"w": torch.rand(3)}}
    found = save(tmp_path / "d", parts)
    assert_holds(found, {f"{name}.w": part["w"] for name, part in parts.items()})
    found = save(tmp_path / "e", {"model": {f"module.{n}": t for n, t in weights.items()}})
    assert_holds(found, weights)


def test_saves_that_do_not_tell_their_nesting(tmp_path: Path) -> None:
    tensors = {"model.a.w": torch.rand(3), "model.b": torch.rand(2), "optim.state.m": torch.rand(4)}
    boxes = {name: rows(t) for name, t in tensors.items()}
    save_shards(tmp_path / "a", tensors, boxes)
    found = DistributedCheckpoint(LocalPath(tmp_path / "a"))
    assert_holds(found, {"a.w": tensors["model.a.w"], "b": tensors["model.b"]})
    chosen = DistributedCheckpoint(LocalPath(tmp_path / "a"), key="optim.state")
    assert_holds(chosen, {"m": tensors["optim.state.m"]})
    del tensors["optim.state.m"]
    save_shards(tmp_path / "b", tensors, boxes)
    assert_holds(DistributedCheckpoint(LocalPath(tmp_path / "b")), tensors)


def test_progress_that_is_no_number_is_not_known(tmp_path: Path) -> None:
    found = save(tmp_path / "a", {"model": {"w": torch.rand(2)}, "step": "12", "epoch": 2.5})
    assert found.progress == TrainingProgress()
    found = save(tmp_path / "b", {"model": {"w": torch.rand(2)}, "step": os.getcwd, "epoch": 2})
    assert found.progress == TrainingProgress(None, 2)


READ = """
import sys
from torch_lawa.checkpoints.formats.registry import open_checkpoint
from torch_lawa.checkpoints.storage.paths import LocalPath
found = open_checkpoint(LocalPath(sys.argv[1]))
for name, spec in found.tensors.items():
    found.read(name, 0, spec.nbytes)
print(len(found.tensors), "torch" in sys.modules)
"""


def test_reading_does_not_import_torch(tmp_path: Path) -> None:
    save_shards(tmp_path / "a", *sharded())
    command = [sys.executable, "-c", READ, str(tmp_path / "a")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["12", "False"]
