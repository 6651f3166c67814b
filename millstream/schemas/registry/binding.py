"""A topic's values under its schema: checked and encoded when written, resolved when read."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from millstream.deadline import Deadline
from millstream.errors import MillstreamError, PackError, SchemaError, SchemaNotFound, Unfit
from millstream.events.event import SCHEMA_HEADER, Unreadable
from millstream.events.value_type import Copying
from millstream.schemas import types as t
from millstream.schemas.codecs import Codec, WireFormat, make_codec
from millstream.schemas.column_resolution import ColumnResolution
from millstream.schemas.declaration import declare
from millstream.schemas.registry.copies import copies_of
from millstream.schemas.registry.records import TopicSchemas, Version, matching, parse_id
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

# Known versions of one topic; more than a topic can have, so only invalid ids can fill it.
VERSIONS_KEPT: Final = 2000
# An id that could not be fetched is retried after this time, not for every message.
RETRY_SECONDS: Final = 2.0
_MARK: Final = f"\r\n{SCHEMA_HEADER}: ".encode()
# What decoding of foreign bytes may raise.
_UNREADABLE: Final = (MillstreamError, ValueError, OverflowError, LookupError)


class WrittenVersion:
    """Reads values of one version as the reader's type. Compiled on first use."""

    def __init__(
        self, schema: Schema, format_: WireFormat, record: t.Record, make: _Make | None
    ) -> None:
        self.schema = schema
        self._format = format_
        self._record = record  # the reader's type
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

    @cached_property
    def value(self) -> Callable[[bytes], Any]:
        """From one value of the wire format to the reader's type.

        Put together once, of the steps that are needed: it runs for every event.
        """
        load: Callable[[bytes], dict[str, Any]] = self.plain
        if self._resolution.convert is None:
            load = self._codec.decode
        make = self._make
        return load if make is None else lambda data: make(load(data))

    def check(self, data: bytes) -> None:
        """Unfit if the bytes are not a value of this version."""
        self._codec.decode(data)

    def check_pack(self, pack: Pack) -> None:
        """Unfit if an event of the pack is not a value of this version."""
        values = pack.column("value").drop_null()
        if pack.typed:
            self._conformer.conform(values)
        else:
            for data in values.to_pylist():
                self.check(data)

    def column(self, values: pa.StructArray) -> pa.StructArray:
        """A column of a pack, checked: another writer may have written it."""
        written = values.drop_null() if values.null_count else values
        if written.type != self._conformer.type:
            written = self._conformer.conform(written)
        resolved = self._columns.column(written)
        return resolved if not values.null_count else _spread(resolved, values.is_valid())


class TypedValues:
    """The values of one topic: written as one version, any version read as the reader's.

    Values are dicts, or objects of the given class.
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

    @cached_property
    def copies(self) -> Copying | None:
        """How values are copied without their bytes; None: they have to be encoded and decoded."""
        read, written = self.reader_schema.record, self.schema.record
        same = [(f.name, f.type) for f in read.fields] == [(f.name, f.type) for f in written.fields]
        return copies_of(self.cls, read) if self.cls is not None and same else None

    # -- writing --------------------------------------------------------------------------

    def encode(self, value: object) -> bytes:
        """One value in the topic's wire format; Unfit when it does not fit."""
        return self._codec.encode(value)

    def parse(self, text: bytes) -> dict[str, Any]:
        """A value given as JSON text, to be published; Unfit when it does not fit."""
        return self._parser.decode(text)

    def column(self, values: Sequence[object]) -> pa.StructArray:
        """Many values as a column of a pack; Unfit names row and field."""
        return _column(self._builder, values)

    def conform(self, values: pa.StructArray) -> pa.StructArray:
        """A column of Arrow data in the topic's type; Unfit when it does not fit."""
        return self._conformer.conform(values)

    # -- reading --------------------------------------------------------------------------

    async def learn(self, messages: Iterable[RawMessage]) -> None:
        """Fetch the versions named in these messages that are not known yet."""
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
            self._keep(schema_id, await self._fetch(parse_id(schema_id)))
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
        """How to read values of a version; None: the topic's latest."""
        if schema_id is None:
            return self.current
        known = self._known.get(schema_id)
        if known is not None:
            return known
        why = self._missing.get(schema_id)
        if why is not None and not isinstance(why[1], SchemaError):
            raise why[1].with_traceback(None)  # the broker did not answer: it may be there
        reason = "it was not looked up" if why is None else str(why[1])
        raise SchemaNotFound(
            f"a value of topic '{self._topic}' was written with schema id {schema_id!r:.40}, which "
            f"is not available: {reason}"
        )

    def decode(self, data: bytes, schema_id: str | None) -> Any:
        """One value that was written with the given version, as the reader's type."""
        known = self._known.get(schema_id) if schema_id is not None else None
        return (known or self.written(schema_id)).value(data)

    def resolve(self, values: pa.StructArray, schema_id: str | None) -> pa.StructArray:
        """A column of the given version, resolved; unchanged parts are not copied."""
        return self.written(schema_id).column(values)

    def read_column(self, payloads: Sequence[tuple[bytes | None, str | None]]) -> pa.StructArray:
        """Single values (payload, schema id) as a column, resolved to the reader's version."""
        values = [
            None if data is None else self.written(schema_id).plain(data)
            for data, schema_id in payloads
        ]
        return _column(self._reader_builder, values)

    def values(self, pack: Pack) -> Sequence[Any]:
        """The values of a pack; one that cannot be read raises when it is accessed."""
        if not pack.count:
            return ()
        values = pack.column("value")
        if not pack.typed:
            return [self._decoded(data, pack.schema_id) for data in values.to_pylist()]
        try:
            return self._reader.read(self.resolve(values, pack.schema_id))
        except _UNREADABLE:
            return [self._one(values.slice(row, 1), pack.schema_id) for row in range(pack.count)]

    def _one(self, value: pa.StructArray, schema_id: str | None) -> Any:
        """One row on its own, because another row of the pack cannot be read."""
        try:
            return self._reader.read(self.resolve(value, schema_id))[0]
        except _UNREADABLE as error:
            return Unreadable(_ours(error, self._topic))

    def _decoded(self, data: bytes | None, schema_id: str | None) -> Any:
        try:
            return None if data is None else self.decode(data, schema_id)
        except _UNREADABLE as error:
            return Unreadable(_ours(error, self._topic))


class RawValues:
    """The values of a topic with a schema as they are stored, for tools; read-only."""

    def __init__(self, topic: str) -> None:
        self._topic = topic

    @property
    def schema_id(self) -> str:
        """Refused: there is no schema to write with."""
        raise self._refusal()

    @property
    def copies(self) -> Copying | None:
        """None: bytes are bytes."""
        return None

    def _refusal(self) -> SchemaError:
        return SchemaError(
            f"topic '{self._topic}' has a schema and was opened with type=bytes, which is "
            f"read-only. Open it without type=bytes to write"
        )

    def encode(self, value: object) -> bytes:
        """Refused: the value would not be checked."""
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

    def values(self, pack: Pack) -> Sequence[Any]:
        """The values as the pack has them; one that Python cannot hold is Unreadable."""
        try:
            return pack.values()
        except PackError:
            return [self._one(pack, row) for row in range(pack.count)]

    @staticmethod
    def _one(pack: Pack, row: int) -> Any:
        try:
            return pack.event(row)[-1]
        except PackError as error:
            return Unreadable(error)

    def resolve(self, values: pa.StructArray, schema_id: str | None) -> pa.StructArray:
        """The column as the pack has it."""
        return values


def _choose(
    record: TopicSchemas, schemas: Sequence[Schema], cls: type | None
) -> tuple[Version, Schema, Schema]:
    """The version to write and its schema, and the schema to read as."""
    if cls is None:
        return record.latest, schemas[-1], schemas[-1]
    # Only the fields of the class matter, not its name.
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
    """A column of the values; None, an event without a value, becomes null."""
    try:
        return builder.build(values)
    except Unfit:
        present = [value for value in values if value is not None]
        if len(present) == len(values):
            raise

    there = pa.array([value is not None for value in values])
    return _spread(builder.build(present), there)


def _spread(values: pa.StructArray, there: Any) -> pa.StructArray:
    """The values in the rows where `there` is true, null in the others."""
    indices = pc.subtract(pc.cumulative_sum(there.cast(pa.int64())), 1)
    return values.take(pc.if_else(there, indices, pa.scalar(None, pa.int64())))
