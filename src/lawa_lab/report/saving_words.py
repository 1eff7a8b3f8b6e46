"""What a report says about savings inside single runs: what was found, and what limits it.

Each sentence states what some rows of the metrics show. Terminal, page and demo use the same ones.
"""

import itertools
import statistics
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from lawa_lab.report.curves import Axis, Curve, Metric
from lawa_lab.report.runs import Run, Series
from lawa_lab.report.savings import RunSeries, Saving
from lawa_lab.report.words import (
    plain,
    say_amount,
    say_axis,
    say_by_seed,
    say_count,
    say_difference,
    say_number,
    say_seeds,
    say_series,
    say_value,
)

if TYPE_CHECKING:
    from lawa_lab.report.summary import MainRow, WindowRow

__all__ = [
    "caveat",
    "definitions",
    "finding",
    "limits_of",
    "limits_said",
    "losses",
    "notes_on",
    "seen_at_targets",
    "unmatched",
]


def finding(recipe: str, metric: Metric, row: "MainRow") -> str:
    """The headline of one comparison in a sentence."""
    axis = row.axis
    baseline = "the raw weights"
    if row.baseline.batch_norm:
        baseline += f" (BatchNorm {row.baseline.batch_norm})"
    begin = f"{recipe}, {row.averaged_run}: {_the_average(row.averaged)}"
    amount = None if row.headline is None else row.headline.on(axis)
    if row.headline is not None and amount is not None:
        return (
            f"{begin} reached a {plain(metric.name)} of {say_value(metric, row.headline.target)} "
            f"at {axis} {say_number(amount.averaged_at.mean)}, {baseline} at {axis} "
            f"{say_number(amount.baseline_at.mean)}: {say_amount(amount, axis)}."
        )
    if row.unmatched is None:
        earlier = f"earlier than {baseline}{_in_mean(row)}"
        return f"{begin} reached no {plain(metric.name)} {earlier}: no saving."
    num_seeds = row.final.num_seeds
    seeds = f" (in {row.unmatched.num_seeds} of {num_seeds} seeds)" if num_seeds > 1 else ""
    return (
        f"{begin} reached a better {plain(metric.name)} than {baseline} ever did, first at {axis} "
        f"{say_number(row.unmatched.averaged_from.mean)}{seeds}."
    )


def caveat(row: "MainRow") -> str:
    """How optimistic the headline is: the saving at a value that was not chosen for it."""

    def at(saving: Saving) -> str:
        return f"at the raw weights' own {saving.what} value, {_at(saving, row.axis)}"

    longest = None if row.headline is None else row.headline.on(row.axis)
    if longest is None:
        return f"A{at(row.final)[1:]}."
    more = [
        saving
        for saving in (row.final, row.best)
        if saving.num_both == saving.num_seeds  # else the mean is that of other seeds
        and (amount := saving.on(row.axis)) is not None
        and amount.saved.mean > longest.saved.mean
    ]
    if not more:
        begin = "This is the largest saving at any value of the average, so it is optimistic"
        return f"{begin}: {at(row.final)}."
    return f"Targets are values of the average; at others more was saved: {at(more[0])}."


def unmatched(row: "MainRow") -> str:
    """A saving without an upper bound, as a sentence; empty if there is none."""
    found = row.unmatched
    if found is None:
        return ""
    seeds = row.final.num_seeds
    where = f" ({found.num_seeds} of {seeds} seeds)" if seeds > 1 else ""
    if found.at_least.mean <= 0:
        return f"At its end{where} the average was better than the baseline ever was."
    return (
        f"At {row.axis} {say_number(found.averaged_from.mean)}{where} the average was better than "
        f"the baseline ever was: not matched in {say_number(found.baseline_end.mean)} "
        f"{say_axis(row.axis)}, so more than {say_number(found.at_least.mean)} saved."
    )


def losses(
    metric: Metric, main: Sequence["MainRow"], windows: Sequence["WindowRow"]
) -> tuple[str, ...]:
    """Where the main average of each run lost against its own raw weights, one sentence each."""
    several = len({row.run for row in windows}) > 1
    said = []
    for row in windows:
        if row.default:
            parts = [_behind(metric, row, main)]
            own = [r for r in main if r.averaged_run == r.baseline_run == row.run]
            for compared in [r for r in own if r.averaged == row.series][:1]:
                parts += _late(compared)
            prefix = f"{row.run}, " if several else ""
            said.append(f"{prefix}{row.series.label}: {'; '.join(parts)}.")
    return tuple(said)


def _behind(metric: Metric, row: "WindowRow", main: Sequence["MainRow"]) -> str:
    if not row.num_behind:
        return "never behind its raw weights"
    text = f"behind its raw weights in {row.num_behind} of {row.num_compared} evaluations"
    worst = row.worst
    if worst is None:
        return f"{text}, never in most seeds at once"
    axis = main[0].axis if main else "epoch"
    at = f"{axis} {say_number(worst.worst_at)}"
    if worst.worst_by is None:
        return f"{text}, and not finite at {at}"
    return f"{text}, at worst by {say_difference(metric, worst.worst_by)} at {at}"


def _late(row: "MainRow") -> list[str]:
    """At which of the baseline's own values the average was later, or never reached it."""
    parts = []
    if row.headline is None and row.unmatched is None:
        parts.append(f"reached no value earlier than its raw weights{_in_mean(row)}: no saving")
    for name, saving in (("final", row.final), ("best", row.best)):
        never = sum(s.averaged_at is None for s in saving.by_seed)
        later = sum(s.saved is not None and s.saved < 0 for s in saving.by_seed)
        of_seeds = f" of {saving.num_seeds} seeds" if saving.num_seeds > 1 else ""
        if later:
            where = f" in {later}{of_seeds}" if of_seeds else ""
            rarely = f" and never in {never}" if never else ""
            parts.append(f"reached the {name} raw value later{where}{rarely}")
        elif never:
            where = f" in {never}{of_seeds}" if of_seeds else ""
            parts.append(f"never reached the {name} raw value{where}")
    return parts


def seen_at_targets(metric: Metric, row: "MainRow") -> str:
    """How the saving changes towards hard targets."""
    curve = row.curve
    num_seeds = max(curve.num_both, default=0)
    known = [
        (target, value)
        for target, value, num_both in zip(curve.target, curve.saved, curve.num_both, strict=True)
        if value is not None and num_both == num_seeds
    ]
    if not known:
        return ""
    best_target, best = max(known, key=lambda pair: pair[1])
    hardest, last = known[-1]
    seeds = f" in {num_seeds} of {row.final.num_seeds} seeds" if row.final.num_seeds > 1 else ""
    text = f"The mean saving is largest, {say_count(best, row.axis)}, at "
    if hardest != best_target:
        text += f"{say_value(metric, best_target)}; at "
    text += f"{say_value(metric, hardest)}, the hardest value that both reached{seeds}"
    text += "." if hardest == best_target else f", it is {say_count(last, row.axis)}."
    amount = None if row.headline is None else row.headline.on(row.axis)
    if amount is not None and best > amount.saved.mean:
        text += " (The headline considers only values that the average had, so it is smaller.)"
    return text


def _in_mean(row: "MainRow") -> str:
    """Single seeds may have saved something."""
    num_seeds = row.final.num_seeds
    return f" (mean of {say_seeds(num_seeds)})" if num_seeds > 1 else ""


def _the_average(series: Series) -> str:
    if series.weights != "averaged":
        return f"the {say_series(series)} average"
    return "the average" if series.k is None else f"the average of k = {series.k}"


def _at(saving: Saving, axis: Axis) -> str:
    """The saving at a value of the baseline's own, which the average may never have reached."""
    amount = saving.on(axis)
    seeds = say_seeds(saving.num_seeds)
    if amount is None:
        return f"which the average never reached ({seeds}), there is no saving"
    mean = amount.saved.mean
    text = f"the saving is {say_count(mean, axis)}"
    if saving.num_both < saving.num_seeds:
        return f"{text} in {saving.num_both} of {seeds}; the value is not reached in the others"
    return text + (f" ({say_by_seed(amount.saved)})" if amount.saved.num_seeds > 1 else "")


# ---------------------------------------------------------------- what limits the numbers

_MOST_NAMED = 4  # runs; of more, a note gives their number


def limits_of(
    baseline: RunSeries, averaged: RunSeries, metric: Metric, axis: Axis
) -> tuple[str, ...]:
    """What limits one comparison: missing seeds, different ends and intervals."""
    raw, own = (run.curves(series, metric, axis) for run, series in (baseline, averaged))
    said = []
    alone = [str(seed) for seed in {**raw, **own} if seed not in raw or seed not in own]
    if alone:
        said.append(f"Seeds that only one of the two has are left out: {', '.join(alone)}.")
    pairs = [(raw[seed], curve) for seed, curve in own.items() if seed in raw]
    gaps = [(_interval(a, b), _interval(b, a)) for a, b in pairs]
    differ = [(a, b) for a, b in gaps if a is not None and b is not None and a != b]
    if differ:
        a, b = differ[0]
        said.append(
            f"The baseline was evaluated every {_every(a, axis)}, the average every "
            f"{_every(b, axis)}. Only evaluations of both count, which limits the precision of the "
            f"{say_axis(axis)} saved."
        )
    ends = [(a.at[-1], b.at[-1]) for a, b in pairs if a.at[-1] != b.at[-1]]
    if ends:
        said.append(
            f"The baseline ended at {say_axis(axis, 1)} {say_number(ends[0][0])}, the average at "
            f"{say_number(ends[0][1])}."
        )
    return tuple(said)


def limits_said(rows: Sequence["MainRow"]) -> list[str]:
    """What limits some comparisons, each note once, with those that it is about if not all."""
    about: dict[str, list[str]] = {}
    for row in rows:
        for note in row.notes:
            about.setdefault(note, []).append(row.label)
    return [
        f"{note} ({'; '.join(labels)})" if len(labels) < len(rows) else note
        for note, labels in about.items()
    ]


def _every(gap: float, axis: Axis) -> str:
    return say_axis(axis, 1) if gap == 1 else say_count(gap, axis)


def _interval(curve: Curve, other: Curve) -> float | None:
    """The usual distance from one evaluation to the next, while the other is evaluated as well.

    An average starts later, so before that the raw weights are not evaluated more often.
    """
    both = [at for at in curve.at if other.at[0] <= at <= other.at[-1]]
    gaps = [b - a for a, b in itertools.pairwise(both)]
    return round(statistics.median_low(gaps), 6) if gaps else None


def notes_on(runs: Sequence[Run], axis: Axis) -> tuple[str, ...]:
    """What limits all numbers of a recipe; runs with the same limit share a sentence."""
    found: dict[str, list[str]] = {}
    for run in runs:
        for note in _notes(run, axis):
            found.setdefault(note, []).append(run.name)

    def whose(names: list[str]) -> str:
        if len(names) == len(runs) > 1:
            return "all runs"
        if len(names) > _MOST_NAMED:
            return f"{len(names)} of {len(runs)} runs, such as {names[0]}"
        return "; ".join(names)

    return tuple(f"{whose(names)}: {note}" for note, names in found.items())


def _notes(run: Run, axis: Axis) -> Iterable[str]:
    if len(run.seeds) == 1:
        yield "only one seed, so the result cannot be separated from noise."
    ends = dict.fromkeys(
        rows[-1][axis] for seed in run.seeds if (rows := run.rows_of(Series(), seed))
    )
    if len(ends) > 1:
        places = ", ".join(say_number(end) for end in ends)
        yield f"seeds ended at different {say_axis(axis)} ({places})."
    epochs = [run.rows_of(Series(), seed)[-1:] for seed in run.seeds]
    reached = min((row["epoch"] for own in epochs for row in own if row.get("epoch")), default=None)
    if run.annealed and reached and run.budget_epochs and reached < 0.99 * run.budget_epochs:
        yield (
            f"not finished: its rows end at epoch {say_number(reached)} of "
            f"{say_number(run.budget_epochs)}, before its learning rate has decayed."
        )
    timeless = [s for s in run.series if "seconds" not in run.axes(s)]
    if timeless:
        which = "; ".join(each.label for each in timeless)
        some = "" if len(timeless) == len(run.series) else f" of {which}"
        yield (
            f"time and GPU-hours{some} are unknown, because rows have no `train_seconds` or it "
            "decreases."
        )
    elif any("gpu_hours" not in run.axes(s) for s in run.series):
        yield "GPU-hours are unknown: trained on a CPU, or rows do not name the GPUs."


def definitions(axes: Sequence[Axis]) -> tuple[str, ...]:
    """How each number is defined."""
    units = " or ".join(dict.fromkeys(say_axis(axis) for axis in axes))
    return (
        "A series reaches a value at the first evaluation that is as good or better. Once is "
        "enough, for raw and averaged weights alike, so noise favours the noisier series. "
        "If one was evaluated more often than the other, only evaluations of both count.",
        "The saving at a value is what the baseline took to reach it minus what the average took, "
        "seed by seed; then mean, standard deviation and range over the seeds in which both "
        "reached it.",
        f"The headline (“largest”) is the paper's number: the most {units} until the baseline "
        "matches the average. Its value is the same for all seeds: the average had it, and both "
        "reached it in every seed. Steps, time and GPU-hours are those to the same value. As a "
        "maximum over values it is optimistic. The baseline's own final and best values, separate "
        "for each seed, are not selected.",
        "If the average became better than the baseline ever was, the saving has only a lower "
        "bound: from there to the end of the baseline.",
        "“Alike” compares with raw weights whose BatchNorm statistics were made in the same way as "
        "the average's, which shows what averaging saved. “Usual” compares with raw weights with "
        "running statistics; part of that gain is due to BatchNorm.",
        "Time is training plus everything the series itself has cost so far: its evaluations and "
        "BatchNorm passes, and for an average also collecting, averaging, and the usual "
        "evaluations of the raw weights. The costs of other series are not included. GPU-hours are "
        "that time multiplied by the number of GPUs.",
        "An average is behind if the raw weights at the same step were better. A stretch is a "
        "sequence of evaluations at which this holds in most seeds.",
    )
