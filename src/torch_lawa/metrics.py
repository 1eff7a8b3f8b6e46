"""One file of metrics: a JSON object a line, appended and flushed as the run goes.

Every table, figure and page is made from such files alone, so what is not in a row is not known.
Pure Python: reading a run must not cost an import of PyTorch.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

from torch_lawa.errors import FormatError

__all__ = ["MetricsWriter", "Row", "read_metrics"]

Row: TypeAlias = dict[str, Any]


class MetricsWriter:
    """Appends rows to a metrics file; each is whole in the file when `write` returns.

    A half last line, left by a run that was killed, is cut off before the first new row. A number
    that is not finite is written as null, so that any JSON reader can take the file.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with MetricsWriter(Path(folder) / "metrics.jsonl") as metrics:
    ...         metrics.write({"epoch": 1, "loss": 0.5})
    ...         metrics.write({"epoch": 2, "loss": float("nan")})
    ...     read_metrics(Path(folder) / "metrics.jsonl")
    [{'epoch': 1, 'loss': 0.5}, {'epoch': 2, 'loss': None}]
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        # Unbuffered, so that a row is one write to the system and there is nothing left to flush.
        self._file = path.open("ab", buffering=0)
        try:
            _cut_half_line(path)
        except BaseException:
            self._file.close()
            raise

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one row."""
        text = json.dumps(_finite(row), allow_nan=False) + "\n"
        rest = memoryview(text.encode())
        while rest:
            rest = rest[self._file.write(rest) :]

    def close(self) -> None:
        """Close the file; it can be opened again to go on."""
        self._file.close()

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def read_metrics(path: Path) -> list[Row]:
    """Every row of a metrics file; a half last line, left by a killed run, is ignored."""
    *lines, last = path.read_bytes().split(b"\n")
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(_parse(line))
        except ValueError as error:
            raise FormatError(
                f"{path}, line {number}: not a row of metrics ({error}). Every line must be one "
                "JSON object; remove or repair this one."
            ) from None
    # What follows the last line feed is nothing, or a row whose writing did not finish.
    if last and (row := _whole(last)) is not None:
        rows.append(row)
    return rows


def _parse(line: bytes) -> Row:
    row = json.loads(line)
    if not isinstance(row, dict):
        raise ValueError(f"a {type(row).__name__}, not an object")
    return row


def _whole(line: bytes) -> Row | None:
    try:
        return _parse(line)
    except ValueError:
        return None


def _cut_half_line(path: Path) -> None:
    with path.open("r+b") as file:
        content = file.read()
        end = content.rfind(b"\n") + 1
        if end == len(content):
            return
        if _whole(content[end:]) is None:
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
