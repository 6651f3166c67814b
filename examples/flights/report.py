"""The report: one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import pandas as pd

from examples.flights.charts import Axis, Line, axis, bars, heat, lines, stacked
from examples.flights.check import Verdict

NEW_YORK = "America/New_York"
FEW_DAYS = 21
MAKERS = 5  # of planes with their own colour in the chart

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Departures of New York, 2013</title><style>
:root {{ --ink: #18181b; --soft: #71717a; --line: #e4e4e7; --page: #fafafa; --card: #ffffff;
  --ok: #15803d; --bad: #b91c1c }}
@media (prefers-color-scheme: dark) {{ :root {{ --ink: #f4f4f5; --soft: #a1a1aa; --line: #3f3f46;
  --page: #18181b; --card: #27272a; --ok: #4ade80; --bad: #f87171 }} }}
body {{ font: 15px/1.55 system-ui, sans-serif; margin: 0; color: var(--ink);
  background: var(--page) }}
main {{ max-width: 940px; margin: 0 auto; padding: 2.5em 1.2em 4em }}
h1 {{ font-size: 2em; line-height: 1.2; margin: 0 0 .3em }}
h2 {{ font-size: 1.15em; margin: 0 }}
p {{ color: var(--soft); margin: .2em 0 1em; max-width: 44em }}
section {{ background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 1.2em 1.4em; margin-top: 1.2em }}
.tiles {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(130px, 1fr)); gap: .8em;
  margin-top: 1.4em }}
.tile {{ background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: .8em 1em }}
.tile b {{ display: block; font-size: 1.5em; font-variant-numeric: tabular-nums }}
.tile span {{ color: var(--soft); font-size: .85em }}
.ok {{ color: var(--ok) }} .bad {{ color: var(--bad) }}
table {{ border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }}
td, th {{ padding: .45em .6em; text-align: right; border-bottom: 1px solid var(--line) }}
th {{ color: var(--soft); font-weight: 500 }} tr:last-child td {{ border-bottom: 0 }}
th:first-child, td:first-child {{ text-align: left; padding-left: 0 }}
svg {{ display: block; width: 100%; height: auto; font: 12px system-ui, sans-serif }}
svg text {{ fill: var(--ink) }} svg .grid {{ stroke: var(--line) }}
svg polyline {{ stroke-width: 2; stroke-linejoin: round }}
svg line.mark {{ stroke: var(--bad); stroke-dasharray: 4 3 }} svg text.mark {{ fill: var(--bad) }}
</style></head><body><main>
<h1>Departures of New York, 2013</h1>
<p>{flights:,} flights and {weather:,} weather reports, replayed as live events
{speed:,.0f} times as fast as they happened. {story}</p>
{body}
</main></body></html>
"""


@dataclass(frozen=True)
class Run:
    """The course of the run, for the report."""

    flights: int
    weather: int
    seconds: float  # of the complete demo
    speed: float
    samples: Sequence[tuple[float, int, int]]  # seconds, flights published, departures joined
    marks: Sequence[tuple[float, str]]  # seconds, what happened


@dataclass(frozen=True)
class Answers:
    """The results of the pipeline."""

    verdicts: Sequence[Verdict]
    delays: pd.DataFrame
    rows: pd.DataFrame  # departures with weather, carrier, plane and destination
    fleet: pd.DataFrame


def write_report(path: Path, run: Run, answers: Answers) -> None:
    """Write the page."""
    minutes = " min"
    parts = [
        _tiles(run, answers),
        _section(
            "The results, compared row by row with batch results",
            "Departures with the weather of that hour (topic), and with carrier, plane and airport "
            "as well (Parquet); delays by airport and day; planes by carrier. Compared with pandas "
            "over the same data.",
            _table(answers.verdicts),
        ),
        _section(
            "The run",
            "The pipeline's processes were killed with SIGKILL during the run and started again.",
            _run(run),
        ),
        _section(
            "When to fly",
            "Mean departure delay in minutes, by hour of the day in New York and month.",
            heat(_by_hour(answers.rows), minutes),
        ),
        _section("Mean departure delay by airport", "", _by_airport(answers.delays)),
        _section(
            "Rain at the airport in that hour",
            "Mean departure delay: flights joined with weather.",
            bars(_by(answers.rows, "rain", [-1, 0, 0.02, 0.1, 0.3, 100], RAIN), minutes),
        ),
        _section(
            "Wind at the airport in that hour",
            "Mean departure delay, by miles an hour.",
            bars(_by(answers.rows, "wind", [-1, 5, 10, 15, 20, 25, 2000], WIND), minutes),
        ),
        _section(
            "Carriers", "Mean departure delay: flights joined with the table of carriers.",
            bars(answers.rows.groupby("airline")["dep_delay"].mean().sort_values(), minutes),
        ),
        _section(
            "Planes by carrier and maker",
            "A table that follows the register of planes and each plane's last carrier.",
            stacked(_fleet(answers)),
        ),
    ]  # fmt: skip
    page = PAGE.format(
        flights=run.flights,
        weather=run.weather,
        speed=run.speed,
        story=_story(answers.verdicts),
        body="\n".join(parts),
    )
    path.write_text(page, encoding="utf-8")


RAIN = ("none", "a trace", "light", "rain", "heavy rain")
WIND = ("to 5", "to 10", "to 15", "to 20", "to 25", "more")


def _story(verdicts: Sequence[Verdict]) -> str:
    killed = "The pipeline was killed once during the run and continued where it was."
    if all(verdict.right for verdict in verdicts):
        return f"{killed} No row was lost, duplicated or different."
    return f"{killed} The results differ from the batch results: see below."


def _section(title: str, text: str, content: str) -> str:
    intro = f"<p>{escape(text)}</p>" if text else ""
    return f"<section><h2>{escape(title)}</h2>{intro}\n{content}</section>"


def _tiles(run: Run, answers: Answers) -> str:
    lost, duplicated, different = (
        sum(getattr(verdict, name) for verdict in answers.verdicts)
        for name in ("lost", "duplicated", "different")
    )
    tiles = [
        (f"{run.flights + run.weather:,}", "events in", ""),
        (f"{sum(verdict.events_out for verdict in answers.verdicts):,}", "rows out", ""),
        *(
            (f"{number:,}", name, "bad" if number else "ok")
            for number, name in (
                (lost, "lost"),
                (duplicated, "duplicated"),
                (different, "different"),
            )
        ),
        (f"{run.seconds:,.0f} s", "from start to result", ""),
    ]
    inside = "".join(
        f'<div class="tile"><b class="{kind}">{value}</b><span>{name}</span></div>'
        for value, name, kind in tiles
    )
    return f'<div class="tiles">{inside}</div>'


def _table(verdicts: Sequence[Verdict]) -> str:
    heads = ("result", "events in", "events out", "lost", "duplicated", "different")
    found = ["<table><tr>", *(f"<th>{name}</th>" for name in heads), "</tr>"]
    for v in verdicts:
        found.append(f"<tr><td>{escape(v.name)}</td><td>{v.events_in:,}</td>")
        found.append(f"<td>{v.events_out:,}</td>")
        for number in (v.lost, v.duplicated, v.different):
            found.append(f'<td class="{"bad" if number else "ok"}">{number:,}</td>')
        found.append("</tr>")
    return "".join([*found, "</table>"])


def _run(run: Run) -> str:
    seconds, published, joined = zip(*(run.samples or [(0.0, 0, 0)]), strict=True)
    given = [
        Line("flights published", seconds, published),
        Line("departures joined and stored", seconds, joined),
    ]
    x = axis(0, max(seconds), " s", steps=8)
    return lines(given, x, axis(0, max(*published, *joined, 1)), run.marks)


def _by_airport(delays: pd.DataFrame) -> str:
    """A line for each airport, with a point for each week, or each day of a short run."""
    rows = delays.assign(day=pd.to_datetime(delays["day"]))
    groups = pd.Grouper(key="day", freq="W" if rows["day"].nunique() > FEW_DAYS else "D")
    summed = rows.groupby(["origin", groups])[["delay", "departed"]].sum()
    mean = summed["delay"].astype(float) / summed["departed"].astype(float)
    frame = mean.unstack("origin").dropna()
    xs = [float(n) for n in range(len(frame))]
    step = max(1, len(frame) // 9)
    ticks = [(float(n), f"{frame.index[n]:%d %b}") for n in range(0, len(frame), step)]
    x = Axis(0, max(1, len(frame) - 1), ticks)
    low, high = min(0.0, float(frame.min().min())), float(frame.max().max())
    given = [Line(str(name), xs, [float(v) for v in frame[name]]) for name in frame.columns]
    return lines(given, x, axis(low, high, " min"))


def _by_hour(rows: pd.DataFrame) -> pd.DataFrame:
    local = rows["hour"].dt.tz_convert(NEW_YORK)
    months, hours = local.dt.month, local.dt.hour
    frame = rows.groupby([months.rename("month"), hours.rename("at")])["dep_delay"].mean()
    wide = frame.astype(float).unstack("at").dropna(axis=1, how="all")
    wide.index = [f"{pd.Timestamp(2013, int(month), 1):%b}" for month in wide.index]
    wide.columns = [f"{int(hour)}h" for hour in wide.columns]
    return wide


def _by(rows: pd.DataFrame, column: str, edges: Sequence[float], names: Sequence[str]) -> pd.Series:
    groups = pd.cut(rows[column].astype(float), list(edges), labels=list(names))
    return rows.groupby(groups, observed=True)["dep_delay"].mean().astype(float)


def _fleet(answers: Answers) -> pd.DataFrame:
    known = answers.rows[["carrier", "airline"]].drop_duplicates().set_index("carrier")["airline"]
    planes = answers.fleet
    carriers = planes["carrier"].map(known).fillna(planes["carrier"])
    makers = planes["manufacturer"].fillna("others").str.split().str[0].str.capitalize()
    makers = makers.replace({"Mcdonnell": "McDonnell", "Others": "others"})
    common = list(makers.value_counts().index[:MAKERS])
    makers = makers.where(makers.isin(common), "others")
    frame = pd.crosstab(carriers, makers)
    columns = [
        *(name for name in common if name in frame),
        *(["others"] if "others" in frame else []),
    ]
    total = frame.sum(axis=1).sort_values(ascending=False)
    return frame.loc[total.index, columns]
