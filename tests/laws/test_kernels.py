"""The mean of raw bytes against exact fractions and against the tensors' definition."""

from collections.abc import Iterator
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models import FORMATS, round_fraction, true_mean
from torch import Tensor

from torch_lawa import LatestWeightAverager
from torch_lawa.coefficients import Explicit, Exponential, Uniform, Weights
from torch_lawa.errors import ConfigError
from torch_lawa.mean.blocks import mean_reference
from torch_lawa.mean.dtypes import DTYPES
from torch_lawa.mean.kernels_native import CompiledPieces
from torch_lawa.mean.kernels_numpy import NumpyPieces

COMPILED = pytest.param(
    CompiledPieces,
    id="compiled",
    marks=pytest.mark.skipif(not CompiledPieces.available(), reason="no C loops: no compiler"),
)
either = pytest.mark.parametrize("made_by", [pytest.param(NumpyPieces, id="numpy"), COMPILED])
Maker = type[NumpyPieces] | type[CompiledPieces]

FLOATS = [code for code, d in DTYPES.items() if d.kind == "float"]


def dtype_of(code: str) -> torch.dtype:
    found = getattr(torch, DTYPES[code].torch_name)
    assert isinstance(found, torch.dtype)
    return found


def raw(tensor: Tensor) -> np.ndarray:
    return tensor.contiguous().view(torch.uint8).numpy()


def assert_same(made: np.ndarray, expected: Tensor) -> None:
    """Equal bits, except that any NaN equals any other."""
    wide = torch.from_numpy(made.copy()).view(expected.dtype).double()
    reference = expected.double()
    assert torch.equal(wide.isnan(), reference.isnan())
    keep = ~reference.isnan()
    assert torch.equal(wide[keep], reference[keep])
    assert torch.equal(wide[keep].signbit(), reference[keep].signbit())


def random_bits(code: str, n: int, seed: int) -> Tensor:
    """Every pattern may come: subnormals, infinities, NaN."""
    generator = torch.Generator().manual_seed(seed)
    size = n * DTYPES[code].itemsize
    made = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
    return made.view(dtype_of(code))


@either
@pytest.mark.parametrize("target", FLOATS)
@pytest.mark.parametrize("source", FLOATS)
@settings(max_examples=25, deadline=None)
@given(
    n=st.integers(1, 65) | st.sampled_from([1024, 1025, 2500]),
    k=st.integers(1, 6),
    seed=st.integers(0, 2**32 - 1),
    rule=st.sampled_from([Uniform(), Exponential(0.3), Explicit([3, -1, 0, 2, 5, 1])]),
)
def test_any_bits_give_the_bits_of_the_definition(
    made_by: Maker, source: str, target: str, n: int, k: int, seed: int, rule: Uniform
) -> None:
    if target == "F8_E4M3" and (source != target or isinstance(rule, Explicit)):
        return  # beyond its range PyTorch changed its mind between versions: see below
    tensors = [random_bits(source, n, seed + i) for i in range(k)]
    weights = rule.weights(k)
    used = [i for i, w in enumerate(weights.numerators) if w != 0.0]
    counted = Weights(tuple(weights.numerators[i] for i in used), weights.divisor)
    raws = [raw(tensors[i]) for i in used]
    expected = mean_reference(tensors, weights, dtype_of(target))
    for way in (raws, iter(raws)):  # all at hand, or one after the other
        assert_same(made_by(2500).mean(way, counted, source, target), expected)


@either
@pytest.mark.parametrize("source", ["F32", "BF16", "F16", "F8_E4M3", "F8_E5M2"])
@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(*[st.floats(-200, 200).filter(lambda x: x == 0 or abs(x) > 1e-2)] * 3),
        min_size=1,
        max_size=9,
    )
)
def test_the_mean_is_the_true_mean_rounded_once(
    made_by: Maker, source: str, rows: list[tuple[float, ...]]
) -> None:
    tensors = [torch.tensor([r[i] for r in rows]).to(dtype_of(source)) for i in range(3)]
    made = made_by(10).mean([raw(t) for t in tensors], Uniform().weights(3), source, source)
    found = torch.from_numpy(made.copy()).view(dtype_of(source)).double().tolist()
    assert found == [round_fraction(f, dtype_of(source)) for f in true_mean(tensors)]


@either
@pytest.mark.parametrize("code", ["BF16", "F16", "F8_E4M3", "F8_E5M2"])
def test_every_value_survives(made_by: Maker, code: str) -> None:
    width = DTYPES[code].itemsize
    numbers = np.arange(256**width, dtype=f"<u{width}")
    values = torch.from_numpy(numbers.view(np.uint8)).view(dtype_of(code))
    made = made_by(len(values)).mean([raw(values)], Uniform().weights(1), code, code)
    assert_same(made, values)


@either
@pytest.mark.parametrize("code", ["BF16", "F16", "F8_E4M3", "F8_E5M2"])
def test_ties_and_their_neighbours_round_once(made_by: Maker, code: str) -> None:
    """Just above and below the middle of two values, by less than float32 can tell."""
    base = torch.tensor([1.0, 1.5, 3.0, 0.0625, -2.5], dtype=torch.float64)
    step = {"BF16": 2.0**-8, "F16": 2.0**-11, "F8_E4M3": 2.0**-4, "F8_E5M2": 2.0**-3}[code]
    precision, smallest = FORMATS[dtype_of(code)]
    quantum = 2.0 ** (smallest - precision + 1)  # of the smallest numbers, which are not normal
    middle = torch.cat([base * (1 + step), torch.tensor([2.5, 3.5, -0.5, 1.5]).double() * quantum])
    values = torch.cat([middle, middle * (1 + 2.0**-50), middle * (1 - 2.0**-50)])
    made = made_by(30).mean([raw(values)], Uniform().weights(1), "F64", code)
    found = torch.from_numpy(made.copy()).view(dtype_of(code)).double().tolist()
    assert found == [round_fraction(Fraction(v), dtype_of(code)) for v in values.tolist()]


@either
def test_float8_without_infinity_stays_at_its_largest(made_by: Maker) -> None:
    values = torch.tensor([447.0, 470.0, 1e30, torch.inf, -torch.inf, torch.nan])
    made = made_by(6).mean([raw(values)], Uniform().weights(1), "F32", "F8_E4M3")
    found = torch.from_numpy(made.copy()).view(torch.float8_e4m3fn).double()
    assert found[:5].tolist() == [448.0, 448.0, 448.0, 448.0, -448.0]
    assert found[5].isnan()


@either
def test_complex_numbers_are_pairs(made_by: Maker) -> None:
    a, b = torch.tensor([1 + 2j, 5 - 1j]), torch.tensor([3 + 3j, 0 + 1j])
    made = made_by(4).mean([raw(a), raw(b)], Uniform().weights(2), "C64", "C64")
    assert torch.from_numpy(made.copy()).view(torch.complex64).tolist() == [2 + 2.5j, 2.5 + 0j]


@either
@pytest.mark.parametrize("source", FLOATS)
@pytest.mark.parametrize("shift", [1, 2, 4])
def test_unaligned_bytes_are_read_as_well(made_by: Maker, source: str, shift: int) -> None:
    tensors = [random_bits(source, 13, seed) for seed in range(3)]
    shifted = []
    for tensor in tensors:
        room = np.zeros(len(raw(tensor)) + 16, np.uint8)
        start = (-room.ctypes.data % 8) + shift
        room[start : start + len(raw(tensor))] = raw(tensor)
        shifted.append(room[start : start + len(raw(tensor))])
    made = made_by(13).mean(shifted, Uniform().weights(3), source, source)
    assert_same(made, mean_reference(tensors, Uniform().weights(3), dtype_of(source)))


@either
def test_large_values_are_finite_although_their_sum_is_not(made_by: Maker) -> None:
    piece = made_by(4)
    values = torch.full((4,), 1.5e308, dtype=torch.float64)
    piece.mean([raw(values)], Uniform().weights(1), "F64", "F64")
    assert piece.finite is True


@either
def test_it_says_whether_the_mean_is_finite(made_by: Maker) -> None:
    piece = made_by(4)
    for values, finite in (([1.0, 2.0], True), ([1.0, torch.inf], False), ([torch.nan], False)):
        piece.mean([raw(torch.tensor(values))], Uniform().weights(1), "F32", "F32")
        assert piece.finite is finite


@either
@pytest.mark.parametrize("source", FLOATS)
@settings(max_examples=20, deadline=None)
@given(n=st.integers(1, 33), num=st.integers(2, 7), seed=st.integers(0, 2**32 - 1), data=st.data())
def test_many_windows_equal_each_alone(
    made_by: Maker, source: str, n: int, num: int, seed: int, data: st.DataObject
) -> None:
    tensors = [random_bits(source, n, seed + i) for i in range(num)]
    ends = st.tuples(st.integers(0, num - 1), st.integers(1, num)).filter(
        lambda p: p[1] <= p[0] + 1
    )
    chosen = data.draw(st.lists(ends, min_size=1, max_size=6))
    rule = data.draw(
        st.sampled_from([Uniform(), Exponential(0.7), Explicit([1, 0, 2, 0, 0, 1, 4])])
    )
    windows = [(range(end - k + 1, end + 1), rule.weights(k)) for end, k in chosen]
    pieces = made_by(34)
    made = [m.copy() for m in pieces.means(map(raw, tensors), windows, source, source)]
    for (positions, weights), mean in zip(windows, made, strict=True):
        expected = mean_reference([tensors[i] for i in positions], weights, dtype_of(source))
        assert_same(mean, expected)


@either
@pytest.mark.parametrize("source", ["F64", "F32", "BF16", "F16"])
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), spoilt=st.sampled_from([None, 1e20, -0.0, torch.inf, 1e-30]))
def test_windows_of_ordinary_weights_and_of_spoilt_ones(
    made_by: Maker, source: str, seed: int, spoilt: float | None
) -> None:
    """Sums from the start serve every window until something makes them depend on their order."""
    generator = torch.Generator().manual_seed(seed)
    num, n = 12, 40
    steps = torch.randn(num, n, generator=generator, dtype=torch.float64)
    tensors = list((steps.cumsum(0) * 0.01).to(dtype_of(source)))
    if spoilt is not None:
        tensors[seed % num][seed % n] = torch.tensor(spoilt).to(dtype_of(source))
        if spoilt == 0.0:
            for tensor in tensors:
                tensor[3] = -0.0
    windows = [
        (range(end - k + 1, end + 1), Uniform().weights(k))
        for end in range(num)
        for k in (1, 2, 3, 8)
        if k <= end + 1
    ]
    made = [m.copy() for m in made_by(n).means(map(raw, tensors), windows, source, source)]
    for (positions, weights), mean in zip(windows, made, strict=True):
        chosen = [tensors[i] for i in positions]
        assert_same(mean, mean_reference(chosen, weights, dtype_of(source)))


# Smallest and largest bits without the sign, and whether signs differ: values of similar size (near
# 1, the smallest ones, the largest ones) are summed in float32, the others in float64.
BFLOAT16 = {
    "similar": (0x3F80, 0x4000, False),
    "both signs": (0x3F00, 0x4100, True),
    "subnormal": (0x0000, 0x0180, True),
    "largest": (0x7F60, 0x7F80, True),
    "zeros": (0x0000, 0x0001, True),
    "all finite": (0x0000, 0x7F80, True),
}


@either
@pytest.mark.parametrize("sizes", BFLOAT16)
@settings(max_examples=30, deadline=None)
@given(
    n=st.sampled_from([63, 64, 65, 192, 512, 600, 1100]),
    k=st.integers(1, 40),
    seed=st.integers(0, 2**32 - 1),
    spoilt=st.sampled_from([None, None, 0x7F80, 0xFFC1, 0x8000, 0x0001, 0x4B80]),
)
def test_bfloat16_of_similar_sizes_and_of_others(
    made_by: Maker, sizes: str, n: int, k: int, seed: int, spoilt: int | None
) -> None:
    smallest, largest, signed = BFLOAT16[sizes]
    random = np.random.default_rng(seed)
    bits = random.integers(smallest, largest, (k, n))
    bits |= random.integers(0, 1 + signed, (k, n)) << 15
    if spoilt is not None:
        bits[seed % k, seed % n] = spoilt
    raws = list(bits.astype(np.uint16).view(np.uint8))
    tensors = [torch.from_numpy(each.copy()).view(torch.bfloat16) for each in raws]
    weights, pieces = Uniform().weights(k), made_by(1100)
    made = pieces.mean(raws, weights, "BF16", "BF16").copy()
    assert_same(made, mean_reference(tensors, weights, torch.bfloat16))
    assert pieces.finite == bool(torch.stack(tensors).isfinite().all())
    if spoilt is None and sizes != "all finite":  # every float64 sum is exact
        some = random.choice(n, 5)
        found = torch.from_numpy(made).view(torch.bfloat16)[some].double().tolist()
        exact = true_mean([tensor[some] for tensor in tensors])
        assert found == [round_fraction(f, torch.bfloat16) for f in exact]
    own = Weights((1.0,) * k, 3.0)  # a rule of one's own
    made = pieces.mean(raws, own, "BF16", "BF16")
    assert_same(made, mean_reference(tensors, own, torch.bfloat16))
    firsts = sorted({0, k // 3, k // 2, k - 1})
    windows = [(range(first, k), Uniform().weights(k - first)) for first in firsts]
    windows += [(range(k), own)]
    for (at, each), mean in zip(windows, pieces.means(raws, windows, "BF16", "BF16"), strict=True):
        assert_same(mean, mean_reference([tensors[i] for i in at], each, torch.bfloat16))


@either
def test_a_window_that_only_its_prefix_sums_can_hold(made_by: Maker) -> None:
    """All sums from the start are exact in float32, but not the difference of two of them."""
    column = [-2.0, -2 - 2.0**-6, 2.0, 2 + 2.0**-6, 2.0**-30, 0.0]
    tensors = [torch.full((64,), value, dtype=torch.bfloat16) for value in column]
    windows = [(range(2, 6), Uniform().weights(4))]
    (made,) = made_by(64).means(map(raw, tensors), windows, "BF16", "BF16")
    # Just above the middle of 1 and the next value.
    assert torch.from_numpy(made.copy()).view(torch.bfloat16).tolist() == [1 + 2.0**-7] * 64


@pytest.fixture
def _flushing() -> Iterator[None]:
    """Subnormal numbers are zero in this thread, as after loading a library with -ffast-math."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush")
    yield
    torch.set_flush_denormal(False)


def flushes() -> bool:
    return bool(torch.tensor(2.0**-149, dtype=torch.float64).float().double() == 0)


@pytest.mark.skipif(not CompiledPieces.available(), reason="no C loops: no compiler")
@pytest.mark.parametrize("code", ["F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "F64"])
@pytest.mark.parametrize("several", [False, True])
def test_a_process_that_flushes_subnormals_has_the_same_bits(
    request: pytest.FixtureRequest, code: str, several: bool
) -> None:
    # Exponents of zero and near it: subnormal numbers and small ones.
    bits = [random_bits(code, 600, seed) for seed in range(3)]
    small = torch.tensor(2.0 ** (-10 if DTYPES[code].itemsize < 4 else -120), dtype=torch.float64)
    inputs = [(b.double().nan_to_num(1, 1, 1).clamp(-2, 2) * small).to(b.dtype) for b in bits]

    def means(pieces: CompiledPieces) -> list[bytes]:
        given, weights = [raw(tensor) for tensor in inputs], Uniform().weights(3)
        if several:
            windows = [(range(3), weights), (range(1, 3), Uniform().weights(2))]
            return [bytes(each) for each in pieces.means(given, windows, code, code)]
        return [
            bytes(pieces.mean(given, weights, code, code)),
            bytes(pieces.mean(iter(given), Exponential(0.3).weights(3), code, code)),
        ]

    expected = means(CompiledPieces(600))
    assert any(any(each) for each in expected)
    request.getfixturevalue("_flushing")
    assert means(CompiledPieces(600)) == expected
    assert flushes()  # the caller's environment is restored


@pytest.mark.usefixtures("_flushing")
def test_numpy_refuses_to_lose_subnormals() -> None:
    with pytest.raises(ConfigError, match="subnormal"):
        NumpyPieces(8)


@pytest.mark.usefixtures("_flushing")
def test_the_averager_warns_that_subnormals_are_lost() -> None:
    averager = LatestWeightAverager(k=1)
    averager.collect({"w": torch.ones(2)})
    with pytest.warns(RuntimeWarning, match="subnormal"):
        averager.average()
