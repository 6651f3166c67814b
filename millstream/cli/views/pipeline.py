"""How pipelines are shown: a live table, one line of JSON per second, or plain lines."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from millstream.cli.output import print_json, print_table, say, size

__all__ = ["live_table", "print_flows", "print_status", "shown_live", "working"]

Shown = Callable[[dict[str, Any]], None]
COLUMNS = (
    "flow",
    "to",
    "state",
    "#rows in",
    "#in/s",
    "#rows out",
    "#out/s",
    "#lag",
    "#behind",
    "watermark",
    "#state",
    "last error",
)
ERROR_WIDTH = 60


def row_of(flow: dict[str, Any]) -> Sequence[str]:
    """One flow as a row of the table."""
    state = flow.get("state_bytes") or 0
    return (
        flow["name"],
        f"{flow['kind']} {flow['target']}",
        flow["state"],
        f"{flow['rows_in']:,}",
        _number(flow["rows_in_per_second"]),
        f"{flow['rows_out']:,}",
        _number(flow["rows_out_per_second"]),
        *_lag(flow),
        (flow.get("watermark") or "").replace(".000Z", "Z"),
        f"{flow.get('state_rows', 0):,} ({size(state)})" if state else "",
        (flow.get("last_error") or "")[:ERROR_WIDTH],
    )


def print_status(found: dict[str, Any]) -> None:
    """The state of a pipeline for people."""
    if found["state"] == "never run":
        say(f"The pipeline '{found['pipeline']}' never ran. Run it with: millstream pipeline run")
        return
    process = f", process {found['pid']}" if found.get("pid") else ""
    # The last status of a process that has ended is as old as its end.
    since = found.get("started" if process else "time")
    title = f"{found['pipeline']}: {found['state']}{process}{f' since {since}' if since else ''}"
    print_table(title, COLUMNS, (row_of(flow) for flow in found["flows"]))
    for flow in found["flows"]:
        if flow.get("last_error"):
            say(f"{flow['name']}, at {flow['failed_at']}: {flow['last_error']}")


def print_flows(pipeline: str, running: bool, rows: Sequence[dict[str, Any]]) -> None:
    """The flows of a project for people."""
    title = f"{pipeline}: {'running' if running else 'not running'}"
    columns = ("flow", "writes", "mode", "declared", "state", "#in/s", "#out/s", "#lag", "#behind")
    print_table(
        title,
        columns,
        (
            (
                row["flow"],
                f"{row['kind']} {row['to']}",
                row["mode"],
                row["declared"],
                row["state"],
                _number(row["rows_in_per_second"]),
                _number(row["rows_out_per_second"]),
                *_lag(row),
            )
            for row in rows
        ),
    )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"


def _lag(flow: dict[str, Any]) -> tuple[str, str]:
    """How far behind a flow is, in events and in seconds; empty if it is unknown."""
    seconds = flow.get("lag_seconds")
    return _number(flow.get("lag_events")), "" if seconds is None else f"{seconds:,.1f} s"


@contextmanager
def shown_live(*, quiet: bool, as_json: bool) -> Iterator[Shown]:
    """What `run` calls once a second with the status."""
    if quiet:
        yield lambda _: None
    elif as_json:
        yield lambda status: print_json(status, line=True)
    elif not sys.stdout.isatty():
        yield _Lines()
    else:
        from rich.live import Live

        with Live(transient=False, refresh_per_second=2) as live:
            yield lambda status: live.update(live_table(status))


def live_table(status: dict[str, Any]) -> Any:
    """The status of a running pipeline as a table that is redrawn."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(title=f"{status['pipeline']}: {status['state']}", box=box.SIMPLE, pad_edge=False)
    for column in COLUMNS:
        side = "right" if column.startswith("#") else "left"
        table.add_column(column.removeprefix("#"), justify=side)  # type: ignore[arg-type]
    for flow in status["flows"]:
        table.add_row(*(Text(cell) for cell in row_of(flow)))
    return table


class _Lines:
    """For log files: a line when a flow's state changes, nothing otherwise."""

    def __init__(self) -> None:
        self._states: dict[str, str] = {}

    def __call__(self, status: dict[str, Any]) -> None:
        for flow in status["flows"]:
            if self._states.get(flow["name"]) != flow["state"]:
                self._states[flow["name"]] = flow["state"]
                text = f"{status['time']} {flow['name']}: {flow['state']}"
                if flow["state"] in ("failed", "restarting"):
                    text += f": {flow.get('last_error')}"
                say(text)


@contextmanager
def working(text: str, *, quiet: bool) -> Iterator[None]:
    """Show on a terminal that something without steps goes on, and for how long."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=quiet) as progress:
        progress.add_task(text, total=None)
        yield
