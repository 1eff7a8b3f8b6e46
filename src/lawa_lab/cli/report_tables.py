"""A report in the terminal: tables that fit 80 columns, and show more on a wider terminal.

About a screen for two metrics. With a frontier these are its headline and its two tables; for
single runs, what the main average saved and the last value of every average. Everything else, such
as other baselines, is on the page and in the JSON.
"""

import dataclasses
import itertools
import textwrap
from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from lawa_lab.report import frontier_words, saving_words, words
from lawa_lab.report.curves import Axis, Metric
from lawa_lab.report.frontier import Frontier
from lawa_lab.report.page_tables import best_values, quality_cells
from lawa_lab.report.savings import Mean, Saving
from lawa_lab.report.summary import MainRow, MetricReport, RecipeReport, Report, WindowRow
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
    "Largest: at any value of the average that both reached in every seed; a maximum, so it is "
    "optimistic. Final, best: at the baseline's last and best value, separately for each seed. "
    "±: standard deviation over seeds. Time includes every cost of averaging. Other baselines, "
    "best values, costs, figures and all definitions are on the page: -o FOLDER. --json prints "
    "everything."
)
_NOT_SHOWN = (
    "Time saved includes every cost of averaging. All other tables (every average, raw weights, "
    "forecasts, where averaging lost), the figures and definitions are on the page: -o FOLDER. "
    "`lawa report RUN` prints the tables of one run, and --json prints everything."
)
_CONSTANT, _ITS = "constant rate", "its average"
_WHAT = {"headline": "largest", "final": "final", "best": "best"}


def show_report(report: Report, console: Console) -> None:
    """Print the frontier of each metric, or without one all tables about single runs."""
    for recipe in report.recipes:
        for metric in recipe.metrics:
            title = f"{recipe.recipe}: {words.plain(metric.metric.name)}"
            console.rule(Text(title, style="bold"), align="left", style="dim")
            if metric.frontier is not None:
                _show_frontier(metric.metric, metric.frontier, recipe, console)
            if not _compared(metric):
                _show_savings(metric, recipe, console)
        if alone := [metric for metric in recipe.metrics if not _compared(metric)]:
            _show_averages(alone, recipe, console)
        _say_all(console, recipe.notes, bullet="- ")
    compared = {_compared(metric) for recipe in report.recipes for metric in recipe.metrics}
    if False in compared:
        say(console, _DEFINITIONS)
    if True in compared:
        say(console, _NOT_SHOWN)


def _compared(report: MetricReport) -> bool:
    """Whether averages are compared with annealed runs; single runs are then left to the page."""
    return report.frontier is not None and report.frontier.headline is not None


def _show_savings(report: MetricReport, recipe: RecipeReport, console: Console) -> None:
    """What the main average of each run saved against raw weights treated alike, where it lost."""
    # For each pair of runs, the first row is that of the main average and of this baseline.
    pairs = {(row.averaged_run, row.baseline_run): row for row in reversed(report.main)}
    main = list(pairs.values())[::-1]
    own = [row for row in main if row.averaged_run == row.baseline_run]
    across = [row for row in main if row.averaged_run != row.baseline_run]
    if report.frontier is not None:
        console.print("Inside one run\n", style="bold")
    if own:
        say(console, saving_words.finding(recipe.recipe, report.metric, own[0]))
        console.print()
    for row in own:
        console.print(_caption(row, len(own) > 1), style="bold", markup=False)
        _put(console, main_table(report.metric, row, wide=console.width >= _WIDE))
        _say_all(console, filter(None, [saving_words.unmatched(row), *row.notes]))
    if across:
        unit = say_axis(recipe.axis)
        console.print(
            f"Averages against the raw weights of other runs ({unit} saved)", style="bold"
        )
        _put(console, _across_table(report.metric, across))
        _say_all(console, saving_words.limits_said(across))
    _say_all(console, report.losses, bullet="- ")


def _show_averages(metrics: Sequence[MetricReport], recipe: RecipeReport, console: Console) -> None:
    """Raw weights and every average at the end of each run; a table for each run.

    Not for the runs that are only compared with others: the averages at their end are above.
    """
    wide = console.width >= _WIDE
    roomy = wide or len(metrics) <= 2
    shown = [metric for metric in metrics if roomy or any(metric is one for one in recipe.shown)]
    runs = dict.fromkeys(name for metric in shown for name in _alone(metric))
    unit = say_axis(recipe.axis)
    title = f"At the end, and most {unit} saved against raw weights treated alike"
    console.print(title, style="bold")
    several = len({row.run for metric in shown for row in metric.runs}) > 1
    for run in runs:
        if several:
            console.print(run, markup=False)
        _put(console, _averages_table(shown, recipe.axis, run, wide=wide))


def _alone(report: MetricReport) -> list[str]:
    """The runs inside which averages are compared with raw weights."""
    inside = dict.fromkeys(row.run for row in report.windows)
    others: set[str] = set()
    if (found := report.frontier) is not None:
        others = {*(p.run for p in found.annealed), *(c.run for c in found.curves)}
        others |= {*found.unfinished}
    raw = [row.run for row in report.runs if row.run in inside or row.run not in others]
    return [*raw, *inside]


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
        title = f"Budget at equal quality ({unit} to the final value; by seed, if seeds differ)"
        console.print(title, style="bold")
        _put(console, equal_quality_table(metric, frontier, wide=console.width >= _WIDE))
    _say_all(console, frontier_words.notes(metric, frontier))


def equal_budget_table(metric: Metric, frontier: Frontier, *, wide: bool = False) -> Table:
    """One row per method, one column per budget; the best of each column is bold."""
    table = _table()
    table.add_column(f"{say_axis(frontier.axis)} of training")
    for budget in frontier.budgets:
        table.add_column(say_number(budget), justify="right")
    best = best_values(metric, frontier)
    before = ""
    for row in frontier.equal_budget:
        label, constant = row.label, row.kind in ("anytime", "raw")
        if constant and before != _CONSTANT:
            table.add_row(_CONSTANT)
        label = f"  {label}" if constant else _below(label, before)
        before = _CONSTANT if constant else row.label
        cells = []
        for value, top in zip(row.values, best, strict=True):
            mean = None if value is None else value.mean
            text = say_mean(metric, value) if wide else say_value(metric, mean)
            cells.append(f"[bold]{text}[/bold]" if mean is not None and mean == top else text)
        table.add_row(escape(label), *cells)
    return table


def equal_quality_table(metric: Metric, frontier: Frontier, *, wide: bool = False) -> Table:
    """One row per annealed run: where the main average has its final quality."""
    rows = [row for row in frontier.equal_quality if row.main]
    timed = any(row.saving.seconds for row in rows)
    counted = any(row.saving.gpu_hours for row in rows) and (wide or not timed)
    table = _table()
    table.add_column("annealed run")
    heads = ["final", "length", "reached at", "saved", *["time"] * timed, *["GPU-h"] * counted]
    for name in heads:
        table.add_column(name, justify="right")
    before = ""
    for row in rows:
        name, *cells = quality_cells(metric, frontier, row, timed=timed, hours=counted)
        del cells[3]  # what is saved is given in percent
        table.add_row(*map(escape, (_below(name, before), *cells)))
        before = name
    return table


def _below(label: str, before: str) -> str:
    """A label, shorter below that of the run whose average it is."""
    return f"  {_ITS}" if label == f"{before}, {_ITS}" else label


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
    savings = {_WHAT[saving.what]: saving for saving in row.savings}
    if dataclasses.replace(row.best, what="final") == row.final:
        savings = {"final, best" if n == "final" else n: savings[n] for n in savings if n != "best"}
    for what, saving in savings.items():
        amount = saving.on(row.axis)
        cells = [f"{what} {say_value(metric, saving.target)}"]
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
    if saving is None:
        return "-"
    amount = saving.on(axis)
    if amount is None:
        return "never"
    some = f" in {saving.num_both}/{saving.num_seeds}" * (saving.num_both < saving.num_seeds)
    return f"{say_number(amount.saved.mean)}{some}"


def _averages_table(metrics: Sequence[MetricReport], axis: Axis, run: str, *, wide: bool) -> Table:
    """One row for the raw weights and for each average of a run, two columns per metric."""
    raw = [{row.series: row for row in m.runs if row.run == run} for m in metrics]
    averaged = [{row.series: row for row in m.windows if row.run == run} for m in metrics]
    series = list(dict.fromkeys(itertools.chain(*raw, *averaged)))
    treated = len({each.batch_norm for each in series}) > 1
    table = _table()
    for name in ["weights"] + ["BatchNorm"] * treated:
        table.add_column(name)
    for metric in metrics:
        table.add_column(words.plain(metric.metric.name).replace(" ", "\n", 1), justify="right")
        table.add_column("saved", justify="right")
    for each in series:
        cells = [dataclasses.replace(each, batch_norm=None).label]
        cells += [each.batch_norm or "running"] * treated
        default = False
        for metric, ends, windows in zip(metrics, raw, averaged, strict=True):
            row = windows.get(each) or ends.get(each)
            final = None if row is None else row.final
            cells.append((say_mean if wide else _say_value)(metric.metric, final))
            window = windows.get(each)
            cells.append("-" if window is None else _largest(window, axis))
            default = default or (window is not None and window.default)
        table.add_row(*map(escape, cells), style="bold" if default else None)
    return table


def _table() -> Table:
    return Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
        collapse_padding=True,
        header_style="bold",
    )


def _put(console: Console, table: Table) -> None:
    """A table and an empty line. On a narrow terminal, words are broken rather than cut off."""
    for column in table.columns:
        column.overflow = "fold"
    console.print(table)
    console.print()


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
    return f"{bound} in {row.unmatched.num_seeds}/{num_seeds}"


def _plus_minus(number: Mean) -> str:
    return say_number(number.mean) + ("" if number.sd is None else f" ± {say_number(number.sd)}")


def _say_value(metric: Metric, number: Mean | None) -> str:
    return say_value(metric, None if number is None else number.mean)


def _say_all(console: Console, sentences: Iterable[str], bullet: str = "") -> None:
    """Different sentences and an empty line, if there are any."""
    different = dict.fromkeys(sentences)
    for sentence in different:
        say(console, sentence, bullet)
    if different:
        console.print()


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
