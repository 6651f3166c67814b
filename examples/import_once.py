"""An import that is killed and started again stores every line once.

The writer stores its position in the file with the events, so nothing else has to be saved.
`python -m examples.import_once`
"""

from __future__ import annotations

import asyncio

import millstream
from examples.own_broker import broker_url
from millstream import Mill

LINES = 10_000
DIES_AT = 6_543


class Killed(Exception):
    """A crash in the middle of the import."""


async def import_file(mill: Mill, lines: list[str], dies_at: int | None = None) -> int:
    """Store each line as an event; returns how many an earlier run had already stored."""
    topic = await mill.topic("lines")
    async with topic.writer("importer") as writer:
        for number, line in enumerate(lines, 1):
            if number == dies_at:
                raise Killed
            await writer.write(line.encode(), key=str(number), position=number)
    return writer.skipped


async def show(mill: Mill, lines: list[str]) -> None:
    await mill.create_topic("lines")
    try:
        await import_file(mill, lines, DIES_AT)
    except Killed:
        print(f"the import died at line {DIES_AT:,}")
    skipped = await import_file(mill, lines)
    print(f"the second run skipped {skipped:,} lines that were already stored")
    found = [event.value.decode() async for event in (await mill.topic("lines")).read()]
    print(f"{LINES:,} lines in the file, {len(found):,} events, {len(set(found)):,} different ones")


async def main() -> None:
    lines = [f"line {number}" for number in range(1, LINES + 1)]  # as if from a file
    with broker_url() as url:
        async with millstream.connect(url) as mill:
            await show(mill, lines)


if __name__ == "__main__":
    asyncio.run(main())
