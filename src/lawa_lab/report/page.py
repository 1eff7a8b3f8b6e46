"""The report as one HTML file that loads nothing and needs no script: the values of its template.

`report.html.j2` decides what goes where; this module turns a report into tables of strings.
"""

import base64
import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from lawa_lab.report import frontier_words, saving_words, words
from lawa_lab.report.curves import Axis, Metric
from lawa_lab.report.figures.axes import Panel
from lawa_lab.report.figures.files import Drawing, draw_panel, drawings, legend, svg_text
from lawa_lab.report.figures.registry import FIGURES
from lawa_lab.report.figures.scene import Scene
from lawa_lab.report.figures.style import INK, Style
from lawa_lab.report.page_tables import PageTable, frontier_tables
from lawa_lab.report.runs import Run
from lawa_lab.report.savings import Saving
from lawa_lab.report.summary import MainRow, MetricReport, Report, WindowRow
from torch_lawa._version import __version__
from torch_lawa.checkpoints.storage.atomic import replacing
from torch_lawa.errors import LawaError

__all__ = ["render_page", "save_page"]

_WHAT = {"headline": "largest", "final": "baseline's final", "best": "baseline's best"}
_DASHES = {"-": None, "--": "7 3", "-.": "7 3 2 3", ":": "2 2"}
_MARKERS = {
    "o": "M14 6a4 4 0 1 0 8 0a4 4 0 1 0-8 0",
    "s": "M14 2h8v8h-8z",
    "D": "M18 1l5 5l-5 5l-5-5z",
    "^": "M18 2l4 8h-8z",
    "v": "M18 10l4-8h-8z",
}
_FEW = 6  # rows of a table that is shown open


@dataclass(frozen=True)
class Section:
    """A heading, one block per run (figure, then sentences), then tables and notes."""

    heading: str
    blocks: list[dict[str, Any]]
    tables: list[PageTable] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def save_page(
    runs: Sequence[Run], report: Report, path: Path, *, title: str, files: Sequence[Path] = ()
) -> None:
    """Write the page atomically. `files` are listed as its sources."""
    page = render_page(runs, report, title=title, files=files)
    with replacing(path) as file:
        file.write(page.encode())


def render_page(
    runs: Sequence[Run], report: Report, *, title: str, files: Sequence[Path] = ()
) -> str:
    """The page as text."""
    try:
        jinja2 = importlib.import_module("jinja2")
    except ImportError as error:
        raise LawaError(
            f"the page needs jinja2, which could not be imported ({error}): "
            "pip install 'torch-lawa[lab]'"
        ) from None
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    scenes = [Scene(recipe, runs) for recipe in report.recipes]
    text: str = environment.from_string(_resource("report.html.j2")).render(
        title=title,
        style=_resource("page.css"),
        recipes=[(scene.report.recipe, _sections(scene)) for scene in scenes],
        how=report.how,
        sources=_source_table(scenes),
        files=[str(file) for file in files],
        version=__version__,
    )
    return f"{text.strip()}\n"


def _sections(scene: Scene) -> list[Section]:
    """One section per figure of the table, in its order."""
    drawn = drawings(scene)
    main = scene.shown[0]
    found = []
    for kind in FIGURES.values():
        blocks = [_block(scene, drawing) for drawing in drawn if drawing.kind is kind]
        tables: list[PageTable] = []
        notes: list[str] = []
        heading = kind.heading
        if kind.name == "frontier":
            for report in _ordered(scene):
                if report.frontier is not None:
                    tables += frontier_tables(report.metric, report.frontier, report is not main)
            notes = [] if main.frontier is None else _frontier_notes(main)
        elif kind.name == "saving":
            heading = f"{heading} inside one run" if main.frontier else heading
            tables = [
                _main_table(report, report.own(), folded=report is not main)
                for report in _ordered(scene)
                if report.own()
            ]
            notes = [*saving_words.limits_said(main.own()), *scene.report.notes]
        elif kind.name == "behind":
            tables = [
                _averages_table(report, scene.axis, folded=report is not main)
                for report in _ordered(scene)
            ]
            notes = [] if blocks else list(main.losses)
        elif kind.name == "runs" and main.across:
            tables = [_raw_table(main), _main_table(main, main.across, len(main.across) > _FEW)]
            notes = saving_words.limits_said(main.across)
        if blocks or kind.name == "behind":
            found.append(Section(heading, blocks, tables, notes))
    return found


def _frontier_notes(report: MetricReport) -> list[str]:
    if report.frontier is None:
        return []
    found = [frontier_words.forecast(report.metric, each) for each in report.frontier.forecasts]
    return [*found, *frontier_words.notes(report.metric, report.frontier)]


def _ordered(scene: Scene) -> list[MetricReport]:
    """All metrics, the one that figures show first before the others."""
    return sorted(scene.report.metrics, key=lambda report: report is not scene.shown[0])


def _block(scene: Scene, drawing: Drawing) -> dict[str, Any]:
    """A figure, its caption, and what is said about it."""
    sentences = [drawing.sentence] if drawing.sentence else []
    report = scene.shown[0]
    if drawing.kind.name == "frontier" and report.frontier is not None:
        said = frontier_words.headline(scene.report.recipe, report.metric, report.frontier)
        sentences = [said, *sentences]
    elif drawing.kind.name == "saving":
        rows = report.own(drawing.run)
        found = saving_words.finding(scene.report.recipe, report.metric, rows[0])
        sentences = [found, saving_words.caveat(rows[0])]
    ranged = any(line.low and not line.end_label for p in drawing.panels for line in p.lines)
    bands = "Lines are means over seeds, bands run from the worst to the best seed. "
    return {
        "run": drawing.run,
        "lead": drawing.kind.name == ("frontier" if report.frontier else "saving"),
        "sentences": sentences,
        "caption": f"{drawing.title}. {bands if ranged else ''}{drawing.kind.caption}",
        "legend": [
            {"label": label, **_swatch(drawing.panels, label, style)}
            for label, style in legend(drawing.panels).items()
        ],
        "panels": [
            {
                "svg": base64.b64encode(svg_text(draw_panel(panel)).encode()).decode(),
                "alt": _describe(panel, drawing.title),
            }
            for panel in drawing.panels
        ],
    }


def _swatch(panels: Sequence[Panel], label: str, style: Style | None) -> dict[str, Any]:
    """A sample of the line, or the point, as it is drawn."""
    points = {p.label: p.marker for panel in panels for p in panel.points}
    points |= {line.name: line.marker for panel in panels for line in panel.lines if line.marker}
    if style is None or label in points:
        colour = INK if style is None else style.colour
        return {"path": _MARKERS[points[label]], "colour": colour, "width": "2", "dashes": None}
    dashes = (
        _DASHES[style.dashes]
        if isinstance(style.dashes, str)
        else " ".join(f"{2 * length:g}" for length in style.dashes[1])
    )
    width = f"{1.3 * style.width:.1f}"
    return {"path": "M1 6H35", "colour": style.colour, "width": width, "dashes": dashes}


def _describe(panel: Panel, title: str) -> str:
    """A panel in words, for a screen reader: from where to where each line runs."""
    begin = f"{title}, {panel.title} against {panel.x_label}."
    if panel.y_labels:
        return f"{begin} One row each for {', '.join(panel.y_labels)}."
    parts = []
    for line in panel.lines:
        there = [v for v in line.mean if v is not None]
        name = line.label or line.end_label
        if name and there:
            first, last = (
                f"{100 * v:.1f}%" if panel.percent else f"{v:.3g}" for v in (there[0], there[-1])
            )
            parts.append(f"{name}: from {first} to {last}")
    arrow = f" {' '.join(panel.arrow.text.split())}." if panel.arrow else ""
    return f"{begin} {'; '.join(parts)}.{arrow}"


def _main_table(report: MetricReport, rows: Sequence[MainRow], folded: bool = False) -> PageTable:
    """One group per baseline: the largest saving, and those at its final and best value."""
    metric, axis = report.metric, rows[0].axis
    savings = [saving for row in rows for saving in row.savings]
    timed, hours = any(s.seconds for s in savings), any(s.gpu_hours for s in savings)
    head = ["", "target", f"{axis}s saved", "in %", f"baseline, {axis}", f"average, {axis}"]
    several = any(saving.num_seeds > 1 for saving in savings)
    head += ["time saved"] * timed + ["GPU-hours saved"] * hours + ["seeds"] * several
    groups: list[tuple[str | None, list[list[str]]]] = []
    for row in rows:
        lines = []
        for saving in row.savings:
            amount = saving.on(axis)
            cells = [_WHAT[saving.what], words.say_value(metric, saving.target)]
            if amount is None:
                cells += ["-"] * 4
            else:
                percent = "-" if amount.percent is None else f"{amount.percent:.0f}%"
                places = (amount.baseline_at.mean, amount.averaged_at.mean)
                cells += [_saved(row.axis, saving), percent, *map(words.say_number, places)]
            seconds = saving.seconds.saved.mean if saving.seconds else None
            cells += [words.say_duration(seconds)] * timed
            cells += [words.say_hours(saving.gpu_hours)] * hours
            lines.append(cells + [f"{saving.num_both} of {saving.num_seeds}"] * several)
        if row.headline is None:
            lines.insert(0, [_WHAT["headline"], "none", *["-"] * (len(head) - 2)])
        if row.unmatched is not None:
            found = row.unmatched
            cells = ["beyond its best", "-", f"at least {words.say_number(found.at_least.mean)}"]
            cells += ["-", f"> {words.say_number(found.baseline_end.mean)}"]
            cells += [words.say_number(found.averaged_from.mean)]
            cells += ["-"] * (timed + hours)
            lines.append(cells + [f"{found.num_seeds} of {row.final.num_seeds}"] * several)
        groups.append((row.label, lines))
    across = rows[0].averaged_run != rows[0].baseline_run
    what = "The average of one run against another" if across else "What averaging saved"
    return PageTable(f"{what}: {words.plain(metric.name)}", head, groups, folded)


def _saved(axis: Axis, saving: Saving | None) -> str:
    """The mean saving and, with several seeds, its range."""
    amount = None if saving is None else saving.on(axis)
    if amount is None:
        return "-"
    spread = f" ({words.say_range(amount.saved)})" if amount.saved.num_seeds > 1 else ""
    return words.say_number(amount.saved.mean) + spread


def _averages_table(report: MetricReport, axis: Axis, *, folded: bool) -> PageTable:
    """One row per average: what it saved, where it ended, and where it was behind."""
    metric = report.metric
    head = ["", f"largest saving, {axis}s", "final value", "best value"]
    head += ["evaluations behind", f"longest stretch, {axis}s", "worst by", "extra time"]
    runs = dict.fromkeys(row.run for row in report.windows)
    groups: list[tuple[str | None, list[list[str]]]] = []
    for run in runs:
        rows = [row for row in report.windows if row.run == run]
        names = words.say_rows([row.series for row in rows])
        lines = [
            [name, *_average_cells(metric, axis, row)]
            for name, row in zip(names, rows, strict=True)
        ]
        groups.append((run if len(runs) > 1 else None, lines))
    caption = f"Every average against raw weights treated alike: {words.plain(metric.name)}"
    return PageTable(caption, head, groups, folded)


def _average_cells(metric: Metric, axis: Axis, row: WindowRow) -> list[str]:
    longest = max(row.behind, key=lambda stretch: stretch.num_evaluations, default=None)
    cost = row.charged_seconds.mean if row.charged_seconds else None
    return [
        _saved(axis, row.headline),
        words.say_mean(metric, row.final),
        words.say_mean(metric, row.best),
        f"{row.num_behind} of {row.num_compared}",
        words.say_stretch(longest),
        "-" if row.worst is None else words.say_difference(metric, row.worst.worst_by),
        words.say_duration(cost),
    ]


def _raw_table(report: MetricReport) -> PageTable:
    """Where the raw weights of each run ended, and their best value."""
    lines = [
        [
            f"{row.run}, {row.series.label}",
            words.say_mean(report.metric, row.final),
            words.say_mean(report.metric, row.best),
            str(row.final.num_seeds if row.final else 0),
        ]
        for row in report.runs
    ]
    caption = f"Raw weights: {words.plain(report.metric.name)}"
    return PageTable(caption, ["", "final value", "best value", "seeds"], [(None, lines)])


def _source_table(scenes: Sequence[Scene]) -> PageTable:
    """What the numbers come from: recipes, runs, seeds, devices."""
    lines = []
    for scene in scenes:
        for run in scene.runs:
            facts = next((row for row in scene.shown[0].runs if row.run == run.name), None)
            means = [facts.epochs, facts.steps, facts.train_seconds] if facts else [None] * 3
            epochs, steps, seconds = (None if each is None else each.mean for each in means)
            device = facts.device if facts else None
            if device and facts and facts.num_devices:
                device = f"{facts.num_devices} × {device}"
            lines.append(
                [
                    run.recipe,
                    run.name,
                    ", ".join(map(str, run.seeds)),
                    words.say_number(epochs),
                    words.say_number(steps),
                    device or "-",
                    words.say_duration(seconds),
                    str(len(run.rows)),
                ]
            )
    head = ["recipe", "run", "seeds", "epochs", "steps", "device", "training time", "rows"]
    return PageTable("Runs", head, [(None, lines)])


def _resource(name: str) -> str:
    return resources.files("lawa_lab.report").joinpath(name).read_text("utf-8")
