"""CIFAR-100 from the binary files that its authors publish."""

import os
from pathlib import Path

import numpy as np
import torch

from lawa_lab.recipes.data.images import Images, ImagesAndLabels
from torch_lawa.errors import DataError

__all__ = ["load_cifar100"]

_NUM_CLASSES = 100
_NUM_IMAGES = {"train": 50_000, "test": 10_000}
_PIXELS = (3, 32, 32)
_ROW = 2 + 3 * 32 * 32  # coarse label, fine label, pixels

_FOLDER = "cifar-100-binary"
_ARCHIVE = f"{_FOLDER}.tar.gz"
_PAGE = "https://www.cs.toronto.edu/~kriz/cifar.html"
_AGAIN = f"Unpack {_ARCHIVE} of {_PAGE} again."


def load_cifar100(folder: Path) -> Images:
    """The 50,000 and 10,000 images with their fine labels, in the official order.

    `folder` contains `cifar-100-binary`, or is that folder.
    """
    for inner in (folder / _FOLDER, folder):
        train, test = inner / "train.bin", inner / "test.bin"
        if train.is_file() or test.is_file():
            return Images(*_load(train, "train"), *_load(test, "test"), num_classes=_NUM_CLASSES)
    raise DataError(_missing(folder))


def _missing(folder: Path) -> str:
    archive = folder / _ARCHIVE
    if archive.is_file():
        return f"{archive} is not unpacked yet: tar -xzf {archive} -C {folder}"
    python = next(folder.glob("cifar-100-python*"), None)
    found = f" {python} is the Python version, which is not supported." if python else ""
    return (
        f"{folder}: contains no CIFAR-100.{found} Download the binary version ({_ARCHIVE}) from "
        f"{_PAGE}, unpack it there (tar -xzf), and pass the folder with --data, or unpack it into "
        "the folder data, which is the default."
    )


def _load(path: Path, split: str) -> ImagesAndLabels:
    expected = _NUM_IMAGES[split] * _ROW
    try:
        size = os.stat(path).st_size
        if size != expected:
            raise DataError(
                f"{path}: has {size:,} bytes instead of {expected:,} "
                f"({_NUM_IMAGES[split]:,} rows of {_ROW}). {_AGAIN}"
            )
        rows = np.fromfile(path, np.uint8).reshape(-1, _ROW)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}). {_AGAIN}") from None
    labels = rows[:, 1].astype(np.int64)
    if labels.max() >= _NUM_CLASSES:
        raise DataError(
            f"{path}: fine labels from {labels.min()} to {labels.max()} instead of 0 to "
            f"{_NUM_CLASSES - 1}: this is not CIFAR-100. {_AGAIN}"
        )
    images = torch.from_numpy(np.ascontiguousarray(rows[:, 2:])).view(-1, *_PIXELS)
    return images, torch.from_numpy(labels)
