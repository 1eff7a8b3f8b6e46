"""Image classification with images that data-loading processes read from files."""

import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler

from lawa_lab.recipes.data.image_folder import EvaluationImages, FoundImages, TrainingImages
from lawa_lab.recipes.data.images import ImagesAndLabels, NormalizedBatches, normalize
from lawa_lab.recipes.task import CALIBRATION_EPOCH, Batch, Worker, seeded
from lawa_lab.recipes.tasks.images import NOT_COUNTED, Classification, own_part
from torch_lawa.errors import DataError

__all__ = ["StreamedImageTask"]

# The usual statistics of ImageNet, in units of bytes.
_MEAN = (123.675, 116.28, 103.53)
_DEVIATION = (58.395, 57.12, 57.375)

_KEPT_BYTES = 8 * 2**30


class StreamedImageTask(Classification):
    """Image files as a `Task`: random resized crops, cross-entropy, top-1 and top-5 accuracy.

    Batches do not depend on the number of data-loading processes: a crop follows from the seed, the
    epoch and the image. Held-out images are decoded once if this rank's part of them takes no more
    than `kept_bytes`, because every set of weights is evaluated on the same images.
    """

    def __init__(
        self,
        *,
        found: FoundImages,
        size: int,
        build: Callable[[], nn.Module],
        seed: int,
        worker: Worker,
        batch_size: int,
        batch_norm_batches: int,
        num_workers: int,
        evaluate_batch_size: int = 250,
        kept_bytes: int = _KEPT_BYTES,
        prefix: str = "valid",
    ) -> None:
        super().__init__(
            num_train=len(found.train_paths),
            num_classes=len(found.class_names),
            build=build,
            seed=seed,
            worker=worker,
            batch_size=batch_size,
            batch_norm_batches=batch_norm_batches,
            prefix=prefix,
        )
        self._num_workers, self._evaluate_batch_size = num_workers, evaluate_batch_size
        self._mean = torch.tensor(_MEAN, device=worker.device)
        self._deviation = torch.tensor(_DEVIATION, device=worker.device)
        self._files = TrainingImages(found.train_paths, size, seed=seed)
        self._labels = torch.tensor(found.train_labels)
        chosen, counted = own_part(len(found.val_paths), worker)
        self._test_files = EvaluationImages([found.val_paths[i] for i in chosen.tolist()], size)
        labels = torch.tensor(found.val_labels)[chosen]
        self._test_labels = labels.masked_fill(~counted, NOT_COUNTED)
        self._keep = len(chosen) * 3 * size**2 <= kept_bytes
        self._kept: Tensor | None = None
        self._order, self._test_order = _Keys(), _Keys()
        self._loader = self._read(self._files, self._order, lasting=True)
        self._test_loader = self._read(self._test_files, self._test_order, lasting=not self._keep)

    def _read(self, files: Any, keys: "_Keys", *, lasting: bool) -> DataLoader[Tensor]:
        return DataLoader(
            files,
            batch_sampler=keys,
            num_workers=self._num_workers,
            pin_memory=lasting and self._worker.device.type == "cuda",
            persistent_workers=lasting and self._num_workers > 0,
            worker_init_fn=_ignore_interrupts,
            # Its own: by default the loader would draw from the generator that dropout uses.
            generator=torch.Generator(),
        )

    def batches(self, epoch: int, first: int = 0) -> Iterator[Batch]:
        """An epoch in random order; the last partial batch is dropped.

        One epoch at a time: a call ends the previous epoch.
        """
        chosen = self._chosen(epoch, range(first, self.num_batches))
        chosen = [batch[self._worker.share(self._batch_size)] for batch in chosen]
        self._order.read_next(chosen, epoch)
        for batch, images in zip(chosen, _read_batches(self._loader), strict=True):
            yield self._ready(images, self._labels[batch])

    def _chosen(self, epoch: int, indices: range) -> list[Tensor]:
        generator = seeded(torch.device("cpu"), self._seed, epoch)
        order = torch.randperm(len(self._files), generator=generator)
        return [order[i * self._batch_size : (i + 1) * self._batch_size] for i in indices]

    def _ready(self, images: Tensor, labels: Tensor) -> ImagesAndLabels:
        device = self._worker.device
        images, labels = (tensor.to(device, non_blocking=True) for tensor in (images, labels))
        return normalize(images, self._mean, self._deviation), labels

    def calibration(self) -> Sequence[Batch]:
        """Whole batches of a separate epoch, augmented as in training."""
        if self._calibration is None:
            keys, chosen = _Keys(), self._chosen(CALIBRATION_EPOCH, range(self._num_calibration))
            keys.read_next(chosen, CALIBRATION_EPOCH)
            read = _read_batches(self._read(self._files, keys, lasting=False))
            # Copied out of shared memory, which may be small.
            batches = [
                (images.clone(), self._labels[batch])
                for batch, images in zip(chosen, read, strict=True)
            ]
            self._calibration = NormalizedBatches(batches, self._mean, self._deviation)
        return self._calibration

    def evaluated_sets(self) -> dict[str, Iterator[ImagesAndLabels]]:
        """The held-out images."""
        return {self._prefix: self._test_batches()}

    def _test_batches(self) -> Iterator[ImagesAndLabels]:
        labels = torch.split(self._test_labels, self._evaluate_batch_size)
        if self._kept is None:
            everything = torch.arange(len(self._test_files))
            self._test_order.read_next(torch.split(everything, self._evaluate_batch_size))
            read = _read_batches(self._test_loader)
            if not self._keep:
                yield from map(self._ready, read, labels)
                return
            kept, begin = None, 0
            for images in read:
                if kept is None:
                    kept = images.new_empty(len(everything), *images.shape[1:])
                kept[begin : begin + len(images)] = images
                begin += len(images)
            self._kept = kept
        assert self._kept is not None
        yield from map(self._ready, torch.split(self._kept, self._evaluate_batch_size), labels)


class _Keys(Sampler[list[Any]]):
    """The batches that a loader reads next; persistent workers need not be restarted for them."""

    def __init__(self) -> None:
        self.read_next(())

    def read_next(self, batches: Sequence[Tensor], epoch: int | None = None) -> None:
        """Images by their indices, or by pairs of an epoch and an index."""
        self._batches, self._epoch = batches, epoch

    def __iter__(self) -> Iterator[list[Any]]:
        batches, epoch = self._batches, self._epoch
        for batch in batches:
            numbers = batch.tolist()
            yield numbers if epoch is None else [(epoch, number) for number in numbers]

    def __len__(self) -> int:
        return len(self._batches)


def _ignore_interrupts(worker: int) -> None:
    """Ctrl-C reaches all processes, but training needs its batch to finish the step and save."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _read_batches(loader: DataLoader[Tensor]) -> Iterator[Tensor]:
    """The loader's batches; errors of data-loading processes without their tracebacks."""
    try:
        yield from loader
    except DataError as error:
        # The frames keep the loader in a reference cycle, and until it is collected its workers do
        # not exit: joining them would then run into a timeout of seconds.
        error.__traceback__ = None
        raise DataError(str(error).rsplit("DataError: ", 1)[-1].strip()) from None
