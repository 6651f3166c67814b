"""A program that keeps tables of what it reads, exactly once, and may be killed at any line.

python process_table_child.py URL one|two once|follow
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, MutableMapping
from typing import Any
from uuid import uuid4

import millstream
from millstream import Event, Mill, NewEvent
from millstream.events.packs.packing import Packing
from millstream.messaging.process import Process, ProcessSettings

SETTINGS = ProcessSettings(
    "fold", commit_every=0.01, commit_events=40, packing=Packing(max_events=10)
)

Tables = dict[str, MutableMapping[str, Any]]


def count(event: Event, tables: Tables) -> None:
    """How many numbers a key has and what they add up to."""
    row = tables["totals"].get(event.key or "", {"count": 0, "sum": 0})
    row = {"count": row["count"] + 1, "sum": row["sum"] + int(event.value)}
    tables["totals"][event.key or ""] = row


def count_and_tell(event: Event, tables: Tables) -> list[NewEvent]:
    """The same, and a random word in a second table and in the output: not the same twice."""
    count(event, tables)
    word = uuid4().hex
    tables["words"][event.key or ""] = word
    row = tables["totals"][event.key or ""]
    text = f"{int(event.value)} {word} {row['count']}"
    return [NewEvent(text.encode(), event.key)]


def slowly(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, at a pace that lets others see it at work."""

    async def call(*arguments: Any) -> Any:
        await asyncio.sleep(0.001)
        return function(*arguments)

    return call


async def make(mill: Mill, how: str, pace: Callable[..., Any] = lambda same: same) -> Process:
    """The process with one table, or with two and a topic."""
    source = await mill.topic("in")
    totals = await mill.table("totals")
    if how == "one":
        return mill.process(source, [], pace(count), SETTINGS, tables={"totals": totals})
    tables = {"totals": totals, "words": await mill.table("words")}
    out = await mill.topic("out")
    return mill.process(source, out, pace(count_and_tell), SETTINGS, tables=tables)


async def main(url: str, how: str, until: str) -> None:
    async with millstream.connect(url) as mill:
        await (await make(mill, how, slowly)).run(once=until == "once")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
