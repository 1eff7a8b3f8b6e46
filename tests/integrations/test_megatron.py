"""Megatron checkpoints against megatron-core itself, of the newest and an old release.

The releases train on two CPU ranks, save, and load what was averaged. `make test-megatron` installs
them: the newest into the environment, the old one into the folder LAWA_MEGATRON_OLD.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import same_bits
from torch import Tensor

from torch_lawa import AverageOptions, average_checkpoints, inspect_checkpoint

pytest.importorskip("megatron.core")
PROGRAM = Path(__file__).parent.parent / "recorded/megatron/megatron_run.py"
OLD = os.environ.get("LAWA_MEGATRON_OLD", "")
STEPS = (10, 20, 30)
CASES = {
    "tensor-parallel": ("", "fully_reshardable", 2),
    "buckets": ("", "dp_reshardable", 1),
    "old, flattened": (OLD, "fully_sharded_model_space", 2),
    "old, data-parallel": (OLD, "fully_sharded_model_space", 1),
}


def megatron(release: str, *arguments: object) -> None:
    # The old release calls torch.load as it was before PyTorch 2.6.
    old = {"PYTHONPATH": release, "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"}
    environment = os.environ | (old if release else {})
    command = [sys.executable, str(PROGRAM), *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


def mean(tensors: list[Tensor]) -> Tensor:
    total = torch.stack([t.double() for t in tensors]).sum(0) / len(tensors)
    return total.to(tensors[0].dtype)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", CASES)
def test_averages_load_and_continue(case: str, tmp_path: Path) -> None:
    release, sharding, tp = CASES[case]
    if case.startswith("old") and not release:
        pytest.skip("LAWA_MEGATRON_OLD is not set")
    run = tmp_path / "run"
    options = ("--sharding", sharding, "--tp", tp)
    megatron(release, "train", run, *options, "--store", tmp_path / "s1")
    for key in (None, "masters"):
        out = tmp_path / str(key)
        made = average_checkpoints(
            run, out / "iter_0000030", last=3, options=AverageOptions(key=key)
        )
        assert inspect_checkpoint(str(made.location)).provenance is not None
        megatron(release, "load", out, *options, "--store", tmp_path / f"s-{key}")
        for rank in range(2):
            raw = [torch.load(f"{run}.{step}.{rank}", weights_only=False) for step in STEPS]
            found: dict[str, Any] = torch.load(f"{out}.{rank}", weights_only=False)
            check(key, raw, found, by_parameter=sharding != "dp_reshardable")


def check(
    key: str | None, raw: list[dict[str, Any]], found: dict[str, Any], *, by_parameter: bool
) -> None:
    newest, loaded = raw[-1], found["loaded"]
    assert found["iteration"] == 30
    assert found["scheduler"]["num_steps"] == 30
    assert found["rng"][0]["torch_rng_state"].tolist() == [30, 31, 32, 33]
    masters = list(zip(*(r["masters"] for r in raw), strict=True))
    expected = newest["masters"] if key is None else [mean(list(m)) for m in masters]
    assert all(same_bits(a, b) for a, b in zip(loaded["masters"], expected, strict=True))
    assert loaded["rounded"] == (key == "masters" and by_parameter)
    for name, weight in loaded["weights"].items():
        if not loaded["rounded"]:
            assert same_bits(weight, mean([r["weights"][name] for r in raw])), name
        assert weight.dtype == newest["weights"][name].dtype
    assert found["continued"]["rounded"]
