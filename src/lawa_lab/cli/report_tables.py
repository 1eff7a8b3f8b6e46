"""A report in the terminal: tables that fit 80 columns, with more in them where there is room."""

import textwrap
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from lawa_lab.report.savings import Axis, Metric
from lawa_lab.report.summary import (
    Amount,
    MainRow,
    Mean,
    MetricReport,
    RecipeReport,
    Report,
    RunRow,
    TargetSaving,
    WindowRow,
)
from lawa_lab.report.wording import (
    say_axis,
    say_duration,
    say_number,
    say_saved,
    say_spread,
    say_value,
)

__all__ = ["show_report"]

_RAW, _AVERAGED = "dark_orange", "dodger_blue1"  # the demo's colours, without its imports
_WIDE = 100  # columns from which on the range over seeds and the steps are shown too
_WHAT = {"headline": "longest", "final": "final", "best": "best"}


def show_report(report: Report, console: Console) -> None:
    """Print every table and sentence."""
    for recipe in report.recipes:
        several = len({row.run for m in recipe.metrics for row in m.runs}) > 1
        for metric in recipe.metrics:
            console.rule(
                Text(f"{recipe.recipe}: {metric.metric.name.replace('_', ' ')}", style="bold"),
                align="left",
                style="dim",
            )
            _show_metric(metric, recipe, console, several=several)
        for note in recipe.notes:
            _say(console, note, bullet="- ")
    console.print()
    _say(
        console,
        "Longest: the longest stretch until the baseline matches the average, at one value that "
        "the average had and both reach in every seed; a maximum, so it flatters. Final, best: the "
        "baseline's own last and best value, each seed its own. ±: standard deviation over seeds. "
        "Time has every cost of averaging charged to it. The page (-o) says how each number came "
        "about.",
    )


def _show_metric(
    report: MetricReport, recipe: RecipeReport, console: Console, *, several: bool
) -> None:
    wide = console.width >= _WIDE
    for row in report.main:
        console.print()
        console.print(_caption(row, several), style="bold", markup=False)
        _put(console, _main_table(report.metric, row, wide=wide))
        if row.unmatched is not None:
            _say(console, _unmatched(row))
        for note in row.notes:
            _say(console, note)
    console.print()
    counted = say_axis(recipe.axis)
    console.print(
        f"Every average, against raw weights treated alike (longest saving in {counted})",
        style="bold",
    )
    for run in dict.fromkeys(row.run for row in report.windows):
        own = [row for row in report.windows if row.run == run]
        table = _window_table(
            report.metric, recipe.axis, own, run=run if several else None, wide=wide
        )
        _put(console, table)
    console.print("Raw weights", style="bold")
    _put(console, _run_table(report.metric, report.runs, several=several, wide=wide))
    console.print("Where averaging lost", style="bold")
    for sentence in report.losses:
        _say(console, sentence, bullet="- ")
    console.print()


def _caption(row: MainRow, several: bool) -> str:
    text = row.label if several else row.label.removeprefix(f"{row.averaged_run}, ")
    usual = "as usual, " if row.against == "usual" else ""
    seeds = row.final.num_seeds
    return f"{text} ({usual}{seeds} seed{'s' if seeds != 1 else ''})"


def _main_table(metric: Metric, row: MainRow, *, wide: bool) -> Table:
    table = _table()
    savings = [s for s in (row.headline, row.final, row.best) if s is not None]
    timed = any(s.seconds for s in savings)
    counted = any(s.gpu_hours for s in savings)
    table.add_column(f"{say_axis(row.axis)} to reach")
    table.add_column("baseline", justify="right", style=_RAW)
    table.add_column("averaged", justify="right", style=_AVERAGED)
    table.add_column("saved", justify="right")
    table.add_column("", justify="right")
    ranged = wide and row.final.num_seeds > 1
    if ranged:
        table.add_column("range", justify="right")
    if wide and row.axis != "step":
        table.add_column("steps", justify="right")
    if timed:
        table.add_column("time", justify="right")
    if counted:
        table.add_column("GPU-h", justify="right")
    for saving in savings:
        amount = saving.epochs if row.axis == "epoch" else saving.steps
        cells = [f"{_WHAT[saving.what]} {say_value(metric, saving.target)}"]
        if amount is None or saving.num_both < saving.num_seeds:
            cells += ["-", "-", _by_seed(saving), ""]
            amount, seconds, hours, steps = None, None, None, None
        else:
            seconds, hours, steps = saving.seconds, saving.gpu_hours, saving.steps
            cells += [say_number(amount.baseline_at.mean), say_number(amount.averaged_at.mean)]
            cells += [_plus_minus(amount.saved), _percent(amount)]
        if ranged:
            cells.append("" if amount is None else _range(amount.saved))
        if wide and row.axis != "step":
            cells.append("" if steps is None else say_number(steps.saved.mean))
        if timed:
            cells.append("" if seconds is None else say_duration(seconds.saved.mean))
        if counted:
            cells.append("" if hours is None else f"{hours.saved.mean:.2f}")
        table.add_row(*cells)
    return table


def _window_table(
    metric: Metric, axis: Axis, rows: Sequence[WindowRow], *, run: str | None, wide: bool
) -> Table:
    table = _table(title=run)
    rules = len({row.series.coefficients for row in rows}) > 1
    treated = len({row.series.batch_norm for row in rows}) > 1
    roomy = wide or not (rules and treated)
    timed = roomy and any(row.charged_seconds for row in rows)
    table.add_column("k", justify="right")
    if rules:
        table.add_column("coefficients")
    if treated:
        table.add_column("BatchNorm")
    table.add_column("saved", justify="right")
    table.add_column("at the end", justify="right")
    if roomy:
        table.add_column("best", justify="right")
    table.add_column("behind", justify="right")
    if timed:
        table.add_column("cost", justify="right")
    for row in rows:
        cells = ["-" if row.series.k is None else str(row.series.k)]
        cells += [str(row.series.coefficients)] if rules else []
        cells += [row.series.batch_norm or "-"] if treated else []
        cells += [_longest(row, axis), _value(metric, row.final)]
        cells += [say_value(metric, _middle(row.best))] if roomy else []
        cells += [f"{row.num_behind}/{row.num_compared}"]
        cells += [say_duration(_middle(row.charged_seconds))] if timed else []
        table.add_row(*map(escape, cells), style="bold" if row.default else None)
    return table


def _run_table(metric: Metric, rows: Sequence[RunRow], *, several: bool, wide: bool) -> Table:
    table = _table()
    treated = len({row.series.batch_norm for row in rows}) > 1
    names = ["run"] * several + ["BatchNorm"] * treated
    for name in names:
        table.add_column(name)
    for name in ["at the end", "best", "seeds", *["epochs", "steps"] * wide, "training"]:
        table.add_column(name, justify="right")
    if wide:
        table.add_column("device")
    for row in rows:
        cells = [row.run] * several + [row.series.batch_norm or "running"] * treated
        best = _value(metric, row.best) if wide else say_value(metric, _middle(row.best))
        cells += [_value(metric, row.final), best, str(len(row.seeds))]
        cells += [say_number(_middle(row.epochs)), say_number(_middle(row.steps))] if wide else []
        cells += [say_duration(_middle(row.train_seconds))]
        cells += [_device(row)] if wide else []
        table.add_row(*map(escape, cells))
    return table


def _device(row: RunRow) -> str:
    number = f"{row.num_devices} × " if row.num_devices not in (None, 1) else ""
    return f"{number}{row.device or '-'}"


def _table(title: str | None = None) -> Table:
    return Table(
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
        header_style="bold",
    )


def _put(console: Console, table: Table) -> None:
    """On a narrow terminal words are broken rather than cut off."""
    for column in table.columns:
        column.overflow = "fold"
    console.print(table)


def _unmatched(row: MainRow) -> str:
    found = row.unmatched
    assert found is not None
    seeds = (
        f" in {found.num_seeds} of {row.final.num_seeds} seeds" if row.final.num_seeds > 1 else ""
    )
    if found.at_least.mean <= 0:
        return f"Better at its end than the baseline ever was{seeds}."
    return (
        f"At {say_axis(row.axis, 1)} {say_number(found.averaged_from.mean)} for the first time "
        f"better than the baseline ever was{seeds}: never matched by the baseline in "
        f"{say_number(found.baseline_end.mean)} {say_axis(row.axis)}, so more than "
        f"{say_number(found.at_least.mean)} saved."
    )


def _by_seed(saving: TargetSaving) -> str:
    """Each seed's own saving, where a mean would leave some out."""
    return ", ".join(say_saved(s.saved) for s in saving.by_seed)


def _longest(row: WindowRow, axis: Axis) -> str:
    if row.headline is not None:
        amount = row.headline.epochs if axis == "epoch" else row.headline.steps
        return "-" if amount is None else f"{_plus_minus(amount.saved)}"
    if row.unmatched is None:
        return "-"
    bound = f"> {say_number(row.unmatched.at_least.mean)}"
    num_seeds = row.final.num_seeds if row.final is not None else row.unmatched.num_seeds
    if row.unmatched.num_seeds == num_seeds:
        return bound
    return f"{bound} in {row.unmatched.num_seeds} of {num_seeds}"


def _percent(amount: Amount) -> str:
    return "" if amount.percent is None else f"{amount.percent:.0f}%"


def _plus_minus(number: Mean) -> str:
    return say_number(number.mean) + ("" if number.sd is None else f" ± {say_number(number.sd)}")


def _range(number: Mean) -> str:
    return "" if number.sd is None else f"{say_number(number.low)} to {say_number(number.high)}"


def _middle(number: Mean | None) -> float | None:
    return None if number is None else number.mean


def _value(metric: Metric, number: Mean | None) -> str:
    if number is None:
        return "-"
    spread = "" if number.sd is None else f" ± {say_spread(metric, number.sd, number.mean)}"
    return f"{say_value(metric, number.mean)}{spread}"


def _say(console: Console, sentence: str, bullet: str = "") -> None:
    """A sentence, its further lines under its first word."""
    indent = " " * len(bullet)
    lines = textwrap.wrap(
        sentence,
        console.width,
        initial_indent=bullet,
        subsequent_indent=indent,
        break_on_hyphens=False,
    )
    console.print(Text("\n".join(lines)))
