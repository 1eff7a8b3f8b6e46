"""The code in the pages of docs/guides, which tests run."""

import shlex
from pathlib import Path

__all__ = ["GUIDES", "ROOT", "blocks", "commands"]

ROOT = Path(__file__).parents[2]
GUIDES = ROOT / "docs" / "guides"


def blocks(page: str, section: str | None = None, language: str = "python") -> list[str]:
    """The code of one section of a page, or of all of them, block by block."""
    found: list[str] = []
    inside, fence, seen = section is None, None, 0
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
        elif line.startswith("#") and section is not None:
            inside = line.lstrip("#").strip() == section
            seen += inside
    assert section is None or seen == 1, f"{page} has {seen} sections {section!r}"
    return found


def commands(page: str, section: str) -> list[list[str]]:
    """The words of each `lawa` command in one section of a page."""
    lines = "".join(blocks(page, section, "")).splitlines()
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("lawa ")]
