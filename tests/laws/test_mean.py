"""The mean is the true mean, correctly rounded: against exact fractions and plain NumPy."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.models import FORMATS, brute_force, round_fraction, same_bits, true_mean
from torch import Tensor

from torch_lawa.coefficients import Explicit, Exponential, Uniform, Weights
from torch_lawa.mean import blocks as mean_module
from torch_lawa.mean.blocks import mean_blocks, mean_reference, round_into

NARROW = [torch.float32, torch.bfloat16, torch.float16]


def fast_mean(tensors: list[Tensor], weights: Weights, dtype: torch.dtype) -> Tensor:
    out = torch.empty(tensors[0].shape, dtype=dtype)
    for start, block in mean_blocks(tensors, weights):
        round_into(out[start : start + block.numel()], block)
    return out


@pytest.fixture
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mean_module, "_CPU_BLOCK", 7)


def window(k: int, n: int, dtype: torch.dtype, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, generator=generator).to(dtype) for _ in range(k)]


@pytest.mark.usefixtures("_small_blocks")
@pytest.mark.parametrize("dtype", NARROW)
@given(k=st.integers(1, 20), n=st.integers(1, 30), seed=st.integers(0, 2**31))
def test_uniform_mean_is_the_true_mean_correctly_rounded(
    dtype: torch.dtype, k: int, n: int, seed: int
) -> None:
    snapshots = window(k, n, dtype, seed)
    expected = [round_fraction(m, dtype) for m in true_mean(snapshots)]
    for mean in (fast_mean, mean_reference):
        assert mean(snapshots, Uniform().weights(k), dtype).double().tolist() == expected


@pytest.mark.usefixtures("_small_blocks")
@given(seed=st.integers(0, 2**31), k=st.integers(2, 9))
def test_order_of_inputs_does_not_matter(seed: int, k: int) -> None:
    snapshots = window(k, 50, torch.float32, seed)
    shuffled = [snapshots[i] for i in torch.randperm(k).tolist()]
    uniform = Uniform().weights(k)
    assert same_bits(
        fast_mean(snapshots, uniform, torch.float32), fast_mean(shuffled, uniform, torch.float32)
    )


@pytest.mark.usefixtures("_small_blocks")
@pytest.mark.parametrize("dtype", [*NARROW, torch.float64])
@given(data=st.data())
def test_any_values_at_all_equal_a_float64_brute_force(
    dtype: torch.dtype, data: st.DataObject
) -> None:
    """Also NaN, Inf, subnormals and values too far apart for an exact sum."""
    k, n = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 10))
    values = st.lists(st.floats(width=32), min_size=n, max_size=n)
    snapshots = [torch.tensor(data.draw(values)).to(dtype) for _ in range(k)]
    with np.errstate(all="ignore"):
        expected = torch.from_numpy(brute_force(snapshots))
    assert same_bits(fast_mean(snapshots, Uniform().weights(k), torch.float64), expected)


@pytest.mark.parametrize("dtype", list(FORMATS))
@given(
    tick=st.integers(-(2**9), 2**9),
    exponent=st.integers(-8, 8),
    nudge=st.sampled_from([0, 2**-20, -(2**-20), 2**-45, -(2**-45)]),
)
def test_rounding_happens_once(dtype: torch.dtype, tick: int, exponent: int, nudge: float) -> None:
    """Values a hair beside a tie, where rounding by way of float32 lands on the wrong side."""
    from fractions import Fraction

    largest = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, torch.float16: 65504.0}
    value = tick * 2.0**exponent * (1.0 + nudge)
    if abs(value) > largest.get(dtype, 1e30):
        return
    out = torch.empty(1, dtype=dtype)
    round_into(out, torch.tensor([value], dtype=torch.float64))
    assert out.double().item() == round_fraction(Fraction(value), dtype)


def test_pytorch_alone_rounds_twice() -> None:
    """The reason for `round_into`: the plain conversion is wrong here."""
    just_above_a_tie = torch.tensor([1.0 + 2.0**-8 + 2.0**-40], dtype=torch.float64)
    out = torch.empty(1, dtype=torch.bfloat16)
    round_into(out, just_above_a_tie)
    assert just_above_a_tie.to(torch.bfloat16).item() == 1.0
    assert out.item() == 1.0 + 2.0**-7


@given(seed=st.integers(0, 2**31), k=st.integers(1, 12))
def test_exponential_is_the_recursion_of_the_paper(seed: int, k: int) -> None:
    snapshots = window(k, 20, torch.float32, seed)
    alpha = 0.9
    ema = snapshots[0].double()
    for snapshot in snapshots[1:]:
        ema = alpha * snapshot.double() + (1 - alpha) * ema
    mean = fast_mean(snapshots, Exponential(alpha).weights(k), torch.float64)
    torch.testing.assert_close(mean, ema, rtol=1e-14, atol=1e-15)


@given(seed=st.integers(0, 2**31), weights=st.lists(st.integers(1, 100), min_size=1, max_size=8))
def test_whole_number_weights_are_exact(seed: int, weights: list[int]) -> None:
    snapshots = window(len(weights), 20, torch.float32, seed)
    expected = [round_fraction(m, torch.float32) for m in true_mean(snapshots, weights)]
    got = fast_mean(snapshots, Explicit(weights).weights(len(weights)), torch.float32)
    assert got.double().tolist() == expected


def test_a_snapshot_of_weight_zero_is_not_read() -> None:
    snapshots = [torch.full((3,), float("nan")), torch.ones(3)]
    mean = fast_mean(snapshots, Explicit([0, 1]).weights(2), torch.float32)
    assert mean.tolist() == [1.0, 1.0, 1.0]


def test_mean_of_identical_snapshots_is_the_snapshot_to_the_last_bit() -> None:
    snapshot = torch.cat([torch.randn(1000), torch.tensor([-0.0, 0.0, 1e-45, 3e38])])
    for k in range(1, 20):
        mean = fast_mean([snapshot] * k, Uniform().weights(k), torch.float32)
        assert same_bits(mean, snapshot)


def test_off_the_cpu_it_is_divided_by_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a number CUDA multiplies with the reciprocal, whose rounding would be a second one."""
    divisors: list[object] = []
    monkeypatch.setattr(torch, "div", lambda total, by, out: divisors.append(by))
    for device in ("cpu", "meta"):
        total = torch.empty(4, dtype=torch.float64, device=device)
        mean_module.divide(total, 3.0, out=total)
    assert divisors[0] == 3.0
    assert isinstance(divisors[1], Tensor)
    assert (divisors[1].device.type, divisors[1].dtype) == ("meta", torch.float64)
