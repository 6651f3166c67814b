"""Reading Arrow columns that were written with another version of a schema.

The rules are those of `resolution`. Columns that are the same in both versions are not copied.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from millstream.schemas import types as t
from millstream.schemas.arrow_types import arrow_type
from millstream.schemas.resolution import matching_field, refuse_mismatches, value_converter
from millstream.schemas.values.columns import builder_for
from millstream.schemas.values.fit import fresh
from millstream.schemas.values.rows import reader_for

__all__ = ["ColumnResolution"]

_Convert: TypeAlias = Callable[[Any], Any]


class ColumnResolution:
    """Converts struct arrays of the writer's record to the reader's."""

    def __init__(self, writer: t.Record, reader: t.Record) -> None:
        refuse_mismatches(writer, reader)
        self._column = _column_converter(writer, reader)

    def column(self, array: pa.StructArray) -> pa.StructArray:
        """The reader's form of a struct array of the writer."""
        return array if self._column is None else self._column(array)


def _column_converter(writer: t.Type, reader: t.Type) -> _Convert | None:
    """A function on Arrow arrays, or None if they stay the same."""
    writer, _ = t.strip(writer)
    reader, _ = t.strip(reader)
    if isinstance(writer, t.Union) or isinstance(reader, t.Union):
        return None if writer == reader else _by_values(writer, reader)
    match writer, reader:
        case t.Record(), t.Record():
            return _struct_converter(writer, reader)
        case (t.List(), t.List()) | (t.Map(), t.Map()):
            return _nested_converter(writer, reader)
        case t.Enum(), t.Enum():
            return None if value_converter(writer, reader) is None else _enum_converter(reader)
        case _:
            target = arrow_type(reader)
            return None if arrow_type(writer) == target else lambda array: array.cast(target)


def _by_values(writer: t.Type, reader: t.Type) -> _Convert:
    """The slow but general path: to Python values, converted one by one, and back."""
    read = reader_for(writer)
    convert = value_converter(t.Nullable(writer), t.Nullable(reader))
    build = builder_for(t.Nullable(reader))

    def convert_column(array: Any) -> Any:
        values = read(array)
        return build(values if convert is None else [convert(value) for value in values])

    return convert_column


def _enum_converter(reader: t.Enum) -> _Convert:
    known = pa.array(reader.symbols, pa.string())
    default = pa.scalar(reader.default, pa.string())

    def convert(array: Any) -> Any:
        keep = pc.or_(pc.is_in(array, known), pc.is_null(array))
        return pc.if_else(keep, array, default)

    return convert


def _mask(array: Any) -> Any:
    return array.is_null() if array.null_count else None


def _struct_converter(writer: t.Record, reader: t.Record) -> _Convert | None:
    if arrow_type(writer) == arrow_type(reader) and value_converter(writer, reader) is None:
        return None
    indices = {field.name: number for number, field in enumerate(writer.fields)}
    plan: list[tuple[int | None, _Convert | None, Any]] = []
    for field in reader.fields:
        written = matching_field(field, writer)
        if written is None:
            plan.append((None, None, builder_for(field.type)([fresh(field.default)])))
        else:
            plan.append((indices[written.name], _column_converter(written.type, field.type), None))
    fields = list(arrow_type(reader))

    def convert_struct(array: Any) -> Any:
        columns = []
        for index, convert, one in plan:
            if index is None:
                columns.append(one.take(pa.repeat(pa.scalar(0, pa.int64()), len(array))))
            else:
                child = array.field(index)
                columns.append(child if convert is None else convert(child))
        return pa.StructArray.from_arrays(columns, fields=fields, mask=_mask(array))

    return convert_struct


def _nested_converter(writer: t.Type, reader: t.Type) -> _Convert | None:
    target = arrow_type(reader)
    is_map = isinstance(writer, t.Map) and isinstance(reader, t.Map)
    if isinstance(writer, t.Map) and isinstance(reader, t.Map):
        inner = _column_converter(writer.value, reader.value)
    elif isinstance(writer, t.List) and isinstance(reader, t.List):
        inner = _column_converter(writer.item, reader.item)
    else:
        inner = None
    if inner is None and arrow_type(writer) == target:
        return None

    def convert_nested(array: Any) -> Any:
        if array.offset and array.null_count:
            # Arrow refuses a mask with offsets that do not start at the buffer's start.
            array = array.take(pa.array(range(len(array)), pa.int64()))
        converted = array.items if is_map else array.values
        converted = converted if inner is None else inner(converted)
        if is_map:
            parts = (array.offsets, array.keys, converted)
            return pa.MapArray.from_arrays(*parts, type=target, mask=_mask(array))
        return pa.ListArray.from_arrays(array.offsets, converted, type=target, mask=_mask(array))

    return convert_nested
