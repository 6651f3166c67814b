"""Changes as values of a topic: its record, the columns of its events, and their keys. Pure.

| format | value | a deletion | marks (operation, transaction) |
| --- | --- | --- | --- |
| changes | op, before, after, unchanged, source | op "d", the old row or its key | in the value |
| rows | the row | an event without a value | headers |
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from millstream.cdc.model import Column, RowChanges
from millstream.cdc.settings import Format
from millstream.events import changes as ch
from millstream.events.row_buffer import Columns
from millstream.schemas import types as t
from millstream.schemas.arrow_types import arrow_type

__all__ = ["FRAME_COLUMNS", "frame_of", "grown", "key_texts", "padded", "record_of", "row_of"]

_PAIRS: Final = pa.struct([("key", pa.string()), ("value", pa.binary())])
FRAME_COLUMNS: Final[Mapping[Format, Columns]] = {
    "changes": Columns(value="value", key="key"),
    "rows": Columns(value="value", key="key", tombstone="gone", headers="headers"),
}
_SOURCE_FIELDS: Final = (
    t.Field(ch.TABLE, t.String()),
    t.Field(ch.COMMIT, t.Int(64, signed=False)),
    t.Field(ch.TRANSACTION, t.Nullable(of=t.String()), None),
    t.Field(ch.NUMBER, t.Nullable(of=t.Int()), None),
    t.Field(ch.TOTAL, t.Nullable(of=t.Int()), None),
    t.Field(ch.TIME, t.Nullable(of=t.Timestamp()), None),
)


def _named(table: str, suffix: str = "") -> str:
    """A name for a record: table names may have characters that those of records may not."""
    return re.sub(r"[\x00-\x1f\x7f.]", "_", table) + suffix


def record_of(columns: Sequence[Column], table: str, format: Format) -> t.Record:
    """The type of a topic's values; every column is nullable, so that columns come and go."""
    row = t.Record(
        name=_named(table),
        fields=tuple(t.Field(c.name, t.Nullable(of=c.type), None) for c in columns),
    )
    if format == "rows":
        return row
    source = t.Record(name=_named(table, "_source"), fields=_SOURCE_FIELDS)
    return t.Record(
        name=_named(table, "_change"),
        fields=(
            t.Field(ch.OP, t.String()),
            t.Field(ch.BEFORE, t.Nullable(of=row), None),
            t.Field(ch.AFTER, t.Nullable(of=row), None),
            t.Field(ch.UNCHANGED, t.Nullable(of=t.List(item=t.String())), None),
            t.Field(ch.SOURCE, source),
        ),
    )


def row_of(record: t.Record, format: Format) -> t.Record | None:
    """The record of the rows in a topic's record; None: the topic is not of that format."""
    if format == "rows":
        return record
    fields = {field.name: t.strip(field.type)[0] for field in record.fields}
    row = fields.get(ch.AFTER)
    return row if isinstance(row, t.Record) and {ch.OP, ch.SOURCE} <= fields.keys() else None


def grown(known: t.Record, columns: Sequence[Column]) -> tuple[Column, ...]:
    """The columns of a topic after a table has changed: those it had, then the new ones.

    A column that was dropped stays, null from now on: earlier events have it.
    """
    now = {column.name: column for column in columns}
    kept = [
        now[field.name] if field.name in now else Column(field.name, t.strip(field.type)[0])
        for field in known.fields
    ]
    had = {field.name for field in known.fields}
    return (*kept, *(column for column in columns if column.name not in had))


def padded(changes: RowChanges, row: t.Record) -> RowChanges:
    """Changes with all columns of their topic; those that the table has no more are null."""
    names = [column.name for column in changes.table.columns]
    if names == [field.name for field in row.fields]:
        return changes
    known = {column.name: column for column in changes.table.columns}
    columns = [known.get(f.name) or Column(f.name, t.strip(f.type)[0]) for f in row.fields]
    shape = dataclasses.replace(changes.table, columns=tuple(columns))
    fields = list(shape.row_type)

    def rows(struct: pa.StructArray) -> pa.StructArray:
        arrays = [
            pc.struct_field(struct, field.name)
            if field.name in known
            else pa.nulls(len(struct), field.type)
            for field in fields
        ]
        return pa.StructArray.from_arrays(arrays, fields=fields, mask=struct.is_null())

    before = None if changes.before is None else rows(changes.before)
    return dataclasses.replace(changes, table=shape, after=rows(changes.after), before=before)


# -- columns ------------------------------------------------------------------------------


def frame_of(changes: RowChanges, format: Format) -> pa.RecordBatch:
    """Changes as a frame for `Writer.write_batch`, with FRAME_COLUMNS of its format."""
    keys = event_keys(changes)
    if format == "rows":
        gone = pc.equal(changes.op, ch.DELETE)
        return pa.RecordBatch.from_arrays(
            [changes.after, keys, gone, _marks(changes)], names=["value", "key", "gone", "headers"]
        )
    count, row = len(changes), changes.table.row_type
    before, unchanged = changes.before, changes.unchanged
    columns = {
        ch.OP: changes.op,
        ch.BEFORE: pa.nulls(count, row) if before is None else before,
        ch.AFTER: changes.after,
        ch.UNCHANGED: pa.nulls(count, pa.list_(pa.string())) if unchanged is None else unchanged,
        ch.SOURCE: _source(changes),
    }
    value = pa.StructArray.from_arrays(list(columns.values()), names=list(columns))
    return pa.RecordBatch.from_arrays([value, keys], names=["value", "key"])


def _source(changes: RowChanges) -> pa.StructArray:
    count = len(changes)
    fields = [pa.field(f.name, arrow_type(f.type)) for f in _SOURCE_FIELDS]
    given = {
        ch.TABLE: pa.repeat(pa.scalar(changes.table.full_name), count),
        ch.COMMIT: changes.commit,
        ch.TRANSACTION: changes.transaction,
        ch.NUMBER: changes.number,
        ch.TOTAL: changes.total,
        ch.TIME: changes.time,
    }
    arrays = [
        pa.nulls(count, field.type) if (one := given[field.name]) is None else one
        for field in fields
    ]
    return pa.StructArray.from_arrays(arrays, fields=fields)


def _marks(changes: RowChanges) -> pa.ListArray:
    """The headers of events in topics of rows: a list of pairs for each."""
    commits = changes.commit.cast(pa.string())
    named = [(ch.OP_HEADER, changes.op), (ch.POSITION_HEADER, commits)]
    if changes.transaction is not None and changes.number is not None:
        total = pa.nulls(len(changes), pa.int64()) if changes.total is None else changes.total
        text = pc.binary_join_element_wise(
            changes.transaction,
            pc.binary_join_element_wise(
                changes.number.cast(pa.string()), total.cast(pa.string()).fill_null("?"), "/"
            ),
            " ",
        )
        named.append((ch.TRANSACTION_HEADER, text))
    width, count = len(named), len(changes)
    # Values row by row: column j of row i is at i * width + j.
    values = pa.concat_arrays([column.cast(pa.binary()) for _, column in named])
    order = pa.array([j * count + i for i in range(count) for j in range(width)], pa.int64())
    names = pa.array([name for name, _ in named] * count, pa.string())
    pairs = pa.StructArray.from_arrays([names, values.take(order)], fields=list(_PAIRS))
    offsets = pa.array(range(0, width * count + 1, width), pa.int32())
    return pa.ListArray.from_arrays(offsets, pairs)


# -- keys ---------------------------------------------------------------------------------


def event_keys(changes: RowChanges) -> pa.Array:
    """The key of each event: that of the row after the change, of a deletion that before it."""
    keys = key_texts(changes.after, changes.table.key)
    if changes.before is None or not keys.null_count:
        return keys
    return pc.coalesce(keys, key_texts(changes.before, changes.table.key))


def key_texts(rows: Any, key: Sequence[str]) -> pa.Array:
    """The keys of rows (a struct array or a batch) as text; null for a row that is null.

    One column: its text. Several: a JSON array of their texts.
    """
    struct = rows.to_struct_array() if isinstance(rows, pa.RecordBatch) else rows
    texts = [_text(pc.struct_field(struct, name)) for name in key]
    if len(texts) == 1:
        return texts[0]
    dump = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
    joined = zip(*(column.to_pylist() for column in texts), strict=True)
    found = [None if all(part is None for part in one) else dump(one) for one in joined]
    return pa.array(found, pa.string())


def _text(column: pa.Array) -> pa.Array:
    if pa.types.is_binary(column.type) or pa.types.is_fixed_size_binary(column.type):
        found = [None if value is None else value.hex() for value in column.to_pylist()]
        return pa.array(found, pa.string())
    if pa.types.is_timestamp(column.type):
        shape = "%Y-%m-%dT%H:%M:%S" + ("Z" if column.type.tz else "")
        return pc.strftime(column, format=shape)
    return column.cast(pa.string())
