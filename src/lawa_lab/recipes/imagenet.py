"""Section 3.1 of the paper: ResNet-50 on ImageNet, or on any tree of images.

A small tree (Tiny-ImageNet at its 64 pixels) is decoded once and lies on the device, augmented as
CIFAR-100 is: padded, cropped, flipped. ImageNet itself is streamed, with random views of all sizes.
"""

import functools
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from lawa_lab.recipes.configs import ImageNetConfig
from lawa_lab.recipes.data.image_folder import FoundImages, decode_all, find_images
from lawa_lab.recipes.data.images import Images, smoke_images
from lawa_lab.recipes.image_task import ImageTask
from lawa_lab.recipes.models.resnet import resnet50
from lawa_lab.recipes.streamed_image_task import StreamedImageTask
from lawa_lab.recipes.task import Place

__all__ = ["make_task"]

_IN_MEMORY_BYTES = 4 * 2**30
_EVALUATE_BATCH_SIZE = 250


def make_task(
    config: ImageNetConfig, data: Path | None, *, seed: int, place: Place, smoke: bool
) -> ImageTask | StreamedImageTask:
    """The recipe with its data: from a folder (`data` by default), or made up."""
    if smoke:
        return _in_memory(config, smoke_images(10, config.image_size, 160, 64, seed=0), seed, place)
    found = find_images(Path("data") if data is None else data)
    num_images = len(found.train_paths) + len(found.val_paths)
    if num_images * 3 * config.image_size**2 <= _IN_MEMORY_BYTES:
        return _in_memory(config, _decode(found, config), seed, place)
    return StreamedImageTask(
        found=found,
        size=config.image_size,
        build=_build(config, len(found.class_names)),
        seed=seed,
        place=place,
        batch_size=config.batch_size,
        batch_norm_batches=config.batch_norm_batches,
        num_workers=config.num_workers,
        evaluate_batch_size=_EVALUATE_BATCH_SIZE,
        prefix="valid",
    )


def _build(config: ImageNetConfig, num_classes: int) -> Callable[[], nn.Module]:
    return functools.partial(resnet50, num_classes, stem="image", width=config.width)


def _in_memory(config: ImageNetConfig, images: Images, seed: int, place: Place) -> ImageTask:
    return ImageTask(
        images=images,
        build=_build(config, images.num_classes),
        seed=seed,
        place=place,
        batch_size=config.batch_size,
        batch_norm_batches=config.batch_norm_batches,
        padding=config.image_size // 8,
        evaluate_batch_size=_EVALUATE_BATCH_SIZE,
        prefix="valid",
    )


def _decode(found: FoundImages, config: ImageNetConfig) -> Images:
    num_threads = max(1, config.num_workers)
    return Images(
        decode_all(found.train_paths, config.image_size, num_threads),
        torch.tensor(found.train_labels),
        decode_all(found.val_paths, config.image_size, num_threads),
        torch.tensor(found.val_labels),
        num_classes=len(found.class_names),
    )
