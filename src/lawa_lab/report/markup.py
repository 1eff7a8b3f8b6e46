"""HTML with as little machinery as will do: what is not markup already is escaped."""

import html
from collections.abc import Iterable, Sequence

__all__ = ["Markup", "element", "joined", "table"]

_EMPTY = {"img", "meta", "br"}  # have no end tag


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def element(tag: str, *children: str, **attributes: str | None) -> Markup:
    """An element; children that are not markup are escaped, attributes always.

    A trailing underscore in a name goes (`class_`), others become hyphens (`aria_label`).

    >>> element("p", "1 < 2, ", element("b", "so"), class_="note")
    '<p class="note">1 &lt; 2, <b>so</b></p>'
    """
    named = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{html.escape(value)}"'
        for name, value in attributes.items()
        if value is not None
    )
    inside = "".join(_safe(child) for child in children)
    return Markup(f"<{tag}{named}>" if tag in _EMPTY else f"<{tag}{named}>{inside}</{tag}>")


def joined(parts: Iterable[str], between: str = "\n") -> Markup:
    """Parts one after the other, escaped where they are not markup."""
    return Markup(between.join(_safe(part) for part in parts))


def table(
    caption: str, head: Sequence[str], groups: Sequence[tuple[str | None, Sequence[Sequence[str]]]]
) -> Markup:
    """A table in a box of its own, in which it scrolls where the page is narrow.

    A group is a heading, or None, and its rows; the first cell of a row is what the row is about.
    """
    top = element("tr", *(element("th", cell, scope="col") for cell in head))
    bodies = []
    for heading, rows in groups:
        lines = []
        if heading is not None:
            stays = element("span", heading, class_="stays")
            wide = element("th", stays, scope="rowgroup", colspan=str(len(head)))
            lines.append(element("tr", wide, class_="group"))
        for first, *cells in rows:
            numbers = (element("td", cell) for cell in cells)
            lines.append(element("tr", element("th", first, scope="row"), *numbers))
        bodies.append(element("tbody", *lines))
    named = element("caption", element("span", caption, class_="stays"))
    whole = element("table", named, element("thead", top), *bodies)
    # Focusable, so that it can be scrolled without a mouse.
    return element("div", whole, class_="wide", role="region", aria_label=caption, tabindex="0")


def _safe(text: str) -> str:
    return text if isinstance(text, Markup) else html.escape(text)
