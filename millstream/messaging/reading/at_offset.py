"""Reading the events of one message by its offset."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millstream.events.event import Event, Partition
from millstream.events.undecodable import DECODE_FAILURES
from millstream.events.unpack import events_in, raw_of, undecodable
from millstream.wire.aio.jetstream import JetStream

__all__ = ["events_at", "events_by"]


async def events_at(jetstream: JetStream, partition: Partition, offset: int) -> list[Event]:
    """The events of the message at an offset; empty when it was removed.

    Undecodable when it is damaged, or marked as a pack and not a valid one.
    """
    return await events_by(jetstream, partition, {"seq": offset})


async def events_by(
    jetstream: JetStream, partition: Partition, ask: Mapping[str, Any]
) -> list[Event]:
    """The events of the message that a question names; empty when there is none."""
    found = await jetstream.get_message(partition.stream, ask)
    if found is None:
        return []
    raw = raw_of(partition.stream, found)
    if partition.learn is not None:
        await partition.learn([raw])
    try:
        return events_in(partition, raw)
    except DECODE_FAILURES as error:
        raise undecodable(partition, raw, error) from error
