"""JSON files in which we keep state, read back: every field is checked before it is used.

Such a file may be damaged, or come from somebody else. It names files that are opened and folders
that are removed, so nothing in it is trusted.
"""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from torch_lawa.system_errors import named_errors

__all__ = [
    "StateRow",
    "a_flag",
    "a_list",
    "a_name",
    "a_number",
    "a_path",
    "a_text",
    "a_whole_number",
    "read_state",
]

T = TypeVar("T")
Check = Callable[[Any], T]  # returns the value, or raises ValueError
_LARGEST = 2**63
_MAX_STATE = 128 * 1024 * 1024  # bytes; a million tensors need less


def read_state(path: Path, parse: "Callable[[StateRow], T]") -> T:
    """Parse the object in a file; whatever is wrong with it is a `ValueError`."""
    with named_errors(path), path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > _MAX_STATE:
            raise ValueError(f"it has {size} bytes, and at most {_MAX_STATE} are read")
        content = file.read(size)
    try:
        return parse(StateRow(json.loads(content)))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


class StateRow:
    """An object of a state file. Each field is taken once; `end` refuses fields that were not.

    >>> row = StateRow({"step": 5, "folder": "../.."})
    >>> row.take("step", a_whole_number())
    5
    >>> row.take("folder", a_name)
    Traceback (most recent call last):
    ValueError: folder is '../..', expected the name of a file or folder
    """

    def __init__(self, found: object) -> None:
        if not isinstance(found, dict):
            raise ValueError(f"{_shown(found)}, expected an object")
        self._left: dict[str, object] = dict(found)

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def take(self, name: str, check: Check[T]) -> T:
        """The value of a field."""
        if name not in self._left:
            raise ValueError(f"{name} is missing")
        try:
            return check(self._left.pop(name))
        except ValueError as error:
            raise ValueError(f"{name} is {error}") from None

    def take_all(self, name_check: Check[Any], check: Check[T]) -> dict[Any, T]:
        """All fields that are left."""
        found = {}
        for name in list(self._left):
            try:
                key = name_check(name)
            except ValueError as error:
                raise ValueError(f"a field is {error}") from None
            found[key] = self.take(name, check)
        return found

    def end(self) -> None:
        """Refuse fields that were not taken."""
        if self._left:
            raise ValueError(f"{_shown(min(self._left))} is not a field")


def a_whole_number(least: int = 0, *, optional: bool = False) -> Check[Any]:
    """A whole number of at least `least`; with `optional`, or None."""

    def check(found: Any) -> int | None:
        if found is None and optional:
            return None
        if type(found) is not int or not least <= found < _LARGEST:
            raise ValueError(f"{_shown(found)}, expected a whole number")
        return found

    return check


def a_number(found: Any) -> float | None:
    """A finite number, or None."""
    if found is not None and (type(found) not in (int, float) or not abs(found) < _LARGEST):
        raise ValueError(f"{_shown(found)}, expected a number")
    return None if found is None else float(found)


def a_flag(found: Any) -> bool:
    """True or false."""
    if not isinstance(found, bool):
        raise ValueError(f"{_shown(found)}, expected true or false")
    return found


def a_text(pattern: str = ".*") -> Check[str]:
    """A text that matches a regular expression."""

    def check(found: Any) -> str:
        if not isinstance(found, str) or not re.fullmatch(pattern, found, re.DOTALL):
            raise ValueError(f"{_shown(found)}, expected a text such as {pattern}")
        return found

    return check


def a_name(found: Any) -> str:
    """The name of an entry of a folder, which leads nowhere else."""
    if not isinstance(found, str) or found in ("", ".", "..") or set(found) & set("/\\\0"):
        raise ValueError(f"{_shown(found)}, expected the name of a file or folder")
    try:
        os.fsencode(found)
    except UnicodeEncodeError:
        raise ValueError(f"{_shown(found)}, which no file can be named") from None
    return found


def a_path(found: Any) -> str:
    """The path of a file in a folder or its sub-folders, which leads nowhere else."""
    for name in found.split("/") if isinstance(found, str) else (found,):
        a_name(name)
    return str(found)


def a_list(check: Check[T]) -> Check[list[T]]:
    """A list of such values."""

    def check_all(found: Any) -> list[T]:
        if not isinstance(found, list):
            raise ValueError(f"{_shown(found)}, expected a list")
        return [check(item) for item in found]

    return check_all


def _shown(found: object) -> str:
    return f"{found!r:.60}"
