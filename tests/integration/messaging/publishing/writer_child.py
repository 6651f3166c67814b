"""A program that writes numbers exactly once and may be killed at any line.

python writer_child.py URL TOPIC COUNT MOST

It writes up to COUNT what is not stored yet, and waits to be killed when that is more than MOST.
"""

from __future__ import annotations

import asyncio
import sys

from millstream import connect
from millstream.events.packs.packing import Packing

KEYS = 5
PACK = 40  # events in a pack at most


async def main(url: str, name: str, count: int, most: int) -> None:
    async with connect(url) as mill:
        topic = await mill.topic(name)
        packing = Packing(max_events=PACK, linger=0.01)
        async with topic.writer("numbers", packing, lanes=2) as writer:
            first = writer.position + 1
            for number in range(first, count + 1):
                if number - first - writer.skipped >= most:
                    await asyncio.Event().wait()
                await writer.write(b"%d" % number, key=f"k{number % KEYS}", position=number)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
