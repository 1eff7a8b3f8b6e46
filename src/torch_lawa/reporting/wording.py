"""How a report writes its numbers, the same in the terminal and on the page."""

from torch_lawa.reporting.savings import Metric

__all__ = ["say_duration", "say_number", "say_value"]


def say_value(metric: Metric, value: float | None) -> str:
    """A value of a metric: accuracies in percent.

    >>> say_value(Metric("test_accuracy", "higher"), 0.7631), say_value(Metric("loss", "lower"), 2)
    ('76.31%', '2.0000')
    """
    if value is None:
        return "-"
    return f"{100 * value:.2f}%" if metric.name.endswith("accuracy") else f"{value:.4f}"


def say_number(number: float | None) -> str:
    """A count that may be a mean: whole where it is whole, else with one digit.

    >>> say_number(40.0), say_number(9.6667), say_number(None)
    ('40', '9.7', '-')
    """
    if number is None:
        return "-"
    return f"{number:.0f}" if abs(number - round(number)) < 0.05 else f"{number:.1f}"


def say_duration(seconds: float | None) -> str:
    """Seconds as h:min:s; with one digit more where they are few.

    >>> say_duration(3723.0), say_duration(83.0), say_duration(-4.25), say_duration(None)
    ('1:02:03', '1:23', '-4.2 s', '-')
    """
    if seconds is None:
        return "-"
    sign, left = ("-" if seconds < 0 else ""), abs(seconds)
    if left < 59.95:
        return f"{sign}{left:.1f} s"
    minutes, whole = divmod(round(left), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{sign}{hours}:{minutes:02}:{whole:02}" if hours else f"{sign}{minutes}:{whole:02}"
