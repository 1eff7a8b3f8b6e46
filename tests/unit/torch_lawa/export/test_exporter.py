"""The average in a folder of safetensors files, from one process: values, layout, refusals."""

import errno
import json
import os
import signal
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from support.models import round_fraction, same_bits, true_mean
from torch import Tensor, nn

from torch_lawa import (
    AverageOptions,
    DiskStore,
    Explicit,
    LatestWeightAverager,
    average_checkpoints,
)
from torch_lawa.checkpoints.formats.safetensors_torch import save_tensors
from torch_lawa.errors import ConfigError, LawaError, NotReadyError, OutputError
from torch_lawa.export import folder_writer
from torch_lawa.offline.inspect.inspection import inspect_checkpoint


class Net(nn.Module):
    """Ties, buffers of every kind, a frozen layer, odd layouts and an empty tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.conv = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.norm = nn.BatchNorm1d(3)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.narrow = nn.Parameter(torch.zeros(3, dtype=torch.float16))
        self.frozen = nn.Linear(3, 2).requires_grad_(False)
        self.head = nn.Linear(3, 5)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("secret", torch.ones(2), persistent=False)


def trained(
    k: int = 3, *, steps: int = 4, checkpoints: Path | None = None, **how: Any
) -> tuple[Net, LatestWeightAverager, list[dict[str, Tensor]]]:
    torch.manual_seed(0)
    net, averager, states = Net(), LatestWeightAverager(k=k, **how), []
    for step in range(1, steps + 1):
        with torch.no_grad():
            for parameter in net.parameters():
                if parameter.requires_grad:
                    parameter.normal_()
            net.norm.running_mean.fill_(step)  # type: ignore[union-attr]
            net.norm.num_batches_tracked.fill_(step)  # type: ignore[union-attr]
        averager.collect(net, step=100 * step)
        states.append({n: t.clone() for n, t in net.state_dict().items()})
        if checkpoints is not None:
            save_tensors(checkpoints / f"step_{100 * step}.safetensors", net.state_dict())
    return net, averager, states


def expected_mean(
    states: list[dict[str, Tensor]], name: str, dtype: torch.dtype, weights: list[int] | None = None
) -> Tensor:
    """Exact fractions, rounded once."""
    values = [round_fraction(v, dtype) for v in true_mean([s[name] for s in states], weights)]
    return torch.tensor(values, dtype=torch.float64).to(dtype).reshape(states[0][name].shape)


AVERAGED = ["embed.weight", "conv.weight", "norm.weight", "scale", "empty", "narrow", "head.bias"]
KEPT = ["norm.running_mean", "norm.num_batches_tracked", "frozen.weight", "mask"]


@pytest.mark.parametrize("store", ["host", "device", "disk"])
def test_the_mean_of_the_window_and_the_newest_of_the_rest(store: str, tmp_path: Path) -> None:
    where: Any = DiskStore(tmp_path / "window") if store == "disk" else store
    net, averager, states = trained(store=where)
    averager.save_pretrained(tmp_path / "out")
    assert os.listdir(tmp_path / "out") == ["model.safetensors"]
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert set(found) == set(net.state_dict()) - {"head.weight"}
    assert {"secret", "head.weight"}.isdisjoint(found)
    for name in AVERAGED:
        own = states[0][name].dtype
        assert same_bits(found[name], expected_mean(states[-3:], name, own)), name
    for name in KEPT:
        assert same_bits(found[name], states[-1][name]), name
    for name, tensor in averager.average().items():
        if name in found:
            assert same_bits(found[name], tensor), name


def test_fewer_snapshots_other_weights_another_dtype(tmp_path: Path) -> None:
    _, averager, states = trained()
    averager.save_pretrained(
        tmp_path / "out", k=2, coefficients=Explicit([1, 3]), dtype=torch.bfloat16
    )
    found = load_file(tmp_path / "out" / "model.safetensors")
    for name in AVERAGED:
        mean = expected_mean(states[-2:], name, torch.bfloat16, [1, 3])
        assert same_bits(found[name], mean), name
    for name in ("frozen.weight", "norm.running_mean"):  # of every float, as model.to(dtype)
        rounded = [
            round_fraction(Fraction(v.item()), torch.bfloat16) for v in states[-1][name].flatten()
        ]
        assert found[name].dtype == torch.bfloat16
        assert found[name].flatten().tolist() == rounded, name
    assert same_bits(found["mask"], states[-1]["mask"])


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.float8_e4m3fn])
def test_dtypes_of_state_dicts(dtype: torch.dtype, tmp_path: Path) -> None:
    averager = LatestWeightAverager(k=2)
    values = [torch.tensor([[1.0, -2.0], [0.5, 8.0]]), torch.tensor([[3.0, -4.0], [0.25, 0.0]])]
    for value in values:
        averager.collect({"w": value.to(dtype), "t": value.to(dtype).t()})
    averager.save_pretrained(tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found["w"].dtype == dtype
    mean = torch.tensor([[2.0, -3.0], [0.375, 4.0]])
    assert torch.equal(found["w"].to(torch.complex64), mean.to(torch.complex64))
    assert torch.equal(found["t"].to(torch.complex64), mean.t().to(torch.complex64))


def test_the_mean_is_rounded_once(tmp_path: Path) -> None:
    """By way of float32, 1 + 2**-8 + 2**-24 would become a tie, and 1 in bfloat16."""
    averager = LatestWeightAverager(k=2)
    for extra in (2.0**-23, 0.0):
        averager.collect({"w": torch.tensor([1 + 2.0**-8 + extra])})
    averager.save_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    assert load_file(tmp_path / "out" / "model.safetensors")["w"].item() == 1 + 2.0**-7


def test_snapshots_that_are_stored_narrow(tmp_path: Path) -> None:
    _, averager, _ = trained(storage_dtype=torch.bfloat16)
    averager.save_pretrained(tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    for name, tensor in averager.average().items():
        assert name == "head.weight" or same_bits(found[name], tensor), name


def test_shards_and_their_index(tmp_path: Path) -> None:
    _, averager, states = trained()
    averager.save_pretrained(tmp_path / "one")
    averager.save_pretrained(tmp_path / "out", max_shard_size="0.1kB")
    whole = load_file(tmp_path / "one" / "model.safetensors")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    total = sum(t.numel() * t.element_size() for t in whole.values())
    assert index["metadata"] == {"total_size": total}
    assert set(index["weight_map"]) == set(whole)
    files = sorted(set(index["weight_map"].values()))
    assert files == [
        f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)
    ]
    assert sorted(os.listdir(tmp_path / "out")) == [*files, "model.safetensors.index.json"]
    assert len(files) > 2
    for file in files:
        part = load_file(tmp_path / "out" / file)
        assert {n for n, f in index["weight_map"].items() if f == file} == set(part)
        size = sum(t.numel() * t.element_size() for t in part.values())
        assert size <= 100 or len(part) == 1
        for name, tensor in part.items():
            assert same_bits(tensor, whole[name]), name
        with safe_open(tmp_path / "out" / file, "pt") as opened:
            assert opened.metadata()["format"] == "pt"
    seen = inspect_checkpoint(tmp_path / "out")
    assert seen.tied == {"head.weight": "embed.weight"}
    assert seen.num_bytes == total
    assert states


def test_it_says_how_it_was_made(tmp_path: Path) -> None:
    _, averager, _ = trained()
    averager.save_pretrained(tmp_path / "out", k=2, coefficients=Explicit([1, 3]))
    found = inspect_checkpoint(tmp_path / "out")
    assert found.provenance is not None
    assert found.provenance["k"] == 2
    assert found.provenance["coefficients"] == "explicit:1,3"
    assert found.provenance["inputs"] == [
        {"step": 300, "weight": 0.25},
        {"step": 400, "weight": 0.75},
    ]
    assert found.progress.step == 400
    text = str(found)
    assert "2 snapshots, explicit:1,3:" in text
    assert "step 300  weight 0.25" in text
    assert "None" not in text


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_the_same_tensors_as_from_checkpoints_on_disk(dtype: str | None, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    _, averager, _ = trained(checkpoints=tmp_path / "run")
    offline = tmp_path / "mean.safetensors"
    # A frozen layer is a float like any other there; its mean is itself.
    average_checkpoints(tmp_path / "run", offline, last=3, options=AverageOptions(dtype=dtype))
    averager.save_pretrained(tmp_path / "out", dtype=getattr(torch, dtype) if dtype else None)
    found, expected = load_file(tmp_path / "out" / "model.safetensors"), load_file(offline)
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert same_bits(found[name], tensor), name


def test_frozen_parameters_may_be_left_out(tmp_path: Path) -> None:
    _, averager, _ = trained(frozen="omit")
    averager.save_pretrained(tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert "head.bias" in found
    assert not [name for name in found if name.startswith("frozen")]


def test_a_loaded_averager_needs_no_model(tmp_path: Path) -> None:
    _, averager, _ = trained()
    again = LatestWeightAverager(k=3)
    again.load_state_dict(averager.state_dict())
    again.save_pretrained(tmp_path / "out")
    averager.save_pretrained(tmp_path / "expected")
    assert_same_folder(tmp_path / "out", tmp_path / "expected")
    with pytest.raises(LawaError, match="no longer has it"):
        again.save_pretrained(tmp_path / "other", nn.Linear(2, 2))
    assert not (tmp_path / "other").exists()


def assert_same_folder(a: Path, b: Path) -> None:
    assert sorted(os.listdir(a)) == sorted(os.listdir(b))
    for file in a.glob("*.safetensors"):
        mine, theirs = load_file(file), load_file(b / file.name)
        assert set(mine) == set(theirs)
        for name, tensor in theirs.items():
            assert same_bits(mine[name], tensor), name


def test_nan_is_warned_of_and_written(tmp_path: Path) -> None:
    averager = LatestWeightAverager(k=2)
    averager.collect({"w": torch.tensor([1.0, float("nan")])})
    averager.collect({"w": torch.tensor([3.0, 1.0])})
    with pytest.warns(UserWarning, match=r"step 1 has NaN or Inf in 'w'"):
        averager.save_pretrained(tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")["w"]
    assert found[0] == 2.0
    assert found[1].isnan()


def test_what_exists_is_replaced_only_when_asked(tmp_path: Path) -> None:
    _, averager, states = trained()
    out = tmp_path / "out"
    averager.save_pretrained(out, k=1)
    with pytest.raises(OutputError, match=r"exists already\. Pass overwrite=True"):
        averager.save_pretrained(out)
    assert same_bits(load_file(out / "model.safetensors")["scale"], states[-1]["scale"])
    averager.save_pretrained(out, max_shard_size=100, overwrite=True)
    assert not (out / "model.safetensors").exists()
    assert (out / "model.safetensors.index.json").exists()
    assert os.listdir(tmp_path) == ["out"]


def test_a_folder_of_other_things_is_never_replaced(tmp_path: Path) -> None:
    _, averager, _ = trained()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("years of work")
    with pytest.raises(OutputError, match="other files than a checkpoint"):
        averager.save_pretrained(tmp_path / "out", overwrite=True)
    with pytest.raises(OutputError, match="is a file"):
        averager.save_pretrained(tmp_path / "out" / "thesis.tex", overwrite=True)
    assert (tmp_path / "out" / "thesis.tex").read_text() == "years of work"
    assert os.listdir(tmp_path) == ["out"]


def test_the_output_folder_of_a_trainer_is_kept(tmp_path: Path) -> None:
    _, averager, _ = trained()
    out = tmp_path / "output_dir"
    averager.save_pretrained(out, k=1)
    before = (out / "model.safetensors").read_bytes()
    (out / "tokenizer.json").write_text("{}")
    averager.save_pretrained(out, overwrite=True)
    after = (out / "model.safetensors").read_bytes()
    assert after != before
    assert (out / "tokenizer.json").read_text() == "{}"
    (out / "checkpoint-500").mkdir()
    with pytest.raises(OutputError, match="contains the folder checkpoint-500"):
        averager.save_pretrained(out, k=1, overwrite=True)
    assert (out / "checkpoint-500").is_dir()
    assert (out / "model.safetensors").read_bytes() == after


def test_an_empty_folder_may_be_there(tmp_path: Path) -> None:
    _, averager, _ = trained()
    (tmp_path / "out").mkdir()
    averager.save_pretrained(tmp_path / "out", overwrite=True)
    assert (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("how", "error", "words"),
    [
        ({"k": 4}, ConfigError, "1 to 3"),
        ({"dtype": torch.int8}, ConfigError, "floating-point"),
        ({"max_shard_size": 0}, ConfigError, "max_shard_size"),
        ({"max_shard_size": "big"}, ConfigError, "is not a size"),
        ({"coefficients": Explicit([1, 2])}, ConfigError, "2 weights.* 3 snapshots"),
        ({"folder": "s3://bucket/out"}, ConfigError, "a local folder"),
    ],
)
def test_wrong_arguments_are_refused(
    how: dict[str, Any], error: type[Exception], words: str, tmp_path: Path
) -> None:
    _, averager, _ = trained()
    with pytest.raises(error, match=words):
        averager.save_pretrained(**{"folder": tmp_path / "out", **how})
    assert os.listdir(tmp_path) == []


def test_a_window_that_is_not_full(tmp_path: Path) -> None:
    _, averager, _ = trained(steps=2)
    with pytest.raises(NotReadyError, match="2 of 3 snapshots"):
        averager.save_pretrained(tmp_path / "out")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("act", ["FolderSink.write", "publish", "sync_file"])
def test_a_failing_disk_leaves_nothing(
    act: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    _, averager, _ = trained()
    averager.save_pretrained(tmp_path / "out", k=1)
    before = (tmp_path / "out" / "model.safetensors").read_bytes()
    monkeypatch.setattr(f"{folder_writer.__name__}.{act}", fail)
    with pytest.raises(OutputError, match=r"out: cannot be written .*No space left"):
        averager.save_pretrained(tmp_path / "out", overwrite=True)
    assert os.listdir(tmp_path) == ["out"]
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before


_KILLED = """
import os, signal, sys, torch
from torch_lawa import LatestWeightAverager
from torch_lawa.checkpoints.formats import safetensors_folder

write_at = safetensors_folder.write_at

def die(handle, data, at):
    if at == 0:
        return write_at(handle, data, at)  # the header
    os.pwrite(handle, data[:1], at)
    os.kill(os.getpid(), signal.SIGKILL)

safetensors_folder.write_at = die
averager = LatestWeightAverager(k=1)
averager.collect({"w": torch.ones(5)})
averager.save_pretrained(sys.argv[1], overwrite=True)
"""


@pytest.mark.slow
def test_killed_in_the_middle_the_next_call_clears_up(tmp_path: Path) -> None:
    _, averager, _ = trained()
    out = tmp_path / "out"
    averager.save_pretrained(out)
    before = (out / "model.safetensors").read_bytes()
    done = subprocess.run([sys.executable, "-c", _KILLED, str(out)], check=False)
    assert done.returncode == -signal.SIGKILL
    left = sorted(os.listdir(tmp_path))
    assert left[0] == "out"
    assert len(left) == 2
    assert left[1].endswith(".partial")
    assert (out / "model.safetensors").read_bytes() == before
    averager.save_pretrained(out, k=1, overwrite=True)
    assert os.listdir(tmp_path) == ["out"]
