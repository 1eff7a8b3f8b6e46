"""Image data sets in memory, and the augmentation and normalisation of a batch.

Images stay bytes until they form a batch: 50,000 images of 32x32 pixels are 150 MB, so the whole
set fits on the device and no data loader is needed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_lawa.errors import ConfigError, DataError

__all__ = [
    "Images",
    "ImagesAndLabels",
    "NormalizedBatches",
    "augment",
    "channel_statistics",
    "normalize",
    "smoke_images",
]

ImagesAndLabels = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Images:
    """A data set and its split: images as bytes (number, 3, height, width), labels from 0."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    num_classes: int

    def __post_init__(self) -> None:
        for split in ("train", "test"):
            images, labels = getattr(self, f"{split}_images"), getattr(self, f"{split}_labels")
            if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] != 3:
                raise DataError(
                    f"{split} images: {images.dtype} {tuple(images.shape)} instead of "
                    "torch.uint8 (number, 3, height, width)"
                )
            if labels.dtype != torch.int64 or labels.shape != images.shape[:1]:
                raise DataError(
                    f"{split} labels: {labels.dtype} {tuple(labels.shape)} instead of one "
                    f"torch.int64 for each of {len(images)} images"
                )
            if not len(images):
                raise DataError(f"{split} images: the split is empty")
            low, high = int(labels.min()), int(labels.max())
            if low < 0 or high >= self.num_classes:
                raise DataError(
                    f"{split} labels: from {low} to {high} with {self.num_classes} classes"
                )

    def hold_out(self, number: int) -> "Images":
        """Training images only: `number` of them, drawn once for all seeds, are the test images."""
        if not 0 < number < len(self.train_images):
            raise ConfigError(
                f"held_out={number}: must be below the {len(self.train_images)} training images"
            )
        generator = torch.Generator().manual_seed(0)
        order = torch.randperm(len(self.train_images), generator=generator)
        test, train = order[:number].sort().values, order[number:].sort().values
        x, y = self.train_images, self.train_labels
        return Images(x[train], y[train], x[test], y[test], self.num_classes)


def augment(images: Tensor, padding: int, generator: torch.Generator) -> Tensor:
    """Random crops of images padded with `padding` black pixels, and random horizontal flips.

    The generator must be on the images' device. Sizes are kept; the result is channels-last.

    >>> images = torch.arange(3 * 4 * 4, dtype=torch.uint8).reshape(1, 3, 4, 4).repeat(2, 1, 1, 1)
    >>> augment(images, 1, torch.Generator().manual_seed(1))[:, 0, 0]
    tensor([[2, 1, 0, 0],
            [0, 7, 6, 5]], dtype=torch.uint8)
    """
    num, _, height, width = images.shape
    device = images.device
    down, right = torch.randint(2 * padding + 1, (2, num), generator=generator, device=device)
    flipped = torch.randint(2, (num, 1), generator=generator, device=device).bool()
    rows = down[:, None] + torch.arange(height, device=device)
    columns = torch.arange(width, device=device).expand(num, width)
    columns = right[:, None] + torch.where(flipped, width - 1 - columns, columns)
    padded = F.pad(images, [padding] * 4).permute(0, 2, 3, 1)
    each = torch.arange(num, device=device)[:, None, None]
    # One gather for crop and flip; (number, height, width, 3) is channels-last already.
    return padded[each, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def channel_statistics(images: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each channel of byte images, rounded once.

    >>> channel_statistics(torch.tensor([0, 0, 4, 2, 8, 2], dtype=torch.uint8).view(2, 3, 1, 1))
    (tensor([1., 4., 3.]), tensor([1., 4., 1.]))
    """
    counts = torch.zeros(3, 256, dtype=torch.int64, device=images.device)
    for some in torch.split(images, 4096):  # bounds the memory of the copies
        for channel in range(3):
            counts[channel] += torch.bincount(some[:, channel].reshape(-1), minlength=256)
    shares = counts.double() / counts.sum(1, keepdim=True)
    values = torch.arange(256, dtype=torch.float64, device=images.device)
    mean = shares @ values
    variance = (shares * (values - mean[:, None]) ** 2).sum(1)
    deviation = variance.sqrt()
    # A constant channel has no deviation to divide by.
    return mean.float(), torch.where(deviation > 0, deviation, 1.0).float()


def normalize(images: Tensor, mean: Tensor, deviation: Tensor) -> Tensor:
    """Bytes to float32 (value - mean) / deviation per channel, in units of bytes; channels-last.

    >>> images = torch.tensor([1, 2, 3], dtype=torch.uint8).view(1, 3, 1, 1)
    >>> normalize(images, torch.tensor([1.0, 1.0, 1.0]), torch.tensor([1.0, 2.0, 4.0])).flatten()
    tensor([0.0000, 0.5000, 0.5000])
    """
    floats = images.to(torch.float32, memory_format=torch.channels_last)
    return floats.sub_(mean.view(1, 3, 1, 1)).div_(deviation.view(1, 3, 1, 1))


class NormalizedBatches(Sequence[ImagesAndLabels]):
    """Batches stored as bytes (a quarter of the memory), normalised whenever they are read.

    They may be in host memory; what is read is on the device of the mean.
    """

    def __init__(self, batches: Sequence[ImagesAndLabels], mean: Tensor, deviation: Tensor) -> None:
        self._batches, self._mean, self._deviation = batches, mean, deviation

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        """One batch, or the batches of a slice."""
        if isinstance(index, slice):
            return NormalizedBatches(self._batches[index], self._mean, self._deviation)
        images, labels = (tensor.to(self._mean.device) for tensor in self._batches[index])
        return normalize(images, self._mean, self._deviation), labels


def smoke_images(
    num_classes: int, size: int, num_train: int, num_test: int, *, seed: int
) -> Images:
    """Synthetic images that can be learnt: a coarse pattern for each class, plus noise.

    >>> smoke_images(10, 32, 160, 64, seed=0).train_images.shape
    torch.Size([160, 3, 32, 32])
    """
    generator = torch.Generator().manual_seed(seed)
    coarse = 60.0 * torch.randn(num_classes, 3, 4, 4, generator=generator)
    patterns = F.interpolate(coarse, size=(size, size), mode="bilinear")

    def draw(num: int) -> ImagesAndLabels:
        labels = torch.arange(num) % num_classes
        noise = 40.0 * torch.randn(num, 3, size, size, generator=generator)
        return (128.0 + patterns[labels] + noise).clamp(0, 255).to(torch.uint8), labels

    return Images(*draw(num_train), *draw(num_test), num_classes=num_classes)
