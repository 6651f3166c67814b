"""A topic's values under its schema: checked and encoded on the way in, resolved on the way out."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from millstream.deadline import Deadline
from millstream.errors import MillstreamError, SchemaError, SchemaNotFound, Unfit
from millstream.events.event import SCHEMA_HEADER, Unreadable
from millstream.schemas import types as t
from millstream.schemas.codecs import Codec, WireFormat, make_codec
from millstream.schemas.column_resolution import ColumnResolution
from millstream.schemas.declaration import declare
from millstream.schemas.registry.records import TopicSchemas, Version, matching
from millstream.schemas.resolution import Resolution, refuse_mismatches
from millstream.schemas.schema import Schema
from millstream.schemas.values.columns import ColumnBuilder
from millstream.schemas.values.conform import Conformer
from millstream.schemas.values.rows import RowReader, object_maker
from millstream.wire.message import RawMessage

if TYPE_CHECKING:
    from millstream.events.packs.pack import Pack

__all__ = ["Fetch", "RawValues", "TypedValues", "WrittenVersion"]

Fetch = Callable[[int], Awaitable[Schema]]
_Make = Callable[[dict[str, Any]], Any]

# Versions met in one topic; more than a topic can have, so only made-up ids fill it.
VERSIONS_KEPT: Final = 2000
# An id that could not be fetched is asked for again after this time, not with every message.
RETRY_SECONDS: Final = 2.0
_MARK: Final = f"\r\n{SCHEMA_HEADER}: ".encode()
# What decoding bytes of unknown origin may raise besides our own errors.
_STUMBLES: Final = (MillstreamError, ValueError, OverflowError, LookupError)


class WrittenVersion:
    """How values of one version are read as a reader wants them. Nothing is compiled unused."""

    def __init__(
        self, schema: Schema, format_: WireFormat, record: t.Record, make: _Make | None
    ) -> None:
        self.schema = schema
        self._format = format_
        self._record = record  # what the reader wants
        self._make = make  # from a plain value to the reader's class; None: it stays a dict

    @cached_property
    def _codec(self) -> Codec:
        return make_codec(self.schema, self._format)

    @cached_property
    def _resolution(self) -> Resolution:
        return Resolution(self.schema.record, self._record)

    @cached_property
    def _columns(self) -> ColumnResolution:
        return ColumnResolution(self.schema.record, self._record)

    @cached_property
    def _conformer(self) -> Conformer:
        return Conformer(self.schema.record)

    def plain(self, data: bytes) -> dict[str, Any]:
        """One value of the wire format, resolved, as a dict."""
        return self._resolution.value(self._codec.decode(data))

    def value(self, data: bytes) -> Any:
        """One value of the wire format, as the reader wants it."""
        plain = self.plain(data)
        return plain if self._make is None else self._make(plain)

    def check(self, data: bytes) -> None:
        """Refuse bytes that are no value of this version; Unfit says why."""
        self._codec.decode(data)

    def column(self, values: pa.StructArray) -> pa.StructArray:
        """A column of a pack; what another writer may have put there is checked."""
        written = values.drop_null() if values.null_count else values
        if written.type != self._conformer.type:
            written = self._conformer.conform(written)
        resolved = self._columns.column(written)
        return resolved if not values.null_count else _spread(resolved, values.is_valid())


class TypedValues:
    """The values of one topic: written as one version, read as the reader's, whoever wrote them.

    Values come as dicts, or as objects of the class that was given.
    """

    def __init__(
        self,
        record: TopicSchemas,
        schemas: Sequence[Schema],
        fetch: Fetch,
        cls: type | None = None,
    ) -> None:
        self.format: WireFormat = record.format
        self.cls = cls
        self._topic = record.topic
        self._fetch = fetch
        self.version, self.schema, reader = _choose(record, schemas, cls)
        self.schema_id = str(self.version.id)
        self.reader_schema = reader
        self._reader = RowReader(reader.record, cls)
        self._make = None if cls is None else object_maker(cls, reader.record)
        self._codec = make_codec(self.schema, record.format)
        self._builder = ColumnBuilder(self.schema.record)
        self._conformer = Conformer(self.schema.record)
        self._known: dict[str, WrittenVersion] = {}
        self._missing: dict[str, tuple[Deadline, MillstreamError]] = {}
        self._seen: set[bytes] = set()
        self.current = self._version(schemas[-1])
        for version, schema in zip(record.versions, schemas, strict=True):
            self._keep(str(version.id), schema)

    @cached_property
    def _reader_builder(self) -> ColumnBuilder:
        return ColumnBuilder(self.reader_schema.record)

    @cached_property
    def _parser(self) -> Codec:
        return make_codec(self.schema, "json")

    # -- writing --------------------------------------------------------------------------

    def encode(self, value: object) -> bytes:
        """One value in the topic's wire format; Unfit when it does not fit."""
        return self._codec.encode(value)

    def parse(self, text: bytes) -> dict[str, Any]:
        """A value that people wrote as JSON, to be published; Unfit when it does not fit."""
        return self._parser.decode(text)

    def column(self, values: Sequence[object]) -> pa.StructArray:
        """Many values as a column of a pack; Unfit names row and field."""
        return _column(self._builder, values)

    def conform(self, values: pa.StructArray) -> pa.StructArray:
        """A column that came as Arrow data, in the topic's type; Unfit when it does not fit."""
        return self._conformer.conform(values)

    # -- reading --------------------------------------------------------------------------

    async def learn(self, messages: Iterable[RawMessage]) -> None:
        """Fetch the versions these messages name that are not known yet."""
        seen = self._seen
        for raw in messages:
            block = raw.headers
            at = block.find(_MARK)
            if at < 0:
                continue
            name = block[at + len(_MARK) : block.find(b"\r\n", at + len(_MARK))]
            if name not in seen:
                await self._fetch_one(name.decode("utf-8", "replace"))

    async def _fetch_one(self, schema_id: str) -> None:
        missing = self._missing.get(schema_id)
        if missing is not None and not missing[0].passed:
            return
        try:
            if not schema_id.isascii() or not schema_id.isdigit():
                raise SchemaNotFound(f"{schema_id!r:.40} is not the id of a schema")
            self._keep(schema_id, await self._fetch(int(schema_id)))
        except MillstreamError as error:
            if len(self._missing) >= VERSIONS_KEPT:
                self._missing.clear()
            self._missing[schema_id] = (Deadline(RETRY_SECONDS), error)

    def _keep(self, schema_id: str, schema: Schema) -> None:
        if len(self._known) >= VERSIONS_KEPT:
            self._known.clear()
            self._seen.clear()
        self._known[schema_id] = self._version(schema)
        self._seen.add(schema_id.encode())

    def _version(self, schema: Schema) -> WrittenVersion:
        return WrittenVersion(schema, self.format, self.reader_schema.record, self._make)

    def written(self, schema_id: str | None) -> WrittenVersion:
        """How to read what was written with a version; None: with the topic's latest."""
        if schema_id is None:
            return self.current
        known = self._known.get(schema_id)
        if known is not None:
            return known
        why = self._missing.get(schema_id)
        reason = "it was not looked up" if why is None else str(why[1])
        raise SchemaNotFound(
            f"a value of topic '{self._topic}' was written with schema id {schema_id!r:.40}, which "
            f"cannot be had: {reason}"
        )

    def decode(self, data: bytes, schema_id: str | None) -> Any:
        """One value as written with the given version, as the reader wants it."""
        return self.written(schema_id).value(data)

    def resolve(self, values: pa.StructArray, schema_id: str | None) -> pa.StructArray:
        """A column as written with the given version, resolved without copying what is the same."""
        return self.written(schema_id).column(values)

    def read_column(self, payloads: Sequence[tuple[bytes | None, str | None]]) -> pa.StructArray:
        """Single values (payload, schema id) as a column, resolved to the reader's version."""
        values = [
            None if data is None else self.written(schema_id).plain(data)
            for data, schema_id in payloads
        ]
        return _column(self._reader_builder, values)

    def rows(self, pack: Pack) -> Iterable[tuple[Any, ...]]:
        """The events of a pack; a value that cannot be read raises when it is asked for."""
        return zip(
            pack.keys(),
            pack.timestamps(),
            pack.headers(),
            pack.ids(),
            self._values(pack),
            strict=True,
        )

    def _values(self, pack: Pack) -> Sequence[Any]:
        if not pack.count:
            return ()
        values = pack.column("value")
        if not pack.typed:
            return [self._decoded(data, pack.schema_id) for data in values.to_pylist()]
        try:
            return self._reader.read(self.resolve(values, pack.schema_id))
        except _STUMBLES:
            return [self._one(values.slice(row, 1), pack.schema_id) for row in range(pack.count)]

    def _one(self, value: pa.StructArray, schema_id: str | None) -> Any:
        """One row alone, because one of its neighbours cannot be read."""
        try:
            return self._reader.read(self.resolve(value, schema_id))[0]
        except _STUMBLES as error:
            return Unreadable(_ours(error, self._topic))

    def _decoded(self, data: bytes | None, schema_id: str | None) -> Any:
        try:
            return None if data is None else self.decode(data, schema_id)
        except _STUMBLES as error:
            return Unreadable(_ours(error, self._topic))


class RawValues:
    """The values of a topic with a schema as they are stored, for tools; nothing can be written."""

    def __init__(self, topic: str) -> None:
        self._topic = topic

    @property
    def schema_id(self) -> str:
        """There is none to write with."""
        raise self._refusal()

    def _refusal(self) -> SchemaError:
        return SchemaError(
            f"topic '{self._topic}' has a schema and was opened with type=bytes, which is for "
            f"reading what is stored. Open it without to write"
        )

    def encode(self, value: object) -> bytes:
        """Refused: nobody would check the value."""
        raise self._refusal()

    def parse(self, text: bytes) -> Any:
        """Refused like `encode`."""
        raise self._refusal()

    def column(self, values: object) -> Any:
        """Refused like `encode`."""
        raise self._refusal()

    def conform(self, values: object) -> Any:
        """Refused like `encode`."""
        raise self._refusal()

    async def learn(self, messages: object) -> None:
        """No version is needed."""

    def decode(self, data: bytes, schema_id: str | None) -> bytes:
        """The payload."""
        return data

    def read_column(self, payloads: Sequence[tuple[bytes | None, str | None]]) -> Any:
        """The payloads as a binary column."""
        return pa.array([data for data, _ in payloads], pa.binary())

    def rows(self, pack: Pack) -> Iterable[tuple[Any, ...]]:
        """The events as the pack has them."""
        return pack.events()

    def resolve(self, values: pa.StructArray, schema_id: str | None) -> pa.StructArray:
        """The column as the pack has it."""
        return values


def _choose(
    record: TopicSchemas, schemas: Sequence[Schema], cls: type | None
) -> tuple[Version, Schema, Schema]:
    """The version to write and its schema, and the schema to read as."""
    if cls is None:
        return record.latest, schemas[-1], schemas[-1]
    # Objects are made by their fields: what the class is called does not matter.
    reader = declare(cls, name=schemas[-1].record.name, drop_constraints=True)
    refuse_mismatches(schemas[-1].record, reader.record)
    found = matching(record, schemas, reader)
    if found is None:
        return record.latest, schemas[-1], reader
    return found[0], found[1], reader


def _ours(error: Exception, topic: str) -> Exception:
    if isinstance(error, MillstreamError):
        return error
    return SchemaError(f"a value of topic '{topic}' cannot be read: {error}")


def _column(builder: ColumnBuilder, values: Sequence[object]) -> pa.StructArray:
    """A column of the values; None among them, an event without a value, is null."""
    try:
        return builder.build(values)
    except Unfit:
        present = [value for value in values if value is not None]
        if len(present) == len(values):
            raise

    there = pa.array([value is not None for value in values])
    return _spread(builder.build(present), there)


def _spread(values: pa.StructArray, there: Any) -> pa.StructArray:
    """The values at the places that are there, null at the others."""
    places = pc.subtract(pc.cumulative_sum(there.cast(pa.int64())), 1)
    return values.take(pc.if_else(there, places, pa.scalar(None, pa.int64())))
