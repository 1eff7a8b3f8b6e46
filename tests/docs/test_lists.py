"""Lists and tables follow an empty line: without one the site shows them as part of a paragraph."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ITEM = re.compile(r"(- |\d+\. |\|)")


def joined(page: Path) -> list[int]:
    """Lines that begin a list or a table right below other text, counted from 1."""
    found: list[int] = []
    inside, previous = False, ""
    for number, line in enumerate(page.read_text("utf-8").splitlines(), 1):
        fence = line.startswith("```")
        if not inside and not fence and ITEM.match(line):
            begins = not (ITEM.match(previous) or previous.startswith((" ", "#", "<!--")))
            if begins and previous:
                found.append(number)
        inside ^= fence
        previous = line
    return found


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs the list of tracked files")
def test_lists_and_tables_follow_an_empty_line() -> None:
    names = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "*.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    ).stdout.split()
    found = [f"{name}:{line}" for name in names for line in joined(ROOT / name)]
    assert not found, "\n".join(found)
