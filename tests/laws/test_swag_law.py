"""Samples around the mean: SWAG's formula, and the same bits however the snapshots are stored."""

import hashlib
import math
import statistics
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.models import same_bits
from torch import Tensor, nn

from torch_lawa import DiskStore, LatestWeightAverager
from torch_lawa.errors import ConfigError, LayoutError, NotReadyError
from torch_lawa.mean import blocks
from torch_lawa.swag import Draw, normal_numbers

K = 4


class Net(nn.Module):
    """Tensors of any layout and dtype, a tied one, an empty one, a buffer, a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 3)
        self.turned = nn.Parameter(torch.zeros(3, 5).t())
        self.narrow = nn.Parameter(torch.zeros(7, dtype=torch.bfloat16))
        self.waves = nn.Parameter(torch.zeros(2, 3, dtype=torch.complex64))
        self.ripples = nn.Parameter(torch.zeros(3, 2, dtype=torch.complex64).t())
        self.nothing = nn.Parameter(torch.zeros(0, 3))
        self.scalar = nn.Parameter(torch.zeros(()))
        self.tied = nn.Linear(5, 3, bias=False)
        self.tied.weight = self.first.weight
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.norm = nn.BatchNorm1d(3)


def snapshots(model: nn.Module, averager: LatestWeightAverager) -> list[dict[str, Tensor]]:
    """Collect a few random weights; returns those in the window."""
    found = []
    for seed in range(K + 2):
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) + 1)
        averager.collect(model)
        found.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
    return found[-K:]


def numbers(seed: int, name: str | None, count: int) -> np.ndarray:
    """Splitmix64 in Python's integers, and the quantile function of the standard library."""
    digest = hashlib.sha256(repr((seed, name)).encode()).digest()
    key, rest = int.from_bytes(digest[:8], "little") >> 1, 2**64 - 1
    drawn = []
    for index in range(count):
        bits = key + index * 0x9E3779B97F4A7C15 & rest
        bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 & rest
        bits = (bits ^ bits >> 27) * 0x94D049BB133111EB & rest
        bits ^= bits >> 31
        drawn.append(statistics.NormalDist().inv_cdf(((bits >> 12) + 0.5) / 2**52))
    return np.array(drawn)


def published(values: list[np.ndarray], z1: np.ndarray, z2: np.ndarray, scale: float) -> np.ndarray:
    """Maddox et al., as their code has it: moments first, then the two terms."""
    mean = sum(values) / len(values)
    variance = np.maximum(sum(v * v for v in values) / len(values) - mean * mean, 1e-30)
    deviations = np.stack([v - mean for v in values])
    low_rank = np.tensordot(z2, deviations, 1) / math.sqrt(len(values) - 1)
    return mean + math.sqrt(scale) * (np.sqrt(variance) * z1 + low_rank)


@pytest.mark.parametrize(("seed", "scale"), [(0, 0.5), (3, 0.5), (3, 1.5)])
def test_a_sample_is_the_published_formula(seed: int, scale: float) -> None:
    model, averager = Net(), LatestWeightAverager(k=K)
    window, found = snapshots(model, averager), averager.sample(seed=seed, scale=scale)
    z2 = numbers(seed, None, K)
    for name in ("first.weight", "turned", "scalar", "nothing"):
        values = [each[name].double().numpy() for each in window]
        z1 = numbers(seed, name, values[0].size).reshape(values[0].shape)
        expected = published(values, z1, z2, scale).astype(np.float32)
        np.testing.assert_allclose(found[name].numpy(), expected, rtol=1e-6, atol=1e-7)
    for name in ("waves", "ripples"):
        values = [torch.view_as_real(each[name]).double().numpy() for each in window]
        z1 = numbers(seed, name, 12).reshape(2, 3, 2)
        expected = published(values, z1, z2, scale)
        np.testing.assert_allclose(torch.view_as_real(found[name]), expected, rtol=1e-6, atol=1e-7)
    assert same_bits(found["tied.weight"], found["first.weight"])
    assert same_bits(found["frozen"], model.frozen)
    assert same_bits(found["norm.running_mean"], model.norm.running_mean)


def test_samples_have_the_covariance_of_the_snapshots() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(K, 3, generator=generator, dtype=torch.float64)
    averager = LatestWeightAverager(k=K)
    for row in rows:
        averager.collect({"w": row})
    drawn = torch.stack([averager.sample(seed=seed)["w"] for seed in range(4000)])
    centred = rows - rows.mean(0)
    expected = (centred.square().mean(0).diag() + centred.T @ centred / (K - 1)) / 2
    torch.testing.assert_close(drawn.mean(0), rows.mean(0), rtol=0, atol=0.05)
    torch.testing.assert_close(drawn.T.cov(), expected, rtol=0, atol=0.07)


def test_bits_that_are_all_zero_give_a_number() -> None:
    """Splitmix64 turns only 0 into 0."""
    expected = statistics.NormalDist().inv_cdf(0.5 / 2**52)
    assert normal_numbers(0, torch.arange(1)).item() == pytest.approx(expected)


@pytest.mark.parametrize("kind", ["host", "device", "disk", "small blocks", "swapped", "resumed"])
def test_a_seed_gives_the_same_bits_everywhere(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected_model, expected_averager = Net(), LatestWeightAverager(k=K)
    snapshots(expected_model, expected_averager)
    expected = expected_averager.sample(seed=7)
    store = DiskStore(tmp_path) if kind == "disk" else "device" if kind == "device" else "host"
    model, averager = Net(), LatestWeightAverager(k=K, store=store)  # type: ignore[arg-type]
    snapshots(model, averager)
    if kind == "small blocks":
        monkeypatch.setattr(blocks, "_CPU_BLOCK", 4)
    if kind == "resumed":
        state = averager.state_dict()
        averager = LatestWeightAverager(k=K)
        averager.load_state_dict(state)
    raw = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with averager.sampled_into(model, seed=7):
        inside = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = inside if kind == "swapped" else averager.sample(seed=7)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert same_bits(found[name], tensor), name
        assert same_bits(model.state_dict()[name], raw[name]), name
    assert not same_bits(averager.sample(seed=8)["turned"], expected["turned"])
    mean = averager.average()
    for name, tensor in averager.sample(seed=7, scale=0).items():
        assert same_bits(tensor, mean[name]), name


def test_mistakes_are_told() -> None:
    averager = LatestWeightAverager(k=2, min_snapshots=1)
    model = nn.Linear(1, 1)
    averager.collect(model)
    with pytest.raises(NotReadyError, match="2 snapshots"):
        averager.sample(seed=0)
    with pytest.raises(NotReadyError, match="2 snapshots"):
        averager.sampled_into(model, seed=0)
    averager.collect(model)
    with pytest.raises(NotReadyError, match=r"not from 1.*larger k"):
        averager.sample(1, seed=0)
    for scale in (-1, math.nan, math.inf, "0.5"):
        with pytest.raises(ConfigError, match="a number of at least 0"):
            averager.sample(seed=0, scale=scale)
    with pytest.raises(ConfigError, match="seed"):
        averager.sample(seed=-1)


def test_a_copy_without_gradients_is_sampled_into() -> None:
    model, averager = nn.Linear(2, 2), LatestWeightAverager(k=2, include="weight")
    for value in (1.0, 3.0):
        with torch.no_grad():
            model.weight.fill_(value)
        averager.collect(model)
    copied = nn.Linear(2, 2).requires_grad_(requires_grad=False)
    with averager.sampled_into(copied, seed=0):
        assert same_bits(copied.weight, averager.sample(seed=0)["weight"])


def test_a_tensor_whose_shard_has_another_shape_is_named() -> None:
    def refuse(shape: torch.Size) -> None:
        raise LayoutError(f"a shard of shape {tuple(shape)}")

    shardings: dict[str, Any] = {"first.weight": SimpleNamespace(positions=refuse)}
    averager = LatestWeightAverager(k=K)
    snapshots(Net(), averager)
    with pytest.raises(LayoutError, match=r"'first.weight': a shard of shape \(3, 5\)"):
        averager._window.sample_into(averager.average(), K, Draw(0, shardings=shardings))
