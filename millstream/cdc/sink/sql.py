"""Names and types of columns in PostgreSQL and SQLite. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import pyarrow as pa

from millstream.schemas import types as t
from millstream.schemas.arrow_types import arrow_type

__all__ = [
    "columns_of",
    "is_document",
    "postgres_type",
    "postgres_type_of",
    "quoted",
    "quoted_table",
    "sqlite_type",
    "stage_name",
]


def quoted(name: str) -> str:
    """A name of a column or table as both databases read it.

    >>> quoted('a"b')
    '"a""b"'
    """
    return '"' + name.replace('"', '""') + '"'


def quoted_table(table: str) -> str:
    """The name of a table, with its schema if it has one: `public.orders`.

    >>> quoted_table("public.orders"), quoted_table("orders")
    ('"public"."orders"', '"orders"')
    """
    return ".".join(quoted(part) for part in table.split(".", 1))


def columns_of(names: Sequence[str], prefix: str = "") -> str:
    """A list of columns: `"a", "b"`."""
    return ", ".join(prefix + quoted(name) for name in names)


def stage_name(table: str, names: Sequence[str]) -> str:
    """A name for the temporary table that rows of such columns pass through."""
    text = "\0".join([table, *names])
    return f"millstream_{hashlib.sha256(text.encode()).hexdigest()[:20]}"


# -- PostgreSQL -----------------------------------------------------------------------------

_POSTGRES = {
    pa.bool_(): "boolean",
    pa.int8(): "smallint",
    pa.int16(): "smallint",
    pa.int32(): "integer",
    pa.int64(): "bigint",
    pa.uint8(): "smallint",
    pa.uint16(): "integer",
    pa.uint32(): "bigint",
    pa.uint64(): "numeric(20,0)",
    pa.float16(): "real",
    pa.float32(): "real",
    pa.float64(): "double precision",
    pa.date32(): "date",
    pa.date64(): "date",
}


def postgres_type(kind: pa.DataType) -> str:
    """The type of a column that holds values of an Arrow type.

    >>> postgres_type(pa.decimal128(10, 2)), postgres_type(pa.list_(pa.int32()))
    ('numeric(10,2)', 'integer[]')
    """
    types = pa.types
    if kind in _POSTGRES:
        return _POSTGRES[kind]
    if types.is_decimal(kind):
        return f"numeric({kind.precision},{kind.scale})"
    if types.is_timestamp(kind):
        return "timestamptz" if kind.tz else "timestamp"
    if types.is_time(kind):
        return "time"
    if types.is_duration(kind):
        return "interval"
    if is_binary(kind):
        return "bytea"
    if is_document(kind):
        return "jsonb"
    if is_list(kind):
        return array_of(postgres_type(kind.value_type))
    return "text"


def postgres_type_of(type_: t.Type) -> str:
    """The type of a column that holds values of a schema's type."""
    plain, _ = t.strip(type_)
    if isinstance(plain, t.Uuid):
        return "uuid"
    if isinstance(plain, t.List) and not is_document(arrow_type(plain)):
        return array_of(postgres_type_of(plain.item))
    return postgres_type(arrow_type(plain))


def array_of(item: str) -> str:
    """The type of arrays; PostgreSQL does not count their dimensions."""
    return item if item.endswith("[]") else f"{item}[]"


def is_binary(kind: pa.DataType) -> bool:
    """Whether values are bytes."""
    types = pa.types
    return bool(
        types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind)
    )


def is_list(kind: pa.DataType) -> bool:
    """Whether values are lists."""
    types = pa.types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def is_document(kind: pa.DataType) -> bool:
    """Whether values have no other form in a column than JSON: records, maps, lists of them."""
    types = pa.types
    if is_list(kind):
        return is_document(kind.value_type)
    return bool(types.is_struct(kind) or types.is_map(kind))


# -- SQLite ---------------------------------------------------------------------------------


def sqlite_type(kind: pa.DataType) -> str:
    """The type of a column that holds values of an Arrow type without loss.

    >>> sqlite_type(pa.int32()), sqlite_type(pa.decimal128(10, 2))
    ('INTEGER', 'TEXT')
    """
    types = pa.types
    if types.is_boolean(kind) or types.is_duration(kind):
        return "INTEGER"
    if types.is_integer(kind):
        return "TEXT" if kind == pa.uint64() else "INTEGER"  # SQLite's own have 63 bits and a sign
    if types.is_floating(kind):
        return "REAL"
    return "BLOB" if is_binary(kind) else "TEXT"
