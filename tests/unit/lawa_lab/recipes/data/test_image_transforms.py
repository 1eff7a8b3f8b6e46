"""Image files to bytes: colours, sizes, random views."""

import random
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from lawa_lab.recipes.data.image_transforms import (
    centre,
    random_box,
    random_view,
    read_image,
    require_pillow,
    to_bytes,
)
from torch_lawa.errors import DataError, LawaError


def coordinates(width: int, height: int) -> Image.Image:
    """Red says how far right a pixel is, green how far down."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[..., 0] = np.arange(width)
    pixels[..., 1] = np.arange(height)[:, None]
    return Image.fromarray(pixels)


def test_bytes_are_channels_lines_columns() -> None:
    pixels = np.arange(2 * 5 * 3, dtype=np.uint8).reshape(2, 5, 3)
    found = to_bytes(Image.fromarray(pixels))
    assert found.shape == (3, 2, 5)
    assert found[:, 1, 3].tolist() == pixels[1, 3].tolist()


RED = (200, 10, 20)


@pytest.mark.parametrize(
    ("mode", "colour", "expected"),
    [
        ("RGB", RED, RED),
        ("L", 77, (77, 77, 77)),
        ("LA", (77, 0), (77, 77, 77)),
        ("RGBA", (*RED, 0), RED),
        ("1", 1, (255, 255, 255)),
        ("P", 1, None),
        ("I;16", 0xABCD, (0xAB, 0xAB, 0xAB)),
    ],
)
def test_colours(tmp_path: Path, mode: str, colour: object, expected: object) -> None:
    path = tmp_path / "a.png"
    image = Image.new(mode, (3, 2), colour)  # type: ignore[arg-type]
    options = {}
    if mode == "P":
        image.putpalette([0, 0, 0, *RED])
        options, expected = {"transparency": b"\x00\x80"}, RED
    image.save(path, **options)
    found = read_image(str(path))
    assert (found.mode, found.size) == ("RGB", (3, 2))
    assert set(map(tuple, np.asarray(found).reshape(-1, 3).tolist())) == {expected}


def test_cmyk(tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    Image.new("CMYK", (8, 8), (0, 255, 255, 0)).save(path, quality=95)
    red, green, blue = to_bytes(read_image(str(path))).float().mean((1, 2)).tolist()
    assert red > 250
    assert green < 5
    assert blue < 5


@pytest.mark.parametrize("content", [b"", b"no image", "truncated"])
def test_what_cannot_be_decoded_is_named(tmp_path: Path, content: bytes | str) -> None:
    path = tmp_path / "bad.JPEG"
    if content == "truncated":
        noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
        Image.fromarray(noise).save(path)
        content = path.read_bytes()[:2000]
    assert isinstance(content, bytes)
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"bad\.JPEG: cannot be decoded \(.*Error: "):
        read_image(str(path))
    with pytest.raises(DataError, match=r"gone\.png: cannot be decoded \(FileNotFoundError"):
        read_image(str(tmp_path / "gone.png"))


def test_without_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(LawaError, match=r"pip install 'torch-lawa\[lab\]'"):
        require_pillow()


def test_the_middle_of_an_image_that_has_the_size_is_itself() -> None:
    image = coordinates(6, 6)
    assert centre(image, 6, 6) is image


@pytest.mark.parametrize("turned", [False, True])
def test_the_middle_of_a_long_image(turned: bool) -> None:
    image = coordinates(20, 6)
    found = to_bytes(centre(image.transpose(Image.Transpose.TRANSPOSE) if turned else image, 6, 6))
    right, down = found[0], found[1]
    assert (right.T if turned else right)[0].tolist() == [7, 8, 9, 10, 11, 12]
    assert (down.T if turned else down)[:, 0].tolist() == [0, 1, 2, 3, 4, 5]


def test_the_shorter_side_is_brought_to_size() -> None:
    found = to_bytes(centre(coordinates(200, 100), 10, 20))
    # 200 x 100 becomes 40 x 20; the middle 10 pixels are columns 15 to 24, lines 5 to 14.
    assert found.shape == (3, 10, 10)
    assert found[0, 5].tolist() == [77, 82, 87, 92, 97, 102, 107, 112, 117, 122]
    assert found[1, :, 5].tolist() == [27, 32, 37, 42, 47, 52, 57, 62, 67, 72]


def test_what_is_made_smaller_is_smoothed() -> None:
    stripes = np.zeros((64, 64, 3), np.uint8)
    stripes[:, ::2] = 255
    for image in (
        centre(Image.fromarray(stripes), 16, 16),
        random_view(Image.fromarray(stripes[:, :]).resize((640, 640), 0), 16, random.Random(0)),
    ):
        found = to_bytes(image).float()
        assert found.mean().item() == pytest.approx(127.5, abs=8)
    assert (to_bytes(centre(Image.fromarray(stripes), 16, 16)).float() - 127.5).abs().max() < 16


@given(width=st.integers(1, 600), height=st.integers(1, 600), seed=st.integers(min_value=0))
def test_boxes_lie_inside(width: int, height: int, seed: int) -> None:
    left, top, w, h = random_box(width, height, random.Random(seed))
    assert w >= 1
    assert h >= 1
    assert left >= 0
    assert top >= 0
    assert left + w <= width
    assert top + h <= height


def test_boxes_have_the_sizes_and_shapes_that_were_asked_for() -> None:
    rng = random.Random(0)
    boxes = [random_box(1000, 1000, rng) for _ in range(4000)]
    areas = np.array([w * h / 1e6 for _, _, w, h in boxes])
    ratios = np.log([w / h for _, _, w, h in boxes])
    assert 0.079 < areas.min() < 0.09
    assert 0.95 < areas.max() <= 1.0
    # Uniform from 8 % on, as far as every shape fits into the square (75 %).
    low = areas[areas < 0.75]
    assert low.mean() == pytest.approx((0.08 + 0.75) / 2, abs=0.01)
    assert abs(ratios.mean()) < 0.01
    assert -0.289 < ratios.min() < -0.28
    assert 0.28 < ratios.max() < 0.289
    lefts = np.array([left / (1000 - w) for left, _, w, _ in boxes if w < 990])
    tops = np.array([top / (1000 - h) for _, top, _, h in boxes if h < 990])
    for side in (lefts, tops):
        assert side.mean() == pytest.approx(0.5, abs=0.02)
        assert side.std() == pytest.approx(12**-0.5, abs=0.02)


def test_a_very_long_image_gives_its_middle() -> None:
    assert random_box(1000, 9, random.Random(0)) == (494, 0, 12, 9)
    assert random_box(9, 1000, random.Random(0)) == (0, 494, 9, 12)


def test_a_view_shows_its_box_and_half_of_them_mirrored() -> None:
    image = coordinates(240, 200)
    ways: Counter[bool] = Counter()
    for seed in range(200):
        left, top, w, h = random_box(240, 200, random.Random(seed))
        found = to_bytes(random_view(image, 16, random.Random(seed))).float()
        right, down = found[0].mean(0), found[1].mean(1)
        mirrored = bool(right[0] > right[-1])
        ways[mirrored] += 1
        # The mean over a view is the middle of its box; the ends are half a pixel inside.
        assert right.mean().item() == pytest.approx(left + (w - 1) / 2, abs=0.6)
        assert down.mean().item() == pytest.approx(top + (h - 1) / 2, abs=0.6)
        assert right.max() - right.min() == pytest.approx(w * 15 / 16, abs=w / 32 + 1)
        assert down[-1] - down[0] == pytest.approx(h * 15 / 16, abs=h / 32 + 1)
    assert 75 < ways[True] < 125
