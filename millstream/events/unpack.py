"""Messages to events: a plain message is one event, a pack is many; all readers accept both."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from itertools import chain
from typing import Any

from millstream.errors import Undecodable
from millstream.events.classify import (
    FOR_MARK,
    OWN_MARK,
    PACK_MARK,
    check_whole,
    kind_of,
)
from millstream.events.event import Event, Partition, PlainEvent
from millstream.events.event_list import EventList, GatheredEvents, PackEvents
from millstream.events.pack_event import PackMessage, pack_events
from millstream.events.undecodable import DECODE_FAILURES, Report, reason_of
from millstream.wire.api import parse_ack_address
from millstream.wire.message import RawMessage, StoredMessage, stored_ns_of
from millstream.wire.protocol import HEADERS_END, parse_headers

__all__ = [
    "event_lists_of",
    "events_in",
    "events_of",
    "open_pack",
    "raw_of",
    "take_plain",
    "undecodable",
]


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
    have been read here before. A pack is decoded when its turn comes.
    """
    found = _decoded(partition, messages, keys)
    if report is None:
        return chain.from_iterable(_raised(found))
    return chain.from_iterable(_reported(found, report, partition.decode is not None))


def event_lists_of(
    partition: Partition,
    messages: list[RawMessage],
    keys: Collection[str] = (),
    report: Report | None = None,
) -> Iterator[EventList]:
    """The same events as lists, none of them empty: one for each pack, and what is between them.

    With `report`, the values of a list are checked before it is handed out.
    """
    found = _decoded(partition, messages, keys)
    if report is None:
        yield from _raised(found)
        return
    checked = partition.decode is not None
    for item in found:
        if isinstance(item, Undecodable):
            report(item)
        elif not checked or (isinstance(item, PackEvents) and item.all_readable):
            yield item
        elif readable := _readable(partition, item, report):
            yield readable


def _readable(partition: Partition, events: EventList, report: Report) -> EventList:
    """Those whose values can be decoded; the others are reported."""
    readable = list(_handed_out(map(_checked, events), report))
    if len(readable) == len(events):
        return events
    if isinstance(events, PackEvents):
        return events.chosen([event.index for event in readable])
    return GatheredEvents(partition, readable)


def _raised(found: Iterable[EventList | Undecodable]) -> Iterator[EventList]:
    for item in found:
        if isinstance(item, Undecodable):
            raise item
        yield item


def _reported(
    found: Iterable[EventList | Undecodable], report: Report, checked: bool
) -> Iterator[Iterable[Event]]:
    """The events, and a report of each error in its turn."""
    for item in found:
        if isinstance(item, Undecodable):
            report(item)
        else:
            yield _handed_out(map(_checked, item), report) if checked else item


def _decoded(
    partition: Partition, messages: list[RawMessage], keys: Collection[str]
) -> Iterator[EventList | Undecodable]:
    """The events, and the errors of messages that cannot be decoded, each when its turn comes."""
    plain: list[PlainEvent] = []
    left = iter(messages)
    while True:
        raw = take_plain(partition, left, plain)
        other = None if raw is None else _other(partition, raw, keys)
        if isinstance(other, PlainEvent):
            plain.append(other)
            continue
        if raw is not None and other is None:
            continue  # not for readers: the events around it are next to each other
        chosen = [event for event in plain if event.key in keys] if keys else plain
        if chosen:
            yield GatheredEvents(partition, chosen)
        if other is None:
            return
        plain = []
        if isinstance(other, Undecodable) or other:
            yield other


def _other(
    partition: Partition, raw: RawMessage, keys: Collection[str]
) -> PlainEvent | PackEvents | Undecodable | None:
    """What a message is that may be anything; None: nothing that readers get."""
    kind = kind_of(raw.subject, raw.headers, partition.prefix_size)
    if kind.redriven:
        return None
    if kind.is_pack:
        try:
            return _pack_list(partition, raw, keys)
        except DECODE_FAILURES as cause:
            return undecodable(partition, raw, cause)
    return PlainEvent(partition, raw) if kind.is_plain else None


def _pack_list(partition: Partition, raw: RawMessage, keys: Collection[str]) -> PackEvents:
    """The events of a pack; one of DECODE_FAILURES if it is none, or Python cannot hold it."""
    message = open_pack(partition, raw)
    events = PackEvents(message, range(message.pack.count))
    if partition.values is None:
        events.made()  # without a schema, a value that Python cannot hold is the whole pack's error
    if not keys:
        return events
    return events.chosen([row for row, key in enumerate(message.pack.keys()) if key in keys])


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
    return list(pack_events(message, range(message.pack.count), message.values()))
