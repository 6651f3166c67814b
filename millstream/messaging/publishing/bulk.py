"""Publishing several events with one call: many in flight, or all of them or none."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

from millstream.errors import ConfigError, MillstreamError, PartlyStored
from millstream.events.event import NewEvent, Receipt
from millstream.messaging.publishing.event_publisher import EventPublisher
from millstream.messaging.publishing.interest_check import InterestCheck, error_of
from millstream.messaging.topics.handle import TopicHandle
from millstream.wire.aio.atomic import publish_batch

__all__ = ["publish_atomic", "publish_many"]


async def publish_many(
    publisher: EventPublisher,
    events: Iterable[NewEvent | Any],
    interest: InterestCheck | None = None,
) -> list[Receipt]:
    """Store events with many in flight; PartlyStored names those that were refused."""
    if interest is not None:
        new = [_as_new(event) for event in _several(events)]
        before = await interest.before()
        receipts = await publish_many(publisher, new)
        receipts = await interest.checked(before, new, receipts, publisher.acks.durabilities)
        _require_interest(new, receipts)
        return receipts
    futures: list[asyncio.Future[Receipt]] = []
    for event in _several(events):
        if publisher.stream_publisher.full:
            await publisher.stream_publisher.wait_for_space()
        try:
            futures.append(publisher.publish_event(_as_new(event)))
        except MillstreamError as error:
            futures.append(asyncio.get_running_loop().create_future())
            futures[-1].set_exception(error)
    results = await asyncio.gather(*futures, return_exceptions=True)
    failed: dict[int, MillstreamError] = {}
    receipts = []
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
    interest: InterestCheck | None = None,
) -> list[Receipt]:
    """Store the events of one partition next to each other, all of them or none."""
    new = [_as_new(event) for event in _several(events)]
    encoded = [publisher.encode(event) for event in new]
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
    before = [] if interest is None else await interest.before()
    ack = await publish_batch(topic.jetstream, partition.stream, messages, timeout)
    first = ack.seq - len(messages) + 1
    receipts = [
        Receipt(partition.topic, number, offset, False, publisher.acks.durabilities[number])
        for offset in range(first, ack.seq + 1)
    ]
    if interest is not None:
        receipts = await interest.checked(before, new, receipts, publisher.acks.durabilities)
        _require_interest(new, receipts)
    return receipts


def _require_interest(events: Sequence[NewEvent], receipts: Sequence[Receipt]) -> None:
    errors = enumerate(map(error_of, events, receipts))
    failed = {index: error for index, error in errors if error is not None}
    if failed:
        raise PartlyStored(len(events), failed)


def _several(events: Iterable[NewEvent | Any]) -> Iterable[NewEvent | Any]:
    """The events; one value that happens to be iterable is refused, not taken apart."""
    if isinstance(events, str | bytes | bytearray | dict):
        raise ConfigError(
            f"give a list of events, found one {type(events).__name__}. To store one, use publish"
        )
    return events


def _as_new(event: NewEvent | Any) -> NewEvent:
    return event if isinstance(event, NewEvent) else NewEvent(event)
