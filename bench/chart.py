"""A chart of lines as plain SVG, with logarithmic axes; readable on light and dark pages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["Line", "chart", "short"]

WIDTH, HIGH = 760, 470
LEFT, RIGHT, TOP, BOTTOM = 84, 24, 74, 62
COLOURS = (("#1f6fb2", "#6cb6ff"), ("#c2571a", "#ff9d5c"), ("#2f7d3b", "#7ed68a"))
STYLE = """\
text { font-family: Helvetica, Arial, sans-serif; font-size: 13px; fill: #24292f }
.title { font-size: 16px; font-weight: bold }
.small { font-size: 11px }
.back { fill: #ffffff }
.grid { stroke: #d0d7de; stroke-width: 1 }
"""
DARK = """\
text { fill: #e6edf3 }
.back { fill: #0d1117 }
.grid { stroke: #30363d }
"""


@dataclass(frozen=True, slots=True)
class Line:
    """Points from left to right, and what stands beside some of them."""

    name: str
    points: Sequence[tuple[float, float]]
    labels: Sequence[str] = ()


class _Scale:
    """A logarithmic scale of whole decades."""

    def __init__(self, values: Sequence[float], start: float, end: float) -> None:
        if not values or min(values) <= 0:
            raise ValueError("a logarithmic axis needs values, all greater than zero")
        self.low = math.floor(math.log10(min(values)))
        self.high = max(math.ceil(math.log10(max(values))), self.low + 1)
        self._start, self._end = start, end

    def at(self, value: float) -> float:
        part = (math.log10(value) - self.low) / (self.high - self.low)
        return self._start + part * (self._end - self._start)

    def ticks(self) -> list[float]:
        return [10.0**power for power in range(self.low, self.high + 1)]


def short(value: float) -> str:
    """A figure for an axis: 0.1, 20, 5k, 1.5M."""
    for limit, name in ((1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:g}{name}"
    return f"{value:g}"


def chart(title: str, across: str, up: str, lines: Sequence[Line]) -> str:
    """The picture of some lines; `across` and `up` name the axes, with their units."""
    if len(lines) > len(COLOURS):
        raise ValueError(f"a chart has {len(COLOURS)} lines at most, not {len(lines)}")
    points = [point for line in lines for point in line.points]
    x = _Scale([point[0] for point in points], LEFT, WIDTH - RIGHT)
    y = _Scale([point[1] for point in points], HIGH - BOTTOM, TOP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HIGH}" '
        f'width="{WIDTH}" height="{HIGH}" role="img" aria-label="{escape(title)}">',
        f"<style>\n{STYLE}{_coloured(COLOURS, 0)}@media (prefers-color-scheme: dark) {{\n"
        f"{DARK}{_coloured(COLOURS, 1)}}}\n</style>",
        f'<rect class="back" width="{WIDTH}" height="{HIGH}" rx="6"/>',
        f'<text class="title" x="{LEFT}" y="28">{escape(title)}</text>',
        *_grid(x, y),
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HIGH - 16}" text-anchor="middle">'
        f"{escape(across)}</text>",
        f'<text transform="translate(20 {(TOP + HIGH - BOTTOM) / 2:.0f}) rotate(-90)" '
        f'text-anchor="middle">{escape(up)}</text>',
    ]
    legend = LEFT
    for number, line in enumerate(lines):
        parts += _drawn(line, number, x, y)
        parts.append(f'<rect class="fill{number}" x="{legend}" y="42" width="14" height="14"/>')
        parts.append(f'<text x="{legend + 20}" y="54">{escape(line.name)}</text>')
        legend += 44 + 7 * len(line.name)
    return "\n".join([*parts, "</svg>\n"])


def _coloured(colours: Sequence[tuple[str, str]], which: int) -> str:
    return "".join(
        f".line{n} {{ stroke: {pair[which]}; fill: none; stroke-width: 2 }}\n"
        f".fill{n} {{ fill: {pair[which]} }}\n"
        for n, pair in enumerate(colours)
    )


def _grid(x: _Scale, y: _Scale) -> list[str]:
    parts = []
    for value in x.ticks():
        at, below = x.at(value), HIGH - BOTTOM + 20
        parts.append(f'<path class="grid" d="M{at:.1f},{TOP} V{HIGH - BOTTOM}"/>')
        parts.append(f'<text x="{at:.1f}" y="{below}" text-anchor="middle">{short(value)}</text>')
    for value in y.ticks():
        at = y.at(value)
        parts.append(f'<path class="grid" d="M{LEFT},{at:.1f} H{WIDTH - RIGHT}"/>')
        parts.append(
            f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{short(value)}</text>'
        )
    return parts


def _drawn(line: Line, number: int, x: _Scale, y: _Scale) -> list[str]:
    places = [(x.at(across), y.at(up)) for across, up in line.points]
    path = " L".join(f"{across:.1f},{up:.1f}" for across, up in places)
    parts = [f'<path class="line{number}" d="M{path}"/>']
    for at, (across, up) in enumerate(places):
        parts.append(f'<circle class="fill{number}" cx="{across:.1f}" cy="{up:.1f}" r="3.5"/>')
        if at < len(line.labels) and line.labels[at]:
            # Above the line for every other one, below for the rest, so that lines stay apart.
            beside = up - 9 if number % 2 == 0 else up + 18
            parts.append(
                f'<text class="small" x="{across:.1f}" y="{beside:.1f}" text-anchor="middle">'
                f"{escape(line.labels[at])}</text>"
            )
    return parts
