"""Messages to events: a plain message is one event, a pack is many; all readers accept both."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from copy import copy
from typing import TYPE_CHECKING, Any, cast

from millstream.errors import Undecodable
from millstream.events.classify import (
    FOR_MARK,
    OWN_MARK,
    PACK_MARK,
    check_whole,
    kind_of,
)
from millstream.events.escapes import unescaped
from millstream.events.event import (
    RESERVED_PREFIXES,
    Event,
    Partition,
    PlainEvent,
    Unreadable,
)
from millstream.events.undecodable import DECODE_FAILURES, Report, reason_of
from millstream.wire.api import AckAddress, parse_ack_address
from millstream.wire.message import RawMessage, StoredMessage, stored_ns_of
from millstream.wire.protocol import HEADERS_END, parse_headers

if TYPE_CHECKING:
    from millstream.events.packs.pack import Pack

__all__ = [
    "PackEvent",
    "PackMessage",
    "events_in",
    "events_of",
    "open_pack",
    "raw_of",
    "take_plain",
    "undecodable",
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

    def alone(self) -> PackEvent:
        """The same event without its pack, which would stay in memory with all its events."""
        message = copy(self._message)
        del message.pack
        row = (self._key, self._time_ns, self._headers, self._id, self._value)
        return PackEvent(message, self._index, row)

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
        own: dict[str, str] = {}
        for name, value in self._headers or ():
            if not name.startswith(RESERVED_PREFIXES):
                own.setdefault(unescaped(name), value.decode("utf-8", "surrogateescape"))
        return own

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
        return None if event_id is None else unescaped(event_id)

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
        return self._message.subject.decode("utf-8", "surrogateescape")


def raw_of(stream: str, stored: StoredMessage) -> RawMessage:
    """A message that was looked up, in the form of a delivered one."""
    stored_ns = stored_ns_of(stored.time)
    reply = f"$JS.ACK.{stream}.get.1.{stored.sequence}.0.{stored_ns}.0".encode()
    return RawMessage(stored.subject.encode(), reply, stored.headers, stored.payload)


def open_pack(partition: Partition, raw: RawMessage) -> PackMessage:
    """Decode a message that holds a pack; a ValueError when it is damaged or not valid."""
    from millstream.events.packs.pack import (
        decode,  # brings pyarrow, which plain messages don't need
    )

    check_whole(raw.subject, raw.headers, partition.prefix_size)
    pack = decode(parse_headers(raw.headers), raw.payload)
    return PackMessage(partition, raw, pack)


def undecodable(partition: Partition, raw: RawMessage, error: Exception) -> Undecodable:
    """The error for a message that cannot be decoded."""
    offset = parse_ack_address(raw.reply).sequence
    return Undecodable(partition.topic, partition.number, offset, 0, reason_of(error))


def events_of(
    partition: Partition,
    messages: list[RawMessage],
    keys: Collection[str] = (),
    report: Report | None = None,
) -> Iterator[Event]:
    """The events of some messages (only those of `keys`, if given), in order, for readers.

    A message that cannot be decoded is raised after the events before it. With `report` that is
    called instead, in its turn, also for values that cannot be decoded, and it is left out; without
    it such a value raises when it is asked for.

    Millstream's own messages are skipped, and so are copies redriven for one subscription: they
    have been read here before.
    """
    found = _decoded(partition, messages, report is not None)
    if keys:
        found = [e for e in found if isinstance(e, Undecodable) or e.key in keys]
    if report is not None:
        checked = partition.decode is not None
        return _handed_out(map(_checked, found) if checked else found, report)
    if found and isinstance(found[-1], Undecodable):
        return _handed_out(found, _raise)
    return iter(cast(list[Event], found))


def _decoded(
    partition: Partition, messages: list[RawMessage], all_of_them: bool
) -> list[Event | Undecodable]:
    """The events, and the errors of messages that cannot be decoded: all, or up to the first."""
    found: list[Event | Undecodable] = []
    at = partition.prefix_size
    left = iter(messages)
    while (raw := take_plain(partition, left, found)) is not None:
        kind = kind_of(raw.subject, raw.headers, at)
        if kind.redriven:
            continue
        if kind.is_pack:
            try:
                found.extend(_packed(partition, raw))
            except DECODE_FAILURES as cause:
                found.append(undecodable(partition, raw, cause))
                if not all_of_them:
                    break
        elif kind.is_plain:
            found.append(PlainEvent(partition, raw))
    return found


def take_plain(
    partition: Partition, messages: Iterator[RawMessage], found: list[Any]
) -> RawMessage | None:
    """Put the events of plain messages into a list; returns the first that may be anything else.

    Nearly all are plain, and `kind_of` for each would cost too much.
    """
    at = partition.prefix_size
    for raw in messages:
        subject, _, headers, _ = raw
        first = subject[at : at + 1]
        if (
            first
            and first != b"_"
            and (
                not headers
                or (
                    headers.endswith(HEADERS_END)
                    and (
                        headers.find(OWN_MARK) < 0
                        or (headers.find(FOR_MARK) < 0 and headers.find(PACK_MARK) < 0)
                    )
                )
            )
        ):
            found.append(PlainEvent(partition, raw))
        else:
            return raw
    return None


def _handed_out(found: Iterable[Event | Undecodable], report: Report) -> Iterator[Event]:
    """The events; an error is reported in its turn."""
    for item in found:
        if isinstance(item, Undecodable):
            report(item)
        else:
            yield item


def _raise(error: Undecodable) -> None:
    raise error


def _checked(item: Event | Undecodable) -> Event | Undecodable:
    """The event, or the error of its value."""
    if not isinstance(item, Undecodable):
        try:
            _ = item.value
        except DECODE_FAILURES as error:
            return Undecodable(item.topic, *item.position, reason_of(error))
    return item


def events_in(partition: Partition, raw: RawMessage) -> list[Event]:
    """The events of one message, redriven ones too; none when it is one of Millstream's own.

    A damaged message and a pack that is not valid raise one of DECODE_FAILURES.
    """
    kind = kind_of(raw.subject, raw.headers, partition.prefix_size)
    if kind.is_pack:
        return _packed(partition, raw)
    return [PlainEvent(partition, raw)] if kind.is_plain else []


def _packed(partition: Partition, raw: RawMessage) -> list[Event]:
    message = open_pack(partition, raw)
    rows = partition.rows(message.pack) if partition.rows else message.pack.events()
    return [PackEvent(message, index, row) for index, row in enumerate(rows)]
