"""How many events a topic holds: plain messages, and what the headers of its packs say.

The broker counts messages, also those on each subject, so the plain events are known. A reader
of headers alone sums up the events in packs; with a limit it reads some of them and estimates.
"""

from __future__ import annotations

import re
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

from millstream.errors import ConfigError
from millstream.events.classify import holds_pack
from millstream.events.encoding import SCHEDULE_TOKEN
from millstream.events.event import Partition
from millstream.events.packs.headers import COUNT
from millstream.events.subject import COPIES_TOKEN, PACK_TOKEN
from millstream.messaging.reading.replay import ReadPlan, read_messages
from millstream.messaging.topics.info import PartitionInfo, TopicInfo
from millstream.messaging.topics.lookup import stream_subjects
from millstream.wire.aio.jetstream import JetStream

__all__ = ["EventCount", "count_events"]

_COUNT_LINE: Final = re.compile(rb"\r\n%b: (\d{1,9})\r\n" % COUNT.encode())


@dataclass(frozen=True, slots=True)
class EventCount:
    """The number of events of a topic, deletions included."""

    events: int
    exact: bool  # False: an estimate, from some of the packs


async def count_events(
    jetstream: JetStream, info: TopicInfo, packs_max: int | None = None
) -> EventCount:
    """The events that are stored; an estimate when there are more packs than `packs_max`.

    Copies that were redriven for one subscription, and events that are scheduled, do not count.
    """
    if info.prefix is None:
        raise ConfigError(f"'{info.name}' is not a topic of Millstream: it may hold anything")
    events, exact, left = 0, True, packs_max
    for part in info.partitions:
        packs = await _on(jetstream, part, PACK_TOKEN)
        others = [await _on(jetstream, part, token) for token in (COPIES_TOKEN, SCHEDULE_TOKEN)]
        read, inside = (0, 0) if not packs else await _in_packs(jetstream, info.name, part, left)
        left = None if left is None else max(1, left - read)
        if 0 < read < packs:
            exact, inside = False, round(inside * packs / read)
        events += max(0, part.messages - packs - sum(others)) + inside
    return EventCount(events, exact)


async def _on(jetstream: JetStream, part: PartitionInfo, token: str) -> int:
    """Messages on Millstream's own subjects of one kind."""
    pattern = f"{part.prefix}.{token}.>"
    return sum([count async for _, count in stream_subjects(jetstream, part.stream, pattern)])


async def _in_packs(
    jetstream: JetStream, topic: str, part: PartitionInfo, packs_max: int | None
) -> tuple[int, int]:
    """How many packs were read, and the events in them."""
    partition = Partition(part.stream, topic, part.number, part.prefix)
    plan = ReadPlan(subjects=[f"{part.prefix}.{PACK_TOKEN}.>"])
    found = read_messages(jetstream, [partition], plan, over_damage=True, headers_only=True)
    packs = events = 0
    async with aclosing(found) as groups:
        async for _, messages in groups:
            for raw in messages:
                line = _COUNT_LINE.search(raw.headers) if holds_pack(raw.headers) else None
                events += int(line[1]) if line else 0
            packs += len(messages)
            if packs_max is not None and packs >= packs_max:
                break
    return packs, events
