"""What a report says in words: where averaging lost, what limits the numbers, how they came about.

No sentence is written for effect: each says what some rows of the metrics show.
"""

import itertools
import statistics
from collections.abc import Iterable, Sequence

from lawa_lab.report.curves import Curve
from lawa_lab.report.runs import Run, Series
from lawa_lab.report.savings import Axis, Line, Metric
from lawa_lab.report.summary import MainRow, RecipeReport, WindowRow
from lawa_lab.report.wording import (
    say_axis,
    say_difference,
    say_number,
    say_saved,
    say_stretches,
)

__all__ = ["how_it_was_counted", "limits_of", "notes_on", "where_it_lost"]


def where_it_lost(
    metric: Metric, axis: Axis, main: Sequence[MainRow], windows: Sequence[WindowRow]
) -> tuple[str, ...]:
    """Where the averages were behind, run by run: the default one first, then the others."""
    runs = dict.fromkeys(row.run for row in windows)
    said = []
    for run in runs:
        prefix = f"{run}, " if len(runs) > 1 else ""
        own = [row for row in windows if row.run == run]
        said += [_behind(prefix, metric, axis, row) for row in own if row.default]
        said += [_late(prefix, row) for row in _once([r for r in main if r.averaged_run == run])]
        said += _others(prefix, axis, [row for row in own if not row.default])
    return tuple(sentence for sentence in said if sentence)


def _once(rows: Sequence[MainRow]) -> list[MainRow]:
    """The first row against each run, which is the one with BatchNorm treated alike."""
    return list({row.baseline_run: row for row in reversed(rows)}.values())[::-1]


def _behind(prefix: str, metric: Metric, axis: Axis, row: WindowRow) -> str:
    who = f"{prefix}{row.series.label}"
    most, all_seeds = _in_most([row]), " of all seeds" if _in_most([row]) else ""
    share = f"{row.num_behind} of {row.num_compared} evaluations{all_seeds}"
    if not row.behind:
        scattered = f" ({share} were)" if row.num_behind else ""
        return f"{who}: at no time behind its raw weights{most}{scattered}."
    worst = max(row.behind, key=lambda s: float("inf") if s.worst_by is None else s.worst_by)
    by = "not finite" if worst.worst_by is None else f"by {say_difference(metric, worst.worst_by)}"
    return (
        f"{who}: behind its raw weights{most} at {say_stretches(row.behind, axis)} "
        f"({share}), at worst {by} at {say_axis(axis, 1)} {say_number(worst.worst_at)}."
    )


def _late(prefix: str, row: MainRow) -> str:
    """Where the average came later to a value of the baseline's own, or never."""
    same = row.baseline_run == row.averaged_run
    whose = "its" if same else f"{row.baseline_run}'s"
    parts = []
    if row.headline is None and row.unmatched is None:
        parts.append(f"never ahead of {whose} raw weights, so there is no saving")
    for name, saving in (("final", row.final), ("best", row.best)):
        never = sum(s.averaged_at is None for s in saving.by_seed)
        later = sum(s.saved is not None and s.saved < 0 for s in saving.by_seed)
        if not never and not later:
            continue
        times = [f"later in {later}"] * bool(later) + [f"never in {never}"] * bool(never)
        seeds = f"{saving.num_seeds} seed{'s' if saving.num_seeds > 1 else ''}"
        saved = ", ".join(say_saved(s.saved) for s in saving.by_seed)
        by_seed = f" ({say_axis(row.axis)} saved by seed: {saved})" if later else ""
        parts.append(
            f"reached the {name} value of {whose} raw weights {' and '.join(times)} of {seeds}"
            f"{by_seed}"
        )
    return f"{prefix}{row.averaged.label}: {'; '.join(parts)}." if parts else ""


def _others(prefix: str, axis: Axis, rows: Sequence[WindowRow]) -> list[str]:
    lost = [
        f"{row.series.label} at {say_stretches(row.behind, axis)}" for row in rows if row.behind
    ]
    never = [row.series.label for row in rows if not row.behind]
    said = []
    if lost:
        said.append(f"{prefix}other averages behind{_in_most(rows)}: {'; '.join(lost)}.")
    if never:
        some = "; ".join(never)
        said.append(f"{prefix}other averages at no time behind{_in_most(rows)}: {some}.")
    return said


def _in_most(rows: Sequence[WindowRow]) -> str:
    several = any(row.final is not None and row.final.num_seeds > 1 for row in rows)
    return " in most seeds" if several else ""


def limits_of(baseline: Line, averaged: Line, metric: Metric, axis: Axis) -> tuple[str, ...]:
    """What limits one comparison: seeds that only one has, ends and intervals that differ."""
    raw, own = (run.curves(series, metric, axis) for run, series in (baseline, averaged))
    said = []
    alone = [str(seed) for seed in {**raw, **own} if seed not in raw or seed not in own]
    if alone:
        said.append(f"Only one of the two has seed {', '.join(alone)}: left out.")
    pairs = [(raw[seed], curve) for seed, curve in own.items() if seed in raw]
    gaps = [(_interval(a), _interval(b)) for a, b in pairs]
    differ = [(a, b) for a, b in gaps if a is not None and b is not None and a != b]
    if differ:
        a, b = differ[0]
        said.append(
            f"The baseline was evaluated every {_every(a, axis)}, the average every "
            f"{_every(b, axis)}: only evaluations that both have count here, and where each first "
            "reached a value is known no closer than that."
        )
    ends = [(a.at[-1], b.at[-1]) for a, b in pairs if a.at[-1] != b.at[-1]]
    if ends:
        said.append(
            f"The baseline ended at {say_axis(axis, 1)} {say_number(ends[0][0])}, the average at "
            f"{say_number(ends[0][1])}."
        )
    return tuple(said)


def _every(gap: float, axis: Axis) -> str:
    return say_axis(axis, 1) if gap == 1 else f"{say_number(gap)} {say_axis(axis)}"


def _interval(curve: Curve) -> float | None:
    """The usual distance from one evaluation to the next."""
    gaps = [b - a for a, b in itertools.pairwise(curve.at)]
    return round(statistics.median(gaps), 6) if gaps else None


def notes_on(runs: Sequence[Run], axis: Axis) -> tuple[str, ...]:
    """What limits all numbers of a recipe."""
    said = []
    for run in runs:
        if len(run.seeds) == 1:
            said.append(f"{run.name}: one seed, so there is no spread, and luck is not told apart.")
        ends = dict.fromkeys(_ends(run, axis))
        if len(ends) > 1:
            places = ", ".join(say_number(end) for end in ends)
            said.append(f"{run.name}: seeds ended at different {say_axis(axis)}: {places}.")
        timeless = [s for s in run.series if "seconds" not in run.axes(s)]
        if timeless:
            which = "" if len(timeless) == len(run.series) else f" ({_labels(timeless)})"
            said.append(
                f"{run.name}{which}: rows have no `train_seconds`, or they run backwards: time and "
                "GPU-hours are not known."
            )
        elif any("gpu_hours" not in run.axes(s) for s in run.series):
            said.append(
                f"{run.name}: trained on no GPU, or rows do not say on how many: GPU-hours are "
                "not known."
            )
    return tuple(said)


def _labels(series: Iterable[Series]) -> str:
    return "; ".join(each.label for each in series)


def _ends(run: Run, axis: Axis) -> Iterable[float]:
    for seed in run.seeds:
        rows = run.rows_of(Series(), seed)
        if rows:
            yield rows[-1][axis]


def how_it_was_counted(recipes: Sequence[RecipeReport]) -> tuple[str, ...]:
    """How each number came about."""
    axes = " or ".join(dict.fromkeys(say_axis(recipe.axis) for recipe in recipes))
    return (
        "A series reaches a value at the first evaluation where it is as good or better. Once is "
        "enough, for raw and averaged weights alike: somebody who watches the run would have "
        "stopped there. Noise therefore helps whichever series is noisier. Where one was evaluated "
        "more often than the other, only evaluations that both have count.",
        "The saving at a value is what the baseline took to reach it, minus what the averaged "
        "weights took, seed by seed; then the mean, the standard deviation and the range over "
        "the seeds in which both got there.",
        f"The headline is the paper's: the longest stretch ({axes}) until the baseline matches "
        "the averaged weights. One value for all seeds, which the average had somewhere and both "
        "reached in every seed, and among those the one with the longest mean saving; steps, time "
        "and GPU-hours are those to the same value. As a maximum over values it flatters; the "
        "savings at the baseline's own final and best values, each seed its own, do not choose.",
        "Where the averaged weights got better than the baseline ever was, there is no saving to "
        "count but a lower bound: from there to the end of the baseline.",
        "Alike: raw weights with BatchNorm statistics made in the same way as the average's, "
        "which tells what averaging saved. Usual: raw weights with their running statistics, "
        "part of the gain over which is the BatchNorm's.",
        "Time is training plus all that a series itself cost until then: its evaluations and "
        "BatchNorm passes; for an average also collecting, averaging, and the usual evaluations "
        "of the raw weights. What other series cost is not charged. GPU-hours are that time, "
        "times the number of GPUs.",
        "Behind: evaluations at which the raw weights of that very moment were better; a stretch "
        "is evaluations in a row in which that was so in most of the seeds.",
    )
