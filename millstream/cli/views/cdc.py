"""Captures of databases, as people and programs see them."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from millstream.cli.output import print_json, print_table, say, size
from millstream.deadline import Deadline

if TYPE_CHECKING:
    from millstream.cdc.model import CaptureLag, Finding, TableShape
    from millstream.cdc.settings import CaptureSettings
    from millstream.cdc.sink.apply import Applied
    from millstream.cdc.status import CaptureStatus, TableStatus

__all__ = [
    "CaptureLines",
    "applied_live",
    "applied_record",
    "applied_text",
    "finding_record",
    "lag_text",
    "show_findings",
    "show_status",
    "show_tables",
    "shown_live",
]


LINE_SECONDS: Final = 10.0  # between two lines about events

Watch = Callable[["CaptureStatus"], None]


def finding_record(found: Finding) -> dict[str, Any]:
    """A finding as an object."""
    level = "ok" if found.ok else "error" if found.fatal else "warning"
    return {
        "subject": found.subject,
        "result": level,
        "text": found.text,
        "fix": found.fix or None,
    }


def show_findings(findings: Sequence[Finding]) -> None:
    """Each finding on a line, with its fix below."""
    for found in findings:
        mark = "ok     " if found.ok else "MISSING" if found.fatal else "warning"
        say(f"{mark}  {found.subject}: {found.text}")
        if found.fix and not found.ok:
            say(f"         -> {found.fix}")


def show_tables(settings: CaptureSettings, tables: Sequence[TableShape]) -> None:
    """The tables that a capture has, and their topics."""
    outboxes = {outbox.table for outbox in settings.outbox}
    print_table(
        "Tables",
        ["table", "topic", "key", "#columns"],
        [
            (
                table.full_name,
                "(an outbox)"
                if table.full_name in outboxes
                else settings.topic_of(table.namespace, table.name),
                ", ".join(table.key) or "-",
                len(table.columns),
            )
            for table in tables
        ],
    )


def show_status(status: CaptureStatus) -> None:
    """A running capture for people."""
    say(f"{status.name}: {status.state} since {status.since}, {status.source}")
    say(lag_text(status.lag))
    if status.error:
        say(f"last error: {status.error}")
    for alarm in status.alarms:
        say(f"ALARM: {alarm}")
    if status.tables:
        print_table(
            "Tables",
            ["table", "topic", "state", "#snapshot", "#changes", "position"],
            [
                (
                    one.table,
                    one.topic,
                    one.state,
                    _snapshot_text(one),
                    f"{one.events:,}",
                    one.position,
                )
                for one in status.tables
            ],
        )


def lag_text(lag: CaptureLag) -> str:
    """How far a capture is behind, in a line."""
    parts = []
    if lag.bytes is not None:
        parts.append(f"{size(lag.bytes)} of log behind")
    if lag.seconds is not None:
        parts.append(f"{lag.seconds:,.1f} s behind")
    if lag.kept_bytes is not None:
        most = "" if lag.budget_bytes is None else f" of {size(lag.budget_bytes)}"
        parts.append(f"the source keeps {size(lag.kept_bytes)}{most} of log for it")
    return f"lag: {', '.join(parts) or 'not known'}"


def _snapshot_text(one: TableStatus) -> str:
    if one.snapshot_estimate and one.state == "snapshot":
        return f"{one.snapshot_rows:,} of about {one.snapshot_estimate:,}"
    return f"{one.snapshot_rows:,}" if one.snapshot_rows else ""


class CaptureLines:
    """Writes to the log how many events were stored, when there are new ones."""

    def __init__(self, log: Callable[[str], None], pause: float = LINE_SECONDS) -> None:
        self._log, self._pause = log, pause
        self._next = Deadline(pause)
        self._last: tuple[str, int, int] | None = None

    def __call__(self, status: CaptureStatus) -> None:
        rows = sum(one.snapshot_rows for one in status.tables)
        events = sum(one.events for one in status.tables)
        now = (status.state, rows, events)
        changed = self._last is None or self._last[0] != status.state
        if now == self._last or not (changed or self._next.passed):
            return
        self._last, self._next = now, Deadline(self._pause)
        counts = (f"{rows:,} rows of snapshots" * bool(rows), f"{events:,} changes" * bool(events))
        counted = ", ".join((status.state, *filter(None, counts)))
        self._log(f"{status.name}: {counted}; {lag_text(status.lag)}")


@contextmanager
def shown_live(*, quiet: bool, as_json: bool) -> Iterator[Watch]:
    """What `run` calls with the status of the capture, twice a second."""
    if quiet:
        yield lambda _status: None
    elif as_json:
        yield lambda status: print_json(status.to_json(), line=True)
    elif not sys.stdout.isatty():
        yield CaptureLines(say)
    else:
        with _bars() as watch:
            yield watch


@contextmanager
def _bars() -> Iterator[Watch]:
    """A bar for each snapshot, and a line with the number of changes."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns) as progress:
        bars: dict[str, TaskID] = {}
        changes = progress.add_task("starting", total=None)

        def watch(status: CaptureStatus) -> None:
            for one in status.tables:
                if one.state == "snapshot" and one.table not in bars:
                    bars[one.table] = progress.add_task(f"snapshot of {one.table}")
                if one.table in bars:
                    done = one.state == "streaming"
                    total = one.snapshot_rows if done else one.snapshot_estimate
                    progress.update(bars[one.table], completed=one.snapshot_rows, total=total)
            events = sum(one.events for one in status.tables)
            behind = f", {size(status.lag.bytes)} behind" if status.lag.bytes is not None else ""
            text = f"{status.state}: changes{behind}"
            progress.update(changes, description=text, completed=events)

        yield watch


# -- apply --------------------------------------------------------------------------------


def applied_text(topic: str, done: Applied) -> str:
    """What was applied, in a line."""
    again = f", {done.retries} retries" if done.retries else ""
    counted = f"{done.events:,} events, {done.rows:,} rows in {done.transactions:,} transactions"
    return f"{topic}: applied {counted}{again}"


def applied_record(topic: str, done: Applied) -> dict[str, Any]:
    """What was applied, as an object."""
    return {
        "topic": topic,
        "events": done.events,
        "rows": done.rows,
        "transactions": done.transactions,
        "truncations": done.truncations,
        "retries": done.retries,
        "next": {
            str(partition): {"offset": position.offset, "index": position.index}
            for partition, position in sorted(done.positions.items())
        },
    }


@contextmanager
def applied_live(topic: str, applied: Callable[[], Applied], *, quiet: bool) -> Iterator[None]:
    """Show what is applied while the block runs: a line that changes, or one now and then."""
    if quiet:
        yield
        return
    loop = asyncio.get_running_loop()
    task = loop.create_task(_applied_lines(topic, applied))
    try:
        yield
    finally:
        task.cancel()


async def _applied_lines(topic: str, applied: Callable[[], Applied]) -> None:
    last = 0
    while True:
        await asyncio.sleep(LINE_SECONDS)
        done = applied()
        if done.events != last:
            last = done.events
            say(applied_text(topic, done))
