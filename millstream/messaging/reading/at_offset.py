"""Reading the events of one message by its offset."""

from __future__ import annotations

from millstream.events.event import Event, Partition
from millstream.events.unpack import events_in, raw_of
from millstream.wire.aio.jetstream import JetStream

__all__ = ["events_at"]


async def events_at(jetstream: JetStream, partition: Partition, offset: int) -> list[Event]:
    """The events of the message at an offset; empty when it was removed."""
    found = await jetstream.get_message(partition.stream, {"seq": offset})
    if found is None:
        return []
    raw = raw_of(partition.stream, found)
    if partition.learn is not None:
        await partition.learn([raw])
    return events_in(partition, raw)
