"""Charts as SVG text, in the style of a run's report; they need no script.

Values must be finite.
"""

import html
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, log10
from typing import Literal

# Margins of a drawing.
LEFT = 58
RIGHT = 14
TOP = 8
BOTTOM = 36
HEIGHT = 290
COLORS = 8  # that report.css has


@dataclass(frozen=True)
class Curve:
    """Points [x, y], as a line or dots; or [x, low, high], as a band or bars.

    `notes` are shown for dots under a pointer.
    """

    label: str
    color: int
    points: Sequence[Sequence[float]]
    kind: Literal["line", "dashed", "dots", "band", "bars"] = "line"
    notes: Sequence[str] = ()

    @property
    def look(self) -> str:
        return f"var(--c{self.color % COLORS})"


@dataclass(frozen=True)
class Axis:
    """Maps values from `low` to `high` to places from `first` to `last` of the drawing."""

    low: float
    high: float
    first: float
    last: float
    logarithmic: bool

    def __call__(self, value: float) -> float:
        low = self.low
        high = self.high
        if self.logarithmic:
            low, high, value = map(log10, (low, high, value))
        return self.first + (value - low) / (high - low) * (self.last - self.first)

    def ticks(self, most: int) -> list[float]:
        if self.logarithmic:
            powers = range(floor(log10(self.low)), ceil(log10(self.high)) + 1)
            for steps in ((1, 2, 5), (1, 3), (1,)):
                found = [
                    step * 10.0**power
                    for power in powers
                    for step in steps
                    if self.low <= step * 10.0**power <= self.high
                ]
                if 2 <= len(found) <= most:
                    return found
            if len(found) > most:
                return found[:: ceil(len(found) / most)]
        rough = (self.high - self.low) / most
        power = 10.0 ** floor(log10(rough))
        step = next(each * power for each in (1, 2, 5, 10) if each * power >= rough)
        return [
            number * step for number in range(ceil(self.low / step), floor(self.high / step) + 1)
        ]


def short(value: float) -> str:
    """A number in four digits, with a unit of large ones: 1.2M."""
    for least, unit, name in ((1e12, 1e12, "T"), (1e9, 1e9, "B"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if 1e15 > abs(value) >= least:
            return f"{value / unit:.4g}{name}"
    return f"{value:.4g}"


def chart(
    heading: str,
    curves: Sequence[Curve],
    x_name: str,
    *,
    width: int = 560,
    y_log: bool = False,
) -> str:
    """A box with a heading, a legend and a drawing of the curves that have points."""
    curves = [curve for curve in curves if curve.points]
    if not curves:
        return ""
    xs = [point[0] for curve in curves for point in curve.points]
    ys = [value for curve in curves for point in curve.points for value in point[1:]]
    x = Axis(*_bounds(xs, True), LEFT, width - RIGHT, True)
    y = Axis(*_bounds(ys, y_log), HEIGHT - BOTTOM, TOP, y_log)
    drawn = []
    for tick in y.ticks(6):
        drawn.append(
            f'<line class="grid" x1="{LEFT}" x2="{width - RIGHT}" y1="{y(tick):.1f}"'
            f' y2="{y(tick):.1f}"/>'
        )
        drawn.append(
            f'<text x="{LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{short(tick)}</text>'
        )
    for tick in x.ticks(width // 80):
        # FLOPs as a power of ten, other numbers with a unit.
        label = f"{tick:.0e}".replace("e+", "e") if "FLOPs" in x_name else short(tick)
        drawn.append(
            f'<text x="{x(tick):.1f}" y="{HEIGHT - 20}" text-anchor="middle">{label}</text>'
        )
    drawn.append(
        f'<text x="{(LEFT + width) / 2:.0f}" y="{HEIGHT - 5}"'
        f' text-anchor="middle">{html.escape(x_name)}</text>'
    )
    drawn += [
        _draw(curve, x, y) for curve in sorted(curves, key=lambda curve: curve.kind != "band")
    ]
    labels = {curve.label: curve.look for curve in curves if curve.label}
    legend = "".join(
        f'<span><i style="background: {look}"></i>{html.escape(label)}</span>'
        for label, look in labels.items()
    )
    wide = " wide" if width > 700 else ""
    picture = (
        f'<svg role="img" aria-label="{html.escape(heading)}" viewBox="0 0 {width}'
        f' {HEIGHT}">{"".join(drawn)}</svg>'
    )
    return (
        f'<div class="chart{wide}"><h3>{html.escape(heading)}</h3><div'
        f' class="legend">{legend}</div>{picture}</div>'
    )


def _bounds(values: Sequence[float], logarithmic: bool) -> tuple[float, float]:
    low = min(values)
    high = max(values)
    if logarithmic:
        room = max((high / low) ** 0.04, 1.001)
        return low / room, high * room
    room = 0.06 * (high - low) or abs(low) or 1.0
    return low - room, high + room


def _draw(curve: Curve, x: Axis, y: Axis) -> str:
    at = [(x(point[0]), *map(y, point[1:])) for point in curve.points]
    if curve.kind == "band":
        around = [*((px, low) for px, low, _ in at), *((px, high) for px, _, high in reversed(at))]
        corners = " ".join(f"{px:.1f},{py:.1f}" for px, py in around)
        return f'<polygon points="{corners}" style="fill: {curve.look}; opacity: .18"/>'
    if curve.kind == "bars":
        style = f"stroke: {curve.look}; stroke-width: 2"
        bars = (f"M{px - 5:.1f} {low:.1f}h10m-5 0V{high:.1f}m-5 0h10" for px, low, high in at)
        return "".join(f'<path class="curve" d="{path}" style="{style}"/>' for path in bars)
    if curve.kind == "dots":
        notes = [f"<title>{html.escape(note)}</title>" for note in curve.notes] or [""] * len(at)
        dots = zip(at, notes, strict=True)
        return "".join(
            f'<circle cx="{px:.1f}" cy="{py:.1f}" r="4" style="fill: {curve.look}">{note}</circle>'
            for (px, py), note in dots
        )
    path = "L".join(f"{px:.1f} {py:.1f}" for px, py in at)
    dash = ' stroke-dasharray="5 4"' if curve.kind == "dashed" else ""
    return f'<path class="curve" d="M{path}" style="stroke: {curve.look}"{dash}/>'
