"""Ranges of flattened tensors: their boxes are the range, whatever the shape and the cuts."""

import itertools
import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from torch_lawa.boxes import boxes

shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@given(shapes, st.data())
def test_the_boxes_of_a_run_are_its_values_in_order(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    numel = math.prod(shape)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    whole = torch.arange(numel).view(shape)
    found = []
    for offsets, sizes in boxes(shape, start, stop):
        part = whole
        for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
            part = part.narrow(dim, offset, size)
        found += part.flatten().tolist()
    assert found == list(range(start, stop))
    assert len(list(boxes(shape, start, stop))) <= max(1, 2 * len(shape) - 1)


@given(shapes, st.data())
def test_runs_that_cut_a_tensor_have_boxes_that_tile_it(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    numel = math.prod(shape)
    cuts = sorted(data.draw(st.lists(st.integers(0, numel), max_size=5)))
    seen = torch.zeros(shape, dtype=torch.int64)
    for start, stop in itertools.pairwise([0, *cuts, numel]):
        for offsets, sizes in boxes(shape, start, stop):
            slices = tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
            seen[slices] += 1
    assert bool((seen == 1).all())
