"""Appendix B of the paper: ResNet-34 on CIFAR-100."""

import functools
from pathlib import Path

from lawa_lab.recipes.configs import Cifar100Config
from lawa_lab.recipes.data.cifar import load_cifar100
from lawa_lab.recipes.data.images import smoke_images
from lawa_lab.recipes.image_task import ImageTask
from lawa_lab.recipes.models.resnet import resnet34
from lawa_lab.recipes.task import Place

__all__ = ["make_task"]


def make_task(
    config: Cifar100Config, data: Path | None, *, seed: int, place: Place, smoke: bool
) -> ImageTask:
    """The recipe with its data: from a folder (`data` by default), or made up."""
    if smoke:
        images = smoke_images(10, 32, 160, 64, seed=0)
    else:
        images = load_cifar100(Path("data") if data is None else data)
    return ImageTask(
        images=images,
        build=functools.partial(resnet34, images.num_classes, stem="small", width=config.width),
        seed=seed,
        place=place,
        batch_size=config.batch_size,
        batch_norm_batches=config.batch_norm_batches,
        padding=config.padding,
    )
