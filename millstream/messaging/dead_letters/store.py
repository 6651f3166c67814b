"""Storing dead letters: events a subscription gave up on, with their cause and origin."""

from __future__ import annotations

import asyncio
from datetime import datetime
from typing import Final

from millstream.deadline import now_ns
from millstream.errors import ConfigError, TopicNotFound, WrongSequence
from millstream.events.classify import FOR_HEADER, NULL_HEADER, PACK_HEADER
from millstream.events.event import (
    KEY_HEADER,
    OWN_ID_HEADER,
    TIME_HEADER,
    Event,
    PlainEvent,
    datetime_of,
)
from millstream.events.fence import EXPECTED_HEADER
from millstream.events.pack_event import PackEvent
from millstream.events.subject import key_token, stored_key_token
from millstream.messaging.topics import admin as topic_admin
from millstream.messaging.topics.info import TopicInfo
from millstream.messaging.topics.lookup import open_topic
from millstream.messaging.topics.settings import TopicSettings
from millstream.wire.aio.jetstream import JetStream
from millstream.wire.aio.publisher import StreamPublisher
from millstream.wire.message import OutgoingMessage
from millstream.wire.protocol import encode_headers

__all__ = ["DeadLetterStore", "dead_letter_prefix", "default_dead_letter_topic"]

CAUSE_HEADER: Final = "Mill-Dead-Cause"
ATTEMPTS_HEADER: Final = "Mill-Dead-Attempts"
TOPIC_HEADER: Final = "Mill-Dead-Topic"
PARTITION_HEADER: Final = "Mill-Dead-Partition"
OFFSET_HEADER: Final = "Mill-Dead-Offset"
INDEX_HEADER: Final = "Mill-Dead-Index"
SUBSCRIPTION_HEADER: Final = "Mill-Dead-Subscription"
SUBJECT_HEADER: Final = "Mill-Dead-Subject"
WHEN_HEADER: Final = "Mill-Dead-When"
# A pack that cannot be opened, or a damaged message, is stored as plain bytes, so that the dead
# letters stay readable.
BROKEN_PACK_HEADER: Final = "Mill-Dead-Pack"
DAMAGED: Final = (BROKEN_PACK_HEADER, "damaged")
CAUSE_CHARS_MAX: Final = 1000
STORE_SECONDS: Final = 10.0
# Headers of the event that are replaced by the dead letter's.
_REPLACED: Final = frozenset({KEY_HEADER, TIME_HEADER, OWN_ID_HEADER, FOR_HEADER, NULL_HEADER})
_DROPPED_PREFIXES: Final = ("Nats-", "Mill-Dead-")


def default_dead_letter_topic(topic: str, subscription: str) -> str:
    """The dead-letter topic of a subscription whose settings name none."""
    return f"{topic}-{subscription}-dead"


def dead_letter_prefix(info: TopicInfo) -> str:
    """The prefix of a dead-letter topic's subjects; refused when it cannot be one."""
    if info.managed and not info.settings.is_copy and len(info.partitions) == 1 and info.prefix:
        return info.prefix
    raise ConfigError(
        f"'{info.name}' cannot hold dead letters: it must be a Millstream topic with one "
        f"partition and not a copy. Choose another one with dead_letter"
    )


class DeadLetterStore:
    """Writes the dead letters of one subscription, each exactly once.

    Every event has a subject of its own in the dead-letter topic, and is written only if that is
    still empty: a second attempt, by any process and at any time, finds it. The topic is created
    when it is first needed, with as many replicas as the event's own; an existing one is used.
    """

    def __init__(
        self, jetstream: JetStream, publisher: StreamPublisher, dead_topic: str, subscription: str
    ) -> None:
        self._jetstream = jetstream
        self._publisher = publisher
        self.topic = dead_topic
        self._subscription = subscription
        self._prefix: str | None = None
        self._order = asyncio.Lock()  # letters are stored in the order of the calls

    async def store(self, event: Event, reason: str, attempts: int) -> None:
        """Store an event as a dead letter; returns when it is stored."""
        partition, offset, index = event.position
        token = f"{self._subscription}.{key_token(event.topic)}.{partition}.{offset}.{index}"
        own, payload = _content(event)
        pairs = [*self._headers(event, reason, attempts), *own]
        block = encode_headers(pairs, foreign=True)
        async with self._order:
            if self._prefix is None:
                self._prefix = await self._declare(event.topic)
            message = OutgoingMessage(f"{self._prefix}.{token}".encode(), block, payload)
            stored = self._publisher.publish(message, STORE_SECONDS, lambda ack: ack)
        try:
            await stored
        except WrongSequence:
            return  # it is stored already

    async def _declare(self, topic: str) -> str:
        try:
            info = await open_topic(self._jetstream, self.topic)
        except TopicNotFound:
            replicas = (await open_topic(self._jetstream, topic)).settings.replicas
            settings = TopicSettings(replicas=replicas)
            info = await topic_admin.declare(self._jetstream, self.topic, settings)
        return dead_letter_prefix(info)

    def _headers(self, event: Event, reason: str, attempts: int) -> list[tuple[str, str]]:
        partition, offset, index = event.position
        pairs = [
            (EXPECTED_HEADER, "0"),
            (CAUSE_HEADER, _one_line(reason)),
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
        if isinstance(event, PlainEvent) and event.is_damaged:
            return pairs  # its key and id may be parts of something else
        if event.key is not None:
            pairs.append((KEY_HEADER, stored_key_token(event.key)))
        if event.id is not None:
            pairs.append((OWN_ID_HEADER, event.id))
        return pairs


def _one_line(reason: str) -> str:
    """A reason in a form that a header can hold."""
    return " ".join(reason.split())[:CAUSE_CHARS_MAX].encode("utf-8", "replace").decode()


def _text(moment: datetime) -> str:
    return moment.isoformat().replace("+00:00", "Z")


def _content(event: Event) -> tuple[list[tuple[str, str]], bytes]:
    """The event's own headers and payload."""
    if not isinstance(event, PlainEvent):
        return _one_row_pack(event)
    if event.is_damaged:
        return [DAMAGED], event.raw.headers + event.data
    own = [
        (BROKEN_PACK_HEADER if name == PACK_HEADER else name, value)
        for name, value in event.all_headers
        if name not in _REPLACED and not name.startswith(_DROPPED_PREFIXES)
    ]
    if event.is_deletion:  # the header of an expired key is the server's, and dropped above
        own.append((NULL_HEADER, "1"))
    return own, event.data


def _one_row_pack(event: Event) -> tuple[list[tuple[str, str]], bytes]:
    """An event of a pack as a pack of its own: types and values stay exactly as they are."""
    from millstream.events.packs.pack import encode

    if not isinstance(event, PackEvent):
        raise TypeError(f"neither a message nor an event of a pack: {event!r}")
    pack = event.message.pack
    row = encode(pack.batch.slice(event.index, 1), schema_id=pack.schema_id)
    return list(row.headers.items()), bytes(memoryview(row.payload))
