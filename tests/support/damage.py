"""Damaged JSON: every value of a document in turn replaced by values that do not belong there."""

import copy
import json
from collections.abc import Iterator
from typing import Any

JUNK: tuple[Any, ...] = (
    None, True, -2, 0.5, 1e308, 10**30, "", "..", "/", "../victim", "a/b", "\0", "x" * 300,
    [], [[]], {}, {"x": "/"}, [None],
)  # fmt: skip


def damaged_documents(text: str) -> Iterator[str]:
    """Each value replaced by each kind of junk, removed or renamed; and texts that are no JSON."""
    found = json.loads(text)
    for *where, last in list(_places(found)):
        for junk in (*JUNK, "removed", "renamed"):
            changed = copy.deepcopy(found)
            inside: Any = changed
            for key in where:
                inside = inside[key]
            if junk not in ("removed", "renamed"):
                inside[last] = junk
            elif isinstance(inside, dict):
                value = inside.pop(last)
                if junk == "renamed":
                    inside["../victim"] = value
            elif junk == "removed":
                del inside[last]
            else:
                inside.append(inside[last])  # twice
            yield json.dumps(changed)
    yield from ("", "null", "[]", "5", text[:-9], "[" * 100_000, '{"k": NaN}')
    yield text.replace(": 1,", f": {'1' * 5000},")


def _places(found: Any) -> Iterator[tuple[Any, ...]]:
    keys = found if isinstance(found, dict) else range(len(found))
    for key in keys:
        yield (key,)
        if isinstance(found[key], dict | list):
            for rest in _places(found[key]):
                yield (key, *rest)
