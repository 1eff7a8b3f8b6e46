"""One class name has one meaning in the whole tree, so that a search finds one thing."""

import ast
from collections import defaultdict
from pathlib import Path

SOURCES = Path(__file__).parents[2] / "src"


def test_class_names_are_unique() -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(SOURCES.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef):
                found[node.name.lstrip("_")].append(path.relative_to(SOURCES).as_posix())
    assert len(found) > 200
    assert {name: places for name, places in found.items() if len(places) > 1} == {}


def test_modules_are_short() -> None:
    lengths = {p: len(p.read_text("utf-8").splitlines()) for p in SOURCES.rglob("*.py")}
    assert [str(path) for path, length in lengths.items() if length > 500] == []
