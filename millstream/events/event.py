"""Events as they are written and read, and receipts."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from millstream.errors import ConfigError
from millstream.events.classify import Kind, is_deletion, kind_of
from millstream.events.json_value import read_json
from millstream.events.subject import key_bytes, key_of_token
from millstream.events.value_type import ValueType
from millstream.wire.api import AckAddress, parse_ack_address
from millstream.wire.protocol import parse_header_items, parse_headers

if TYPE_CHECKING:
    from millstream.wire.message import RawMessage

__all__ = [
    "ID_HEADER",
    "KEY_HEADER",
    "NOT_DECODED",
    "OWN_ID_HEADER",
    "RESERVED_PREFIXES",
    "SCHEMA_HEADER",
    "TIME_HEADER",
    "Durability",
    "Event",
    "FullTopic",
    "NewEvent",
    "Partition",
    "PlainEvent",
    "PublishOptions",
    "Receipt",
    "Unreadable",
    "datetime_of",
    "event_ns",
    "nanoseconds_of",
    "place_of",
    "whole_microsecond",
]

KEY_HEADER: Final = "Mill-Key"
TIME_HEADER: Final = "Mill-Time"
SCHEMA_HEADER: Final = "Mill-Schema"
ID_HEADER: Final = "Nats-Msg-Id"
# The producer's id of a redriven event, whose message needs another id for the server.
OWN_ID_HEADER: Final = "Mill-Id"
# Headers of the server and of Millstream; `Event.headers` shows the user's own only.
RESERVED_PREFIXES: Final = ("Nats-", "Mill-")

_TIME_MARK: Final = b"\r\nMill-Time: "
_KEY_MARK: Final = b"\r\nMill-Key: "
NOT_DECODED: Final = object()  # a value that was not asked for yet
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_TIME: Final = re.compile(r"-?[0-9]{1,21}")
# What a datetime can express: the years 1 to 9999.
_EARLIEST_NS: Final = -62_135_596_800 * 10**9
_LATEST_NS: Final = 253_402_300_800 * 10**9 - 1

# "fsync", "replicated", "periodic", "memory", "unknown", or "none": it is not kept at all
Durability = str


class Receipt(NamedTuple):
    """The broker's confirmation that an event is stored."""

    topic: str
    partition: int
    offset: int  # the stream sequence
    duplicate: bool  # an event with this id was already stored, at `offset`
    durability: Durability  # what the ack guarantees


# What a publish does when the topic is full (`discard="new"`) or the broker's storage is used up.
FullTopic = Literal["refuse", "block"]


@dataclass(frozen=True, slots=True)
class PublishOptions:
    """Options that are rarely needed when publishing one event."""

    ttl: float | None = None  # seconds the event is kept; at most the topic's max_age
    deliver_at: datetime | None = None  # the event appears in the topic at this time
    # Only if this is the offset of the key's last event (0: none), in a topic without packs.
    expected_last: int | None = None
    timeout: float | None = None  # seconds to wait for the ack, retries included
    require_interest: bool = False  # NotKept when nobody wants the event of an interest topic
    overload: FullTopic = "refuse"  # a full topic: LimitReached at once, or "block" until `timeout`


@dataclass(frozen=True, slots=True)
class NewEvent:
    """An event to be written; everything but the value may be left out."""

    value: Any
    key: str | bytes | None = None
    headers: Mapping[str, str] | None = None
    timestamp: datetime | int | None = None  # event time (int: ns since 1970); None: when stored
    id: str | None = None  # a second event with this id within the duplicate window is not stored
    options: PublishOptions | None = None
    topic: str | None = None  # of a process with several targets: the one that it is for


def nanoseconds_of(timestamp: datetime | int) -> int:
    """Nanoseconds since 1970 of an event time; a time without a zone is refused."""
    if isinstance(timestamp, int):
        if not _EARLIEST_NS <= timestamp <= _LATEST_NS:
            raise ConfigError(
                f"timestamp {str(timestamp)[:40]}: give nanoseconds since 1970 of the years 1 to "
                f"9999"
            )
        return timestamp
    if timestamp.tzinfo is None:
        raise ConfigError(
            f"timestamp {timestamp!r} has no time zone: give one, "
            f"for example with tzinfo=datetime.UTC"
        )
    past = timestamp - _EPOCH
    return (past.days * 86_400 + past.seconds) * 1_000_000_000 + past.microseconds * 1_000


def whole_microsecond(nanoseconds: int) -> int:
    """The last nanosecond of a microsecond.

    A time of the past counts to the microsecond, as a datetime does, and is included: so the state
    as of the time of an event has that event.

    >>> whole_microsecond(1_000_000_500)
    1000000999
    """
    return nanoseconds // 1_000 * 1_000 + 999


def event_ns(header: str | None, stored: int) -> int:
    """Nanoseconds since 1970 of an event: from its header, or when it was stored.

    Any client can write the header; a time outside the years 1 to 9999 is ignored.

    >>> event_ns("5", 9), event_ns(None, 9), event_ns("soon", 9), event_ns("9" * 5000, 9)
    (5, 9, 9, 9)
    """
    if header is None or _TIME.fullmatch(header) is None:
        return stored
    time = int(header)
    return time if _EARLIEST_NS <= time <= _LATEST_NS else stored


def datetime_of(nanoseconds: int) -> datetime:
    """The moment as a datetime in UTC, truncated to microseconds."""
    return _EPOCH + timedelta(microseconds=nanoseconds // 1_000)


class Event(ABC):
    """One event as read from a topic. Immutable; its position is (partition, offset, index)."""

    __slots__ = ()

    @property
    @abstractmethod
    def value(self) -> Any:
        """The value: bytes, or what the topic's schema makes of them; None when there is none."""

    @property
    @abstractmethod
    def key(self) -> str | None:
        """The key; events of one key keep their order."""

    @property
    @abstractmethod
    def headers(self) -> Mapping[str, str]:
        """The producer's own headers."""

    @property
    @abstractmethod
    def timestamp_ns(self) -> int:
        """Event time in nanoseconds since 1970; when none was given, the time it was stored."""

    @property
    @abstractmethod
    def id(self) -> str | None:
        """The id given by the producer, by which duplicates are recognised."""

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
    def offset(self) -> int:
        """The stream sequence of the message that holds the event."""

    @property
    @abstractmethod
    def index(self) -> int:
        """Index within its pack, from 0; 0 for a plain event."""

    @property
    @abstractmethod
    def subject(self) -> str:
        """The NATS subject it was stored under."""

    @property
    def timestamp(self) -> datetime:
        """Event time as a datetime in UTC."""
        return datetime_of(self.timestamp_ns)

    @property
    def position(self) -> tuple[int, int, int]:
        """(partition, offset, index): unique in the topic and growing along a partition."""
        return self.partition, self.offset, self.index

    def json(self) -> Any:
        """The value, read as JSON: how a dict or list is read back in a topic without a schema.

        Any value that is JSON can be read, whatever its headers say; NotJson if it is none.
        """
        return read_json(self.value, self._place)

    def _place(self) -> str:
        return f"{self.topic}/{self.partition}, offset {self.offset}, index {self.index}"

    def __repr__(self) -> str:
        where = f"{self.topic}/{self.partition}@{self.offset}.{self.index}"
        return f"<{type(self).__name__} {where} key={self.key!r}>"


def place_of(event: Event) -> str:
    """Where an event is stored, for the log: without its key, which may be confidential."""
    return f"{event.topic}/{event.partition}, offset {event.offset}, index {event.index}"


class Partition:
    """One partition of a topic: its stream, and how its messages are read. Shared by its events."""

    __slots__ = ("decode", "learn", "number", "prefix", "prefix_size", "stream", "topic", "values")

    def __init__(
        self,
        stream: str,
        topic: str,
        number: int,
        prefix: str | None,
        values: ValueType | None = None,
    ) -> None:
        self.stream = stream
        self.topic = topic
        self.number = number  # from 0
        self.prefix = prefix  # None: a foreign stream, whose subjects carry no keys
        self.prefix_size = len(prefix.encode()) + 1 if prefix is not None else 0
        # Payload and schema id to value; None: the value is the payload.
        self.decode = None if values is None else values.decode
        # A pack to its values, resolved; None: as the pack has them.
        self.values = None if values is None else values.values
        # Awaited before messages are decoded: loads the schema versions that they need.
        self.learn = None if values is None else values.learn


class Unreadable:
    """A packed event's value that cannot be decoded: asking for it raises."""

    __slots__ = ("error",)

    def __init__(self, error: Exception) -> None:
        self.error = error


class PlainEvent(Event):
    """An event that is one message. Nothing is parsed until it is asked for."""

    __slots__ = ("_address", "_partition", "_value", "raw")

    def __init__(self, partition: Partition, raw: RawMessage) -> None:
        self._address: AckAddress | None = None
        self._partition = partition
        self._value: Any = NOT_DECODED
        self.raw = raw  # the message as it came

    @property
    def data(self) -> bytes:
        """The payload as stored."""
        return self.raw.payload

    @property
    def value(self) -> Any:
        if self.is_deletion:
            return None
        decode = self._partition.decode
        if decode is None:
            return self.raw.payload
        if self._value is NOT_DECODED:
            self._value = decode(self.raw.payload, self.header(SCHEMA_HEADER))
        return self._value

    @property
    def is_deletion(self) -> bool:
        """Whether it has no value: in a table, its key is deleted."""
        headers = self.raw.headers
        return bool(headers) and is_deletion(headers)

    @property
    def is_damaged(self) -> bool:
        """Whether the borders of its message moved: see `check_whole`."""
        subject, _, headers, _ = self.raw
        return kind_of(subject, headers, self._partition.prefix_size) is Kind.DAMAGED

    @property
    def key(self) -> str | None:
        if _KEY_MARK in self.raw.headers:
            return key_of_token(key_bytes(self.header(KEY_HEADER) or ""))
        size = self._partition.prefix_size
        return key_of_token(self.raw.subject[size:]) if size else None

    @property
    def headers(self) -> Mapping[str, str]:
        if not self.raw.headers:
            return {}
        own: dict[str, str] = {}
        for name, value in parse_header_items(self.raw.headers):
            if not name.startswith(RESERVED_PREFIXES):
                own.setdefault(name, value)
        return own

    @property
    def all_headers(self) -> list[tuple[str, str]]:
        """Every header of the message, the server's and repeated ones included."""
        return parse_header_items(self.raw.headers)

    @property
    def timestamp_ns(self) -> int:
        if _TIME_MARK in self.raw.headers:
            return event_ns(self.header(TIME_HEADER), self.address.timestamp_ns)
        return self.address.timestamp_ns

    @property
    def stored_ns(self) -> int:
        """When the broker stored it, in nanoseconds since 1970."""
        return self.address.timestamp_ns

    @property
    def id(self) -> str | None:
        if not self.raw.headers:
            return None
        headers = parse_headers(self.raw.headers)
        return headers.get(OWN_ID_HEADER) or headers.get(ID_HEADER)

    @property
    def topic(self) -> str:
        return self._partition.topic

    @property
    def partition(self) -> int:
        return self._partition.number

    @property
    def offset(self) -> int:
        return self.address.sequence

    @property
    def index(self) -> int:
        return 0

    @property
    def subject(self) -> str:
        return self.raw.subject.decode("utf-8", "surrogateescape")

    @property
    def address(self) -> AckAddress:
        """The ack address, parsed: sequence, stored time, delivery count."""
        if self._address is None:
            self._address = parse_ack_address(self.raw.reply)
        return self._address

    def header(self, name: str) -> str | None:
        """A header of the message by its name, the server's and Millstream's included."""
        return parse_headers(self.raw.headers).get(name) if self.raw.headers else None
