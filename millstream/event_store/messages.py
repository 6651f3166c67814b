"""Messages of a store's topic to events. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

from millstream.errors import NoUpcaster, Undecodable, UnknownEvent
from millstream.event_store.event_types import EventTypes
from millstream.event_store.events import Deleted, StoredEvent
from millstream.event_store.format import (
    ARCHIVED_HEADER,
    CAUSATION_HEADER,
    CORRELATION_HEADER,
    PREVIOUS_HEADER,
    STORED_HEADER,
    VERSIONS_HEADER,
    next_previous,
    read_previous,
    read_versions,
    split_lines,
)
from millstream.event_store.ids import id_of
from millstream.event_store.privacy import key_ids_in
from millstream.events.classify import is_deletion, kind_of
from millstream.events.event import (
    ID_HEADER,
    RESERVED_PREFIXES,
    TIME_HEADER,
    Partition,
    event_ns,
)
from millstream.events.undecodable import DECODE_FAILURES, reason_of
from millstream.wire.api import parse_ack_address
from millstream.wire.message import RawMessage
from millstream.wire.protocol import parse_headers

__all__ = ["AppendMessage", "open_append", "previous_in", "stored_events"]

_MARK = f"\r\n{VERSIONS_HEADER}: ".encode()


class AppendMessage(NamedTuple):
    """One append as it is stored, its events not decoded yet."""

    id: str
    first: int  # version of its first event
    last: int
    offset: int
    stored_ns: int
    headers: dict[str, str]
    lines: list[tuple[str, bytes]]  # tag and JSON of each event; none: the aggregate ends here
    partition: Partition
    raw: RawMessage

    @property
    def append_id(self) -> str | None:
        return self.headers.get(ID_HEADER)

    @property
    def timestamp_ns(self) -> int:
        """Event time; when none was given, the time of storing."""
        return event_ns(self.headers.get(TIME_HEADER), self.stored_ns)

    @property
    def key_ids(self) -> set[str]:
        """The ids of the keys of the persons whose data are in it."""
        return {id_ for _, body in self.lines for id_ in key_ids_in(body)}

    @property
    def archive(self) -> str | None:
        """The topic that holds the events of an aggregate that ends here; None: they are gone."""
        return self.headers.get(ARCHIVED_HEADER)

    @property
    def previous(self) -> list[int]:
        """The offsets of the appends before it, as far as it says them; the newest first."""
        return read_previous(self.headers.get(PREVIOUS_HEADER, ""))

    @property
    def next_previous(self) -> str:
        """What the next append says of those before it."""
        size = sum(len(body) for _, body in self.lines)
        return next_previous(self.headers.get(PREVIOUS_HEADER, ""), self.offset, size)

    @property
    def ends(self) -> bool:
        """Whether it is the end of its aggregate."""
        return not self.lines


def open_append(partition: Partition, raw: RawMessage) -> AppendMessage | None:
    """The append in a message; None when it is something else. Undecodable when it is damaged.

    Any program with the right to publish can store anything on the subjects of a store: what has no
    versions is not of the store, and is left out.
    """
    address = parse_ack_address(raw.reply)
    kind = kind_of(raw.subject, raw.headers, partition.prefix_size)
    if kind.redriven or not (kind.is_plain or kind.is_pack):
        return None
    if kind.is_plain and raw.headers.find(_MARK) < 0:
        return None
    try:
        if kind.is_pack:
            raise ValueError("it is damaged, or not an append of an event store")
        headers = parse_headers(raw.headers)
        first, last = read_versions(headers)
        lines = [] if is_deletion(raw.headers) else split_lines(raw.payload)
        if len(lines) != last - first + 1 and (lines or first != last):
            raise ValueError(f"it has {len(lines)} events and says versions {first} to {last}")
        tokens = raw.subject[partition.prefix_size :].decode("utf-8", "surrogateescape")
    except ValueError as error:
        where = (partition.topic, partition.number, address.sequence, 0)
        raise Undecodable(*where, str(error)) from error
    stored = event_ns(headers.get(STORED_HEADER), address.timestamp_ns)
    known = (address.sequence, stored, headers, lines)
    return AppendMessage(id_of(tokens), first, last, *known, partition, raw)


def previous_in(headers: bytes) -> list[int]:
    """The offsets of the appends before one that has these headers; the newest first."""
    return read_previous(parse_headers(headers).get(PREVIOUS_HEADER, ""))


def stored_events(append: AppendMessage, types: EventTypes) -> Iterator[StoredEvent]:
    """The events of an append, in order; Undecodable at the first that cannot be read."""
    headers, stored, time = append.headers, append.stored_ns, append.timestamp_ns
    topic, number = append.partition.topic, append.partition.number
    own = {n: v for n, v in headers.items() if not n.startswith(RESERVED_PREFIXES)}
    make = partial(
        StoredEvent,
        append.id,
        timestamp_ns=time,
        stored_ns=stored,
        partition=number,
        offset=append.offset,
        append_id=headers.get(ID_HEADER),
        correlation_id=headers.get(CORRELATION_HEADER),
        causation_id=headers.get(CAUSATION_HEADER),
        headers=own,
    )
    if append.ends:
        end = Deleted(headers.get(ARCHIVED_HEADER))
        yield make(append.first, "Deleted", end, 1, index=0)
    for index, (tag, body) in enumerate(append.lines):
        try:
            name, version = types.name_of(tag)
            data = types.decode(tag, body)
        except DECODE_FAILURES as error:
            if isinstance(error, UnknownEvent | NoUpcaster):
                raise
            where = (topic, number, append.offset, index)
            raise Undecodable(*where, reason_of(error)) from error
        yield make(append.first + index, name, data, version, index=index)
