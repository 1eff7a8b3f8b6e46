"""CIFAR-100's published files: both versions, and what is wrong with a file that is not one."""

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
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


def content(split: str) -> dict[bytes, Any]:
    """What Python 2 wrote, as `encoding="bytes"` reads it."""
    first = 0 if split == "train" else 50
    rows = np.array([list(row(first + i)) for i in range(NUM[split])], np.uint8)
    return {
        b"filenames": [b"a.png"] * len(rows),
        b"batch_label": b"training batch 1 of 1",
        b"fine_labels": rows[:, 1].tolist(),
        b"coarse_labels": rows[:, 0].tolist(),
        b"data": rows[:, 2:].copy(),
    }


def write_python(folder: Path, **train: Any) -> Path:
    inner = folder / "cifar-100-python"
    inner.mkdir(parents=True)
    changed = content("train") | {name.encode(): value for name, value in train.items()}
    (inner / "train").write_bytes(pickle.dumps(changed, protocol=2))
    (inner / "test").write_bytes(pickle.dumps(content("test"), protocol=2))
    return inner


@pytest.mark.parametrize("write", [write_binary, write_python])
@pytest.mark.parametrize("named", ["around", "itself"])
def test_both_versions(tmp_path: Path, write: Any, named: str) -> None:
    inner = write(tmp_path)
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


def test_a_pickle_as_python_2_wrote_it(tmp_path: Path) -> None:
    # `str` of Python 2 is the opcode BINSTRING, and numpy's module was still `numpy.core`.
    def text(value: bytes) -> bytes:
        return b"T" + len(value).to_bytes(4, "little") + value

    def labels(numbers: list[int]) -> bytes:
        return b"](" + b"".join(b"K" + bytes([number]) for number in numbers) + b"e"

    inner = tmp_path / "cifar-100-python"
    inner.mkdir()
    for split, first in (("train", 0), ("test", 50)):
        pixels = b"".join(row(first + i)[2:] for i in range(NUM[split]))
        array = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00t" + text(b"b")
        array += b"tR(K\x01(K" + bytes([NUM[split]]) + b"M\x00\x0ctcnumpy\ndtype\n(" + text(b"u1")
        array += b"K\x00K\x01tR(K\x03" + text(b"|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00"
        array += b"tb\x89" + text(pixels) + b"tb"
        items = text(b"data") + array + text(b"fine_labels") + labels([7] * NUM[split])
        (inner / split).write_bytes(b"\x80\x02}(" + items + b"u.")
    images = load_cifar100(tmp_path)
    assert images.train_labels.tolist() == [7] * 6
    assert images.train_images[2, 0, 1, :3].tolist() == [34, 35, 36]


def test_the_binary_version_is_taken_where_both_are(tmp_path: Path) -> None:
    write_python(tmp_path, fine_labels=[1] * 6)
    write_binary(tmp_path)
    assert load_cifar100(tmp_path).train_labels[1] == 10


def test_no_data_says_what_to_get_and_where_to_put_it(tmp_path: Path) -> None:
    folder = tmp_path / "nowhere"
    with pytest.raises(DataError) as caught:
        load_cifar100(folder)
    for part in (
        str(folder),
        "cifar-100-binary.tar.gz",
        "cifar-100-python.tar.gz",
        "https://www.cs.toronto.edu/~kriz/cifar.html",
        "--data",
    ):
        assert part in str(caught.value)


def test_an_archive_that_was_not_unpacked(tmp_path: Path) -> None:
    (tmp_path / "cifar-100-python.tar.gz").write_bytes(b"")
    with pytest.raises(DataError, match=r"not unpacked yet: tar -xzf .*python.tar.gz -C"):
        load_cifar100(tmp_path)


@pytest.mark.parametrize("cut", [1, 3074])
def test_a_truncated_binary_file(tmp_path: Path, cut: int) -> None:
    path = write_binary(tmp_path) / "train.bin"
    os.truncate(path, 6 * 3074 - cut)
    with pytest.raises(DataError, match=r"train\.bin: holds [\d,]+ bytes, where 18,444 were"):
        load_cifar100(tmp_path)
    renamed = path.parent.rename(tmp_path / "mine")
    with pytest.raises(DataError, match=r"Unpack cifar-100-binary\.tar\.gz .* again"):
        load_cifar100(renamed)


def test_a_file_of_two_is_missing(tmp_path: Path) -> None:
    (write_binary(tmp_path) / "test.bin").unlink()
    with pytest.raises(DataError, match=r"test\.bin: cannot be read \(No such file"):
        load_cifar100(tmp_path)
    os.remove(write_python(tmp_path / "other") / "train")
    with pytest.raises(DataError, match=r"train: cannot be read \(No such file"):
        load_cifar100(tmp_path / "other")


def test_labels_out_of_range_in_a_binary_file(tmp_path: Path) -> None:
    path = write_binary(tmp_path) / "test.bin"
    rows = bytearray(path.read_bytes())
    rows[3074 + 1] = 100
    path.write_bytes(rows)
    with pytest.raises(DataError, match=r"test\.bin: fine labels from 0 to 100, where 0 to 99"):
        load_cifar100(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": np.zeros((5, 3072), np.uint8)}, r"data is uint8 \(5, 3072\), where uint8 \(6, 3"),
        ({"data": np.zeros((6, 3072), np.int8)}, r"data is int8 \(6, 3072\)"),
        ({"data": b"bytes"}, "data is bytes None"),
        ({"fine_labels": [0] * 5}, "5 labels for 6 images"),
        ({"fine_labels": [0] * 5 + [-1]}, "fine labels from -1 to 0"),
        ({"fine_labels": [0] * 5 + [2**70]}, "fine labels from 0 to 1180591620717411303424"),
        ({"fine_labels": [0.5] * 6}, "fine_labels is no list of numbers"),
        ({"fine_labels": "text"}, "fine_labels is no list of numbers"),
    ],
)
def test_a_pickle_of_something_else(tmp_path: Path, changes: Any, message: str) -> None:
    write_python(tmp_path, **changes)
    with pytest.raises(DataError, match=f"train: {message}"):
        load_cifar100(tmp_path)


@pytest.mark.parametrize("thing", [{b"data": 1}, [1, 2], None])
def test_a_pickle_without_the_keys(tmp_path: Path, thing: object) -> None:
    (write_python(tmp_path) / "train").write_bytes(pickle.dumps(thing, protocol=2))
    with pytest.raises(DataError, match=r"train: holds .* a dict with b'data'"):
        load_cifar100(tmp_path)


def test_a_truncated_pickle(tmp_path: Path) -> None:
    path = write_python(tmp_path) / "train"
    whole = path.read_bytes()
    for size in (0, 1, 40, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(DataError, match=r"train: the pickle in it is broken .*python\.tar\.gz"):
            load_cifar100(tmp_path)


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_a_pickle_that_would_execute_something(tmp_path: Path) -> None:
    inner, mark = write_python(tmp_path), tmp_path / "mark"
    for evil in (
        pickle.dumps({b"data": Evil(mark)}, protocol=2),
        b"cposix\nsystem\n(S'touch " + str(mark).encode() + b"'\ntR.",
        b"(S'touch " + str(mark).encode() + b"'\niposix\nsystem\n.",
        b"cnumpy.core.multiarray\nfromfile\n.",
        b"cnumpy\nload\n.",
    ):
        (inner / "train").write_bytes(evil)
        with pytest.raises(DataError, match=r"train: asks for .* not executed"):
            load_cifar100(tmp_path)
    assert not mark.exists()


@pytest.mark.data
def test_the_official_files(monkeypatch: pytest.MonkeyPatch, data_folder: Path) -> None:
    monkeypatch.undo()
    images = load_cifar100(data_folder)
    assert images.train_labels.bincount().tolist() == [500] * 100
    assert images.test_labels.bincount().tolist() == [100] * 100
    # Labels, means and deviations as they are quoted wherever CIFAR-100 is used.
    assert images.train_labels[:8].tolist() == [19, 29, 0, 11, 1, 86, 90, 28]
    mean, deviation = (values / 255 for values in channel_statistics(images.train_images))
    assert mean.tolist() == pytest.approx([0.5071, 0.4865, 0.4409], abs=5e-5)
    assert deviation.tolist() == pytest.approx([0.2673, 0.2564, 0.2762], abs=5e-5)
