"""A program that applies a topic to a table and may be killed at any line.

python apply_child.py BROKER DATABASE WORKERS
"""

from __future__ import annotations

import asyncio
import sys

import millstream
from millstream.cdc.sink.apply import apply


async def main(broker: str, database: str, workers: str) -> None:
    async with millstream.connect(broker) as mill:
        await apply(mill, "orders", database, key=["id"], workers=int(workers), group_rows=300)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
