"""Sequences are the stream in order, between `<s>` and `</s>`."""

import warnings

import numpy as np
import pytest
import torch

from lawa_lab.recipes.data import sequences
from lawa_lab.recipes.data.sequences import Sequences

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
@pytest.mark.parametrize("most_on_device", [2**32, 0])
def test_rows_are_cut_from_the_stream(
    dtype: type, most_on_device: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sequences, "_MOST_ON_DEVICE", most_on_device)
    highest = 65_535 if dtype is np.uint16 else 2**31 - 1
    stream = np.array([7, highest, 40_000, 5, 9, 8, 6, 5, 32_768, 11, 12], dtype)
    rows = Sequences(stream, 6, CPU)
    assert len(rows) == 2  # three tokens are left over
    found = rows[torch.tensor([1, 0, 1])]
    assert found.dtype == torch.int64
    assert found.tolist() == [
        [0, 9, 8, 6, 5, 2],
        [0, 7, highest, 40_000, 5, 2],
        [0, 9, 8, 6, 5, 2],
    ]
    assert stream[1] == highest  # what is given is not changed


def test_a_stream_that_is_too_short_has_no_rows() -> None:
    assert len(Sequences(np.arange(3, dtype=np.uint16), 6, CPU)) == 0


def test_a_mapped_file_is_taken_without_a_warning(tmp_path) -> None:  # type: ignore[no-untyped-def]
    np.save(tmp_path / "ids.npy", np.arange(20, dtype=np.uint16))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rows = Sequences(np.load(tmp_path / "ids.npy", mmap_mode="c"), 12, CPU)
    assert rows[torch.tensor([1])].tolist() == [[0, *range(10, 20), 2]]
