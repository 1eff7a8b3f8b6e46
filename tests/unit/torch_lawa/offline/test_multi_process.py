"""Shares of the work: every value once, of even cost, and no two in the same block of a file."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_lawa.checkpoints.formats.base import TensorSpec
from torch_lawa.checkpoints.formats.safetensors import encode_header
from torch_lawa.offline.engine import value_width
from torch_lawa.offline.matching import PlannedTensor
from torch_lawa.offline.multi_process import BLOCK, share_cuts, spans_between
from torch_lawa.offline.output_files import OutputFile

CODES = ("F64", "C64", "I64", "F32", "BF16", "F16", "U8", "BOOL")  # widest first, as in a file


def output_file(file: str, tensors: list[tuple[str, int]]) -> OutputFile:
    ordered = sorted(tensors, key=lambda t: CODES.index(t[0]))
    planned = [
        PlannedTensor(
            f"{file}/{i}", spec, spec, "average" if code[0] in "FCB" else "newest", str(i)
        )
        for i, (code, numel) in enumerate(ordered)
        for spec in [TensorSpec(code, (numel,))]
    ]
    _, starts, size = encode_header([(t.written, t.target) for t in planned], {"a": "b"})
    return OutputFile(file, size, tuple((t, starts[t.written]) for t in planned))


@given(
    st.lists(
        st.lists(st.tuples(st.sampled_from(CODES), st.integers(0, 300_000)), max_size=6), max_size=4
    ),
    st.integers(1, 9),
    st.integers(1, 8),
)
def test_every_value_once_and_blocks_apart(
    files: list[list[tuple[str, int]]], num_shares: int, num_averaged: int
) -> None:
    outputs = [output_file(f"f{i}", tensors) for i, tensors in enumerate(files)]
    cuts = share_cuts(outputs, num_shares, num_averaged)
    assert len(cuts) == num_shares + 1
    assert cuts == sorted(cuts)
    assert all(cut % BLOCK == 0 for cut in cuts)
    values: dict[str, list[tuple[int, int]]] = {}
    blocks: dict[tuple[str, int], set[int]] = {}
    for share, (begin, end) in enumerate(itertools.pairwise(cuts)):
        for tensor, first, last in spans_between(outputs, begin, end):
            values.setdefault(tensor.name, []).append((first, last))
            file = next(f for f in outputs if any(t is tensor for t, _ in f.tensors))
            start = next(start for t, start in file.tensors if t is tensor)
            width = value_width(tensor.target.dtype)
            for block in range(
                (start + first * width) // BLOCK, (start + last * width - 1) // BLOCK + 1
            ):
                blocks.setdefault((file.file, block), set()).add(share)
    assert all(len(shares) == 1 for shares in blocks.values())
    for file in outputs:
        for tensor, _ in file.tensors:
            numel = tensor.target.nbytes // value_width(tensor.target.dtype)
            ends = [0, *(last for _, last in values.get(tensor.name, []))]
            assert [first for first, _ in values.get(tensor.name, [])] == ends[:-1]
            assert ends[-1] == numel


def test_one_large_tensor_is_shared_evenly() -> None:
    outputs = [output_file("f", [("BF16", 64_000_000), ("F32", 1000)])]
    cuts = share_cuts(outputs, 4, 6)
    sizes = [
        sum(last - first for _, first, last in spans_between(outputs, begin, end))
        for begin, end in itertools.pairwise(cuts)
    ]
    assert max(sizes) - min(sizes) < 2 * BLOCK


def test_what_is_only_copied_costs_less() -> None:
    """Twice the bytes, but read from one checkpoint and not from nine."""
    outputs = [output_file("f", [("F32", 1_000_000)]), output_file("g", [("I64", 1_000_000)])]
    (_, cut, _) = share_cuts(outputs, 2, 9)
    averaged, copied = 4_000_000 * 10, 8_000_000 * 2
    assert cut == pytest.approx((averaged + copied) / 2 / 10, abs=BLOCK)
