"""Images in memory as a task: batches that follow from seed and step, an evaluation by hand."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lawa_lab.recipes.data.images import Images, augment, normalize, smoke_images
from lawa_lab.recipes.task import Batch, Worker, seeded
from lawa_lab.recipes.tasks.images import ImageTask, score
from torch_lawa.errors import ConfigError

CPU = torch.device("cpu")


def images(num_classes: int = 7, num_train: int = 22, num_test: int = 13) -> Images:
    return smoke_images(num_classes, 8, num_train, num_test, seed=5)


class Linear(nn.Module):
    """Scores that are far apart, as float32 or less."""

    def __init__(self, num_classes: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.fc, self.dtype = nn.Linear(3 * 8 * 8, num_classes), dtype
        self.shapes: list[tuple[int, ...]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.shapes.append(tuple(x.shape))
        return self.fc(x.flatten(1)).to(self.dtype)


def task(**changes: Any) -> ImageTask:
    given: dict[str, Any] = {
        "images": images(),
        "build": lambda: Linear(7),
        "seed": 3,
        "worker": Worker(),
        "batch_size": 4,
        "batch_norm_batches": 2,
        "padding": 1,
    }
    return ImageTask(**given | changes)


def same(a: Sequence[Batch], b: Sequence[Batch]) -> bool:
    return len(a) == len(b) and all(
        torch.equal(x, y) for i, j in zip(a, b, strict=True) for x, y in zip(i, j, strict=True)
    )


def statistics(data: Images) -> tuple[torch.Tensor, torch.Tensor]:
    values = data.train_images.double()
    return values.mean((0, 2, 3)).float(), values.std((0, 2, 3), correction=0).float()


def test_batches_are_a_shuffled_epoch_augmented_and_normalised() -> None:
    made, data, epoch = task(), images(), 2
    batches = list(made.batches(epoch))
    assert made.num_batches == len(batches) == 5
    order = torch.randperm(22, generator=seeded(CPU, 3, epoch))
    for i, (pixels, labels) in enumerate(batches):
        chosen = order[4 * i : 4 * i + 4]
        expected = augment(data.train_images[chosen], 1, seeded(CPU, 3, epoch * 5 + i, 0))
        torch.testing.assert_close(pixels, normalize(expected, *statistics(data)))
        assert torch.equal(labels, data.train_labels[chosen])
        assert pixels.dtype == torch.float32
        assert pixels.is_contiguous(memory_format=torch.channels_last)


def test_an_epoch_resumed_is_the_tail_of_the_epoch() -> None:
    whole = list(task().batches(1))
    for first in range(6):
        assert same(list(task().batches(1, first)), whole[first:])


def test_epochs_and_seeds_differ() -> None:
    first = list(task().batches(0))
    assert same(list(task().batches(0)), first)
    assert not same(list(task().batches(1)), first)
    assert not same(list(task(seed=4).batches(0)), first)


def test_processes_share_each_batch_and_draw_apart() -> None:
    alone = list(task(padding=0).batches(1))
    ranks = [
        list(task(padding=0, worker=Worker(rank=rank, world_size=2)).batches(1)) for rank in (0, 1)
    ]
    for i in range(5):
        assert [len(own[i][1]) for own in ranks] == [2, 2]
        assert torch.equal(torch.cat([own[i][1] for own in ranks]), alone[i][1])
    # One image everywhere, so that what was drawn is all that differs.
    still = images()
    still = dataclasses.replace(still, train_images=still.train_images[:1].repeat(22, 1, 1, 1))
    first, second = (
        [pixels for pixels, _ in task(images=still, worker=Worker(CPU, rank, 2)).batches(0)]
        for rank in (0, 1)
    )
    assert not torch.equal(torch.stack(first), torch.stack(second))


def test_calibration_is_made_once_the_same_in_every_process_and_in_no_epoch() -> None:
    made = task()
    batches = made.calibration()
    assert made.calibration() is batches
    assert len(batches) == 2
    assert [len(labels) for _, labels in batches] == [4, 4]
    other = task(worker=Worker(rank=1, world_size=2)).calibration()
    assert same(list(other), list(batches))
    order = torch.randperm(22, generator=seeded(CPU, 3, 2**31))
    data = images()
    expected = augment(data.train_images[order[4:8]], 1, seeded(CPU, 3, 2**31 * 5 + 1, 0))
    torch.testing.assert_close(batches[1][0], normalize(expected, *statistics(data)))
    assert torch.equal(batches[1][1], data.train_labels[order[4:8]])


def test_no_more_calibration_than_an_epoch_has() -> None:
    assert len(task(batch_norm_batches=50).calibration()) == 5


def test_loss_is_that_of_float32() -> None:
    model = Linear(7, torch.bfloat16)
    pixels, labels = next(iter(task().batches(0)))
    found = task().loss(model, (pixels, labels))
    assert found.dtype == torch.float32
    assert found.item() == F.cross_entropy(model(pixels).float(), labels).item()


def evaluate_by_hand(model: nn.Module, data: Images) -> tuple[float, float, float]:
    """Loss, top-1 and top-5 accuracy, one example after the other, in float64."""
    mean, deviation = statistics(data)
    loss, top1, top5 = 0.0, 0, 0
    for pixels, label in zip(data.test_images, data.test_labels.tolist(), strict=True):
        scores = model(normalize(pixels[None], mean, deviation))[0].tolist()
        loss += math.log(sum(math.exp(s - scores[label]) for s in scores))
        better = sum(s > scores[label] for s in scores)
        top1, top5 = top1 + (better < 1), top5 + (better < 5)
    return loss / len(data.test_images), top1 / len(data.test_images), top5 / len(data.test_images)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_evaluation_is_a_loop_over_the_examples(dtype: torch.dtype) -> None:
    data, model = images(), Linear(7, dtype)
    loss, top1, top5 = evaluate_by_hand(model, data)
    assert 0 < top1 < top5 < 1
    model.shapes.clear()
    values = task(evaluate_batch_size=5, prefix="valid").evaluate(model)
    assert values == {
        "valid_loss": pytest.approx(loss, rel=1e-6),
        "valid_accuracy": top1,
        "valid_top5_accuracy": top5,
    }
    assert [shape[0] for shape in model.shapes] == [5, 5, 3]


def test_losses_are_added_up_in_float64() -> None:
    outputs, labels = 30 * torch.rand(5000, 7), torch.arange(5000) % 7
    losses = F.cross_entropy(outputs, labels, reduction="none")
    values = score(nn.Identity(), [(outputs, labels)], 7, worker=Worker(), prefix="test")
    assert values["test_loss"] == pytest.approx(math.fsum(losses.tolist()) / 5000, rel=1e-13)
    assert losses.sum().item() / 5000 != pytest.approx(values["test_loss"], rel=1e-13)


def test_few_classes_have_no_top5() -> None:
    values = task(images=images(num_classes=5), build=lambda: Linear(5)).evaluate(Linear(5))
    assert list(values) == ["test_loss", "test_accuracy"]
    made = task(images=images(num_classes=6))
    assert "test_top5_accuracy" in made.evaluate(Linear(6))


def test_no_gradients_are_kept() -> None:
    class Watching(Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert not torch.is_grad_enabled()
            return super().forward(x)

    task().evaluate(Watching(7))


class Noting(Worker):
    """Keeps what this process would add to the sums."""

    def total(self, values: Sequence[float], where: str) -> list[float]:
        noted.append(list(values))
        return [1.0 for _ in values]  # not its own: of 16 processes some have no example


noted: list[list[float]] = []


@pytest.mark.parametrize("world_size", [2, 3, 4, 16])
def test_processes_evaluate_every_example_once_in_equal_shapes(world_size: int) -> None:
    data, model = images(), Linear(7)
    alone = task().evaluate(model)
    noted.clear()
    shapes = []
    for rank in range(world_size):
        model.shapes.clear()
        worker = Noting(CPU, rank, world_size)
        task(worker=worker, evaluate_batch_size=2, batch_size=world_size).evaluate(model)
        shapes.append(list(model.shapes))
    assert all(own == shapes[0] for own in shapes)
    loss, *right, counted = (sum(column) / 13 for column in zip(*noted, strict=True))
    assert loss == pytest.approx(alone["test_loss"], rel=1e-6)
    assert right == [alone["test_accuracy"], alone["test_top5_accuracy"]]
    assert counted == 1.0
    assert len(data.test_images) == 13


def test_the_sum_of_all_processes_is_what_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    model, sums = Linear(7), []

    def all_reduce(tensor: torch.Tensor) -> None:
        sums.append(tensor.clone())
        tensor += sums[0] if len(sums) == 2 else 0

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    for rank in (0, 1):
        values = task(worker=Worker(CPU, rank, 2)).evaluate(model)
    assert values == pytest.approx(task().evaluate(model), rel=1e-6)


def test_what_cannot_be_made_into_batches_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"batch_size=23: .* only 22 training images"):
        task(batch_size=23)
    assert task(batch_size=22).num_batches == 1


def test_a_net_learns() -> None:
    data = smoke_images(4, 8, 128, 40, seed=0)
    made = task(images=data, build=lambda: Linear(4), batch_size=16)
    torch.manual_seed(0)
    model = made.build_model()
    before = made.evaluate(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for epoch in range(5):
        for batch in made.batches(epoch):
            optimizer.zero_grad()
            torch.autograd.backward(made.loss(model, batch))
            optimizer.step()
    after = made.evaluate(model)
    assert after["test_loss"] < 0.5 * before["test_loss"]
    assert after["test_accuracy"] > 0.9


def test_evaluated_sets_are_what_is_evaluated() -> None:
    held_out, official = images(num_test=13), images(num_test=9)
    made = task(images=held_out, prefix="valid", official=official, evaluate_batch_size=5)
    sets = {name: list(batches) for name, batches in made.evaluated_sets().items()}
    assert [len(labels) for _, labels in sets["valid"]] == [5, 5, 3]
    for name, data in (("valid", held_out), ("test", official)):
        pixels, labels = (torch.cat(parts) for parts in zip(*sets[name], strict=True))
        torch.testing.assert_close(pixels, normalize(data.test_images, *statistics(held_out)))
        assert torch.equal(labels, data.test_labels)
    assert task().evaluated_sets().keys() == {"test"}
