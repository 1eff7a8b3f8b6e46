"""A tree of images: what is found in it, what is missing, what the files become."""

import random
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lawa_lab.recipes.data.image_folder import (
    EvaluationImages,
    TrainingImages,
    decode_all,
    find_images,
)
from lawa_lab.recipes.data.image_transforms import random_view
from lawa_lab.recipes.task import mixed_seed
from torch_lawa.errors import DataError, LawaError


def put(path: Path, seed: int = 0, size: tuple[int, int] = (8, 8)) -> np.ndarray:
    """A file of noise; returns its pixels as (3, height, width)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)
    Image.fromarray(pixels).save(path)
    return pixels.transpose(2, 0, 1)


def tree(folder: Path) -> Path:
    for i, name in enumerate(
        [
            "train/n02/b.JPEG",
            "train/n02/a.jpg",
            "train/n01/images/c.PNG",
            "train/n01/d.webp",
            "train/n10/images/deep/e.jpeg",
            "val/n10/f.png",
            "val/n01/g.JPEG",
        ]
    ):
        put(folder / name, i)
    return folder


@pytest.mark.parametrize("inner", ["", "imagenet"])
def test_files_and_labels(tmp_path: Path, inner: str) -> None:
    root = tree(tmp_path / inner)
    for junk in ("train/n01/notes.txt", "train/n02/._a.jpg", "train/n02/.cache/x.png", "DONE"):
        (root / junk).parent.mkdir(exist_ok=True)
        (root / junk).write_bytes(b"")
    (root / "train" / ".hidden").mkdir()
    (root / "train" / "wnids.txt").write_text("n01")
    found = find_images(tmp_path)
    assert found.class_names == ["n01", "n02", "n10"]
    assert [str(Path(path).relative_to(root / "train")) for path in found.train_paths] == [
        "n01/d.webp",
        "n01/images/c.PNG",
        "n02/a.jpg",
        "n02/b.JPEG",
        "n10/images/deep/e.jpeg",
    ]
    assert found.train_labels == [0, 0, 1, 1, 2]
    assert [Path(path).name for path in found.val_paths] == ["g.JPEG", "f.png"]
    assert found.val_labels == [0, 2]


def test_no_data_says_what_to_get_and_where_to_put_it(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        find_images(tmp_path / "nowhere")
    for part in (
        str(tmp_path / "nowhere" / "train"),
        "ILSVRC2012",
        "image-net.org",
        "val",
        "data/imagenet",
        "--data",
    ):
        assert part in str(caught.value)


def test_no_val(tmp_path: Path) -> None:
    put(tmp_path / "train" / "n01" / "a.png")
    with pytest.raises(DataError, match=r"val: no such folder.*ILSVRC2012"):
        find_images(tmp_path)
    (tmp_path / "val").mkdir()
    with pytest.raises(DataError, match="val: contains no class folders"):
        find_images(tmp_path)
    (tmp_path / "val" / "n01").mkdir()
    with pytest.raises(DataError, match="val: contains no images in class"):
        find_images(tmp_path)


def test_val_as_it_comes_in_its_archive(tmp_path: Path) -> None:
    put(tree(tmp_path) / "val" / "ILSVRC2012_val_00000001.JPEG")
    put(tmp_path / "val" / "ILSVRC2012_val_00000002.JPEG")
    with pytest.raises(
        DataError, match=r"val_00000001\.JPEG: not in a class folder; 2 .* sort val into"
    ):
        find_images(tmp_path)


def test_val_with_a_class_that_train_lacks(tmp_path: Path) -> None:
    put(tree(tmp_path) / "val" / "images" / "a.JPEG")
    with pytest.raises(DataError, match="images: train has no such class"):
        find_images(tmp_path)


def test_a_class_without_images(tmp_path: Path) -> None:
    (tree(tmp_path) / "train" / "n05").mkdir()
    with pytest.raises(DataError, match=r"n05: contains no images \(\.jpeg"):
        find_images(tmp_path)


@pytest.mark.parametrize("num_threads", [1, 4])
def test_decode_all_keeps_order_and_pixels(tmp_path: Path, num_threads: int) -> None:
    paths = [tmp_path / f"{i}.png" for i in range(20)]
    pixels = [put(path, i) for i, path in enumerate(paths)]
    found = decode_all([str(path) for path in paths], 8, num_threads)
    assert found.dtype == torch.uint8
    assert np.array_equal(found.numpy(), np.stack(pixels))


def test_decode_all_cuts_out_the_middle_of_what_has_another_size(tmp_path: Path) -> None:
    pixels = put(tmp_path / "a.png", size=(12, 8))
    put(tmp_path / "b.png", size=(30, 40))
    Image.new("L", (8, 8), 9).save(tmp_path / "c.png")
    found = decode_all([str(tmp_path / f"{name}.png") for name in "abc"], 8, 2)
    assert found.shape == (3, 3, 8, 8)
    assert np.array_equal(found[0].numpy(), pixels[:, :, 2:10])
    assert found[2].unique().tolist() == [9]


def test_decode_all_names_the_file_that_is_broken(tmp_path: Path) -> None:
    paths = [str(tmp_path / f"{i}.png") for i in range(9)]
    for path in paths:
        put(Path(path))
    Path(paths[5]).write_bytes(b"nothing")
    with pytest.raises(DataError, match=r"5\.png: cannot be decoded"):
        decode_all(paths, 8, 3)


def test_a_training_view_follows_from_seed_epoch_and_index(tmp_path: Path) -> None:
    paths = [str(tmp_path / f"ü{i}.png") for i in range(3)]
    for i, path in enumerate(paths):
        put(Path(path), i, size=(40, 30))
    files = TrainingImages(paths, 16, seed=7)
    assert len(files) == 3
    for epoch, index in ((0, 0), (0, 1), (5, 1)):
        rng = random.Random(mixed_seed(7, epoch, index))
        expected = np.asarray(random_view(Image.open(paths[index]), 16, rng)).transpose(2, 0, 1)
        assert np.array_equal(files[epoch, index].numpy(), expected)
    assert not torch.equal(files[0, 1], files[1, 1])
    assert not torch.equal(files[0, 1], TrainingImages(paths, 16, seed=8)[0, 1])
    assert files[0, 0].dtype == torch.uint8
    assert files[0, 0].shape == (3, 16, 16)


def test_an_image_to_evaluate_is_its_middle(tmp_path: Path) -> None:
    pixels = put(tmp_path / "a.png", size=(40, 32))
    files = EvaluationImages([str(tmp_path / "a.png")], 28)
    # 28 pixels of 32 along the shorter side, so that nothing is resized.
    assert np.array_equal(files[0].numpy(), pixels[:, 2:30, 6:34])


def test_datasets_without_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    for make in (
        lambda: TrainingImages([], 8, seed=0),
        lambda: EvaluationImages([], 8),
        lambda: decode_all([], 8, 1),
    ):
        with pytest.raises(LawaError, match="pip install"):
            make()


@pytest.mark.data
def test_tiny_imagenet(data_set: Callable[[str], Path]) -> None:
    found = find_images(data_set("tiny-imagenet-50"))
    assert len(found.class_names) == 50
    assert found.class_names[0] == "n01443537"  # the goldfish
    assert np.bincount(found.train_labels).tolist() == [500] * 50
    assert np.bincount(found.val_labels).tolist() == [50] * 50
    some = found.val_paths[::50]
    images = decode_all(some, 64, 2)
    expected = [np.asarray(Image.open(path).convert("RGB")) for path in some]
    assert np.array_equal(images.permute(0, 2, 3, 1).numpy(), np.stack(expected))
