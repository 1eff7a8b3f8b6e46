"""A report in the terminal: tables that fit 80 columns, and show more on a wider terminal.

A metric with a frontier is about a screen: its headline and its two tables. Everything else, such
as every average of each run, is on the page and in the JSON.
"""

import textwrap
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from lawa_lab.report import frontier_words, words
from lawa_lab.report.curves import Axis, Metric
from lawa_lab.report.frontier import EqualBudget, Frontier
from lawa_lab.report.page_tables import best_values, quality_cells
from lawa_lab.report.savings import Mean, Saving
from lawa_lab.report.summary import MainRow, MetricReport, RecipeReport, Report, RunRow, WindowRow
from lawa_lab.report.words import say_axis, say_duration, say_mean, say_number, say_value

__all__ = [
    "AVERAGED_STYLE",
    "RAW_STYLE",
    "equal_budget_table",
    "equal_quality_table",
    "say",
    "show_report",
]

RAW_STYLE, AVERAGED_STYLE = "dark_orange", "dodger_blue1"
_WIDE = 100  # columns from which on the range over seeds and the steps are shown too
_DEFINITIONS = (
    "Largest: the largest saving at any value that both reached in every seed; a maximum, so it is "
    "optimistic. Final, best: the saving at the baseline's own last and best value, each seed with "
    "its own. ±: standard deviation over seeds. Time includes every cost of averaging. The page "
    "(-o) defines each number."
)
_NOT_SHOWN = (
    "Time saved includes every cost of averaging. All other tables (every average, raw weights, "
    "forecasts, where averaging lost), the figures and definitions are on the page: -o FOLDER. "
    "`lawa report RUN` prints the tables of one run, and --json prints everything."
)
_WHAT = {"headline": "largest", "final": "final", "best": "best"}


def show_report(report: Report, console: Console) -> None:
    """Print the frontier of each metric, or without one all tables about single runs."""
    for recipe in report.recipes:
        for metric in recipe.metrics:
            title = f"{recipe.recipe}: {words.plain(metric.metric.name)}"
            console.rule(Text(title, style="bold"), align="left", style="dim")
            console.print()
            if metric.frontier is not None:
                _show_frontier(metric.metric, metric.frontier, recipe, console)
            if not _compared(metric):
                _show_runs(metric, recipe, console)
        for note in recipe.notes:
            say(console, note, bullet="- ")
    console.print()
    compared = {_compared(metric) for recipe in report.recipes for metric in recipe.metrics}
    if False in compared:
        say(console, _DEFINITIONS)
    if True in compared:
        say(console, _NOT_SHOWN)


def _compared(report: MetricReport) -> bool:
    """Whether averages are compared with annealed runs; single runs are then left to the page."""
    return report.frontier is not None and report.frontier.headline is not None


def _show_runs(report: MetricReport, recipe: RecipeReport, console: Console) -> None:
    """What averaging saved inside each run."""
    wide = console.width >= _WIDE
    several = len({row.run for row in report.runs}) > 1
    own = report.own()
    if report.frontier is not None:
        console.print("Inside one run\n", style="bold")
    if own:
        say(console, words.finding(recipe.recipe, report.metric, own[0]))
    for row in own:
        console.print()
        console.print(_caption(row, several), style="bold", markup=False)
        _put(console, main_table(report.metric, row, wide=wide))
        for note in filter(None, [words.unmatched(row), *row.notes]):
            say(console, note)
    if report.across:
        console.print()
        unit = say_axis(recipe.axis)
        console.print(
            f"Averages against the raw weights of other runs ({unit} saved)", style="bold"
        )
        _put(console, _across_table(report.metric, report.across))
        for note in dict.fromkeys(note for row in report.across for note in row.notes):
            say(console, note)
    console.print()
    console.print(
        f"Every average, against raw weights treated alike ({say_axis(recipe.axis)} saved)",
        style="bold",
    )
    for run in dict.fromkeys(row.run for row in report.windows):
        rows = [row for row in report.windows if row.run == run]
        title = run if several else None
        _put(console, _window_table(report.metric, recipe.axis, rows, title=title, wide=wide))
    console.print("Raw weights", style="bold")
    _put(console, _run_table(report.metric, report.runs, several=several, wide=wide))
    console.print("Where averaging lost", style="bold")
    for sentence in report.losses:
        say(console, sentence, bullet="- ")
    console.print()


def _show_frontier(
    metric: Metric, frontier: Frontier, recipe: RecipeReport, console: Console
) -> None:
    """Annealed runs against anytime averages; what follows is about single runs."""
    say(console, frontier_words.headline(recipe.recipe, metric, frontier))
    if leads := frontier_words.leads(metric, frontier):
        say(console, leads)
    console.print("\nQuality at equal budget", style="bold")
    _put(console, equal_budget_table(metric, frontier, wide=console.width >= _WIDE))
    if any(row.main for row in frontier.equal_quality):
        unit = say_axis(frontier.axis)
        title = f"Budget at equal quality ({unit} until the average has the final value, by seed)"
        console.print(title, style="bold")
        _put(console, equal_quality_table(metric, frontier))
    for note in frontier_words.notes(metric, frontier):
        say(console, note)
    console.print()


def equal_budget_table(metric: Metric, frontier: Frontier, *, wide: bool = False) -> Table:
    """One row per method, one column per budget; the best of each column is bold."""
    table = _table()
    table.add_column(f"{say_axis(frontier.axis)} of training")
    for budget in frontier.budgets:
        table.add_column(say_number(budget), justify="right")
    best = best_values(metric, frontier)
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
    heads = ["final", "its length", "reached at", "saved"]
    for name in [*heads, *["time saved"] * timed, *["GPU-h"] * counted]:
        table.add_column(name, justify="right")
    for row in rows:
        cells = quality_cells(metric, frontier, row, timed=timed, hours=counted)
        del cells[4]  # what is saved is given in percent
        table.add_row(*map(escape, cells))
    return table


def _name(row: EqualBudget) -> str:
    return f"constant rate, {row.label}" if row.kind in ("anytime", "raw") else row.label


def _caption(row: MainRow, several: bool) -> str:
    text = row.label if several else row.label.removeprefix(f"{row.averaged_run}, ")
    usual = "as usual, " if row.against == "usual" else ""
    return f"{text} ({usual}{words.say_seeds(row.final.num_seeds)})"


def main_table(metric: Metric, row: MainRow, *, wide: bool = False) -> Table:
    """One comparison: the largest saving, and those at the baseline's final and best value."""
    table = _table()
    timed = any(s.seconds for s in row.savings)
    counted = any(s.gpu_hours for s in row.savings)
    ranged = wide and row.final.num_seeds > 1
    steps = wide and row.axis != "step"
    table.add_column(f"{say_axis(row.axis)} to reach")
    table.add_column("baseline", justify="right", style=RAW_STYLE)
    table.add_column("averaged", justify="right", style=AVERAGED_STYLE)
    heads = ["saved", "", *["range"] * ranged, *["steps"] * steps, *["time"] * timed]
    for name in [*heads, *["GPU-h"] * counted]:
        table.add_column(name, justify="right")
    for saving in row.savings:
        amount = saving.on(row.axis)
        cells = [f"{_WHAT[saving.what]} {say_value(metric, saving.target)}"]
        if amount is None or saving.num_both < saving.num_seeds:
            # A mean would leave some seeds out.
            by_seed = ", ".join(words.say_saved(s.saved) for s in saving.by_seed)
            cells += ["-", "-", by_seed, *[""] * (1 + ranged + steps + timed + counted)]
        else:
            cells += [say_number(amount.baseline_at.mean), say_number(amount.averaged_at.mean)]
            cells += [_plus_minus(amount.saved)]
            cells += ["" if amount.percent is None else f"{amount.percent:.0f}%"]
            cells += [words.say_range(amount.saved)] * ranged
            cells += [say_number(saving.steps.saved.mean if saving.steps else None)] * steps
            seconds = saving.seconds.saved.mean if saving.seconds else None
            cells += [say_duration(seconds)] * timed + [words.say_hours(saving.gpu_hours)] * counted
        table.add_row(*cells)
    return table


def _across_table(metric: Metric, rows: Sequence[MainRow]) -> Table:
    table = _table()
    for name in ("average", "against"):
        table.add_column(name)
    for name in ("largest", "at", "final", "best"):
        table.add_column(name, justify="right")
    for row in rows:
        raw = row.baseline.batch_norm
        table.add_row(
            escape(f"{row.averaged_run}, {row.averaged.label.partition(', BatchNorm')[0]}"),
            escape(f"{row.baseline_run}, {'raw' if raw is None else f'raw {raw}'}"),
            _saved(row.headline, row.axis),
            say_value(metric, row.headline.target if row.headline else None),
            _saved(row.final, row.axis),
            _saved(row.best, row.axis),
        )
    return table


def _saved(saving: Saving | None, axis: Axis) -> str:
    amount = None if saving is None else saving.on(axis)
    if saving is None or amount is None:
        return "-"
    some = f" in {saving.num_both}/{saving.num_seeds}" * (saving.num_both < saving.num_seeds)
    return f"{say_number(amount.saved.mean)}{some}"


def _window_table(
    metric: Metric, axis: Axis, rows: Sequence[WindowRow], *, title: str | None, wide: bool
) -> Table:
    table = _table(title=title)
    methods = len({row.series.weights for row in rows}) > 1
    rules = len({row.series.coefficients for row in rows} - {None}) > 1
    treated = len({row.series.batch_norm for row in rows}) > 1
    roomy = wide or not (rules and treated)
    timed = roomy and any(row.charged_seconds for row in rows)
    if methods:
        table.add_column("method")
    table.add_column("k", justify="right")
    for name in ["coefficients"] * rules + ["BatchNorm"] * treated:
        table.add_column(name)
    heads = ["saved", "at the end", *["best"] * roomy, "behind", *["worst by"] * wide]
    for name in [*heads, *["cost"] * timed]:
        table.add_column(name, justify="right")
    for row in rows:
        worst = "-" if row.worst is None else words.say_difference(metric, row.worst.worst_by)
        cells = ["window" if row.series.weights == "averaged" else row.series.weights] * methods
        cells += ["-" if row.series.k is None else str(row.series.k)]
        cells += [str(row.series.coefficients or "-")] * rules
        cells += [row.series.batch_norm or "-"] * treated
        cells += [_largest(row, axis), say_mean(metric, row.final)]
        cells += [say_value(metric, _mean(row.best))] * roomy
        cells += [f"{row.num_behind}/{row.num_compared}", *[worst] * wide]
        cells += [say_duration(_mean(row.charged_seconds))] * timed
        table.add_row(*map(escape, cells), style="bold" if row.default else None)
    return table


def _run_table(metric: Metric, rows: Sequence[RunRow], *, several: bool, wide: bool) -> Table:
    table = _table()
    treated = len({row.series.batch_norm for row in rows}) > 1
    for name in ["run"] * several + ["BatchNorm"] * treated:
        table.add_column(name)
    for name in ["at the end", "best", "seeds", *["epochs", "steps"] * wide, "training"]:
        table.add_column(name, justify="right")
    if wide:
        table.add_column("device")
    for row in rows:
        cells = [row.run] * several + [row.series.batch_norm or "running"] * treated
        best = say_mean(metric, row.best) if wide else say_value(metric, _mean(row.best))
        cells += [say_mean(metric, row.final), best, str(len(row.seeds))]
        cells += [say_number(_mean(row.epochs)), say_number(_mean(row.steps))] if wide else []
        cells += [say_duration(_mean(row.train_seconds))]
        number = f"{row.num_devices} × " if row.num_devices not in (None, 1) else ""
        cells += [f"{number}{row.device or '-'}"] * wide
        table.add_row(*map(escape, cells))
    return table


def _table(title: str | None = None) -> Table:
    return Table(
        title=None if title is None else Text(title),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
        header_style="bold",
    )


def _put(console: Console, table: Table) -> None:
    """On a narrow terminal, words are broken rather than cut off."""
    for column in table.columns:
        column.overflow = "fold"
    console.print(table)


def _largest(row: WindowRow, axis: Axis) -> str:
    if row.headline is not None:
        amount = row.headline.on(axis)
        return "-" if amount is None else _plus_minus(amount.saved)
    if row.unmatched is None:
        return "-"
    bound = f"> {say_number(row.unmatched.at_least.mean)}"
    num_seeds = row.final.num_seeds if row.final is not None else row.unmatched.num_seeds
    if row.unmatched.num_seeds == num_seeds:
        return bound
    return f"{bound} in {row.unmatched.num_seeds} of {num_seeds}"


def _plus_minus(number: Mean) -> str:
    return say_number(number.mean) + ("" if number.sd is None else f" ± {say_number(number.sd)}")


def _mean(number: Mean | None) -> float | None:
    return None if number is None else number.mean


def say(console: Console, sentence: str, bullet: str = "") -> None:
    """Print a sentence, its further lines below its first word."""
    lines = textwrap.wrap(
        sentence,
        console.width,
        initial_indent=bullet,
        subsequent_indent=" " * len(bullet),
        break_on_hyphens=False,
    )
    console.print(Text("\n".join(lines)))
