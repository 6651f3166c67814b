"""Charts as one HTML file with drawings in it: nothing else is needed to look at them."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

import pandas as pd

from examples.flights.check import Verdict

COLORS = ("#2563eb", "#dc2626", "#16a34a", "#9333ea", "#ea580c", "#0891b2")
WIDTH, HEIGHT, LEFT, BOTTOM = 860, 300, 60, 40

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>New York 2013</title><style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 900px; margin: 2em auto; color: #18181b }}
table {{ border-collapse: collapse }} td, th {{ padding: 4px 14px; text-align: right }}
th:first-child, td:first-child {{ text-align: left }} tr {{ border-bottom: 1px solid #e4e4e7 }}
h2 {{ margin-top: 2em }} .ok {{ color: #16a34a }} .bad {{ color: #dc2626 }}
</style></head><body>
<h1>Departures of New York, 2013</h1>
<p>Replayed as live events through Millstream and Spark. The pipeline was killed once on the way;
this is its result, row by row the same as the batch answer.</p>
{body}
</body></html>
"""


def write_report(
    path: Path,
    verdicts: Sequence[Verdict],
    delays: pd.DataFrame,
    rows: pd.DataFrame,
    fleet: pd.DataFrame,
) -> None:
    """Write the report."""
    parts = [
        _verdicts(verdicts),
        "<h2>Mean departure delay by airport, minutes (weekly)</h2>",
        _lines(_weekly(delays)),
        "<h2>Mean departure delay by rain in that hour at that airport, minutes</h2>",
        _bars(_by_rain(rows)),
        "<h2>Mean departure delay by carrier, minutes</h2>",
        _bars(rows.groupby("airline")["dep_delay"].mean().sort_values().astype(float)),
        "<h2>Planes by carrier</h2>",
        _bars(fleet.groupby("carrier").size().sort_values().astype(float), digits=0),
    ]
    path.write_text(PAGE.format(body="\n".join(parts)), encoding="utf-8")


def _weekly(delays: pd.DataFrame) -> pd.DataFrame:
    rows = delays.assign(day=pd.to_datetime(delays["day"]))
    weekly = rows.groupby(["origin", pd.Grouper(key="day", freq="W")])[["delay", "departed"]].sum()
    mean = weekly["delay"].astype(float) / weekly["departed"].astype(float)
    return mean.unstack("origin").dropna()


def _by_rain(rows: pd.DataFrame) -> pd.Series:
    edges, names = [-1, 0, 0.02, 0.1, 0.3, 100], ["none", "trace", "light", "rain", "heavy"]
    rain = pd.cut(rows["rain"].astype(float), edges, labels=names)
    return rows.groupby(rain, observed=True)["dep_delay"].mean().astype(float)


def _verdicts(verdicts: Sequence[Verdict]) -> str:
    lines = [
        "<table><tr><th>result</th><th>events in</th><th>rows out</th><th>lost</th>"
        "<th>duplicated</th><th>different</th></tr>"
    ]
    for v in verdicts:
        kind = "ok" if v.right else "bad"
        lines.append(
            f"<tr><td>{escape(v.name)}</td><td>{v.events_in:,}</td><td>{v.events_out:,}</td>"
            f"<td class={kind}>{v.lost}</td><td class={kind}>{v.duplicated}</td>"
            f"<td class={kind}>{v.different}</td></tr>"
        )
    return "\n".join([*lines, "</table>"])


def _lines(frame: pd.DataFrame) -> str:
    low, high = min(0.0, float(frame.min().min())), float(frame.max().max()) or 1.0
    inner_w, inner_h = WIDTH - LEFT - 20, HEIGHT - BOTTOM - 20

    def x(n: int) -> float:
        return LEFT + inner_w * n / max(1, len(frame) - 1)

    def y(value: float) -> float:
        return 20 + inner_h * (1 - (value - low) / (high - low))

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" font-size="12" font-family="sans-serif">']
    for step in range(5):
        value = low + (high - low) * step / 4
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - 20}" y1="{y(value):.1f}" y2="{y(value):.1f}" '
            f'stroke="#e4e4e7"/><text x="{LEFT - 8}" y="{y(value) + 4:.1f}" '
            f'text-anchor="end">{value:.0f}</text>'
        )
    for n in range(0, len(frame), max(1, len(frame) // 8)):
        day = frame.index[n].strftime("%d %b")
        parts.append(f'<text x="{x(n):.0f}" y="{HEIGHT - 12}" text-anchor="middle">{day}</text>')
    for n, name in enumerate(frame.columns):
        points = " ".join(f"{x(i):.1f},{y(v):.1f}" for i, v in enumerate(frame[name]))
        color = COLORS[n % len(COLORS)]
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>'
            f'<text x="{LEFT + 20 + 70 * n}" y="16" fill="{color}">{escape(str(name))}</text>'
        )
    return "\n".join([*parts, "</svg>"])


def _bars(series: pd.Series, digits: int = 1) -> str:
    row, name_width = 24, 200
    height = row * len(series) + 10
    most = max(1e-9, float(series.abs().max()))
    parts = [f'<svg viewBox="0 0 {WIDTH} {height}" font-size="12" font-family="sans-serif">']
    for n, (name, value) in enumerate(series.items()):
        length = (WIDTH - name_width - 80) * max(0.0, float(value)) / most
        top = 5 + n * row
        parts.append(
            f'<text x="{name_width - 8}" y="{top + 15}" text-anchor="end">{escape(str(name))}'
            f'</text><rect x="{name_width}" y="{top}" width="{length:.1f}" height="{row - 6}" '
            f'fill="{COLORS[0]}"/><text x="{name_width + length + 6:.1f}" y="{top + 15}">'
            f"{value:,.{digits}f}</text>"
        )
    return "\n".join([*parts, "</svg>"])
