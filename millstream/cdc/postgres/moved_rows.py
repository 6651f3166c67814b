"""Values that a changed key has left behind.

A changed key is a deletion and a new row. PostgreSQL does not send TOASTed values that the update
did not touch, and readers find no earlier row under the new key to take them from. So they are read
from the table. If the row has changed since, its next change follows in the stream; if it is gone,
or has moved again, so does that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from millstream.cdc.model import RowChanges
from millstream.cdc.postgres.types import from_text, quoted
from millstream.events import changes as ch

__all__ = ["with_left_values"]

Ask = Callable[..., Awaitable[list[tuple[Any, ...]]]]


async def with_left_values(changes: RowChanges, from_item: str, ask: Ask) -> RowChanges:
    """The changes, with the values of new rows that were not sent."""
    if changes.unchanged is None:
        return changes
    new = pc.and_(pc.equal(changes.op, ch.CREATE), changes.unchanged.is_valid())
    places = pc.indices_nonzero(new).to_pylist()
    if not places:
        return changes
    unchanged, table = changes.unchanged.to_pylist(), from_item.replace("%", "%%")
    columns = {column.name: column for column in changes.table.columns}
    values = {name: pc.struct_field(changes.after, name).to_pylist() for name in columns}
    for place in places:
        names = unchanged[place]
        where = " AND ".join(f"{_name(name)} = %s" for name in changes.table.key)
        key = [values[name][place] for name in changes.table.key]
        # Gone, or moved again: its end follows in the stream, and until then the value is null. A
        # reader that was asked to keep the value would look for a row that it never had.
        unchanged[place] = None
        for name in names:  # one by one: a column may have been dropped since
            rows = await ask(f"SELECT {_name(name)}::text FROM {table} WHERE {where}", *key)
            if rows:
                texts = pa.array(rows[0], pa.string())
                values[name][place] = from_text(texts, columns[name].type, name)[0].as_py()
    row_type = changes.table.row_type
    arrays = [pa.array(values[field.name], field.type) for field in row_type]
    after = pa.StructArray.from_arrays(arrays, fields=list(row_type), mask=changes.after.is_null())
    kept = pa.array(unchanged, pa.list_(pa.string()))
    return dataclasses.replace(
        changes, after=after, unchanged=kept if kept.null_count < len(kept) else None
    )


def _name(column: str) -> str:
    """Quoted, in a statement with parameters."""
    return quoted(column).replace("%", "%%")
