"""`python -m examples.flights`: the demo with bars and a live table."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from examples.flights.check import Verdict
from examples.flights.demo import Plan, Show, run

FLOW_COLUMNS = ("flow", "writes", "state", "rows in", "rows out", "lag", "watermark", "restarts")


class Screen:
    """The demo on a terminal; in a log, a line every few seconds."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.live: Live | None = None
        self._start = time.monotonic()
        self._told = 0
        self._line = 0.0

    def __call__(self, show: Show) -> None:
        if self.live is not None:
            self.live.update(self._picture(show))
        for note in show.notes[self._told :]:
            self.console.print(f"[{time.monotonic() - self._start:4.0f} s] {note}", highlight=False)
        self._told = len(show.notes)
        if self.live is None and time.monotonic() > self._line:
            self._line = time.monotonic() + 5
            print(
                f"[{time.monotonic() - self._start:4.0f} s] {show.replay.clock or 'starting'}: "
                f"{show.replay.flights:,} flights published, {show.stored:,} departures joined",
                flush=True,
            )

    def _picture(self, show: Show) -> Group:
        bars = Table.grid(padding=(0, 2))
        total = len(show.year.flights)
        for name, done, whole in (
            ("flights published", show.replay.flights, total),
            ("weather published", show.replay.weather, len(show.year.weather)),
            ("departures joined", show.stored, total),
        ):
            bars.add_row(name, ProgressBar(whole, done, width=50), f"{done:,} of {whole:,}")
        speed = f"{show.replay.speed:,.0f} times as fast" if show.replay.speed else ""
        flows = Table(box=None, padding=(0, 2))
        for column in FLOW_COLUMNS:
            flows.add_column(column)
        for flow in show.status.get("flows", []):
            lag = flow["lag_events"]
            flows.add_row(
                flow["name"],
                f"{flow['kind']} {flow['target']}",
                flow["state"],
                f"{flow['rows_in']:,}",
                f"{flow['rows_out']:,}",
                "" if lag is None else f"{lag:,}",
                (flow["watermark"] or "")[:13],
                str(flow["restarts"]),
            )
        return Group(f"{show.replay.clock or 'Starting Spark'}  {speed}", bars, "", flows)


def _told(console: Console, verdicts: list[Verdict]) -> None:
    table = Table(title="The pipeline's answer, row by row against the batch answer")
    for column in ("result", "events in", "rows out", "lost", "duplicated", "different"):
        table.add_column(column, justify="left" if column == "result" else "right")
    for v in verdicts:
        numbers = (v.events_in, v.events_out, v.lost, v.duplicated, v.different)
        table.add_row(v.name, *(f"{number:,}" for number in numbers))
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.flights", description=__doc__)
    parser.add_argument("--days", type=int, default=366, help="of the year (default: all)")
    parser.add_argument("--seconds", type=float, default=75.0, help="the replay takes")
    parser.add_argument("--folder", type=Path, default=Path("demo-output"), help="for the results")
    given = parser.parse_args()
    console = Console()
    screen = Screen(console)
    plan = Plan(given.folder.resolve(), days=given.days, seconds=given.seconds)
    start = time.monotonic()
    console.print("A year of flights, live: a broker and a Spark pipeline start on this machine.")
    if console.is_terminal:
        with Live(console=console, refresh_per_second=4) as screen.live:
            verdicts = asyncio.run(run(plan, screen))
    else:
        verdicts = asyncio.run(run(plan, screen))
    _told(console, verdicts)
    console.print(f"Charts: {plan.folder / 'report.html'}")
    console.print(f"Done in {time.monotonic() - start:.0f} s.")
    if not all(verdict.right for verdict in verdicts):
        sys.exit("The answers differ.")


if __name__ == "__main__":
    main()
