"""The report as one HTML file that asks for nothing from outside and needs no script."""

from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from lawa_lab.report.markup import Markup, element, joined
from lawa_lab.report.page_sections import recipe_section
from lawa_lab.report.page_tables import source_table
from lawa_lab.report.page_text import the_finding
from lawa_lab.report.runs import Run
from lawa_lab.report.scenes import Scene
from lawa_lab.report.summary import Report
from torch_lawa._version import __version__
from torch_lawa.checkpoints.storage.atomic import replacing

__all__ = ["render_page", "save_page"]


def save_page(
    runs: Sequence[Run], report: Report, path: Path, *, title: str, files: Sequence[Path] = ()
) -> None:
    """Write the page, which is whole or not there. `files` are named as where it comes from."""
    page = render_page(runs, report, title=title, files=files)
    with replacing(path) as file:
        file.write(page.encode())


def render_page(
    runs: Sequence[Run], report: Report, *, title: str, files: Sequence[Path] = ()
) -> str:
    """The page as text."""
    scenes = [Scene(recipe, runs) for recipe in report.recipes]
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", title),
        element("style", Markup(_style())),
    )
    sections = [*map(recipe_section, scenes), _how(report), _sources(runs, scenes, files)]
    body = [
        element("header", element("h1", title), *_findings(scenes)),
        element("main", joined(sections)),
    ]
    page = element("html", head, "\n", element("body", "\n", joined(body), "\n"), "\n", lang="en")
    return f"<!doctype html>\n{page}\n"


def _findings(scenes: Sequence[Scene]) -> list[Markup]:
    """What was found in the first run of each recipe."""
    said = []
    for scene in scenes:
        for report in scene.shown[:1]:
            rows = scene.own_rows(report, scene.runs[0])
            if rows:
                found, *honest = the_finding(scene.report.recipe, report, rows)
                said.append(element("p", found, class_="finding"))
                said += [element("p", text) for text in honest]
    return said


def _how(report: Report) -> Markup:
    return element(
        "section",
        element("h2", "How each number came about"),
        element("ul", *(element("li", text) for text in report.how)),
    )


def _sources(runs: Sequence[Run], scenes: Sequence[Scene], files: Sequence[Path]) -> Markup:
    parts = [element("h2", "Provenance")]
    metrics = {scene.report.recipe: scene.shown[0] for scene in scenes if scene.shown}
    parts.append(source_table(runs, metrics))
    if files:
        parts.append(element("p", f"Read from {len(files)} file{'s' * (len(files) > 1)}:"))
        listed = (element("li", element("code", str(file))) for file in files)
        parts.append(element("ul", *listed))
    parts.append(element("p", f"Made by torch-lawa {__version__} from metrics alone."))
    return element("section", *parts)


def _style() -> str:
    return resources.files("lawa_lab.report").joinpath("page.css").read_text("utf-8")
