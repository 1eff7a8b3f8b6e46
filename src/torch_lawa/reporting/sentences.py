"""What a report says in words: where averaging lost, what limits the numbers, how they came about.

No sentence is written for effect: each says what some rows of the metrics show.
"""

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from torch_lawa.reporting.curves import Curve
from torch_lawa.reporting.runs import Run, Series
from torch_lawa.reporting.savings import Axis, Comparison, Metric
from torch_lawa.reporting.summary import MainRow, RecipeReport, TargetSaving, WindowRow
from torch_lawa.reporting.wording import (
    say_axis,
    say_difference,
    say_number,
    say_stretches,
)

__all__ = ["how_it_was_counted", "limits_of", "notes_on", "where_it_lost"]


def where_it_lost(
    metric: Metric, axis: Axis, main: Sequence[MainRow], windows: Sequence[WindowRow]
) -> tuple[str, ...]:
    """Where the averages were behind, run by run: the default one first, then the others."""
    said = []
    for run in dict.fromkeys(row.run for row in windows):
        own = [row for row in windows if row.run == run]
        for row in own:
            if row.default:
                said.append(_behind(run, metric, axis, row))
        said += [s for row in main if row.averaged_run == run for s in _late(row)]
        said += _others(run, axis, [row for row in own if not row.default])
    return tuple(said)


def _behind(run: str, metric: Metric, axis: Axis, row: WindowRow) -> str:
    who = f"{run}, {row.series.label}"
    share = f"{row.num_behind} of {row.num_compared} evaluations of all seeds"
    if not row.behind:
        scattered = f" ({share} were)" if row.num_behind else ""
        return f"{who}: at no time behind its raw weights in most seeds{scattered}."
    worst = max(row.behind, key=lambda s: float("inf") if s.worst_by is None else s.worst_by)
    by = "not finite" if worst.worst_by is None else f"by {say_difference(metric, worst.worst_by)}"
    return (
        f"{who}: behind its raw weights in most seeds at {say_stretches(row.behind, axis)} "
        f"({share}), at worst {by} at {say_axis(axis, 1)} {say_number(worst.worst_at)}."
    )


def _late(row: MainRow) -> list[str]:
    """Where the average came later to a value of the baseline's own, or never."""
    if row.against == "usual":
        return []
    who = f"{row.averaged_run}, {row.averaged.label}"
    other = "its" if row.baseline_run == row.averaged_run else f"{row.baseline_run},"
    whose = f"of {other} {row.baseline.label}"
    said = []
    if row.headline is None and row.unmatched is None:
        said.append(f"{who}: never ahead of the value {whose}, so there is no saving.")
    for name, saving in (("final", row.final), ("best", row.best)):
        never = sum(s.averaged_at is None for s in saving.by_seed)
        later = sum(s.saved is not None and s.saved < 0 for s in saving.by_seed)
        parts = [f"later in {later}"] * bool(later) + [f"never in {never}"] * bool(never)
        if parts:
            seeds = "seed" if saving.num_seeds == 1 else "seeds"
            said.append(
                f"{who}: came to the {name} value {whose} {' and '.join(parts)} of "
                f"{saving.num_seeds} {seeds}{_by_seed(saving, row.axis)}."
            )
    return said


def _by_seed(saving: TargetSaving, axis: Axis) -> str:
    saved = ["never" if s.saved is None else say_number(s.saved) for s in saving.by_seed]
    return f" ({say_axis(axis)} saved by seed: {', '.join(saved)})"


def _others(run: str, axis: Axis, rows: Sequence[WindowRow]) -> list[str]:
    if not rows:
        return []
    lost = [
        f"{row.series.label} at {say_stretches(row.behind, axis)}" for row in rows if row.behind
    ]
    never = [row.series.label for row in rows if not row.behind]
    said = []
    if lost:
        said.append(f"{run}, other averages behind in most seeds: {'; '.join(lost)}.")
    if never:
        said.append(f"{run}, other averages never behind in most seeds: {'; '.join(never)}.")
    return said


def limits_of(compared: Comparison, seeds: Sequence[Any]) -> tuple[str, ...]:
    """What limits one comparison: seeds that only one has, ends and intervals that differ."""
    axis = compared.axis
    said = []
    alone = [
        seed
        for seed in {**compared.baseline, **dict.fromkeys(seeds)}
        if seed not in compared.averaged
    ]
    if alone:
        names = ", ".join(map(str, alone))
        said.append(f"Only one of the two has seed {names}: left out.")
    pairs = [(compared.baseline[seed], curve) for seed, curve in compared.averaged.items()]
    gaps = [(_interval(raw), _interval(averaged)) for raw, averaged in pairs]
    differ = [(a, b) for a, b in gaps if a is not None and b is not None and a != b]
    if differ:
        raw, averaged = (say_number(gap) for gap in differ[0])
        said.append(
            f"The baseline was evaluated every {raw} {say_axis(axis)}, the average every "
            f"{averaged}: where each first reached a value is known no closer than that."
        )
    ends = [(raw.at[-1], averaged.at[-1]) for raw, averaged in pairs]
    if any(a != b for a, b in ends):
        a, b = next((a, b) for a, b in ends if a != b)
        said.append(
            f"The baseline ended at {say_axis(axis, 1)} {say_number(a)}, the average at "
            f"{say_number(b)}."
        )
    return tuple(said)


def _interval(curve: Curve) -> float | None:
    """The usual distance from one evaluation to the next."""
    gaps = [b - a for a, b in zip(curve.at, curve.at[1:], strict=False)]
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
        if "seconds" not in run.axes:
            said.append(
                f"{run.name}: some rows have no `train_seconds`, or they run backwards: time and "
                "GPU-hours are not known."
            )
        elif "gpu_hours" not in run.axes:
            said.append(
                f"{run.name}: trained on no GPU, or rows do not say on how many: GPU-hours are "
                "not known."
            )
    return tuple(said)


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
        "stopped there. Noise therefore helps whichever series is noisier.",
        "The saving at a value is what the baseline took to reach it, minus what the averaged "
        "weights took, seed by seed; then the mean, the standard deviation and the range over "
        "the seeds in which both got there.",
        f"The headline is the paper's: the longest stretch ({axes}) until the baseline matches "
        "the averaged weights. One value for all seeds, reached by both in every seed, and among "
        "those the one with the longest mean saving. As a maximum over values it flatters; the "
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
