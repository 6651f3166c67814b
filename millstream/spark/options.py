"""Every option of `format("millstream")`: its name, its check, its meaning. Pure.

Names and defaults are those of Spark's Kafka source and sink wherever the meaning is the same. All
options are checked when a query is built; the error for a wrong one names the right one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, Literal, TypeVar

from millstream.errors import ConfigError
from millstream.events.event import nanoseconds_of
from millstream.events.subject import check_name, check_subject
from millstream.nearest import one_of
from millstream.settings import ConnectionSettings, Secret, Tls, parse_size
from millstream.spark.source.offsets import (
    Edge,
    OffsetLimit,
    WhenNone,
    parse_moment,
    parse_offsets,
    parse_timestamp,
    parse_timestamps,
)

__all__ = [
    "COLUMNS",
    "METADATA",
    "OPTIONS",
    "SinkOptions",
    "SourceOptions",
    "StoreOptions",
    "Undecodable",
    "check_names",
    "connection_settings",
    "sink_options",
    "source_options",
]

T = TypeVar("T")
Undecodable = Literal["fail", "null", "drop"]
Clock = Literal["stored", "event"]  # when an event was stored, or the time it was given

# The columns of a source, in their order; only some of them are there without being asked for.
COLUMNS: Final = (
    *("key", "value", "topic", "partition", "offset"),
    *("timestamp", "subject", "index", "headers", "reason"),
)
# Of events without a schema also by default, as users of Kafka's source expect it.
METADATA: Final = ("topic", "partition", "offset", "subject", "index")
TASKS_MAX: Final = 10_000  # of one batch: more are slower, not faster
PACK_ROWS_MAX: Final = 1_000_000  # readers reject larger packs

# Option -> what it is for: "connection", "source", "batch" (a source read once), "sink".
OPTIONS: Final[Mapping[str, str]] = {
    "url": "connection",
    "user": "connection",
    "password": "connection",
    "token": "connection",
    "nkey": "connection",
    "creds": "connection",
    "tlsCa": "connection",
    "tlsCert": "connection",
    "tlsKey": "connection",
    "tlsFirst": "connection",
    "tlsPin": "connection",
    "context": "connection",
    "domain": "connection",
    "subscribe": "source",
    "subscribePattern": "source",
    "assign": "source",
    "stream": "source",
    "eventStore": "source",
    "upcasters": "source",
    "asOfClock": "batch",
    "state": "batch",
    "events": "batch",
    "subjects": "source",
    "startingOffsets": "source",
    "startingTimestamp": "source",
    "startingOffsetsByTimestamp": "source",
    "startingOffsetsByTimestampStrategy": "source",
    "endingOffsets": "batch",
    "endingTimestamp": "batch",
    "endingOffsetsByTimestamp": "batch",
    "asOf": "batch",
    "rows": "batch",
    "maxOffsetsPerTrigger": "source",
    "minPartitions": "source",
    "maxRecordsPerPartition": "source",
    "failOnDataLoss": "source",
    "includeHeaders": "source",
    "includeMetadata": "source",
    "columns": "source",
    "undecodable": "source",
    "stopFile": "source",
    "groupId": "source",
    "table": "source or sink",
    "topic": "sink",
    "commitMode": "sink",
    "writerName": "sink",
    "compression": "sink",
    "maxRowsPerPack": "sink",
    "maxPackBytes": "sink",
}

# Options that Spark itself adds to the user's.
_OF_SPARK: Final = frozenset({"checkpointlocation", "queryname", "outputmode", "trigger"})

_ELSEWHERE: Final[Mapping[str, str]] = {
    "kafka.bootstrap.servers": "use 'url', for example nats://127.0.0.1:4222",
    "kafka.group.id": "positions are kept in the checkpoint; only interest topics need 'groupId'",
    "groupidprefix": "positions are kept in the checkpoint; no group is needed",
    "kafka.auto.offset.reset": "use 'startingOffsets'",
    "minoffsetspertrigger": "use a trigger interval; there is no minimum",
    "maxtriggerdelay": "use a trigger interval; there is no minimum",
    "path": "name the topic with 'subscribe' (source) or 'topic' (sink)",
    "topics": "use 'subscribe' (source) or 'topic' (sink)",
    "servers": "use 'url'",
    "subject": "use 'subjects'",
}


def check_names(options: Mapping[str, str]) -> None:
    """Reject an option that neither the source nor the sink has, and suggest the right one."""
    known = {name.lower() for name in OPTIONS}
    for given in options:
        name = given.lower()
        if name in known or name in _OF_SPARK:
            continue
        advice = _ELSEWHERE.get(name)
        if advice is None and name.startswith("kafka."):
            advice = "options of the Kafka client have no meaning here"
        if advice is None:
            advice = one_of(name, OPTIONS, "option")
        raise ConfigError(f"unknown option '{given}': {advice}")


class _Given:
    """The options of one role, parsed one by one."""

    def __init__(self, options: Mapping[str, str], roles: set[str], user: str) -> None:
        check_names(options)
        self._values = {name.lower(): text for name, text in options.items()}
        for name, role in OPTIONS.items():
            if name.lower() in self._values and not roles & set(role.split(" or ")):
                owner = "batch read (spark.read)" if role == "batch" else role
                raise ConfigError(f"option '{name}' belongs to a {owner}, not to a {user}")

    def get(self, name: str) -> str | None:
        return self._values.get(name.lower())

    def parsed(self, name: str, parse: Callable[[str], T], default: T) -> T:
        text = self.get(name)
        if text is None:
            return default
        try:
            return parse(text)
        except ConfigError as error:
            raise ConfigError(f"option '{name}' = {text!r}: {error}") from error
        except ValueError as error:
            raise ConfigError(f"option '{name}' = {text!r}: {error}") from error

    def one_of(self, names: tuple[str, ...], needed: bool = False) -> str | None:
        """The one of several options that is given; two of them are an error."""
        given = [name for name in names if self.get(name) is not None]
        if len(given) > 1:
            raise ConfigError(f"options '{given[0]}' and '{given[1]}' cannot be combined")
        if needed and not given:
            raise ConfigError(f"give one of the options {', '.join(names)}")
        return given[0] if given else None


def _boolean(text: str) -> bool:
    value = text.strip().lower()
    if value not in ("true", "false"):
        raise ConfigError("choose true or false")
    return value == "true"


def _count(most: int | None = None) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not re.fullmatch(r"\d{1,18}", text.strip()) or int(text) < 1:
            raise ConfigError("choose a whole number of 1 or more")
        if most is not None and int(text) > most:
            raise ConfigError(f"the maximum is {most:,}")
        return int(text)

    return parse


def _choice(*values: str) -> Callable[[str], Any]:
    def parse(text: str) -> str:
        value = text.strip().lower()
        if value not in values:
            raise ConfigError(f"choose {', '.join(values[:-1])} or {values[-1]}")
        return value

    return parse


def _names(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not names:
        raise ConfigError("it is empty")
    return names


def _subjects(text: str) -> tuple[str, ...]:
    return tuple(check_subject(name, wildcards=True) for name in _names(text))


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ConfigError(f"not a regular expression: {error}") from error
    return text


def _assigned(text: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
    try:
        found = json.loads(text)
        parts = tuple((str(name), tuple(int(n) for n in found[name])) for name in sorted(found))
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError('write it like {"orders": [0, 1]}') from error
    if not parts or not all(numbers and min(numbers) >= 0 for _, numbers in parts):
        raise ConfigError('it names no partition; write it like {"orders": [0, 1]}')
    return parts


def _columns(text: str) -> tuple[str, ...]:
    """Columns of a topic; those of an event store depend on its events."""
    for name in (names := _names(text)):
        column, _, inner = name.partition(".")
        if column not in COLUMNS or (inner and column != "value"):
            raise ConfigError(
                f"no column {name!r}; choose from {', '.join(COLUMNS)}, and value.<field>"
            )
    return names


# -- connection -----------------------------------------------------------------------------


def connection_settings(options: Mapping[str, str]) -> ConnectionSettings:
    """Where the broker is: from the options, or else as `millstream.connect()` finds it."""
    given = {name.lower(): text for name, text in options.items()}
    secrets = {
        "password": given.get("password"),
        "token": given.get("token"),
        "nkey_seed": given.get("nkey"),
    }
    ca, cert, key, pin = (given.get(name) for name in ("tlsca", "tlscert", "tlskey", "tlspin"))
    roles = {"connection", "source", "batch", "sink"}
    first = _Given(options, roles, "connection").parsed("tlsFirst", _boolean, default=False)
    tls = Tls(ca, cert, key, first, pin)
    return ConnectionSettings.load(
        given.get("url"),
        context=given.get("context"),
        name="millstream-spark",
        user=given.get("user"),
        creds=given.get("creds"),
        domain=given.get("domain"),
        tls=None if tls == Tls() else tls,
        **{name: Secret(text) for name, text in secrets.items() if text is not None},
    )


# -- source ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """How an event store is read: its events or, as of a time, the states of its aggregates."""

    name: str
    upcasters: str | None = None  # functions from an old version of an event to the next
    as_of: int | None = None  # nanoseconds since 1970; None: rows are events
    clock: Clock = "stored"  # by which `as_of` is meant
    state: str | None = None  # "module:Class" of the states; None: the class of the store's record
    events: tuple[str, ...] = ()  # "module:Class" of events; empty: found beside the state's class


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """What a source reads, and how."""

    topics: tuple[str, ...] = ()  # subscribe, or the one table
    pattern: str | None = None  # subscribePattern: topics whose complete name matches
    assigned: tuple[tuple[str, tuple[int, ...]], ...] = ()  # assign: topic and partitions
    stream: str | None = None  # any JetStream stream, as it is
    is_table: bool = False  # the latest value of each key
    latest: bool = False  # the same, folded from a topic that keeps every event
    store: StoreOptions | None = None  # the topic is that of an event store
    as_of: datetime | None = None  # of a table or latest rows: as stored by then; None: now
    subjects: tuple[str, ...] = ()  # only messages on these subjects
    start: OffsetLimit = field(default_factory=OffsetLimit)
    end: OffsetLimit = field(default_factory=OffsetLimit)
    offsets_per_trigger: int | None = None  # messages of one micro-batch; a pack is one message
    min_tasks: int | None = None  # minPartitions
    messages_per_task: int | None = None  # maxRecordsPerPartition; a pack is one message
    fail_on_data_loss: bool = True
    headers: bool = False
    metadata: bool | None = None  # topic, partition, offset, ...; None: if values have no schema
    columns: tuple[str, ...] = ()  # empty: the default ones
    undecodable: Undecodable = "fail"
    stop_file: str | None = None  # while it exists, a stream offers nothing new
    group_id: str | None = None  # under it an interest topic keeps events for the query


def source_options(options: Mapping[str, str], batch: bool) -> SourceOptions:
    """The options of a source, checked; `batch` for `spark.read`."""
    roles = {"connection", "source", "batch"} if batch else {"connection", "source"}
    given = _Given(options, roles, "batch read" if batch else "streaming source")
    what = given.one_of(_WHAT, needed=True)
    if what == "table":
        _check_options_of_table(given, batch)
    latest = given.parsed("rows", _choice("all", "latest"), "all") == "latest"
    if latest:
        _check_options_of_latest(given)
    elif what not in ("table", "eventStore") and given.get("asOf") is not None:
        raise ConfigError(
            "option 'asOf' is for tables and event stores: name one with 'table' or 'eventStore', "
            "or read the latest rows of a topic (option 'rows' = latest)"
        )
    store = _store(given, what == "eventStore")
    topics: tuple[str, ...] = ()
    if what in ("subscribe", "table"):
        topics = given.parsed(what, _names, ())
        if what == "table" and len(topics) > 1:
            raise ConfigError(f"option 'table' names {len(topics)} tables; read them separately")
        if latest and len(topics) > 1:
            raise ConfigError(f"rows = latest reads one topic, not {len(topics)}: read each alone")
    if store is not None:
        topics = (store.name,)
    return SourceOptions(
        topics=topics,
        pattern=given.parsed("subscribePattern", _pattern, None),
        assigned=given.parsed("assign", _assigned, ()),
        stream=given.get("stream"),
        is_table=what == "table",
        latest=latest,
        store=store,
        as_of=given.parsed("asOf", parse_moment, None) if store is None else None,
        subjects=given.parsed("subjects", _subjects, ()),
        start=_start(given, "earliest" if batch or what == "table" else "latest"),
        end=_end(given),
        offsets_per_trigger=given.parsed("maxOffsetsPerTrigger", _count(), None),
        min_tasks=given.parsed("minPartitions", _count(TASKS_MAX), None),
        messages_per_task=given.parsed("maxRecordsPerPartition", _count(), None),
        fail_on_data_loss=given.parsed("failOnDataLoss", _boolean, default=True),
        headers=given.parsed("includeHeaders", _boolean, default=False),
        metadata=given.parsed("includeMetadata", _boolean, None),
        columns=given.parsed("columns", _columns if store is None else _names, ()),
        undecodable=given.parsed("undecodable", _choice("fail", "null", "drop"), "fail"),
        stop_file=given.get("stopFile"),
        group_id=given.parsed("groupId", lambda text: check_name("group", text), None),
    )


_WHAT: Final = ("subscribe", "subscribePattern", "assign", "stream", "table", "eventStore")
_OF_STORES: Final = ("upcasters", "asOfClock", "state", "events")
_STARTS: Final = ("startingOffsets", "startingTimestamp", "startingOffsetsByTimestamp")
_ENDS: Final = ("endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp")


def _store(given: _Given, chosen: bool) -> StoreOptions | None:
    if not chosen:
        for name in _OF_STORES:
            if given.get(name) is not None:
                raise ConfigError(f"option '{name}' needs the option 'eventStore'")
        return None
    if given.get("includeMetadata") is not None:
        raise ConfigError("option 'includeMetadata' is not for event stores: they have all columns")
    as_of = given.parsed("asOf", parse_moment, None)
    for name in ("asOfClock", "state", "events") if as_of is None else (*_STARTS, *_ENDS):
        if given.get(name) is not None:
            how = "needs" if as_of is None else "cannot be combined with"
            raise ConfigError(f"option '{name}' {how} the option 'asOf'")
    if as_of is not None:
        for name in ("columns", "includeHeaders", "undecodable"):
            if given.get(name) is not None:
                raise ConfigError(f"option '{name}' cannot be combined with the option 'asOf'")
    return StoreOptions(
        as_of=None if as_of is None else nanoseconds_of(as_of),
        name=given.parsed("eventStore", lambda text: check_name("event store", text), ""),
        upcasters=given.get("upcasters"),
        clock=given.parsed("asOfClock", _choice("stored", "event"), "stored"),
        state=given.parsed("state", _class_path, None),
        events=given.parsed("events", lambda text: tuple(map(_class_path, _names(text))), ()),
    )


def _class_path(text: str) -> str:
    if text.startswith("pickled:"):  # as millstream.spark.states_as_of gives it
        return text
    if not re.fullmatch(r"[\w.]+:[\w.]+", text.strip()):
        raise ConfigError("write it like module:Class")
    return text.strip()


def _check_options_of_table(given: _Given, batch: bool) -> None:
    for name in ("subjects", *(_STARTS if batch else ()), *_ENDS):
        if given.get(name) is not None:
            raise ConfigError(
                f"option '{name}' cannot be combined with 'table': a table is read as it is now "
                f"(with 'asOf', as it was); use 'subscribe' to read a range of its changes"
            )


def _check_options_of_latest(given: _Given) -> None:
    """The latest rows are folded from the first event on, each partition by one task."""
    if given.get("subscribe") is None:
        raise ConfigError("rows = latest needs the option 'subscribe', with the name of a topic")
    for name in ("subjects", *_STARTS, "minPartitions", "maxRecordsPerPartition"):
        if given.get(name) is not None:
            raise ConfigError(
                f"option '{name}' cannot be combined with rows = latest, which reads all events "
                f"of each partition in one task"
            )
    if given.get("asOf") is not None and given.one_of(_ENDS) is not None:
        raise ConfigError(f"options 'asOf' and '{given.one_of(_ENDS)}' cannot be combined")
    if (given.get("undecodable") or "").lower() == "null":
        raise ConfigError("undecodable = null cannot be combined with rows = latest: use drop")


def _start(given: _Given, edge: Edge) -> OffsetLimit:
    default = OffsetLimit(edge)
    when_none: WhenNone = given.parsed(
        "startingOffsetsByTimestampStrategy", _choice("error", "latest"), "error"
    )
    which = given.one_of(_STARTS)
    if which == "startingOffsets":
        return given.parsed(which, lambda text: parse_offsets(text, edge), default)
    if which == "startingTimestamp":
        return given.parsed(which, lambda text: parse_timestamp(text, when_none), default)
    if which == "startingOffsetsByTimestamp":
        return given.parsed(which, lambda text: parse_timestamps(text, when_none), default)
    return default


def _end(given: _Given) -> OffsetLimit:
    default = OffsetLimit("latest")
    which = given.one_of(_ENDS)
    if which == "endingOffsets":
        limit = given.parsed(which, lambda text: parse_offsets(text, "latest"), default)
        if limit.edge == "earliest" or "earliest" in limit.offsets.values():
            raise ConfigError("option 'endingOffsets' cannot be earliest: nothing would be read")
        return limit
    if which == "endingTimestamp":
        return given.parsed(which, lambda text: parse_timestamp(text, "latest"), default)
    if which == "endingOffsetsByTimestamp":
        return given.parsed(which, lambda text: parse_timestamps(text, "latest"), default)
    return default


# -- sink -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SinkOptions:
    """Where a sink writes rows, and how."""

    topic: str | None = None  # None: the column `topic` of each row has it
    is_table: bool = False  # rows are upserts and, with a null value, deletes
    staged: bool | None = None  # None: streams write from their tasks, batches are staged
    writer: str = ""  # distinguishes several writes of one query
    compression: Literal["none", "lz4", "zstd"] = "zstd"
    pack_rows: int = 16_384  # larger packs are not read faster
    pack_bytes: int = 4 * 1024 * 1024  # of one pack; or the server's max_payload if that is less


def sink_options(options: Mapping[str, str]) -> SinkOptions:
    """The options of a sink, checked."""
    given = _Given(options, {"connection", "sink"}, "sink")
    what = given.one_of(("topic", "table"))
    mode = given.parsed("commitMode", _choice("direct", "staged"), None)
    if what == "table" and mode == "staged":
        raise ConfigError("commitMode 'staged' is not for tables: upserts can be repeated safely")
    return SinkOptions(
        topic=None if what is None else given.parsed(what, lambda t: check_name(what, t), None),
        is_table=what == "table",
        staged=None if mode is None else mode == "staged",
        writer=given.parsed("writerName", lambda text: check_name("writer", text), ""),
        compression=given.parsed("compression", _choice("none", "lz4", "zstd"), "zstd"),
        pack_rows=given.parsed("maxRowsPerPack", _count(PACK_ROWS_MAX), SinkOptions().pack_rows),
        pack_bytes=given.parsed("maxPackBytes", parse_size, SinkOptions().pack_bytes),
    )
