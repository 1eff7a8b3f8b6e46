"""The page in a real browser: on a laptop and on a phone, in light and dark.

Needs the `browser` extra and a Chromium: the one of Playwright (`playwright install chromium`) or
one of the system. Screenshots go to the folder named by LAWA_SCREENSHOTS, where it is set.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.report import cifar_runs, language_runs

from lawa_lab.report.page import save_page
from lawa_lab.report.summary import summarise

sync_api = pytest.importorskip("playwright.sync_api", reason="pip install -e '.[browser]'")

pytestmark = pytest.mark.browser

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_SVG_WIDTH = 4.7 * 72  # points of a panel
_SMALLEST = 10.5  # points of the smallest letters in it


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sandbox = ["--no-sandbox"] if getattr(os, "geteuid", lambda: 1)() == 0 else []
    with sync_api.sync_playwright() as playwright:
        path = next(filter(None, map(shutil.which, _NAMES)), None)
        try:
            started = playwright.chromium.launch(args=sandbox)
        except sync_api.Error:
            if path is None:
                pytest.skip("no Chromium: `playwright install chromium`, or install one")
            started = playwright.chromium.launch(executable_path=path, args=sandbox)
        yield started
        started.close()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = [*cifar_runs(), *language_runs()]
    path: Path = tmp_path_factory.mktemp("page") / "report.html"
    save_page(runs, summarise(runs), path, title="What averaging saved", files=[Path("a.jsonl")])
    return path


def test_the_file_is_small_enough_to_send(file: Path) -> None:
    assert file.stat().st_size < 5_000_000


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 375])
def test_the_page_fits_loads_and_asks_for_nothing(
    browser: Any, file: Path, tmp_path: Path, width: int, scheme: str
) -> None:
    context = browser.new_context(
        viewport={"width": width, "height": 900},
        color_scheme=scheme,
        device_scale_factor=2 if width < 600 else 1,
    )
    page = context.new_page()
    said: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(file.as_uri())
    folder = Path(os.environ.get("LAWA_SCREENSHOTS") or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)
    picture = folder / f"report-{width}-{scheme}.png"
    page.screenshot(path=picture, full_page=True)
    assert picture.stat().st_size > 200_000

    images = page.evaluate(
        "[...document.images].map("
        "i => [i.complete, i.naturalWidth, i.getBoundingClientRect().width])"
    )
    assert len(images) > 40
    assert all(complete and natural > 0 for complete, natural, _ in images)
    shown = [wide for _, _, wide in images if wide]
    assert min(shown) / _SVG_WIDTH * _SMALLEST >= 10  # pixels

    # With all that is folded away opened too, only boxes of tables may scroll sideways.
    page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true })")
    wide, inner = page.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
    assert (inner, wide <= inner) == (width, True)
    boxes = page.evaluate(
        "[...document.querySelectorAll('.wide')].map("
        "b => [b.getBoundingClientRect().right, b.scrollWidth > b.clientWidth])"
    )
    assert all(right <= width for right, _ in boxes)
    assert any(scrolls for _, scrolls in boxes) is (width == 375)

    paper, card = page.evaluate(
        "['body', '.card'].map(s => getComputedStyle(document.querySelector(s)).backgroundColor)"
    )
    assert paper == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 25, 31)"}[scheme]
    assert card == "rgb(255, 255, 255)"  # figures are dark on light in either

    assert said == []
    assert [url for url in asked if not url.startswith("data:")] == [file.as_uri()]
    context.close()
