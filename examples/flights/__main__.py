"""`python -m examples.flights`: the demo with progress bars and a live table."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import time
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from examples.flights.check import Verdict
from examples.flights.demo import Plan, Show, run

FLOW_COLUMNS = ("flow", "state", "rows in", "rows out", "lag", "state rows", "watermark")
LINE_SECONDS = 5.0  # between two lines without a terminal
INTERRUPTED = 130  # the exit code after Ctrl-C


class Screen:
    """The demo on a terminal; without one, a line every few seconds."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.live: Live | None = None
        self._start = time.monotonic()
        self._shown = 0
        self._line = 0.0

    def __call__(self, show: Show) -> None:
        for note in show.notes[self._shown :]:
            self.say(note)
            self._line = time.monotonic() + LINE_SECONDS
        self._shown = len(show.notes)
        if self.live is not None:
            self.live.update(self._picture(show))
        elif show.replay.clock and time.monotonic() > self._line:
            self._line = time.monotonic() + LINE_SECONDS
            self.say(
                f"{show.replay.clock}: {show.replay.flights:,} flights published, "
                f"{show.stored:,} departures joined"
            )

    def say(self, text: str) -> None:
        """Print a line with the seconds since the start."""
        line = f"[{time.monotonic() - self._start:4.0f} s] {text}"
        self.console.print(Text(line), soft_wrap=not self.console.is_terminal)

    def _picture(self, show: Show) -> Group:
        bars = Table.grid(padding=(0, 1))
        total = len(show.year.flights)
        for name, done, count in (
            ("flights published", show.replay.flights, total),
            ("weather published", show.replay.weather, len(show.year.weather)),
            ("departures joined", show.stored, total),
        ):
            bars.add_row(name, ProgressBar(count, done, width=30), f"{done:,} of {count:,}")
        speed = f", {show.replay.speed:,.0f} times as fast" if show.replay.speed else ""
        head = f"\n{show.replay.clock or 'The pipeline starts'}{speed}"
        return Group(Text(head, style="bold"), bars, "", _flows(show.status))


def _flows(status: dict[str, Any]) -> Table:
    flows = Table(box=None, padding=(0, 1), pad_edge=False)
    for column in FLOW_COLUMNS:
        numbers = column in ("rows in", "rows out", "lag", "state rows")
        flows.add_column(column, justify="right" if numbers else "left", no_wrap=True)
    for flow in status.get("flows", []):
        lag = flow["lag_events"]
        flows.add_row(
            f"{flow['name']} ({flow['kind']})",
            flow["state"],
            f"{flow['rows_in']:,}",
            f"{flow['rows_out']:,}",
            "" if lag is None else f"{lag:,}",
            f"{flow['state_rows']:,}" if flow["state_rows"] else "",
            (flow["watermark"] or "")[:10],
        )
    return flows


def _print_verdicts(console: Console, verdicts: list[Verdict]) -> None:
    title = "The pipeline's results, compared row by row with batch results"
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("result", "events in", "events out", "lost", "duplicated", "different"):
        table.add_column(column, justify="left" if column == "result" else "right")
    for v in verdicts:
        numbers = (v.events_in, v.events_out, v.lost, v.duplicated, v.different)
        style = None if v.right else "bold red"
        table.add_row(v.name, *(f"{number:,}" for number in numbers), style=style)
    console.print(table)


def _play(plan: Plan, screen: Screen) -> list[Verdict]:
    if not screen.console.is_terminal:
        return asyncio.run(run(plan, screen))
    with Live(console=screen.console, refresh_per_second=4, transient=True) as screen.live:
        return asyncio.run(run(plan, screen))


def _interrupted(number: int, _: object) -> None:
    raise KeyboardInterrupt


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.flights", description=__doc__)
    parser.add_argument("--days", type=int, default=366, help="days to replay (default: all)")
    parser.add_argument("--seconds", type=float, default=60.0, help="duration of the replay")
    parser.add_argument("--folder", type=Path, default=Path("demo-output"), help="for the results")
    given = parser.parse_args()
    if given.days < 1 or given.seconds <= 0:
        parser.error("--days must be at least 1, --seconds more than 0")
    signal.signal(signal.SIGTERM, _interrupted)
    screen = Screen(Console())
    plan = Plan(given.folder.resolve(), days=given.days, seconds=given.seconds)
    screen.say("Starting a broker and a Spark pipeline to replay a year of flights.")
    try:
        verdicts = _play(plan, screen)
    except KeyboardInterrupt:
        screen.say("Stopped on request; nothing is left running.")
        sys.exit(INTERRUPTED)
    _print_verdicts(screen.console, verdicts)
    screen.console.print(f"Charts: {plan.folder / 'report.html'}", soft_wrap=True)
    screen.say("Done.")
    if not all(verdict.right for verdict in verdicts):
        sys.exit("The results differ.")


if __name__ == "__main__":
    main()
