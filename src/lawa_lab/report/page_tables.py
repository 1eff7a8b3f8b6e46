"""The tables of the page, from the values of a report."""

from collections.abc import Callable, Sequence

from lawa_lab.report.markup import Markup, table
from lawa_lab.report.runs import Run
from lawa_lab.report.savings import Metric
from lawa_lab.report.scenes import plain
from lawa_lab.report.summary import (
    Amount,
    MainRow,
    Mean,
    MetricReport,
    RunRow,
    TargetSaving,
    Unmatched,
    WindowRow,
)
from lawa_lab.report.wording import (
    say_difference,
    say_duration,
    say_number,
    say_spread,
    say_value,
)

__all__ = ["behind_table", "main_table", "runs_table", "source_table", "target_table", "wide_table"]

_WHAT = {"headline": "longest stretch", "final": "baseline's final", "best": "baseline's best"}
_STEPS_SHOWN = 8  # targets of the table; the figure has them all


def main_table(metric: Metric, rows: Sequence[MainRow], caption: str) -> Markup:
    """A group for each baseline: the longest stretch, and the savings at its final and best."""
    axis = rows[0].axis
    head = ["", "target", f"{axis}s saved", "in %", f"baseline, {axis}", f"average, {axis}"]
    timed = any(_timed(row) for row in rows)
    head += ["time saved"] if timed else []
    hours = any(saving.gpu_hours for row in rows for saving in _savings(row))
    head += ["GPU-hours saved"] if hours else []
    head += ["seeds"]
    groups = []
    for row in rows:
        lines = []
        for saving in _savings(row):
            amount = saving.epochs if axis == "epoch" else saving.steps
            cells = [_WHAT[saving.what], say_value(metric, saving.target), *_amount(amount)]
            cells += [_time(saving.seconds)] if timed else []
            cells += [_hours(saving.gpu_hours)] if hours else []
            lines.append([*cells, f"{saving.num_both} of {saving.num_seeds}"])
        if row.headline is None:
            lines.insert(0, [_WHAT["headline"], "none", *["-"] * (len(head) - 2)])
        if row.unmatched is not None:
            lines.append(_unmatched(row.unmatched, row.final.num_seeds, len(head)))
        groups.append((row.label, lines))
    return table(caption, head, groups)


def wide_table(
    metric: Metric,
    rows: Sequence[WindowRow],
    caption: str,
    axis: str,
    name: Callable[[WindowRow], str],
) -> Markup:
    """A row for each average: what it saved, where it ended, how often it was behind."""
    head = ["", f"longest: {axis}s saved", "at", "final value", "best value"]
    head += ["evaluations behind", "extra time"]
    lines = []
    for row in rows:
        amount = _on(axis, row.headline)
        at = row.headline.target if row.headline is not None else None
        cost = row.charged_seconds.mean if row.charged_seconds else None
        lines.append(
            [
                name(row),
                _saved(amount),
                say_value(metric, at),
                _mean(metric, row.final),
                _mean(metric, row.best),
                f"{row.num_behind} of {row.num_compared}",
                say_duration(cost),
            ]
        )
    return table(caption, head, [(None, lines)])


def behind_table(
    metric: Metric, rows: Sequence[WindowRow], caption: str, axis: str, end: float
) -> Markup:
    """Every stretch up to `end` in which an average was behind the raw weights of its own run."""
    head = ["average", f"from {axis}", f"to {axis}", "evaluations", "worst at", "worst by"]
    lines = [
        [
            row.series.label,
            say_number(stretch.begin),
            say_number(stretch.end),
            str(stretch.num_evaluations),
            say_number(stretch.worst_at),
            "not finite" if stretch.worst_by is None else say_difference(metric, stretch.worst_by),
        ]
        for row in rows
        for stretch in row.behind
        if stretch.begin <= end
    ]
    return table(caption, head, [(None, lines)]) if lines else Markup("")


def target_table(metric: Metric, row: MainRow, caption: str) -> Markup:
    """Some targets from easy to hard, evenly among those of the curve."""
    curve = row.curve
    last = len(curve.target) - 1
    places = sorted({round(last * part / (_STEPS_SHOWN - 1)) for part in range(_STEPS_SHOWN)})
    lines = [
        [
            say_value(metric, curve.target[place]),
            say_number(curve.saved[place]),
            f"{say_number(curve.low[place])} to {say_number(curve.high[place])}"
            if curve.num_both[place] > 1
            else "-",
            str(curve.num_both[place]),
            str(curve.num_averaged[place]),
        ]
        for place in places
    ]
    head = [f"target: {plain(metric.name)}", f"{row.axis}s saved", "range of seeds"]
    head += ["seeds where both got there", "seeds where the average did"]
    return table(caption, head, [(None, lines)])


def runs_table(
    report: MetricReport, raw: Sequence[RunRow], averages: Sequence[WindowRow], caption: str
) -> Markup:
    """Raw weights, then averages: where each ended, and its best."""
    metric = report.metric
    head = ["", f"final {plain(metric.name)}", f"best {plain(metric.name)}", "seeds"]
    rows: list[RunRow | WindowRow] = [*raw, *averages]
    lines = [
        [
            f"{row.run}, {row.series.label}",
            _mean(metric, row.final),
            _mean(metric, row.best),
            str(row.final.num_seeds if row.final else 0),
        ]
        for row in rows
    ]
    return table(caption, head, [(None, lines)])


def source_table(runs: Sequence[Run], reports: dict[str, MetricReport]) -> Markup:
    """Where the numbers come from: recipes, runs, seeds, devices."""
    head = ["recipe", "run", "seeds", "epochs", "steps", "device", "training time", "rows"]
    lines = []
    for run in runs:
        report = reports.get(run.recipe)
        rows = [row for row in report.runs if row.run == run.name] if report else []
        facts = rows[0] if rows else None
        device = facts.device if facts else None
        if device and facts and facts.num_devices:
            device = f"{facts.num_devices} × {device}"
        lines.append(
            [
                run.recipe,
                run.name,
                ", ".join(map(str, run.seeds)),
                say_number(facts.epochs.mean if facts and facts.epochs else None),
                say_number(facts.steps.mean if facts and facts.steps else None),
                device or "-",
                say_duration(facts.train_seconds.mean if facts and facts.train_seconds else None),
                str(len(run.rows)),
            ]
        )
    return table("What the numbers come from", head, [(None, lines)])


def _savings(row: MainRow) -> list[TargetSaving]:
    return [saving for saving in (row.headline, row.final, row.best) if saving is not None]


def _timed(row: MainRow) -> bool:
    return any(saving.seconds is not None for saving in _savings(row))


def _on(axis: str, saving: TargetSaving | None) -> Amount | None:
    if saving is None:
        return None
    return saving.epochs if axis == "epoch" else saving.steps


def _amount(amount: Amount | None) -> list[str]:
    if amount is None:
        return ["-", "-", "-", "-"]
    percent = "-" if amount.percent is None else f"{amount.percent:.0f}%"
    places = [say_number(amount.baseline_at.mean), say_number(amount.averaged_at.mean)]
    return [_saved(amount), percent, *places]


def _saved(amount: Amount | None) -> str:
    """The mean saving and, of several seeds, its range."""
    if amount is None:
        return "-"
    saved = amount.saved
    spread = f" ({say_number(saved.low)} to {say_number(saved.high)})" * (saved.num_seeds > 1)
    return say_number(saved.mean) + spread


def _time(amount: Amount | None) -> str:
    return "-" if amount is None else say_duration(amount.saved.mean)


def _hours(amount: Amount | None) -> str:
    # Adding nothing turns the -0.0 of a small loss into 0.
    return "-" if amount is None else f"{round(amount.saved.mean, 2) + 0.0:.2f}"


def _mean(metric: Metric, number: Mean | None) -> str:
    if number is None:
        return "-"
    mean = say_value(metric, number.mean)
    if number.sd is None:
        return mean
    percent = "%" if mean.endswith("%") else ""
    spread = say_spread(metric, number.sd, number.mean)
    return f"{mean.removesuffix('%')} ± {spread}{percent}"


def _unmatched(unmatched: Unmatched, num_seeds: int, num_cells: int) -> list[str]:
    """Values that the baseline never reached: from when on the average had them."""
    cells = ["beyond its best", "-", f"at least {say_number(unmatched.at_least.mean)}", "-"]
    cells += [f"> {say_number(unmatched.baseline_end.mean)}"]
    cells += [say_number(unmatched.averaged_from.mean)]
    cells += ["-"] * (num_cells - len(cells) - 1)
    return [*cells, f"{unmatched.num_seeds} of {num_seeds}"]
