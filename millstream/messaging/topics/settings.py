"""Topic settings: frozen values, checked when they are created. Pure.

    TopicSettings(partitions=4, max_age="7d", max_bytes="10GiB")
    TopicSettings(retention="workqueue", discard="new", max_messages=100_000)
    TopicSettings(mirror=Origin("orders", domain="edge"))

Each setting is declared once, as a field of `TopicSettings`. The options of `millstream topic
create` and `edit` and the table in docs/CLI.md come from the declaration. `stream_config.py` turns
settings into JetStream stream configurations and back: a setting that is one value there names its
`stream_key` and needs nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Self

from millstream.declared import Form
from millstream.errors import ConfigError
from millstream.guarded import guarded_prefix
from millstream.messaging.topics.choices import Compression, Discard, Retention, Storage
from millstream.messaging.topics.demand import DEMANDS
from millstream.messaging.topics.origin import (
    PARTITIONS_MAX,
    Origin,
    read_origin,
    read_origins,
)
from millstream.messaging.topics.setting_forms import (
    Duration,
    Fixed,
    FrozenMetadata,
    OneWay,
    SetBy,
    Setting,
    SettingKind,
    Size,
    choice,
    duration,
    duration_text,
    number,
    read_duration,
    read_metadata,
    short_repr,
    size,
    switch,
    text,
)
from millstream.messaging.topics.setting_rules import (
    RESERVED_METADATA,
    check_deliver_at,
    check_expected_last,
    check_overload,
    combination_faults,
    description_fault,
    feature_obstacle,
    metadata_fault,
    prefix_fault,
)
from millstream.nearest import check_known

if TYPE_CHECKING:
    from millstream.events.event import PublishOptions

__all__ = [
    "RESERVED_METADATA",
    "TOPIC_SETTINGS",
    "Compression",
    "Discard",
    "Origin",
    "Retention",
    "Storage",
    "TopicSettings",
]

# Headings of the options.
LIMITS: Final = "Limits (of each partition; 'none' for no limit)"
RULES: Final = "Rules"
COPIES: Final = "Copies of other topics"

DEFAULT_DUPLICATE_WINDOW: Final = timedelta(minutes=2)  # the server's own
WIRE_FORMATS: Final = ("avro", "json", "protobuf")
PARTITIONERS: Final = ("crc32", "murmur2", "any")
_SHORTEST: Final = timedelta(milliseconds=100)  # the server's own, for age and duplicate window
_SHORTEST_TTL: Final = timedelta(seconds=1)


@dataclass(frozen=True, kw_only=True, repr=False)
class TopicSettings:
    """How a topic stores its events. Limits apply to each partition.

    Durations are given as "7d", seconds or timedelta and held as timedelta; sizes as "10GiB" or
    bytes and held as bytes. A combination that the broker would reject, or accept and not honor,
    raises ConfigError here.
    """

    partitions: Setting[int, int] = Setting(
        1,
        number(PARTITIONS_MAX),
        "Number of partitions.",
        flags=("--partitions", "-p"),
        change=Fixed(
            "a key's partition depends on how many there are. Declare a topic of another name with "
            "as many as needed and replay this one into it"
        ),
    )
    retention: Setting[Retention | str, Retention] = Setting(
        Retention.LIMITS,
        choice(Retention),
        "How long events are kept: limits (until a limit is reached), interest (while a "
        "subscription has not acked them) or workqueue (until one subscription has acked them).",
        stream_key="retention",
    )
    max_age: Setting[Duration | None, timedelta | None] = Setting(
        None,
        duration(_SHORTEST),
        "Maximum age of an event, such as 7d.",
        group=LIMITS,
        stream_key="max_age",
    )
    max_bytes: Setting[Size | None, int | None] = Setting(
        None,
        size(),
        "Maximum size of the stored events, such as 10GiB.",
        group=LIMITS,
        stream_key="max_bytes",
    )
    max_messages: Setting[int | None, int | None] = Setting(
        None,
        number(),
        "Maximum number of messages; a pack of many events is one message.",
        group=LIMITS,
        stream_key="max_msgs",
    )
    # Only for plain events: a pack belongs to no single key, so a topic with a history takes none.
    history: Setting[int | None, int | None] = Setting(
        None,
        number(),
        "Number of newest events to keep of each key.",
        group=LIMITS,
        stream_key="max_msgs_per_subject",
    )
    # The server keeps it in 32 bits.
    max_message_size: Setting[Size | None, int | None] = Setting(
        None,
        size(2**31 - 1),
        "Maximum size of one message.",
        group=LIMITS,
        stream_key="max_msg_size",
    )
    discard: Setting[Discard | str, Discard] = Setting(
        Discard.OLD,
        choice(Discard),
        "At a limit: old drops the oldest event, new rejects the publish.",
        group=LIMITS,
        stream_key="discard",
    )
    discard_new_per_key: Setting[bool, bool] = Setting(
        False,
        switch(),
        "Reject an event whose key has a full history (needs discard new and a history).",
        group=LIMITS,
        stream_key="discard_new_per_subject",
    )
    storage: Setting[Storage | str, Storage] = Setting(
        Storage.FILE,
        choice(Storage),
        "Where events are stored.",
        stream_key="storage",
        change=Fixed(
            "stored events do not move. Declare a topic of another name with a copy of this one"
        ),
    )
    compression: Setting[Compression | str, Compression] = Setting(
        Compression.NONE,
        choice(Compression),
        "Compression of the files.",
        stream_key="compression",
    )
    replicas: Setting[int, int] = Setting(
        1,
        number(5),
        "Number of nodes that store each partition, 1 to 5.",
        stream_key="num_replicas",
    )
    durability: Setting[str | None, str | None] = Setting(
        None,
        text(choices=tuple(DEMANDS)),
        "What an ack must guarantee: fsync (on disk), replicated (a majority of nodes has the "
        "event) or periodic (at least in the page cache). Creating the topic and publishing to it "
        "are refused where the server does less.",
        default_text="what the server does",
    )
    # None: two minutes, or max_age if that is shorter; none for a topic with sources, because two
    # origins may use the same id.
    duplicate_window: Setting[Duration | None, timedelta | None] = Setting(
        None,
        duration(_SHORTEST),
        "How long a second event with the same id is recognized and not stored.",
        group=RULES,
        default_text="2m",
    )
    marker_ttl: Setting[Duration | None, timedelta | None] = Setting(
        None,
        duration(_SHORTEST_TTL),
        "How long a marker reports that the last event of a key expired (needs history 1; turns "
        "on rollup).",
        group=RULES,
        stream_key="subject_delete_marker_ttl",
    )
    mirror: Setting[Origin | str | None, Origin | None] = Setting(
        None,
        SettingKind(Form.ORIGIN, read_origin),
        "Make an exact copy of this topic.",
        group=COPIES,
        change=Fixed("it would mix the offsets of two origins. Declare a topic of another name"),
    )
    sources: Setting[Sequence[Origin | str], tuple[Origin, ...]] = Setting(
        (),
        SettingKind(Form.ORIGINS, read_origins),
        "Collect the events of this topic; repeat it for more.",
        group=COPIES,
        flags=("--source",),
    )
    deny_delete: Setting[bool, bool] = Setting(
        False,
        switch(),
        "Permanently forbid deleting single events (cannot be undone).",
        group=RULES,
        stream_key="deny_delete",
        change=OneWay("events were promised not to be deleted"),
    )
    deny_purge: Setting[bool, bool] = Setting(
        False,
        switch(),
        "Permanently forbid purging events (cannot be undone).",
        group=RULES,
        stream_key="deny_purge",
        change=OneWay("events were promised not to be purged"),
    )
    early_ack: Setting[bool, bool] = Setting(
        False,
        switch(),
        "Ack before the event is written: faster, but a killed broker loses acked events.",
        group=RULES,
        change=Fixed("it is set when the topic is created. Declare a topic of another name"),
    )
    prefix: Setting[str | None, str | None] = Setting(
        None,
        text(prefix_fault),
        "What the subjects start with.",
        group=RULES,
        change=Fixed("stored events keep their subjects. Declare a topic of another name"),
        default_text="the name of the topic",
    )
    wire_format: Setting[str | None, str | None] = Setting(
        None,
        text(choices=WIRE_FORMATS),
        "Format of the single events of a topic with a schema.",
        change=SetBy("millstream schema register"),
    )
    guarded: Setting[bool, bool] = Setting(
        False,
        switch(),
        "Whether everything published is checked by a guard, which alone may write to the topic.",
        change=SetBy(
            "millstream schema register --guarded",
            "stored events keep their subjects, and those of a guarded topic are its own. Declare "
            "a topic of another name as wanted and copy the events: millstream topic replay --to",
        ),
    )
    kafka_name: Setting[str | None, str | None] = Setting(
        None,
        text(),
        "Name for clients of Kafka, where the topic's own name would not do.",
        change=SetBy("millstream gateway run kafka"),
        default_text="the name of the topic",
    )
    # What the gateway has seen. Where it is not crc32, a key may be in any partition.
    partitioner: Setting[str | None, str | None] = Setting(
        None,
        text(choices=PARTITIONERS),
        "How clients of Kafka chose the partition of a key: crc32, as all others do, murmur2, or "
        "any (several ways).",
        change=SetBy("millstream gateway run kafka"),
        default_text="crc32",
    )
    kafka_configs: Setting[str | None, str | None] = Setting(
        None,
        text(),
        "Settings that only clients of Kafka see, such as max.message.bytes=500000.",
        change=SetBy("millstream gateway run kafka"),
        default_text="Kafka's defaults",
    )
    max_subscriptions: Setting[int | None, int | None] = Setting(
        None,
        number(),
        "Maximum number of subscriptions.",
        group=LIMITS,
        default_text="100,000, or what the account allows",
    )
    message_ttl: Setting[bool | None, bool | None] = Setting(
        None,
        switch(),
        "Allow events with their own time to live.",
        group=RULES,
        stream_key="allow_msg_ttl",
        change=OneWay("stored events may have a time to live"),
        default_text="on",
    )
    atomic: Setting[bool | None, bool | None] = Setting(
        None,
        switch(),
        "Allow storing several events together, all or none.",
        group=RULES,
        stream_key="allow_atomic",
        default_text="on if possible",
    )
    # Fixed, because both sides rely on it: a check of the last event of a key (`expected_last`) is
    # sound only if no pack was ever stored, and no publisher that is open may start to store any.
    packs: Setting[bool | None, bool | None] = Setting(
        None,
        switch(),
        "Allow packs, many events in one message. The broker does not see the keys in a pack, so a "
        "publish with expected_last needs a topic without packs.",
        group=RULES,
        change=Fixed(
            "packs that are stored remain, and publishers rely on it. Create a topic of another "
            "name and replay this one into it"
        ),
        default_text="on; off with a history",
    )
    direct: Setting[bool | None, bool | None] = Setting(
        None,
        switch(),
        "Allow reads from any replica, not only from the leader.",
        group=RULES,
        stream_key="allow_direct",
        default_text="on",
    )
    # The server cannot allow roll-ups of single keys only: every publisher can then remove all.
    rollup: Setting[bool | None, bool | None] = Setting(
        None,
        switch(),
        "Allow roll-ups: every publisher can then replace all earlier events of a key, or of the "
        "whole topic, with one publish.",
        group=RULES,
        stream_key="allow_rollup_hdrs",
        default_text="off; on with schedules or marker_ttl, which need it",
    )
    schedules: Setting[bool | None, bool | None] = Setting(
        None,
        switch(),
        "Allow events that are delivered at a later time; the server allows it together with "
        "rollup only.",
        group=RULES,
        stream_key="allow_msg_schedules",
        change=OneWay("events may be scheduled"),
        default_text="off",
    )
    description: Setting[str, str] = Setting(
        "", text(description_fault), "What the topic is for.", stream_key="description"
    )
    metadata: Setting[Mapping[str, str], FrozenMetadata] = Setting(
        FrozenMetadata(),
        SettingKind(Form.PAIRS, read_metadata, metadata_fault),
        "A name and a text stored with the topic; repeat it for more.",
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
        """Settings that describe an existing stream, without checks."""
        settings = cls.__new__(cls)
        known = {field.name: field.default for field in fields(cls)}
        check_known(values, known)
        for name, value in {**known, **values}.items():
            object.__setattr__(settings, name, value)
        return settings

    def changed(self, changes: Mapping[str, Any], *, check: bool = True) -> Self:
        """A copy with some settings changed; faults that existed before are accepted."""
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
        """Whether events come from other topics; nothing can be published to such a topic."""
        return self.mirror is not None or bool(self.sources)

    @property
    def takes_packs(self) -> bool:
        """Whether many events may be written as one message."""
        return self.allows("packs") and self.obstacle("packs") is None

    @property
    def keys_at_home(self) -> bool:
        """Whether each key is in the partition that `partition_of` gives."""
        return self.partitions == 1 or self.partitioner in (None, "crc32")

    @property
    def window(self) -> timedelta | None:
        """The duplicate window in effect; None: duplicates are not detected."""
        if self.duplicate_window is not None or self.is_copy:
            return self.duplicate_window
        return min(self.max_age or DEFAULT_DUPLICATE_WINDOW, DEFAULT_DUPLICATE_WINDOW)

    def subject_prefix(self, name: str) -> str | None:
        """What the subjects of this topic start with; None: a foreign stream."""
        if self.guarded:
            return guarded_prefix(self.prefix or name)
        if self.mirror is None:
            return self.prefix or name
        return None if self.mirror.foreign else self.mirror.prefix or self.mirror.topic

    def allows(self, feature: str) -> bool:
        """Whether `message_ttl`, `atomic`, `packs`, `direct`, `rollup` or `schedules` is on."""
        given: bool | None = getattr(self, feature)
        if given is not None:
            return given
        # What lets a publisher change what others have stored is on only where it is needed.
        needed = {
            "rollup": self.marker_ttl is not None or bool(self.schedules),
            "schedules": False,
        }
        return needed.get(feature, True) and self.obstacle(feature) is None

    def obstacle(self, feature: str) -> str | None:
        """The setting that rules out a feature, or None."""
        return feature_obstacle(self, feature)

    def ttl_text(self, ttl: Duration) -> str:
        """The value of the header `Nats-TTL`; a TTL that would not be honored is refused."""
        time = read_duration("ttl", ttl) or timedelta(0)
        if not self.allows("message_ttl"):
            raise ConfigError("this topic does not allow events with a ttl: set message_ttl")
        if time < _SHORTEST_TTL:
            raise ConfigError(f"ttl: {ttl!r} is below the minimum of one second")
        if self.max_age is not None and time > self.max_age:
            raise ConfigError(
                f"ttl: {ttl!r} is longer than the topic's max_age, {duration_text(self.max_age)}, "
                f"which would end it earlier. Give a shorter one or raise max_age"
            )
        return f"{math.ceil(time.total_seconds())}s"

    # -- checks --------------------------------------------------------------------------

    def check_options(self, options: PublishOptions) -> None:
        """Refuse an option of a publish that this topic would refuse, cut short or not honor."""
        if options.ttl is not None:
            self.ttl_text(options.ttl)
        if options.expected_last is not None:
            check_expected_last(self)
        check_overload(self, options.overload, options.timeout or 0)
        if options.deliver_at is not None:
            check_deliver_at(self, options.deliver_at)

    def faults(self) -> list[str]:
        """Everything that is wrong with these settings, as sentences."""
        alone = (setting.fault(getattr(self, name)) for name, setting in TOPIC_SETTINGS.items())
        found = [fault for fault in alone if fault is not None]
        if found:
            return found
        found = list(combination_faults(self))
        for name, setting in TOPIC_SETTINGS.items():
            why = self.obstacle(name) if setting.is_feature and getattr(self, name) else None
            if why is not None:
                found.append(f"{name}: {why}")
        return found


TOPIC_SETTINGS: Final[Mapping[str, Setting[Any, Any]]] = {
    field.name: vars(TopicSettings)[field.name] for field in fields(TopicSettings)
}
