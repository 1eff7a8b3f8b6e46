"""What a report says of several averages of one run, in sentences."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from lawa_lab.report.curves import Axis, Metric
from lawa_lab.report.runs import Series
from lawa_lab.report.words import say_count, say_difference, say_value

if TYPE_CHECKING:
    from lawa_lab.report.summary import WindowRow

__all__ = ["seen_in_windows"]


def seen_in_windows(
    metric: Metric, rows: Sequence["WindowRow"], axis: Axis, name: Callable[[Series], str]
) -> str:
    """Which of several averages saved most and least, and which ended best and worst.

    Averages whose printed values are equal share a place.
    """
    parts = [_savings(rows, axis, name)]
    parts += [
        f"{name(row.series)} has no saving."
        for row in rows
        if row.headline is None and row.unmatched is None
    ]
    parts.append(_ends(metric, rows, name))
    return " ".join(part for part in parts if part)


def _savings(rows: Sequence["WindowRow"], axis: Axis, name: Callable[[Series], str]) -> str:
    ahead = [(row, a.saved.mean) for row in rows if row.headline and (a := row.headline.on(axis))]
    if len(ahead) < 2:
        return ""
    saved = {name(row.series): value for row, value in ahead}
    groups = _ranked(saved, lambda value: say_count(value, axis), highest=True)
    (most, longest), (least, shortest) = groups[0], groups[-1]
    if len(groups) == 1:
        which = "each of them" if len(ahead) == len(rows) else say_list(longest)
        return f"The largest saving is {most} for {which}."
    return (
        f"The largest saving ranges from {least} for {say_list(shortest)} to {most} for "
        f"{say_list(longest)}."
    )


def _ends(metric: Metric, rows: Sequence["WindowRow"], name: Callable[[Series], str]) -> str:
    ended = {name(row.series): row.final.mean for row in rows if row.final}
    if len(ended) < 2:
        return ""
    highest = metric.better == "higher"
    groups = _ranked(ended, lambda value: say_value(metric, value), highest=highest)
    (good, first), (bad, last) = groups[0], groups[-1]
    if len(groups) == 1:
        which = "each of them has" if len(ended) == len(rows) else f"{say_list(first)} have"
        return f"At the end {which} {good}."
    difference = max(ended.values()) - min(ended.values())
    return (
        f"At the end {say_list(first)} {_are(first)} best ({good}) and {say_list(last)} "
        f"{_are(last)} worst ({bad}){_against_noise(metric, difference, rows)}."
    )


def _ranked(
    values: Mapping[str, float], say: Callable[[float], str], *, highest: bool
) -> list[tuple[str, list[str]]]:
    """What is printed, best first, with the names that have it."""
    order = sorted(values.values(), reverse=highest)
    groups: dict[str, list[str]] = {say(value): [] for value in order}
    for name, value in values.items():
        groups[say(value)].append(name)
    return list(groups.items())


def _against_noise(metric: Metric, difference: float, rows: Sequence["WindowRow"]) -> str:
    """Whether a difference is larger than the spread of the seeds."""
    spreads = [row.final.sd for row in rows if row.final and row.final.sd is not None]
    if not spreads or difference == 0:
        return ""
    word = "smaller" if max(spreads) > abs(difference) else "larger"
    sd = say_difference(metric, max(spreads))
    return f"; the difference is {word} than the standard deviation over seeds ({sd})"


def say_list(names: Sequence[str]) -> str:
    """Names in a sentence.

    >>> say_list(["k = 4"]), say_list(["k = 4", "k = 8"]), say_list(["a", "b", "c"])
    ('k = 4', 'k = 4 and k = 8', 'a, b and c')
    >>> say_list(["ema, 0.9", "swa, 400", "chosen"])
    'ema, 0.9; swa, 400; and chosen'
    """
    *others, last = names
    if any("," in name for name in names) and len(names) > 2:
        return f"{'; '.join(others)}; and {last}"
    return f"{', '.join(others)} and {last}" if others else last


def _are(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"
