"""The frontier in the terminal: quality at equal budget, budget at equal quality, forecasts."""

from rich import box
from rich.markup import escape
from rich.table import Table

from lawa_lab.report import frontier_words
from lawa_lab.report.curves import Metric
from lawa_lab.report.frontier import EqualBudget, Frontier
from lawa_lab.report.words import say_axis, say_duration, say_hours, say_mean, say_number, say_value

__all__ = ["equal_budget_table", "equal_quality_table"]


def equal_budget_table(metric: Metric, frontier: Frontier, *, wide: bool = False) -> Table:
    """One row per method, one column per budget; the best of each column is bold."""
    table = _table()
    table.add_column(f"{say_axis(frontier.axis)} of training")
    for budget in frontier.budgets:
        table.add_column(say_number(budget), justify="right")
    best = [
        metric.best(value.mean for row in frontier.equal_budget if (value := row.values[index]))
        for index in range(len(frontier.budgets))
    ]
    for row in frontier.equal_budget:
        cells = []
        for value, top in zip(row.values, best, strict=True):
            mean = None if value is None else value.mean
            text = say_mean(metric, value) if wide else say_value(metric, mean)
            cells.append(f"[bold]{text}[/bold]" if mean is not None and mean == top else text)
        table.add_row(escape(_name(row)), *cells)
    return table


def equal_quality_table(metric: Metric, frontier: Frontier) -> Table:
    """One row per annealed run: where the main average has its final quality, seed by seed."""
    rows = [row for row in frontier.equal_quality if row.main]
    timed = any(row.saving.seconds for row in rows)
    counted = any(row.saving.gpu_hours for row in rows)
    table = _table()
    table.add_column("annealed run")
    heads = ["final", "its length", "average has it at (seeds)", "saved"]
    for name in [*heads, *["time saved"] * timed, *["GPU-h"] * counted]:
        table.add_column(name, justify="right")
    for row in rows:
        amount = row.saving.on(frontier.axis)
        whole = amount is not None and row.saving.num_both == row.saving.num_seeds
        percent = amount.percent if amount is not None and whole else None
        seconds = row.saving.seconds.saved.mean if row.saving.seconds and whole else None
        table.add_row(
            escape(row.annealed + (", its average" if row.kind == "annealed average" else "")),
            say_value(metric, row.saving.target),
            say_number(row.budget),
            frontier_words.reached(row, frontier.axis),
            "-" if percent is None else f"{percent:.0f}%",
            *[say_duration(seconds)] * timed,
            *[say_hours(row.saving.gpu_hours if whole else None)] * counted,
        )
    return table


def _name(row: EqualBudget) -> str:
    return f"constant rate, {row.label}" if row.kind in ("anytime", "raw") else row.label


def _table() -> Table:
    return Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, header_style="bold")
