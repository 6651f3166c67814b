"""What `millstream top` shows: rates between two snapshots of the broker."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from millstream.cli.output import print_json, size
from millstream.cli.stopping import until_stopped
from millstream.cli.views.topic import span
from millstream.errors import SubscriptionNotFound, TopicNotFound
from millstream.messaging.topics.lookup import side_by_side
from millstream.messaging.topics.missing import no_such_topic

if TYPE_CHECKING:
    from rich.console import Console, Group, RenderableType
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text

    from millstream.messaging import Lag, SubscriptionInfo, TopicInfo
    from millstream.mill import Mill

__all__ = ["Snapshot", "rates", "screen", "take_snapshot", "watch"]

ROWS_MAX: Final = 200  # where no screen limits them; the busiest are shown
TABLE_LINES: Final = 5  # title, headings and blank lines
TOPICS_MIN: Final = 3  # rows of topics that stay when there are many subscriptions
BOTH_LINES: Final = 15  # on a lower screen there are subscriptions only
WIDE_CHARS: Final = 90  # on a narrower screen the names need the room of 'in flight'
NAME_CHARS_MIN: Final = 8


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The broker at one moment."""

    time: float  # of the event loop's clock
    topics: dict[str, TopicInfo]
    subscriptions: dict[tuple[str, str], tuple[SubscriptionInfo, Lag]]


async def take_snapshot(mill: Mill, wanted: list[str]) -> Snapshot:
    """Topics and subscriptions right now; those removed in the meantime are left out."""
    every = await mill.topics()
    infos = [info for info in every if not wanted or info.name in wanted]
    unknown = set(wanted) - {info.name for info in infos}
    if unknown:
        raise no_such_topic(min(unknown), [info.name for info in every])
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
    """Take snapshots and show what changed between them, until `q`, SIGTERM or the count."""
    from rich.console import Console

    terminal = sys.stdout.isatty() and not as_json
    console = Console(width=None if terminal else 160, highlight=False)
    stopped = asyncio.Event()
    with _quit_key(stopped) if terminal else nullcontext(False) as has_key:
        view = _View(console, mill.url, "q quits" if has_key else "Ctrl-C quits")
        with view.live(full_screen=count is None) if terminal else nullcontext():
            show = (lambda seen: print_json(seen, line=True)) if as_json else view.show
            await until_stopped(_follow(mill, wanted, seconds, count, show), stopped=stopped)


async def _follow(
    mill: Mill,
    wanted: list[str],
    seconds: float,
    count: int | None,
    show: Callable[[dict[str, Any]], None],
) -> None:
    before = await take_snapshot(mill, wanted)
    left = count
    while left is None or left > 0:
        await asyncio.sleep(seconds)
        after = await take_snapshot(mill, wanted)
        show(rates(before, after))
        before = after
        left = None if left is None else left - 1


@contextmanager
def _quit_key(stopped: asyncio.Event) -> Iterator[bool]:
    """Set the event when `q` is pressed; whether there is a keyboard to press it on.

    The terminal gets its mode back on every way out; Ctrl-C works as always.
    """
    if not sys.stdin.isatty():
        yield False
        return
    import termios
    import tty

    loop = asyncio.get_running_loop()
    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)

    def pressed() -> None:
        keys = b""
        with suppress(OSError):  # as of a terminal that was closed
            keys = os.read(keyboard, 1024)
        if not keys or b"q" in keys.lower():  # none: the terminal is gone
            stopped.set()

    try:
        tty.setcbreak(keyboard)
        loop.add_reader(keyboard, pressed)
        yield True
    finally:
        loop.remove_reader(keyboard)
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)


class _View:
    """Shows tables: on a terminal one that changes, elsewhere one after the other."""

    def __init__(self, console: Console, url: str, hint: str) -> None:
        self._console = console
        self._url = url
        self._hint = hint
        self._live: Live | None = None
        self._last: Group | None = None

    @contextmanager
    def live(self, *, full_screen: bool) -> Iterator[None]:
        """On a terminal; what was shown last stays on it."""
        from rich.live import Live

        try:
            with Live(console=self._console, auto_refresh=False, screen=full_screen) as live:
                self._live = live
                yield
        finally:
            if full_screen and self._last is not None:
                self._console.print(self._last)

    def show(self, seen: dict[str, Any]) -> None:
        if self._live is None:
            self._console.print(screen(seen, self._url))
            return
        width, height = self._console.size
        self._last = screen(seen, self._url, width, height - 1)  # a line for the prompt afterwards
        title = f"{self._hint}, --json for programs"
        self._live.update(screen(seen, self._url, width, height, title), refresh=True)


def screen(
    seen: dict[str, Any], url: str, width: int = 160, height: int | None = None, hint: str = ""
) -> Group:
    """Subscriptions by their lag, then topics by their rate, as many as fit into the height."""
    from rich.console import Group
    from rich.text import Text

    readers = _busiest(seen["subscriptions"], "lag_messages")
    topics = _busiest(seen["topics"], "stored_per_second")
    if height is not None:
        room = height - bool(hint) - TABLE_LINES
        if not readers:
            topics = topics[: max(1, room)]
        elif room < BOTH_LINES:
            readers, topics = readers[: max(1, room)], []
        else:
            room -= TABLE_LINES
            readers = readers[: room - min(len(topics), TOPICS_MIN)]
            topics = topics[: room - len(readers)]
    tables: list[RenderableType] = []
    if readers:
        shown = _counted("Subscriptions", len(readers), len(seen["subscriptions"]))
        rows = [_READERS, *map(_reader_row, readers)]
        if width < WIDE_CHARS:
            rows = [row[:-2] + row[-1:] for row in rows]
        tables += _table(shown, rows, width, 2)
    if topics or not readers:
        shown = _counted(f"Topics of {url}", len(topics), len(seen["topics"]))
        tables += _table(shown, [_TOPICS, *map(_topic_row, topics)], width, 1)
    return Group(*tables, *([Text(hint, "dim")] if hint else []))


# The lag comes right after the names, so that no narrow screen cuts it off.
_READERS: Final[tuple[str, ...]] = (
    "topic",
    "subscription",
    "lag",
    "behind",
    "settled/s",
    "in flight",
    "state",
)
_TOPICS: Final[tuple[str, ...]] = ("topic", "stored/s", "messages", "size", "subscriptions")


def _reader_row(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        row["topic"],
        row["subscription"],
        f"{row['lag_messages']:,}",
        span(timedelta(seconds=row["lag_seconds"])),
        f"{row['settled_per_second']:,.0f}",
        f"{row['in_flight']:,}",
        "paused" if row["paused"] else "ok",
    )


def _topic_row(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        row["topic"],
        f"{row['stored_per_second']:,.0f}",
        f"{row['messages']:,}",
        size(row["bytes"]),
        str(row["subscriptions"]),
    )


def _counted(title: str, shown: int, total: int) -> str:
    return title if shown == total else f"{title} ({shown:,} of {total:,}, the busiest)"


def _table(title: str, rows: Sequence[Sequence[str]], width: int, names: int) -> tuple[Text, Table]:
    """A table of one line for each row, the first are the headings.

    Its first columns are names, which are cut to fit.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    headings = rows[0]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    room = width - sum(widths[names:]) - 3 * len(headings)
    chars = max(NAME_CHARS_MIN, room // names)
    table = Table(box=box.SIMPLE, pad_edge=False)
    for number, heading in enumerate(headings):
        left = number < names or heading == "state"
        table.add_column(heading, justify="left" if left else "right", no_wrap=True)
    for row in rows[1:]:
        cut = [name if len(name) <= chars else f"{name[: chars - 1]}…" for name in row[:names]]
        table.add_row(*(Text(cell) for cell in (*cut, *row[names:])))
    return Text(title, "italic", no_wrap=True, overflow="ellipsis"), table


def _busiest(rows: list[dict[str, Any]], by: str) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: row[by], reverse=True)[:ROWS_MAX]
