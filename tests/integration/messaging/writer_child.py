"""A program that writes numbers exactly once and may be killed at any line.

python writer_child.py URL TOPIC COUNT
"""

from __future__ import annotations

import asyncio
import sys

from millstream.messaging import connect
from millstream.messaging.packing import Packing

KEYS = 5


async def main(url: str, name: str, count: int) -> None:
    async with connect(url) as mill:
        topic = await mill.topic(name)
        packing = Packing(max_events=40, linger=0.01)
        async with topic.writer("numbers", packing, lanes=2) as writer:
            for number in range(writer.position + 1, count + 1):
                await writer.write(b"%d" % number, key=f"k{number % KEYS}", position=number)


asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
