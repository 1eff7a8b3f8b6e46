"""From the values of seeds to a band, and from lines to the part of an axis that shows them."""

import math
from collections.abc import Iterable, Sequence

from lawa_lab.report.panels import Line
from lawa_lab.report.savings import Metric

__all__ = ["band", "limits", "with_room"]


def band(
    points: Iterable[tuple[float, float | None]],
) -> tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...], tuple[float, ...]]:
    """Mean, lowest and highest value at each place that some seed has a value for.

    >>> band([(1, 2.0), (2, 5.0), (1, 4.0)])
    ((1, 2), (3.0, 5.0), (2.0, 5.0), (4.0, 5.0))
    """
    found: dict[float, list[float]] = {}
    for place, value in points:
        if value is not None:
            found.setdefault(place, []).append(value)
    at = tuple(sorted(found))
    return (
        at,
        tuple(math.fsum(found[place]) / len(found[place]) for place in at),
        tuple(min(found[place]) for place in at),
        tuple(max(found[place]) for place in at),
    )


def limits(
    lines: Sequence[Line], metric: Metric, begin: float, end: float, trim: bool = True
) -> tuple[float, float] | None:
    """From the best value to one that nine of ten others beat, with some room."""
    values = sorted(
        value
        for line in lines
        for at, value in zip(line.at, line.mean, strict=True)
        if value is not None and begin <= at <= end
    )
    if not values:
        return None
    few = len(values) // 10 if trim else 0
    if metric.better == "lower":
        low, high = min([values[0], *_edges(lines, "low", begin, end)]), values[-1 - few]
    else:
        low, high = values[few], max([values[-1], *_edges(lines, "high", begin, end)])
    room = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
    if metric.better == "lower" and low > 0.0:
        return max(low - room, 0.5 * low), high + room
    top = high + room
    return max(low - room, 0.0), min(top, 1.0) if high <= 1.0 else top


def _edges(lines: Sequence[Line], side: str, begin: float, end: float) -> list[float]:
    """The best values of the bands."""
    points = (
        point
        for line in lines
        if line.low
        for point in zip(line.at, getattr(line, side), strict=True)
    )
    return [value for at, value in points if begin <= at <= end and value is not None]


def with_room(
    limits: tuple[float, float], value: float, lower: bool, log: bool
) -> tuple[float, float]:
    """Limits with `value` inside, and room for text beyond the best value: no curve is there."""
    low, high = min(limits[0], value), max(limits[1], value)
    if not lower:
        return low, high + 0.2 * (high - low)
    return (low * (low / high) ** 0.25 if log else low - 0.25 * (high - low)), high
