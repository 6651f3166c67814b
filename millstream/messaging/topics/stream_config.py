"""From topic settings to JetStream stream configurations and back. Pure."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any, Final

import msgspec

from millstream.declared import Form
from millstream.errors import ConfigError
from millstream.events.subject import (
    check_name,
    name_advice,
    partition_prefix,
    stream_name,
    stream_subjects,
)
from millstream.guarded import guarded_topic
from millstream.messaging.topics.origin import Origin
from millstream.messaging.topics.setting_forms import Setting
from millstream.messaging.topics.settings import (
    RESERVED_METADATA,
    TOPIC_SETTINGS,
    TopicSettings,
)
from millstream.wire.api import StreamInfo, api_prefix
from millstream.wire.lost import PARTITION_METADATA, TOPIC_METADATA

__all__ = [
    "MAX_SUBSCRIPTIONS",
    "StreamIdentity",
    "changed_config",
    "check_stream_name",
    "from_stream_config",
    "identity_of",
    "may_hold_packs",
    "resolved",
    "to_stream_configs",
    "topic_streams",
    "wire_format_of",
]

VERSION: Final = 1  # of the layout of streams, subjects and metadata
# The server's default of 1,000 is soon used up by the readers of a busy topic.
MAX_SUBSCRIPTIONS: Final = 100_000
_UNLIMITED: Final = -1
_MICROSECOND: Final = timedelta(microseconds=1)

_VERSION_KEY: Final = "millstream.version"
_PARTITIONS_KEY: Final = "millstream.partitions"
_PREFIX_KEY: Final = "millstream.prefix"
_ORIGINS_KEY: Final = "millstream.origins"
_FORMAT_KEY: Final = "millstream.format"
_PACKS_KEY: Final = "millstream.packs"
# Settings that are texts of their own in the metadata.
_TEXT_KEYS: Final = {
    "wire_format": _FORMAT_KEY,
    "durability": "millstream.durability",
    "kafka_name": "millstream.kafka_name",
    "kafka_configs": "millstream.kafka_configs",
    "partitioner": "millstream.partitioner",
}

# Settings that are one value of a stream configuration; the others are converted by hand below.
_SINGLE: Final = {name: item for name, item in TOPIC_SETTINGS.items() if item.stream_key}


@dataclass(frozen=True, slots=True)
class StreamIdentity:
    """Which part of which topic a stream is."""

    topic: str
    partition: int
    partitions: int
    prefix: str | None  # of this partition's subjects; None: not laid out by Millstream
    managed: bool  # declared by Millstream, under this name
    version: int = VERSION


def to_stream_configs(name: str, settings: TopicSettings) -> list[dict[str, Any]]:
    """One stream configuration for each partition of a topic."""
    check_name("topic", name)
    for origin in (settings.mirror, *settings.sources):
        if origin is not None and origin.topic == name and origin.domain is None:
            raise ConfigError(f"topic '{name}' cannot be a copy of itself")
    return [_config(name, settings, number) for number in range(settings.partitions)]


def _config(name: str, settings: TopicSettings, number: int) -> dict[str, Any]:
    partitions = settings.partitions
    prefix = settings.subject_prefix(name) or name
    config: dict[str, Any] = {
        "name": stream_name(name, number, partitions),
        "duplicate_window": _nanoseconds(settings.window),
        "max_consumers": settings.max_subscriptions or MAX_SUBSCRIPTIONS,
        "mirror_direct": False,
        "metadata": _metadata(name, settings, number),
    }
    config |= {item.stream_key: _to_stream(settings, item) for item in _SINGLE.values()}
    if settings.early_ack:
        config["persist_mode"] = "async"
    if settings.mirror is not None:
        config["mirror"] = _mirror(settings.mirror, number)
    elif settings.sources:
        config["sources"] = [
            source
            for origin in settings.sources
            for source in _sources(origin, prefix, number, partitions)
        ]
    else:
        config["subjects"] = [stream_subjects(prefix, number, partitions)]
    return config


def _to_stream(settings: TopicSettings, item: Setting[Any, Any]) -> Any:
    """A setting as a stream configuration holds it."""
    value = getattr(settings, item.name)
    if item.is_feature:
        return settings.allows(item.name)
    if item.kind.form is Form.DURATION:
        return _nanoseconds(value)
    if isinstance(value, StrEnum):
        return value.value
    return _UNLIMITED if value is None else value


def _from_stream(config: Mapping[str, Any], item: Setting[Any, Any]) -> Any:
    """A setting as a stream configuration has it; what is missing there is the default."""
    value = config.get(item.stream_key)
    if value is None:
        return item.default
    if item.kind.form is Form.DURATION:
        return _duration(value)
    if item.kind.form is Form.SWITCH:
        return bool(value)
    return None if item.default is None and value <= 0 else value


def _metadata(name: str, settings: TopicSettings, number: int) -> dict[str, str]:
    metadata = {
        **settings.metadata,
        _VERSION_KEY: str(VERSION),
        TOPIC_METADATA: name,
        PARTITION_METADATA: str(number),
        _PARTITIONS_KEY: str(settings.partitions),
    }
    prefix = settings.subject_prefix(name)
    if prefix is not None and prefix != name:
        metadata[_PREFIX_KEY] = prefix
    texts = {key: getattr(settings, setting) for setting, key in _TEXT_KEYS.items()}
    metadata |= {key: text for key, text in texts.items() if text is not None}
    if not settings.is_copy and not settings.takes_packs:
        metadata[_PACKS_KEY] = "0"
    origins = [settings.mirror] if settings.mirror is not None else settings.sources
    if origins:
        metadata[_ORIGINS_KEY] = msgspec.json.encode(origins).decode()
    return metadata


# -- origins ------------------------------------------------------------------------------


def _mirror(origin: Origin, number: int) -> dict[str, Any]:
    """A mirror keeps the subjects of its origin, because the server lets it answer for it."""
    partitions = origin.partitions or 1
    entry = _origin_entry(origin, stream_name(origin.topic, number, partitions))
    if origin.filter is not None:
        entry["filter_subject"] = _within(origin, number, partitions)
    return entry


def _sources(origin: Origin, prefix: str, number: int, partitions: int) -> list[dict[str, Any]]:
    """What one partition copies of an origin: the same partition, or all if it is the only one."""
    theirs = origin.partitions or 1
    taken = range(theirs) if partitions == 1 else (number,)
    entries = []
    for other in taken:
        entry = _origin_entry(origin, stream_name(origin.topic, other, theirs))
        subjects = _within(origin, other, theirs)
        if not origin.foreign:
            own = partition_prefix(prefix, number, partitions)
            target = f"{own}.{_target(origin.filter or '>')}"
            entry["subject_transforms"] = [{"src": subjects, "dest": target}]
        elif origin.filter is not None:
            entry["filter_subject"] = subjects
        entries.append(entry)
    return entries


def _origin_entry(origin: Origin, stream: str) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": stream}
    if origin.domain is not None:
        entry["external"] = {"api": api_prefix(origin.domain)}
    if isinstance(origin.start, datetime):
        entry["opt_start_time"] = _time_text(origin.start)
    elif origin.start is not None:
        entry["opt_start_seq"] = origin.start
    return entry


def _within(origin: Origin, number: int, partitions: int) -> str:
    """The subjects of one partition of the origin that are copied."""
    if origin.foreign:
        return origin.filter or ">"
    prefix = partition_prefix(origin.prefix or origin.topic, number, partitions)
    return f"{prefix}.{origin.filter or '>'}"


def _target(pattern: str) -> str:
    """The destination of a transform that keeps what a pattern matches.

    >>> _target("eu.*.>"), _target("*.x.*")
    ('eu.{{wildcard(1)}}.>', '{{wildcard(1)}}.x.{{wildcard(2)}}')
    """
    tokens, seen = [], 0
    for token in pattern.split("."):
        if token == "*":
            seen += 1
            token = f"{{{{wildcard({seen})}}}}"
        tokens.append(token)
    return ".".join(tokens)


# -- and back -----------------------------------------------------------------------------


def identity_of(config: Mapping[str, Any]) -> StreamIdentity:
    """Which topic a stream belongs to; a foreign stream is a topic of its own name."""
    name, metadata = config["name"], config.get("metadata") or {}
    try:
        version = int(metadata[_VERSION_KEY])
        topic = metadata[TOPIC_METADATA]
        number, partitions = int(metadata[PARTITION_METADATA]), int(metadata[_PARTITIONS_KEY])
    except (KeyError, ValueError):
        return StreamIdentity(name, 0, 1, None, managed=False)
    if not 0 <= number < partitions or stream_name(topic, number, partitions) != name:
        return StreamIdentity(name, 0, 1, None, managed=False)
    prefix: str | None = partition_prefix(metadata.get(_PREFIX_KEY, topic), number, partitions)
    origins = _origins_of(metadata)
    if origins and config.get("mirror") and origins[0].foreign:
        prefix = None
    return StreamIdentity(topic, number, partitions, prefix, managed=True, version=version)


def topic_streams(name: str) -> Generator[list[str], list[StreamInfo | None], list[StreamInfo]]:
    """The streams of a topic in the order of partitions; empty if there is no such topic.

    Without IO: it yields names of streams, and is sent the streams that exist, None for the others.
    """
    check_stream_name(name)
    alone, first = yield [name, stream_name(name, 0, 2)]
    if alone is not None:
        return [alone]
    identity = None if first is None else identity_of(first.config)
    if first is None or identity is None or identity.topic != name:
        return []
    count = identity.partitions
    others = yield [stream_name(name, number, count) for number in range(1, count)]
    mine = [info for info in others if info is not None and identity_of(info.config).topic == name]
    return [first, *mine]


def check_stream_name(name: str) -> None:
    """Reject what cannot be the name of any stream, before it becomes part of a subject."""
    bad = not isinstance(name, str) or not name or len(name) > 255
    if bad or any(letter.isspace() or letter in ".*>/\\" for letter in name):
        raise ConfigError(
            f"{name!r:.210} cannot be the name of a topic or stream: {name_advice(name)}"
        )


def wire_format_of(config: Mapping[str, Any]) -> str | None:
    """How the values of a topic with a schema are encoded; None if it has no schema."""
    return (config.get("metadata") or {}).get(_FORMAT_KEY)


def from_stream_config(config: Mapping[str, Any]) -> TopicSettings:
    """The settings that a stream was created with, or that describe it best."""
    metadata = config.get("metadata") or {}
    identity = identity_of(config)
    values: dict[str, Any] = {
        "partitions": identity.partitions,
        "duplicate_window": _duration(config.get("duplicate_window")),
        "early_ack": config.get("persist_mode") == "async",
        "metadata": {
            key: text
            for key, text in metadata.items()
            if key not in RESERVED_METADATA and not key.startswith("_nats.")
        },
    }
    values |= {setting: metadata.get(key) for setting, key in _TEXT_KEYS.items()}
    features = {name: item for name, item in _SINGLE.items() if item.is_feature}
    values |= {
        name: _from_stream(config, item) for name, item in _SINGLE.items() if name not in features
    }
    values |= _copied_from(config, identity)
    if identity.managed and "mirror" not in values:
        values |= own_prefix(identity.topic, metadata.get(_PREFIX_KEY))
    consumers = config.get("max_consumers", _UNLIMITED)
    if consumers > 0 and consumers != MAX_SUBSCRIPTIONS:
        values["max_subscriptions"] = consumers
    settings = TopicSettings.unchecked(values)
    # A value that equals the default for these settings counts as not given.
    given: dict[str, Any] = {"duplicate_window": None}
    if settings.duplicate_window != TopicSettings.unchecked({**values, **given}).window:
        given = {}
    found = {name: bool(config.get(item.stream_key, False)) for name, item in features.items()}
    # Topics with a history of earlier versions do not say that they take no packs.
    found["packs"] = settings.takes_packs and _PACKS_KEY not in metadata
    for feature, on in found.items():
        others = {**found, feature: None}
        default = TopicSettings.unchecked({**values, **others}).allows(feature)
        given[feature] = None if on == default else on
    return TopicSettings.unchecked({**values, **given})


def own_prefix(topic: str, prefix: str | None) -> dict[str, Any]:
    """The settings that give a topic subjects that start with this."""
    guarded = None if prefix is None else guarded_topic(f"{prefix}.".encode())
    if guarded is None:
        return {"prefix": None if prefix == topic else prefix}
    return {"guarded": True, "prefix": None if guarded == topic else guarded}


def _copied_from(config: Mapping[str, Any], identity: StreamIdentity) -> dict[str, Any]:
    """`mirror` and `sources`: as declared if the stream still has them so, else as found."""
    mirror, sources = config.get("mirror"), config.get("sources") or []
    if not mirror and not sources:
        return {}
    metadata = config.get("metadata") or {}
    declared = _origins_of(metadata) if identity.managed else ()
    if mirror:
        if len(declared) == 1 and _mirror(declared[0], identity.partition) == _bare(mirror):
            return {"mirror": declared[0]}
        return {"mirror": _found(mirror)}
    prefix = metadata.get(_PREFIX_KEY, identity.topic)
    entries = [
        entry
        for origin in declared
        for entry in _sources(origin, prefix, identity.partition, identity.partitions)
    ]
    if _sorted(entries) == _sorted([_bare(source) for source in sources]):
        return {"sources": declared}
    return {"sources": [_found(source) for source in sources]}


def _sorted(entries: list[dict[str, Any]]) -> list[bytes]:
    return sorted(msgspec.json.encode(entry, order="deterministic") for entry in entries)


def _bare(entry: Mapping[str, Any]) -> dict[str, Any]:
    """An origin as the server reports it, without empty values."""
    bare = {key: value for key, value in entry.items() if value}
    if "external" in bare:
        bare["external"] = {key: value for key, value in bare["external"].items() if value}
    return bare


def _found(entry: Mapping[str, Any]) -> Origin:
    """An origin that Millstream did not declare."""
    api = str((entry.get("external") or {}).get("api", ""))
    words = api.split(".")
    start = entry.get("opt_start_seq") or None
    if entry.get("opt_start_time"):
        start = datetime.fromisoformat(entry["opt_start_time"])
    return Origin(
        entry["name"],
        domain=words[1] if len(words) == 3 and words[::2] == ["$JS", "API"] else None,
        start=start,
        filter=entry.get("filter_subject") or None,
        partitions=1,
        foreign=True,
    )


def _origins_of(metadata: Mapping[str, str]) -> tuple[Origin, ...]:
    try:
        return msgspec.json.decode(metadata.get(_ORIGINS_KEY, "[]"), type=tuple[Origin, ...])
    except (msgspec.DecodeError, ConfigError):
        return ()  # not written by Millstream; the stream's own configuration is what counts


def may_hold_packs(config: Mapping[str, Any]) -> bool:
    """Whether there can be packs in a stream: copies have those of their origin.

    It says the same as the settings, a hundred times as fast: every read of a key asks.
    """
    if config.get("mirror") or config.get("sources"):
        return True
    without = _PACKS_KEY in (config.get("metadata") or {})
    return not without and int(config.get("max_msgs_per_subject", _UNLIMITED)) <= 0


def resolved(origin: Origin, config: Mapping[str, Any]) -> Origin:
    """The origin with what the configuration of its first stream says about it."""
    identity = identity_of(config)
    if identity.topic != origin.topic or identity.prefix is None:
        return replace(origin, partitions=1, prefix=None, foreign=True)
    prefix = (config.get("metadata") or {}).get(_PREFIX_KEY)
    settings = from_stream_config(config)
    packs = settings.takes_packs
    if settings.is_copy:  # which takes none itself
        packs = settings.mirror is None or settings.mirror.packs
    return replace(
        origin, partitions=identity.partitions, prefix=prefix, foreign=False, packs=packs
    )


# -- changes ------------------------------------------------------------------------------


def changed_config(
    config: Mapping[str, Any], before: Mapping[str, Any], after: Mapping[str, Any]
) -> dict[str, Any]:
    """A stream's configuration with the difference between two renderings applied to it.

    What Millstream does not know about (placement, republishing, ...) stays as it is.
    """
    result = dict(config)
    for key in before.keys() | after.keys():
        if before.get(key) == after.get(key):
            continue
        if key == "metadata":
            found = config.get("metadata") or {}
            result[key] = changed_config(found, before[key], after[key])
        elif key in after:
            result[key] = after[key]
        else:
            result.pop(key, None)
    return result


# -- units --------------------------------------------------------------------------------


def _nanoseconds(time: timedelta | None) -> int:
    return 0 if time is None else time // _MICROSECOND * 1000


def _duration(nanoseconds: int | None) -> timedelta | None:
    return timedelta(microseconds=nanoseconds / 1000) if nanoseconds else None


def _time_text(moment: datetime) -> str:
    """RFC 3339 as the server writes it: UTC, no trailing zeros."""
    moment = moment.astimezone(UTC)
    fraction = f".{moment.microsecond:06d}".rstrip("0").rstrip(".")
    return f"{moment:%Y-%m-%dT%H:%M:%S}{fraction}Z"
