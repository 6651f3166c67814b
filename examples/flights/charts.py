"""Charts as SVG: lines, bars and a heat map; hovering over a shape shows its value. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import pandas as pd

# Distinguishable with colour blindness too (Okabe and Ito).
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
GREY = "#a1a1aa"
WIDTH, RIGHT = 860, 20


@dataclass(frozen=True)
class Line:
    """One line of a chart: its name and its points."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]


@dataclass(frozen=True)
class Axis:
    """A range of values, and the labels at some of them."""

    low: float
    high: float
    ticks: Sequence[tuple[float, str]]

    def at(self, value: float, start: float, end: float) -> float:
        """The coordinate of a value between two edges of the drawing."""
        return start + (end - start) * (value - self.low) / ((self.high - self.low) or 1.0)


def axis(low: float, high: float, unit: str = "", steps: int = 5) -> Axis:
    """An axis with round numbers on it, a little longer than asked for."""
    raw = max(1e-9, (high - low) / steps)
    size: float = 10 ** len(str(int(raw))) / 10 if raw >= 1 else 0.1
    step = next(size * n for n in (1, 2, 2.5, 5, 10) if size * n >= raw)
    first, last = int(low // step), int(-(-high // step))
    ticks = [(n * step, f"{n * step:,.10g}{unit}") for n in range(first, last + 1)]
    return Axis(first * step, last * step, ticks)


def lines(given: Sequence[Line], x: Axis, y: Axis, marks: Sequence[tuple[float, str]] = ()) -> str:
    """Lines with a legend above them; `marks` are dashed vertical lines with a label."""
    height, left, top, bottom = 320, 64, 34, 30
    low, right = height - bottom, WIDTH - RIGHT
    parts = _frame(height)
    for value, text in y.ticks:
        at = y.at(value, low, top)
        parts.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(_text(left - 8, at + 4, text, "end"))
    for value, text in x.ticks:
        parts.append(_text(x.at(value, left, right), height - 8, text, "middle"))
    for value, text in marks:
        at = x.at(value, left, right)
        parts.append(f'<line class="mark" x1="{at:.1f}" x2="{at:.1f}" y1="{top}" y2="{low}"/>')
        parts.append(f'<text class="mark" x="{at + 5:.1f}" y="{top + 12}">{escape(text)}</text>')
    legend_x = float(left)
    for number, line in enumerate(given):
        color = COLORS[number % len(COLORS)]
        points = " ".join(
            f"{x.at(a, left, right):.1f},{y.at(b, low, top):.1f}"
            for a, b in zip(line.xs, line.ys, strict=True)
        )
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}"/>')
        parts.append(
            f'<rect x="{legend_x:.0f}" y="9" width="12" height="12" rx="3" fill="{color}"/>'
            + _text(legend_x + 18, 19, line.name)
        )
        legend_x += 40 + 7 * len(line.name)
    return "\n".join([*parts, "</svg>"])


def bars(series: pd.Series, unit: str = "", digits: int = 1, note: str = "") -> str:
    """One bar for each name, followed by its value; `note` is shown when hovering."""
    return stacked(series.to_frame(note or "value"), unit, digits, legend=False)


def stacked(frame: pd.DataFrame, unit: str = "", digits: int = 0, *, legend: bool = True) -> str:
    """One bar for each row, stacked from its columns and followed by the sum."""
    row, names, top = 26, 210, 34 if legend else 6
    parts = _frame(top + row * len(frame) + 4)
    most = max(1e-9, float(frame.clip(lower=0).sum(axis=1).max()))
    scale = (WIDTH - names - 100) / most
    if legend:
        legend_x = float(names)
        for number, column in enumerate(frame.columns):
            parts.append(
                f'<rect x="{legend_x:.0f}" y="7" width="12" height="12" rx="3" '
                f'fill="{_color(number, str(column))}"/>' + _text(legend_x + 18, 17, str(column))
            )
            legend_x += 40 + 7 * len(str(column))
    for number, (name, values) in enumerate(frame.iterrows()):
        y, at = top + number * row, float(names)
        parts.append(_text(names - 10, y + 15, str(name), "end"))
        for part, (column, value) in enumerate(values.items()):
            length = max(0.0, float(value)) * scale
            parts.append(
                f'<rect x="{at:.1f}" y="{y}" width="{length:.1f}" height="{row - 6}" '
                f'fill="{_color(part, str(column))}"><title>{escape(str(name))}, '
                f"{escape(str(column))}: {float(value):,.{digits}f}{unit}</title></rect>"
            )
            at += length
        parts.append(_text(at + 8, y + 15, f"{float(values.sum()):,.{digits}f}{unit}"))
    return "\n".join([*parts, "</svg>"])


def heat(frame: pd.DataFrame, unit: str = "") -> str:
    """A cell for each row and column, darker for higher values; missing ones stay empty."""
    left, top, size = 64, 24, 34
    wide = (WIDTH - left - RIGHT) / max(1, len(frame.columns))
    parts = _frame(top + size * len(frame) + 4)
    most = max(1e-9, float(frame.max().max()))
    for n, column in enumerate(frame.columns):
        parts.append(_text(left + wide * (n + 0.5), top - 8, str(column), "middle"))
    for m, (name, values) in enumerate(frame.iterrows()):
        y = top + size * m
        parts.append(_text(left - 10, y + size / 2 + 4, str(name), "end"))
        for n, (column, value) in enumerate(values.items()):
            if pd.isna(value):
                continue
            share = min(1.0, max(0.0, float(value)) / most)
            ink = "#ffffff" if share > 0.6 else "#3f3f46"
            x = left + wide * n
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{wide - 2:.1f}" height="{size - 2}" rx="3" '
                f'fill="{_shade(share)}"><title>{escape(str(name))}, {escape(str(column))}: '
                f"{float(value):,.1f}{unit}</title></rect>"
                f'<text x="{x + wide / 2 - 1:.1f}" y="{y + size / 2 + 3}" text-anchor="middle" '
                f'style="fill:{ink}">{round(float(value))}</text>'
            )
    return "\n".join([*parts, "</svg>"])


def _frame(height: float) -> list[str]:
    return [f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img">']


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _color(number: int, name: str) -> str:
    return GREY if name == "others" else COLORS[number % len(COLORS)]


def _shade(share: float) -> str:
    """From nearly white to a deep orange."""
    low, high = (255, 247, 237), (194, 65, 12)
    mixed = (round(a + (b - a) * share) for a, b in zip(low, high, strict=True))
    return "#" + "".join(f"{part:02x}" for part in mixed)
