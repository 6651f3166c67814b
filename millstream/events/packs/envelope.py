"""The columns around every value of a pack: names, types, and how they are assembled."""

from __future__ import annotations

from typing import Final

import pyarrow as pa

from millstream.errors import PackError, Unfit
from millstream.events.packs.types import plain_type

__all__ = [
    "COLUMN_TYPES",
    "EMPTY_SCHEMA",
    "ENVELOPE",
    "cast_column",
    "check_columns",
    "complete",
    "envelope",
    "plain_schema",
]

KEY: Final = pa.binary()
TIMESTAMP: Final = pa.timestamp("us", "UTC")
HEADERS: Final = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
ID: Final = pa.string()

COLUMN_TYPES: Final = {"key": KEY, "timestamp": TIMESTAMP, "headers": HEADERS, "id": ID}
ENVELOPE: Final = (*COLUMN_TYPES, "value")
EMPTY_SCHEMA: Final = pa.schema([("value", pa.binary())])


def check_columns(schema: pa.Schema) -> list[str]:
    """The names of a pack's columns that this version knows, in the sender's order.

    Columns of other names are ignored: a later writer of the same format version may add some.
    """
    known = [name for name in schema.names if name in ENVELOPE]
    if "value" not in known:
        raise PackError(f"no column 'value' among {_shown(schema.names)}", "column")
    for name in known:
        found = schema.field(name).type
        if name == "value":
            if not (pa.types.is_struct(found) or found.equals(pa.binary())):
                raise PackError(f"column 'value' is {found}, not a struct or binary", "column")
        elif not _matches(found, COLUMN_TYPES[name]):
            raise PackError(f"column {name!r} is {found}, not {COLUMN_TYPES[name]}", "column")
    return known


def _matches(found: pa.DataType, wanted: pa.DataType) -> bool:
    if not pa.types.is_list(wanted):
        return bool(found.equals(wanted))
    # Languages name a list's item differently ('item', 'element', '$data$'); the rest is fixed.
    if not (pa.types.is_list(found) and pa.types.is_struct(found.value_type)):
        return False
    parts = [(field.name, field.type) for field in found.value_type]
    return parts == [("key", pa.string()), ("value", pa.binary())]


def _shown(names: list[str]) -> str:
    return ", ".join(repr(name[:40]) for name in names[:10])


def complete(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The batch with all five envelope columns in their order; absent ones are null."""
    present = set(batch.schema.names)
    columns = [
        batch.column(name) if name in present else pa.nulls(batch.num_rows, COLUMN_TYPES[name])
        for name in ENVELOPE
    ]
    return pa.RecordBatch.from_arrays(columns, names=list(ENVELOPE))


# -- writing ----------------------------------------------------------------------------------


def envelope(
    value: pa.Array | pa.ChunkedArray | pa.RecordBatch,
    *,
    key: pa.Array | None = None,
    timestamp: pa.Array | None = None,
    headers: pa.Array | None = None,
    id: pa.Array | None = None,
) -> pa.RecordBatch:
    """Column data as one batch for `encode`.

    `value` is a record batch or struct array (typed), or a binary or string array. Types that
    differ from the envelope's are cast if nothing is lost (text keys, other time units); a
    timestamp without zone is UTC. Columns without any value are left out. Raises `Unfit` for what
    cannot be cast.
    """
    given = {"key": key, "timestamp": timestamp, "headers": headers, "id": id}
    columns = {name: _one(column) for name, column in given.items() if column is not None}
    columns["value"] = _one(value.to_struct_array() if isinstance(value, pa.RecordBatch) else value)
    rows = len(columns["value"])
    names, arrays = [], []
    for name in ENVELOPE:
        column = columns.get(name)
        if column is None:
            continue
        if len(column) != rows:
            raise Unfit(name, f"{rows:,} rows, as the values have", f"{len(column):,}")
        if name != "value" and column.null_count == rows:
            continue
        names.append(name)
        arrays.append(cast_column(name, column))
    return pa.RecordBatch.from_arrays(arrays, names=names)


def _one(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    if not isinstance(column, pa.ChunkedArray):
        return column
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)


def plain_schema(schema: pa.Schema) -> pa.Schema:
    """The schema a pack is written with for batches of `schema`: plain types, no metadata.

    Raises `Unfit` for a column that is missing, unknown or of a type that packs do not hold.
    """
    for name in schema.names:
        if name not in ENVELOPE:
            raise Unfit(name, f"the columns {', '.join(ENVELOPE)}", "another column")
    if len(set(schema.names)) != len(schema.names) or "value" not in schema.names:
        raise Unfit(
            "value", "each envelope column at most once, and a column 'value'", _shown(schema.names)
        )
    fields = []
    for field in schema:
        kind = COLUMN_TYPES.get(field.name) or _value_type(field.type)
        fields.append(pa.field(field.name, kind, nullable=field.nullable))
    return pa.schema(fields)


def _value_type(found: pa.DataType) -> pa.DataType:
    kind = plain_type(found, "value")
    if pa.types.is_struct(kind) or kind.equals(pa.binary()):
        return kind
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_large_binary(kind):
        return pa.binary()
    raise Unfit("value", "a struct of columns, or binary", str(found))


def cast_column(name: str, column: pa.Array) -> pa.Array:
    """The column in its type in a pack; unchanged if it has that type already."""
    wanted = COLUMN_TYPES.get(name) or _value_type(column.type)
    if column.type.equals(wanted):
        return column
    if name == "timestamp" and not pa.types.is_timestamp(column.type):
        raise Unfit(name, "timestamps", str(column.type))
    try:
        # safe=False only allows truncating a finer time unit to microseconds.
        return column.cast(wanted, safe=name != "timestamp")
    except pa.ArrowException as error:
        raise Unfit(name, str(wanted), f"{column.type} ({error})") from error
