"""The runs of one recipe as lines and panels, from which every figure is built."""

import math
from collections.abc import Iterable, Sequence

from lawa_lab.report.curves import Metric
from lawa_lab.report.figures.axes import Arrow, Line, Panel
from lawa_lab.report.figures.style import Styles
from lawa_lab.report.runs import Run, Series
from lawa_lab.report.summary import MainRow, RecipeReport
from lawa_lab.report.words import plain, say_by_seed, say_count, say_series

__all__ = ["Scene"]


class Scene:
    """What the figures of one recipe share: lines, their styles, and ranges of the axes."""

    def __init__(self, report: RecipeReport, runs: Sequence[Run]) -> None:
        self.report = report
        self.runs = [run for run in runs if run.recipe == report.recipe]
        self.axis = report.axis
        self.shown = report.shown
        # If metrics have different defaults, that of the metric shown first.
        windows = [row for metric in (*self.shown, *report.metrics) for row in metric.windows]
        self.defaults = {row.run: row.series for row in reversed(windows) if row.default}
        self.styles = Styles(self.runs, self.defaults)

    def end(self, run: Run) -> float:
        """Where a run ends."""
        return max((row[self.axis] for row in run.rows if self.axis in row), default=0.0)

    def early(self, run: Run) -> float:
        """Where the early phase ends: at 15% of the run, but after eight values of the average."""
        series = self.defaults[run.name]
        curves = run.curves(series, self.shown[0].metric, self.axis).values()
        eighth = [curve.at[min(8, len(curve.at)) - 1] for curve in curves]
        return max([0.15 * self.end(run), *eighth])

    def line(self, run: Run, series: Series, metric: Metric, label: str = "") -> Line | None:
        """One series as a line; None if fewer than two of its rows have the metric."""
        curves = run.curves(series, metric, self.axis)
        at, mean, low, high = _band(
            point for curve in curves.values() for point in zip(curve.at, curve.values, strict=True)
        )
        if len(at) < 2:
            return None
        several = len(curves) > 1
        return Line(
            label=label or say_series(series),
            style=self.styles.of(run, series),
            at=at,
            mean=mean,
            low=low if several else (),
            high=high if several else (),
        )

    def lines(self, run: Run, wanted: Iterable[Series], metric: Metric) -> tuple[Line, ...]:
        """The lines of those series that have enough values."""
        drawn = (self.line(run, series, metric) for series in dict.fromkeys(wanted))
        return tuple(line for line in drawn if line is not None)

    def raw(self, run: Run) -> list[Series]:
        """The raw weights, first with running statistics, then with others."""
        raw = [series for series in run.series if not series.averaged]
        return sorted(raw, key=lambda series: series.batch_norm is not None)

    def raw_alike(self, run: Run, average: Series) -> list[Series]:
        """The raw weights whose statistics are obtained like the average's, else running ones."""
        raw = self.raw(run)
        return [s for s in raw if s.batch_norm == average.batch_norm] or raw[:1]

    def panel(
        self,
        metric: Metric,
        lines: tuple[Line, ...],
        run: Run | None = None,
        *,
        begin: float = 0.0,
        end: float | None = None,
        title: str | None = None,
        zoom_on: tuple[Line, ...] | None = None,
        skip: float = 0.15,
        trim: bool = True,
        arrow: Arrow | None = None,
    ) -> Panel:
        """A metric against epochs or steps, from `begin` to `end`.

        The range of values is chosen so that the lines of `zoom_on` (by default all) fill the
        panel, ignoring the fraction `skip` at the start, where values change fast, and the worst
        tenth of the values unless `trim` is False.
        """
        last = max((self.end(each) for each in ([run] if run else self.runs)), default=0.0)
        end = last if end is None else end
        lower = metric.better == "lower"
        y_limits = _limits(zoom_on or lines, metric, begin + skip * (end - begin), end, trim)
        log = lower and y_limits is not None and y_limits[1] > 5.0 * y_limits[0] > 0.0
        if arrow is not None and y_limits is not None:
            y_limits = _with_room(y_limits, arrow.value, lower, log)
        room = 0.02 * (end - begin)
        return Panel(
            title=title or plain(metric.name),
            x_label=self._x_label(run, lines),
            lines=lines,
            percent=metric.name.endswith("accuracy"),
            log=log,
            x_limits=(begin - (room if begin else 0.0), end + room),
            y_limits=y_limits,
            arrow=arrow,
            text_at=(0.97, 0.04) if lower else (0.97, 0.97),
        )

    def _x_label(self, run: Run | None, lines: Iterable[Line]) -> str:
        """Such as "epoch (mean and range of 3 seeds)"."""
        counts = {len(each.seeds) for each in ([run] if run else self.runs)}
        if counts == {1}:
            return self.axis
        num_seeds = str(max(counts)) if len(counts) == 1 else f"{min(counts)} to {max(counts)}"
        what = "mean and range" if any(line.low for line in lines) else "mean"
        return f"{self.axis} ({what} of {num_seeds} seeds)"

    def arrow(self, run: Run, row: MainRow) -> Arrow | None:
        """The headline of a comparison as an arrow; without one, the value never matched."""
        headline = row.headline
        if headline is None or headline.target is None:
            return self._unmatched(row)
        amount = headline.on(self.axis)
        if amount is None:
            return None
        looks = {
            "baseline_at": self.styles.of(run, row.baseline).colour,
            "averaged_at": self.styles.of(run, row.averaged).colour,
        }
        ticks = [(getattr(s, name), looks[name]) for s in headline.by_seed for name in looks]
        facts = [] if amount.percent is None else [f"{amount.percent:.0f}%"]
        if len(headline.by_seed) > 1:
            facts.append(say_by_seed(amount.saved))
        saved = f"{say_count(amount.saved.mean, self.axis)} earlier"
        return Arrow(
            begin=amount.baseline_at.mean,
            end=amount.averaged_at.mean,
            value=headline.target,
            ticks=tuple((at, colour) for at, colour in ticks if at is not None),
            text=f"{saved}\n({', '.join(facts)})" if facts else saved,
        )

    def _unmatched(self, row: MainRow) -> Arrow | None:
        """From the end of the baseline back to where the average was better than it ever was."""
        if row.unmatched is None or row.best.target is None:
            return None
        count = say_count(row.unmatched.at_least.mean, self.axis)
        num_seeds = row.best.num_seeds
        seeds = f", {row.unmatched.num_seeds} of {num_seeds} seeds" if num_seeds > 1 else ""
        return Arrow(
            begin=row.unmatched.baseline_end.mean,
            end=row.unmatched.averaged_from.mean,
            value=row.best.target,
            ticks=(),
            text=f"at least {count} earlier\n(never matched{seeds})",
        )


def _band(
    points: Iterable[tuple[float, float | None]],
) -> tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...], tuple[float, ...]]:
    """Mean, lowest and highest value at each position that some seed has a value for.

    >>> _band([(1, 2.0), (2, 5.0), (1, 4.0)])
    ((1, 2), (3.0, 5.0), (2.0, 5.0), (4.0, 5.0))
    """
    found: dict[float, list[float]] = {}
    for at_point, value in points:
        if value is not None:
            found.setdefault(at_point, []).append(value)
    at = tuple(sorted(found))
    return (
        at,
        tuple(math.fsum(found[at_point]) / len(found[at_point]) for at_point in at),
        tuple(min(found[at_point]) for at_point in at),
        tuple(max(found[at_point]) for at_point in at),
    )


def _limits(
    lines: Sequence[Line], metric: Metric, begin: float, end: float, trim: bool = True
) -> tuple[float, float] | None:
    """From the best value to one that 90% of the others beat, with a margin."""
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


def _with_room(
    limits: tuple[float, float], value: float, lower: bool, log: bool
) -> tuple[float, float]:
    """Limits that include `value`, with a margin for text beyond the best value."""
    low, high = min(limits[0], value), max(limits[1], value)
    if not lower:
        return low, high + 0.2 * (high - low)
    return (low * (low / high) ** 0.25 if log else low - 0.25 * (high - low)), high
