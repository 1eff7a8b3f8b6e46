"""The options that average, sweep and watch share."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from torch_lawa.coefficients import Exponential
from torch_lawa.errors import ConfigError, OutputError
from torch_lawa.offline.average import average_checkpoints
from torch_lawa.offline.options import AverageOptions
from torch_lawa.offline.sweep import sweep_checkpoints
from torch_lawa.offline.watch.watcher import watch_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    torch.manual_seed(0)
    for step in (100, 200, 300):
        state = {"net.w": torch.randn(50, 3), "net.n": torch.tensor(step), "net.b": torch.randn(4)}
        state["net.running_mean"] = torch.randn(4)
        save_file(state, folder / f"step_{step}.safetensors")
    return folder


def test_they_are_normalised() -> None:
    options = AverageOptions(coefficients="exponential:0.5", dtype="bf16", exclude="*.bias")
    assert options == AverageOptions(
        coefficients=Exponential(0.5), dtype="bfloat16", exclude=["*.bias"]
    )
    assert options.includes("a.weight")
    assert not options.includes("a.bias")
    assert not AverageOptions(include=["b*"]).includes("a.weight")


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"coefficients": "linear"}, "linear"),
        ({"dtype": "int8"}, "int8"),
        ({"buffers": "oldest"}, "buffers"),
        ({"layout": "flat"}, "layout"),
        ({"max_shard_size": 0}, "max_shard_size"),
    ],
)
def test_mistakes_are_refused_at_once(wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        AverageOptions(**wrong)


@pytest.mark.parametrize(
    "options",
    [
        AverageOptions(),
        AverageOptions(coefficients="annealing:cosine", dtype="bfloat16"),
        AverageOptions(include=["net.*"], exclude=["net.b"], strip_prefix="net."),
        AverageOptions(blend=0.6),
    ],
    ids=["default", "dtype", "names", "blend"],
)
def test_average_sweep_and_watch_give_the_same_bytes(
    run: Path, tmp_path: Path, options: AverageOptions
) -> None:
    once, watched, swept = tmp_path / "a.safetensors", tmp_path / "w.safetensors", tmp_path / "s"
    average_checkpoints(run, once, last=2, options=options)
    watch_run(run, watched, k=2, settle=0, once=True, options=options)
    sweep_checkpoints(run, [2], at=[300], output=swept, options=options)
    expected = load_file(once)
    for path in (watched, swept / "step-300-k-2.safetensors"):
        found = load_file(path)
        assert set(found) == set(expected)
        for name, tensor in expected.items():
            assert found[name].dtype == tensor.dtype
            assert torch.equal(found[name], tensor), name


def test_a_sweep_does_not_take_a_result_of_other_options(run: Path, tmp_path: Path) -> None:
    sweep_checkpoints(run, [2], output=tmp_path / "s")
    sweep_checkpoints(run, [2], output=tmp_path / "s")  # the same again: nothing to do
    for options in AverageOptions(dtype="bf16"), AverageOptions(exclude=["net.b"]):
        with pytest.raises(OutputError, match="already exists"):
            sweep_checkpoints(run, [2], output=tmp_path / "s", options=options)


@pytest.mark.parametrize("name", ["layout", "max_shard_size", "buffers"])
def test_what_a_sweep_does_not_support_is_refused(run: Path, name: str) -> None:
    value: Any = {"layout": "sharded", "max_shard_size": 100, "buffers": "average"}[name]
    with pytest.raises(ConfigError, match=name):
        sweep_checkpoints(run, [2], output="s", options=AverageOptions(**{name: value}))


def test_a_sweep_without_windows_is_refused(run: Path) -> None:
    with pytest.raises(ConfigError, match=r"--k or shares .* --horizon"):
        sweep_checkpoints(run, output="s")
    with pytest.raises(ConfigError, match=r"at=\[\]"):
        sweep_checkpoints(run, [2], at=[], output="s")


@pytest.mark.parametrize("k", [2.0, "2", 0])
def test_a_sweep_takes_whole_numbers(run: Path, k: Any) -> None:
    with pytest.raises(ConfigError, match=f"--k {k}: give distinct whole numbers"):
        sweep_checkpoints(run, [k], output="s")


def test_a_sweep_takes_integers_of_numpy(run: Path, tmp_path: Path) -> None:
    rows = sweep_checkpoints(
        run, [np.int64(2)], evaluator=lambda state: {"loss": 1.0}, metrics=tmp_path / "m.jsonl"
    )
    assert {type(row["k"]) for row in rows} == {int}


@pytest.mark.parametrize("size", ["5GB", 0])
def test_the_size_of_shards_is_a_number_of_bytes(size: Any) -> None:
    with pytest.raises(ConfigError, match=f"max_shard_size={size!r}"):
        AverageOptions(max_shard_size=size)
