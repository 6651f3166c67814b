"""What topic settings may not be: single values, and settings that exclude each other. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from millstream.errors import ConfigError
from millstream.events.subject import check_subject
from millstream.guarded import ENTRANCE, GUARDED_TOKEN, INSTANCE
from millstream.messaging.topics.choices import Compression, Discard, Retention, Storage
from millstream.messaging.topics.setting_forms import duration_text

if TYPE_CHECKING:
    from millstream.messaging.topics.settings import TopicSettings

__all__ = [
    "RESERVED_METADATA",
    "RESERVED_TOKENS",
    "check_deliver_at",
    "check_expected_last",
    "check_overload",
    "check_process_table",
    "combination_faults",
    "description_fault",
    "feature_obstacle",
    "metadata_fault",
    "prefix_fault",
]

SOURCES_MAX: Final = 256  # each is a consumer at its origin that this topic keeps running
DESCRIPTION_BYTES_MAX: Final = 4096  # the server's own
METADATA_BYTES_MAX: Final = 120 * 1024  # the server takes 128 KiB; the rest is for our own keys

# First tokens of subjects that only guarded topics use.
RESERVED_TOKENS: Final = (GUARDED_TOKEN, ENTRANCE, INSTANCE)

# Metadata keys that say what the streams are to each other; only Millstream writes them.
_OWN: Final = (
    *("version", "topic", "partition", "partitions"),
    *("prefix", "origins", "format", "guarded", "packs", "durability", "lost"),
    *("forgotten", "kafka_name", "kafka_configs", "partitioner"),
)
RESERVED_METADATA: Final = frozenset(f"millstream.{key}" for key in _OWN)

# -- single values ------------------------------------------------------------------------


def prefix_fault(prefix: str) -> str | None:
    """Why subjects cannot start with this, or None."""
    try:
        check_subject(prefix, wildcards=False)
    except ConfigError as error:
        return str(error)
    if prefix.partition(".")[0] in RESERVED_TOKENS:
        return (
            f"{prefix!r} starts with a token that guarded topics use: {', '.join(RESERVED_TOKENS)}"
        )
    return f"{prefix!r} starts with $, which is reserved" if prefix.startswith("$") else None


def description_fault(description: str) -> str | None:
    """Why this cannot be a description, or None."""
    too_long = len(description.encode()) > DESCRIPTION_BYTES_MAX
    return f"it is longer than {DESCRIPTION_BYTES_MAX:,} bytes" if too_long else None


def metadata_fault(metadata: Mapping[str, str]) -> str | None:
    """Why this cannot be metadata, or None."""
    size = sum(len(key.encode()) + len(text.encode()) for key, text in metadata.items())
    if size > METADATA_BYTES_MAX:
        return f"{size:,} bytes are more than the maximum of {METADATA_BYTES_MAX:,}"
    reserved = (key for key in metadata if key in RESERVED_METADATA or key.startswith("_nats."))
    first = next(reserved, None)
    return None if first is None else f"the key {first!r} is reserved for Millstream or the server"


def feature_obstacle(it: TopicSettings, feature: str) -> str | None:
    """The setting that rules out a feature, or None."""
    obstacles: dict[str, tuple[tuple[bool, str], ...]] = {
        "message_ttl": (),
        "direct": (),
        "atomic": (
            (it.is_copy, "nothing can be published to a copy"),
            (it.early_ack, "early_ack excludes it"),
        ),
        "packs": (
            (it.is_copy, "nothing can be published to a copy"),
            (it.history is not None, "the broker cannot keep a history of keys in packs"),
        ),
        "rollup": ((it.deny_purge, "deny_purge excludes it"),),
        "schedules": (
            (it.is_copy, "nothing can be published to a copy"),
            (it.discard is Discard.NEW, "discard 'new' excludes it"),
            (it.deny_purge, "deny_purge excludes it"),
            (
                it.rollup is False,
                "it needs rollup. To close a topic that has schedules to roll-ups, mirror it, "
                "delete it and promote the mirror",
            ),
        ),
    }
    return next((why for holds, why in obstacles[feature] if holds), None)


# -- combinations -------------------------------------------------------------------------


def combination_faults(it: TopicSettings) -> Iterator[str]:
    """Settings that exclude each other, or that would do nothing together."""
    yield from _limit_faults(it)
    yield from _copy_faults(it)
    yield from _schema_faults(it)
    yield from _durability_faults(it)


def _limit_faults(it: TopicSettings) -> Iterator[str]:
    if it.duplicate_window and it.max_age and it.duplicate_window > it.max_age:
        yield (
            f"duplicate_window: {duration_text(it.duplicate_window)} is longer than max_age, "
            f"{duration_text(it.max_age)}; an id is forgotten with its event"
        )
    limited = it.max_messages or it.max_bytes or it.discard_new_per_key
    if it.discard is Discard.NEW and not limited:
        yield (
            "discard: 'new' rejects events at a limit, and no limit is set. Give max_messages, "
            "max_bytes, or history with discard_new_per_key"
        )
    if it.discard_new_per_key and (it.discard is not Discard.NEW or it.history is None):
        yield "discard_new_per_key: needs discard='new' and a history"
    if it.compression is not Compression.NONE and it.storage is Storage.MEMORY:
        yield "compression: requires storage='file'"
    if it.early_ack and it.storage is not Storage.FILE:
        yield "early_ack: requires storage='file'"
    if it.early_ack and it.replicas > 1:
        yield "early_ack: requires replicas=1; replicas ack what a majority has written"
    if it.marker_ttl is not None:
        yield from _marker_faults(it)


def _marker_faults(it: TopicSettings) -> Iterator[str]:
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
        yield "mirror and sources: give one of them. A mirror is an exact copy of one topic"
    if it.is_copy and it.discard is Discard.NEW:
        yield (
            "discard: 'new' would stop a full copy silently; the server would still report that "
            "nothing is missing"
        )
    if it.is_copy and it.packs is False:
        yield "packs: a copy has what its origin has, packs included"
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
        yield f"sources: {len(it.sources)} are more than the maximum of {SOURCES_MAX}"
    if len(set(it.sources)) != len(it.sources):
        yield "sources: the same origin is given twice"
    for origin in it.sources:
        if it.partitions != 1 and origin.partitions not in (None, it.partitions):
            yield (
                f"partitions: '{origin.topic}' has {origin.partitions}, this topic "
                f"{it.partitions}; a key keeps its partition only if both are equal or this is 1"
            )


def _schema_faults(it: TopicSettings) -> Iterator[str]:
    if it.wire_format is not None and it.is_copy:
        yield "wire_format: a copy has the schema of its origin"
    if it.guarded and it.wire_format is None:
        yield "guarded: a guard checks events against a schema, and this topic has none"
    if it.guarded and it.is_copy:
        yield "guarded: nothing is published to a copy"
    if it.guarded and it.prefix is not None and "." in it.prefix:
        yield f"prefix: that of a guarded topic is one token, not {it.prefix!r}"


def _durability_faults(it: TopicSettings) -> Iterator[str]:
    if it.durability is None:
        return
    if it.is_copy:
        yield "durability: nothing is published to a copy"
    if it.durability == "replicated" and it.replicas == 1:
        yield "durability: 'replicated' needs replicas, two or more"
    on_disk = it.storage is Storage.FILE and not it.early_ack
    if it.durability != "replicated" and not on_disk:
        yield (
            f"durability: {it.durability!r} needs storage='file' and no early_ack; otherwise an "
            f"ack does not mean that the event is written"
        )


def check_deliver_at(it: TopicSettings, moment: datetime) -> None:
    """Refuse a later time where the topic would lose the event before it is due."""
    if not it.allows("schedules"):
        raise ConfigError(
            "deliver_at: this topic takes no scheduled events. Create one with schedules=True "
            "for them, or edit this one (topic edit --schedules). The server then allows "
            "roll-ups as well: every publisher of the topic can remove what others stored"
        )
    if it.retention is not Retention.LIMITS:  # a subscription acks the record, which removes it
        raise ConfigError(
            f"deliver_at: this topic has retention {it.retention}, which would remove the event "
            f"before it is due. Use a topic with retention limits"
        )
    if it.max_age is not None and moment.tzinfo and moment - datetime.now(UTC) > it.max_age:
        raise ConfigError(
            f"deliver_at: {moment.isoformat()} is later than the topic's max_age, "
            f"{duration_text(it.max_age)}, which would remove the event before it is due. Raise "
            f"max_age, or use topic.schedules.set(name, value, at=...)"
        )


def check_expected_last(it: TopicSettings) -> None:
    """Refuse to rely on the last event of a key where the broker cannot tell which it is."""
    if it.takes_packs:
        raise ConfigError(
            "expected_last: this topic takes packs, and the broker does not see which keys "
            "are in them, so it could not tell whether an event of this key was stored in a "
            "pack. Create a topic with packs=False (topic create --no-packs) or a table"
        )
    if not it.keys_at_home:
        raise ConfigError(
            "expected_last: clients of Kafka wrote to this topic and chose the partitions of its "
            "keys in another way, and the broker looks for the last event of a key in one "
            "partition only. Publish without expected_last, or use a topic of another name"
        )


def check_overload(it: TopicSettings, overload: str, seconds: float) -> None:
    """Refuse what is no policy, or a wait that is longer than ids of events are remembered."""
    if overload not in ("refuse", "block"):
        raise ConfigError(f"overload {overload!r}: choose refuse or block")
    longest = math.inf if it.window is None else it.window.total_seconds()
    if overload == "block" and not seconds <= longest:
        raise ConfigError(
            f"overload 'block' for {seconds:g} s: at most the duplicate window, {longest:g} s, "
            f"or an event whose first ack was lost could be stored twice"
        )


def check_process_table(name: str, it: TopicSettings, state: bool) -> None:
    """Refuse a table that a process cannot write to, or, as its `state`, cannot rely on."""
    if it.history is None:
        raise ConfigError(
            f"'{name}' keeps every event, so it is not a table: create it with create_table, or "
            f"give it as a target"
        )
    if not it.allows("atomic"):
        raise ConfigError(
            f"table '{name}' does not allow atomic batches (atomic=False), and a process stores "
            f"rows and position together: create it without that setting"
        )
    if it.discard_new_per_key:
        raise ConfigError(
            f"table '{name}' refuses a second value of a key (discard_new_per_key): a process "
            f"could not replace its rows"
        )
    drops = it.discard is Discard.OLD and (it.max_bytes is not None or it.max_messages is not None)
    if state and (it.max_age is not None or drops):
        raise ConfigError(
            f"table '{name}' drops rows by itself (max_age, or max_bytes or max_messages with "
            f"discard='old'): a process that holds them in memory would not notice. Use a table "
            f"without these limits, or with discard='new'"
        )
