"""Spark: a schema as DDL text, without importing pyspark.

Spark has no unsigned numbers, so they take the next wider type; its TIME is read from Arrow in
nanoseconds. `spark_arrow_type` is the Arrow type Spark expects for the DDL, to which a reader
casts the few columns that differ from a pack's.
"""

from __future__ import annotations

import re
from typing import Final

import pyarrow as pa

from millstream import errors
from millstream.schemas import types as t
from millstream.schemas.arrow_types import arrow_type, member_name

__all__ = ["spark_arrow_type", "spark_type", "to_spark"]

FORMAT: Final = "Spark"
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SIGNED: Final = {8: "tinyint", 16: "smallint", 32: "int", 64: "bigint"}
_UNSIGNED: Final = {8: "smallint", 16: "int", 32: "bigint", 64: "decimal(20,0)"}


def to_spark(record: t.Record, *, nullability: bool = True) -> str:
    """The columns of a record as table DDL: "id bigint NOT NULL COMMENT '...', ...".

    With `nullability=False` every column is left nullable, as most Spark sources declare them.
    """
    _refuse_case_twins(record, "")
    return ", ".join(_column(field, " ", nullability, field.name) for field in record.fields)


def spark_type(type_: t.Type, *, nullability: bool = True, path: str = "") -> str:
    """The Spark type of a type, such as `struct<id: bigint, tags: array<string>>`."""
    match type_:
        case t.Bool():
            return "boolean"
        case t.Int(bits, signed):
            return (_SIGNED if signed else _UNSIGNED)[bits]
        case t.Float(bits):
            return "float" if bits == 32 else "double"
        case t.String() | t.Uuid() | t.Enum():
            return "string"
        case t.Binary():
            return "binary"
        case t.Decimal(precision, scale):
            return f"decimal({precision},{scale})"
        case t.Date():
            return "date"
        case t.Time():
            return "time(6)"
        case t.Timestamp(utc):
            return "timestamp" if utc else "timestamp_ntz"
        case t.Duration():
            return "interval day to second"
        case t.Nullable():
            return spark_type(type_.of, nullability=nullability, path=path)
        case t.List():
            return f"array<{spark_type(type_.item, nullability=nullability, path=f'{path}[]')}>"
        case t.Map():
            key = spark_type(type_.key, nullability=nullability, path=path)
            value = spark_type(type_.value, nullability=nullability, path=f"{path}{{}}")
            return f"map<{key}, {value}>"
        case t.Union():
            options = [spark_type(o, nullability=nullability, path=path) for o in type_.options]
            members = (f"{member_name(i)}: {option}" for i, option in enumerate(options))
            return f"struct<{', '.join(members)}>"
        case t.Record():
            _refuse_case_twins(type_, path)
            columns = (_column(f, ": ", nullability, f"{path}.{f.name}") for f in type_.fields)
            return f"struct<{', '.join(columns)}>"


def _column(field: t.Field, separator: str, nullability: bool, path: str) -> str:
    text = f"{_quoted(field.name)}{separator}"
    text += spark_type(field.type, nullability=nullability, path=path)
    if nullability and not isinstance(field.type, t.Nullable):
        text += " NOT NULL"
    if field.doc:
        doc = field.doc.replace("\\", "\\\\").replace("'", "\\'")
        text += f" COMMENT '{doc}'"
    return text


def _quoted(name: str) -> str:
    return name if _IDENTIFIER.fullmatch(name) else "`" + name.replace("`", "``") + "`"


def _refuse_case_twins(record: t.Record, path: str) -> None:
    """Refuse names that differ only in case: Spark ignores case by default."""
    seen: dict[str, str] = {}
    for field in record.fields:
        other = seen.setdefault(field.name.casefold(), field.name)
        if other != field.name:
            raise errors.Unmappable(
                f"{path}.{field.name}" if path else field.name,
                t.kind(field.type),
                FORMAT,
                f"Spark cannot distinguish it from '{other}': the names differ only in case",
            )


def spark_arrow_type(type_: t.Type) -> pa.DataType:
    """The Arrow type Spark reads for `spark_type(type_)`."""
    match type_:
        case t.Int(bits, False):
            return {8: pa.int16(), 16: pa.int32(), 32: pa.int64(), 64: pa.decimal128(20)}[bits]
        case t.Binary():
            return pa.binary()
        case t.Time():
            return pa.time64("ns")
        case t.Nullable():
            return spark_arrow_type(type_.of)
        case t.List():
            return pa.list_(_spark_field("item", type_.item))
        case t.Map():
            return pa.map_(spark_arrow_type(type_.key), _spark_field("value", type_.value))
        case t.Union():
            options = enumerate(type_.options)
            return pa.struct([pa.field(member_name(i), spark_arrow_type(o)) for i, o in options])
        case t.Record():
            return pa.struct([_spark_field(f.name, f.type) for f in type_.fields])
        case _:
            return arrow_type(type_)


def _spark_field(name: str, type_: t.Type) -> pa.Field:
    return pa.field(name, spark_arrow_type(type_), nullable=isinstance(type_, t.Nullable))
