"""Tables of strings for the page, and those of the frontier."""

from collections.abc import Sequence
from dataclasses import dataclass

from lawa_lab.report import frontier_words, words
from lawa_lab.report.curves import Metric
from lawa_lab.report.frontier import EqualBudget, EqualQuality, Frontier

__all__ = ["PageTable", "best_values", "frontier_tables", "quality_cells"]


@dataclass(frozen=True)
class PageTable:
    """A table of strings. The first cell of a row says what the row is about."""

    caption: str
    head: list[str]
    groups: list[tuple[str | None, list[list[str]]]]  # a heading, or None, and its rows
    folded: bool = False


def frontier_tables(metric: Metric, frontier: Frontier, folded: bool) -> list[PageTable]:
    """Quality at equal budget, budget at equal quality, what runs spent, and forecasts."""
    tables = [_equal_budget(metric, frontier, folded)]
    main = [row for row in frontier.equal_quality if row.main]
    others = [row for row in frontier.equal_quality if not row.main]
    if main:
        tables.append(_equal_quality(metric, frontier, main, "", folded))
    if others:
        tables.append(_equal_quality(metric, frontier, others, ", other averages", True))
    tables += [_by_seed(metric, frontier), _spent(metric, frontier)]
    if frontier.forecasts:
        tables.append(_forecasts(metric, frontier))
    return tables


_KINDS = {
    "annealed": "annealed runs, raw weights at their end",
    "annealed average": "annealed runs, their averages at their end",
    "anytime": "averages of a constant-rate run",
    "raw": "raw weights of a constant-rate run",
}


def _grouped(frontier: Frontier) -> list[tuple[str, list[EqualBudget]]]:
    found = [
        (text, [row for row in frontier.equal_budget if row.kind == kind])
        for kind, text in _KINDS.items()
    ]
    return [(text, rows) for text, rows in found if rows]


def best_values(metric: Metric, frontier: Frontier) -> list[float | None]:
    """The best mean at each budget."""
    return [
        metric.best(value.mean for row in frontier.equal_budget if (value := row.values[index]))
        for index in range(len(frontier.budgets))
    ]


def _equal_budget(metric: Metric, frontier: Frontier, folded: bool) -> PageTable:
    """Mean and standard deviation; the best of each column is marked."""
    best = best_values(metric, frontier)
    groups: list[tuple[str | None, list[list[str]]]] = []
    for text, rows in _grouped(frontier):
        lines = []
        for row in rows:
            cells = [
                words.say_mean(metric, value) + (" ✓" if value and value.mean == top else "")
                for value, top in zip(row.values, best, strict=True)
            ]
            lines.append([row.label, *cells])
        groups.append((text, lines))
    caption = (
        f"Quality at equal budget: {words.plain(metric.name)} (± deviation over seeds; ✓: best)"
    )
    return PageTable(caption, _budget_head(frontier), groups, folded)


def _equal_quality(
    metric: Metric, frontier: Frontier, rows: Sequence[EqualQuality], which: str, folded: bool
) -> PageTable:
    """One group per average: what it took to have the final quality of each annealed run."""
    axis = frontier.axis
    timed = any(row.saving.seconds for row in rows)
    hours = any(row.saving.gpu_hours for row in rows)
    reached = (
        f"{words.say_axis(axis, 1)} at which the average reaches it (by seed, if seeds differ)"
    )
    head = ["annealed run", "final value", f"its {axis}s", reached]
    head += [f"{axis}s saved", "in %", *["time saved"] * timed, *["GPU-hours saved"] * hours]
    labels = dict.fromkeys(row.average for row in rows)
    groups: list[tuple[str | None, list[list[str]]]] = []
    for label in labels:
        lines = []
        for row in rows:
            if row.average == label:
                lines.append(quality_cells(metric, frontier, row, timed=timed, hours=hours))
        groups.append((label, lines))
    caption = f"Budget at equal quality{which}: {words.plain(metric.name)}"
    return PageTable(caption, head, groups, folded)


def quality_cells(
    metric: Metric, frontier: Frontier, row: EqualQuality, *, timed: bool, hours: bool
) -> list[str]:
    """What it took to have the final quality of one annealed run; of means, those of all seeds."""
    saving = row.saving
    amount = saving.on(frontier.axis) if saving.num_both == saving.num_seeds else None
    saved, percent = (
        ("-", "-")
        if amount is None
        else (
            words.say_over_seeds(amount.saved),
            "-" if amount.percent is None else f"{amount.percent:.0f}%",
        )
    )
    seconds = saving.seconds.saved.mean if amount and saving.seconds else None
    return [
        row.annealed + (", its average" if row.kind == "annealed average" else ""),
        words.say_value(metric, saving.target),
        words.say_number(row.budget),
        frontier_words.reached(row, frontier.axis),
        saved,
        percent,
        *[words.say_duration(seconds)] * timed,
        *[words.say_hours(saving.gpu_hours if amount else None)] * hours,
    ]


def _by_seed(metric: Metric, frontier: Frontier) -> PageTable:
    """Quality at equal budget, seed by seed."""
    groups: list[tuple[str | None, list[list[str]]]] = [
        (
            row.label if row.kind.startswith("annealed") else f"constant rate, {row.label}",
            [
                [f"seed {seed}", *(words.say_value(metric, value) for value in values)]
                for seed, values in row.by_seed.items()
            ],
        )
        for row in frontier.equal_budget
    ]
    caption = f"Quality at equal budget, seed by seed: {words.plain(metric.name)}"
    return PageTable(caption, _budget_head(frontier), groups, folded=True)


def _spent(metric: Metric, frontier: Frontier) -> PageTable:
    """What each annealed run spent, and its raw weights and average at its end."""
    lines = []
    for point in frontier.annealed:
        peak = "-" if point.peak is None else f"{point.peak:.3g}"
        numbers = (None if each is None else each.mean for each in (point.epochs, point.steps))
        hours = "-" if point.gpu_hours is None else f"{point.gpu_hours.mean:.2f}"
        lines.append(
            [
                point.label,
                peak,
                *map(words.say_number, numbers),
                words.say_duration(point.seconds.mean if point.seconds else None),
                hours,
                words.say_mean(metric, point.raw),
                words.say_mean(metric, point.average),
                str(point.raw.num_seeds),
            ]
        )
    head = ["annealed run", "peak rate", "epochs", "steps", "time", "GPU-hours"]
    head += ["raw weights", "average", "seeds"]
    caption = f"What annealed runs spent and where they ended: {words.plain(metric.name)}"
    return PageTable(caption, head, [(None, lines)], folded=True)


def _forecasts(metric: Metric, frontier: Frontier) -> PageTable:
    """The average at the start of each decay against its end."""
    groups: list[tuple[str | None, list[list[str]]]] = []
    for found in frontier.forecasts:
        lines = [
            [
                f"seed {branch.seed}",
                "-" if branch.peak is None else f"{branch.peak:.3g}",
                words.say_number(branch.at),
                words.say_number(branch.budget),
                words.say_value(metric, branch.average),
                words.say_value(metric, branch.final),
                f"{'-' if branch.average < branch.final else '+'}"
                f"{words.say_difference(metric, abs(branch.average - branch.final))}",
            ]
            for branch in found.branches
        ]
        groups.append((f"{found.annealed}: {found.average}", lines))
    axis = words.say_axis(frontier.axis, 1)
    head = ["", "peak rate", f"decay from {axis}", f"to {axis}", "average there"]
    head += ["final value", "difference"]
    caption = f"Does the average forecast the result of a decay? {words.plain(metric.name)}"
    return PageTable(caption, head, groups, folded=True)


def _budget_head(frontier: Frontier) -> list[str]:
    return ["", *(words.say_count(budget, frontier.axis) for budget in frontier.budgets)]
