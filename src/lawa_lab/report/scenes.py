"""The runs of one recipe as lines and panels, for every figure that is made of them."""

from collections.abc import Iterable, Sequence
from functools import cached_property

from lawa_lab.report.panels import Line, Mark, Panel
from lawa_lab.report.runs import Run, Series
from lawa_lab.report.savings import Metric
from lawa_lab.report.styles import Styles
from lawa_lab.report.summary import MainRow, MetricReport, RecipeReport
from lawa_lab.report.views import band, limits, with_room
from lawa_lab.report.wording import say_number

__all__ = ["Scene", "plain", "say_series"]


class Scene:
    """What figures of one recipe share: its lines, their looks, and where to look."""

    def __init__(self, report: RecipeReport, runs: Sequence[Run]) -> None:
        self.report = report
        self.runs = [run for run in runs if run.recipe == report.recipe]
        self.axis = report.axis
        # Where metrics have different defaults, that of the value shown first.
        windows = [row for metric in (*self.shown, *report.metrics) for row in metric.windows]
        self.defaults = {row.run: row.series for row in reversed(windows) if row.default}
        self.styles = Styles(self.runs, self.defaults)

    @cached_property
    def shown(self) -> list[MetricReport]:
        """The two values that most figures show: the accuracy, where there is one, and the loss."""
        first = [m for m in self.report.metrics if m.metric.better == "higher"]
        top1 = [m for m in first if "top5" not in m.metric.name] or first
        losses = [m for m in self.report.metrics if m.metric.better == "lower"]
        return top1[:1] + losses[:1]

    def end(self, run: Run) -> float:
        """Where a run ends."""
        return max((row[self.axis] for row in run.rows if self.axis in row), default=0.0)

    def early(self, run: Run) -> float:
        """Where the early phase ends: 15% of the run, or the eighth value of its average."""
        series = self.defaults[run.name]
        curves = run.curves(series, self.shown[0].metric, self.axis).values()
        eighth = [curve.at[min(8, len(curve.at)) - 1] for curve in curves]
        return max([0.15 * self.end(run), *eighth])

    def line(self, run: Run, series: Series, metric: Metric, label: str = "") -> Line | None:
        """One series as a line; None where fewer than two of its rows have the value."""
        curves = run.curves(series, metric, self.axis)
        at, mean, low, high = band(
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
        """The lines of those series that are there."""
        drawn = (self.line(run, series, metric) for series in dict.fromkeys(wanted))
        return tuple(line for line in drawn if line is not None)

    def raw(self, run: Run) -> list[Series]:
        """The raw weights, as they are usually evaluated first."""
        raw = [series for series in run.series if not series.averaged]
        return sorted(raw, key=lambda series: series.batch_norm is not None)

    def own_rows(self, metric: MetricReport, run: Run) -> list[MainRow]:
        """The comparisons of a run's average with its own raw weights, the main one first."""
        return [row for row in metric.main if row.averaged_run == row.baseline_run == run.name]

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
        mark: Mark | None = None,
    ) -> Panel:
        """A metric against epochs, from `begin` to `end`.

        Values are chosen so that the lines of `zoom_on` (all of them by default) fill the panel,
        but for the share `skip` of the view at the start, where they come from far away, and for
        the worst tenth of them, unless `trim` is False.
        """
        last = max((self.end(each) for each in ([run] if run else self.runs)), default=0.0)
        end = last if end is None else end
        lower = metric.better == "lower"
        y_limits = limits(zoom_on or lines, metric, begin + skip * (end - begin), end, trim)
        log = lower and y_limits is not None and y_limits[1] > 5.0 * y_limits[0] > 0.0
        if mark is not None and y_limits is not None:
            y_limits = with_room(y_limits, mark.value, lower, log)
        room = 0.02 * (end - begin)
        return Panel(
            title=title or plain(metric.name),
            x_label=self.x_label(run),
            lines=lines,
            percent=metric.name.endswith("accuracy"),
            log=log,
            x_limits=(begin - (room if begin else 0.0), end + room),
            y_limits=y_limits,
            mark=mark,
            text_at=(0.97, 0.04) if lower else (0.97, 0.97),
        )

    def x_label(self, run: Run | None) -> str:
        """Such as "epoch (mean and range of 3 seeds)"."""
        counts = {len(each.seeds) for each in ([run] if run else self.runs)}
        if counts == {1}:
            return self.axis
        num_seeds = str(max(counts)) if len(counts) == 1 else f"{min(counts)} to {max(counts)}"
        return f"{self.axis} (mean and range of {num_seeds} seeds)"

    def mark(self, run: Run, row: MainRow) -> Mark | None:
        """The headline of a comparison as an arrow; without one, what was never matched."""
        headline = row.headline
        if headline is None or headline.target is None:
            return self._unmatched(row)
        amount = headline.epochs if self.axis == "epoch" else headline.steps
        if amount is None:
            return None
        looks = {
            "baseline_at": self.styles.of(run, row.baseline).colour,
            "averaged_at": self.styles.of(run, row.averaged).colour,
        }
        ticks = [(getattr(s, name), looks[name]) for s in headline.by_seed for name in looks]
        facts = [] if amount.percent is None else [f"{amount.percent:.0f}%"]
        if len(headline.by_seed) > 1:
            facts.append(
                f"{say_number(amount.saved.low)} to {say_number(amount.saved.high)} by seed"
            )
        saved = f"{say_number(amount.saved.mean)} {self.axis}s earlier"
        return Mark(
            begin=amount.baseline_at.mean,
            end=amount.averaged_at.mean,
            value=headline.target,
            ticks=tuple((at, colour) for at, colour in ticks if at is not None),
            text=f"{saved}\n({', '.join(facts)})" if facts else saved,
        )

    def _unmatched(self, row: MainRow) -> Mark | None:
        """From the baseline's end back to where the average was better than it ever was."""
        if row.unmatched is None or row.best.target is None:
            return None
        count = f"{say_number(row.unmatched.at_least.mean)} {self.axis}s"
        seeds = f"{row.unmatched.num_seeds} of {row.best.num_seeds}"
        return Mark(
            begin=row.unmatched.baseline_end.mean,
            end=row.unmatched.averaged_from.mean,
            value=row.best.target,
            ticks=(),
            text=f"at least {count} earlier\n(never matched, {seeds} seeds)",
        )


def plain(name: str) -> str:
    """The name of a value in plain words.

    >>> plain("test_top5_accuracy"), plain("valid_loss"), plain("train_loss")
    ('test accuracy (top-5)', 'validation loss', 'training loss')
    """
    words = name.split("_")
    words[0] = {"valid": "validation", "train": "training"}.get(words[0], words[0])
    top = next((word for word in words if word.startswith("top")), None)
    text = " ".join(word for word in words if word != top)
    return f"{text} (top-{top.removeprefix('top')})" if top else text


def say_series(series: Series) -> str:
    """A series for a legend; what a reader takes for granted is left out.

    >>> say_series(Series(10, "exponential:0.9", "copied"))
    'average, k = 10, exponential 0.9, BatchNorm copied'
    """
    parts = ["average" if series.averaged else "raw weights"]
    if series.k is not None:
        parts.append(f"k = {series.k}")
    if series.coefficients not in (None, "uniform"):
        parts.append(str(series.coefficients).replace(":", " "))
    if series.batch_norm is not None and not (series.averaged and series.batch_norm != "copied"):
        parts.append(f"BatchNorm {series.batch_norm}")
    return ", ".join(parts)
