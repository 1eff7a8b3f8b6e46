"""What an inspection says of checkpoints whose contents are known."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from torch_lawa.checkpoints.formats.base import TrainingProgress
from torch_lawa.errors import ConfigError, FormatError
from torch_lawa.offline.average import average_checkpoints
from torch_lawa.offline.inspect.inspection import (
    Inspection,
    RunInspection,
    inspect_checkpoint,
    inspect_path,
)
from torch_lawa.offline.options import AverageOptions

STATE = {
    "emb": torch.randn(5, 4).bfloat16(),
    "block.w": torch.randn(4, 3),
    "block.b": torch.randn(3),
    "steps": torch.tensor(7),
}


def sharded(folder: Path) -> Path:
    folder.mkdir()
    files = {name: f"model-{i:05d}-of-00004.safetensors" for i, name in enumerate(STATE, 1)}
    for name, file in files.items():
        save_file({name: STATE[name]}, folder / file)
    index = {"metadata": {}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_one_file(tmp_path: Path) -> None:
    path = tmp_path / "step_100.safetensors"
    save_file(STATE, path, metadata={"format": "pt", "head": "emb", "epoch": "3"})
    found = inspect_checkpoint(path)
    assert (found.format, found.layout) == ("safetensors", "single")
    assert found.files == {path.name: path.stat().st_size}
    assert found.num_values == 20 + 12 + 3 + 1
    assert found.num_bytes == 20 * 2 + 15 * 4 + 8
    assert {
        code: (n.num_tensors, n.num_values, n.num_bytes) for code, n in found.dtypes.items()
    } == {
        "F32": (2, 15, 60),
        "BF16": (1, 20, 40),
        "I64": (1, 1, 8),
    }
    assert list(found.dtypes) == ["F32", "BF16", "I64"]
    assert found.tied == {"head": "emb"}
    assert found.progress == TrainingProgress(epoch=3)
    assert found.metadata == {"format": "pt", "epoch": "3"}
    assert found.provenance is None
    assert str(found).splitlines() == [
        str(path),
        "  Format     safetensors (one file)",
        "  Progress   epoch 3",
        f"  Files      {path.stat().st_size} B  step_100.safetensors",
        "  Tensors    4 with 36 values (parameters and buffers), 108 B",
        "             dtype  tensors  values  bytes",
        "             F32          2      15   60 B",
        "             BF16         1      20   40 B",
        "             I64          1       1    8 B",
        "  Tied       head = emb",
        "  Metadata   epoch: 3",
        "             format: pt",
    ]
    assert found.list_tensors().splitlines()[0] == "dtype  shape   bytes  name"
    assert "BF16   [5, 4]   40 B  emb" in found.list_tensors().splitlines()


def test_the_name_tells_the_step_where_the_contents_do_not(tmp_path: Path) -> None:
    save_file(STATE, tmp_path / "step_100.safetensors")
    save_file(STATE, tmp_path / "step_100_again.safetensors", metadata={"step": "90"})
    assert inspect_checkpoint(tmp_path / "step_100.safetensors").progress.step == 100
    assert inspect_checkpoint(tmp_path / "step_100_again.safetensors").progress.step == 90


def test_json_is_the_same(tmp_path: Path) -> None:
    path = tmp_path / "step_100.safetensors"
    save_file(STATE, path, metadata={"head": "emb"})
    found = inspect_checkpoint(path)
    shown = json.loads(json.dumps(found.to_json(tensors=True)))
    assert shown["tensors"]["block.w"] == {"dtype": "F32", "shape": [4, 3], "bytes": 48}
    assert len(shown["tensors"]) == shown["num_tensors"] == 4
    assert (shown["num_values"], shown["bytes"]) == (36, 108)
    assert shown["dtypes"]["BF16"] == {"num_tensors": 1, "num_values": 20, "num_bytes": 40}
    assert (shown["step"], shown["tied"]) == (100, {"head": "emb"})
    assert "tensors" not in found.to_json()


def test_shards(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "checkpoint-500")
    found = inspect_checkpoint(folder)
    assert (found.layout, found.progress.step) == ("sharded", 500)
    assert found.files == {p.name: p.stat().st_size for p in sorted(folder.glob("*.safetensors"))}
    assert found.num_bytes == 108
    assert "safetensors, 4 shards (sharded folder)" in str(found)
    one = inspect_checkpoint(folder / "model-00002-of-00004.safetensors")  # alone, too
    assert list(one.tensors) == ["block.w"]


def averaged(tmp_path: Path, output: Path, **how: Any) -> Inspection:
    for step in (10, 20):
        save_file(STATE, tmp_path / f"step_{step}.safetensors")
    inputs = [tmp_path / f"step_{step}.safetensors" for step in (10, 20)]
    average_checkpoints(inputs, output, weights=[1, 3], options=AverageOptions(**how))
    return inspect_checkpoint(output)


@pytest.mark.parametrize("name", ["mean.safetensors", "folder", "distributed", "mean.pt"])
def test_how_it_was_averaged(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    how = {"layout": "distributed"} if name == "distributed" else {}
    found = averaged(tmp_path, tmp_path / name, **how)
    assert found.provenance is not None
    assert [i["weight"] for i in found.provenance["inputs"]] == [0.25, 0.75]
    assert "torch_lawa" not in found.metadata
    lines = str(found).splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("  Averaged"))
    assert "2023-11-14T22:13:20+00:00" in lines[at]
    assert "2 checkpoints, explicit:1,3:" in lines[at + 1]
    assert lines[at + 2].split() == ["step", "10", "weight", "0.25",
                                     str(tmp_path / "step_10.safetensors")]  # fmt: skip
    assert found.to_json()["provenance"] == found.provenance


@pytest.mark.parametrize("text", ["not json", "[1]", "3", '{"inputs": 5}', '{"inputs": [5, {}]}'])
def test_a_strange_note_is_no_reason_to_fail(tmp_path: Path, text: str) -> None:
    save_file(STATE, tmp_path / "a.safetensors", metadata={"torch_lawa": text})
    found = inspect_checkpoint(tmp_path / "a.safetensors")
    assert ("torch_lawa" in found.metadata) == (found.provenance is None)
    assert "a.safetensors" in str(found)


def test_a_terminal_obeys_nothing_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    evil = "\x1b[2J\nFormat  lies\u202e"
    save_file(
        {evil: torch.ones(1), "w": torch.ones(1)}, path, metadata={"note": evil, "t" + evil: "w"}
    )
    found = inspect_checkpoint(path)
    for text in (str(found), found.list_tensors()):
        assert "\\x1b[2J\\nFormat" in text
        assert not set(text) & {"\x1b", "\u202e"}
        assert not any(line.startswith("Format") for line in text.splitlines())


def test_what_is_long_still_fits(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file(STATE, path, metadata={"config": "x" * 5000, "words": "some words " * 50})
    lines = str(inspect_checkpoint(path)).splitlines()
    assert max(map(len, lines[1:])) <= 80
    assert any(line.endswith("… (5,008 characters)") for line in lines)


def run_of(tmp_path: Path, steps: tuple[int, ...] = (1000, 500)) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    for step in steps:
        save_file(STATE, folder / f"step_{step}.safetensors")
    return folder


def test_a_run(tmp_path: Path) -> None:
    folder = run_of(tmp_path)
    torch.save(STATE, folder / "step_1500.pt")
    (folder / "step_2000.safetensors").write_bytes(b"half")
    save_file(STATE, folder / "best.safetensors")
    found = inspect_path(folder)
    assert isinstance(found, RunInspection)
    assert [entry.found.step for entry in found.entries] == [500, 1000, 1500, 2000]
    assert [entry.num_bytes for entry in found.entries] == [108, 108, 108, None]
    formats = [entry.format for entry in found.entries]
    assert formats == ["safetensors", "safetensors", "PyTorch file", None]
    lines = str(found).splitlines()
    assert lines[:5] == [
        f"{folder}: 4 checkpoints, oldest first (by step)",
        "   step 500  108 B  safetensors   step_500.safetensors",
        "  step 1000  108 B  safetensors   step_1000.safetensors",
        "  step 1500  108 B  PyTorch file  step_1500.pt",
        "  step 2000         not readable  step_2000.safetensors",
    ]
    assert "not a complete safetensors file" in " ".join(str(found).split())  # lines are wrapped
    assert "left out: best.safetensors" in str(found)
    shown = json.loads(json.dumps(found.to_json()))
    assert [c["bytes"] for c in shown["checkpoints"]] == [108, 108, 108, None]
    assert [c["error"] is None for c in shown["checkpoints"]] == [True, True, True, False]


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda folder: folder / "step_*.safetensors", RunInspection),
        (lambda folder: folder / "step_5*.safetensors", Inspection),
        (lambda folder: folder / "step_500.safetensors", Inspection),
    ],
)
def test_patterns(tmp_path: Path, make: Callable[[Path], Path], kind: type) -> None:
    assert type(inspect_path(make(run_of(tmp_path)))) is kind


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="no such file or folder"):
        inspect_path(tmp_path / "nothing")
    with pytest.raises(ConfigError, match=r"2 checkpoints \(step 500, step 1000\)"):
        inspect_checkpoint(run_of(tmp_path))
    (tmp_path / "readme.txt").touch()
    with pytest.raises(FormatError, match="not a checkpoint by its name"):
        inspect_path(tmp_path / "readme.txt")
