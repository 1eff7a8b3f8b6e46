"""The metrics file: whole rows in, whole rows out, whatever a killed run left behind."""

import json
import math
from pathlib import Path

import pytest

from torch_lawa.errors import FormatError
from torch_lawa.metrics import MetricsWriter, read_metrics


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def test_rows_come_back_in_order_and_are_one_line_each(path: Path) -> None:
    rows = [{"epoch": 1, "loss": 0.1, "k": None}, {"epoch": 2, "name": "two\nlines"}]
    with MetricsWriter(path) as metrics:
        for row in rows:
            metrics.write(row)
    assert read_metrics(path) == rows
    assert path.read_bytes().count(b"\n") == 2


def test_a_row_is_in_the_file_before_it_is_closed(path: Path) -> None:
    with MetricsWriter(path) as metrics:
        metrics.write({"epoch": 1})
        assert path.read_bytes() == b'{"epoch": 1}\n'


def test_floats_keep_every_bit(path: Path) -> None:
    values = [0.1, 1 / 3, math.pi * 1e-300, 5e-324]
    with MetricsWriter(path) as metrics:
        metrics.write({"values": values})
    assert read_metrics(path) == [{"values": values}]


def test_what_is_not_finite_is_null_as_strict_readers_want(path: Path) -> None:
    with MetricsWriter(path) as metrics:
        metrics.write({"a": math.nan, "b": {"c": [math.inf, 1.0]}, "d": (-math.inf,)})

    def refuse(name: str) -> None:
        raise AssertionError(name)

    row = json.loads(path.read_text(), parse_constant=refuse)
    assert row == {"a": None, "b": {"c": [None, 1.0]}, "d": [None]}


@pytest.mark.parametrize("half", [b'{"epoch": 2, "lo', b"{", b'{"name": "\xc3'])
def test_a_half_last_line_is_ignored(path: Path, half: bytes) -> None:
    path.write_bytes(b'{"epoch": 1}\n' + half)
    assert read_metrics(path) == [{"epoch": 1}]


def test_going_on_after_a_half_line_loses_only_that_line(path: Path) -> None:
    path.write_bytes(b'{"epoch": 1}\n{"epoch": 2, "lo')
    with MetricsWriter(path) as metrics:
        metrics.write({"epoch": 2})
    assert path.read_bytes() == b'{"epoch": 1}\n{"epoch": 2}\n'


def test_going_on_after_a_lost_line_feed_loses_nothing(path: Path) -> None:
    path.write_bytes(b'{"epoch": 1}')
    with MetricsWriter(path) as metrics:
        metrics.write({"epoch": 2})
    assert read_metrics(path) == [{"epoch": 1}, {"epoch": 2}]


@pytest.mark.parametrize("broken", [b'{"epoch": 2', b"", b"[1]", b"\xff\xfe", b"NaN"])
def test_a_broken_line_elsewhere_is_named(path: Path, broken: bytes) -> None:
    path.write_bytes(b'{"epoch": 1}\n' + broken + b'\n{"epoch": 3}\n')
    with pytest.raises(FormatError, match=r"metrics\.jsonl, line 2: not a row"):
        read_metrics(path)


@pytest.mark.parametrize(
    "row",
    [
        *({name: value} for name in ("step", "epoch", "k", "horizon") for value in ("3", [3], {})),
        *({name: value} for name in ("weights", "coefficients") for value in (["raw"], {})),
    ],
)
def test_a_row_of_mixed_types_is_named(path: Path, row: dict[str, object]) -> None:
    """What rows are identified by must be comparable and hashable."""
    path.write_text(json.dumps({"step": 1}) + "\n" + json.dumps(row) + "\n")
    with pytest.raises(FormatError, match=f"line 2.*{next(iter(row))}"):
        read_metrics(path)


@pytest.mark.parametrize("line", [b"[" * 100_000, b'{"step": ' + b"9" * 5000 + b"}"])
def test_a_row_that_python_cannot_parse(path: Path, line: bytes) -> None:
    path.write_bytes(line + b"\n")
    with pytest.raises(FormatError, match="line 1"):
        read_metrics(path)


def test_an_empty_file_has_no_rows(path: Path) -> None:
    path.touch()
    assert read_metrics(path) == []
