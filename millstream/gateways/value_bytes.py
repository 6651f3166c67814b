"""One version of a schema in one format: columns of its values to bytes, and bytes to columns.

Pure. A value that does not fit is refused with its row.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Final

import msgspec
import pyarrow as pa

from millstream.errors import MillstreamError, Unfit
from millstream.events.packs.rows import to_python
from millstream.gateways.avro_columns import AvroColumns
from millstream.schemas import (
    ColumnBuilder,
    Conformer,
    RowReader,
    Schema,
    WireFormat,
)
from millstream.schemas import types as t
from millstream.schemas.formats.avro_wire import AvroWire
from millstream.schemas.formats.json_columns import JsonColumns, NotFast
from millstream.schemas.formats.json_wire import JsonWire
from millstream.schemas.formats.protobuf_wire import ProtobufWire
from millstream.schemas.values.fit import jsonable

__all__ = ["VersionBytes", "added_bytes", "plain_texts", "spread"]

# Below this, starting Arrow's and numpy's functions takes longer than it saves.
_MANY_TEXTS: Final = 512
_MANY: Final = 100
_LOT_BYTES: Final = 1024 * 1024
# What reading a column of another writer may raise.
_UNREADABLE: Final = (MillstreamError, ValueError, OverflowError, LookupError, TypeError)

_encode_lines: Final = msgspec.json.Encoder().encode_lines


class VersionBytes:
    """Reads and writes the values of one version; SchemaError if the format cannot hold them."""

    def __init__(self, schema: Schema, format_: WireFormat) -> None:
        self.schema = schema
        self.format = format_
        self._wire: JsonWire | AvroWire | ProtobufWire
        match format_:
            case "json":
                self._wire = JsonWire(schema)
            case "avro":
                self._wire = AvroWire(schema)
            case "protobuf":
                self._wire = ProtobufWire(schema)
        # Of a Protobuf message, as registries number it.
        self.message_path = self._wire.path if isinstance(self._wire, ProtobufWire) else ()

    @cached_property
    def _builder(self) -> ColumnBuilder:
        return ColumnBuilder(self.schema.record)

    @cached_property
    def _reader(self) -> RowReader:
        return RowReader(self.schema.record)

    @cached_property
    def _conformer(self) -> Conformer:
        return Conformer(self.schema.record)

    @cached_property
    def _json(self) -> JsonColumns:
        return JsonColumns(self.schema)

    @cached_property
    def _avro(self) -> AvroColumns | None:
        try:
            return AvroColumns(self.schema)
        except NotFast:
            return None

    # -- from bytes -----------------------------------------------------------------------

    def load(self, data: bytes) -> dict[str, Any]:
        """The plain value in the bytes; Unfit if it does not fit."""
        return self._wire.load(data)

    def column(self, values: Sequence[bytes]) -> pa.StructArray:
        """The values as a column; Unfit with the row of one that does not fit."""
        if len(values) >= (_MANY_TEXTS if self.format == "json" else _MANY):
            try:
                found = self._fast_column(values)
            except (NotFast, pa.ArrowException, UnicodeDecodeError, Unfit):
                found = None  # the format's own reader decides, and words the refusal
            if found is not None:
                return found
        load = self._wire.load if isinstance(self._wire, JsonWire) else self._wire.load_unchecked
        built: list[pa.StructArray] = []
        rows: list[Any] = []
        first = size = 0
        for row, value in enumerate(values):
            try:
                rows.append(load(value))
            except Unfit as error:
                raise _at(row, error) from None
            size += len(value)
            if size > _LOT_BYTES:  # objects take up to a hundred times a value's size
                built.append(self._build(rows, first))
                rows, size, first = [], 0, row + 1
        built.append(self._build(rows, first))
        return built[0] if len(built) == 1 else pa.concat_arrays(built)

    def _build(self, rows: list[Any], first: int) -> pa.StructArray:
        try:
            return self._builder.build(rows)
        except Unfit as error:
            raise _at(first + (error.row or 0), error) from None

    def _fast_column(self, values: Sequence[bytes]) -> pa.StructArray | None:
        if self.format == "json":
            block = b"\n".join([*values, b""])
            # Texts of several lines are read one by one.
            one_each = block.count(b"\n") == len(values)
            return self._json.column(block, len(values)) if one_each else None
        if self._avro is None or self.format != "avro":
            return None
        return self._conformer.conform(self._avro.column(values))

    # -- to bytes -------------------------------------------------------------------------

    def dump(self, plain: dict[str, Any]) -> bytes:
        """The bytes of a plain value; Unfit if the format cannot hold it."""
        return self._wire.dump(plain)

    def conform(self, column: pa.StructArray) -> pa.StructArray:
        """A column of a pack as one of this version; Unfit when it does not fit."""
        return column if column.type == self._conformer.type else self._conformer.conform(column)

    def rows(self, column: pa.StructArray, prefix: bytes = b"") -> list[bytes | None]:
        """The bytes of every value of a column of this version, after a prefix; None: null.

        A value that the format or Python cannot hold, which only other writers store, is given as
        JSON text without prefix. JSON has null where a number is not finite.
        """
        if not column.null_count:
            return list(self._rows(column, prefix))
        present = iter(self._rows(column.drop_null(), prefix))
        return [next(present) if here else None for here in column.is_valid().to_pylist()]

    def _rows(self, column: pa.StructArray, prefix: bytes) -> list[bytes]:
        try:
            return self._all_rows(column, prefix)
        except _UNREADABLE:
            pass
        return [self._row(column.slice(row, 1), prefix) for row in range(len(column))]

    def _row(self, value: pa.StructArray, prefix: bytes) -> bytes:
        try:
            return self._all_rows(value, prefix)[0]
        except _UNREADABLE:
            return plain_texts(value)[0] or b"null"

    def _all_rows(self, column: pa.StructArray, prefix: bytes) -> list[bytes]:
        if self._avro is not None and self.format == "avro" and len(column) >= _MANY:
            try:
                return self._avro.rows(column, prefix)
            except (NotFast, pa.ArrowException):
                pass
        plain = self._reader.read(column)
        if isinstance(self._wire, JsonWire):
            lines = _encode_lines(plain).split(b"\n")[: len(plain)]
            return [prefix + line for line in lines] if prefix else lines
        dump = self._wire.dump_plain
        return [prefix + dump(row) for row in plain] if prefix else list(map(dump, plain))


def _at(row: int, error: Unfit) -> Unfit:
    return Unfit(error.field, error.expected, error.found, row)


def added_bytes(type_: t.Type) -> tuple[int, int]:
    """What defaults may add to a value, and to each item of a list or map in it, in bytes."""
    inner, _ = t.strip(type_)
    match inner:
        case t.Record():
            own = item = 0
            for field in inner.fields:
                if field.default is not t.MISSING and field.default is not None:
                    own += len(msgspec.json.encode(jsonable(field.default)))
                below, below_item = added_bytes(field.type)
                own, item = own + below, max(item, below_item)
            return own, item
        case t.List(item=of) | t.Map(value=of):
            return 0, max(added_bytes(of))
        case t.Union(options):
            found = [added_bytes(option) for option in options]
            return max(own for own, _ in found), max(item for _, item in found)
        case _:
            return 0, 0


def plain_texts(column: pa.Array) -> list[bytes | None]:
    """The values of a column without a schema as JSON texts.

    One that Python cannot hold becomes the text that says so.
    """
    try:
        return [None if value is None else _text(value) for value in to_python(column)]
    except (MillstreamError, ValueError, OverflowError, TypeError) as error:
        if len(column) == 1:
            return [msgspec.json.encode({"unreadable": str(error)})]
    return [plain_texts(column.slice(row, 1))[0] for row in range(len(column))]


def _text(value: Any) -> bytes:
    return msgspec.json.encode(value, enc_hook=str)


def spread(parts: Sequence[tuple[pa.Array, Sequence[int]]], count: int) -> pa.Array:
    """Columns and the rows that each of them has, as one column of `count` rows, null elsewhere."""
    places: list[int | None] = [None] * count
    for place, row in enumerate(row for _, rows in parts for row in rows):
        places[row] = place
    return pa.concat_arrays([part for part, _ in parts]).take(pa.array(places, pa.int64()))
