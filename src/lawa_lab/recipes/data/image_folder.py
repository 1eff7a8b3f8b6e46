"""Folders of image files, `train/<class>/…` and `val/<class>/…`: found, decoded, or streamed."""

import os
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lawa_lab.recipes.data.image_transforms import (
    centre,
    random_view,
    read_image,
    require_pillow,
    to_bytes,
)
from lawa_lab.recipes.task import mixed_seed
from torch_lawa.errors import DataError

__all__ = ["EvaluationImages", "FoundImages", "TrainingImages", "decode_all", "find_images"]

_SUFFIXES = (".jpeg", ".jpg", ".png", ".webp")
_HOW = (
    "Expected: train/<class>/*.JPEG and val/<class>/*.JPEG. For ImageNet, get the ILSVRC2012 "
    "train and val archives from https://image-net.org, unpack each class of train into a folder "
    "named like its archive (n01440764, ...), sort val into the same class folders, and pass the "
    "folder that contains train and val with --data, or call it data/imagenet, which is the "
    "default."
)


@dataclass(frozen=True)
class FoundImages:
    """Files and labels of both splits; a label is the index of a class in the sorted names."""

    class_names: list[str]
    train_paths: list[str]
    train_labels: list[int]
    val_paths: list[str]
    val_labels: list[int]


def find_images(folder: Path) -> FoundImages:
    """The images in `train` and `val` of a folder or its subfolder `imagenet`, in a fixed order."""
    root = folder
    if not (folder / "train").is_dir() and (folder / "imagenet" / "train").is_dir():
        root = folder / "imagenet"
    for split in ("train", "val"):
        if not (root / split).is_dir():
            raise DataError(f"{root / split}: no such folder. {_HOW}")
    names = _class_names(root / "train")
    found = [_find(root / "train", names)]
    for name, num in zip(names, np.bincount(found[0][1], minlength=len(names)), strict=True):
        if not num:
            raise DataError(
                f"{root / 'train' / name}: contains no images ({', '.join(_SUFFIXES)}). Remove "
                "the folder, or add images."
            )
    unknown = sorted(set(_class_names(root / "val")) - set(names))
    if unknown:
        raise DataError(
            f"{root / 'val' / unknown[0]}: train has no such class ({len(unknown)} such folders). "
            f"Sort the images of val into folders named like those of train. {_HOW}"
        )
    found.append(_find(root / "val", names))
    if not found[1][0]:
        raise DataError(f"{root / 'val'}: contains no images in class folders. {_HOW}")
    return FoundImages(names, *found[0], *found[1])


def _class_names(split: Path) -> list[str]:
    """The class folders of a split."""
    with os.scandir(split) as entries:
        listed = [entry for entry in entries if not entry.name.startswith(".")]
    names = sorted(entry.name for entry in listed if entry.is_dir())
    loose = sorted(entry.name for entry in listed if entry.name.lower().endswith(_SUFFIXES))
    if loose:
        raise DataError(
            f"{split / loose[0]}: not in a class folder; {len(loose)} images in {split} are "
            f"not. {_HOW}"
        )
    if not names:
        raise DataError(f"{split}: contains no class folders. {_HOW}")
    return names


def _find(split: Path, names: Sequence[str]) -> tuple[list[str], list[int]]:
    paths, labels = [], []
    for label, name in enumerate(names):
        own = []
        for inner, folders, files in os.walk(split / name, followlinks=True):
            folders[:] = [folder for folder in folders if not folder.startswith(".")]
            own += [
                os.path.join(inner, file)
                for file in files
                if file.lower().endswith(_SUFFIXES) and not file.startswith(".")
            ]
        paths += sorted(own)
        labels += [label] * len(own)
    return paths, labels


def decode_all(paths: Sequence[str], size: int, num_threads: int) -> Tensor:
    """All images as bytes (number, 3, size, size): shorter side resized to size, centre crop."""
    require_pillow()
    images = np.empty((len(paths), 3, size, size), np.uint8)

    def decode(i: int) -> None:
        images[i] = to_bytes(centre(read_image(paths[i]), size, size)).numpy()

    with ThreadPoolExecutor(num_threads) as pool:
        try:
            for _ in pool.map(decode, range(len(paths))):
                pass
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return torch.from_numpy(images)


class _Files(Dataset[Tensor]):
    """Paths as one array: forked workers would gradually copy a list of a million strings."""

    def __init__(self, paths: Sequence[str], size: int) -> None:
        require_pillow()
        self._paths = np.array([os.fsencode(path) for path in paths])
        self._size = size

    def __len__(self) -> int:
        return len(self._paths)

    def _path(self, index: int) -> str:
        return os.fsdecode(self._paths[index])


class TrainingImages(_Files):
    """Random crops; that of example i in epoch e depends only on (seed, e, i).

    Indexed by pairs of epoch and index, so that workers need no other message about the epoch.
    """

    def __init__(self, paths: Sequence[str], size: int, *, seed: int) -> None:
        super().__init__(paths, size)
        self._seed = seed

    def __getitem__(self, key: tuple[int, int]) -> Tensor:
        """The crop of image `index` in an epoch."""
        epoch, index = key
        rng = random.Random(mixed_seed(self._seed, epoch, index))
        return to_bytes(random_view(read_image(self._path(index)), self._size, rng))


class EvaluationImages(_Files):
    """Centre crops: 224 of 256 pixels of the shorter side."""

    def __getitem__(self, index: int) -> Tensor:
        """The centre crop of image `index`."""
        shorter = self._size * 256 // 224
        return to_bytes(centre(read_image(self._path(index)), self._size, shorter))
