"""Messages to events: a plain message is one event, a pack is many; all readers accept both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from millstream.events.classify import FOR_MARK, OWN_MARK, PACK_MARK, kind_of
from millstream.events.event import (
    Event,
    Partition,
    PlainEvent,
    Unreadable,
    stored_ns_of,
)
from millstream.wire.api import AckAddress, parse_ack_address
from millstream.wire.message import RawMessage, StoredMessage
from millstream.wire.protocol import parse_headers

if TYPE_CHECKING:
    from millstream.events.packs.pack import Pack

__all__ = [
    "PackEvent",
    "PackMessage",
    "events_in",
    "events_of",
    "open_pack",
    "raw_of",
]


class PackMessage:
    """What the events of one pack share: the message that holds them."""

    __slots__ = ("address", "pack", "partition", "subject")

    def __init__(self, partition: Partition, raw: RawMessage, pack: Pack) -> None:
        self.partition = partition
        self.subject = raw.subject
        self.address: AckAddress = parse_ack_address(raw.reply)
        self.pack = pack


class PackEvent(Event):
    """One event of a pack."""

    __slots__ = ("_headers", "_id", "_index", "_key", "_message", "_time_ns", "_value")

    def __init__(self, message: PackMessage, index: int, row: tuple[Any, ...]) -> None:
        self._message = message
        self._index = index
        self._key, self._time_ns, self._headers, self._id, self._value = row

    @property
    def message(self) -> PackMessage:
        """The message that holds its pack."""
        return self._message

    @property
    def value(self) -> Any:
        value = self._value
        if type(value) is Unreadable:
            raise value.error.with_traceback(None)
        return value

    @property
    def key(self) -> str | None:
        key: str | None = self._key
        return key

    @property
    def headers(self) -> Mapping[str, str]:
        return {
            name: value.decode("utf-8", "surrogateescape") for name, value in self._headers or ()
        }

    @property
    def timestamp_ns(self) -> int:
        if self._time_ns is None:
            return self._message.address.timestamp_ns
        return int(self._time_ns)

    @property
    def stored_ns(self) -> int:
        """When the broker stored its pack, in nanoseconds since 1970."""
        return self._message.address.timestamp_ns

    @property
    def id(self) -> str | None:
        event_id: str | None = self._id
        return event_id

    @property
    def topic(self) -> str:
        return self._message.partition.topic

    @property
    def partition(self) -> int:
        return self._message.partition.number

    @property
    def offset(self) -> int:
        return self._message.address.sequence

    @property
    def index(self) -> int:
        return self._index

    @property
    def subject(self) -> str:
        return self._message.subject.decode("utf-8", "replace")


def raw_of(stream: str, stored: StoredMessage) -> RawMessage:
    """A message that was looked up, in the form of a delivered one."""
    stored_ns = stored_ns_of(stored.time)
    reply = f"$JS.ACK.{stream}.get.1.{stored.sequence}.0.{stored_ns}.0".encode()
    return RawMessage(stored.subject.encode(), reply, stored.headers, stored.payload)


def open_pack(partition: Partition, raw: RawMessage) -> PackMessage:
    """Decode a message that holds a pack; PackError when it is not valid."""
    from millstream.events.packs.pack import (
        decode,  # brings pyarrow, which plain messages don't need
    )

    pack = decode(parse_headers(raw.headers), raw.payload)
    return PackMessage(partition, raw, pack)


def events_of(partition: Partition, messages: list[RawMessage]) -> list[Event]:
    """The events of some messages, in order, for readers without a subscription.

    Millstream's own messages are skipped, and so are copies redriven for one subscription: they
    have been read here before.
    """
    events: list[Event] = []
    at = partition.prefix_size
    for raw in messages:
        subject, _, headers, _ = raw
        if subject[at : at + 1] != b"_" and (
            not headers
            or headers.find(OWN_MARK) < 0
            or (headers.find(FOR_MARK) < 0 and headers.find(PACK_MARK) < 0)
        ):
            events.append(PlainEvent(partition, raw))  # nearly all are: `kind_of` costs too much
            continue
        kind = kind_of(subject, headers, at)
        if kind.redriven:
            continue
        if kind.is_pack:
            events.extend(_packed(partition, raw))
        elif kind.is_plain:
            events.append(PlainEvent(partition, raw))
    return events


def events_in(partition: Partition, raw: RawMessage) -> list[Event]:
    """The events of one message, redriven ones too; none when it is one of Millstream's own."""
    kind = kind_of(raw.subject, raw.headers, partition.prefix_size)
    if kind.is_pack:
        return _packed(partition, raw)
    return [PlainEvent(partition, raw)] if kind.is_plain else []


def _packed(partition: Partition, raw: RawMessage) -> list[Event]:
    message = open_pack(partition, raw)
    rows = partition.rows(message.pack) if partition.rows else message.pack.events()
    return [PackEvent(message, index, row) for index, row in enumerate(rows)]
