"""Topics of changes: which topics they are, the type of their rows, and what a fold reads of them.

Pure, without pyspark.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millstream.events import changes as ch
from millstream.spark.broker_access import SchemaSnapshot
from millstream.spark.source.latest_fold import COMMIT, GONE, NUMBER, TRUNCATE, UNCHANGED
from millstream.spark.source.row_schema import BYTES, ValueShape

if TYPE_CHECKING:
    from millstream.schemas import types as t

__all__ = ["ChangeColumns", "RowColumns", "is_change", "latest_shape", "row_record"]

_CHANGE: Final = frozenset({ch.OP, ch.BEFORE, ch.AFTER, ch.UNCHANGED, ch.SOURCE})
_SOURCE: Final = frozenset({ch.COMMIT, ch.TRANSACTION, ch.NUMBER, ch.TOTAL, ch.TIME})
_HEADERS: Final = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))


def is_change(fields: Mapping[str, frozenset[str]]) -> bool:
    """Whether values are changes: the names of their fields, and of the fields of those."""
    return fields.keys() >= _CHANGE and fields[ch.SOURCE] >= _SOURCE


def row_record(record: t.Record) -> t.Record | None:
    """The type of the rows in a topic of changes; None if the topic is none."""
    from millstream.schemas import types as t

    types = {field.name: t.strip(field.type)[0] for field in record.fields}
    inner = {
        name: frozenset(f.name for f in kind.fields) if isinstance(kind, t.Record) else frozenset()
        for name, kind in types.items()
    }
    row = types.get(ch.AFTER)
    return row if isinstance(row, t.Record) and is_change(inner) else None


def latest_shape(schemas: Mapping[str, SchemaSnapshot], topic: str) -> ValueShape:
    """The shape of `value` of the latest rows: of a topic of changes, that of its table."""
    if topic not in schemas:
        return BYTES
    from millstream.schemas import spark_arrow_type, spark_type

    record = schemas[topic].latest.record
    row = row_record(record) or record
    fields = {field.name: spark_type(field.type, nullability=False) for field in row.fields}
    return ValueShape(spark_type(row, nullability=False), fields, (spark_arrow_type(row),))


# -- what a fold reads ----------------------------------------------------------------------


class ChangeColumns:
    """Events of a topic of changes as columns of a fold."""

    def __init__(self, schema: pa.Schema, row: pa.DataType) -> None:
        """`schema`: of the result; `row`: the type of its column `value`."""
        source = pa.struct([(ch.COMMIT, pa.uint64()), (ch.NUMBER, pa.int64())])
        fields = [(ch.OP, pa.string()), (ch.UNCHANGED, pa.list_(pa.string())), (ch.SOURCE, source)]
        self._value = pa.struct([*fields, pa.field(ch.AFTER, row)])
        self.schema = _with(schema, value=self._value)
        truncates = pa.struct([fields[0], fields[2]])
        self.truncates = pa.schema([pa.field("value", truncates)])

    def of(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The columns of a fold."""
        value = batch.column("value")
        op, after = pc.struct_field(value, ch.OP), pc.struct_field(value, ch.AFTER)
        columns = {name: batch.column(name) for name in self.schema.names}
        columns["value"] = after
        columns |= self._positions(value)
        columns[GONE] = pc.is_null(after)
        columns[TRUNCATE] = pc.fill_null(pc.equal(op, ch.TRUNCATE), False)
        columns[UNCHANGED] = pc.struct_field(value, ch.UNCHANGED)
        return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))

    def truncations(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The positions of truncations, from a batch of the schema `truncates`."""
        value = batch.column("value")
        found = value.filter(pc.fill_null(pc.equal(pc.struct_field(value, ch.OP), "t"), False))
        return pa.RecordBatch.from_pydict(self._positions(found))

    def _positions(self, value: pa.Array) -> dict[str, pa.Array]:
        return {
            COMMIT: pc.fill_null(pc.struct_field(value, [ch.SOURCE, ch.COMMIT]), 0),
            # Null in a snapshot, which is before the numbered changes of its commit.
            NUMBER: pc.fill_null(pc.struct_field(value, [ch.SOURCE, ch.NUMBER]), 0),
        }


class RowColumns:
    """Events whose values are rows, or deletions, as columns of a fold.

    An event without a key whose header says so is a truncation.
    """

    def __init__(self, schema: pa.Schema, row: pa.DataType) -> None:
        self._wanted = _with(schema, value=row).names
        self.schema = _with(schema, value=row, headers=_HEADERS)
        self.truncates = pa.schema([pa.field("key", pa.binary()), pa.field("headers", _HEADERS)])

    def of(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The columns of a fold."""
        columns = {name: batch.column(name) for name in self._wanted}
        columns |= self._positions(batch)
        columns[GONE] = pc.is_null(batch.column("value"))
        columns[TRUNCATE] = self._truncates(batch)
        columns[UNCHANGED] = pa.nulls(batch.num_rows, pa.list_(pa.string()))
        return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))

    def truncations(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The positions of truncations, from a batch of the schema `truncates`."""
        return pa.RecordBatch.from_pydict(self._positions(batch.filter(self._truncates(batch))))

    def _truncates(self, batch: pa.RecordBatch) -> pa.Array:
        found = np.zeros(batch.num_rows, bool)
        if batch.column("key").null_count:
            pairs, parents = _pairs(batch.column("headers"), ch.OP_HEADER)
            found[parents.filter(pc.equal(pairs, ch.TRUNCATE.encode())).to_numpy()] = True
        return pc.and_(pa.array(found), pc.is_null(batch.column("key")))

    def _positions(self, batch: pa.RecordBatch) -> dict[str, pa.Array]:
        count, headers = batch.num_rows, batch.column("headers")
        commits, numbers = np.zeros(count, np.uint64), np.zeros(count, np.int64)
        if headers.null_count < count:
            _marked(headers, ch.POSITION_HEADER, r"^(?P<n>\d{1,19})$", commits)
            _marked(headers, ch.TRANSACTION_HEADER, r" (?P<n>\d{1,18})/", numbers)
        return {COMMIT: pa.array(commits), NUMBER: pa.array(numbers)}


def _pairs(headers: pa.ListArray, name: str) -> tuple[pa.Array, pa.Array]:
    """The values of a header, and the number of the event that has each."""
    pairs, parents = headers.flatten(), pc.list_parent_indices(headers)
    named = pc.equal(pc.struct_field(pairs, "key"), name)
    return pc.struct_field(pairs, "value").filter(named), parents.filter(named)


def _marked(headers: pa.ListArray, name: str, pattern: str, into: Any) -> None:
    """Put the number in a header of each event that has it into an array."""
    texts, parents = _pairs(headers, name)
    found = pc.struct_field(pc.extract_regex(texts, pattern), "n").cast(pa.string())
    valid = pc.is_valid(found)
    rows = parents.filter(valid).to_numpy()
    into[rows] = found.filter(valid).cast(pa.from_numpy_dtype(into.dtype)).to_numpy()


def _with(schema: pa.Schema, **types: pa.DataType | None) -> pa.Schema:
    """The schema with a key, and with columns of these types."""
    if "key" not in schema.names:
        schema = schema.append(pa.field("key", pa.binary()))
    for name, kind in types.items():
        if kind is None:
            continue
        at = schema.get_field_index(name)
        field = pa.field(name, kind)
        schema = schema.append(field) if at < 0 else schema.set(at, field)
    return schema
