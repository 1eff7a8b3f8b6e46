"""How a report writes its numbers, the same in the terminal and on the page."""

from collections.abc import Sequence

from lawa_lab.report.savings import Axis, Metric
from lawa_lab.report.summary import Stretch

__all__ = [
    "say_axis",
    "say_difference",
    "say_duration",
    "say_number",
    "say_saved",
    "say_spread",
    "say_stretches",
    "say_value",
]

_SHOWN = 4  # stretches that are named one by one


def say_value(metric: Metric, value: float | None) -> str:
    """A value of a metric: accuracies in percent.

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
    """What follows the ± after a mean: to its last place, unless nothing is left there.

    >>> say_spread(Metric("loss", "lower"), 0.00091, 0.9)
    '0.0009'
    """
    if metric.name.endswith("accuracy") or not 1e-3 <= abs(mean) < 1e5:
        return say_value(metric, sd).removesuffix("%")
    return f"{sd:.4f}" if sd == 0 or sd >= 5e-5 else f"{sd:.2g}"


def say_difference(metric: Metric, value: float) -> str:
    """A difference of two values: points of a percentage, or two digits that count.

    >>> say_difference(Metric("test_accuracy", "higher"), 0.0123)
    '1.23 points'
    >>> say_difference(Metric("loss", "lower"), 0.01234)
    '0.012'
    """
    if metric.name.endswith("accuracy"):
        return f"{100 * value:.2f} points"
    return f"{value:.2g}"


def say_number(number: float | None) -> str:
    """A count that may be a mean: whole where it is whole, else with one digit.

    >>> say_number(40.0), say_number(9.6667), say_number(12500.0), say_number(None)
    ('40', '9.7', '12,500', '-')
    """
    if number is None:
        return "-"
    whole = abs(number - round(number)) < 0.05 or abs(number) >= 1000
    return f"{round(number):,}" if whole else f"{number:,.1f}"  # round: there is no "-0"


def say_saved(number: float | None) -> str:
    """What one seed saved; "never" where one of the two did not get there."""
    return "never" if number is None else say_number(number)


def say_axis(axis: Axis, number: float | None = None) -> str:
    """The name of what is counted, for that number of it.

    >>> say_axis("epoch", 1), say_axis("epoch", 2.5), say_axis("gpu_hours")
    ('epoch', 'epochs', 'GPU-hours')
    """
    one = {"epoch": "epoch", "step": "step", "seconds": "second", "gpu_hours": "GPU-hour"}[axis]
    return one if number == 1 else f"{one}s"


def say_duration(seconds: float | None) -> str:
    """Seconds as h:min:s, or with one digit where they are few.

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


def say_stretches(stretches: Sequence[Stretch], axis: Axis) -> str:
    """Stretches by name; where there are many, the longest of them and how many more.

    >>> say_stretches([Stretch(begin=10, end=14, num_evaluations=5, worst_at=11, worst_by=0.3),
    ...     Stretch(begin=31, end=31, num_evaluations=1, worst_at=31, worst_by=0.1)], "epoch")
    'epochs 10–14 and 31'
    """
    longest = sorted(stretches, key=lambda s: -s.num_evaluations)[:_SHOWN]
    named = [
        say_number(s.begin) if s.begin == s.end else f"{say_number(s.begin)}–{say_number(s.end)}"
        for s in sorted(longest, key=lambda s: s.begin)
    ]
    left = sum(s.num_evaluations for s in stretches) - sum(s.num_evaluations for s in longest)
    if left:
        named.append(f"{left} more")
    single = len(stretches) == 1 and stretches[0].begin == stretches[0].end
    text = named[0] if len(named) == 1 else f"{', '.join(named[:-1])} and {named[-1]}"
    return f"{say_axis(axis, 1 if single else 2)} {text}"
