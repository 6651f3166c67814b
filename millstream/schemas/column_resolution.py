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
from millstream.schemas.resolution import matching_field, refuse_mismatches, value_turn
from millstream.schemas.values.columns import builder_for
from millstream.schemas.values.fit import fresh
from millstream.schemas.values.rows import reader_for

__all__ = ["ColumnResolution"]

_Turn: TypeAlias = Callable[[Any], Any]


class ColumnResolution:
    """Turns struct arrays of the writer's record into the reader's."""

    def __init__(self, writer: t.Record, reader: t.Record) -> None:
        refuse_mismatches(writer, reader)
        self._column = _column_turn(writer, reader)

    def column(self, array: pa.StructArray) -> pa.StructArray:
        """A struct array of the writer as one of the reader; unchanged columns are not copied."""
        return array if self._column is None else self._column(array)


def _column_turn(writer: t.Type, reader: t.Type) -> _Turn | None:
    """A function on Arrow arrays, or None where they stay as they are."""
    writer, _ = t.strip(writer)
    reader, _ = t.strip(reader)
    if isinstance(writer, t.Union) or isinstance(reader, t.Union):
        return None if writer == reader else _by_values(writer, reader)
    match writer, reader:
        case t.Record(), t.Record():
            return _struct_turn(writer, reader)
        case (t.List(), t.List()) | (t.Map(), t.Map()):
            return _nested_turn(writer, reader)
        case t.Enum(), t.Enum():
            return None if value_turn(writer, reader) is None else _enum_turn(reader)
        case _:
            target = arrow_type(reader)
            return None if arrow_type(writer) == target else lambda array: array.cast(target)


def _by_values(writer: t.Type, reader: t.Type) -> _Turn:
    """The slow but general way: to Python values, turned one by one, and back."""
    read = reader_for(writer)
    turn = value_turn(t.Nullable(writer), t.Nullable(reader))
    build = builder_for(t.Nullable(reader))

    def turn_column(array: Any) -> Any:
        values = read(array)
        return build(values if turn is None else [turn(value) for value in values])

    return turn_column


def _enum_turn(reader: t.Enum) -> _Turn:
    known = pa.array(reader.symbols, pa.string())
    default = pa.scalar(reader.default, pa.string())

    def turn(array: Any) -> Any:
        keep = pc.or_(pc.is_in(array, known), pc.is_null(array))
        return pc.if_else(keep, array, default)

    return turn


def _mask(array: Any) -> Any:
    return array.is_null() if array.null_count else None


def _struct_turn(writer: t.Record, reader: t.Record) -> _Turn | None:
    if arrow_type(writer) == arrow_type(reader) and value_turn(writer, reader) is None:
        return None
    places = {field.name: index for index, field in enumerate(writer.fields)}
    plan: list[tuple[int | None, _Turn | None, Any]] = []
    for field in reader.fields:
        source = matching_field(field, writer)
        if source is None:
            plan.append((None, None, builder_for(field.type)([fresh(field.default)])))
        else:
            plan.append((places[source.name], _column_turn(source.type, field.type), None))
    fields = list(arrow_type(reader))

    def turn_struct(array: Any) -> Any:
        columns = []
        for place, turn, one in plan:
            if place is None:
                columns.append(one.take(pa.repeat(pa.scalar(0, pa.int64()), len(array))))
            else:
                child = array.field(place)
                columns.append(child if turn is None else turn(child))
        return pa.StructArray.from_arrays(columns, fields=fields, mask=_mask(array))

    return turn_struct


def _nested_turn(writer: t.Type, reader: t.Type) -> _Turn | None:
    target = arrow_type(reader)
    is_map = isinstance(writer, t.Map) and isinstance(reader, t.Map)
    if isinstance(writer, t.Map) and isinstance(reader, t.Map):
        inner = _column_turn(writer.value, reader.value)
    elif isinstance(writer, t.List) and isinstance(reader, t.List):
        inner = _column_turn(writer.item, reader.item)
    else:
        inner = None
    if inner is None and arrow_type(writer) == target:
        return None

    def turn_nested(array: Any) -> Any:
        if array.offset and array.null_count:
            # Arrow refuses a mask beside offsets that do not start at their buffer.
            array = array.take(pa.array(range(len(array)), pa.int64()))
        turned = array.items if is_map else array.values
        turned = turned if inner is None else inner(turned)
        if is_map:
            parts = (array.offsets, array.keys, turned)
            return pa.MapArray.from_arrays(*parts, type=target, mask=_mask(array))
        return pa.ListArray.from_arrays(array.offsets, turned, type=target, mask=_mask(array))

    return turn_nested
