"""The records of the registry; pure, shared by the asynchronous and the blocking registry.

Everything is in one table, the topic `mill-schemas`, so it is as durable as the events. A schema
is stored once, under its fingerprint, and its id is the offset of that message: stable and unique
without a counter. A topic's record names its versions; it is changed by compare-and-set.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final, TypeAlias

import msgspec

from millstream.errors import ConfigError, DataLoss, Incompatible, SchemaError, SchemaNotFound
from millstream.events.classify import is_deletion
from millstream.events.subject import key_token
from millstream.schemas import types as t
from millstream.schemas.codecs import WIRE_FORMATS, WireFormat, make_codec
from millstream.schemas.compatibility import Mode, Problem, check, parse_mode
from millstream.schemas.formats.protobuf import pin_numbers
from millstream.schemas.schema import Schema
from millstream.settings import SCHEMAS_TOPIC
from millstream.wire.message import StoredMessage

__all__ = [
    "TABLE",
    "Marks",
    "StoreRecord",
    "TopicSchemas",
    "Version",
    "event_key",
    "event_name",
    "matching",
    "message_subject",
    "new_record",
    "next_version",
    "parse_id",
    "problems_of",
    "read_record",
    "read_schema",
    "read_store",
    "record_key",
    "record_of",
    "record_query",
    "schema_key",
    "schema_of",
    "store_key",
]

TABLE: Final = SCHEMAS_TOPIC
# With more versions than this, something registers a new version on every start.
VERSIONS_MAX: Final = 1000
_SCHEMA: Final = "schema/"
_TOPIC: Final = "topic/"
_EVENT: Final = "event/"  # a type of event of an event store
_STORE: Final = "store/"
_ID_DIGITS: Final = 19  # an id is a sequence, which the server keeps in 64 bits


@dataclasses.dataclass(frozen=True, slots=True)
class Version:
    """One version of a topic's schema; versions count from 1, ids are unique in the registry."""

    version: int
    id: int
    fingerprint: str


@dataclasses.dataclass(frozen=True, slots=True)
class TopicSchemas:
    """A topic's record: wire format, compatibility mode, and versions, oldest first."""

    topic: str
    format: WireFormat
    mode: Mode
    versions: tuple[Version, ...] = ()

    @property
    def latest(self) -> Version:
        """The version that is written by default."""
        return self.versions[-1]

    def version(self, number: int | None = None) -> Version:
        """A version by number; None: the latest."""
        if number is None:
            return self.latest
        if not 1 <= number <= len(self.versions):
            raise SchemaNotFound(
                f"topic '{self.topic}' has no schema version {number}; it has 1 to "
                f"{len(self.versions)}"
            )
        return self.versions[number - 1]

    def of(self, fingerprint: str) -> Version | None:
        """The version with that fingerprint, if the topic has it."""
        return next((v for v in self.versions if v.fingerprint == fingerprint), None)

    def followed_by(self, id_: int, fingerprint: str) -> TopicSchemas:
        """The record with one more version."""
        if len(self.versions) >= VERSIONS_MAX:
            raise SchemaError(
                f"'{self.topic}' has {VERSIONS_MAX:,} schema versions, which is the maximum"
            )
        new = Version(len(self.versions) + 1, id_, fingerprint)
        return dataclasses.replace(self, versions=(*self.versions, new))

    def to_json(self) -> str:
        """The text that is stored."""
        return msgspec.json.encode(self).decode()


# Personal field -> the field that names its person (None: the aggregate), and what is read when it
# was erased.
Marks: TypeAlias = dict[str, tuple[str | None, str]]


@dataclasses.dataclass(frozen=True, slots=True)
class StoreRecord:
    """An event store: its types of events, and the class of its states."""

    store: str
    events: tuple[str, ...] = ()
    state: str | None = None  # "module:Class"; None: it was declared with a function, or without
    # For each event its personal fields, for programs without its class. A mark is never removed:
    # another program may still write the field.
    personal: dict[str, Marks] = dataclasses.field(default_factory=dict)

    def to_json(self) -> str:
        """The text that is stored."""
        return msgspec.json.encode(self).decode()


def read_store(text: bytes) -> StoreRecord:
    """The record of a stored text; DataLoss if it is not one."""
    try:
        return msgspec.json.decode(text, type=StoreRecord)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DataLoss(
            f"a record of the schema registry ('{TABLE}') is not readable: {error}"
        ) from error


def schema_key(fingerprint: str) -> str:
    """The key of a schema in the table."""
    return _SCHEMA + fingerprint


def record_key(topic: str) -> str:
    """The key of a topic's record in the table."""
    return _TOPIC + topic


def event_name(store: str, event: str) -> str:
    """What the record of a type of event is called: the store's name and its own."""
    return f"{store}/{event}"


def event_key(store: str, event: str) -> str:
    """The key of the record of a store's type of event."""
    return _EVENT + event_name(store, event)


def store_key(store: str) -> str:
    """The key of the record of an event store."""
    return _STORE + store


def message_subject(key: str) -> str:
    """The subject of a key's message, for readers that do not use the table."""
    return f"{TABLE}.{key_token(key)}"


def read_record(text: bytes) -> TopicSchemas:
    """The record of a stored text; DataLoss if it is not one."""
    try:
        return msgspec.json.decode(text, type=TopicSchemas)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DataLoss(
            f"a record of the schema registry ('{TABLE}') is not readable: {error}"
        ) from error


def read_schema(id_: int, subject: str, text: bytes, fingerprint: str | None = None) -> Schema:
    """The schema in the message at offset `id_`; it must be the one that was registered."""
    prefix = f"{TABLE}.{_SCHEMA}"
    if not subject.startswith(prefix):
        raise SchemaNotFound(f"there is no schema with id {id_}: check the source of the id")
    if fingerprint is not None and subject != prefix + fingerprint:
        raise DataLoss(
            f"schema id {id_} is not the schema that was registered under it: the registry "
            f"('{TABLE}') was damaged or restored to an earlier state"
        )
    return Schema.from_json(text)


def parse_id(text: str) -> int:
    """The id in a message's header, which any client can write; SchemaNotFound if it is not one."""
    is_number = text.isascii() and text.isdigit() and len(text) <= _ID_DIGITS
    id_ = int(text) if is_number else 0
    if not id_:
        raise SchemaNotFound(f"{text!r:.40} is not the id of a schema")
    return id_


def record_query(key: str) -> dict[str, str]:
    """Which message of the table holds the record with that key."""
    return {"last_by_subj": message_subject(key)}


def record_of(message: StoredMessage | None) -> TopicSchemas | None:
    """The record in that message; None when the topic never had one or it was deleted."""
    if message is None or is_deletion(message.headers):
        return None
    return read_record(message.payload)


def schema_of(id_: int, message: StoredMessage | None, fingerprint: str | None = None) -> Schema:
    """The schema in the message at offset `id_`; SchemaNotFound when there is no such message."""
    if message is None:
        raise SchemaNotFound(f"there is no schema with id {id_} in the registry ('{TABLE}')")
    return read_schema(id_, message.subject, message.payload, fingerprint)


def new_record(topic: str, format_: str | None, mode: Mode | str | None) -> TopicSchemas:
    """A record without versions."""
    chosen = "json" if format_ is None else format_
    if chosen not in WIRE_FORMATS:
        raise ConfigError(f"wire format {chosen!r}: choose one of {', '.join(WIRE_FORMATS)}")
    return TopicSchemas(topic, chosen, parse_mode(mode or Mode.BACKWARD))


def next_version(record: TopicSchemas, olds: Sequence[Schema], schema: Schema) -> Schema:
    """The schema as it would be registered next; refused when it may not follow.

    In a Protobuf topic, fields without numbers get permanent ones.
    """
    numbered = with_numbers(record.format, olds, schema)
    if record.of(numbered.fingerprint) is not None:
        return numbered
    make_codec(numbered, record.format)  # refuses what the wire format cannot hold
    problems = check(numbered, olds, record.mode)
    if problems:
        raise Incompatible(record.topic, record.mode, problems)
    return numbered


def problems_of(
    record: TopicSchemas, olds: Sequence[Schema], schema: Schema, mode: Mode | str | None = None
) -> list[Problem]:
    """Why a schema may not follow, under the topic's mode or another; empty if it may."""
    numbered = with_numbers(record.format, olds, schema)
    if record.of(numbered.fingerprint) is not None:
        return []
    make_codec(numbered, record.format)
    return check(numbered, olds, record.mode if mode is None else mode)


def with_numbers(format_: WireFormat, olds: Sequence[Schema], schema: Schema) -> Schema:
    """The schema with a number for every field, if the wire format uses numbers."""
    if format_ != "protobuf":
        return schema
    pinned = pin_numbers(schema.record, [old.record for old in olds])
    return schema if pinned == schema.record else Schema(pinned, schema.origin)


def matching(
    record: TopicSchemas, schemas: Sequence[Schema], schema: Schema
) -> tuple[Version, Schema] | None:
    """The newest version that has the same fields as a schema, and its own schema."""
    numbered = with_numbers(record.format, schemas, schema)
    exact = record.of(numbered.fingerprint)
    pairs = list(zip(record.versions, schemas, strict=True))
    for version, found in reversed(pairs):
        if version == exact or (exact is None and _same_values(found, schema)):
            return version, found
    return None


def _same_values(ours: Schema, theirs: Schema) -> bool:
    """Whether two schemas have the same fields; field numbers and the text do not matter."""
    return _bare(ours.record) == _bare(theirs.record)


def _bare(record: t.Record) -> t.Record:
    fields = tuple(dataclasses.replace(field, number=None) for field in record.fields)
    return dataclasses.replace(record, fields=fields)
