"""Acknowledged publishing of plain events, shared by a topic and its event producer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from datetime import datetime
from typing import Any, Final

from millstream.events.encoding import TopicShape, value_bytes
from millstream.events.event import Durability, NewEvent, PublishOptions, Receipt
from millstream.events.json_value import as_json, is_json
from millstream.events.value_type import ValueType
from millstream.messaging.publishing.acks import Acks
from millstream.wire.aio.publisher import StreamPublisher
from millstream.wire.api import PubAck
from millstream.wire.message import OutgoingMessage

__all__ = ["PUBLISH_SECONDS", "EventPublisher"]

# A publish is retried within this time; the duplicate window of a topic must be longer.
PUBLISH_SECONDS: Final = 15.0

_new: Final = tuple.__new__


class EventPublisher:
    """Publishes the events of one topic; each publish is a future of its receipt."""

    def __init__(
        self,
        stream_publisher: StreamPublisher,
        shape: TopicShape,
        acks: Acks,
        check_options: Callable[[PublishOptions], None],
        encoder: ValueType | None = None,
        interest: bool = False,
    ) -> None:
        self.stream_publisher = stream_publisher
        # An ack of an interest topic does not say whether the event is kept.
        self.interest = interest
        self._check_options = check_options
        self._shape = shape
        self._encoder = encoder
        self.acks = acks
        self.waits = PUBLISH_SECONDS, False  # for the ack, and whether also for room
        self._receipts = [
            _receipt_maker(shape.topic, partition, acks.stated)
            for partition in range(shape.partitions)
        ]

    def waiting(self, seconds: float) -> EventPublisher:
        """The same for a topic that may be full: a publish waits this long for room."""
        other = copy(self)
        other.waits = seconds, True
        return other

    def publish(
        self,
        value: Any,
        key: str | bytes | None = None,
        headers: Mapping[str, str] | None = None,
        timestamp: datetime | int | None = None,
        id: str | None = None,
        options: PublishOptions | None = None,
    ) -> asyncio.Future[Receipt]:
        """Start publishing; the event is checked and encoded before this returns."""
        if (
            headers is not None
            or timestamp is not None
            or id is not None
            or options is not None
            or value is None
            or self._encoder is not None
            or (type(value) is not bytes and is_json(value))
        ):
            return self.publish_event(NewEvent(value, key, headers, timestamp, id, options))
        # Nothing but bytes and a key: the quick way.
        data = value if type(value) is bytes else value_bytes(value)
        partition, subject = self._shape.route(key)
        make = self._receipts[partition]
        timeout, blocks = self.waits
        return self.stream_publisher.publish_bare(subject, data, timeout, make, blocks)

    def publish_event(self, event: NewEvent) -> asyncio.Future[Receipt]:
        """Like `publish`, for an event that may have everything."""
        partition, message = self.encode(event)
        timeout, blocks = self.waits
        if event.options is not None:
            if event.options.timeout is not None:
                timeout = event.options.timeout
            blocks = blocks or event.options.overload == "block"
        return self.stream_publisher.publish(message, timeout, self._receipts[partition], blocks)

    def encode(self, event: NewEvent) -> tuple[int, OutgoingMessage]:
        """The partition of an event, and its message."""
        if event.options is not None:
            self._check_options(event.options)
        if event.value is None:
            schema_id, data = None, b""
        elif self._encoder is None:
            if is_json(event.value):
                value, headers = as_json(event.value, event.headers)
                event = replace(event, value=value, headers=headers)
            schema_id, data = None, value_bytes(event.value)
        else:
            schema_id, data = self._encoder.schema_id, self._encoder.encode(event.value)
        event_id = self.stream_publisher.new_id() if event.id is None else event.id
        partition, subject, block = self._shape.encode(event, event_id, schema_id)
        return partition, OutgoingMessage(subject, block, data)


def _receipt_maker(
    topic: str, partition: int, durabilities: Sequence[Durability]
) -> Callable[[PubAck], Receipt]:
    def make(ack: PubAck) -> Receipt:
        # The durability when the ack arrives: the event may have been sent again to another server.
        # Without the cost of a call of the class: this runs for every event.
        return _new(Receipt, (topic, partition, ack.seq, ack.duplicate, durabilities[partition]))

    return make
