"""A member of a group in a process of its own; it notes every call of its handler in a file.

    python group_worker.py URL FILE LEASE SECONDS DEADLY

`SECONDS` is how long a handler takes, `DEADLY` the key whose handler ends the process. Notes are
single writes to an appended file, so that a kill loses none.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time

from millstream import connect
from millstream.events.event import Partition
from millstream.messaging.groups.group import Group, GroupEvent, GroupSettings
from millstream.wire.aio.publisher import StreamPublisher


async def main(url: str, file: str, lease: str, seconds: str, deadly: str) -> None:
    notes = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(word: str, event: GroupEvent) -> None:
        number = event.value.decode()
        line = f"{word} {event.key} {number} {event.epoch} {time.monotonic()} {os.getpid()}\n"
        os.write(notes, line.encode())

    async def handler(event: GroupEvent) -> None:
        note("start", event)
        if event.key == deadly:
            os._exit(9)
        await asyncio.sleep(float(seconds))
        note("end", event)

    async with connect(url) as client:
        info = await (await client.topic("orders")).info()
        partitions = [
            Partition(part.stream, "orders", part.number, part.prefix) for part in info.partitions
        ]
        settings = GroupSettings(lease=float(lease), commit_every=0.2)
        publisher = StreamPublisher(client.connection)
        async with Group(
            client.jetstream, publisher, "orders", partitions, "billing", settings
        ) as group:
            await group.run(handler)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
