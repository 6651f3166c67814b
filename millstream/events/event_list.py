"""Lists of events with their parts as columns, for those who handle many at a time."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, overload

from millstream.errors import Undecodable
from millstream.events.event import Event, Partition, Unreadable, datetime_of
from millstream.events.pack_event import PackEvent, PackMessage, pack_events
from millstream.events.undecodable import DECODE_FAILURES, reason_of

__all__ = ["EventList", "GatheredEvents", "PackEvents"]


class EventList(Sequence[Event]):
    """Events of one partition, in order: those of one pack, or single ones next to each other.

    `events.values` is much faster than `[event.value for event in events]`, and so are the other
    lists. Each is made when it is first asked for. A slice is an EventList too.
    """

    __slots__ = ()

    @property
    @abstractmethod
    def topic(self) -> str:
        """The topic's name."""

    @property
    @abstractmethod
    def partition(self) -> int:
        """The partition's number, from 0."""

    @property
    @abstractmethod
    def values(self) -> list[Any]:
        """The value of each event; Undecodable if one cannot be decoded: then read one by one."""

    @property
    @abstractmethod
    def keys(self) -> list[str | None]:
        """The key of each event."""

    @property
    @abstractmethod
    def offsets(self) -> list[int]:
        """The offset of each event: the same for all events of a pack."""

    @property
    @abstractmethod
    def timestamps(self) -> list[datetime]:
        """The time of each event, in UTC."""

    @overload
    def __getitem__(self, index: int) -> Event: ...

    @overload
    def __getitem__(self, index: slice) -> EventList: ...

    @abstractmethod
    def __getitem__(self, index: int | slice) -> Event | EventList:
        """One event, or some of them as a list."""

    def __repr__(self) -> str:
        where = f"{self.topic}/{self.partition}"
        return f"<EventList of {len(self):,} event(s) of {where}, {_span(self)}>"


def _span(events: EventList) -> str:
    if not events:
        return "none"
    first, last = events.offsets[0], events.offsets[-1]
    return f"offset {first}" if first == last else f"offsets {first} to {last}"


def _values_of(events: EventList) -> list[Any]:
    """The values, one by one; Undecodable names the first that cannot be decoded."""
    values = []
    for event in events:
        try:
            values.append(event.value)
        except DECODE_FAILURES as error:
            raise Undecodable(event.topic, *event.position, reason_of(error)) from error
    return values


class _PackValues:
    """The values of a pack, made once for a list of its events and the slices of that list."""

    def __init__(self, message: PackMessage) -> None:
        self._message = message

    @cached_property
    def all(self) -> Sequence[Any]:
        return self._message.values()


class PackEvents(EventList):
    """Events of one pack, by their index in it."""

    __slots__ = ("_made", "_message", "_rows", "_values")

    def __init__(
        self, message: PackMessage, rows: Sequence[int], made: _PackValues | None = None
    ) -> None:
        self._message = message
        self._rows = rows
        self._made = made or _PackValues(message)
        self._values: list[Any] | None = None

    @property
    def topic(self) -> str:
        return self._message.partition.topic

    @property
    def partition(self) -> int:
        return self._message.partition.number

    @property
    def values(self) -> list[Any]:
        if self._values is None:
            values = self._chosen(self._made.all)
            if Unreadable in set(map(type, values)):
                values = _values_of(self)
            self._values = values
        return self._values

    @property
    def keys(self) -> list[str | None]:
        return self._chosen(self._message.keys)

    @property
    def offsets(self) -> list[int]:
        return [self._message.address.sequence] * len(self._rows)

    @property
    def timestamps(self) -> list[datetime]:
        stored_ns = self._message.address.timestamp_ns
        stored, found = datetime_of(stored_ns), self._message.pack.moments()
        return [stored if at is None else at for at in self._chosen(found)]

    def made(self) -> None:
        """Make the values now: what this raises says that the pack cannot be decoded."""
        _ = self._made.all

    @property
    def all_readable(self) -> bool:
        """Whether each value can be decoded."""
        return Unreadable not in set(map(type, self._chosen(self._made.all)))

    def chosen(self, rows: Sequence[int]) -> PackEvents:
        """Those of some rows of the pack."""
        return PackEvents(self._message, rows, self._made)

    def _chosen(self, column: Any) -> list[Any]:
        """The parts of these events, in a list of the caller's own."""
        rows = self._rows
        if isinstance(rows, range) and rows.step == 1:
            return list(column[rows.start : rows.stop])
        return [column[row] for row in rows]

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[PackEvent]:
        return pack_events(self._message, self._rows, self._chosen(self._made.all))

    @overload
    def __getitem__(self, index: int) -> PackEvent: ...

    @overload
    def __getitem__(self, index: slice) -> PackEvents: ...

    def __getitem__(self, index: int | slice) -> PackEvent | PackEvents:
        if isinstance(index, slice):
            return self.chosen(self._rows[index])
        row = self._rows[index]
        return PackEvent(self._message, row, self._made.all[row])


class GatheredEvents(EventList):
    """Events that are there one by one."""

    __slots__ = ("_events", "_partition", "_values")

    def __init__(self, partition: Partition, events: Sequence[Event]) -> None:
        self._partition = partition
        self._events = events
        self._values: list[Any] | None = None

    @property
    def topic(self) -> str:
        return self._partition.topic

    @property
    def partition(self) -> int:
        return self._partition.number

    @property
    def values(self) -> list[Any]:
        if self._values is None:
            self._values = _values_of(self)
        return self._values

    @property
    def keys(self) -> list[str | None]:
        return [event.key for event in self._events]

    @property
    def offsets(self) -> list[int]:
        return [event.offset for event in self._events]

    @property
    def timestamps(self) -> list[datetime]:
        return [event.timestamp for event in self._events]

    def __len__(self) -> int:
        return len(self._events)

    def __iter__(self) -> Iterator[Event]:
        return iter(self._events)

    @overload
    def __getitem__(self, index: int) -> Event: ...

    @overload
    def __getitem__(self, index: slice) -> GatheredEvents: ...

    def __getitem__(self, index: int | slice) -> Event | GatheredEvents:
        if isinstance(index, slice):
            return GatheredEvents(self._partition, self._events[index])
        return self._events[index]
