"""Decoding, cropping and augmentation of single image files with Pillow.

Crops and flips are those of standard ImageNet training (Szegedy et al., 2015; torchvision's
`RandomResizedCrop`), reimplemented because the CPU build of PyTorch has no torchvision.
"""

import math
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from torch_lawa.errors import DataError, LawaError

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["centre", "random_box", "random_view", "read_image", "require_pillow", "to_bytes"]

_SCALE = (0.08, 1.0)
_RATIO = (3 / 4, 4 / 3)


def require_pillow() -> Any:
    """Pillow's `Image` module, or an error that says how to install it."""
    try:
        from PIL import Image
    except ImportError as error:
        raise LawaError(
            f"images are decoded by Pillow, which could not be imported ({error}): "
            "pip install 'torch-lawa[lab]'"
        ) from None
    return Image


def read_image(path: str) -> "Image.Image":
    """An image file as RGB, whatever its mode; transparency is dropped."""
    module = require_pillow()
    try:
        with module.open(path) as image:
            return _to_rgb(module, image)
    except Exception as error:  # a damaged file can raise anything
        what = f"{type(error).__name__}: {error}"[:200]
        raise DataError(
            f"{path}: cannot be decoded ({what}). Unpack the file again, or remove it."
        ) from None


def _to_rgb(module: Any, image: "Image.Image") -> "Image.Image":
    if image.mode.startswith("I"):  # 16-bit grayscale, which `convert` would clip to 8 bits
        image = module.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image.convert("RGB")


def centre(image: "Image.Image", size: int, shorter: int) -> "Image.Image":
    """The centre crop of an image whose shorter side is resized to `shorter` pixels."""
    width, height = image.size
    short = min(width, height)
    if short != shorter:
        width, height = shorter * width // short, shorter * height // short
        image = image.resize((width, height), require_pillow().Resampling.BILINEAR)
    if (width, height) == (size, size):
        return image
    left, top = round((width - size) / 2), round((height - size) / 2)
    return image.crop((left, top, left + size, top + size))


def random_box(width: int, height: int, rng: random.Random) -> tuple[int, int, int, int]:
    """A random box (left, top, width, height): 8 to 100 % of the area, aspect ratio 3:4 to 4:3.

    >>> random_box(400, 300, random.Random(0))
    (26, 0, 345, 298)
    """
    for _ in range(10):
        area = width * height * rng.uniform(*_SCALE)
        ratio = math.exp(rng.uniform(math.log(_RATIO[0]), math.log(_RATIO[1])))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return rng.randint(0, width - w), rng.randint(0, height - h), w, h
    # An elongated image: the largest centred box with an allowed aspect ratio.
    w = min(width, max(1, round(height * _RATIO[1])))
    h = min(height, max(1, round(width / _RATIO[0])))
    return (width - w) // 2, (height - h) // 2, w, h


def random_view(image: "Image.Image", size: int, rng: random.Random) -> "Image.Image":
    """A random box of an image, resized to `size` and flipped half of the time."""
    module = require_pillow()
    left, top, width, height = random_box(*image.size, rng)
    # Cropped first: `resize(box=...)` would blend in pixels from outside the box.
    part = image.crop((left, top, left + width, top + height))
    part = part.resize((size, size), module.Resampling.BILINEAR)
    if rng.random() < 0.5:
        part = part.transpose(module.Transpose.FLIP_LEFT_RIGHT)
    return part


def to_bytes(image: "Image.Image") -> Tensor:
    """An RGB image as bytes (3, height, width)."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)
