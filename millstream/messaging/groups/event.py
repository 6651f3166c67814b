"""Events as a group hands them out: with the epoch of the partition's owner, a fencing token."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, Protocol

from millstream.events.classify import kind_of
from millstream.events.event import Event, Partition, PlainEvent
from millstream.events.pack_event import PackEvent, PackMessage
from millstream.events.undecodable import DECODE_FAILURES, reason_of
from millstream.events.unpack import open_pack
from millstream.wire.message import RawMessage

__all__ = ["BrokenPack", "GroupEvent", "Tenure", "group_events"]


class Tenure(Protocol):
    """The time for which a member owns a partition."""

    @property
    def epoch(self) -> int: ...


class GroupEvent(Event):
    """An event handed out by a group to the one member that owns its partition."""

    __slots__ = ()

    @property
    @abstractmethod
    def tenure(self) -> Tenure:
        """Internal: the member's ownership of the partition when the event was handed out."""

    @property
    @abstractmethod
    def attempt(self) -> int:
        """Number of this attempt, from 1; each owner starts counting at 1."""

    @property
    def epoch(self) -> int:
        """Grows with each owner of the partition.

        Store it with what the handler changes and refuse smaller epochs there: then even a
        process that was frozen in a handler and wakes up later cannot undo newer work.
        """
        return self.tenure.epoch


class PlainGroupEvent(PlainEvent, GroupEvent):
    """A group's event that is one message."""

    __slots__ = ("_attempt", "_tenure")

    def __init__(self, tenure: Tenure, partition: Partition, raw: RawMessage) -> None:
        PlainEvent.__init__(self, partition, raw)
        self._tenure = tenure
        self._attempt = 1

    @property
    def tenure(self) -> Tenure:
        return self._tenure

    @property
    def attempt(self) -> int:
        return self._attempt

    @attempt.setter
    def attempt(self, number: int) -> None:
        self._attempt = number


class BrokenPack(PlainGroupEvent):
    """A damaged message, or one marked as a pack that is none: it becomes one dead letter."""

    __slots__ = ("reason",)

    def __init__(self, tenure: Tenure, partition: Partition, raw: RawMessage, reason: str) -> None:
        super().__init__(tenure, partition, raw)
        self.reason = reason

    @property
    def key(self) -> str | None:
        return None


class PackGroupEvent(PackEvent, GroupEvent):
    """A group's event of a pack."""

    __slots__ = ("_attempt", "_tenure")

    def __init__(self, tenure: Tenure, message: PackMessage, index: int, value: Any) -> None:
        PackEvent.__init__(self, message, index, value)
        self._tenure = tenure
        self._attempt = 1

    @property
    def tenure(self) -> Tenure:
        return self._tenure

    @property
    def attempt(self) -> int:
        return self._attempt

    @attempt.setter
    def attempt(self, number: int) -> None:
        self._attempt = number


AnyGroupEvent = PlainGroupEvent | PackGroupEvent


def group_events(tenure: Tenure, partition: Partition, raw: RawMessage) -> Iterator[AnyGroupEvent]:
    """The events of one message, in order; none when it is one of Millstream's own."""
    kind = kind_of(raw.subject, raw.headers, partition.prefix_size)
    if kind.is_pack:
        try:
            message = open_pack(partition, raw)
            values = enumerate(message.values())
            events = [PackGroupEvent(tenure, message, index, value) for index, value in values]
        except DECODE_FAILURES as error:
            yield BrokenPack(tenure, partition, raw, reason_of(error))
        else:
            yield from events
    elif kind.is_plain:
        yield PlainGroupEvent(tenure, partition, raw)
