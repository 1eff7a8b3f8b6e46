"""Every relative link in the Markdown leads to a file, and every anchor to a heading."""

import re
import subprocess
from functools import cache
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)\s#]*)(?:#([^)\s]*))?\)")


def pages() -> list[Path]:
    tracked = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "*.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    ).stdout.split()
    return [ROOT / name for name in tracked if (ROOT / name).is_file()]


@cache
def prose(page: Path) -> str:
    """The text without blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.M | re.S)


@cache
def anchors(page: Path) -> set[str]:
    """Headings as GitHub and the site turn them into anchors."""
    found = set()
    for heading in re.findall(r"^#+ (.+)$", prose(page), re.M):
        plain = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        found.add(re.sub(r"[^\w\- ]", "", plain).strip().replace(" ", "-"))
    return found


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs the list of tracked files")
def test_every_relative_link_leads_somewhere() -> None:
    broken = []
    for page in pages():
        for target, anchor in LINK.findall(prose(page)):
            path = (page.parent / unquote(target)).resolve() if target else page
            if not path.exists():
                broken.append(f"{page.relative_to(ROOT)}: {target}")
            elif anchor and path.suffix == ".md" and anchor not in anchors(path):
                broken.append(f"{page.relative_to(ROOT)}: {target}#{anchor}")
    assert not broken, "\n".join(broken)
