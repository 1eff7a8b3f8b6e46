"""Writing a folder of safetensors files."""

import os
from pathlib import Path

import pytest
import torch

from torch_lawa import LatestWeightAverager
from torch_lawa.cli import main
from torch_lawa.errors import OutputError


def test_a_system_that_cannot_write_at_an_offset_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Windows: a clear error, and nothing half-written."""
    for step in (1, 2):
        torch.save({"w": torch.ones(3)}, tmp_path / f"step_{step}.pt")
    averager = LatestWeightAverager(k=1)
    averager.collect({"w": torch.ones(3)})
    monkeypatch.delattr(os, "pwrite")
    before = sorted(tmp_path.iterdir())
    words = ["average", str(tmp_path), "--last", "2", "-o", str(tmp_path / "mean.safetensors")]
    assert main._run(words) == 1
    assert "Linux or macOS" in capsys.readouterr().err
    with pytest.raises(OutputError, match="Linux or macOS"):
        averager.save_pretrained(tmp_path / "out")
    assert sorted(tmp_path.iterdir()) == before
