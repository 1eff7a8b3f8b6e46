"""Which figures a report has, and what each shows. One whose rows are missing is left out.

saving        what the headline means: raw and averaged weights, and an arrow between them
windows       every k
curves        all values, raw and averaged
early         the start, where averaging can hurt
coefficients  uniform against others at the same k
batch_norm    statistics re-estimated, copied, and as they came
target        the saving at every target
lookahead     all runs of the recipe and the average of each ("runs" without Lookahead)
"""

import re
from collections.abc import Sequence
from pathlib import Path

from lawa_lab.report.comparisons import batch_norm, coefficients, target, windows
from lawa_lab.report.demo_figure import demo_figure, save_demo_figure
from lawa_lab.report.drawing import Drawing, save
from lawa_lab.report.panels import Panel
from lawa_lab.report.runs import Run
from lawa_lab.report.savings import Metric
from lawa_lab.report.scenes import Scene, say_series
from lawa_lab.report.summary import RecipeReport, Report

__all__ = ["demo_figure", "drawings", "save_demo_figure", "save_figures"]


def save_figures(runs: Sequence[Run], report: Report, folder: Path) -> list[Path]:
    """Write every figure as PNG and SVG; a folder for each recipe where there are several."""
    paths = []
    for recipe in report.recipes:
        place = folder / _slug(recipe.recipe) if len(report.recipes) > 1 else folder
        for drawing in drawings(runs, recipe):
            paths += save(drawing, place)
    return paths


def drawings(runs: Sequence[Run], report: RecipeReport) -> list[Drawing]:
    """The figures of one recipe; those of its second run and further ones bear the run's name."""
    scene = Scene(report, runs)
    found: list[Drawing] = []
    for place, run in enumerate(scene.runs):
        alike = any(_slug(run.name) == _slug(other.name) for other in scene.runs[:place])
        suffix = f"-{_slug(run.name)}" if place else ""
        for kind, build in _OF_A_RUN.items():
            panels = build(scene, run)
            if panels:
                name = f"{kind}{suffix}-{place + 1}" if alike else f"{kind}{suffix}"
                found.append(_drawing(scene, name, kind, run, panels))
    kind = "lookahead" if any("lookahead" in run.name for run in scene.runs) else "runs"
    panels = _runs(scene)
    return [*found, _drawing(scene, kind, kind, None, panels)] if panels else found


def _drawing(
    scene: Scene, name: str, kind: str, run: Run | None, panels: tuple[Panel, ...]
) -> Drawing:
    recipe = scene.report.recipe
    return Drawing(
        name=name,
        kind=kind,
        run=run.name if run else None,
        title=f"{recipe}, {run.name}" if run else recipe,
        panels=panels,
    )


def _saving(scene: Scene, run: Run) -> tuple[Panel, ...]:
    panels = []
    for report in scene.shown:
        for row in scene.own_rows(report, run)[:1]:
            wanted = [*scene.raw(run), row.baseline, row.averaged]
            lines = scene.lines(run, wanted, report.metric)
            panels.append(scene.panel(report.metric, lines, run, mark=scene.mark(run, row)))
    return tuple(panels)


def _curves(scene: Scene, run: Run) -> tuple[Panel, ...]:
    default = scene.defaults.get(run.name)
    if default is None:
        return ()
    metrics = [*(report.metric for report in scene.report.metrics), Metric("train_loss", "lower")]
    panels = []
    for metric in sorted(metrics, key=lambda metric: metric.better == "higher"):
        # The loss of training is that of the raw weights, in whichever rows it stands.
        training = metric.name.startswith("train_")
        wanted = scene.raw(run)[:1] if training else [*scene.raw(run), default]
        lines = scene.lines(run, wanted, metric)
        if lines:
            panels.append(scene.panel(metric, lines, run))
    return tuple(panels)


def _early(scene: Scene, run: Run) -> tuple[Panel, ...]:
    default = scene.defaults.get(run.name)
    if default is None:
        return ()
    end = scene.early(run)
    kinds = [s for s in run.series if s.averaged and s.coefficients == default.coefficients]
    alike = [s for s in kinds if s.batch_norm == default.batch_norm]
    longest = max(alike, key=lambda series: series.k or 0)
    wanted = [*scene.raw(run), default, longest, *(s for s in kinds if s.k == default.k)]
    panels = []
    for report in scene.shown:
        lines = scene.lines(run, wanted, report.metric)
        lines = tuple(line for line in lines if sum(at <= end for at in line.at) > 1)
        if any(line.style == scene.styles.of(run, default) for line in lines):
            panels.append(scene.panel(report.metric, lines, run, end=end, skip=0.0, trim=False))
    return tuple(panels)


def _runs(scene: Scene) -> tuple[Panel, ...]:
    if len(scene.runs) < 2:
        return ()
    panels = []
    for report in scene.shown:
        lines = []
        for run in scene.runs:
            default = scene.defaults.get(run.name)
            raw = scene.raw(run)[:1]
            for series in [*raw, *([default] if default else [])]:
                label = f"{run.name}, {say_series(series)}"
                lines.append(scene.line(run, series, report.metric, label))
        there = tuple(line for line in lines if line is not None)
        if len(there) > 1:
            panels.append(scene.panel(report.metric, there))
    return tuple(panels)


_OF_A_RUN = {
    "saving": _saving,
    "windows": windows,
    "curves": _curves,
    "early": _early,
    "coefficients": coefficients,
    "batch_norm": batch_norm,
    "target": target,
}


def _slug(name: str) -> str:
    """A name that any file system takes.

    >>> _slug("lookahead(sgd)"), _slug("adam, constant rate"), _slug("../<b>")
    ('lookahead-sgd', 'adam-constant-rate', 'b')
    """
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "run"
