"""What a store hands out and takes: events, receipts, loaded aggregates, expectations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from typing import Any, Final, Generic, Literal, TypeAlias, TypeVar

import msgspec

from millstream.errors import ConfigError
from millstream.event_store.ids import check_id, matches_pattern, pattern_of
from millstream.events.event import Durability, datetime_of

__all__ = [
    "ANY",
    "NEW",
    "Append",
    "AppendReceipt",
    "Clock",
    "Deleted",
    "Expected",
    "Loaded",
    "NamedEvent",
    "StoredEvent",
    "Unchanged",
    "check_expected",
]

S = TypeVar("S")

# By which time "as of" is meant: when an event was stored, or the time it was given.
Clock: TypeAlias = Literal["stored", "event"]


class Expectation(Enum):
    """What an append expects instead of a version."""

    NEW = "a new aggregate"
    ANY = "any version"

    def __str__(self) -> str:
        return self.value


NEW: Final = Expectation.NEW  # the aggregate has no events yet
ANY: Final = Expectation.ANY  # whatever its version is


@dataclass(frozen=True, slots=True)
class Unchanged:
    """Expects that no aggregate that matches a pattern has got an event after an offset.

    For decisions that rest on several aggregates. The pattern must also match the aggregate that
    is appended to: `Unchanged("course-1.*", offset)`, with `offset` the last one that was read.
    """

    pattern: str
    offset: int

    def __post_init__(self) -> None:
        pattern_of(self.pattern)
        if self.offset < 0:
            raise ConfigError(f"offset {self.offset}: give that of the last event read, or 0")

    def __str__(self) -> str:
        return f"no change of {self.pattern!r} after offset {self.offset}"


Expected: TypeAlias = int | Expectation | Unchanged


def check_expected(expected: Expected, id: str) -> Expected:
    """The expectation if an append to this aggregate can have it; else a ConfigError."""
    if isinstance(expected, Unchanged):
        if not matches_pattern(expected.pattern, id):
            raise ConfigError(
                f"expected: the pattern {expected.pattern!r} does not match '{id}', so another "
                f"append to it would go unnoticed. Use a pattern that matches both"
            )
        return expected
    if isinstance(expected, Expectation):
        return expected
    if isinstance(expected, bool) or not isinstance(expected, int) or expected < 0:
        raise ConfigError(
            f"expected: {expected!r:.60} is not a version. Give a version from 1 on, NEW, ANY or "
            f"Unchanged(pattern, offset)"
        )
    return expected or NEW


def _check_text(name: str, value: str | None) -> None:
    """Refuse a text that a header does not give back as it was."""
    if value is None:
        return
    if not isinstance(value, str) or not value or value != value.strip() or not value.isprintable():
        raise ConfigError(
            f"{name} {value!r:.60}: give text in one line, without spaces at its ends"
        )


# Made for every append or event: a Struct takes a tenth of the time of a frozen dataclass.
class Append(msgspec.Struct, frozen=True):
    """One of several appends that are stored together; see `EventStore.append_all`."""

    id: str
    events: Sequence[Any]
    expected: Expected = ANY
    headers: Mapping[str, str] | None = None
    timestamp: datetime | int | None = None  # event time; None: when they are stored
    append_id: str | None = None  # by which it is recognised if it is repeated; None: a new one
    correlation_id: str | None = None  # of everything that belongs to one piece of work
    causation_id: str | None = None  # of what led to it

    def __post_init__(self) -> None:
        check_id(self.id)
        check_expected(self.expected, self.id)
        for name in ("append_id", "correlation_id", "causation_id"):
            _check_text(name, getattr(self, name))


class NamedEvent(msgspec.Struct, frozen=True):
    """An event to append, by a program without its class: the name of its type, and its fields.

    It is checked against the registered schema.
    """

    name: str
    data: Mapping[str, Any]


class AppendReceipt(msgspec.Struct, frozen=True):
    """The broker's confirmation that the events of an append are stored."""

    id: str
    first_version: int
    version: int  # of the last event
    partition: int
    offset: int
    duplicate: bool  # it had been stored before, by an append with the same id
    durability: Durability


@dataclass(frozen=True, slots=True)
class Deleted:
    """The end of an aggregate, as readers of all events see it."""

    archived_to: str | None = None  # the topic that holds its events now


class StoredEvent(msgspec.Struct, frozen=True):
    """One event of an aggregate."""

    id: str  # of the aggregate
    version: int  # counts 1, 2, 3 for each aggregate
    name: str
    data: Any  # an object of the event's class, a dict without one, or Deleted
    schema_version: int  # that it was written with
    timestamp_ns: int  # event time; when none was given, the time of storing
    stored_ns: int
    partition: int
    offset: int
    index: int  # in its append, from 0
    append_id: str | None = None
    correlation_id: str | None = None
    causation_id: str | None = None
    headers: Mapping[str, str] = {}

    @property
    def timestamp(self) -> datetime:
        """Event time; when none was given, the time of storing."""
        return datetime_of(self.timestamp_ns)

    @property
    def stored(self) -> datetime:
        """When the broker stored it."""
        return datetime_of(self.stored_ns)

    @property
    def deleted(self) -> bool:
        """Whether it is the end of its aggregate."""
        return isinstance(self.data, Deleted)


@dataclass(frozen=True, slots=True)
class Loaded(Generic[S]):
    """The state of an aggregate after some version."""

    id: str
    state: S
    version: int  # 0: it has no events yet
    offset: int  # of the last event in it
    # Of the last event in it; None: not known, because it was appended just now.
    timestamp_ns: int | None = None
    stored_ns: int | None = None
    key_ids: frozenset[str] = frozenset()  # internal: of the persons whose data are in it

    @property
    def timestamp(self) -> datetime | None:
        """Event time of the last event in it; None if that was appended just now."""
        return None if self.timestamp_ns is None else datetime_of(self.timestamp_ns)

    @property
    def stored(self) -> datetime | None:
        """When the last event in it was stored; None if that was appended just now."""
        return None if self.stored_ns is None else datetime_of(self.stored_ns)
