"""Greedy soups of checkpoint files: the mean of those that help, exactly."""

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lawa_lab.methods.soups import greedy_members, greedy_soup
from torch_lawa.errors import ConfigError


def test_the_soup_of_files_of_several_runs(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    points = [torch.randn(6, generator=generator) for _ in range(5)]
    paths = []
    for seed, point in enumerate(points):
        paths.append(tmp_path / f"seed-{seed}" / "step-9.safetensors")
        paths[-1].parent.mkdir()
        save_file({"w": point}, paths[-1])
    seen: list[torch.Tensor] = []

    def loss(weights: torch.Tensor) -> float:
        return float(weights.double().square().sum())

    def evaluate(file: Path) -> float:
        seen.append(load_file(file)["w"])
        return loss(seen[-1])

    members = greedy_soup(paths, evaluate, tmp_path / "soup.safetensors")
    assert len(seen) == 9  # each alone, then each of the others with the soup
    assert all(torch.equal(a, b) for a, b in zip(seen, points, strict=False))
    expected = torch.stack([points[i].double() for i in members]).mean(0).float()
    assert torch.equal(load_file(tmp_path / "soup.safetensors")["w"], expected)
    # No single file that was left out would help, and each that joined did.
    assert 1 < len(members) < 5
    assert loss(expected) < min(map(loss, points))
    with pytest.raises(ConfigError, match="checkpoints"):
        greedy_soup([], evaluate, tmp_path / "none.safetensors")


def test_of_equal_members_the_newest_is_first() -> None:
    assert greedy_members(3, lambda members: 1.0) == [2]
    assert greedy_members(1, lambda members: 1.0) == [0]


def test_a_member_whose_loss_is_no_number_is_left_out() -> None:
    losses = [math.nan, 3.0, 1.0, math.nan, 2.0]
    assert greedy_members(5, lambda members: sum(losses[i] for i in members) / 9) == [2]
    assert greedy_members(2, lambda members: math.nan) == [1]
