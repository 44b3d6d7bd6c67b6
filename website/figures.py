"""Figures in the pages: SVG files put into the page, so that they follow its colours, and flow
charts (Mermaid's) drawn as SVG, so that a browser needs no script from elsewhere.
"""

import html
import re
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

CHART = re.compile(r"^```mermaid\nflowchart TD\n(.*?)^```$", re.M | re.S)
NODE = re.compile(r"(\w+)(?:\[\"(.*?)\"\])?")
STYLE = re.compile(r"<style>.*?</style>", re.S)

HEIGHT, GAP_X, GAP_Y = 44, 18, 46
NARROWEST, NARROW = 130, 440  # a box, a drawing that is not stretched
BOLD, LETTER = 8.0, 6.6  # a letter of a title, and of a note


def inline_svg(path: Path, description: str) -> str:
    """An SVG file as HTML of the page, without its own style, which is for where it stands alone
    (docs/assets/style.css).
    """
    drawing = STYLE.sub("", path.read_text(encoding="utf-8"))
    drawing = re.sub(r"<svg ", f'<svg role="img" aria-label="{html.escape(description)}" ', drawing, count=1)
    drawing = re.sub(r"\n\s*", "", drawing)
    return f'<div class="figure">{drawing}</div>'


def with_drawn_charts(text: str) -> str:
    """The flow charts of a page as drawings."""
    return CHART.sub(lambda chart: draw(chart[1]), text)


@dataclass
class Chart:
    """Boxes by layer, from the top; arrows as pairs of names.

    A name without a label is a bend of a long arrow.
    """

    labels: dict[str, str] = field(default_factory=dict)
    arrows: list[tuple[str, str]] = field(default_factory=list)
    layers: list[list[str]] = field(default_factory=list)

    @property
    def box_width(self) -> float:
        """Of all boxes: the longest line fits."""
        lines = [label.partition("<br>") for label in self.labels.values()]
        return max(NARROWEST, *(max(BOLD * len(title), LETTER * len(rest)) + 12 for title, _, rest in lines))


def read_chart(text: str) -> Chart:
    """The lines `a["label"] --> b --> c` of a flow chart."""
    chart = Chart()
    for line in text.splitlines():
        names = []
        for part in line.split("-->"):
            found = NODE.fullmatch(part.strip())
            assert found is not None, line
            names.append(found[1])
            if found[2] is not None or found[1] not in chart.labels:
                chart.labels[found[1]] = found[2] or found[1]
        chart.arrows += pairwise(names)
    return chart


def lay_out(chart: Chart) -> None:
    """Each box as high as the boxes above it allow; boxes of a layer near those that they are tied
    to.
    """
    depth = dict.fromkeys(chart.labels, 0)
    for _ in chart.labels:
        for above, below in chart.arrows:
            depth[below] = max(depth[below], depth[above] + 1)
    straight: list[tuple[str, str]] = []
    for above, below in chart.arrows:
        bends = [f"{above} {below} {at}" for at in range(depth[above] + 1, depth[below])]
        depth |= {bend: depth[above] + 1 + number for number, bend in enumerate(bends)}
        points = [above, *bends, below]
        straight += pairwise(points)
    chart.arrows = straight
    chart.layers = [[name for name in depth if depth[name] == layer] for layer in range(max(depth.values()) + 1)]
    for turn in range(24):
        place = {name: at - len(layer) / 2 for layer in chart.layers for at, name in enumerate(layer)}
        downwards = turn % 2 == 0
        for layer in chart.layers if downwards else reversed(chart.layers):
            tied = {
                name: [place[a if downwards else b] for a, b in straight if name == (b if downwards else a)] for name in layer
            }
            layer.sort(key=lambda name: sum(tied[name]) / len(tied[name]) if tied[name] else place[name])
            place |= {name: at - len(layer) / 2 for at, name in enumerate(layer)}


def _widths(layer: list[str], chart: Chart) -> list[float]:
    return [chart.box_width if name in chart.labels else GAP_X for name in layer]


def draw(text: str) -> str:
    """A flow chart as SVG in a line of HTML."""
    chart = read_chart(text)
    lay_out(chart)
    wide = chart.box_width
    spans = [sum(_widths(layer, chart)) + GAP_X * (len(layer) - 1) for layer in chart.layers]
    total = max(spans)
    centre: dict[str, tuple[float, float]] = {}
    for number, (layer, span) in enumerate(zip(chart.layers, spans, strict=True)):
        left = (total - span) / 2
        for name, width in zip(layer, _widths(layer, chart), strict=True):
            centre[name] = (left + width / 2, number * (HEIGHT + GAP_Y) + HEIGHT / 2)
            left += width + GAP_X
    parts = []
    for above, below in chart.arrows:
        (x0, y0), (x1, y1) = centre[above], centre[below]
        y0, y1 = (y0 + HEIGHT / 2 if above in chart.labels else y0), (y1 - HEIGHT / 2 if below in chart.labels else y1)
        head = ' marker-end="url(#arrow)"' if below in chart.labels else ""
        middle = (y0 + y1) / 2
        parts.append(f'<path class="line" d="M{x0:g} {y0:g}C{x0:g} {middle:g} {x1:g} {middle:g} {x1:g} {y1:g}"{head}/>')
    for name, label in chart.labels.items():
        (x, y), (title, _, rest) = centre[name], label.partition("<br>")
        parts.append(
            f'<rect class="box" x="{x - wide / 2:g}" y="{y - HEIGHT / 2:g}" width="{wide:g}" height="{HEIGHT}" rx="6"/>'
        )
        rows = [(title, "name", -3 if rest else 4), *([(rest, "note", 13)] if rest else [])]
        parts += [f'<text class="{kind}" x="{x:g}" y="{y + down:g}">{html.escape(row)}</text>' for row, kind, down in rows]
    height = len(chart.layers) * (HEIGHT + GAP_Y) - GAP_Y
    marker = (
        '<defs><marker id="arrow" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path class="head" d="M0 0L8 4L0 8z"/></marker></defs>'
    )
    least = "min-width:0;" if total < NARROW else ""
    size = f'viewBox="-2 -2 {total + 4:g} {height + 4:g}" style="{least}max-width:{total + 4:g}px"'
    return f'<div class="figure"><svg xmlns="http://www.w3.org/2000/svg" {size}>{marker}{"".join(parts)}</svg></div>'
