"""Damaged files: documents with values that do not belong there, and damaged bytes."""

import copy
import itertools
import json
import random
from collections.abc import Iterator
from typing import Any

JUNK: tuple[Any, ...] = (
    None, True, -2, 0.5, 1e308, 10**30, "", "..", "/", "../victim", "a/b", "\0", "x" * 300,
    "\ud800", [], [[]], {}, {"x": "/"}, [None],
)  # fmt: skip


_NAMES = [junk for junk in JUNK if isinstance(junk, str)]
_LARGE = [b"\xff" * 8, (2**62).to_bytes(8, "little"), b"9" * 40, b"\x00" * 16, b'"' * 3, b"[" * 300]


def damaged_bytes(data: bytes, chance: random.Random) -> bytes:
    """The bytes with one to three things wrong."""
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(len(data)) if data else 0
        length = min(len(data) - at, chance.choice([1, 1, 2, 8, 64]))
        kind = chance.choice(["flip", "cut", "insert", "repeat", "large", "zero", "drop"])
        if kind == "flip" and data:
            flipped = data[at] ^ (1 << chance.randrange(8))
            data = data[:at] + bytes([flipped]) + data[at + 1 :]
        elif kind == "cut":
            data = data[:at]
        elif kind == "insert":
            data = data[:at] + chance.randbytes(length) + data[at:]
        elif kind == "repeat":
            data = data[:at] + data[at : at + length] * chance.randint(2, 50) + data[at + length :]
        elif kind == "large":
            new = chance.choice(_LARGE)
            data = data[:at] + new + data[at + len(new) :]
        elif kind == "zero":
            data = data[:at] + bytes(length) + data[at + length :]
        elif kind == "drop":
            data = data[:at] + data[at + length :]
    return data


def damaged_value(found: Any, chance: random.Random) -> Any:
    """A copy of nested dicts and lists in which one value is junk, missing or renamed."""
    changed = copy.deepcopy(found)
    *where, last = chance.choice(list(_places(changed)))
    inside = changed
    for key in where:
        inside = inside[key]
    kind = chance.random()
    if kind < 0.15:
        del inside[last]
    elif kind < 0.25 and isinstance(last, str):
        inside[chance.choice(_NAMES)] = inside.pop(last)
    else:
        inside[last] = chance.choice(JUNK)
    return changed


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
                    yield json.dumps(changed)
                    inside["\ud800"] = inside.pop("../victim")
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


def tuples_of_one_hash(num: int) -> list[tuple[int, int]]:
    """CPython mixes the parts of a tuple by steps that can be undone."""
    first, second, last = 11400714785074694791, 14029467366897019727, 2870177450012600261
    mask, undo = (1 << 64) - 1, pow(14029467366897019727, -1, 1 << 64)

    def step(state: int, part: int) -> int:
        state = (state + part * second) & mask
        return ((state << 31 | state >> 33) & mask) * first & mask

    goal = (step(last, 1) + second) & mask  # before the second part is rotated in
    found = []
    for a in itertools.count(1):
        b = (goal - step(last, a)) * undo & mask
        if b < (1 << 61) - 1:
            found.append((a, b))
        if len(found) == num:
            return found
    raise AssertionError
