"""How a report writes numbers and names."""

import re
from collections.abc import Sequence
from dataclasses import replace

from lawa_lab.report.curves import Axis, Metric
from lawa_lab.report.runs import Series
from lawa_lab.report.savings import Amount, Mean, Stretch

# ---------------------------------------------------------------- numbers


def say_value(metric: Metric, value: float | None) -> str:
    """A value of a metric; accuracies in percent.

    >>> say_value(Metric("test_accuracy", "higher"), 0.7631), say_value(Metric("loss", "lower"), 2)
    ('76.31%', '2.0000')
    """
    if value is None:
        return "-"
    if metric.name.endswith("accuracy"):
        return f"{100 * value:.2f}%"
    usual = value == 0 or 1e-3 <= abs(value) < 1e5
    return f"{value:.4f}" if usual else f"{value:.4g}"


def say_spread(metric: Metric, sd: float, mean: float) -> str:
    """A standard deviation with as many digits as its mean, or more if it would be zero.

    >>> say_spread(Metric("loss", "lower"), 0.00091, 0.9)
    '0.0009'
    """
    if metric.name.endswith("accuracy") or not 1e-3 <= abs(mean) < 1e5:
        return say_value(metric, sd).removesuffix("%")
    return f"{sd:.4f}" if sd == 0 or sd >= 5e-5 else f"{sd:.2g}"


def say_mean(metric: Metric, number: Mean | None) -> str:
    """A mean value with its standard deviation over seeds.

    >>> say_mean(Metric("a_accuracy", "higher"),
    ...          Mean(mean=0.78, sd=0.0037, low=0.7, high=0.8, num_seeds=3))
    '78.00% ± 0.37'
    """
    if number is None:
        return "-"
    spread = "" if number.sd is None else f" ± {say_spread(metric, number.sd, number.mean)}"
    return f"{say_value(metric, number.mean)}{spread}"


def say_difference(metric: Metric, value: float | None) -> str:
    """A difference of two values: percentage points, or two significant digits.

    >>> say_difference(Metric("test_accuracy", "higher"), 0.0123)
    '1.23 points'
    >>> say_difference(Metric("loss", "lower"), 0.01234)
    '0.012'
    """
    if value is None:
        return "not finite"
    return f"{100 * value:.2f} points" if metric.name.endswith("accuracy") else f"{value:.2g}"


def say_number(number: float | None) -> str:
    """A count that may be a mean: whole if it nearly is, else with one digit.

    >>> say_number(40.0), say_number(9.6667), say_number(12500.0), say_number(None)
    ('40', '9.7', '12,500', '-')
    """
    if number is None:
        return "-"
    whole = abs(number - round(number)) < 0.05 or abs(number) >= 1000
    return f"{round(number):,}" if whole else f"{number:,.1f}"  # round: there is no "-0"


def say_over_seeds(number: Mean) -> str:
    """A mean count: whole from 10 on if seeds differ, as its decimal is far below their spread.

    >>> from lawa_lab.report.savings import mean_of
    >>> counts = [mean_of(seeds) for seeds in ((95, 80, 85), (3, 3, 4))]
    >>> [say_over_seeds(count) for count in counts]
    ['87', '3.3']
    """
    whole = number.sd and abs(number.mean) >= 10
    return say_number(round(number.mean) if whole else number.mean)


def say_saved(number: float | None) -> str:
    """What one seed saved; "never" if one of the two series did not reach the target."""
    return "never" if number is None else say_number(number)


def say_axis(axis: Axis, number: float | None = None) -> str:
    """The unit of an axis, for that number of it.

    >>> say_axis("epoch", 1), say_axis("epoch", 2.5), say_axis("gpu_hours")
    ('epoch', 'epochs', 'GPU-hours')
    """
    one = {"epoch": "epoch", "step": "step", "seconds": "second", "gpu_hours": "GPU-hour"}[axis]
    return one if number == 1 else f"{one}s"


def say_count(number: float, axis: Axis) -> str:
    """A number with its unit.

    >>> say_count(1.0, "epoch"), say_count(2.5, "step")
    ('1 epoch', '2.5 steps')
    """
    return f"{say_number(number)} {say_axis(axis, number)}"


def say_amount(amount: Amount, axis: Axis) -> str:
    """Such as "73.3 epochs saved (72%; 72 to 75 by seed)"."""
    facts = [] if amount.percent is None else [f"{amount.percent:.0f}%"]
    facts += [say_by_seed(amount.saved)] if amount.saved.num_seeds > 1 else []
    return f"{say_count(amount.saved.mean, axis)} saved" + (
        f" ({'; '.join(facts)})" if facts else ""
    )


def say_stretch(stretch: Stretch | None) -> str:
    """Where a stretch is.

    >>> say_stretch(Stretch(begin=10, end=14, num_evaluations=5, worst_at=11, worst_by=0.3))
    '10–14'
    """
    if stretch is None:
        return "-"
    begin, end = say_number(stretch.begin), say_number(stretch.end)
    return begin if begin == end else f"{begin}–{end}"


def say_duration(seconds: float | None) -> str:
    """Seconds as h:min:s, or with one digit if they are few.

    >>> say_duration(3723.0), say_duration(83.0), say_duration(-4.26), say_duration(None)
    ('1:02:03', '0:01:23', '-4.3 s', '-')
    """
    if seconds is None:
        return "-"
    sign, left = ("-" if seconds <= -0.05 else ""), abs(seconds)
    if left < 59.95:
        return f"{sign}{left:.1f} s"
    minutes, whole = divmod(round(left), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{sign}{hours}:{minutes:02}:{whole:02}"


def say_hours(amount: Amount | None) -> str:
    """GPU-hours saved; adding zero turns the -0.0 of a small loss into 0."""
    return "-" if amount is None else f"{round(amount.saved.mean, 2) + 0.0:.2f}"


def say_range(number: Mean) -> str:
    """The smallest and largest of the seeds; nothing for a single seed."""
    return "" if number.sd is None else f"{say_number(number.low)} to {say_number(number.high)}"


def say_by_seed(number: Mean) -> str:
    """Such as "72 to 75 by seed"; nothing for a single seed."""
    if number.sd is None:
        return ""
    alike = say_number(number.low) == say_number(number.high)
    return "in every seed" if alike else f"{say_range(number)} by seed"


def say_seeds(number: int) -> str:
    """Such as "3 seeds"."""
    return f"{number} seed{'s' * (number != 1)}"


# ---------------------------------------------------------------- names


def plain(name: str) -> str:
    """The name of a metric in plain words.

    >>> plain("test_top5_accuracy"), plain("valid_loss"), plain("train_loss")
    ('test accuracy (top-5)', 'validation loss', 'training loss')
    """
    parts = name.split("_")
    parts[0] = {"valid": "validation", "train": "training"}.get(parts[0], parts[0])
    top = next((word for word in parts if word.startswith("top")), None)
    text = " ".join(word for word in parts if word != top)
    return f"{text} (top-{top.removeprefix('top')})" if top else text


def say_rule(text: str) -> str:
    """Coefficients in words; settings without a name are written as on the command line.

    >>> say_rule("exponential:0.9"), say_rule("0.25:16:1")
    ('exponential 0.9', '0.25:16:1')
    """
    return re.sub(r"(?<=[a-z]):", " ", text)


def say_series(series: Series) -> str:
    """A series for a legend; the usual treatment of BatchNorm is not mentioned.

    >>> say_series(Series("averaged", 10, "exponential:0.9", "copied"))
    'average, k = 10, exponential 0.9, BatchNorm copied'
    >>> say_series(Series("ema", coefficients="decay:0.99"))
    'ema, decay 0.99'
    >>> say_series(Series("dense", coefficients="0.25:8"))
    'dense, 0.25:8'
    """
    names = {"raw": "raw weights", "averaged": "average"}
    parts = [names.get(series.weights, series.weights)]
    if series.k is not None:
        parts.append(f"k = {series.k}")
    if series.coefficients not in (None, "uniform"):
        parts.append(say_rule(str(series.coefficients)))
    if series.batch_norm is not None and not (series.averaged and series.batch_norm != "copied"):
        parts.append(f"BatchNorm {series.batch_norm}")
    return ", ".join(parts)


def say_short(series: Series) -> str:
    """A series where space is scarce; re-estimated BatchNorm statistics are not mentioned.

    >>> say_short(Series("averaged", 10, "exponential:0.9", "copied"))
    'k = 10, exponential 0.9 (BN copied)'
    """
    text = say_rule(replace(series, batch_norm=None).label)
    return f"{text} (BN copied)" if series.batch_norm == "copied" else text


def say_rows(rows: Sequence[Series]) -> list[str]:
    """The short name of each row, with BatchNorm where two rows would have the same name.

    >>> say_rows([Series("swa", batch_norm="re-estimated"), Series("swa"), Series("ema")])
    ['swa (BN re-estimated)', 'swa (BN running)', 'ema']
    """
    names = [say_short(series) for series in rows]
    return [
        f"{name} (BN {series.batch_norm or 'running'})" if names.count(name) > 1 else name
        for name, series in zip(names, rows, strict=True)
    ]
