"""Dead letters: events a subscription gave up, stored with cause and origin before they go."""

from __future__ import annotations

from datetime import datetime
from typing import Final

from millstream.deadline import now_ns
from millstream.errors import WrongSequence
from millstream.messaging import topic_admin
from millstream.messaging.delivery import Delivery
from millstream.messaging.event import KEY_HEADER, TIME_HEADER, Event, PlainEvent, datetime_of
from millstream.messaging.subject import key_token
from millstream.messaging.topic_settings import TopicSettings
from millstream.messaging.unpack import PackEvent
from millstream.wire.jetstream import JetStream
from millstream.wire.message import OutgoingMessage
from millstream.wire.protocol import encode_headers
from millstream.wire.publish_lane import PublishLane

__all__ = ["DeadLetterStore", "default_dead_letter_topic"]

EXPECTED_HEADER: Final = "Nats-Expected-Last-Subject-Sequence"
CAUSE_HEADER: Final = "Mill-Dead-Cause"
ATTEMPTS_HEADER: Final = "Mill-Dead-Attempts"
TOPIC_HEADER: Final = "Mill-Dead-Topic"
PARTITION_HEADER: Final = "Mill-Dead-Partition"
OFFSET_HEADER: Final = "Mill-Dead-Offset"
INDEX_HEADER: Final = "Mill-Dead-Index"
SUBSCRIPTION_HEADER: Final = "Mill-Dead-Subscription"
SUBJECT_HEADER: Final = "Mill-Dead-Subject"
WHEN_HEADER: Final = "Mill-Dead-When"
CAUSE_CHARS_MAX: Final = 1000
STORE_SECONDS: Final = 10.0
# Of the event's own headers only these are replaced by the dead letter's.
_DROPPED_PREFIXES: Final = ("Nats-", "Mill-Dead-", "Mill-Key", "Mill-Time")


def default_dead_letter_topic(topic: str, subscription: str) -> str:
    return f"{topic}-{subscription}-dead"


class DeadLetterStore:
    """Writes the dead letters of one subscription, each exactly once.

    Every event has a subject of its own in the dead-letter topic, and is written only if that is
    still empty: a second attempt, by whichever process and however late, finds it there.
    """

    def __init__(
        self, jetstream: JetStream, lane: PublishLane, dead_topic: str, subscription: str
    ) -> None:
        self._jetstream = jetstream
        self._lane = lane
        self._topic = dead_topic
        self._subscription = subscription
        self._declared = False

    async def store(self, delivery: Delivery, reason: str) -> None:
        """Store a delivery as a dead letter; return when it is on disk."""
        await self.store_event(delivery, reason, delivery.attempt)

    async def store_event(self, event: Event, reason: str, attempts: int) -> None:
        """Store any event as a dead letter; return when it is on disk."""
        if not self._declared:
            await topic_admin.declare(self._jetstream, self._topic, TopicSettings())
            self._declared = True
        partition, offset, index = event.position
        subject = f"{self._topic}.{event.topic}.{partition}.{offset}.{index}".encode()
        pairs = self._origin(event, reason, attempts)
        if isinstance(event, PlainEvent):
            own = [
                (name, value)
                for name, value in event.all_headers
                if not name.startswith(_DROPPED_PREFIXES)
            ]
            payload = event.data
        else:
            own, payload = _one_row_pack(event)
        block = encode_headers([*pairs, *own])
        try:
            message = OutgoingMessage(subject, block, payload)
            await self._lane.publish(message, STORE_SECONDS, lambda ack: ack)
        except WrongSequence:
            return  # stored before

    def _origin(self, event: Event, reason: str, attempts: int) -> list[tuple[str, str]]:
        partition, offset, index = event.position
        pairs = [
            (EXPECTED_HEADER, "0"),
            (CAUSE_HEADER, " ".join(reason.split())[:CAUSE_CHARS_MAX]),
            (ATTEMPTS_HEADER, str(attempts)),
            (TOPIC_HEADER, event.topic),
            (PARTITION_HEADER, str(partition)),
            (OFFSET_HEADER, str(offset)),
            (INDEX_HEADER, str(index)),
            (SUBSCRIPTION_HEADER, self._subscription),
            (SUBJECT_HEADER, event.subject),
            (WHEN_HEADER, _text(datetime_of(now_ns()))),
            (TIME_HEADER, str(event.timestamp_ns)),
        ]
        if event.key is not None:
            pairs.append((KEY_HEADER, key_token(event.key)))
        return pairs


def _text(moment: datetime) -> str:
    return moment.isoformat().replace("+00:00", "Z")


def _one_row_pack(event: Event) -> tuple[list[tuple[str, str]], bytes]:
    """An event of a pack as a pack of its own: types and values stay exactly as they are."""
    from millstream.messaging.pack import encode

    if not isinstance(event, PackEvent):
        raise TypeError(f"neither a message nor an event of a pack: {event!r}")
    pack = event.message.pack
    row = encode(pack.batch.slice(event.index, 1), schema_id=pack.schema_id)
    return list(row.headers.items()), bytes(memoryview(row.payload))
