"""Check that every internal link of the built site leads to a page and an anchor that exist.

python docs/site/check_links.py site
"""

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """The links, and the anchors that others can link to, of one page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = {""}
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect what matters of a tag."""
        for name, value in attrs:
            if name == "id" or (name == "name" and tag == "a"):
                self.anchors.add(value or "")
            elif name in ("href", "src") and value:
                self.links.append(value)


def broken_links(site: Path) -> list[str]:
    """One line per link that leads nowhere."""
    pages = {path: Page(path) for path in sorted(site.rglob("*.html"))}
    broken = []
    for path, page in pages.items():
        if path.name == "404.html":
            continue  # its links are absolute, for wherever it is served
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or link.startswith("//"):
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if target.is_dir():
                target /= "index.html"
            anchors = pages[target].anchors if target in pages else {unquote(parts.fragment)}
            if not target.exists() or unquote(parts.fragment) not in anchors:
                broken.append(f"{path.relative_to(site)}: {link}")
    return broken


if __name__ == "__main__":
    found = broken_links(Path(sys.argv[1]).resolve())
    print("\n".join(found) or "every internal link works")
    sys.exit(bool(found))
