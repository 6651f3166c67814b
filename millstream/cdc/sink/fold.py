"""Events of changes or of rows, by column, folded to the last state of each key. Pure."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import pyarrow as pa
import pyarrow.compute as pc

from millstream.cdc.sink.sql import is_binary
from millstream.errors import SinkError
from millstream.events import changes as ch

__all__ = ["Format", "RowEvents", "flatten", "fold", "format_of", "truncates", "worker_of"]

Format = Literal["changes", "rows"]
_NAMES: Final = pa.list_(pa.string())


@dataclass(frozen=True, slots=True)
class RowEvents:
    """What events do to rows of a table, in their order: one item for each event."""

    rows: pa.RecordBatch  # of a deletion only the key columns count
    deleted: pa.Array  # boolean
    unchanged: pa.Array | None  # names of columns that were not sent, or null
    partition: pa.Array
    offset: pa.Array
    index: pa.Array

    def __len__(self) -> int:
        return int(self.rows.num_rows)

    def _each(self, change: Any) -> RowEvents:
        unchanged = None if self.unchanged is None else change(self.unchanged)
        others = [change(one) for one in (self.partition, self.offset, self.index)]
        return RowEvents(change(self.rows), change(self.deleted), unchanged, *others)

    def filter(self, wanted: pa.Array) -> RowEvents:
        """Those for which a boolean array is true."""
        return self._each(lambda column: column.filter(wanted))

    def slice(self, start: int, count: int | None = None) -> RowEvents:
        """Those from a number on."""
        return self._each(lambda column: column.slice(start, count))

    def take(self, rows: pa.Array) -> RowEvents:
        """Those of these numbers."""
        return self._each(lambda column: column.take(rows))

    def after(self, partition: int, offset: int, index: int) -> RowEvents:
        """Without the events of a partition before a position."""
        later = pc.or_(
            pc.greater(self.offset, offset),
            pc.and_(pc.equal(self.offset, offset), pc.greater_equal(self.index, index)),
        )
        wanted = pc.or_(later, pc.not_equal(self.partition, partition))
        return self if pc.all(wanted).as_py() else self.filter(wanted)

    def where(self, row: int) -> str:
        """Where an event is in its topic, for messages."""
        return (
            f"partition {self.partition[row].as_py()}, offset {self.offset[row].as_py()}, "
            f"index {self.index[row].as_py()}"
        )


def format_of(value: pa.DataType) -> Format:
    """Whether values of a type are changes, or rows."""
    if {ch.OP, ch.BEFORE, ch.AFTER, ch.SOURCE} <= {field.name for field in value}:
        return "changes"
    return "rows"


# -- events to rows -------------------------------------------------------------------------


def truncates(events: pa.RecordBatch, format: Format) -> list[int]:
    """The numbers of the events that empty the table."""
    if format == "changes":
        found = pc.equal(pc.struct_field(events.column("value"), ch.OP), ch.TRUNCATE)
    else:
        # Only an event without a key can be one, so few headers are looked at.
        found = pc.and_(events.column("key").is_null(), events.column("headers").is_valid())
    if not pc.any(found).as_py():
        return []
    rows = [row for row, one in enumerate(found.to_pylist()) if one]
    if format == "changes":
        return rows
    mark = {"key": ch.OP_HEADER, "value": ch.TRUNCATE.encode()}
    return [row for row in rows if mark in events.column("headers")[row].as_py()]


def flatten(
    events: Sequence[pa.RecordBatch], format: Format, key: Sequence[str], known: Sequence[str] = ()
) -> RowEvents:
    """The rows of events (as `topic.batches` gives them, of one schema), without truncations.

    `known` are the columns to take; none given: all of the row's.
    """
    batch = events[0] if len(events) == 1 else pa.concat_batches(events)
    value = batch.column("value")
    gone = value.is_null()
    after, before, unchanged = value, None, None
    if format == "changes":
        op = pc.struct_field(value, ch.OP)
        _check_ops(batch, op)
        gone = pc.or_(gone, pc.equal(op, ch.DELETE).fill_null(False))
        after, before = pc.struct_field(value, ch.AFTER), pc.struct_field(value, ch.BEFORE)
        unchanged = _unchanged(value)
    names = [field.name for field in after.type if not known or field.name in known]
    columns = []
    for name in names:
        column = pc.struct_field(after, name)
        if name in key and pc.any(gone).as_py():
            column = _old_keys(batch, gone, column, before, (key, name))
        columns.append(column)
    found = RowEvents(
        pa.RecordBatch.from_arrays(columns, names=names),
        gone,
        unchanged,
        *(batch.column(name) for name in ("partition", "offset", "index")),
    )
    _check_keys(found, key)
    return found


def _unchanged(value: pa.Array) -> pa.Array | None:
    if ch.UNCHANGED not in {field.name for field in value.type}:
        return None
    names = pc.struct_field(value, ch.UNCHANGED)
    if not pc.any(pc.greater(pc.list_value_length(names), 0)).as_py():
        return None
    return names.cast(_NAMES)


def _check_ops(batch: pa.RecordBatch, op: pa.Array) -> None:
    unknown = [one for one in pc.unique(op).to_pylist() if one is not None and one not in ch.OPS]
    if unknown:
        row = pc.index(op, unknown[0]).as_py()
        raise SinkError(
            f"the event at offset {batch.column('offset')[row].as_py()}, index "
            f"{batch.column('index')[row].as_py()}, has the operation {unknown[0]!r:.20}; known "
            f"are {', '.join(ch.OPS)}. It was written by another version, or is not a change"
        )


def _old_keys(
    batch: pa.RecordBatch,
    gone: pa.Array,
    column: pa.Array,
    before: pa.Array | None,
    key: tuple[Sequence[str], str],
) -> pa.Array:
    """A key column with the values of deleted rows: from the old row, or from the event's key."""
    names, name = key
    if before is not None:
        column = pc.if_else(gone, pc.struct_field(before, name), column)
    unknown = pc.and_(gone, column.is_null())
    if not pc.any(unknown).as_py():
        return column
    rows = pa.array([row for row, one in enumerate(unknown.to_pylist()) if one], pa.int64())
    texts = [
        None if text is None else text.decode("utf-8", "replace")
        for text in batch.column("key").take(rows).to_pylist()
    ]
    position = list(names).index(name)
    if len(names) > 1:
        texts = [_part(text, position, len(names)) for text in texts]
    parsed = _parsed(texts, column.type, name)
    return pc.replace_with_mask(column, unknown, parsed)


def _part(text: str | None, position: int, count: int) -> str | None:
    try:
        parts = json.loads(text or "")
    except ValueError:
        return None
    fits = isinstance(parts, list) and len(parts) == count and isinstance(parts[position], str)
    return parts[position] if fits else None


def _parsed(texts: list[str | None], kind: pa.DataType, name: str) -> pa.Array:
    """The texts of keys as values of their column."""
    try:
        if is_binary(kind):
            return pa.array([None if t is None else bytes.fromhex(t) for t in texts], kind)
        return pa.array(texts, pa.string()).cast(kind)
    except (ValueError, pa.ArrowException) as error:
        raise SinkError(
            f"a deletion names its row by the key of its event, which is no value of column "
            f"'{name}' ({kind}): {error}. Events of the topic must have the text of the key "
            f"columns as their key; for several columns a JSON array of texts"
        ) from error


def _check_keys(events: RowEvents, key: Sequence[str]) -> None:
    for name in key:
        if name not in events.rows.schema.names:
            names = ", ".join(events.rows.schema.names)
            raise SinkError(f"the rows have no column '{name}' for the key; they have {names}")
        column = events.rows.column(name)
        if column.null_count:
            row = pc.index(column.is_null(), True).as_py()
            what = "a deletion" if events.deleted[row].as_py() else "a row"
            raise SinkError(
                f"{what} ({events.where(row)}) has no value of the key column '{name}', so it "
                f"cannot be found in the table. Give the columns that identify a row: key=[...]"
            )


# -- to workers, and to one row a key -------------------------------------------------------


def worker_of(events: RowEvents, key: Sequence[str], workers: int) -> pa.Array:
    """Which of so many workers applies each event: all events of a key go to one."""
    texts = [_key_text(events.rows.column(name)) for name in key]
    whole = texts[0] if len(texts) == 1 else pc.binary_join_element_wise(*texts, "\x1f")
    crc = zlib.crc32
    return pa.array([crc(text.encode()) % workers for text in whole.to_pylist()], pa.int32())


def _key_text(column: pa.Array) -> pa.Array:
    if is_binary(column.type):
        return pa.array([value.hex() for value in column.to_pylist()], pa.string())
    return column.cast(pa.string())


def _last(rows: pa.RecordBatch, key: Sequence[str]) -> pa.Array:
    """The numbers of the last row of each key, sorted."""
    numbers = pa.array(range(rows.num_rows), pa.int64())
    table = pa.table({"key": _key_numbers(rows, key), "row": numbers})
    found = table.group_by("key", use_threads=False).aggregate([("row", "max")])
    return found.column("row_max").combine_chunks().sort()


def _key_numbers(rows: pa.RecordBatch, key: Sequence[str]) -> pa.Array:
    """A number for each row, the same for rows of the same key."""
    found: pa.Array | None = None
    for name in key:
        coded = rows.column(name).dictionary_encode()
        codes = coded.indices.cast(pa.int64())
        if found is not None:
            both = pc.add(pc.multiply(found, max(1, len(coded.dictionary))), codes)
            codes = both.dictionary_encode().indices.cast(pa.int64())  # stays below the row count
        found = codes
    return found


def fold(events: RowEvents, key: Sequence[str]) -> RowEvents:
    """The last event of each key, with what earlier events say of columns it does not have.

    `unchanged` of the result names the columns whose value is the one in the table.
    """
    last = _last(events.rows, key)
    folded = events.take(last)
    if events.unchanged is None or folded.unchanged is None:
        return folded
    missing = _names_in(folded.unchanged.filter(pc.invert(folded.deleted)))
    columns = dict(zip(folded.rows.schema.names, folded.rows.columns, strict=True))
    kept: list[set[str]] = [set(names or ()) for names in folded.unchanged.to_pylist()]
    keys = _key_numbers(events.rows, key).to_pylist()
    deleted = events.deleted.to_pylist()
    for name in sorted(missing & columns.keys()):
        not_sent = _having(events.unchanged, name)
        at = {  # the last row of each key that has the column
            keys[row]: row for row, gone in enumerate(deleted) if not gone and row not in not_sent
        }
        wanted = list(range(len(folded)))  # rows of the values, followed by those of all events
        for row, number in enumerate(last.to_pylist()):
            source = at.get(keys[number])
            if name in kept[row] and not deleted[number] and source is not None:
                wanted[row] = len(folded) + source
                kept[row].discard(name)
        both = pa.concat_arrays([columns[name], events.rows.column(name)])
        columns[name] = both.take(pa.array(wanted, pa.int64()))
    return RowEvents(
        pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns)),
        folded.deleted,
        pa.array([sorted(names) or None for names in kept], _NAMES),
        *(folded.partition, folded.offset, folded.index),
    )


def _names_in(lists: pa.Array) -> set[str]:
    return set(pc.unique(lists.flatten()).to_pylist())


def _having(lists: pa.Array, name: str) -> set[int]:
    """The numbers of the lists that have a name."""
    found = pc.equal(lists.flatten(), name)
    return set(pc.list_parent_indices(lists).filter(found).to_pylist())
