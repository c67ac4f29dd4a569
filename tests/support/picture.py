"""Draws a picture of boxes and arrows from a text file: docs/architecture.toml becomes docs/architecture.svg.

PYTHONPATH=tests python -m support.picture docs/architecture.toml     # writes the SVG beside it

The source says where each box stands; nothing is laid out by itself, so the same source always gives the same bytes.

    size = [960, 480]                       # width and height of the picture
    [[box]]
    name = "broker"                         # what arrows call it
    kind = "broker"                         # its colour: a key of KINDS
    at = [330, 60, 230, 200]                # left, top, width, height
    title = "Broker"
    text = ["serves topics"]                # lines below the title
    [[arrow]]
    from = ["producers", "right", 0.5]      # a box, a side of it, and where on that side: 0 to 1
    to = ["broker", "left", 0.2]
    via = [[280, 96]]                       # corners in between
    label = "messages"
    label_at = [277, 90]                    # the middle of its base line
    both_ways = true                        # an arrow head at both ends
"""

from __future__ import annotations

import sys
import tomllib
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
TITLE_PX, TEXT_PX, LINE_PX = 16, 13, 19


class Colours(NamedTuple):
    """Of a kind of box, by day and by night."""

    fill: str
    line: str
    dark_fill: str
    dark_line: str


KINDS = {
    "frame": Colours("#f6f8fa", "#afb8c1", "#161b22", "#484f58"),
    "client": Colours("#ddf4ff", "#0969da", "#0c2d6b", "#58a6ff"),
    "broker": Colours("#fbefff", "#8250df", "#3c1e70", "#bc8cff"),
    "bookie": Colours("#dafbe1", "#1a7f37", "#04260f", "#3fb950"),
    "metadata": Colours("#eaeef2", "#57606a", "#21262d", "#8b949e"),
    "spark": Colours("#fff1e5", "#bc4c00", "#3d1300", "#f0883e"),
}
HEAD = (
    '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto-start-reverse">'
    '<path class="head" d="M0 0 L8 4 L0 8 Z"/></marker>'
)
# Background, text, text of less weight, arrows.
DAY = ("#ffffff", "#1f2328", "#57606a", "#424a53")
NIGHT = ("#0d1117", "#e6edf3", "#9da7b3", "#b1bac4")


def style(*, dark: bool) -> str:
    """The rules that colour everything."""
    ground, text, soft, arrow = NIGHT if dark else DAY
    rules = [
        f".ground {{ fill: {ground} }}",
        f".title {{ fill: {text} }}",
        f".text, .label {{ fill: {soft} }}",
        f".arrow {{ stroke: {arrow} }}",
        f".head {{ fill: {arrow} }}",
    ]
    for kind, colours in KINDS.items():
        fill, line = (colours.dark_fill, colours.dark_line) if dark else (colours.fill, colours.line)
        rules.append(f".{kind} {{ fill: {fill}; stroke: {line} }}")
    return "\n".join(rules)


def draw(source: dict[str, Any]) -> str:
    """The SVG. ValueError for a kind that does not exist, KeyError for a box that an arrow names and nobody drew."""
    width, height = source["size"]
    boxes = {box["name"]: box for box in source["box"]}
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    parts = [
        f'{head} role="img" aria-label="{escape(source["alternative"])}" font-family="{FONT}">',
        f"<style>\n{style(dark=False)}\n@media (prefers-color-scheme: dark) {{\n{style(dark=True)}\n}}\n</style>",
        HEAD,
        f'<rect class="ground" width="{width}" height="{height}" rx="10"/>',
        *(draw_box(box) for box in source["box"]),
        *(draw_arrow(arrow, boxes) for arrow in source["arrow"]),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def draw_box(box: dict[str, Any]) -> str:
    """A rectangle with its title and text in the middle; those of a frame stand in its upper left corner."""
    left, top, width, height = box["at"]
    frame = box["kind"] == "frame"
    if box["kind"] not in KINDS:
        raise ValueError(f"box {box['name']!r} has the kind {box['kind']!r}; use one of {', '.join(KINDS)}")
    border = 'stroke-width="1.5" stroke-dasharray="5 4"' if frame else 'stroke-width="1.5"'
    place = f'x="{left}" y="{top}" width="{width}" height="{height}"'
    lines = [f'<rect class="{box["kind"]}" {place} rx="8" {border}/>']
    if frame:
        lines.append(words("label", left + 14, top + 22, TEXT_PX, box["title"]))
        return "\n".join(lines)
    middle = left + width / 2
    text = box.get("text", [])
    base = top + height / 2 - len(text) * LINE_PX / 2 + TITLE_PX * 0.35
    lines.append(
        words("title", middle, base, TITLE_PX, box["title"], 'text-anchor="middle" font-weight="600"')
    )
    for number, line in enumerate(text, 1):
        lines.append(
            words("text", middle, base + number * LINE_PX + 1, TEXT_PX, line, 'text-anchor="middle"')
        )
    return "\n".join(lines)


def draw_arrow(arrow: dict[str, Any], boxes: dict[str, dict[str, Any]]) -> str:
    """A line with a head, or two, and its label."""
    points = [point(boxes, *arrow["from"]), *arrow.get("via", []), point(boxes, *arrow["to"])]
    path = "M" + " L".join(f"{x:g} {y:g}" for x, y in points)
    start = ' marker-start="url(#head)"' if arrow.get("both_ways") else ""
    lines = [
        f'<path class="arrow" d="{path}" fill="none" stroke-width="1.6"{start} marker-end="url(#head)"/>'
    ]
    if "label" in arrow:
        x, y = arrow["label_at"]
        lines.append(words("label", x, y, TEXT_PX, arrow["label"], 'text-anchor="middle"'))
    return "\n".join(lines)


def point(boxes: dict[str, dict[str, Any]], name: str, side: str, share: float) -> tuple[float, float]:
    """Where an arrow meets a box: 3 px off its line."""
    left, top, width, height = boxes[name]["at"]
    return {
        "left": (left - 3, top + share * height),
        "right": (left + width + 3, top + share * height),
        "top": (left + share * width, top - 3),
        "bottom": (left + share * width, top + height + 3),
    }[side]


def words(kind: str, x: float, y: float, size: int, text: str, more: str = "") -> str:
    """A line of text; y is that of its base line."""
    attributes = f' class="{kind}" x="{x:g}" y="{y:g}" font-size="{size}"' + (f" {more}" if more else "")
    return f"<text{attributes}>{escape(text)}</text>"


def main(path: Path) -> None:
    """Writes the SVG beside its source."""
    path.with_suffix(".svg").write_text(draw(tomllib.loads(path.read_text())))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

__all__ = ["draw", "main"]
