"""What is seen, in a sentence for each section of the page: numbers of the report, no praise."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

from lawa_lab.report.savings import Axis, Metric
from lawa_lab.report.scenes import plain
from lawa_lab.report.summary import (
    Amount,
    MainRow,
    Mean,
    MetricReport,
    RunRow,
    TargetSaving,
    WindowRow,
)
from lawa_lab.report.wording import (
    say_axis,
    say_difference,
    say_number,
    say_stretches,
    say_value,
)

__all__ = [
    "seen_against_others",
    "seen_at_targets",
    "seen_between",
    "seen_early",
    "seen_in_runs",
    "seen_in_windows",
    "the_finding",
]

Name: TypeAlias = Callable[[WindowRow], str]  # what tells the rows of a section apart


def the_finding(recipe: str, report: MetricReport, rows: Sequence[MainRow]) -> list[str]:
    """The headline, and at once how far it flatters."""
    row = rows[0]
    metric, axis = report.metric, row.axis
    average = "the average" if row.averaged.k is None else f"the average of k = {row.averaged.k}"
    policy = row.baseline.batch_norm
    baseline = "the raw weights" + (f" (BatchNorm {policy})" if policy else "")
    begin = f"{recipe}, {row.averaged_run}: {average}"
    amount = amount_on(axis, row.headline)
    if row.headline is None or amount is None:
        if row.unmatched is None:
            return [f"{begin} was never ahead of {baseline} in {plain(metric.name)}: no saving."]
        found = (
            f"{begin} had a better {plain(metric.name)} than {baseline} ever reached, for the "
            f"first time at {axis} {say_number(row.unmatched.averaged_from.mean)} (in "
            f"{row.unmatched.num_seeds} of {_seeds(row.final.num_seeds)})."
        )
    else:
        found = (
            f"{begin} reached a {plain(metric.name)} of {say_value(metric, row.headline.target)} "
            f"at {axis} {say_number(amount.averaged_at.mean)}, {baseline} at {axis} "
            f"{say_number(amount.baseline_at.mean)}: {saved(amount, axis)} earlier."
        )
    honest = (
        f"{_how_chosen(row, axis)}The raw weights' own final value: {_at(row.final, axis)}. Their "
        f"best value: {_at(row.best, axis)}."
    )
    if row.unmatched is not None and row.headline is not None:
        honest += (
            f" At {axis} {say_number(row.unmatched.averaged_from.mean)} the average was for the "
            "first time better than they ever were, in "
            f"{row.unmatched.num_seeds} of {_seeds(row.final.num_seeds)}."
        )
    others = [
        "Against raw weights evaluated as usual, with running BatchNorm statistics, the "
        f"longest stretch is {saved(found_amount, axis)}; part of that is the BatchNorm's."
        for other in rows[1:]
        if other.against == "usual" and (found_amount := amount_on(axis, other.headline))
    ]
    return [found, " ".join([honest, *others])]


def seen_in_windows(metric: Metric, rows: Sequence[WindowRow], axis: Axis, name: Name) -> str:
    """Which window saved most and least, and which ended best and worst."""
    parts = []
    ahead = [(a.saved.mean, row) for row in rows if (a := amount_on(axis, row.headline))]
    if len(ahead) > 1:
        (most, longest), (least, shortest) = max(ahead, key=_first), min(ahead, key=_first)
        parts.append(
            f"The longest stretch is {_count(most, axis)} with {name(longest)} and "
            f"{_count(least, axis)} with {name(shortest)}."
        )
    parts += [
        f"{name(row)} was never ahead in every seed."
        for row in rows
        if row.headline is None and row.unmatched is None
    ]
    ended = [(row.final.mean, row) for row in rows if row.final]
    if len(ended) > 1:
        order = sorted(ended, key=_first, reverse=metric.better == "higher")
        (good, first), (bad, last) = order[0], order[-1]
        parts.append(
            f"At the end {name(first)} is best with {say_value(metric, good)}, {name(last)} worst"
            f" with {say_value(metric, bad)}{_compared_with_seeds(metric, good - bad, rows)}."
        )
    return " ".join(parts)


def seen_between(
    metric: Metric, default: WindowRow, other: WindowRow, axis: Axis, name: Name
) -> str:
    """Another average beside the default one."""
    ours, theirs = (amount_on(axis, row.headline) for row in (default, other))
    parts = [
        f"Longest stretch: {_or_none(theirs, axis)} with {name(other)}, "
        f"{_or_none(ours, axis)} with {name(default)}."
    ]
    if default.final and other.final:
        better = other.final.mean - default.final.mean
        better = -better if metric.better == "lower" else better
        word = "level" if better == 0 else "ahead" if better > 0 else "behind"
        by = f" by {say_difference(metric, abs(better))}" if better else ""
        parts.append(
            f"At the end {name(other)} is {word}{by}"
            f"{_compared_with_seeds(metric, better, (default, other))}."
        )
    parts.append(
        f"Behind the raw weights of their moment: {name(other)} in {other.num_behind} of "
        f"{other.num_compared} evaluations, {name(default)} in {default.num_behind} of "
        f"{default.num_compared}."
    )
    return " ".join(parts)


def seen_in_runs(metric: Metric, rows: Sequence[RunRow], name: Callable[[RunRow], str]) -> str:
    """Where raw weights ended."""
    ends = [f"{say_value(metric, row.final.mean)} with {name(row)}" for row in rows if row.final]
    return f"Raw weights end at {_and(ends)}." if ends else ""


def seen_against_others(metric: Metric, rows: Sequence[MainRow]) -> str:
    """The average of one run against the raw weights of another, as they are usually evaluated."""
    parts = []
    for row in rows:
        if row.baseline.batch_norm is not None:
            continue
        amount = amount_on(row.axis, row.headline)
        who = f"The average of {row.averaged_run} (k = {row.averaged.k})"
        if row.headline is None or amount is None:
            parts.append(f"{who} has no stretch ahead of {row.baseline_run} in every seed.")
        else:
            parts.append(
                f"{who} reached {say_value(metric, row.headline.target)} at {row.axis} "
                f"{say_number(amount.averaged_at.mean)}, {saved(amount, row.axis)} before "
                f"the raw weights of {row.baseline_run}; "
                f"the final value of these: {_at(row.final, row.axis)}."
            )
    return " ".join(parts)


def seen_early(metric: Metric, rows: Sequence[WindowRow], axis: Axis, end: float) -> str:
    """Which averages were behind at the start, and how far."""
    parts = []
    for row in rows:
        early = [stretch for stretch in row.behind if stretch.begin <= end]
        if early:
            worst = max(early, key=lambda s: float("inf") if s.worst_by is None else s.worst_by)
            by = "not finite" if worst.worst_by is None else say_difference(metric, worst.worst_by)
            parts.append(f"{row.series.label} at {say_stretches(early, axis)} (at worst {by})")
    before = f"Up to {axis} {say_number(end)}"
    if not parts:
        return f"{before} no average was behind the raw weights in most seeds."
    return f"{before} these were behind the raw weights in most seeds: {'; '.join(parts)}."


def seen_at_targets(metric: Metric, row: MainRow) -> str:
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
    text = (
        f"The mean saving is largest, {_count(best, row.axis)}, at "
        f"{say_value(metric, best_target)}; at {say_value(metric, hardest)}, the hardest value "
        f"that both reached in {num_seeds} of {_seeds(row.final.num_seeds)}, it is "
        f"{_count(last, row.axis)}."
    )
    amount = amount_on(row.axis, row.headline)
    if amount is not None and best > amount.saved.mean:
        text += " (The longest stretch is over values that the average had, so it is shorter.)"
    if row.unmatched is not None:
        text += (
            f" In {row.unmatched.num_seeds} of {_seeds(row.final.num_seeds)} the average went on "
            "to values that the raw weights never reached."
        )
    return text


def amount_on(axis: str, saving: TargetSaving | None) -> Amount | None:
    """The saving on the axis of the report."""
    if saving is None:
        return None
    return saving.epochs if axis == "epoch" else saving.steps


def saved(amount: Amount, axis: Axis) -> str:
    """Such as "73.3 epochs or 72% (72 to 75 by seed)"."""
    percent = "" if amount.percent is None else f" or {amount.percent:.0f}%"
    return f"{_count(amount.saved.mean, axis)}{percent}{_spread(amount.saved)}"


def _how_chosen(row: MainRow, axis: Axis) -> str:
    """Where the headline's value is from; values it could not choose may have saved more."""
    longest = amount_on(axis, row.headline)
    if longest is None:
        return ""
    own = [a.saved.mean for each in (row.final, row.best) if (a := amount_on(axis, each))]
    if max(own, default=0.0) <= longest.saved.mean:
        return "The value is the one with the longest stretch, so it flatters. "
    return (
        "Of the values that the average had and both reached in every seed, it is the one with the "
        "longest stretch; at others more was saved. "
    )


def _at(saving: TargetSaving, axis: Axis) -> str:
    """The saving at a value of the baseline's own, which the average may never have reached."""
    amount = amount_on(axis, saving)
    never = saving.num_seeds - saving.num_both
    seeds = _seeds(saving.num_seeds)
    if amount is None:
        return f"never reached by the average in {seeds}"
    text = f"{_count(amount.saved.mean, axis)} saved"
    if never:
        return f"{text} in {saving.num_both} of {seeds}, never reached in the others"
    return f"{text}{_spread(amount.saved)}"


def _or_none(amount: Amount | None, axis: Axis) -> str:
    return "none" if amount is None else _count(amount.saved.mean, axis)


def _count(number: float, axis: Axis) -> str:
    return f"{say_number(number)} {say_axis(axis, number)}"


def _spread(mean: Mean) -> str:
    if mean.num_seeds < 2:
        return ""
    return f" ({say_number(mean.low)} to {say_number(mean.high)} by seed)"


def _seeds(number: int) -> str:
    return f"{number} seed{'s' * (number != 1)}"


def _compared_with_seeds(metric: Metric, difference: float, rows: Sequence[WindowRow]) -> str:
    """A difference says little where seeds differ more."""
    spreads = [row.final.sd for row in rows if row.final and row.final.sd is not None]
    if not spreads or difference == 0:
        return ""
    word = "more" if max(spreads) > abs(difference) else "less"
    return f"; seeds differ by {word} (standard deviation {say_difference(metric, max(spreads))})"


def _and(parts: Sequence[str]) -> str:
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def _first(pair: tuple[float, WindowRow]) -> float:
    return pair[0]
