"""What a topic is told to be: frozen values, checked when they are made. Pure.

    TopicSettings(partitions=4, max_age="7d", max_bytes="10GiB")
    TopicSettings(retention="workqueue", discard="new", max_messages=100_000)
    TopicSettings(mirror=Origin("orders", domain="edge"))

`topic_config.py` turns them into JetStream stream configurations and back.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, Final, Generic, Self, TypeVar, overload

from millstream.errors import ConfigError
from millstream.events.subject import check_subject
from millstream.messaging.topics.setting_forms import (
    Duration,
    FrozenMetadata,
    Size,
    choice,
    duration_text,
    read_duration,
    read_metadata,
    read_size,
    short_repr,
)

__all__ = [
    "Compression",
    "Discard",
    "Origin",
    "Retention",
    "Storage",
    "TopicSettings",
]


DEFAULT_DUPLICATE_WINDOW: Final = timedelta(minutes=2)  # the server's own
# A partition is a stream with its own files and threads; thousands of them make a start slow.
PARTITIONS_MAX: Final = 1024
SOURCES_MAX: Final = 256  # each is a consumer at its origin that this topic keeps running
DESCRIPTION_BYTES_MAX: Final = 4096  # the server's own
METADATA_BYTES_MAX: Final = 120 * 1024  # the server takes 128 KiB; the rest is for our own keys
_COUNTS_MAX: Final = {
    "partitions": PARTITIONS_MAX,
    "replicas": 5,  # the server's own
    "max_message_size": 2**31 - 1,  # the server keeps it in 32 bits
}
WIRE_FORMATS: Final = ("avro", "json", "protobuf")
_SHORTEST: Final = timedelta(milliseconds=100)  # the server's own, for age and duplicate window
_SHORTEST_TTL: Final = timedelta(seconds=1)

# Metadata keys that say what the streams are to each other; only Millstream writes them.
_OWN: Final = (
    *("version", "topic", "partition", "partitions"),
    *("prefix", "origins", "format", "guarded"),
)
RESERVED_METADATA: Final = frozenset(f"millstream.{key}" for key in _OWN)


class Retention(StrEnum):
    """How long an event is kept: to the limits, while a subscription wants it, or until taken."""

    LIMITS = "limits"
    INTEREST = "interest"
    WORK_QUEUE = "workqueue"


class Storage(StrEnum):
    """Where events are kept."""

    FILE = "file"
    MEMORY = "memory"


class Discard(StrEnum):
    """What gives way at a limit: the oldest event, or the new one (LimitReached)."""

    OLD = "old"
    NEW = "new"


class Compression(StrEnum):
    """How files are compressed."""

    NONE = "none"
    S2 = "s2"


@dataclass(frozen=True, slots=True)
class Origin:
    """A topic (or any JetStream stream) that another one copies from.

    What is not known about it is looked up when the copy is declared; give `partitions` (and
    `prefix` or `foreign` if they apply) to declare a copy of a topic that cannot be seen yet.
    """

    topic: str
    domain: str | None = None  # JetStream domain beyond a leaf node; None: the same
    start: int | datetime | None = None  # first offset or time to copy; None: everything
    filter: str | None = None  # pattern of what follows the prefix, so a key's token
    partitions: int | None = None  # None: looked up
    prefix: str | None = None  # what the subjects begin with; None: the name
    foreign: bool = False  # not a Millstream topic: subjects are kept, `filter` is a whole one

    def __post_init__(self) -> None:
        for what, name in (("topic", self.topic), ("domain", self.domain)):
            if name is not None and not re.fullmatch(r"[^\s.*>/\\]{1,255}", name):
                raise ConfigError(f"origin: {name!r} cannot be the name of a {what}")
        if self.filter is not None:
            check_subject(self.filter, wildcards=True)
        if self.prefix is not None:
            check_subject(self.prefix, wildcards=False)
        if self.partitions is not None:
            _check_count("origin: partitions", self.partitions, PARTITIONS_MAX)
        if self.foreign and self.partitions not in (None, 1):
            raise ConfigError("origin: a stream that is not a topic has one partition")
        if isinstance(self.start, datetime):
            if self.start.tzinfo is None:
                raise ConfigError(f"origin: the start time {self.start} needs a time zone")
        elif self.start is not None and (isinstance(self.start, bool) or self.start < 1):
            raise ConfigError(f"origin: offsets begin at 1, so start cannot be {self.start!r}")

    def __repr__(self) -> str:
        return short_repr(self)


Given = TypeVar("Given")
Held = TypeVar("Held")


class _Setting(Generic[Given, Held]):
    """A field of a frozen dataclass that is given in one of several forms and held in one."""

    def __init__(self, default: Held, read: Callable[[str, Given], Held]) -> None:
        self.default, self.read = default, read

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, instance: None, owner: type) -> Held: ...
    @overload
    def __get__(self, instance: object, owner: type) -> Held: ...
    def __get__(self, instance: object | None, owner: type) -> Held:
        return self.default if instance is None else instance.__dict__[self.name]

    def __set__(self, instance: object, value: Given) -> None:
        instance.__dict__[self.name] = self.read(self.name, value)


def _origin(name: str, value: Origin | str | None) -> Origin | None:
    if value is None or isinstance(value, Origin):
        return value
    if isinstance(value, str):
        return Origin(value)
    raise ConfigError(f"{name}: give the name of a topic or an Origin, not {value!r}")


def _origins(name: str, value: Sequence[Origin | str]) -> tuple[Origin, ...]:
    if isinstance(value, str | Origin):
        raise ConfigError(f"{name}: give a list of topics, not one")
    origins = (_origin(name, item) for item in value)
    return tuple(origin for origin in origins if origin is not None)


@dataclass(frozen=True, kw_only=True, repr=False)
class TopicSettings:
    """How a topic keeps its events. Limits hold for each partition, as in other logs.

    Durations are given as "7d", seconds or timedelta and held as timedelta; sizes as "10GiB" or
    bytes and held as bytes. A combination that the broker would refuse, or accept and not keep,
    raises ConfigError here.
    """

    partitions: int = 1
    retention: _Setting[Retention | str, Retention] = _Setting(Retention.LIMITS, choice(Retention))
    max_age: _Setting[Duration | None, timedelta | None] = _Setting(None, read_duration)
    max_bytes: _Setting[Size | None, int | None] = _Setting(None, read_size)
    max_messages: int | None = None  # an event is a message; a pack of many is one as well
    # Newest events kept of each key. Only for plain events: a pack is no key's own, so a topic
    # with a history takes no packs (`takes_packs`).
    history: int | None = None
    max_message_size: _Setting[Size | None, int | None] = _Setting(None, read_size)
    discard: _Setting[Discard | str, Discard] = _Setting(Discard.OLD, choice(Discard))
    discard_new_per_key: bool = False  # with `history`: a full key refuses its next event
    storage: _Setting[Storage | str, Storage] = _Setting(Storage.FILE, choice(Storage))
    compression: _Setting[Compression | str, Compression] = _Setting(
        Compression.NONE, choice(Compression)
    )
    replicas: int = 1
    # Within it a second event of the same id is not stored. None: two minutes, or max_age if that
    # is shorter; for a topic with sources, none, because two origins may use the same id.
    duplicate_window: _Setting[Duration | None, timedelta | None] = _Setting(None, read_duration)
    # When a key's last event expires, a marker says so for this long; needs history=1.
    marker_ttl: _Setting[Duration | None, timedelta | None] = _Setting(None, read_duration)
    mirror: _Setting[Origin | str | None, Origin | None] = _Setting(None, _origin)
    sources: _Setting[Sequence[Origin | str], tuple[Origin, ...]] = _Setting((), _origins)
    deny_delete: bool = False  # no single event can be deleted; cannot be taken back
    deny_purge: bool = False  # nothing can be purged; cannot be taken back
    early_ack: bool = False  # ack before the event is written: a killed broker loses acked events
    prefix: str | None = None  # what the subjects begin with; None: the topic's name
    # Single events of a topic with a schema are in this format: avro, json or protobuf; None: the
    # topic has no schema. Set by declaring a schema.
    wire_format: str | None = None
    guarded: bool = False  # clients of other languages publish through a guard that checks them
    max_subscriptions: int | None = None  # None: 100,000, or what the account allows
    # What the server may do with the topic's messages. None: whatever it can, given the rest.
    message_ttl: bool | None = None  # an event may bring its own time to live
    atomic: bool | None = None  # several events at once, all or nothing
    direct: bool | None = None  # reads that need not pass through the leader
    rollup: bool | None = None  # an event may replace all earlier ones of its key
    schedules: bool | None = None  # events that appear later
    description: str = ""
    metadata: _Setting[Mapping[str, str], FrozenMetadata] = _Setting(
        FrozenMetadata(), read_metadata
    )

    def __post_init__(self) -> None:
        for fault in self.faults():
            raise ConfigError(fault)

    def __hash__(self) -> int:
        return hash(tuple(getattr(self, field.name) for field in fields(self)))

    def __repr__(self) -> str:
        return short_repr(self)

    @classmethod
    def unchecked(cls, values: Mapping[str, Any]) -> Self:
        """Settings that describe a stream as it is, whatever this class would say of them."""
        settings = cls.__new__(cls)
        known = {field.name: field.default for field in fields(cls)}
        unknown = values.keys() - known.keys()
        if unknown:
            raise ConfigError(
                f"a topic has no setting {', '.join(sorted(unknown))}; it has {', '.join(known)}"
            )
        for name, value in {**known, **values}.items():
            object.__setattr__(settings, name, value)
        return settings

    def changed(self, changes: Mapping[str, Any], *, check: bool = True) -> Self:
        """These settings with some of them changed; faults that were there before are let be."""
        current = {field.name: getattr(self, field.name) for field in fields(self)}
        settings = self.unchecked({**current, **changes})
        before = self.faults() if check else ()
        for fault in settings.faults() if check else ():
            if fault not in before:
                raise ConfigError(fault)
        return settings

    # -- what follows from the settings ---------------------------------------------------

    @property
    def is_copy(self) -> bool:
        """Whether events come from other topics; such a topic takes none of its own."""
        return self.mirror is not None or bool(self.sources)

    @property
    def takes_packs(self) -> bool:
        """Whether many events may be written as one message."""
        return not self.is_copy and self.history is None

    @property
    def window(self) -> timedelta | None:
        """The duplicate window that holds; None: duplicates are not looked for."""
        if self.duplicate_window is not None or self.is_copy:
            return self.duplicate_window
        return min(self.max_age or DEFAULT_DUPLICATE_WINDOW, DEFAULT_DUPLICATE_WINDOW)

    def subject_prefix(self, name: str) -> str | None:
        """What the subjects of this topic begin with; None: not laid out by Millstream."""
        if self.mirror is None:
            return self.prefix or name
        return None if self.mirror.foreign else self.mirror.prefix or self.mirror.topic

    def allows(self, feature: str) -> bool:
        """Whether `message_ttl`, `atomic`, `direct`, `rollup` or `schedules` is on."""
        given: bool | None = getattr(self, feature)
        return self.obstacle(feature) is None if given is None else given

    def obstacle(self, feature: str) -> str | None:
        """Which other setting excludes a feature, or None."""
        obstacles: dict[str, tuple[tuple[bool, str], ...]] = {
            "message_ttl": (),
            "direct": (),
            "atomic": (
                (self.is_copy, "a copy takes no events of its own"),
                (self.early_ack, "early_ack excludes it"),
            ),
            "rollup": ((self.deny_purge, "deny_purge excludes it"),),
            "schedules": (
                (self.is_copy, "a copy takes no events of its own"),
                (self.discard is Discard.NEW, "discard 'new' excludes it"),
                (self.deny_purge, "deny_purge excludes it"),
                (self.rollup is False, "it needs rollup"),
            ),
        }
        return next((why for holds, why in obstacles[feature] if holds), None)

    def ttl_text(self, ttl: Duration) -> str:
        """The value of the header `Nats-TTL`; a time to live that would not be kept is refused."""
        time = read_duration("ttl", ttl) or timedelta(0)
        if not self.allows("message_ttl"):
            raise ConfigError("this topic does not let events bring a ttl: set message_ttl")
        if time < _SHORTEST_TTL:
            raise ConfigError(f"ttl: {ttl!r} is below one second, the shortest there is")
        if self.max_age is not None and time > self.max_age:
            raise ConfigError(
                f"ttl: {ttl!r} is longer than the topic's max_age, {duration_text(self.max_age)}, "
                f"which would end it earlier. Give a shorter one or raise max_age"
            )
        return f"{math.ceil(time.total_seconds())}s"

    # -- what cannot be -------------------------------------------------------------------

    def faults(self) -> list[str]:
        """Everything that is wrong with these settings, in words."""
        found = list(_type_faults(self))
        if found:
            return found
        found = [*_limit_faults(self), *_copy_faults(self)]
        for feature in ("message_ttl", "atomic", "direct", "rollup", "schedules"):
            why = self.obstacle(feature)
            if getattr(self, feature) and why is not None:
                found.append(f"{feature}: {why}")
        return [*found, *_text_faults(self)]


def _check_count(name: str, value: object, most: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name}: {value!r} is not a number of 1 or more")
    if most is not None and value > most:
        raise ConfigError(f"{name}: {value:,} is more than the {most:,} there may be")


def _type_faults(it: TopicSettings) -> Iterator[str]:
    """Values that are not of their kind or out of their range, each looked at alone."""
    for field in fields(it):
        kind, value = str(field.type), getattr(it, field.name)
        if value is None and field.default is None:
            continue
        if kind.startswith("bool") and not isinstance(value, bool):
            yield f"{field.name}: {value!r} is not True or False"
        if kind.startswith("str") and not isinstance(value, str):
            yield f"{field.name}: {value!r} is not a text"
        if kind.startswith(("int", "_Setting[Size")):
            try:
                _check_count(field.name, value, _COUNTS_MAX.get(field.name))
            except ConfigError as error:
                yield str(error)
    for name, time in (("max_age", it.max_age), ("duplicate_window", it.duplicate_window)):
        if time is not None and time < _SHORTEST:
            yield f"{name}: {duration_text(time)} is below 100ms, the shortest there is"


def _limit_faults(it: TopicSettings) -> Iterator[str]:
    """Settings that exclude each other, or that would do nothing."""
    if it.duplicate_window and it.max_age and it.duplicate_window > it.max_age:
        yield (
            f"duplicate_window: {duration_text(it.duplicate_window)} is longer than max_age, "
            f"{duration_text(it.max_age)}; an id is forgotten with its event"
        )
    limited = it.max_messages or it.max_bytes or it.discard_new_per_key
    if it.discard is Discard.NEW and not limited:
        yield (
            "discard: 'new' refuses events at a limit, and there is none. Give max_messages, "
            "max_bytes, or history with discard_new_per_key"
        )
    if it.discard_new_per_key and (it.discard is not Discard.NEW or it.history is None):
        yield "discard_new_per_key: needs discard='new' and a history"
    if it.compression is not Compression.NONE and it.storage is Storage.MEMORY:
        yield "compression: is of files, and storage is 'memory'"
    if it.early_ack and it.storage is not Storage.FILE:
        yield "early_ack: is about files, and storage is 'memory'"
    if it.early_ack and it.replicas > 1:
        yield "early_ack: excludes replicas, which acknowledge what a majority has"
    if it.marker_ttl is not None:
        yield from _marker_faults(it, it.marker_ttl)


def _marker_faults(it: TopicSettings, ttl: timedelta) -> Iterator[str]:
    if ttl < _SHORTEST_TTL:
        yield f"marker_ttl: {duration_text(ttl)} is below one second, the shortest there is"
    if it.history != 1:
        yield (
            "marker_ttl: needs history=1; with a longer history the server would raise every "
            "shorter time to live to that of the markers"
        )
    if not it.allows("message_ttl") or not it.allows("rollup"):
        yield "marker_ttl: needs message_ttl and rollup, which deny_purge excludes"
    if it.mirror is not None:
        yield "marker_ttl: a mirror has the offsets of its origin, so it cannot add markers"


def _copy_faults(it: TopicSettings) -> Iterator[str]:
    if it.mirror is not None and it.sources:
        yield "mirror and sources: a topic is an exact copy of one or a collection of many"
    if it.is_copy and it.discard is Discard.NEW:
        yield (
            "discard: 'new' would let a full copy stop in silence; the server goes on to report "
            "that nothing is missing"
        )
    if it.mirror is not None:
        if it.duplicate_window is not None:
            yield "duplicate_window: a mirror copies what its origin has, duplicates included"
        if it.prefix is not None:
            yield "prefix: a mirror has the subjects of its origin"
        if it.mirror.filter is not None and it.mirror.domain is None:
            yield (
                "mirror: a filtered mirror in the same domain would answer reads of its origin "
                "with 'not found'. Use sources=[Origin(..., filter=...)]"
            )
        if it.mirror.partitions not in (None, it.partitions):
            yield (
                f"partitions: a mirror has as many as its origin, {it.mirror.partitions}, "
                f"not {it.partitions}"
            )
    if len(it.sources) > SOURCES_MAX:
        yield f"sources: {len(it.sources)} are more than {SOURCES_MAX}"
    if len(set(it.sources)) != len(it.sources):
        yield "sources: the same origin is given twice"
    for origin in it.sources:
        if it.partitions != 1 and origin.partitions not in (None, it.partitions):
            yield (
                f"partitions: '{origin.topic}' has {origin.partitions}, this topic "
                f"{it.partitions}; a key keeps its partition only if both are equal or this is 1"
            )


def _text_faults(it: TopicSettings) -> Iterator[str]:
    if it.wire_format not in (None, *WIRE_FORMATS):
        yield f"wire_format: {it.wire_format!r} is not one of {', '.join(WIRE_FORMATS)}"
    if it.wire_format is not None and it.is_copy:
        yield "wire_format: a copy has the schema of its origin"
    if it.guarded and it.wire_format is None:
        yield "guarded: a guard checks events against a schema, and there is none"
    if it.prefix is not None:
        try:
            check_subject(it.prefix, wildcards=False)
        except ConfigError as error:
            yield f"prefix: {error}"
        if it.prefix.startswith("$"):
            yield f"prefix: {it.prefix!r} begins with $, which is the server's own"
    if len(it.description.encode()) > DESCRIPTION_BYTES_MAX:
        yield f"description: is longer than {DESCRIPTION_BYTES_MAX:,} bytes"
    size = sum(len(key.encode()) + len(text.encode()) for key, text in it.metadata.items())
    if size > METADATA_BYTES_MAX:
        yield f"metadata: {size:,} bytes are more than {METADATA_BYTES_MAX:,}"
    for key in it.metadata:
        if key in RESERVED_METADATA or key.startswith("_nats."):
            yield f"metadata: the key {key!r} is written by Millstream or the server itself"
