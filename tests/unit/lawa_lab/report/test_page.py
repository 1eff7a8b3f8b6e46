"""The page: well-formed, self-contained, with the report's numbers and nothing unescaped."""

import base64
import itertools
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from support.report import cifar_rows, language_runs, run_of

from lawa_lab.report.page import render_page, save_page
from lawa_lab.report.runs import Run
from lawa_lab.report.saving_words import caveat, finding, seen_at_targets
from lawa_lab.report.summary import Report, summarise
from lawa_lab.report.words import say_mean
from torch_lawa import __version__

pytestmark = pytest.mark.slow


class Reader(HTMLParser):
    """Elements in order, with their attributes and text; refuses tags that do not match."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.headings: list[tuple[str, str]] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(page)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        assert len(dict(attrs)) == len(attrs)
        if tag not in ("img", "meta"):
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] != "style":
            self.words.append(data)
            if re.fullmatch("h[1-6]", self._open[-1]):
                self.headings.append((self._open[-1], data))

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture(scope="module")
def runs() -> list[Run]:
    names = ("sgd", "lookahead(sgd)")
    return [run_of(cifar_rows(epochs=40, seeds=(0, 1), run=name)) for name in names]


@pytest.fixture(scope="module")
def report(runs: list[Run]) -> Report:
    return summarise(runs)


@pytest.fixture(scope="module")
def page(runs: list[Run], report: Report) -> str:
    return render_page(runs, report, title="What was saved", files=[Path("a/metrics.jsonl")])


@pytest.fixture(scope="module")
def reader(page: str) -> Reader:
    return Reader(page)


def test_the_page_is_html_that_a_screen_reader_can_follow(page: str, reader: Reader) -> None:
    assert page.startswith("<!doctype html>\n<html lang=")
    assert reader.all("html") == [{"lang": "en"}]
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in reader.all(
        "meta"
    )
    levels = [int(tag[1]) for tag, _ in reader.headings]
    assert levels.count(1) == 1
    assert all(b - a <= 1 for a, b in itertools.pairwise(levels))
    assert len(reader.all("caption")) == len(reader.all("table")) > 8
    for image in reader.all("img"):
        assert len(image["alt"] or "") > 40
    assert {attributes.get("scope") for attributes in reader.all("th")} == {
        "col",
        "row",
        "rowgroup",
    }
    ids = [attributes["id"] for _, attributes in reader.elements if "id" in attributes]
    assert len(ids) == len(set(ids))


def test_sections_come_in_the_order_of_the_figures(reader: Reader) -> None:
    titles = [text for tag, text in reader.headings if tag in ("h1", "h2", "h3")]
    assert titles == [
        "What was saved",
        "cifar100-resnet34",
        "Window length k",
        "Coefficients",
        "BatchNorm statistics",
        "Run against run",
        "Saving against target",
        "Where averaging lost",
        "The early phase",
        "All metrics",
        "How the numbers are defined",
        "Sources",
    ]


def test_first_the_figure_then_a_sentence_then_the_tables(page: str, reader: Reader) -> None:
    first = [tag for tag, _ in reader.elements if tag in ("figure", "p", "table")]
    assert first[:3] == ["figure", "p", "p"]
    assert page.index("<figure>") < page.index('class="finding"') < page.index("<table>")


def test_the_numbers_are_those_of_the_report(reader: Reader, report: Report) -> None:
    recipe = report.recipes[0]
    metric = recipe.shown[0]
    text = reader.text
    found = finding(recipe.recipe, metric.metric, metric.main[0])
    assert found in text
    assert text.index(found) < text.index(caveat(metric.main[0])) < text.index("Coefficients")
    for row in metric.windows:
        assert say_mean(metric.metric, row.final) in text
    for sentence in (*report.how, *recipe.notes):
        assert sentence in text
    for sentence in metric.losses:
        assert sentence.partition(", ")[2] in text  # the section has the name of the run
    for main in metric.main:
        assert main.label in text


def test_sources_name_files_seeds_devices_and_version(reader: Reader) -> None:
    text = reader.text[reader.text.index("Sources") :]
    for fact in ("a/metrics.jsonl", "cifar100-resnet34", "sgd", "0, 1", "1 × NVIDIA H200"):
        assert fact in text
    assert f"torch-lawa {__version__}" in text


def test_nothing_is_asked_for_from_outside(page: str, reader: Reader) -> None:
    assert {tag for tag, _ in reader.elements}.isdisjoint({"script", "link", "iframe", "object"})
    assert "http" not in re.sub(r"base64,[A-Za-z0-9+/=]+", "", page)
    assert "@import" not in page
    assert "url(" not in page
    images = reader.all("img")
    assert len(images) > 20
    for image in images:
        kind, content = (image["src"] or "").split(",", 1)
        assert kind == "data:image/svg+xml;base64"
        svg = base64.b64decode(content).decode()
        assert re.findall(r'href="(?!#)[^"]*"', svg) == []
        assert "<script" not in svg


def test_what_comes_from_files_is_escaped_everywhere() -> None:
    evil = '<script>alert("1")</script>&amp;'
    rows = [
        {**row, "device": evil, "seed": evil} for row in cifar_rows(epochs=14, seeds=(0,), every=2)
    ]
    runs = [Run(evil, evil, tuple(rows)), Run(evil, "sgd", tuple(rows))]
    page = render_page(runs, summarise(runs), title=evil, files=[Path(evil)])
    reader = Reader(page)
    assert "<script" not in page
    assert reader.all("script") == []
    assert ("h1", evil) in reader.headings
    assert ("h2", evil) in reader.headings
    for image in reader.all("img"):
        assert "<script" not in base64.b64decode((image["src"] or "").split(",")[1]).decode()


def test_figures_that_the_rows_have_no_data_for_are_left_out() -> None:
    runs = language_runs(evaluations=20)
    reader = Reader(render_page(runs, summarise(runs), title="t"))
    titles = [text for _, text in reader.headings]
    assert "Run against run" in titles
    assert {"Coefficients", "BatchNorm statistics"}.isdisjoint(titles)
    assert "only one seed" in reader.text
    assert "GPU-hours saved" not in reader.text


def test_an_average_that_was_never_ahead_is_said_to_have_saved_nothing() -> None:
    rows = [
        {"epoch": e, "step": e, "weights": w, "k": k, "test_loss": loss, "seed": 0}
        for w, k, losses in (("raw", None, (5, 4, 3, 2)), ("averaged", 2, (9, 8, 7, 6)))
        for e, loss in enumerate(losses, start=1)
    ]
    runs = [Run("toy", "sgd", tuple(rows))]
    text = Reader(render_page(runs, summarise(runs), title="t")).text
    assert "the average of k = 2 reached no test loss earlier than the raw weights" in text


def test_the_same_metrics_give_the_same_page(tmp_path: Path) -> None:
    runs = language_runs(evaluations=12)[:1]
    report = summarise(runs)
    for name in ("a.html", "b.html"):
        save_page(runs, report, tmp_path / name, title="t")
    first = (tmp_path / "a.html").read_bytes()
    assert first == (tmp_path / "b.html").read_bytes()
    assert first.decode().endswith("</html>\n")
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["a.html", "b.html"]


@pytest.mark.parametrize(
    ("raw", "averaged", "said"),
    [
        # 5 is reached 2 epochs early and is the raw weights' end: the largest, and it was chosen.
        ((9, 8, 7, 6, 5), (9, 7, 5, 5, 5), "optimistic: at the raw weights' own final value"),
        # 7 is reached an epoch early; the end of the raw run, 5, two epochs: the average had 4.
        ((9, 8, 7, 6, 5), (9, 7, 4, 4, 4), "at others more was saved: at the raw weights' own"),
        # At their end, 6.5, as much is saved as at 7.5; at their best, 5, an epoch more.
        (
            (9, 8, 7, 6, 5, 6.5),
            (9, 7.5, 4, 4, 4, 4),
            "more was saved: at the raw weights' own best value, the saving is 2 epochs",
        ),
        # The raw weights never matched any value of the average.
        ((9, 9, 9, 9, 9), (8, 8, 8, 8, 8), "At the raw weights' own final value, the saving is 0"),
    ],
)
def test_a_caveat_says_whether_the_headline_was_chosen(
    raw: tuple[float, ...], averaged: tuple[float, ...], said: str
) -> None:
    rows = tuple(
        {"epoch": e, "weights": w, "k": k, "loss": loss}
        for w, k, losses in (("raw", None, raw), ("averaged", 2, averaged))
        for e, loss in enumerate(losses, start=1)
    )
    metric = summarise([Run("toy", "sgd", rows)]).recipes[0].metrics[0]
    assert said in caveat(metric.main[0])


def test_a_single_seed_is_not_counted() -> None:
    for seeds, columns in (((0,), 0), ((0, 1), 1)):
        runs = [run_of(cifar_rows(epochs=20, seeds=seeds))]
        page = render_page(runs, summarise(runs), title="Seeds")
        assert not re.search(r"<td>[01] of 1</td></tr>", page)
        main = page[page.index("What averaging saved: test accuracy") :]
        head = main[: main.index("</thead>")]
        assert head.count('<th scope="col">seeds</th>') == columns


def test_a_saving_of_some_seeds_is_not_said_to_be_more_than_that_of_all() -> None:
    rows = tuple(
        {"epoch": e, "seed": seed, "weights": w, "k": k, "loss": loss}
        for seed, last in ((0, 1), (1, 7))  # of the average, whose second seed stays at 7
        for w, k, losses in (("raw", None, (9, 8, 7, 6, 5)), ("averaged", 2, (9, 7, last, last)))
        for e, loss in enumerate(losses, start=1)
    )
    metric = summarise([Run("toy", "sgd", rows)]).recipes[0].metrics[0]
    said = caveat(metric.main[0])
    assert "at the raw weights' own final value, the saving is 2 epochs in 1 of 2 seeds" in said


def test_the_largest_saving_at_a_value_of_the_average_is_not_called_the_largest_of_all() -> None:
    """Both averages jump over 6, where two epochs are saved; at 8, which they had, it is one."""
    curves = (
        (0, (9, 9, 8, 7.9, 6), (9, 8, 5, 5, 5)),
        (1, (9, 9, 8, 7.9, 6, 5), (9, 8, 5.5, 5.5, 5.5, 5.5)),  # its final value is never reached
    )
    rows = tuple(
        {"epoch": e, "seed": seed, "weights": w, "k": k, "loss": loss}
        for seed, raw, averaged in curves
        for w, k, losses in (("raw", None, raw), ("averaged", 2, averaged))
        for e, loss in enumerate(losses, start=1)
    )
    metric = summarise([Run("toy", "sgd", rows)]).recipes[0].metrics[0]
    [row] = metric.main
    assert "The mean saving is largest, 2 epochs, at 6" in seen_at_targets(metric.metric, row)
    assert "the largest saving at any value of the average" in caveat(row)
