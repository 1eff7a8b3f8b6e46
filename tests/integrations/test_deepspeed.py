"""Checkpoints that DeepSpeed writes now, against its own converter (make test-deepspeed)."""

import importlib.util
import os
import sys
import tarfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.deepspeed import RECORDED
from support.models import same_bits

from torch_lawa import LatestWeightAverager, average_checkpoints, inspect_checkpoint

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("deepspeed") is None,
        reason="DeepSpeed is not installed here: make test-deepspeed",
    ),
    pytest.mark.timeout(3600),  # the first start compiles
]
sys.path.insert(0, str(RECORDED.parent))
from record_deepspeed import CASES, STEPS, Net, files_of, record  # noqa: E402

UNIVERSAL = [name for name, case in CASES.items() if case.universal]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deepspeed")
    record(folder)
    return folder


def test_the_recorded_checkpoints_are_still_what_it_writes(runs: Path) -> None:
    with tarfile.open(RECORDED) as archive:
        known = set(archive.getnames())
    assert {path.relative_to(runs).as_posix() for path in files_of(runs)} == known


@pytest.mark.parametrize("run", [*CASES, *(f"{name}{os.sep}universal" for name in UNIVERSAL)])
def test_the_average_is_that_of_its_own_converted_checkpoints(
    runs: Path, run: str, tmp_path: Path
) -> None:
    name = Path(run).parts[0]
    averager = LatestWeightAverager(k=len(STEPS))
    for step in STEPS:
        state = torch.load(runs / name / "expected" / f"global_step{step}.pt", weights_only=True)
        averager.collect(state)
    expected = averager.average()
    # Running statistics come from the newest.
    expected["running_mean"] = state["running_mean"]
    average_checkpoints(runs / run, tmp_path / "mean.safetensors", last=len(STEPS))
    made = load_file(tmp_path / "mean.safetensors")
    made["head.weight"] = made["embedding.weight"]
    for key, tensor in expected.items():
        assert same_bits(made[key], tensor), key
    # With ZeRO-1 the converter loses what is not trained.
    lost = {"empty", "frozen.weight", "frozen.bias"} if CASES[name].stage == 1 else set()
    assert made.keys() - expected.keys() == lost
    model = Net(CASES[name].stage)
    model.load_state_dict(made)
    assert torch.equal(model.middle.weight, expected["middle.weight"])


@pytest.mark.parametrize("name", CASES)
def test_inspect_says_what_it_is(runs: Path, name: str) -> None:
    found = inspect_checkpoint(runs / name / "latest")
    case = CASES[name]
    assert found.format == f"DeepSpeed ZeRO-{case.stage}, {case.ranks} ranks"
    assert found.progress.step == STEPS[-1]
