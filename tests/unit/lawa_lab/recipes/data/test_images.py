"""Batches are augmented and normalised as a plain loop over the examples would."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lawa_lab.recipes.data.images import (
    NormalizedBatches,
    augment,
    channel_statistics,
    normalize,
    smoke_images,
)
from torch_lawa.errors import DataError


def random_bytes(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, shape, generator=generator, dtype=torch.uint8)


def augment_one_by_one(
    images: torch.Tensor, padding: int, generator: torch.Generator
) -> list[torch.Tensor]:
    """The same draws, each image padded, cropped and flipped by itself."""
    num, _, height, width = images.shape
    down, right = torch.randint(2 * padding + 1, (2, num), generator=generator)
    flipped = torch.randint(2, (num, 1), generator=generator)
    found = []
    for i in range(num):
        padded = torch.zeros(3, height + 2 * padding, width + 2 * padding, dtype=torch.uint8)
        padded[:, padding : padding + height, padding : padding + width] = images[i]
        top, left = int(down[i]), int(right[i])
        crop = padded[:, top : top + height, left : left + width]
        found.append(crop.flip(2) if flipped[i] else crop)
    return found


@given(
    num=st.integers(1, 9),
    height=st.integers(1, 6),
    width=st.integers(1, 6),
    padding=st.integers(0, 3),
    seed=st.integers(0, 2**40),
)
def test_augment_is_a_loop_over_the_examples(
    num: int, height: int, width: int, padding: int, seed: int
) -> None:
    images = random_bytes(num, 3, height, width)
    found = augment(images, padding, torch.Generator().manual_seed(seed))
    expected = augment_one_by_one(images, padding, torch.Generator().manual_seed(seed))
    assert torch.equal(found, torch.stack(expected))


def test_every_shift_and_flip_comes_up() -> None:
    images = torch.zeros(2000, 3, 8, 8, dtype=torch.uint8)
    images[:, :, 4, 3] = 1  # off the middle, so that a flip shows
    found = augment(images, 1, torch.Generator().manual_seed(0))
    assert found.is_contiguous(memory_format=torch.channels_last)
    places = {(int(row), int(column)) for _, row, column in found[:, 0].nonzero()}
    assert places == {(row, column) for row in (3, 4, 5) for column in (2, 3, 4, 5)}
    # Columns 2 and 5 are only reached one way of two, so that both say how many were flipped.
    assert (found[:, 0, :, 5].sum() / 2000).item() == pytest.approx(1 / 6, abs=0.03)


def test_statistics_are_those_of_float64() -> None:
    images = random_bytes(5000, 3, 3, 2)  # more than a piece
    images[:, 1] //= 3
    mean, deviation = channel_statistics(images)
    values = images.double().transpose(0, 1).reshape(3, -1)
    assert torch.equal(mean, values.mean(1).float())
    torch.testing.assert_close(deviation, values.std(1, correction=0).float(), rtol=1e-6, atol=0)


def test_a_channel_of_one_value_is_not_divided_by_nothing() -> None:
    images = torch.full((2, 3, 2, 2), 7, dtype=torch.uint8)
    mean, deviation = channel_statistics(images)
    assert normalize(images, mean, deviation).tolist() == torch.zeros(2, 3, 2, 2).tolist()


def test_normalize() -> None:
    images, mean, deviation = random_bytes(4, 3, 5, 6), torch.rand(3), torch.rand(3) + 1
    found = normalize(images, mean, deviation)
    assert found.dtype == torch.float32
    assert found.is_contiguous(memory_format=torch.channels_last)
    for channel in range(3):
        expected = (images[:, channel].float() - mean[channel]) / deviation[channel]
        assert torch.equal(found[:, channel], expected)


def test_normalized_batches_are_made_when_read_and_keep_their_bytes() -> None:
    mean, deviation = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2.0, 2.0, 2.0])
    kept = [(random_bytes(2, 3, 2, 2, seed=i), torch.tensor([i, i])) for i in range(3)]
    before = [images.clone() for images, _ in kept]
    batches = NormalizedBatches(kept, mean, deviation)
    assert len(batches) == 3
    for _ in range(2):
        for i, (images, labels) in enumerate(batches):
            assert torch.equal(images, normalize(before[i], mean, deviation))
            assert labels.tolist() == [i, i]
    assert [labels.tolist() for _, labels in batches[1:]] == [[1, 1], [2, 2]]


def test_smoke_images_can_be_told_apart() -> None:
    images = smoke_images(10, 32, 160, 64, seed=0)
    assert images.train_images.shape == (160, 3, 32, 32)
    assert images.train_labels.bincount().tolist() == [16] * 10
    # The nearest class mean of the training images finds the class of a test image.
    train, test = images.train_images.float().flatten(1), images.test_images.float().flatten(1)
    means = torch.stack([train[images.train_labels == i].mean(0) for i in range(10)])
    assert torch.equal(torch.cdist(test, means).argmin(1), images.test_labels)
    again, other = (smoke_images(10, 32, 160, 64, seed=seed) for seed in (0, 1))
    assert torch.equal(again.test_images, images.test_images)
    assert not torch.equal(other.test_images, images.test_images)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_images": torch.zeros(160, 3, 8, 8)}, "train images: torch.float32"),
        ({"test_images": torch.zeros(6, 1, 8, 8, dtype=torch.uint8)}, r"test images: .*\(6, 1"),
        ({"test_labels": torch.zeros(5, dtype=torch.int64)}, r"test labels: .*\(5,\).*6 images"),
        ({"train_labels": torch.zeros(9, dtype=torch.int32)}, "train labels: torch.int32"),
        ({"num_classes": 2}, "train labels: from 0 to 2 with 2 classes"),
        (
            {
                "test_images": torch.zeros(0, 3, 8, 8, dtype=torch.uint8),
                "test_labels": torch.zeros(0, dtype=torch.int64),
            },
            "test images: .*empty",
        ),
    ],
)
def test_images_that_do_not_fit_are_refused(changes: dict[str, object], message: str) -> None:
    images = smoke_images(3, 8, 9, 6, seed=0)
    with pytest.raises(DataError, match=message):
        dataclasses.replace(images, **changes)  # type: ignore[arg-type]
