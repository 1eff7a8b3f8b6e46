"""The ImageNet recipe: in memory where the images fit, streamed where they do not."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lawa_lab.recipes.catalog import imagenet
from lawa_lab.recipes.catalog.imagenet import ImageNetConfig
from lawa_lab.recipes.task import Task, Worker
from lawa_lab.recipes.tasks.images import ImageTask
from lawa_lab.recipes.tasks.streamed_images import StreamedImageTask
from torch_lawa.errors import DataError

NAMES = ["valid_loss", "valid_accuracy", "valid_top5_accuracy"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """6 classes, 12 images to train with, 6 to evaluate."""
    rng = np.random.default_rng(0)
    for split, num in (("train", 12), ("val", 6)):
        for i in range(num):
            path = tmp_path / "data" / "imagenet" / split / f"n{i % 6}" / f"{i:02}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.integers(0, 256, (32, 40, 3), np.uint8)).save(path)
    return tmp_path


CONFIG = ImageNetConfig(batch_size=4, width=2, image_size=32, num_workers=0, batch_norm_batches=2)


def make(data: Path | None, config: ImageNetConfig = CONFIG) -> ImageTask | StreamedImageTask:
    return config.make_task(data, seed=0, worker=Worker(), smoke=False)


def check(task: Task) -> None:
    assert task.num_batches == 3
    model = task.build_model()
    assert model.fc.weight.shape == (6, 64)
    assert model.conv1.weight.shape == (2, 3, 7, 7)
    pixels, labels = next(iter(task.batches(0)))
    assert pixels.shape == (4, 3, 32, 32)
    torch.autograd.backward(task.loss(model, (pixels, labels)))
    assert list(task.evaluate(model.eval())) == NAMES
    assert len(task.calibration()) == 2


def test_smoke() -> None:
    config = ImageNetConfig().smoke()
    assert isinstance(config, ImageNetConfig)
    task = config.make_task(None, seed=0, worker=Worker(), smoke=True)
    assert task.num_batches == 10
    assert next(iter(task.batches(0)))[0].shape == (16, 3, 32, 32)
    assert list(task.evaluate(task.build_model().eval())) == NAMES


def test_what_fits_is_decoded_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imagenet, "_IN_MEMORY_BYTES", 18 * 3 * 32 * 32)
    task = make(folder / "data" / "imagenet")
    assert isinstance(task, ImageTask)
    check(task)
    labels = torch.cat([labels for _, labels in task.batches(0)])
    assert labels.bincount().tolist() == [2] * 6


def test_what_does_not_fit_is_streamed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imagenet, "_IN_MEMORY_BYTES", 18 * 3 * 32 * 32 - 1)
    task = make(folder / "data")
    assert isinstance(task, StreamedImageTask)
    check(task)


def test_data_is_looked_for_in_the_folder_data(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    check(make(None))
    with pytest.raises(DataError, match="ILSVRC2012"):
        make(folder / "elsewhere")


def test_images_in_memory_are_shifted_by_an_eighth_at_most(tmp_path: Path) -> None:
    for split in ("train", "val"):
        (tmp_path / split / "n0").mkdir(parents=True)
        Image.new("RGB", (32, 32), (255, 255, 255)).save(tmp_path / split / "n0" / "a.png")
    task = make(tmp_path, ImageNetConfig(batch_size=1, width=1, image_size=32, num_workers=1))
    pixels = torch.cat([next(iter(task.batches(epoch)))[0] for epoch in range(60)])
    black = pixels[:, 0] < 0
    assert black[:, 4:28, 4:28].sum() == 0
    for edge in (black[:, 3, 16], black[:, 28, 16], black[:, 16, 3], black[:, 16, 28]):
        assert 0 < edge.sum() < 30  # a shift by all four pixels, one time of nine


@pytest.mark.data
def test_tiny_imagenet(data_set: Callable[[str], Path]) -> None:
    config = ImageNetConfig(image_size=64, width=2, batch_norm_batches=2)
    task = make(data_set("tiny-imagenet-50"), config)
    assert isinstance(task, ImageTask)
    assert task.num_batches == 25_000 // 256
    pixels, labels = next(iter(task.batches(0)))
    assert pixels.shape == (256, 3, 64, 64)
    assert set(labels.tolist()) <= set(range(50))
    with torch.no_grad():
        values = task.evaluate(task.build_model().eval())
    assert values["valid_accuracy"] < 0.1 < 2 < values["valid_loss"]
