"""Streamed images as a task: the same batches whatever reads them, from wherever it goes on."""

import math
import multiprocessing
import os
import random
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn

from lawa_lab.recipes.data.image_folder import find_images
from lawa_lab.recipes.data.image_transforms import random_view
from lawa_lab.recipes.task import Batch, Worker, mixed_seed, seeded
from lawa_lab.recipes.tasks.streamed_images import StreamedImageTask
from torch_lawa.errors import ConfigError, DataError

# From Python 3.12 on, workers that are forked are warned of where there are threads.
pytestmark = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")

CPU = torch.device("cpu")
MEAN = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
DEVIATION = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """7 classes: 21 images to train with, 10 to evaluate."""
    root = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    for split, num in (("train", 21), ("val", 10)):
        for i in range(num):
            path = root / split / f"n{i % 7}" / f"{i:02}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            pixels = rng.integers(0, 256, (12 + i % 3, 14, 3), np.uint8)
            Image.fromarray(pixels).save(path)
    return root


@pytest.fixture
def task(folder: Path) -> Callable[..., StreamedImageTask]:
    def make(**changes: Any) -> StreamedImageTask:
        given: dict[str, Any] = {
            "found": find_images(folder),
            "size": 7,
            "build": lambda: Linear(),
            "seed": 3,
            "worker": Worker(),
            "batch_size": 4,
            "batch_norm_batches": 2,
            "num_workers": 0,
        }
        return StreamedImageTask(**given | changes)

    return make


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3 * 7 * 7, 7)
        self.shapes: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.shapes.append(len(x))
        scores: torch.Tensor = self.fc(x.flatten(1))
        return scores


def same(a: Sequence[Batch], b: Sequence[Batch]) -> bool:
    return len(a) == len(b) and all(
        torch.equal(x, y) for i, j in zip(a, b, strict=True) for x, y in zip(i, j, strict=True)
    )


def view(path: str, epoch: int, index: int) -> torch.Tensor:
    image = random_view(Image.open(path), 7, random.Random(mixed_seed(3, epoch, index)))
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
    return (pixels / 255 - MEAN) / DEVIATION


def test_batches_are_views_in_a_random_order(task: Any, folder: Path) -> None:
    found, epoch = find_images(folder), 2
    batches = list(task().batches(epoch))
    assert task().num_batches == len(batches) == 5
    order = torch.randperm(21, generator=seeded(CPU, 3, epoch)).tolist()
    for i, (pixels, labels) in enumerate(batches):
        chosen = order[4 * i : 4 * i + 4]
        expected = torch.stack([view(found.train_paths[j], epoch, j) for j in chosen])
        torch.testing.assert_close(pixels, expected, rtol=1e-5, atol=1e-6)
        assert labels.tolist() == [found.train_labels[j] for j in chosen]
        assert pixels.is_contiguous(memory_format=torch.channels_last)


def test_an_epoch_resumed_is_the_tail_of_the_epoch(task: Any) -> None:
    whole = list(task().batches(1))
    for first in range(6):
        assert same(list(task().batches(1, first)), whole[first:])
    assert not same(list(task().batches(0)), whole)
    assert not same(list(task(seed=4).batches(1)), whole)


def test_workers_change_nothing_and_are_kept(task: Any) -> None:
    alone, worked = task(), task(num_workers=2)
    assert same(list(worked.batches(0)), list(alone.batches(0)))
    pids = {child.pid for child in multiprocessing.active_children()}
    assert len(pids) == 2
    cut_short = worked.batches(1)
    next(cut_short)  # the workers have read further
    assert same(list(worked.batches(1, 2)), list(alone.batches(1, 2)))
    assert {child.pid for child in multiprocessing.active_children()} == pids
    assert same(worked.calibration(), alone.calibration())
    model = Linear()
    assert worked.evaluate(model) == alone.evaluate(model)


def test_nothing_is_drawn_from_what_dropout_draws_from(task: Any) -> None:
    model, made = Linear(), task()
    before = torch.get_rng_state()
    list(made.batches(0))
    made.calibration()
    made.evaluate(model)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_worker_survives_an_interrupt(task: Any) -> None:
    made = task(num_workers=1)
    batches = made.batches(0)
    found = [next(batches)]
    [worker] = multiprocessing.active_children()
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGINT)
    found += batches
    found += made.batches(1)
    assert same(found, [*task().batches(0), *task().batches(1)])


def test_processes_share_each_batch(task: Any) -> None:
    alone = list(task().batches(1))
    ranks = [list(task(worker=Worker(rank=rank, world_size=2)).batches(1)) for rank in (0, 1)]
    for i in range(5):
        for part in range(2):
            assert torch.equal(torch.cat([own[i][part] for own in ranks]), alone[i][part])


def test_calibration_is_made_once_and_the_same_in_every_process(task: Any, folder: Path) -> None:
    made = task()
    batches = made.calibration()
    assert made.calibration() is batches
    assert [len(labels) for _, labels in batches] == [4, 4]
    other = task(worker=Worker(rank=1, world_size=2), batch_norm_batches=9).calibration()
    assert len(other) == 5
    assert same(other[:2], batches)
    order = torch.randperm(21, generator=seeded(CPU, 3, 2**31)).tolist()
    path = find_images(folder).train_paths[order[5]]
    torch.testing.assert_close(batches[1][0][1], view(path, 2**31, order[5]), rtol=1e-5, atol=1e-6)


def evaluate_by_hand(model: nn.Module, folder: Path) -> dict[str, float]:
    found = find_images(folder)
    sums = np.zeros(3)
    for path, label in zip(found.val_paths, found.val_labels, strict=True):
        image = Image.open(path)
        image = image.resize((8 * 14 // image.height, 8), Image.Resampling.BILINEAR)
        left, top = round((image.width - 7) / 2), round((image.height - 7) / 2)
        image = image.crop((left, top, left + 7, top + 7))
        pixels = (torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255 - MEAN) / DEVIATION
        scores = model(pixels[None])[0].tolist()
        better = sum(s > scores[label] for s in scores)
        loss = math.log(sum(math.exp(s - scores[label]) for s in scores))
        sums += loss, better < 1, better < 5
    names = ("valid_loss", "valid_accuracy", "valid_top5_accuracy")
    return dict(zip(names, sums / len(found.val_paths), strict=True))


@pytest.mark.parametrize("kept_bytes", [0, 10 * 3 * 7 * 7 - 1, 10 * 3 * 7 * 7])
def test_evaluation_is_a_loop_over_the_files(task: Any, folder: Path, kept_bytes: int) -> None:
    model = Linear()
    with torch.no_grad():
        expected = evaluate_by_hand(model, folder)
    made = task(evaluate_batch_size=4, kept_bytes=kept_bytes)
    for _ in range(2):
        model.shapes.clear()
        assert made.evaluate(model) == pytest.approx(expected, rel=1e-5)
        assert model.shapes == [4, 4, 2]


def test_files_to_evaluate_are_decoded_once_where_they_fit(
    task: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lawa_lab.recipes.data import image_folder

    read: list[str] = []
    original = image_folder.read_image
    monkeypatch.setattr(
        image_folder, "read_image", lambda path: read.append(path) or original(path)
    )
    model = Linear()
    for kept_bytes, num in ((10 * 3 * 7 * 7, 10), (10 * 3 * 7 * 7 - 1, 20)):
        read.clear()
        made = task(kept_bytes=kept_bytes)
        assert made.evaluate(model) == made.evaluate(model)
        assert len(read) == num


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_processes_evaluate_every_file_once(
    task: Any, world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, sums = Linear(), []
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor: sums.append(tensor.clone()))
    expected = task().evaluate(model)
    shapes = []
    for rank in range(world_size):
        model.shapes.clear()
        worker = Worker(rank=rank, world_size=world_size)
        task(worker=worker, batch_size=2 * world_size, evaluate_batch_size=2).evaluate(model)
        shapes.append(model.shapes.copy())
    assert all(own == shapes[0] for own in shapes)
    # The last sum is the number of files that count.
    assert (sum(sums) / 10).tolist() == pytest.approx([*expected.values(), 1.0], rel=1e-6)


def test_loss_is_that_of_float32(task: Any) -> None:
    batch = next(task().batches(0))
    model = Linear()

    class Half(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return model(x).bfloat16()

    expected = F.cross_entropy(model(batch[0]).bfloat16().float(), batch[1])
    assert task().loss(Half(), batch).item() == expected.item()
    assert isinstance(task().build_model(), Linear)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_broken_file_is_named_in_one_line(
    task: Any, folder: Path, tmp_path: Path, num_workers: int
) -> None:
    for split in ("train", "val"):
        (tmp_path / split / "n0").mkdir(parents=True)
        (tmp_path / split / "n0" / "bad.JPEG").write_bytes(b"nothing")
    made = task(found=find_images(tmp_path), batch_size=1, num_workers=num_workers)
    for act in (lambda: list(made.batches(0)), made.calibration, lambda: made.evaluate(Linear())):
        with pytest.raises(DataError) as caught:
            act()
        assert str(caught.value).startswith(str(tmp_path))
        assert "bad.JPEG: cannot be decoded" in str(caught.value)
        assert "\n" not in str(caught.value)


def test_what_cannot_be_made_into_batches_is_refused(task: Any) -> None:
    with pytest.raises(ConfigError, match="batch_size=22: the data contains only 21"):
        task(batch_size=22)
