"""Figures on the page: each panel an image of its own, so that they stack where it is narrow."""

import base64

from lawa_lab.report.drawing import Drawing, draw_panel, legend, svg_text
from lawa_lab.report.markup import Markup, element
from lawa_lab.report.panels import Panel, Point
from lawa_lab.report.styles import INK, Style

__all__ = ["figure"]

_CAPTIONS = {
    "saving": "The arrow runs from where the raw weights reached the value of the longest stretch "
    "back to where the average did; ticks are the single seeds.",
    "windows": "Means without ranges, which would hide the lines. Dots mark a series that was "
    "evaluated rarely.",
    "curves": "All values that were recorded.",
    "early": "The start of training, where averages reach back to much worse weights.",
    "coefficients": "First the values, then the difference seed by seed; its start may lie "
    "outside.",
    "batch_norm": "The same weights with BatchNorm statistics made in different ways.",
    "target": "Dotted where only some seeds got there. Above zero the average came first.",
    "lookahead": "Raw weights with running BatchNorm statistics.",
    "runs": "Raw weights as they are usually evaluated.",
}
_DASHES = {"-": None, "--": "7 3", "-.": "7 3 2 3", ":": "2 2"}


def figure(drawing: Drawing) -> Markup:
    """A figure with its legend as text, its panels as images, and a caption."""
    entries = [
        element("li", _swatch(style, _marker(drawing.panels, label)), label)
        for label, style in legend(drawing.panels).items()
    ]
    images = [
        element(
            "img",
            src=f"data:image/svg+xml;base64,{_encoded(panel)}",
            alt=describe(panel, drawing.title),
            width="470",
            height="340",
        )
        for panel in drawing.panels
    ]
    ranged = any(line.low for panel in drawing.panels for line in panel.lines)
    caption = "Lines are means over seeds, bands run from the worst to the best seed. "
    return element(
        "figure",
        element(
            "div",
            element("ul", *entries, class_="legend"),
            element("div", *images, class_="panels"),
            class_="card",
        ),
        element(
            "figcaption",
            f"{drawing.title}. {caption if ranged else ''}{_CAPTIONS[drawing.kind]}",
        ),
    )


def describe(panel: Panel, title: str) -> str:
    """A panel in words, for those who do not see it: from where to where each line runs."""

    def say(value: float) -> str:
        return f"{100 * value:.1f}%" if panel.percent else f"{value:.3g}"

    parts = []
    for line in panel.lines:
        there = [(a, v) for a, v in zip(line.at, line.mean, strict=True) if v is not None]
        if line.label and there:
            parts.append(f"{line.label}: from {say(there[0][1])} to {say(there[-1][1])}")
    mark = f" {' '.join(panel.mark.text.split())}." if panel.mark else ""
    return f"{title}, {panel.title} against {panel.x_label}. {'; '.join(parts)}.{mark}"


def _encoded(panel: Panel) -> str:
    return base64.b64encode(svg_text(draw_panel(panel)).encode()).decode()


def _marker(panels: tuple[Panel, ...], label: str) -> Point | None:
    points = (point for panel in panels for point in panel.points)
    return next((point for point in points if point.label == label), None)


def _swatch(style: Style | None, point: Point | None) -> Markup:
    """A piece of the line, or the point, as it is drawn."""
    if style is not None:
        dashes = style.dashes
        pattern = (
            _DASHES[dashes]
            if isinstance(dashes, str)
            else " ".join(f"{2 * length:g}" for length in dashes[1])
        )
        shape = element(
            "path",
            d="M1 6H35",
            stroke=style.colour,
            stroke_width=f"{1.3 * style.width:.1f}",
            stroke_dasharray=pattern,
        )
    else:
        outlines = {"o": "M14 6a4 4 0 1 0 8 0a4 4 0 1 0-8 0", "s": "M14 2h8v8h-8z"}
        outline = outlines.get(point.marker if point else "", "M18 1l5 5l-5 5l-5-5z")
        shape = element("path", d=outline, stroke=INK, stroke_width="2")
    return element(
        "svg", shape, viewBox="0 0 36 12", width="36", height="12", fill="none", aria_hidden="true"
    )
