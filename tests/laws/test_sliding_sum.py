"""The sliding sum has the bits of adding the window up afresh, on any input, for ever."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models import brute_force, same_bits
from torch import Tensor

from torch_lawa import LatestWeightAverager
from torch_lawa.mean import blocks as mean_module
from torch_lawa.mean import sliding_sum as sliding_module
from torch_lawa.mean.sliding_sum import SlidingSum

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
WILD = st.one_of(
    st.floats(width=32),
    st.sampled_from([1e30, -1e30, 1.0, -1.0, 1e-30, 0.0, -0.0, float("inf"), float("nan")]),
    st.floats(-1, 1, width=32),
)


def read(total: SlidingSum, n: int) -> Tensor:
    out = torch.empty(n, dtype=torch.float64)
    for start, block in total.blocks():
        out[start : start + block.numel()] = block
    return out


def follow(stream: list[Tensor], k: int) -> SlidingSum:
    """Slide over a stream, checking the bits after every snapshot."""
    total = SlidingSum(k)
    for i in range(len(stream)):
        ids = list(range(max(0, i - k + 1), i + 1))
        window = [stream[j] for j in ids]
        leaving = stream[i - k] if i >= k else None
        if total.can_slide(ids, leaving is not None):
            total.slide(ids, window, leaving)
        else:
            assert i == 0 or k == 1
            total.rebuild(ids, window)
        with np.errstate(all="ignore"):
            expected = torch.from_numpy(brute_force(window))
        assert same_bits(read(total, stream[0].numel()), expected), i
    return total


@pytest.fixture
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of three values, two to a block: every boundary within a few values."""
    monkeypatch.setattr(mean_module, "_CPU_BLOCK", 6)
    monkeypatch.setattr(sliding_module, "_ROW", 3)


@pytest.mark.usefixtures("_small_blocks")
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=150)
@given(data=st.data())
def test_same_bits_as_adding_up_afresh_on_any_input(
    dtype: torch.dtype, data: st.DataObject
) -> None:
    k, n = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 12))
    length = data.draw(st.integers(1, 14))
    stream = [
        torch.tensor(data.draw(st.lists(WILD, min_size=n, max_size=n))).to(dtype)
        for _ in range(length)
    ]
    follow(stream, k)


@pytest.mark.usefixtures("_small_blocks")
@settings(max_examples=300)
@given(data=st.data(), k=st.integers(2, 8), seed=st.integers(0, 2**31))
def test_same_bits_where_exactness_ends(data: st.DataObject, k: int, seed: int) -> None:
    """Rows whose bound stands still, with values on both sides of the last one that is safe."""
    generator = torch.Generator().manual_seed(seed)
    # Ordinary values mostly, so that rows are trusted most of the time.
    sizes = st.sampled_from([*[0] * 12, 24, 26, 27, 28, 29, 30, 33, None])
    signs = data.draw(st.sampled_from([[1], [1, -1]]))

    def draw() -> float:
        size = data.draw(sizes)
        if size is None:
            return data.draw(st.sampled_from([0.0, -0.0]))
        odd = 2**23 + 2 * int(torch.randint(2**22, (), generator=generator)) + 1
        return odd * 2.0 ** (-23 - size) * data.draw(st.sampled_from(signs))

    stream = [torch.tensor([1.99, draw(), draw()]) for _ in range(3 * k)]
    follow(stream, k)


def test_negative_zeros_keep_their_sign() -> None:
    zeros, ones = torch.full((64,), -0.0), torch.ones(64)
    total = follow([ones, zeros, zeros, zeros, zeros, ones, zeros, zeros, zeros], 2)
    assert torch.signbit(read(total, 64)).all()


@pytest.mark.usefixtures("_small_blocks")
def test_a_spike_leaves_no_trace() -> None:
    """1e20 among ordinary weights: float64 forgets the rest while it is there, not after."""
    stream = [torch.randn(12) for _ in range(20)]
    stream[5][3] = 1e20
    stream[9][7] = float("nan")
    stream[12][1] = -float("inf")
    follow(stream, 4)


def test_no_drift_in_ten_thousand_updates() -> None:
    k, n = 6, 64
    ring = [torch.randn(n) * 0.02 for _ in range(k)]
    total = SlidingSum(k)
    total.rebuild(range(k), ring)
    naive = torch.stack(ring).sum(0)
    for i in range(10_000):
        newest = ring[-1] + torch.randn(n) * 1e-3
        naive += newest - ring[0]
        leaving, ring = ring[0], [*ring[1:], newest]
        total.slide(range(i + 1, i + 1 + k), ring, leaving)
    exact = torch.from_numpy(brute_force(ring))
    assert same_bits(read(total, n), exact)
    # What a float32 running sum makes of the same stream.
    wrong = (naive / k != exact.float()).float().mean().item()
    assert wrong > 0.9


def test_the_usual_case_slides_and_adds_little_afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard must not turn every update into a rebuild, or the cost depends on k again."""
    refreshed: list[int] = []
    original = SlidingSum._sum_again

    def watched(self: SlidingSum, rows: Tensor, window: list[Tensor]) -> None:
        refreshed.append(rows.numel())
        original(self, rows, window)

    monkeypatch.setattr(SlidingSum, "_sum_again", watched)
    stream = [torch.randn(100_000) * 0.02]
    for _ in range(40):
        stream.append(stream[-1] + torch.randn(100_000) * 1e-3)
    follow(stream, 4)
    assert sum(refreshed) < 0.02 * len(refreshed) * 100_000 / 64


@pytest.mark.parametrize("spike", [1e20, float("nan"), float("inf")])
def test_a_spike_everywhere_is_forgotten(monkeypatch: pytest.MonkeyPatch, spike: float) -> None:
    """After a diverged snapshot has left, rows are trusted again."""
    refreshed: list[int] = []
    original = SlidingSum._sum_again
    monkeypatch.setattr(
        SlidingSum,
        "_sum_again",
        lambda self, rows, window: (refreshed.append(rows.numel()), original(self, rows, window)),
    )
    start = torch.randn(640)
    stream = [start + 0.01 * torch.randn(640) for _ in range(30)]
    stream[8] = stream[8] * spike
    follow(stream, 4)
    assert refreshed[8] == 10
    assert sum(refreshed[20:]) == 0


def test_windows_that_jump_are_not_slid() -> None:
    total = SlidingSum(3)
    assert not total.can_slide([0, 1], True)
    total.rebuild([0, 1, 2], [torch.ones(2)] * 3)
    assert total.can_slide([1, 2, 3], True)
    assert not total.can_slide([1, 2, 3], False)
    assert not total.can_slide([2, 3, 4], True)
    assert not total.can_slide([2, 3], True)


@pytest.mark.parametrize("slides", [True, False])
def test_an_interrupted_update_leaves_no_wrong_mean(
    monkeypatch: pytest.MonkeyPatch, slides: bool
) -> None:
    """Ctrl-C or a lack of memory between two blocks: the next read sums the window again."""
    averager = LatestWeightAverager(k=2, _sliding=True)
    values = torch.ones(300)

    def collect(value: float) -> None:
        averager.collect({"w": values * value})

    collect(1.0)
    collect(2.0)
    if slides:
        averager.average()
    collect(9.0)
    with monkeypatch.context() as patch:
        patch.setattr(SlidingSum, "_parts", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            averager.average()
    assert averager.average()["w"].unique().tolist() == [5.5]
