"""Numbers as text: never more than three digits in a unit, and no exponents."""

import pytest

from torch_lawa.capacity.fit import format_seconds
from torch_lawa.units import format_bytes


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (999_499, "999 kB"),
        (999_500, "1 MB"),
        (999_999, "1 MB"),
        (999_999_999_999, "1 TB"),
        (5_000_000_000_000_000, "5,000 TB"),
    ],
)
def test_bytes(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0994, "99 ms"), (0.0996, "100 ms"), (3_600_000.0, "1,000 h")],
)
def test_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
