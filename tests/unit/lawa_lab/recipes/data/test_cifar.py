"""CIFAR-100's published binary files, and what is wrong with a damaged one."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lawa_lab.recipes.data import cifar
from lawa_lab.recipes.data.cifar import load_cifar100
from lawa_lab.recipes.data.images import channel_statistics
from torch_lawa.errors import DataError

NUM = {"train": 6, "test": 3}


@pytest.fixture(autouse=True)
def _few_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cifar, "_NUM_IMAGES", NUM)


def row(number: int) -> bytes:
    """A row by hand: coarse label, fine label, 1024 red, 1024 green, 1024 blue bytes."""
    red = bytes((number + i) % 256 for i in range(1024))
    return bytes([number % 20, 10 * number % 100]) + red + bytes([number]) * 1024 + b"\x09" * 1024


def write_binary(folder: Path) -> Path:
    inner = folder / "cifar-100-binary"
    inner.mkdir(parents=True)
    for split, first in (("train", 0), ("test", 50)):
        rows = [row(first + i) for i in range(NUM[split])]
        (inner / f"{split}.bin").write_bytes(b"".join(rows))
    return inner


@pytest.mark.parametrize("named", ["around", "itself"])
def test_the_published_layout(tmp_path: Path, named: str) -> None:
    inner = write_binary(tmp_path)
    images = load_cifar100(tmp_path if named == "around" else inner)
    assert images.num_classes == 100
    assert images.train_images.shape == (6, 3, 32, 32)
    assert images.train_images.dtype == torch.uint8
    assert images.train_labels.tolist() == [0, 10, 20, 30, 40, 50]
    assert images.test_labels.tolist() == [0, 10, 20]  # of 500, 510 and 520 by hand
    assert images.test_labels.dtype == torch.int64
    third = images.train_images[2]
    assert third[0, 1, :3].tolist() == [34, 35, 36]  # red, the second line
    assert third[1].unique().tolist() == [2]
    assert third[2].unique().tolist() == [9]
    assert images.test_images[1, 1, 0, 0] == 51


def test_no_data_says_what_to_get_and_where_to_put_it(tmp_path: Path) -> None:
    folder = tmp_path / "nowhere"
    with pytest.raises(DataError) as caught:
        load_cifar100(folder)
    for part in (
        str(folder),
        "cifar-100-binary.tar.gz",
        "https://www.cs.toronto.edu/~kriz/cifar.html",
        "--data",
    ):
        assert part in str(caught.value)


def test_an_archive_that_was_not_unpacked(tmp_path: Path) -> None:
    (tmp_path / "cifar-100-python.tar.gz").write_bytes(b"")
    with pytest.raises(DataError, match=r"not supported.*cifar-100-binary\.tar\.gz"):
        load_cifar100(tmp_path)
    (tmp_path / "cifar-100-binary.tar.gz").write_bytes(b"")
    with pytest.raises(DataError, match=r"not unpacked yet: tar -xzf .*binary.tar.gz -C"):
        load_cifar100(tmp_path)


@pytest.mark.parametrize("cut", [1, 3074])
def test_a_truncated_binary_file(tmp_path: Path, cut: int) -> None:
    path = write_binary(tmp_path) / "train.bin"
    os.truncate(path, 6 * 3074 - cut)
    with pytest.raises(DataError, match=r"train\.bin: has [\d,]+ bytes instead of 18,444"):
        load_cifar100(tmp_path)
    renamed = path.parent.rename(tmp_path / "mine")
    with pytest.raises(DataError, match=r"Unpack cifar-100-binary\.tar\.gz .* again"):
        load_cifar100(renamed)


def test_a_file_of_two_is_missing(tmp_path: Path) -> None:
    (write_binary(tmp_path) / "test.bin").unlink()
    with pytest.raises(DataError, match=r"test\.bin: cannot be read \(No such file"):
        load_cifar100(tmp_path)


def test_labels_out_of_range_in_a_binary_file(tmp_path: Path) -> None:
    path = write_binary(tmp_path) / "test.bin"
    rows = bytearray(path.read_bytes())
    rows[3074 + 1] = 100
    path.write_bytes(rows)
    with pytest.raises(DataError, match=r"test\.bin: fine labels from 0 to 100 instead of 0 to 99"):
        load_cifar100(tmp_path)


@pytest.mark.data
def test_the_official_files(
    monkeypatch: pytest.MonkeyPatch, data_set: Callable[[str], Path]
) -> None:
    monkeypatch.undo()
    images = load_cifar100(data_set("cifar-100-binary").parent)
    assert images.train_labels.bincount().tolist() == [500] * 100
    assert images.test_labels.bincount().tolist() == [100] * 100
    # Labels, means and deviations as they are quoted wherever CIFAR-100 is used.
    assert images.train_labels[:8].tolist() == [19, 29, 0, 11, 1, 86, 90, 28]
    mean, deviation = (values / 255 for values in channel_statistics(images.train_images))
    assert mean.tolist() == pytest.approx([0.5071, 0.4865, 0.4409], abs=5e-5)
    assert deviation.tolist() == pytest.approx([0.2673, 0.2564, 0.2762], abs=5e-5)
