"""Acknowledged publishing of single events: what a topic and its plain producer share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final, Protocol

from millstream.messaging.encoding import IdSource, TopicShape, value_bytes
from millstream.messaging.event import Durability, NewEvent, Receipt
from millstream.wire.api import PubAck
from millstream.wire.atomic import BatchMessage
from millstream.wire.publish_lane import PublishLane

__all__ = ["EventPublisher", "ValueEncoder"]

# A publish is retried within this time; the duplicate window of a topic must be longer.
PUBLISH_SECONDS: Final = 15.0


class ValueEncoder(Protocol):
    """Turns a value of a typed topic into bytes; the schemas room provides it."""

    @property
    def schema_id(self) -> str: ...

    def encode(self, value: Any) -> bytes: ...


class EventPublisher:
    """Sends events of one topic over a lane; each send is a future of its receipt."""

    def __init__(
        self,
        lane: PublishLane,
        shape: TopicShape,
        durability: Durability,
        encoder: ValueEncoder | None = None,
    ) -> None:
        self.lane = lane
        self._shape = shape
        self._encoder = encoder
        self._ids = IdSource()
        self._receipts = [
            _receipt_maker(shape.topic, partition, durability)
            for partition in range(shape.partitions)
        ]

    def send(self, event: NewEvent) -> asyncio.Future[Receipt]:
        """Start publishing; the event is checked and encoded before this returns."""
        partition, (subject, block, data) = self.encode(event)
        options = event.options
        timeout = PUBLISH_SECONDS
        if options is not None and options.timeout is not None:
            timeout = options.timeout
        return self.lane.publish(subject, block, data, timeout, self._receipts[partition])

    def encode(self, event: NewEvent) -> tuple[int, BatchMessage]:
        """The partition of an event, and its message."""
        if self._encoder is None:
            schema_id, data = None, value_bytes(event.value)
        else:
            schema_id, data = self._encoder.schema_id, self._encoder.encode(event.value)
        event_id = self._ids.next() if event.id is None else event.id
        partition, subject, block = self._shape.encode(event, event_id, schema_id)
        return partition, BatchMessage(subject, block, data)

    async def publish(self, event: NewEvent) -> Receipt:
        """Publish and wait for the receipt."""
        if self.lane.full:
            await self.lane.room()
        return await self.send(event)


def _receipt_maker(
    topic: str, partition: int, durability: Durability
) -> Callable[[PubAck], Receipt]:
    def make(ack: PubAck) -> Receipt:
        return Receipt(topic, partition, ack.seq, ack.duplicate, durability)

    return make
