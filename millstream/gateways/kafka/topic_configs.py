"""Kafka's settings of topics, and what they are in Millstream. Pure.

A setting is one of three kinds. What a topic of Millstream has as well is stored there
(`retention.ms` is `max_age`). What only clients and the gateway know, and what tools set although
it changes nothing here (`segment.bytes`), is kept in the topic's metadata. The rest has one value:
another one would promise what is not done, and is refused. Names that Kafka does not have either
are refused, too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum, IntEnum
from typing import Any, Final

from millstream.errors import ConfigError
from millstream.messaging.topics.choices import Compression
from millstream.messaging.topics.settings import TopicSettings

__all__ = [
    "CONFIGS",
    "DEFAULT_MESSAGE_BYTES",
    "DEFAULT_RETENTION_MS",
    "BadConfig",
    "ConfigEntry",
    "ConfigSource",
    "ConfigType",
    "broker_entries",
    "changes_for",
    "entries_of",
    "max_message_bytes",
    "new_settings",
    "reset_by",
    "timestamp_bounds",
]

# Kafka's own defaults. A topic that was made without a client of Kafka has no limit of age.
DEFAULT_RETENTION_MS: Final = 604_800_000
DEFAULT_MESSAGE_BYTES: Final = 1_048_588

_LONG_MAX: Final = 2**63 - 1
_INT_MAX: Final = 2**31 - 1
_SHORTEST_MS: Final = 100  # of an age, for the broker; tools set 1 ms to empty a topic
_FOREVER_MS: Final = 200 * 365 * 86_400_000  # the broker counts nanoseconds in 64 bits
_MILLISECOND: Final = timedelta(milliseconds=1)


class BadConfig(ValueError):
    """A setting that is unknown, or cannot have this value; the text names it."""


class ConfigType(IntEnum):
    """Types of settings, by Kafka's numbers."""

    BOOLEAN = 1
    STRING = 2
    INT = 3
    LONG = 5
    DOUBLE = 6
    LIST = 7


class ConfigSource(IntEnum):
    """Where a value comes from, by Kafka's numbers."""

    TOPIC = 1
    BROKER = 4  # how the gateway was started
    DEFAULT = 5


class _Kind(Enum):
    SETTING = "setting"  # of the topic, or kept in its metadata with a meaning
    KEPT = "kept"  # in the metadata, without an effect
    FIXED = "fixed"  # it has one value


@dataclass(frozen=True, slots=True)
class _Config:
    type: ConfigType
    default: str
    kind: _Kind = _Kind.KEPT
    low: float = 0
    high: float = _LONG_MAX
    why: str = ""  # FIXED: why it has this value only
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ConfigEntry:
    """A setting as it is described to a client."""

    name: str
    value: str
    source: ConfigSource
    read_only: bool
    type: ConfigType


def _long(default: int, low: int = 0, kind: _Kind = _Kind.KEPT) -> _Config:
    return _Config(ConfigType.LONG, str(default), kind, low)


def _int(default: int, low: int = 0, kind: _Kind = _Kind.KEPT) -> _Config:
    return _Config(ConfigType.INT, str(default), kind, low, _INT_MAX)


def _fixed(type: ConfigType, default: object, why: str) -> _Config:
    return _Config(type, str(default), _Kind.FIXED, -(2**63), _LONG_MAX, why)


_SETTING: Final = _Kind.SETTING
_FLUSHED: Final = (
    "when events are on disk is decided by the broker: see the topic setting 'durability'"
)
_NOT_TIERED: Final = "the broker has no tiered storage"
_NOT_KAFKA: Final = "the broker replicates in another way"
_AS_SENT: Final = "the gateway compresses nothing again"
_CODECS: Final = ("gzip", "snappy", "lz4", "zstd")

# Those of Kafka 4.
CONFIGS: Final[Mapping[str, _Config]] = {
    "cleanup.policy": _Config(ConfigType.LIST, "delete", _SETTING),
    "compression.gzip.level": _fixed(ConfigType.INT, -1, _AS_SENT),
    "compression.lz4.level": _fixed(ConfigType.INT, 9, _AS_SENT),
    "compression.type": _Config(
        ConfigType.STRING, "producer", _SETTING, choices=("producer", "uncompressed", *_CODECS)
    ),
    "compression.zstd.level": _fixed(ConfigType.INT, 3, _AS_SENT),
    "delete.retention.ms": _long(86_400_000),
    "file.delete.delay.ms": _long(60_000),
    "flush.messages": _fixed(ConfigType.LONG, _LONG_MAX, _FLUSHED),
    "flush.ms": _fixed(ConfigType.LONG, _LONG_MAX, _FLUSHED),
    "follower.replication.throttled.replicas": _fixed(ConfigType.LIST, "", _NOT_KAFKA),
    "index.interval.bytes": _int(4096),
    "leader.replication.throttled.replicas": _fixed(ConfigType.LIST, "", _NOT_KAFKA),
    "local.retention.bytes": _fixed(ConfigType.LONG, -2, _NOT_TIERED),
    "local.retention.ms": _fixed(ConfigType.LONG, -2, _NOT_TIERED),
    "max.compaction.lag.ms": _long(_LONG_MAX, 1),
    "max.message.bytes": _int(DEFAULT_MESSAGE_BYTES, kind=_SETTING),
    "message.timestamp.after.max.ms": _long(3_600_000, kind=_SETTING),
    "message.timestamp.before.max.ms": _long(_LONG_MAX, kind=_SETTING),
    "message.timestamp.type": _fixed(
        ConfigType.STRING, "CreateTime", "events keep the time that their producer gave them"
    ),
    "min.cleanable.dirty.ratio": _Config(ConfigType.DOUBLE, "0.5", high=1),
    "min.compaction.lag.ms": _long(0),
    "min.insync.replicas": _int(1, 1, _SETTING),
    "preallocate": _Config(ConfigType.BOOLEAN, "false"),
    "remote.log.copy.disable": _fixed(ConfigType.BOOLEAN, "false", _NOT_TIERED),
    "remote.log.delete.on.disable": _fixed(ConfigType.BOOLEAN, "false", _NOT_TIERED),
    "remote.storage.enable": _fixed(ConfigType.BOOLEAN, "false", _NOT_TIERED),
    "retention.bytes": _long(-1, -1, _SETTING),
    "retention.ms": _long(DEFAULT_RETENTION_MS, -1, _SETTING),
    "segment.bytes": _int(1_073_741_824, 14),
    "segment.index.bytes": _int(10_485_760, 4),
    "segment.jitter.ms": _long(0),
    "segment.ms": _long(604_800_000, 1),
    "unclean.leader.election.enable": _fixed(
        ConfigType.BOOLEAN, "false", "a replica that lacks events is never made the leader"
    ),
}

# -- reading ------------------------------------------------------------------------------


def entries_of(settings: TopicSettings) -> list[ConfigEntry]:
    """Every setting of a topic, by name."""
    found = _configs_of(settings)
    return [
        ConfigEntry(
            name,
            found[name],
            ConfigSource.DEFAULT if found[name] == config.default else ConfigSource.TOPIC,
            config.kind is _Kind.FIXED,
            config.type,
        )
        for name, config in CONFIGS.items()
    ]


def max_message_bytes(settings: TopicSettings) -> int:
    """The size of a batch that producers may send."""
    size = int(_kept(settings).get("max.message.bytes", DEFAULT_MESSAGE_BYTES))
    return min(size, settings.max_message_size or size)


def timestamp_bounds(settings: TopicSettings) -> tuple[int, int]:
    """How many milliseconds the time of a new event may be before and after now."""
    kept = _kept(settings)
    before, after = "message.timestamp.before.max.ms", "message.timestamp.after.max.ms"
    return (
        int(kept.get(before, CONFIGS[before].default)),
        int(kept.get(after, CONFIGS[after].default)),
    )


def _configs_of(settings: TopicSettings) -> dict[str, str]:
    values = {name: config.default for name, config in CONFIGS.items()} | _kept(settings)
    age, size = settings.max_age, settings.max_bytes
    values["retention.ms"] = "-1" if age is None else str(age // _MILLISECOND)
    values["retention.bytes"] = "-1" if size is None else str(size)
    values["max.message.bytes"] = str(max_message_bytes(settings))
    codec = values["compression.type"]
    if (settings.compression is Compression.NONE) == (codec in _CODECS):
        values["compression.type"] = CONFIGS["compression.type"].default
    values["cleanup.policy"] = "delete"
    if settings.history is not None:
        values["cleanup.policy"] = "compact" if age is None and size is None else "compact,delete"
    return values


def _kept(settings: TopicSettings) -> dict[str, str]:
    """What is kept in the metadata. Anybody can write there: what is not valid does not count."""
    found = {}
    for pair in (settings.kafka_configs or "").split(","):
        name, _, value = pair.partition("=")
        config = CONFIGS.get(name)
        if config is None or config.kind is _Kind.FIXED:
            continue
        try:
            found[name] = _checked(name, value)
        except BadConfig:
            continue
    return found


# -- changing -----------------------------------------------------------------------------


def new_settings(
    base: TopicSettings, given: Mapping[str, str | None], bytes_max: int
) -> TopicSettings:
    """The settings of a topic that a client creates; without a value a setting has its default."""
    first = base.changed({"max_age": timedelta(milliseconds=DEFAULT_RETENTION_MS)})
    known = {name: value for name, value in given.items() if value is not None}
    changes = changes_for(first, known, given.keys() - known.keys(), bytes_max)
    try:
        return first.changed(changes)
    except ConfigError as error:
        raise BadConfig(str(error)) from error


def changes_for(
    settings: TopicSettings, given: Mapping[str, str], reset: Collection[str], bytes_max: int
) -> dict[str, Any]:
    """The topic settings to change so that some of Kafka's are as given, others as by default.

    `bytes_max` is the size of the largest batch that the gateway takes. BadConfig if one of them
    cannot be so; nothing is changed then.
    """
    before = _configs_of(settings)
    wanted = {name: _checked(name, value) for name, value in given.items()}
    wanted |= {name: _known(name).default for name in reset}
    changed = {name: value for name, value in wanted.items() if value != before[name]}
    if not changed:
        return {}
    kept = {name: text for name, text in _kept(settings).items() if name not in changed}
    changes: dict[str, Any] = {}
    for name, value in changed.items():
        config = CONFIGS[name]
        if config.kind is _Kind.FIXED:
            raise BadConfig(f"{name}: only '{config.default}' is possible: {config.why}")
        if name in _CHANGES:
            changes |= _CHANGES[name](settings, value, bytes_max)
        if value != config.default and name not in ("retention.ms", "retention.bytes"):
            kept[name] = value
    text = ",".join(f"{name}={value}" for name, value in sorted(kept.items())) or None
    if text != settings.kafka_configs:
        changes["kafka_configs"] = text
    return changes


def reset_by(given: Collection[str]) -> list[str]:
    """The settings that get their defaults where all are replaced by those given."""
    return [
        name
        for name, config in CONFIGS.items()
        if name not in given and config.kind is not _Kind.FIXED and name != "cleanup.policy"
    ]


def _known(name: str) -> _Config:
    config = CONFIGS.get(name)
    if config is None:
        raise BadConfig(f"Unknown topic config name: {name:.200}")
    return config


def _checked(name: str, value: str) -> str:
    """A value in the form in which it is described."""
    config = _known(name)
    value = value.strip()
    match config.type:
        case ConfigType.BOOLEAN:
            value = value.lower()
            if value not in ("true", "false"):
                raise _invalid(name, value, "expected 'true' or 'false'")
        case ConfigType.INT | ConfigType.LONG:
            return _number(name, value, config)
        case ConfigType.DOUBLE:
            try:
                ratio = float(value)
            except ValueError:
                raise _invalid(name, value, "Not a number of type DOUBLE") from None
            if not config.low <= ratio <= config.high:
                raise _invalid(name, value, f"it must be {config.low} to {config.high}")
            return str(ratio)
        case ConfigType.LIST:
            parts = sorted({part.strip() for part in value.split(",")} - {""})
            if name == "cleanup.policy" and (not parts or set(parts) - {"compact", "delete"}):
                raise _invalid(name, value, "the policies are 'delete' and 'compact'")
            return ",".join(parts)
        case ConfigType.STRING:
            if config.choices and value not in config.choices:
                raise _invalid(name, value, f"it must be one of {', '.join(config.choices)}")
    return value


def _number(name: str, value: str, config: _Config) -> str:
    digits = value.removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 19):
        raise _invalid(name, value, f"Not a number of type {config.type.name}")
    number = int(value)
    if not config.low <= number <= config.high:
        raise _invalid(name, value, f"it must be {config.low:.0f} to {config.high:.0f}")
    if name == "retention.ms":
        number = -1 if not 0 <= number < _FOREVER_MS else max(number, _SHORTEST_MS)
    return str(number)


def _invalid(name: str, value: str, why: str) -> BadConfig:
    return BadConfig(f"Invalid value {value:.100} for configuration {name}: {why}")


# -- what a setting is in a topic ---------------------------------------------------------


def _retention_ms(it: TopicSettings, value: str, bytes_max: int) -> dict[str, Any]:
    return {"max_age": None if value == "-1" else int(value) * _MILLISECOND}


def _retention_bytes(it: TopicSettings, value: str, bytes_max: int) -> dict[str, Any]:
    if value == "0":
        raise BadConfig("retention.bytes: 0 would keep nothing; -1 is no limit")
    return {"max_bytes": None if value == "-1" else int(value)}


def _message_bytes(it: TopicSettings, value: str, bytes_max: int) -> dict[str, Any]:
    largest = min(bytes_max, it.max_message_size or bytes_max)
    if int(value) > largest and value != CONFIGS["max.message.bytes"].default:
        raise BadConfig(
            f"max.message.bytes: {value} is above {largest}, the largest batch that this topic "
            f"and this gateway take"
        )
    return {}


def _compression(it: TopicSettings, value: str, bytes_max: int) -> dict[str, Any]:
    # Clients get what producers sent; stored files are compressed in the broker's own way.
    return {"compression": Compression.S2 if value in _CODECS else Compression.NONE}


def _insync(it: TopicSettings, value: str, bytes_max: int) -> dict[str, Any]:
    majority = it.replicas // 2 + 1
    if int(value) > majority:
        raise BadConfig(
            f"min.insync.replicas: {value} is more than {majority}: an answer to a producer means "
            f"that a majority of the {it.replicas} replica(s) has the records"
        )
    return {}


def _cleanup(it: TopicSettings, value: str, bytes_max: int) -> dict[str, Any]:
    if it.history is not None:
        raise BadConfig("cleanup.policy: a table keeps the last value of each key, for ever")
    raise BadConfig(
        f"cleanup.policy={value}: compacted topics cannot be written through the gateway in this "
        f"version; only 'delete' is possible. Millstream's tables keep the last value of each key"
    )


_CHANGES: Final[Mapping[str, Callable[[TopicSettings, str, int], dict[str, Any]]]] = {
    "cleanup.policy": _cleanup,
    "compression.type": _compression,
    "max.message.bytes": _message_bytes,
    "min.insync.replicas": _insync,
    "retention.bytes": _retention_bytes,
    "retention.ms": _retention_ms,
}

# -- the broker's -------------------------------------------------------------------------


def broker_entries(node_id: int, partitions: int, auto_create: bool) -> list[ConfigEntry]:
    """What tools want to know of a broker; the gateway is one to them."""
    started: dict[str, tuple[object, ConfigType]] = {
        "auto.create.topics.enable": (str(auto_create).lower(), ConfigType.BOOLEAN),
        "broker.id": (node_id, ConfigType.INT),
        "node.id": (node_id, ConfigType.INT),
        "num.partitions": (partitions, ConfigType.INT),
    }
    default: dict[str, tuple[object, ConfigType]] = {
        "compression.type": ("producer", ConfigType.STRING),
        "default.replication.factor": (1, ConfigType.INT),
        "delete.topic.enable": ("true", ConfigType.BOOLEAN),
        "log.cleanup.policy": ("delete", ConfigType.LIST),
        "log.message.timestamp.type": ("CreateTime", ConfigType.STRING),
        "log.retention.bytes": (-1, ConfigType.LONG),
        "log.retention.ms": (DEFAULT_RETENTION_MS, ConfigType.LONG),
        "message.max.bytes": (DEFAULT_MESSAGE_BYTES, ConfigType.INT),
        "min.insync.replicas": (1, ConfigType.INT),
        "unclean.leader.election.enable": ("false", ConfigType.BOOLEAN),
    }
    return [
        ConfigEntry(name, str(value), source, read_only=True, type=type)
        for source, group in ((ConfigSource.BROKER, started), (ConfigSource.DEFAULT, default))
        for name, (value, type) in group.items()
    ]
