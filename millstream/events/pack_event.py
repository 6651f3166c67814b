"""The events of a pack, and the message that holds them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from millstream.events.escapes import unescaped
from millstream.events.event import (
    RESERVED_PREFIXES,
    Event,
    Partition,
    Unreadable,
)
from millstream.wire.api import AckAddress, parse_ack_address
from millstream.wire.message import RawMessage

if TYPE_CHECKING:
    from millstream.events.packs.pack import Headers, Pack

__all__ = ["PackEvent", "PackMessage", "pack_events"]

_new: Final = object.__new__


class PackMessage:
    """What the events of one pack share: the message that holds them.

    Its columns are made when an event is first asked for its part; by index, from 0.
    """

    def __init__(self, partition: Partition, raw: RawMessage, pack: Pack) -> None:
        self.partition = partition
        self.subject = raw.subject
        self.address: AckAddress = parse_ack_address(raw.reply)
        self.pack = pack

    def values(self) -> Sequence[Any]:
        """The values, made by each call: one that cannot be decoded is Unreadable.

        They are not kept here, so that an event that is kept does not keep all the others.
        """
        values_of = self.partition.values
        return self.pack.values() if values_of is None else values_of(self.pack)

    @cached_property
    def keys(self) -> Sequence[str | None] | Mapping[int, str | None]:
        return self.pack.keys()

    @cached_property
    def times(self) -> Sequence[int | None] | Mapping[int, int | None]:
        """In nanoseconds since 1970; None: when the message was stored."""
        return self.pack.timestamps()

    @cached_property
    def headers(self) -> Sequence[Headers | None] | Mapping[int, Headers | None]:
        return self.pack.headers()

    @cached_property
    def ids(self) -> Sequence[str | None] | Mapping[int, str | None]:
        return self.pack.ids()

    def alone(self, index: int) -> PackMessage:
        """The message with one of its events and without the pack."""
        one = copy(self)
        one.keys, one.times = {index: self.keys[index]}, {index: self.times[index]}
        one.headers, one.ids = {index: self.headers[index]}, {index: self.ids[index]}
        del one.pack
        return one


class PackEvent(Event):
    """One event of a pack."""

    __slots__ = ("_index", "_message", "_value")

    def __init__(self, message: PackMessage, index: int, value: Any) -> None:
        self._message = message
        self._index = index
        self._value = value

    @property
    def message(self) -> PackMessage:
        """The message that holds its pack."""
        return self._message

    def alone(self) -> PackEvent:
        """The same event without its pack, which would stay in memory with all its events."""
        return PackEvent(self._message.alone(self._index), self._index, self._value)

    @property
    def value(self) -> Any:
        value = self._value
        if type(value) is Unreadable:
            raise value.error.with_traceback(None)
        return value

    @property
    def key(self) -> str | None:
        return self._message.keys[self._index]

    @property
    def headers(self) -> Mapping[str, str]:
        own: dict[str, str] = {}
        for name, value in self._message.headers[self._index] or ():
            if not name.startswith(RESERVED_PREFIXES):
                own.setdefault(unescaped(name), value.decode("utf-8", "surrogateescape"))
        return own

    @property
    def timestamp_ns(self) -> int:
        time = self._message.times[self._index]
        return self._message.address.timestamp_ns if time is None else time

    @property
    def stored_ns(self) -> int:
        """When the broker stored its pack, in nanoseconds since 1970."""
        return self._message.address.timestamp_ns

    @property
    def id(self) -> str | None:
        event_id = self._message.ids[self._index]
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


def pack_events(
    message: PackMessage, rows: Iterable[int], values: Iterable[Any]
) -> Iterator[PackEvent]:
    """Events of a pack, each made when its turn comes."""
    for index, value in zip(rows, values, strict=True):
        event = _new(PackEvent)  # as calling the class would, in half the time
        event._message = message
        event._index = index
        event._value = value
        yield event
