"""Publishing several events with one call: many in flight, or all of them or none."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

from millstream.errors import ConfigError, MillstreamError, PartlyStored
from millstream.events.event import NewEvent, Receipt
from millstream.messaging.publishing.event_publisher import EventPublisher
from millstream.messaging.topics.handle import TopicHandle
from millstream.wire.aio.atomic import publish_batch

__all__ = ["publish_atomic", "publish_many"]


async def publish_many(
    publisher: EventPublisher, events: Iterable[NewEvent | Any]
) -> list[Receipt]:
    """Store events with many in flight; PartlyStored names those that were refused."""
    futures: list[asyncio.Future[Receipt]] = []
    for event in events:
        if publisher.stream_publisher.full:
            await publisher.stream_publisher.wait_for_space()
        try:
            futures.append(publisher.publish_event(_as_new(event)))
        except MillstreamError as error:
            futures.append(asyncio.get_running_loop().create_future())
            futures[-1].set_exception(error)
    results = await asyncio.gather(*futures, return_exceptions=True)
    failed: dict[int, MillstreamError] = {}
    receipts: list[Receipt] = []
    for index, result in enumerate(results):
        if isinstance(result, MillstreamError):
            failed[index] = result
        elif isinstance(result, BaseException):
            raise result
        else:
            receipts.append(result)
    if failed:
        raise PartlyStored(len(results), failed)
    return receipts


async def publish_atomic(
    topic: TopicHandle,
    publisher: EventPublisher,
    events: Sequence[NewEvent | Any],
    timeout: float,
) -> list[Receipt]:
    """Store the events of one partition next to each other, all of them or none."""
    encoded = [publisher.encode(_as_new(event)) for event in events]
    if not encoded:
        return []
    chosen = {number for number, _ in encoded}
    if len(chosen) > 1:
        raise ConfigError(
            f"an atomic batch is stored in one partition; these events belong to "
            f"{sorted(chosen)}. Give them keys of one partition"
        )
    number = chosen.pop()
    messages = [message for _, message in encoded]
    partition = topic.partitions[number]
    ack = await publish_batch(topic.jetstream, partition.stream, messages, timeout)
    first = ack.seq - len(messages) + 1
    return [
        Receipt(partition.topic, number, offset, False, publisher.durabilities[number])
        for offset in range(first, ack.seq + 1)
    ]


def _as_new(event: NewEvent | Any) -> NewEvent:
    return event if isinstance(event, NewEvent) else NewEvent(event)
