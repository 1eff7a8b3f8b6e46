"""The code in docs/guides, for tests that run it."""

import shlex
from pathlib import Path

GUIDES = Path(__file__).parents[2] / "docs" / "guides"


def blocks(page: str, section: str, language: str) -> list[str]:
    """The code of one section of a page."""
    found: list[str] = []
    inside, fence, seen = False, None, 0
    for line in (GUIDES / page).read_text().splitlines(keepends=True):
        if fence is not None and line.strip() == "```":
            fence = None
        elif fence is not None:
            if inside and fence == language:
                found[-1] += line
        elif line.startswith("```"):
            fence = line[3:].strip()
            if inside and fence == language:
                found.append("")
        elif line.startswith("#"):
            inside = line.lstrip("#").strip() == section
            seen += inside
    assert seen == 1, f"{page} has {seen} sections {section!r}"
    return found


def commands(page: str, section: str) -> list[list[str]]:
    """The words of each `lawa` command in one section of a page."""
    lines = "".join(blocks(page, section, "")).splitlines()
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("lawa ")]
