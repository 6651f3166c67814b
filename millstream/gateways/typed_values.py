"""The values of a topic with a schema as clients send and receive them. Pure.

What a client sends becomes a column of the latest version, or is refused with its row. What is
stored becomes bytes: as the version that it was written with if values have the registry's prefix,
else as the latest one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from typing import Any, Final, NamedTuple, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from millstream.errors import MillstreamError, SchemaError, Unfit
from millstream.events.event import SCHEMA_HEADER, PlainEvent
from millstream.events.packs.pack import Pack
from millstream.gateways.registry_prefix import (
    PREFIX_SIZE,
    has_prefix,
    read_message_path,
    registry_prefix,
)
from millstream.gateways.value_bytes import VersionBytes, added_bytes, plain_texts, spread
from millstream.schemas import Resolution, WireFormat, arrow_type
from millstream.schemas.registry.binding import TypedValues
from millstream.schemas.registry.records import TopicSchemas

__all__ = ["BadValue", "KnownVersions", "schema_id_in"]

_Convert: TypeAlias = Callable[[bytes], bytes]

# Compiled versions; a topic has a handful in use.
_VERSIONS_MAX: Final = 64
# What the defaults of a schema may add to the values of one call.
_ADDED_MAX: Final = 1024**3
_MARK: Final = f"\r\n{SCHEMA_HEADER}: ".encode()
_FIRST_MESSAGE: Final[tuple[int, ...]] = (0,)
_NAMES: Final = {"json": "JSON", "avro": "Avro", "protobuf": "Protobuf"}
# What reading a value of another writer may raise.
_UNREADABLE: Final = (
    SchemaError, ValueError, OverflowError, LookupError, TypeError, pa.ArrowException,
)  # fmt: skip


class BadValue(ValueError):
    """A value that does not fit its topic; nothing of what it came with may be stored."""

    def __init__(self, text: str, row: int) -> None:
        super().__init__(text)
        self.text = text
        self.row = row


class _Group(NamedTuple):
    """Values of one version, without prefix, and the rows that they came in."""

    schema_id: str
    rows: list[int] | range
    values: list[bytes]


def schema_id_in(headers: bytes) -> str | None:
    """The id of the version in the headers of a message.

    >>> schema_id_in(b"NATS/1.0\\r\\nMill-Schema: 12\\r\\n\\r\\n"), schema_id_in(b"")
    ('12', None)
    """
    at = headers.find(_MARK)
    if at < 0:
        return None
    start = at + len(_MARK)
    return headers[start : headers.find(b"\r\n", start)].decode("utf-8", "replace")


class KnownVersions:
    """The versions of a topic's schema, as they were when they were last looked up."""

    def __init__(
        self, record: TopicSchemas, typed: TypedValues, format_: WireFormat, prefix: bool
    ) -> None:
        self.record = record
        self.typed = typed
        self.ids = frozenset(str(version.id) for version in record.versions)
        self.schema_id = typed.schema_id
        self._format = format_
        self._prefix = prefix
        self._type = arrow_type(typed.schema.record)
        self._added = added_bytes(typed.schema.record)
        self._compiled: dict[tuple[str, WireFormat], VersionBytes] = {}
        self._prefixes: dict[str, bytes] = {}
        self._latest = self._version(self.schema_id, format_)

    def _version(self, schema_id: str, format_: WireFormat) -> VersionBytes:
        known = self._compiled.get((schema_id, format_))
        if known is None:
            known = VersionBytes(self.typed.written(schema_id).schema, format_)
            while len(self._compiled) >= _VERSIONS_MAX:
                del self._compiled[next(iter(self._compiled))]
            self._compiled[schema_id, format_] = known
        return known

    # -- from clients ---------------------------------------------------------------------

    def stored(self, columns: pa.RecordBatch) -> pa.RecordBatch:
        """Columns of events whose values are bytes, with values as they are stored.

        BadValue if one does not fit; null stays null.
        """
        column = self._column(columns.column("value"))
        at = columns.schema.get_field_index("value")
        return columns.set_column(at, pa.field("value", column.type), column)

    def _column(self, values: pa.Array) -> pa.StructArray:
        self._check_growth(values)
        marked = pc.any(pc.starts_with(values, b"\0")).as_py()
        if not marked:
            parts = self._parts([self._plain_group(values)])
        elif self._format == "avro" and not self._prefix:
            parts = self._parts_by_trial(values)
        else:
            parts = self._parts(self._groups(values))
        if not parts:
            return pa.nulls(len(values), self._type)
        column, rows = parts[0]
        return column if len(rows) == len(values) else spread(parts, len(values))

    def _check_growth(self, values: pa.Array) -> None:
        own, item = self._added
        size = pc.sum(pc.binary_length(values)).as_py() or 0
        if len(values) * own + size // 2 * item > _ADDED_MAX:
            raise BadValue(
                f"{len(values):,} values of topic '{self.record.topic}': the defaults of its "
                f"schema could make them larger than {_ADDED_MAX:,} bytes; send smaller batches",
                0,
            )

    def _parts(self, groups: Iterable[_Group]) -> list[tuple[pa.StructArray, Sequence[int]]]:
        return [(self._group_column(group), group.rows) for group in groups if group.values]

    def _group_column(self, group: _Group) -> pa.StructArray:
        try:
            column = self._version(group.schema_id, self._format).column(group.values)
            if group.schema_id == self.schema_id:
                return column
            return self.typed.resolve(column, group.schema_id)
        except Unfit as error:
            row = group.rows[error.row or 0]
            raise self._bad(Unfit(error.field, error.expected, error.found), group, row) from None
        except SchemaError as error:  # a version that cannot be read as the latest
            raise self._bad(error, group, group.rows[0]) from None

    def _bad(self, error: SchemaError, group: _Group, row: int) -> BadValue:
        return BadValue(
            f"a value of topic '{self.record.topic}' ({_NAMES[self._format]}, schema id "
            f"{group.schema_id}): {error}",
            row,
        )

    def _plain_group(self, values: pa.Array) -> _Group:
        """Values without prefix: of the latest version."""
        payloads = values.to_pylist()
        if not values.null_count:
            return _Group(self.schema_id, range(len(payloads)), payloads)
        rows = [row for row, data in enumerate(payloads) if data is not None]
        return _Group(self.schema_id, rows, [payloads[row] for row in rows])

    def _groups(self, values: pa.Array) -> Iterable[_Group]:
        """Values by version; those that begin with a zero have the prefix."""
        plain = _Group(self.schema_id, [], [])
        groups: dict[bytes, _Group] = {}
        for row, data in enumerate(values.to_pylist()):
            if data is None:
                continue
            if data[:1] != b"\0" or (self._format == "avro" and not has_prefix(data)):
                _add(plain, row, data)
                continue
            head = data[:PREFIX_SIZE]
            group = groups.get(head)
            if group is None:
                group = groups[head] = _Group(self._named(data, row), [], [])
            _add(group, row, data[self._start(data, group.schema_id, row) :])
        return [plain, *groups.values()]

    def _named(self, data: bytes, row: int) -> str:
        """The version in a prefix; BadValue if the topic has none of that id."""
        topic = self.record.topic
        if not has_prefix(data):
            raise BadValue(
                f"a value of topic '{topic}' begins with a zero, as values with a schema "
                f"registry's prefix do, and has only {len(data)} bytes",
                row,
            )
        schema_id = str(int.from_bytes(data[1:PREFIX_SIZE], "big"))
        if schema_id not in self.ids:
            ids = ", ".join(str(version.id) for version in self.record.versions[-5:])
            advice = (
                ". Avro values without prefix may begin with a zero as well: they need a gateway "
                "whose values have no prefix"
                if self._format == "avro"
                else ""
            )
            raise BadValue(
                f"a value of topic '{topic}' names schema id {schema_id} in its prefix, which is "
                f"no version of the topic's schema; the latest are {ids} (the ids of "
                f"Millstream's registry: millstream schema ls){advice}",
                row,
            )
        return schema_id

    def _start(self, data: bytes, schema_id: str, row: int) -> int:
        """Where the value itself starts."""
        if self._format != "protobuf":
            return PREFIX_SIZE
        if data[PREFIX_SIZE : PREFIX_SIZE + 1] == b"\0":
            path, at = _FIRST_MESSAGE, PREFIX_SIZE + 1
        else:
            try:
                path, at = read_message_path(data)
            except ValueError as error:
                reason = f"its prefix is not that of a Protobuf message: {error}"
                raise BadValue(f"a value of topic '{self.record.topic}': {reason}", row) from None
        wanted = self._version(schema_id, "protobuf").message_path
        if path != wanted:
            raise BadValue(
                f"a value of topic '{self.record.topic}' is message {list(path)} of the schema's "
                f"file, by its prefix; the topic has message {list(wanted)}",
                row,
            )
        return at

    def _parts_by_trial(self, values: pa.Array) -> list[tuple[pa.StructArray, Sequence[int]]]:
        """Avro values that are expected without prefix, and may begin with a zero all the same."""
        plain = self._plain_group(values)
        try:
            return self._parts([plain])
        except BadValue as error:
            refused = error
        own = _Group(self.schema_id, [], [])
        groups: dict[str, _Group] = {}
        for row, data in zip(plain.rows, plain.values, strict=True):
            schema_id = str(int.from_bytes(data[1:PREFIX_SIZE], "big")) if has_prefix(data) else ""
            if schema_id in self.ids and not self._fits(data):
                group = groups.setdefault(schema_id, _Group(schema_id, [], []))
                _add(group, row, data[PREFIX_SIZE:])
            else:
                _add(own, row, data)
        if not groups:
            raise refused
        return self._parts([own, *groups.values()])

    def _fits(self, data: bytes) -> bool:
        try:
            self._latest.load(data)
        except _UNREADABLE:
            return False
        return True

    # -- to clients -----------------------------------------------------------------------

    def pack_values(self, pack: Pack) -> Callable[[pa.Array], list[bytes | None]]:
        """From the value column of a pack to bytes; its version must be known: see `learn`."""
        schema_id = pack.schema_id
        return lambda column: self._pack_rows(column, schema_id)

    def _pack_rows(self, column: pa.Array, schema_id: str | None) -> list[bytes | None]:
        if not pa.types.is_struct(column.type):
            return self._payloads(zip(column.to_pylist(), repeat(schema_id)))
        own_id = schema_id or self.schema_id
        try:
            version, prefix = self._written_as(own_id)
        except SchemaError:
            return plain_texts(column)
        try:
            if self._prefix:
                return version.rows(version.conform(column), prefix)
            return version.rows(self.typed.resolve(column, own_id))
        except _UNREADABLE:
            if len(column) == 1:
                return plain_texts(column)
        rows = range(len(column))
        return [self._pack_rows(column.slice(row, 1), schema_id)[0] for row in rows]

    def _written_as(self, schema_id: str) -> tuple[VersionBytes, bytes]:
        """The version that values of a version are given as, and what comes before them."""
        self.typed.written(schema_id)  # raises why it is not known
        if not self._prefix:
            return self._latest, b""
        version = self._version(schema_id, self._format)
        prefix = self._prefixes.get(schema_id)
        if prefix is None:
            prefix = registry_prefix(int(schema_id), version.message_path)
            if len(self._prefixes) >= _VERSIONS_MAX:
                self._prefixes.clear()
            self._prefixes[schema_id] = prefix
        return version, prefix

    def event_values(self, events: Sequence[PlainEvent]) -> list[bytes | None]:
        """The bytes of events that are a message each; their versions must be known."""
        return self._payloads(
            (None if event.is_deletion else event.data, schema_id_in(event.raw.headers))
            for event in events
        )

    def _payloads(self, given: Iterable[tuple[bytes | None, str | None]]) -> list[bytes | None]:
        converts: dict[str | None, _Convert | None] = {}
        out: list[bytes | None] = []
        for data, schema_id in given:
            if data is None:
                out.append(None)
                continue
            if schema_id not in converts:
                converts[schema_id] = self._conversion(schema_id or self.schema_id)
            convert = converts[schema_id]
            try:
                out.append(data if convert is None else convert(data))
            except (*_UNREADABLE, MillstreamError):
                out.append(data)
        return out

    def _conversion(self, schema_id: str) -> _Convert | None:
        """From a payload of a version to what clients get; None: as it is."""
        try:
            version, prefix = self._written_as(schema_id)
            written = self.typed.written(schema_id)
            if self._format == self.record.format and (prefix or self._same_text(schema_id)):
                return (lambda data: prefix + data) if prefix else None
            dump = version.dump
            if self._prefix:
                load: Callable[[bytes], Any] = self._version(schema_id, self.record.format).load
            else:
                load = written.plain
        except SchemaError:
            return None
        return lambda data: prefix + dump(load(data))

    def _same_text(self, schema_id: str) -> bool:
        """Whether a payload of a version is also one of the latest version."""
        if schema_id == self.schema_id:
            return True
        if self._format != "json":
            return False
        record = self.typed.written(schema_id).schema.record
        return Resolution(record, self.typed.schema.record).convert is None


def _add(group: _Group, row: int, data: bytes) -> None:
    if isinstance(group.rows, list):
        group.rows.append(row)
        group.values.append(data)
