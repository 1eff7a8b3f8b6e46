"""A run that torchtitan wrote, read without it; see tests/recorded/record_torchtitan.py."""

import importlib.util
import sys
import tarfile
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.models import same_bits
from support.torchtitan import RECORDED, load, unpack_recorded, weights_of
from torch import Tensor

from torch_lawa import Every, LatestWeightAverager, inspect_checkpoint
from torch_lawa.cli import main

# PyTorch's own, of a process without a group.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack_recorded(tmp_path_factory.mktemp("torchtitan"))


def saved(run: Path, step: int) -> dict[str, Tensor]:
    return weights_of(load(run / "checkpoint" / f"step-{step}"))


def mean(run: Path, *steps: int) -> dict[str, Tensor]:
    states = [saved(run, step) for step in steps]
    return {
        name: (sum(state[name].double() for state in states) / len(states)).to(first.dtype)
        for name, first in states[0].items()
    }


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert same_bits(found[name], tensor), name


def test_average_is_the_one_that_was_made_online(run: Path, tmp_path: Path) -> None:
    online = weights_of(load(run / "averaged" / "step-6"))
    assert_same(online, mean(run, 4, 6))
    assert (
        main._run(["average", str(run / "checkpoint"), "--last", "2", "-o", str(tmp_path / "a")])
        == 0
    )
    assert_same(weights_of(load(tmp_path / "a")), online)


def test_inspect_finds_the_weights(run: Path) -> None:
    found = inspect_checkpoint(run / "checkpoint" / "step-6")
    expected = saved(run, 6)
    assert set(found.tensors) == set(expected)
    assert "layers.0.attention.qkv_linear.wq.weight" in expected


def test_the_window_is_resumed_without_torchtitan(run: Path) -> None:
    """By `torch.distributed.checkpoint` alone, in one process instead of two ranks."""
    slots = load(run / "checkpoint" / "step-6")["averager"]["slots"]
    averager = LatestWeightAverager(k=2, schedule=Every(2))
    averager.bind({name: torch.zeros_like(tensor) for name, tensor in slots["0"].items()})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load({"averager": averager}, checkpoint_id=run / "checkpoint" / "step-6")
    assert averager.snapshot_steps == [4, 6]
    expected = mean(run, 4, 6)
    average = averager.average()
    for name in average.keys() & expected.keys():
        assert same_bits(average[name], expected[name])
    fused = average["layers.0.attention.qkv_linear.wqkv.weight"]
    parts = [expected[f"layers.0.attention.qkv_linear.w{each}.weight"] for each in "qkv"]
    assert torch.equal(fused.flatten().sort().values, torch.cat(parts).flatten().sort().values)


@pytest.mark.skipif(
    importlib.util.find_spec("torchtitan") is None,
    reason="torchtitan is not installed here: make test-torchtitan",
)
@pytest.mark.timeout(600)
def test_it_is_still_what_torchtitan_writes(run: Path, tmp_path: Path) -> None:
    sys.path.insert(0, str(RECORDED.parent))
    from record_torchtitan import record

    new = record(tmp_path)
    with tarfile.open(RECORDED) as archive:
        known = set(archive.getnames())
    written = (*new.glob("checkpoint/*/*"), *new.glob("averaged/*/*"))
    assert {path.relative_to(new).as_posix() for path in written} == known
    assert saved(new, 6).keys() == saved(run, 6).keys()
