"""Every number of a comparison against torch in float64; dtypes, ties, NaN, exact integers."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from torch_lawa.checkpoints.formats.safetensors import encode_header
from torch_lawa.errors import ConfigError
from torch_lawa.mean.dtypes import DTYPES
from torch_lawa.mean.kernels import PIECE
from torch_lawa.offline.inspect.comparison import compare_checkpoints
from torch_lawa.offline.inspect.difference import Difference
from torch_lawa.offline.inspect.distances import PieceDifference, Sums, comparable

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16,
          torch.float8_e4m3fn, torch.float8_e5m2]  # fmt: skip
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def compare(
    tmp_path: Path, a: dict[str, Tensor], b: dict[str, Tensor], threads: int | None = None
) -> Difference:
    save_file(a, tmp_path / "a.safetensors")
    save_file(b, tmp_path / "b.safetensors")
    return compare_checkpoints(
        tmp_path / "a.safetensors", tmp_path / "b.safetensors", threads=threads
    )


def some(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Two tensors of which a part is equal; no two neighbours are alike."""
    a = torch.randn(shape)
    b = torch.where(torch.rand(shape) < 0.3, a, a + 0.25 * torch.randn(shape))
    return a.to(dtype), b.to(dtype)


def check(difference: Difference, name: str, a: Tensor, b: Tensor) -> None:
    """Against plain float64."""
    found = next(t for t in difference.compared if t.name == name).sums
    x, y = a.double(), b.double()
    assert found.largest == (x - y).abs().max().item()
    assert found.relative == pytest.approx(((x - y).norm() / x.norm()).item(), rel=1e-12)
    cosine = torch.nn.functional.cosine_similarity(x.flatten(), y.flatten(), dim=0).item()
    assert found.cosine == pytest.approx(cosine, rel=1e-12)


@pytest.mark.parametrize("length", [1, 2, 7, PIECE - 1, 2 * PIECE + 3])
@pytest.mark.parametrize("dtype", FLOATS)
def test_one_dtype(tmp_path: Path, dtype: torch.dtype, length: int) -> None:
    a, b = some((length,), dtype)
    b[-1] = a[-1].float() * 0.5 + 1  # so that none is all equal
    difference = compare(tmp_path, {"w": a}, {"w": b})
    check(difference, "w", a, b)
    bits = BITS[a.element_size()]
    assert difference.compared[0].sums.num_differing == (a.view(bits) != b.view(bits)).sum()
    assert not difference.identical


@pytest.mark.parametrize("length", [1, 7, 2 * PIECE + 3])
@pytest.mark.parametrize("dtype_a", FLOATS)
@pytest.mark.parametrize("dtype_b", [torch.bfloat16, torch.float32])
def test_two_dtypes_are_compared_by_value(
    tmp_path: Path, dtype_a: torch.dtype, dtype_b: torch.dtype, length: int
) -> None:
    a = some((length,), dtype_a)[0]
    b = some((length,), dtype_b)[0]
    difference = compare(tmp_path, {"w": a}, {"w": b})
    check(difference, "w", a, b)
    found = difference.compared[0]
    assert found.sums.num_differing == (a.double() != b.double()).sum()
    assert ("by value" in str(difference)) == (dtype_a != dtype_b)


def test_equal_values_in_another_dtype_are_not_identical(tmp_path: Path) -> None:
    a = torch.randn(1001).bfloat16()
    difference = compare(tmp_path, {"w": a}, {"w": a.float()})
    assert difference.compared[0].sums == Sums(
        aa=difference.overall.aa, bb=difference.overall.aa, ab=difference.overall.aa
    )
    assert not difference.differing
    assert not difference.identical
    assert difference.to_json()["num_equal"] == 0


def test_overall_is_one_long_vector_of_floats(tmp_path: Path) -> None:
    pairs = {f"w{i}": some((50, i + 1), dtype) for i, dtype in enumerate(FLOATS)}
    a = {**{n: p[0] for n, p in pairs.items()}, "same": torch.ones(9), "n": torch.tensor(3)}
    b = {**{n: p[1] for n, p in pairs.items()}, "same": torch.ones(9), "n": torch.tensor(800)}
    difference = compare(tmp_path, a, b)
    x, y = (torch.cat([t.double().flatten() for n, t in s.items() if n != "n"]) for s in (a, b))
    assert difference.overall.relative == pytest.approx(((x - y).norm() / x.norm()).item(), 1e-12)
    cosine = torch.nn.functional.cosine_similarity(x, y, dim=0).item()
    assert difference.overall.cosine == pytest.approx(cosine, rel=1e-12)
    assert difference.overall.largest == (x - y).abs().max().item()
    assert [t.name for t in difference.compared if t.equal] == ["same"]
    severities = [((a[t.name].double() - b[t.name].double()).norm() / a[t.name].double().norm())
                  for t in difference.differing]  # fmt: skip
    assert severities == sorted(severities, reverse=True)
    assert len(severities) == len(FLOATS) + 1


def test_integers_are_exact(tmp_path: Path) -> None:
    a = {"i": torch.tensor([2**62 + 1, 5, 2**53 + 1]), "b": torch.tensor([True, False]),
         "u": torch.tensor([2**64 - 1, 0], dtype=torch.uint64),
         "w": torch.tensor([1, -7])}  # fmt: skip
    b = {"i": torch.tensor([-(2**62), 5, 2**53]), "b": torch.tensor([True, True]),
         "u": torch.tensor([1, 0], dtype=torch.uint64),
         "w": torch.tensor([1, -3], dtype=torch.int16)}  # fmt: skip
    difference = compare(tmp_path, a, b)
    found = {t.name: t.sums for t in difference.compared}
    assert {n: s.num_differing for n, s in found.items()} == {"i": 2, "b": 1, "u": 1, "w": 1}
    assert {n: s.largest for n, s in found.items()} == {
        "i": 2**63 + 1, "b": 1, "u": 2**64 - 2, "w": 4
    }  # fmt: skip
    assert found["w"].relative == pytest.approx(4 / math.sqrt(50))
    assert difference.overall == Sums()  # integers are not part of the vector


def test_complex_numbers(tmp_path: Path) -> None:
    a, b = torch.randn(PIECE + 5, dtype=torch.complex64), torch.randn(5, dtype=torch.complex64)
    b = torch.cat([a[:-5], b])
    found = compare(tmp_path, {"w": a}, {"w": b}).compared[0].sums
    x, y = a.to(torch.complex128), b.to(torch.complex128)
    assert found.num_differing == 5
    assert found.largest == pytest.approx((x - y).abs().max().item(), rel=1e-14)
    assert found.relative == pytest.approx(((x - y).norm() / x.norm()).item(), rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2])
def test_nan_and_inf_are_counted_and_left_out(tmp_path: Path, dtype: torch.dtype) -> None:
    a, b = (t.to(dtype) for t in some((101,), torch.float32))
    a[3], a[4], a[5] = math.nan, math.nan, math.inf
    b[3], b[6] = math.nan, -math.inf
    difference = compare(tmp_path, {"w": a}, {"w": b})
    found = difference.compared[0].sums
    assert (found.nan, found.inf) == ((2, 1), (1, 1))
    rest = a.double().isfinite() & b.double().isfinite()
    x, y = a.double()[rest], b.double()[rest]
    assert found.relative == pytest.approx(((x - y).norm() / x.norm()).item(), rel=1e-12)
    assert found.largest == (x - y).abs().max().item()
    assert "2 NaN and 1 Inf" in str(difference)
    json.dumps(difference.to_json(), allow_nan=False)
    mixed = compare(tmp_path, {"w": a}, {"w": b.double()}).compared[0].sums
    assert (mixed.nan, mixed.inf, mixed.relative) == (found.nan, found.inf, found.relative)
    assert mixed.num_differing == (a.double() != b.double()).sum() - 1  # NaN is NaN


def test_complex_with_a_nan_part_is_one_value(tmp_path: Path) -> None:
    a = torch.tensor([complex(math.nan, math.inf), complex(1, math.inf), 1 + 1j])
    found = compare(tmp_path, {"w": a}, {"w": torch.ones_like(a)}).compared[0].sums
    assert (found.nan, found.inf, found.largest, found.dd) == ((1, 0), (1, 0), 1.0, 1.0)


def test_what_has_no_number_has_none_in_json(tmp_path: Path) -> None:
    zero, one = torch.zeros(3), torch.ones(3)
    huge = torch.full((3,), 1e308, dtype=torch.float64)
    minus = -zero
    a = {"zero": zero, "huge": huge, "empty": torch.ones(0, 4), "sign": zero.clone()}
    b = {"zero": one, "huge": -huge, "empty": torch.ones(0, 4), "sign": minus}
    difference = compare(tmp_path, a, b)
    shown = json.loads(json.dumps(difference.to_json(), allow_nan=False))
    numbers = {t["name"]: (t["num_differing"], t["max_abs"], t["relative_l2"])
               for t in shown["tensors"]}  # fmt: skip
    assert numbers == {"zero": (3, 1.0, None), "huge": (3, None, None), "sign": (3, 0.0, 0.0)}
    assert shown["num_equal"] == 1
    assert [t.name for t in difference.differing][-1] == "sign"


def test_sums_that_are_too_large_are_infinite() -> None:
    total = Sums.total([Sums(dd=1e308, aa=1.0)] * 2)
    assert (total.dd, total.relative, total.aa) == (math.inf, None, 2.0)


def test_opaque_values_are_told_apart_by_their_bits(tmp_path: Path) -> None:
    from torch_lawa.checkpoints.formats.base import TensorSpec

    for name, values in ("a", bytes([1, 2, 3, 4])), ("b", bytes([1, 9, 3, 5])):
        header = encode_header([("scale", TensorSpec("F8_E8M0", (4,)))], {})[0]
        (tmp_path / f"{name}.safetensors").write_bytes(header + values)
    difference = compare_checkpoints(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert difference.differing[0].sums.num_differing == 2
    assert difference.to_json()["tensors"][0]["max_abs"] is None


def test_names_shapes_and_kinds(tmp_path: Path) -> None:
    a = {"w": torch.ones(2), "x": torch.ones(2), "old": torch.ones(1), "k": torch.ones(2)}
    b = {"w": torch.ones(2), "x": torch.ones(3), "new": torch.ones(1), "k": torch.ones(2).long()}
    difference = compare(tmp_path, a, b)
    assert (difference.a.only, difference.b.only) == (("old",), ("new",))
    assert sorted(difference.unlike) == ["k", "x"]
    assert [t.name for t in difference.compared] == ["w"]
    assert "x: F32[2] in A, F32[3] in B" in str(difference)
    assert not difference.identical


def test_ties(tmp_path: Path) -> None:
    w, head = torch.randn(4), {"head": "emb"}
    save_file({"emb": w}, tmp_path / "a.safetensors", metadata=head)
    save_file({"emb": w, "head": w + 1}, tmp_path / "b.safetensors")
    save_file({"head": w}, tmp_path / "c.safetensors", metadata={"emb": "head"})
    a, b, c = (tmp_path / f"{n}.safetensors" for n in "abc")
    untied = compare_checkpoints(a, b)
    assert (untied.a.tied, untied.b.tied) == ((("emb", "head"),), ())
    assert (untied.a.only, untied.b.only) == ((), ())
    assert [t.name for t in untied.differing] == ["head"]
    other_name_kept = compare_checkpoints(a, c)
    assert other_name_kept.identical
    assert (other_name_kept.overall.relative, other_name_kept.overall.cosine) == (0.0, 1.0)
    assert len(other_name_kept.compared) == 1


def test_threads_change_nothing(tmp_path: Path) -> None:
    a, b = some((5 * PIECE + 17,), torch.float32)
    one, three = (compare(tmp_path, {"w": a}, {"w": b}, threads=n) for n in (1, 3))
    assert one.to_json() == three.to_json()
    with pytest.raises(ConfigError, match="threads=0"):
        compare(tmp_path, {"w": a}, {"w": b}, threads=0)


def test_a_run_is_not_one_checkpoint(tmp_path: Path) -> None:
    for step in (10, 20):
        save_file({"w": torch.ones(1)}, tmp_path / f"step_{step}.safetensors")
    with pytest.raises(ConfigError, match=r"2 checkpoints .* such as .*step_20\.safetensors"):
        compare_checkpoints(tmp_path, tmp_path / "step_10.safetensors")


def test_a_pytorch_file_against_safetensors(tmp_path: Path) -> None:
    state = {"w": torch.randn(10, 3).bfloat16(), "n": torch.arange(4)}
    torch.save(state, tmp_path / "a.pt")
    save_file(state, tmp_path / "b.safetensors")
    assert compare_checkpoints(tmp_path / "a.pt", tmp_path / "b.safetensors").identical


def test_only_like_kinds_are_comparable() -> None:
    for a in DTYPES:
        for b in DTYPES:
            assert comparable(a, b) == comparable(b, a)
            if comparable(a, b):
                raws = [torch.ones(4 * DTYPES[c].itemsize, dtype=torch.uint8).numpy()
                        for c in (a, b)]  # fmt: skip
                PieceDifference(8).compare(raws[0], a, raws[1], b)
    assert not comparable("U64", "I64")
    assert not comparable("C64", "F32")
