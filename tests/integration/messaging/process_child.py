"""A program that processes a topic exactly once and may be killed at any line.

python process_child.py URL once|follow
"""

from __future__ import annotations

import asyncio
import sys

import millstream
from millstream import Event, NewEvent
from millstream.events.packs.packing import Packing
from millstream.messaging.process import ProcessSettings

SETTINGS = ProcessSettings(
    "double", commit_every=0.02, commit_events=25, packing=Packing(max_events=10)
)


def transform(event: Event) -> list[NewEvent]:
    """Nothing, one or two outputs, some without a key."""
    number = int(event.value)
    origin = f"{event.partition}.{number}"
    return [
        NewEvent(f"{origin}.{copy}".encode(), None if number % 5 == 0 else event.key)
        for copy in range(number % 3)
    ]


async def slowly(event: Event) -> list[NewEvent]:
    """The same, at a pace that lets others see it at work."""
    await asyncio.sleep(0.001)
    return transform(event)


async def main(url: str, how: str) -> None:
    async with millstream.connect(url) as mill:
        source, target = await mill.topic("in"), await mill.topic("out")
        await mill.process(source, target, slowly, SETTINGS).run(once=how == "once")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
