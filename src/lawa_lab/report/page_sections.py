"""What the page says of one recipe: a section for each question, left out where nothing answers."""

from collections.abc import Callable, Sequence

from lawa_lab.report.figures import drawings
from lawa_lab.report.markup import Markup, element, joined
from lawa_lab.report.page_figures import figure
from lawa_lab.report.page_tables import (
    behind_table,
    main_table,
    runs_table,
    target_table,
    wide_table,
)
from lawa_lab.report.page_text import (
    Name,
    seen_against_others,
    seen_at_targets,
    seen_between,
    seen_early,
    seen_in_runs,
    seen_in_windows,
    the_finding,
)
from lawa_lab.report.runs import Run
from lawa_lab.report.scenes import Scene, plain
from lawa_lab.report.summary import MainRow, RunRow, WindowRow

__all__ = ["recipe_section"]


def recipe_section(scene: Scene) -> Markup:
    """All that is said of one recipe."""
    return element("section", element("h2", scene.report.recipe), *_Recipe(scene).parts())


class _Recipe:
    """The parts of a recipe's section, in order."""

    def __init__(self, scene: Scene) -> None:
        self.scene, self.axis = scene, scene.report.axis
        self.main = scene.shown[0]
        self.metric = self.main.metric
        self.drawn = drawings(scene.runs, scene.report)

    def parts(self) -> list[Markup]:
        by_run: tuple[tuple[str, str, Callable[[Run], list[Markup]]], ...] = (
            ("windows", "How many weights: k", self._windows),
            ("coefficients", "Coefficients", self._coefficients),
            ("batch_norm", "BatchNorm statistics", self._batch_norm),
        )
        then: tuple[tuple[str, str, Callable[[Run], list[Markup]]], ...] = (
            ("early", "The early phase", self._early),
            ("target", "Saving against target", self._target),
        )
        return [
            *self._saved(),
            *(self._section(*question) for question in by_run),
            self._runs(),
            *(self._section(*question) for question in then),
            self._section("curves", "All values", lambda run: []),
            self._lost(),
        ]

    def _saved(self) -> list[Markup]:
        """Other runs' findings, the main tables, and the figure of the first thing asked."""
        parts = []
        for run in self.scene.runs[1:]:
            rows = self.scene.own_rows(self.main, run)
            if rows:
                found = the_finding(self.scene.report.recipe, self.main, rows)
                parts.append(element("p", " ".join(found)))
        for report in self.scene.report.metrics:
            rows = [row for run in self.scene.runs for row in self.scene.own_rows(report, run)]
            if not rows:
                continue
            caption = f"What averaging saved: {plain(report.metric.name)}"
            made = main_table(report.metric, rows, caption)
            if report is self.main:
                parts.insert(0, made)
            else:
                summary = element("summary", f"The same for {plain(report.metric.name)}")
                parts.append(element("details", summary, made))
        own = [row for run in self.scene.runs for row in self.scene.own_rows(self.main, run)]
        return [*parts, *_notes(own), *self._figures("saving")]

    def _section(self, kind: str, heading: str, answer: Callable[[Run], list[Markup]]) -> Markup:
        """A heading, then for each run its figure and what is said of it."""
        parts: list[Markup] = []
        for run in self.scene.runs:
            shown = [d for d in self.drawn if d.kind == kind and d.run == run.name]
            if not shown:
                continue
            said, *rest = answer(run) or [Markup("")]
            block = [said, *map(figure, shown), *rest]
            if parts:  # one run is enough to read through
                same = element("summary", f"The same for {run.name}")
                parts.append(element("details", same, *block))
            else:
                parts += block
        return element("section", element("h3", heading), *parts) if parts else Markup("")

    def _windows(self, run: Run) -> list[Markup]:
        default = self.scene.defaults[run.name]
        rows = [
            row
            for row in self._rows(run)
            if (row.series.coefficients, row.series.batch_norm)
            == (default.coefficients, default.batch_norm)
        ]
        rows.sort(key=lambda row: row.series.k or 0)
        caption = f"{run.name}: every k, {plain(self.metric.name)}"
        return [
            element("p", seen_in_windows(self.metric, rows, self.axis, _by_k)),
            wide_table(self.metric, rows, caption, self.axis, _by_k),
        ]

    def _coefficients(self, run: Run) -> list[Markup]:
        default = self.scene.defaults[run.name]
        same = (default.k, default.batch_norm)
        rows = [row for row in self._rows(run) if (row.series.k, row.series.batch_norm) == same]
        return self._against_default(run, rows, "coefficients", _by_coefficients)

    def _batch_norm(self, run: Run) -> list[Markup]:
        default = self.scene.defaults[run.name]
        same = (default.k, default.coefficients)
        rows = [row for row in self._rows(run) if (row.series.k, row.series.coefficients) == same]
        said, *tables = self._against_default(run, rows, "BatchNorm statistics", _by_batch_norm)
        own = [row for row in self.main.runs if row.run == run.name]
        fair = (
            "Each average is held against raw weights with BatchNorm treated alike where there are "
            "any, else with running statistics."
        )
        ends = seen_in_runs(self.metric, own, _by_batch_norm)
        table = runs_table(self.main, own, (), f"{run.name}: the raw weights likewise")
        return [joined([said, element("p", f"{ends} {fair}")]), *tables, table]

    def _against_default(
        self, run: Run, rows: list[WindowRow], what: str, name: Name
    ) -> list[Markup]:
        default = [row for row in rows if row.default]
        said = [
            seen_between(self.metric, default[0], row, self.axis, name)
            for row in rows
            if default and not row.default
        ]
        caption = f"{run.name}: {what}, {plain(self.metric.name)}"
        return [
            joined(element("p", text) for text in said),
            wide_table(self.metric, rows, caption, self.axis, name),
        ]

    def _runs(self) -> Markup:
        """All runs side by side, and the average of each against the raw weights of the others."""
        shown = [drawing for drawing in self.drawn if drawing.run is None]
        if not shown:
            return Markup("")
        heading = "Lookahead" if shown[0].kind == "lookahead" else "Run against run"
        names = [run.name for run in self.scene.runs]
        others = [row for row in self.main.main if row.averaged_run != row.baseline_run]
        others.sort(key=lambda row: names.index(row.averaged_run))
        raw = sorted(self.main.runs, key=lambda row: names.index(row.run))
        averages = [row for row in self.main.windows if row.default]
        averages.sort(key=lambda row: names.index(row.run))
        usual = [row for row in raw if row.series.batch_norm is None]
        parts = [
            element("h3", heading),
            element("p", seen_in_runs(self.metric, usual, lambda row: row.run)),
            element("p", seen_against_others(self.metric, others)),
            *map(figure, shown),
            runs_table(self.main, raw, averages, "Every run, raw and averaged"),
        ]
        if others:
            caption = f"The average of one run against another: {plain(self.metric.name)}"
            parts += [main_table(self.metric, others, caption), *_notes(others)]
        return element("section", *parts)

    def _early(self, run: Run) -> list[Markup]:
        rows = [row for row in self._rows(run) if row.series.coefficients == "uniform"]
        end = self.scene.early(run)
        caption = f"{run.name}: where averages were behind in most seeds, {plain(self.metric.name)}"
        return [
            element("p", seen_early(self.metric, rows, self.axis, end)),
            behind_table(self.metric, rows, caption, self.axis, end),
        ]

    def _target(self, run: Run) -> list[Markup]:
        rows = [row for row in self.scene.own_rows(self.main, run) if row.curve.target]
        if not rows:
            return []
        caption = f"{rows[0].label}: {self.axis}s saved at some targets"
        return [
            element("p", seen_at_targets(self.metric, rows[0])),
            target_table(self.metric, rows[0], caption),
        ]

    def _lost(self) -> Markup:
        """Where averaging lost, and what limits the numbers."""
        parts = [element("h3", "Where averaging lost")]
        others = [report for report in self.scene.report.metrics if report is not self.main]
        for report in (self.main, *others):
            if report.losses:
                listed = element("ul", *(element("li", text) for text in report.losses))
                if report is self.main:
                    parts += [element("h4", plain(report.metric.name)), listed]
                else:
                    name = element("summary", f"The same for {plain(report.metric.name)}")
                    parts.append(element("details", name, listed))
        if self.scene.report.notes:
            notes = (element("li", text) for text in self.scene.report.notes)
            parts += [element("h4", "What limits these numbers"), element("ul", *notes)]
        return element("section", *parts)

    def _rows(self, run: Run) -> list[WindowRow]:
        return [row for row in self.main.windows if row.run == run.name]

    def _figures(self, kind: str) -> list[Markup]:
        return [figure(drawing) for drawing in self.drawn if drawing.kind == kind]


def _notes(rows: Sequence[MainRow]) -> list[Markup]:
    """What limits comparisons, each said once."""
    about: dict[str, list[str]] = {}
    for row in rows:
        for note in row.notes:
            about.setdefault(note, []).append(row.label)
    said = [element("li", f"{note} ({'; '.join(labels)})") for note, labels in about.items()]
    return [element("ul", *said, class_="note")] if said else []


def _by_k(row: WindowRow) -> str:
    return f"k = {row.series.k}"


def _by_coefficients(row: WindowRow) -> str:
    return str(row.series.coefficients).replace(":", " ")


def _by_batch_norm(row: WindowRow | RunRow) -> str:
    return f"statistics {row.series.batch_norm}" if row.series.batch_norm else "running statistics"
