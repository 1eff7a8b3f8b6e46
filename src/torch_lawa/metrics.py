"""The metrics file: one JSON object per line, appended and flushed during the run.

Every table, figure and page is made from such files alone. Pure Python: reading a run does not
import PyTorch.
"""

import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

from torch_lawa.errors import FormatError
from torch_lawa.system_errors import named_errors

__all__ = ["MetricsWriter", "Row", "mode_by_name", "read_metrics"]

Row: TypeAlias = dict[str, Any]

# What rows are identified and ordered by, so that readers can rely on it.
_COUNTS = ("step", "epoch", "k", "horizon")
_NAMES = ("weights", "coefficients")

# Words in the names of metrics.
_LOWEST = re.compile(r"(loss|nll|error|err|perplexity|ppl|[wc]er|r?mse|mae|fid)", re.IGNORECASE)
_HIGHEST = re.compile(
    r"(acc|accuracy|f1|bleu|rouge[a-z0-9]*|auc|auroc|map|iou|miou|score|reward|precision|recall)",
    re.IGNORECASE,
)


def mode_by_name(metric: str) -> Literal["min", "max"] | None:
    """Whether low or high values of a metric are good, by the words of its name; None if unclear.

    >>> mode_by_name("valid_loss"), mode_by_name("eval/accuracy"), mode_by_name("norm")
    ('min', 'max', None)
    """
    words = [word for word in re.split(r"[^A-Za-z0-9]+", metric) if word]
    low = any(_LOWEST.fullmatch(word) for word in words)
    high = any(_HIGHEST.fullmatch(word) for word in words)
    if low == high:
        return None
    return "min" if low else "max"


class MetricsWriter:
    """Appends rows to a metrics file; each is completely written when `write` returns.

    An incomplete last line, left by a run that was killed, is removed before the first new row.
    Numbers that are not finite are written as null, so that any JSON reader can read the file.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with MetricsWriter(f"{folder}/metrics.jsonl") as metrics:
    ...         metrics.write({"epoch": 1, "loss": 0.5})
    ...         metrics.write({"epoch": 2, "loss": float("nan")})
    ...     read_metrics(Path(folder) / "metrics.jsonl")
    [{'epoch': 1, 'loss': 0.5}, {'epoch': 2, 'loss': None}]
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        # Unbuffered, so that a row is one system call and there is nothing to flush.
        self._file = path.open("ab", buffering=0)
        try:
            _remove_incomplete_line(path)
        except BaseException:
            self._file.close()
            raise

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one row."""
        text = json.dumps(_finite(row), allow_nan=False) + "\n"
        rest = memoryview(text.encode())
        with named_errors(self.path):
            while rest:
                rest = rest[self._file.write(rest) :]

    def close(self) -> None:
        """Close the file; a new writer can continue it."""
        self._file.close()

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(path: Path) -> list[Row]:
    """Every row of a metrics file; an incomplete last line, left by a killed run, is ignored."""
    *lines, last = path.read_bytes().split(b"\n")
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(_parse(line))
        except ValueError as error:
            raise FormatError(
                f"{path}, line {number}: not a row of metrics ({error}). Every line must be one "
                "JSON object; remove or repair this line."
            ) from None
    # After the last line feed there is nothing, or a row that was not written completely.
    if last and (row := _parsed(last)) is not None:
        rows.append(row)
    return rows


def _parse(line: bytes) -> Row:
    try:
        row = json.loads(line)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(row, dict):
        raise ValueError(f"a {type(row).__name__}, not an object")
    for name in _COUNTS:
        if not isinstance(row.get(name), int | float | None):
            raise ValueError(f"`{name}` is a {type(row[name]).__name__}, not a number")
    for name in _NAMES:
        if isinstance(row.get(name), list | dict):
            raise ValueError(f"`{name}` is a {type(row[name]).__name__}, not a name")
    return row


def _parsed(line: bytes) -> Row | None:
    try:
        return _parse(line)
    except ValueError:
        return None


def _remove_incomplete_line(path: Path) -> None:
    with path.open("r+b") as file:
        content = file.read()
        end = content.rfind(b"\n") + 1
        if end == len(content):
            return
        if _parsed(content[end:]) is None:
            file.truncate(end)
        else:  # only its line feed is missing
            file.write(b"\n")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
