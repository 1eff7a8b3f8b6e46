"""A small convolutional net with BatchNorm on scikit-learn's handwritten digits.

1,797 images of 8x8 pixels that come with scikit-learn, so nothing is downloaded; half of them are
held out, the same half for every seed. Training is standard: SGD with momentum, random shifts of
one pixel and a little noise, a cosine learning rate as in the paper. The rate of 0.2 is one of the
best for the *raw* weights at the end. `results/2026-11-15-digits-loop` has the measurements, by
rate and by the source of the BatchNorm statistics; `benchmarks/digits.py` repeats them. `lawa demo`
trains without shifts, with rates of its own: `results/2026-11-16-digits-frontier`.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lawa_lab.recipes.catalog.digits import DigitsConfig
from lawa_lab.recipes.task import CALIBRATION_EPOCH, Batch, Worker, seeded
from torch_lawa.errors import ConfigError, LawaError

__all__ = ["Digits", "DigitsTask", "build_model", "evaluate", "load_data"]

_SPLIT_SEED = 0


@dataclass(frozen=True)
class Digits:
    """Labels and images, normalised with mean and deviation of the training images.

    With a validation split, the "test" images are those of the validation split, and the
    `official` ones are the test images otherwise.
    """

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    official: tuple[Tensor, Tensor] | None = None


def load_data(config: DigitsConfig) -> Digits:
    """The digits, in a stratified split that does not depend on the seed."""
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ImportError as error:
        raise LawaError(
            f"the digits come with scikit-learn, which could not be imported ({error}): "
            "pip install 'torch-lawa[lab]'"
        ) from None
    bunch: Any = load_digits()
    images = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1).numpy()
    labels, parts = bunch.target, []
    for name in ("test_fraction", "validation_fraction"):
        fraction = getattr(config, name)
        if not fraction:
            continue
        try:
            images, held_out, labels, held_out_labels = train_test_split(
                images, labels, test_size=fraction, random_state=_SPLIT_SEED, stratify=labels
            )
        except ValueError:
            raise ConfigError(
                f"{name}={fraction}: both parts of the {len(labels)} digits need at least ten, "
                "one of each class."
            ) from None
        parts.append((torch.from_numpy(held_out), torch.from_numpy(held_out_labels).long()))
    train_images = torch.from_numpy(images)
    mean, deviation = train_images.mean(), train_images.std()
    scaled = [((held_out - mean) / deviation, label) for held_out, label in parts]
    return Digits(
        (train_images - mean) / deviation,
        torch.from_numpy(labels).long(),
        *scaled[-1],
        scaled[0] if len(scaled) > 1 else None,
    )


def build_model(config: DigitsConfig) -> nn.Sequential:
    """Three convolutions with BatchNorm, pooling, and a linear classifier.

    >>> build_model(DigitsConfig())(torch.zeros(4, 1, 8, 8)).shape
    torch.Size([4, 10])
    """
    width = config.width

    def block(num_in: int, num_out: int) -> list[nn.Module]:
        convolution = nn.Conv2d(num_in, num_out, 3, padding=1, bias=False)
        return [convolution, nn.BatchNorm2d(num_out), nn.ReLU()]

    return nn.Sequential(
        *block(1, width),
        *block(width, 2 * width),
        nn.MaxPool2d(2),
        *block(2 * width, 2 * width),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * width, 10),
    )


def evaluate(model: nn.Module, data: Digits) -> dict[str, float]:
    """Mean cross-entropy and accuracy on the held-out images."""
    outputs = model(data.test_images)
    correct = int((outputs.argmax(1) == data.test_labels).sum())
    return {
        "test_loss": F.cross_entropy(outputs, data.test_labels).item(),
        "test_accuracy": correct / len(data.test_labels),
    }


class DigitsTask:
    """The digits as a `Task`."""

    strict = False

    def __init__(self, config: DigitsConfig, data: Digits, *, seed: int, worker: Worker) -> None:
        self._config, self._seed, self._worker = config, seed, worker
        device = worker.device
        self._data = Digits(
            data.train_images.to(device),
            data.train_labels.to(device),
            data.test_images.to(device),
            data.test_labels.to(device),
        )
        self._official = None
        if config.evaluate_test and data.official is not None:
            images, labels = (each.to(device) for each in data.official)
            self._official = dataclasses.replace(self._data, test_images=images, test_labels=labels)
        splits = ["valid" if config.validation_fraction else "test"]
        splits += [] if self._official is None else ["test"]
        self.metrics = tuple(f"{s}_{kind}" for s in splits for kind in ("loss", "accuracy"))
        self.num_batches = len(data.train_images) // config.batch_size
        # The same batches for every average.
        num_calibration = min(config.batch_norm_batches, self.num_batches)
        self._calibration = [
            self._batch(CALIBRATION_EPOCH, i, rank=0) for i in range(num_calibration)
        ]

    def build_model(self) -> nn.Module:
        """A new net."""
        return build_model(self._config)

    def batches(self, epoch: int, first: int = 0) -> Iterator[Batch]:
        """One epoch in random order; images are shifted and noise is added."""
        share = self._worker.share(self._config.batch_size)
        # The last partial batch is dropped: it is too small for BatchNorm.
        for i in range(first, self.num_batches):
            yield self._batch(epoch, i, self._worker.rank, share)

    def calibration(self) -> Sequence[Batch]:
        """Batches as in training."""
        return self._calibration

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Cross-entropy."""
        images, labels = batch
        return F.cross_entropy(model(images).float(), labels)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """On the held-out images; they are few, so every rank evaluates all of them."""
        values = evaluate(model, self._data)
        if not self._config.validation_fraction:
            return values
        chosen_on = {name.replace("test", "valid"): value for name, value in values.items()}
        return chosen_on | ({} if self._official is None else evaluate(model, self._official))

    def _batch(
        self, epoch: int, number: int, rank: int, share: slice = slice(None)
    ) -> tuple[Tensor, Tensor]:
        data, size, shift = self._data, self._config.batch_size, self._config.max_shift
        cpu = torch.device("cpu")
        order = torch.randperm(len(data.train_images), generator=seeded(cpu, self._seed, epoch))
        chosen = order[number * size : (number + 1) * size][share].to(self._worker.device)
        generator = seeded(cpu, self._seed, epoch, number, rank)
        pixels = data.train_images.shape[-1]
        blank = float(data.train_images.min())
        padded = F.pad(data.train_images[chosen], [shift] * 4, value=blank)
        views = padded.unfold(2, pixels, 1).unfold(3, pixels, 1)
        down, right = torch.randint(2 * shift + 1, (2, len(chosen)), generator=generator)
        images = views[torch.arange(len(chosen)), :, down, right]
        noise = torch.randn(images.shape, generator=generator).to(images)
        return images + self._config.noise * noise, data.train_labels[chosen]
