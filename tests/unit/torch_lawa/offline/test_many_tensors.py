"""Many small tensors are averaged together, with the bits of each alone."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from torch_lawa.checkpoints.formats import safetensors
from torch_lawa.checkpoints.formats.base import TensorSpec
from torch_lawa.checkpoints.formats.safetensors_folder import FolderSink
from torch_lawa.mean import kernels_native, kernels_numpy
from torch_lawa.offline.average import average_checkpoints
from torch_lawa.offline.engine import Span, batched
from torch_lawa.offline.matching import PlannedTensor, Rule
from torch_lawa.offline.options import AverageOptions


def small_tensors(seed: int, num: int) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    found: dict[str, Any] = {}
    for i in range(num):
        kind = (np.float32, np.float16, np.int64)[i % 3]
        found[f"layer.{i}.w"] = (random.standard_normal((i % 5, 3)) * 100).astype(kind)
    found["scalar"] = np.float32(seed)[None].reshape(())
    found["large"] = random.standard_normal(300_000).astype(np.float32)
    return found


@pytest.mark.parametrize("dtype", [None, "float64"])
def test_the_same_values_as_one_by_one(tmp_path: Path, dtype: str | None) -> None:
    inputs = [small_tensors(seed, 200) for seed in (1, 2, 3)]
    for step, tensors in enumerate(inputs):
        save_file(tensors, tmp_path / f"step-{step}.safetensors")
    out = tmp_path / "mean.safetensors"
    average_checkpoints(tmp_path, out, last=3, options=AverageOptions(dtype=dtype), threads=2)
    found = load_file(out)
    assert found.keys() == inputs[0].keys()
    for name, values in found.items():
        newest = inputs[-1][name]
        if newest.dtype == np.int64:
            assert (values == newest).all()
        else:
            total = sum(tensors[name].astype(np.float64) for tensors in inputs)
            assert (values == (total / 3).astype(dtype or newest.dtype)).all()


def test_few_steps_for_many_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in 1, 2:
        tensors = {f"layer.{i}": np.full(4, step, np.float32) for i in range(500)}
        save_file(tensors, tmp_path / f"step-{step}.safetensors")
    counts = {"parse": 0, "mean": 0, "write": 0}

    def counting(owner: Any, name: str, what: str) -> None:
        act = getattr(owner, name)

        def counted(*args: Any, **how: Any) -> Any:
            counts[what] += 1
            return act(*args, **how)

        monkeypatch.setattr(owner, name, counted)

    counting(safetensors, "_parse", "parse")
    counting(kernels_native.CompiledPieces, "mean", "mean")
    counting(kernels_numpy.NumpyPieces, "_finish", "mean")
    counting(FolderSink, "write", "write")
    average_checkpoints(tmp_path, tmp_path / "mean.safetensors", last=2)
    assert counts["parse"] == 1  # both files have the same header, also when they are opened again
    assert counts["mean"] == 1
    assert counts["write"] == 1


def test_a_value_that_is_not_finite_is_named(tmp_path: Path) -> None:
    for step in 1, 2:
        tensors = {f"layer.{i}": np.full(4, step, np.float32) for i in range(50)}
        tensors["layer.7"][2] = np.nan
        tensors["layer.9"][0] = 1e38
        save_file(tensors, tmp_path / f"step-{step}.safetensors")
    out = tmp_path / "mean.safetensors"
    made = average_checkpoints(tmp_path, out, last=2)
    assert made.not_finite == ("layer.7",)
    assert made.not_finite_in == (str(tmp_path / "step-1.safetensors"),)  # the first that does
    assert load_file(out)["layer.8"].tolist() == [1.5] * 4
    narrow = AverageOptions(dtype="float16")
    made = average_checkpoints(tmp_path, out, last=2, options=narrow, overwrite=True)
    assert made.not_finite == ("layer.7", "layer.9")


def test_what_is_gathered() -> None:
    def span(name: str, dtype: str, num: int, rule: Rule = "average", first: int = 0) -> Span:
        spec = TensorSpec(dtype, (num,))
        return PlannedTensor(name, spec, spec, rule, name), first, num

    spans = [
        *(span("a", "F32", 10), span("b", "F32", 20)),
        span("c", "F32", 5, "newest"),
        *(span("d", "BF16", 5), span("e", "BF16", 200_000), span("f", "BF16", 100_000)),
        *(span("g", "BF16", 100, first=50), span("h", "BF16", 100)),
    ]
    found = [[tensor.name for tensor, _, _ in batch] for batch in batched(spans)]
    assert found == [["a", "b"], ["c"], ["d", "e"], ["f"], ["g"], ["h"]]


def test_a_file_of_pytorch_is_as_torch_save_writes_it(tmp_path: Path) -> None:
    kinds = [torch.float32, torch.bfloat16, torch.complex64, torch.float8_e4m3fn, torch.bool]
    shapes: list[tuple[int, ...]] = [(2, 3), (3, 2), (), (0, 4), (2, 3)]
    state = {
        f"{kind}.{i}": torch.ones(shape).to(kind)
        for kind in kinds
        for i, shape in enumerate(shapes)
    }
    state["tied"] = state["torch.float32.0"]
    torch.save(state, tmp_path / "step-1.pt")
    average_checkpoints(tmp_path / "step-1.pt", tmp_path / "mean.pt")
    found = torch.load(tmp_path / "mean.pt", weights_only=True)
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        got = found[name]
        assert (got.dtype, got.shape, got.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
        assert got.untyped_storage().nbytes() == tensor.untyped_storage().nbytes()
        assert torch.equal(got.to(torch.complex64), tensor.to(torch.complex64))
    assert found["tied"].data_ptr() == found["torch.float32.0"].data_ptr()
    assert found["torch.float32.1"].data_ptr() != found["torch.float32.0"].data_ptr()
    one, other = found["torch.float32.0"], found["torch.float32.4"]
    one.requires_grad_(True).register_hook(lambda gradient: gradient * 2)
    other.requires_grad_(True).sum().backward()
    assert other.grad is not None
    assert other.grad.unique().tolist() == [1.0]
