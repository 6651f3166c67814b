"""What `millstream top` shows: rates between two snapshots of the broker."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from millstream.cli.output import print_json, size
from millstream.cli.views.topic import span
from millstream.errors import ConfigError, SubscriptionNotFound, TopicNotFound
from millstream.messaging.topics.lookup import side_by_side

if TYPE_CHECKING:
    from rich.console import Group

    from millstream.messaging import Lag, SubscriptionInfo, TopicInfo
    from millstream.mill import Mill

__all__ = ["Snapshot", "rates", "take_snapshot", "watch"]

ROWS_MAX: Final = 200  # a screen is shorter; the busiest are shown


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The broker at one moment."""

    time: float  # of the event loop's clock
    topics: dict[str, TopicInfo]
    subscriptions: dict[tuple[str, str], tuple[SubscriptionInfo, Lag]]


async def take_snapshot(mill: Mill, wanted: list[str]) -> Snapshot:
    """Topics and subscriptions right now; those removed in the meantime are left out."""
    infos = [info for info in await mill.topics() if not wanted or info.name in wanted]
    unknown = set(wanted) - {info.name for info in infos}
    if unknown:
        raise ConfigError(f"there is no topic '{min(unknown)}'")
    found = await side_by_side(
        lambda info: _subscriptions(mill, info), [info for info in infos if not info.missing]
    )
    now = asyncio.get_running_loop().time()
    subscriptions = {(info.topic, info.name): (info, lag) for part in found for info, lag in part}
    return Snapshot(now, {info.name: info for info in infos}, subscriptions)


async def _subscriptions(mill: Mill, info: TopicInfo) -> list[tuple[SubscriptionInfo, Lag]]:
    if not info.subscriptions:
        return []
    try:
        topic = await mill.topic(info.name)
        subscriptions = topic.subscriptions
        return [(item, await subscriptions.lag(item.name)) for item in await subscriptions.list()]
    except (TopicNotFound, SubscriptionNotFound):
        return []


def rates(before: Snapshot, after: Snapshot) -> dict[str, Any]:
    """The second snapshot as an object, with rates since the first."""
    seconds = max(after.time - before.time, 1e-9)
    topics = []
    for name, info in after.topics.items():
        old = before.topics.get(name, info)
        topics.append(
            {
                "topic": name,
                "stored_per_second": _rate(_ends(old), _ends(info), seconds),
                "messages": info.messages,
                "bytes": info.bytes,
                "subscriptions": info.subscriptions,
            }
        )
    subscriptions = []
    for key, (found, lag) in after.subscriptions.items():
        earlier = before.subscriptions.get(key, (found, lag))[0]
        subscriptions.append(
            {
                "topic": found.topic,
                "subscription": found.name,
                "settled_per_second": _rate(_floors(earlier), _floors(found), seconds),
                "pending": found.pending,
                "in_flight": found.in_flight,
                "lag_messages": lag.messages,
                "lag_seconds": round(lag.seconds, 3),
                "paused": found.paused,
            }
        )
    return {"topics": topics, "subscriptions": subscriptions}


def _ends(info: TopicInfo) -> int:
    return sum(part.last_offset for part in info.partitions)


def _floors(info: SubscriptionInfo) -> int:
    return sum(position.next_offset for position in info.positions)


def _rate(before: int, after: int, seconds: float) -> float:
    return round(max(0, after - before) / seconds, 1)


async def watch(
    mill: Mill, wanted: list[str], seconds: float, count: int | None, *, as_json: bool
) -> None:
    """Take snapshots and show what changed between them."""
    from rich.console import Console
    from rich.live import Live

    terminal = sys.stdout.isatty() and not as_json
    console = Console(width=None if terminal else 160, highlight=False)
    live = Live(console=console, auto_refresh=False, screen=count is None) if terminal else None
    before = await take_snapshot(mill, wanted)
    left = count
    stop = asyncio.Event()
    keys = live is not None and sys.stdin.isatty()
    with _ends_at_q(stop) if keys else nullcontext(), live if live is not None else nullcontext():
        while left is None or left > 0:
            with suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), seconds)
                return
            after = await take_snapshot(mill, wanted)
            seen = rates(before, after)
            if as_json:
                print_json(seen, line=True)
            elif live is not None:
                live.update(_screen(seen, mill.url), refresh=True)
            else:
                console.print(_screen(seen, mill.url))
            before = after
            left = None if left is None else left - 1


@contextmanager
def _ends_at_q(stop: asyncio.Event) -> Iterator[None]:
    """Set the event when q is typed, as in other programs that take the whole screen."""
    import termios
    import tty

    keyboard, loop = sys.stdin.fileno(), asyncio.get_running_loop()
    before = termios.tcgetattr(keyboard)

    def typed() -> None:
        keys = os.read(keyboard, 64)
        if not keys or b"q" in keys.lower():  # none: the terminal is gone
            stop.set()
            loop.remove_reader(keyboard)

    tty.setcbreak(keyboard)  # without waiting for Enter; Ctrl-C keeps its meaning
    loop.add_reader(keyboard, typed)
    try:
        yield
    finally:
        loop.remove_reader(keyboard)
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)


def _screen(seen: dict[str, Any], url: str) -> Group:
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    topics = Table(title=f"Topics of {url}", title_justify="left", box=box.SIMPLE)
    for heading in ("topic", "stored/s", "messages", "size", "subscriptions"):
        topics.add_column(heading, justify="left" if heading == "topic" else "right")
    for row in _busiest(seen["topics"], "stored_per_second"):
        topics.add_row(
            Text(row["topic"]),
            f"{row['stored_per_second']:,.0f}",
            f"{row['messages']:,}",
            size(row["bytes"]),
            str(row["subscriptions"]),
        )
    readers = Table(title="Subscriptions", title_justify="left", box=box.SIMPLE)
    names = ("topic", "subscription", "settled/s", "lag", "behind", "in flight", "state")
    for heading in names:
        left = heading in ("topic", "subscription", "state")
        readers.add_column(heading, justify="left" if left else "right")
    for row in _busiest(seen["subscriptions"], "lag_messages"):
        readers.add_row(
            Text(row["topic"]),
            Text(row["subscription"]),
            f"{row['settled_per_second']:,.0f}",
            f"{row['lag_messages']:,}",
            span(timedelta(seconds=row["lag_seconds"])),
            f"{row['in_flight']:,}",
            "paused" if row["paused"] else "ok",
        )
    return Group(topics, readers)


def _busiest(rows: list[dict[str, Any]], by: str) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: row[by], reverse=True)[:ROWS_MAX]
