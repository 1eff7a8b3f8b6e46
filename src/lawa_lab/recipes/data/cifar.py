"""CIFAR-100 from the files that its authors publish, binary or Python version."""

import os
import pickle
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from lawa_lab.recipes.data.images import Images, ImagesAndLabels
from torch_lawa.errors import DataError

__all__ = ["load_cifar100"]

_NUM_CLASSES = 100
_NUM_IMAGES = {"train": 50_000, "test": 10_000}
_PIXELS = (3, 32, 32)
_ROW = 2 + 3 * 32 * 32  # coarse label, fine label, pixels

_PAGE = "https://www.cs.toronto.edu/~kriz/cifar.html"
_BINARY, _PYTHON = "cifar-100-binary", "cifar-100-python"


def load_cifar100(folder: Path) -> Images:
    """The 50,000 and 10,000 images with their fine labels, in the official order.

    `folder` is where `cifar-100-binary` or `cifar-100-python` was unpacked, or one of these.
    """
    for inner in (folder / _BINARY, folder / _PYTHON, folder):
        for names, load in ((("train.bin", "test.bin"), _load_rows), (("train", "test"), _load_py)):
            train, test = (inner / name for name in names)
            if train.is_file() or test.is_file():
                return Images(*load(train, "train"), *load(test, "test"), num_classes=_NUM_CLASSES)
    raise DataError(_missing(folder))


def _missing(folder: Path) -> str:
    archives = [folder / f"{name}.tar.gz" for name in (_BINARY, _PYTHON)]
    for archive in archives:
        if archive.is_file():
            return f"{archive} is not unpacked yet: tar -xzf {archive} -C {folder}"
    return (
        f"{folder}: holds no CIFAR-100. Download the binary version ({_BINARY}.tar.gz) or the "
        f"python version ({_PYTHON}.tar.gz) from {_PAGE}, unpack it there (tar -xzf), and name "
        "the folder with --data, or unpack it into the folder data, which is looked into without "
        "it."
    )


def _again(path: Path) -> str:
    archive = _BINARY if path.suffix == ".bin" else _PYTHON
    return f"Unpack {archive}.tar.gz of {_PAGE} again."


def _load_rows(path: Path, split: str) -> ImagesAndLabels:
    expected = _NUM_IMAGES[split] * _ROW
    try:
        size = os.stat(path).st_size
        if size != expected:
            raise DataError(
                f"{path}: holds {size:,} bytes, where {expected:,} were expected "
                f"({_NUM_IMAGES[split]:,} rows of {_ROW}). {_again(path)}"
            )
        rows = np.fromfile(path, np.uint8).reshape(-1, _ROW)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}). {_again(path)}") from None
    return _checked(path, rows[:, 2:], rows[:, 1])


def _load_py(path: Path, split: str) -> ImagesAndLabels:
    try:
        with open(path, "rb") as file:
            content = _Unpickler(file, path).load()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}). {_again(path)}") from None
    except DataError:
        raise
    except Exception as error:  # bytes that are no pickle can raise anything
        what = f"{type(error).__name__}: {error}"[:200]
        raise DataError(f"{path}: the pickle in it is broken ({what}). {_again(path)}") from None
    if not isinstance(content, dict) or not {b"data", b"fine_labels"} <= content.keys():
        names = sorted(map(repr, content)) if isinstance(content, dict) else type(content).__name__
        raise DataError(
            f"{path}: holds {str(names)[:200]}, where a dict with b'data' and b'fine_labels' was "
            f"expected. {_again(path)}"
        )
    pixels, labels = content[b"data"], content[b"fine_labels"]
    shape = (_NUM_IMAGES[split], _ROW - 2)
    found = (getattr(pixels, "dtype", type(pixels).__name__), getattr(pixels, "shape", None))
    if not isinstance(pixels, np.ndarray) or found != (np.uint8, shape):
        raise DataError(
            f"{path}: data is {found[0]} {found[1]}, where uint8 {shape} was expected. "
            f"{_again(path)}"
        )
    if not isinstance(labels, list) or not all(type(label) is int for label in labels):
        raise DataError(f"{path}: fine_labels is no list of numbers. {_again(path)}")
    return _checked(path, pixels, np.array(labels, dtype=object))


def _checked(path: Path, pixels: Any, labels: Any) -> ImagesAndLabels:
    if len(labels) != len(pixels):
        raise DataError(f"{path}: {len(labels)} labels for {len(pixels)} images. {_again(path)}")
    low, high = labels.min(), labels.max()
    if low < 0 or high >= _NUM_CLASSES:
        raise DataError(
            f"{path}: fine labels from {low} to {high}, where 0 to {_NUM_CLASSES - 1} were "
            f"expected: these are not CIFAR-100's. {_again(path)}"
        )
    images = torch.from_numpy(np.ascontiguousarray(pixels)).view(-1, *_PIXELS)
    return images, torch.from_numpy(labels.astype(np.int64))


_reconstruct = np.zeros(0).__reduce__()[0]
_ALLOWED: dict[str, Any] = {
    "numpy.core.multiarray._reconstruct": _reconstruct,  # as it was called until numpy 2
    "numpy._core.multiarray._reconstruct": _reconstruct,
    "numpy.ndarray": np.ndarray,
    "numpy.dtype": np.dtype,
    "_codecs.encode": str.encode,  # that one takes any codec, this one those of text
}


class _Unpickler(pickle._Unpickler):
    """Makes arrays and plain containers; refuses every other name before it is imported.

    Built on the one written in Python: in the other, five bytes can ask for 64 GiB.
    """

    def __init__(self, file: BinaryIO, path: Path) -> None:
        super().__init__(file, encoding="bytes")
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        """One of the few that the published files need."""
        if f"{module}.{name}" not in _ALLOWED:
            raise DataError(
                f"{self._path}: asks for {module!r}.{name!r}, which CIFAR-100's files do not need; "
                f"it was not executed. {_again(self._path)}"
            )
        return _ALLOWED[f"{module}.{name}"]
