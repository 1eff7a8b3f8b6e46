"""Image classification with the whole data set in the memory of the training device."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lawa_lab.recipes.data.images import (
    Images,
    ImagesAndLabels,
    NormalizedBatches,
    augment,
    channel_statistics,
    normalize,
)
from lawa_lab.recipes.task import CALIBRATION_EPOCH, Batch, Worker, seeded
from torch_lawa.errors import ConfigError

__all__ = ["Classification", "ImageTask", "own_part", "score"]

# The label of padding examples, which are not counted.
NOT_COUNTED = -100


class Classification(ABC):
    """What image tasks share: the net, its loss, its scores."""

    strict = False  # max pooling may have no deterministic algorithm

    def __init__(
        self,
        *,
        num_train: int,
        num_classes: int,
        build: Callable[[], nn.Module],
        seed: int,
        worker: Worker,
        batch_size: int,
        batch_norm_batches: int,
        prefix: str,
    ) -> None:
        if num_train < batch_size:
            raise ConfigError(
                f"batch_size={batch_size}: the data contains only {num_train} training images"
            )
        self.num_batches = num_train // batch_size
        self.metrics = score_names(prefix, num_classes)
        self._build, self._seed, self._worker, self._prefix = build, seed, worker, prefix
        self._batch_size = batch_size
        self._num_calibration = min(batch_norm_batches, self.num_batches)
        self._num_classes = num_classes
        self._calibration: NormalizedBatches | None = None

    def build_model(self) -> nn.Module:
        """A new net."""
        return self._build()

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Cross-entropy."""
        images, labels = batch
        return F.cross_entropy(model(images).float(), labels)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Mean cross-entropy, top-1 accuracy and, with more than 5 classes, top-5 accuracy.

        The model must be in evaluation mode.
        """
        found: dict[str, float] = {}
        for prefix, batches in self.evaluated_sets().items():
            found |= score(model, batches, self._num_classes, worker=self._worker, prefix=prefix)
        return found

    @abstractmethod
    def evaluated_sets(self) -> Mapping[str, Iterable[ImagesAndLabels]]:
        """This rank's part of the held-out examples, by the prefix of their metrics."""


class ImageTask(Classification):
    """`Images` as a `Task`: random crops and flips, cross-entropy, top-1 and top-5 accuracy."""

    def __init__(
        self,
        *,
        images: Images,
        build: Callable[[], nn.Module],
        seed: int,
        worker: Worker,
        batch_size: int,
        batch_norm_batches: int,
        padding: int,
        evaluate_batch_size: int = 1000,
        prefix: str = "test",
        official: Images | None = None,
    ) -> None:
        """Evaluates on the test images, and if given on those of the `official` ones as "test"."""
        super().__init__(
            num_train=len(images.train_images),
            num_classes=images.num_classes,
            build=build,
            seed=seed,
            worker=worker,
            batch_size=batch_size,
            batch_norm_batches=batch_norm_batches,
            prefix=prefix,
        )
        self._padding, self._evaluate_batch_size = padding, evaluate_batch_size
        self._images = images.train_images.to(worker.device)
        self._labels = images.train_labels.to(worker.device)
        self._mean, self._deviation = channel_statistics(self._images)
        self._held_out = {prefix: self._own_test(images)}
        if official is not None:
            self._held_out["test"] = self._own_test(official)
            self.metrics += score_names("test", images.num_classes)

    def _own_test(self, images: Images) -> ImagesAndLabels:
        chosen, counted = own_part(len(images.test_images), self._worker)
        labels = images.test_labels[chosen].masked_fill(~counted, NOT_COUNTED)
        device = self._worker.device
        return images.test_images[chosen].to(device), labels.to(device)

    def evaluated_sets(self) -> dict[str, Iterator[ImagesAndLabels]]:
        """The batches that `evaluate` reads, by the prefix of their metrics."""
        return {prefix: self._normalized(*own) for prefix, own in self._held_out.items()}

    def batches(self, epoch: int, first: int = 0) -> Iterator[Batch]:
        """An epoch in random order; the last partial batch is dropped."""
        share, rank = self._worker.share(self._batch_size), self._worker.rank
        for images, labels in self._augmented(epoch, range(first, self.num_batches), share, rank):
            yield normalize(images, self._mean, self._deviation), labels

    def _augmented(
        self, epoch: int, indices: range, share: slice, rank: int
    ) -> Iterator[ImagesAndLabels]:
        generator = seeded(torch.device("cpu"), self._seed, epoch)
        order = torch.randperm(len(self._images), generator=generator).to(self._images.device)
        for i in indices:
            chosen = order[i * self._batch_size : (i + 1) * self._batch_size][share]
            step = epoch * self.num_batches + i
            generator = seeded(self._worker.device, self._seed, step, rank)
            images = augment(self._images[chosen], self._padding, generator)
            yield images, self._labels[chosen]

    def calibration(self) -> Sequence[Batch]:
        """Whole batches of a separate epoch, augmented as in training."""
        if self._calibration is None:
            # Every rank makes all of them: an average has one set of statistics.
            whole, indices = slice(None), range(self._num_calibration)
            batches = list(self._augmented(CALIBRATION_EPOCH, indices, whole, rank=0))
            self._calibration = NormalizedBatches(batches, self._mean, self._deviation)
        return self._calibration

    def _normalized(self, images: Tensor, labels: Tensor) -> Iterator[ImagesAndLabels]:
        size = self._evaluate_batch_size
        for part, own in zip(torch.split(images, size), torch.split(labels, size), strict=True):
            yield normalize(part, self._mean, self._deviation), own


def own_part(num_examples: int, worker: Worker) -> tuple[Tensor, Tensor]:
    """This rank's part of the examples to evaluate, and a mask of those that count.

    Every rank gets the same number, so that all see the same shapes and call the model equally
    often; the rest is padded with the first example, which does not count.

    >>> own_part(5, Worker(rank=1, world_size=2))
    (tensor([1, 3, 0]), tensor([ True,  True, False]))
    """
    own = -(-num_examples // worker.world_size)
    chosen = worker.rank + worker.world_size * torch.arange(own)
    counted = chosen < num_examples
    return torch.where(counted, chosen, 0), counted


def score(
    model: nn.Module,
    batches: Iterable[ImagesAndLabels],
    num_classes: int,
    *,
    worker: Worker,
    prefix: str,
) -> dict[str, float]:
    """Mean loss and accuracies over the batches of all ranks.

    The losses of single examples are float32, their sum is float64. Labels of -100 do not count.
    """
    sums = torch.zeros(4, dtype=torch.float64, device=worker.device)
    with torch.no_grad():
        for images, labels in batches:
            outputs = model(images).float()
            losses = F.cross_entropy(outputs, labels, reduction="none", ignore_index=NOT_COUNTED)
            guesses = outputs.topk(min(5, num_classes), dim=1).indices
            right, counted = guesses == labels[:, None], labels != NOT_COUNTED
            hits = right[:, 0].sum(), right.sum()
            sums += torch.stack([losses.double().sum(), *hits, counted.sum()])
    *totals, num_examples = worker.total(sums.tolist(), "the sums of an evaluation")
    values = [total / num_examples for total in totals]  # loss, top-1, top-5
    return dict(zip(score_names(prefix, num_classes), values, strict=False))


def score_names(prefix: str, num_classes: int) -> tuple[str, ...]:
    """The names of the values of `score`; with 5 classes or fewer there is no top-5 accuracy.

    >>> score_names("test", 10)
    ('test_loss', 'test_accuracy', 'test_top5_accuracy')
    """
    names = (f"{prefix}_loss", f"{prefix}_accuracy", f"{prefix}_top5_accuracy")
    return names if num_classes > 5 else names[:2]
