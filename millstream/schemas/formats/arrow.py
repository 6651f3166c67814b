"""Schemas declared as an Arrow schema, and any schema as an Arrow schema."""

from __future__ import annotations

import re
from typing import Any, Final

import pyarrow as pa
import pyarrow.types as at

from millstream import errors
from millstream.schemas import canonical
from millstream.schemas import types as t
from millstream.schemas.arrow_types import arrow_field

__all__ = ["from_arrow", "to_arrow"]

FORMAT: Final = "Arrow"
# Schema metadata with what Arrow's types cannot express (symbols, defaults, docs, aliases).
METADATA: Final = b"millstream.schema"


def to_arrow(record: t.Record) -> pa.Schema:
    """The Arrow schema of a record; with its metadata `from_arrow` returns the same record."""
    fields = [arrow_field(field.name, field.type) for field in record.fields]
    return pa.schema(fields, metadata={METADATA: canonical.dump(record).encode()})


def from_arrow(schema: pa.Schema | pa.StructType, name: str = "record") -> t.Record:
    """The record of an Arrow schema or struct type; nullable columns default to null."""
    fields = [schema.field(i) for i in range(len(schema.names))]
    kept = (schema.metadata or {}).get(METADATA) if isinstance(schema, pa.Schema) else None
    if kept is not None:
        record = canonical.load(kept)
        # If columns were added or cast since it was written, the columns count.
        if isinstance(record, t.Record) and pa.schema(fields).equals(
            to_arrow(record), check_metadata=False
        ):
            return record
    return _record(name, fields, "", 0)


def _record(name: str, fields: list[Any], path: str, depth: int) -> t.Record:
    out = []
    for field in fields:
        where = f"{path}.{field.name}" if path else field.name
        type_ = _from_field(field, where, f"{name}_{_plain(field.name)}", depth)
        out.append(t.Field(field.name, type_, None if field.nullable else t.MISSING))
    return t.Record(name, tuple(out))


def _plain(name: str) -> str:
    return re.sub(r"\W", "_", name)


def _from_field(field: Any, path: str, name: str, depth: int) -> t.Type:
    if depth >= t.MAX_DEPTH:
        raise errors.SchemaError(f"the Arrow schema is nested more than {t.MAX_DEPTH} levels deep")
    type_ = _from_type(field.type, path, name, depth + 1)
    return t.Nullable(type_) if field.nullable else type_


def _from_type(arrow: Any, path: str, name: str, depth: int) -> t.Type:
    if at.is_dictionary(arrow):
        # A dictionary is an encoding of a column, not another type.
        return _from_type(arrow.value_type, path, name, depth)
    if at.is_list(arrow) or at.is_large_list(arrow):
        return t.List(_from_field(arrow.value_field, f"{path}[]", f"{name}_item", depth))
    if at.is_map(arrow):
        key = _from_type(arrow.key_type, f"{path}{{}}", name, depth)
        value = _from_field(arrow.item_field, f"{path}{{}}", f"{name}_value", depth)
        return t.Map(value, key)
    if at.is_struct(arrow):
        return _record(name, [arrow.field(i) for i in range(arrow.num_fields)], path, depth)
    leaf = _leaf(arrow)
    if isinstance(leaf, str):
        raise errors.Unmappable(path, str(arrow), FORMAT, leaf)
    return leaf


def _leaf(arrow: Any) -> t.Type | str:
    """The type of a flat Arrow type, or the reason there is none."""
    if at.is_boolean(arrow):
        return t.Bool()
    if at.is_integer(arrow):
        return t.Int(arrow.bit_width, at.is_signed_integer(arrow))
    if at.is_float32(arrow) or at.is_float64(arrow):
        return t.Float(arrow.bit_width)
    if at.is_string(arrow) or at.is_large_string(arrow) or at.is_string_view(arrow):
        return t.String()
    if at.is_fixed_size_binary(arrow):
        return t.Binary(arrow.byte_width)
    if at.is_binary(arrow) or at.is_large_binary(arrow) or at.is_binary_view(arrow):
        return t.Binary()
    if at.is_decimal(arrow):
        if arrow.precision > 38 or not 0 <= arrow.scale <= arrow.precision:
            return "at most 38 digits, with the scale between 0 and the precision"
        return t.Decimal(arrow.precision, arrow.scale)
    if at.is_date32(arrow):
        return t.Date()
    if at.is_temporal(arrow):
        return _temporal(arrow)
    if getattr(arrow, "extension_name", "") == "arrow.uuid":
        return t.Uuid()
    return "the model has no such type"


def _temporal(arrow: Any) -> t.Type | str:
    if at.is_date64(arrow):
        return "cast the column to date32"
    unit: Any = getattr(arrow, "unit", "")
    if unit not in ("us", "ms"):
        return f"times have the unit us or ms, not {unit or 'this one'}; cast the column to us"
    if at.is_timestamp(arrow):
        if arrow.tz not in (None, "UTC", "Etc/UTC", "+00:00"):
            return f"the zone {arrow.tz} would be lost; cast the column to UTC"
        return t.Timestamp(arrow.tz is not None, unit)
    if at.is_time(arrow):
        return t.Time(unit)
    if at.is_duration(arrow) and unit == "us":
        return t.Duration()
    return "cast the column to the unit us"
