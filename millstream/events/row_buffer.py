"""Events about to be packed, collected by column. Pure."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from millstream.errors import ConfigError, Unfit
from millstream.events.encoding import check_headers, value_bytes
from millstream.events.escapes import escaped, header_pairs
from millstream.events.event import nanoseconds_of
from millstream.events.json_value import JSON_HEADERS, as_json, is_json, json_bytes
from millstream.events.key_field import KeyField
from millstream.events.lots import Lot
from millstream.events.packs.pack import envelope
from millstream.events.subject import KEY_BYTES_MAX, Key, checked_key
from millstream.events.value_type import ValueType

__all__ = ["Columns", "RowBuffer", "Rows", "batches_of", "by_partition", "enveloped"]

_TIME: Final = pa.timestamp("us", "UTC")
_HEADERS: Final = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
# One object for all dicts and lists, so that a column of nothing else is found and built quickly.
_JSON_PAIRS: Final = header_pairs(JSON_HEADERS)


class RowBuffer:
    """Events one by one, to a batch of columns. Nothing is converted before `build`."""

    __slots__ = ("_headers", "_ids", "_times", "_value_type", "bytes", "keys", "plain", "values")

    def __init__(self, value_type: ValueType | None) -> None:
        self._value_type = value_type
        self._clear()

    def _clear(self) -> None:
        # Open to those who add many events that are plain, with keys that are checked.
        self.values: list[Any] = []
        self.keys: list[Key | KeyField] = []
        self._times: list[int | None] = []
        self._headers: list[list[tuple[str, bytes]] | None] = []
        self._ids: list[str | None] = []
        self.plain = True  # no event so far has a time, headers or an id
        self.bytes = 0  # of payloads that are bytes; typed values are measured when built

    def __len__(self) -> int:
        return len(self.values)

    def add(self, value: Any, key: Key) -> None:
        """Add an event that has only a value and a key: the fast path."""
        if key is not None and not (
            type(key) is str and key.isascii() and len(key) <= KEY_BYTES_MAX
        ):
            key = checked_key(key)
        if self._value_type is None and value is not None:
            if type(value) is not bytes:
                if is_json(value):
                    self.add_event(json_bytes(value), key, JSON_HEADERS, None, None)
                    return
                value = value_bytes(value)
            self.bytes += len(value)
        self.values.append(value)  # from here on nothing may fail: columns are of one length
        self.keys.append(key)
        if not self.plain:
            self._times.append(None)
            self._headers.append(None)
            self._ids.append(None)

    def add_lot(self, lot: Lot) -> None:
        """Add many events, each with only a value and a key; they are checked already."""
        if lot.json is None:
            self.values.extend(lot.values)
            self.keys.extend(lot.keys)
            if not self.plain:
                nothing = [None] * len(lot)
                self._times.extend(nothing)
                self._headers.extend(nothing)
                self._ids.extend(nothing)
            return
        for value, key, json in zip(lot.values, lot.keys, lot.json, strict=True):
            if isinstance(key, KeyField):
                continue  # never: without a schema there is no field
            if json:
                self.add_event(value, key, JSON_HEADERS, None, None)
            else:
                self.add(value, key)

    def add_event(
        self,
        value: Any,
        key: str | bytes | None,
        headers: Mapping[str, str] | None,
        timestamp: datetime | int | None,
        id: str | None,
    ) -> None:
        """Add an event with any of its optional parts."""
        time = None if timestamp is None else nanoseconds_of(timestamp) // 1000
        if self._value_type is None:
            value, headers = as_json(value, headers)
        pairs = None
        if headers is JSON_HEADERS:
            pairs = _JSON_PAIRS
        elif headers is not None:
            check_headers(headers)
            pairs = header_pairs(headers)
        event_id = None if id is None else escaped(id)
        if self.plain:
            count = len(self.values)
            self.plain = False
            self._times, self._headers, self._ids = [None] * count, [None] * count, [None] * count
        self.add(value, key)
        self._times[-1], self._headers[-1], self._ids[-1] = time, pairs, event_id

    def drain(self, most: int | None = None) -> Rows:
        """The events so far, at most `most`; afterwards the buffer has only the rest."""
        rows = Rows(self.values, self.keys, self._times, self._headers, self._ids)
        plain = self.plain
        self._clear()
        if most is None or rows.count <= most:
            return rows
        rows, rest = rows.cut(most)
        self.values, self.keys, self.plain = rest.values, rest.keys, plain
        self._times, self._headers, self._ids = rest.times, rest.headers, rest.ids
        if self._value_type is None:
            self.bytes = sum(len(value) for value in rest.values if value is not None)
        return rows

    def build(self, rows: Rows) -> pa.RecordBatch:
        """Events as one batch with envelope columns; Unfit names the event's index and field."""
        if self._value_type is None:
            column = pa.array(rows.values, pa.binary())
        else:
            column = self._value_type.column(rows.values)
        return envelope(
            column,
            key=_key_column(rows.keys, column),
            timestamp=pa.array(rows.times, pa.int64()).cast(_TIME) if rows.times else None,
            headers=_header_column(rows.headers) if rows.headers else None,
            id=pa.array(rows.ids, pa.string()) if rows.ids else None,
        )


def _key_column(keys: list[Key | KeyField], values: pa.Array) -> pa.Array:
    first = keys[0] if keys else None
    if isinstance(first, KeyField) and keys.count(first) == len(keys):
        return first.column(values)
    try:
        return pa.array(keys, pa.binary())  # texts among them become UTF-8
    except pa.ArrowTypeError:
        fields = {key for key in keys if isinstance(key, KeyField)}
    found = pa.array([None if isinstance(k, KeyField) else k for k in keys], pa.binary())
    for field in fields:
        found = pc.if_else(pa.array([key is field for key in keys]), field.column(values), found)
    return found


def _header_column(headers: list[list[tuple[str, bytes]] | None]) -> pa.Array:
    if all(pairs is _JSON_PAIRS for pairs in headers):
        return pa.repeat(pa.scalar(_JSON_PAIRS, _HEADERS), len(headers))
    return pa.array(headers, _HEADERS)


@dataclass(frozen=True, slots=True)
class Rows:
    """Events by column; times, headers and ids are empty lists when no event has one."""

    values: list[Any]
    keys: list[Key | KeyField]
    times: list[int | None]
    headers: list[list[tuple[str, bytes]] | None]
    ids: list[str | None]

    @property
    def count(self) -> int:
        return len(self.values)

    def halves(self) -> tuple[Rows, Rows]:
        """The first and the second half."""
        return self.cut(self.count // 2)

    def cut(self, at: int) -> tuple[Rows, Rows]:
        """The first `at` events, and the others."""
        lists = (self.values, self.keys, self.times, self.headers, self.ids)
        first, second = [part[:at] for part in lists], [part[at:] for part in lists]
        return Rows(*first), Rows(*second)  # type: ignore[arg-type]


class Columns:
    """Which columns of a frame hold the event's key, time and id; the others form its value.

    `tombstone` names a boolean column: where it is true, the event has no value (a deletion),
    whatever the other columns hold; null counts as false. It is not part of the value, and neither
    are `headers`: a map of texts, or a list of pairs of text and bytes. If `value` names a column,
    that is the value, and no other column is a part of it.
    """

    __slots__ = ("headers", "id", "key", "timestamp", "tombstone", "value")

    def __init__(
        self,
        key: str | None = None,
        timestamp: str | None = None,
        id: str | None = None,
        value: str | None = None,
        tombstone: str | None = None,
        headers: str | None = None,
    ) -> None:
        self.key = key  # stays in the value too
        self.timestamp = timestamp  # stays in the value too
        self.id = id  # stays in the value too
        # A column that is the value, binary or, in a topic with a schema, a struct. None: all
        # columns together are.
        self.value = value
        self.tombstone = tombstone  # a boolean column: true means an event without a value
        self.headers = headers  # a column of maps or of lists of pairs


def batches_of(data: Any) -> Iterator[pa.RecordBatch]:
    """Record batches of a frame: Arrow, pandas, Polars or anything that speaks Arrow."""
    if isinstance(data, pa.RecordBatch):
        yield data
        return
    if isinstance(data, pa.Table):
        yield from data.combine_chunks().to_batches()
        return
    if hasattr(data, "__arrow_c_stream__"):
        yield from pa.table(data).to_batches()
        return
    if type(data).__module__.startswith("pandas"):
        yield from pa.Table.from_pandas(data, preserve_index=False).to_batches()
        return
    raise ConfigError(
        f"not a frame: {type(data).__name__}. Give an Arrow batch or table, or a pandas or "
        f"Polars frame; single values go through send()"
    )


def enveloped(
    batch: pa.RecordBatch,
    columns: Columns,
    value_type: ValueType | None,
    left_out: Sequence[str] = (),
) -> pa.RecordBatch:
    """A frame's batch as one with envelope columns, its values in the topic's type.

    Columns that are `left_out` are not part of the value.
    """
    deleted = _deleted(batch, columns.tombstone)
    value = None if columns.value is None else _column(batch, columns.value)
    if value is not None and not (value_type and pa.types.is_struct(value.type)):
        if deleted is not None:
            value = pc.if_else(deleted, pa.scalar(None, value.type), value)
    elif value_type is None:
        raise ConfigError(
            "a topic without a schema takes bytes: name the column of the value "
            "(Columns(value=...)), or declare the topic with a schema"
        )
    else:
        if value is None:
            others = {*left_out, columns.tombstone, columns.headers}
            names = [name for name in batch.schema.names if name in others]
            value = (batch.drop_columns(names) if names else batch).to_struct_array()
        if deleted is None:
            value = value_type.conform(value)
        else:
            # What a deleted row holds is not checked: it may lack what the schema demands.
            alive = pc.invert(deleted)
            found = value_type.conform(value.filter(alive))
            number = pc.subtract(pc.cumulative_sum(alive.cast(pa.int64())), 1)
            value = found.take(pc.if_else(alive, number, pa.scalar(None, pa.int64())))
    return envelope(
        value,
        key=_text_or_bytes(batch, columns.key),
        timestamp=None if columns.timestamp is None else _column(batch, columns.timestamp),
        headers=None if columns.headers is None else _header_pairs(batch, columns.headers),
        id=None if columns.id is None else _column(batch, columns.id).cast(pa.string()),
    )


def _header_pairs(batch: pa.RecordBatch, name: str) -> pa.Array:
    """A column of headers in the form of packs."""
    column = _column(batch, name)
    if column.type.equals(_HEADERS):
        return column
    try:
        if pa.types.is_map(column.type):
            column = column.cast(pa.map_(pa.string(), pa.binary()))
            pairs = pa.StructArray.from_arrays([column.keys, column.items], names=["key", "value"])
            return pa.ListArray.from_arrays(column.offsets, pairs, mask=column.is_null())
        return column.cast(_HEADERS)
    except pa.ArrowException as error:
        raise Unfit(name, "a map of texts, or a list of pairs", str(column.type)) from error


def _deleted(batch: pa.RecordBatch, name: str | None) -> pa.Array | None:
    """Which rows are events without a value; None: none of them."""
    if name is None:
        return None
    column = _column(batch, name)
    if pa.types.is_null(column.type):
        return None
    if not pa.types.is_boolean(column.type):
        raise Unfit(name, "a boolean column that is true for deletions", str(column.type))
    column = column.fill_null(False)
    return column if pc.any(column).as_py() else None


def _column(batch: pa.RecordBatch, name: str) -> pa.Array:
    if name not in batch.schema.names:
        raise ConfigError(f"no column {name!r}; found {', '.join(batch.schema.names)}")
    return batch.column(name)


def _text_or_bytes(batch: pa.RecordBatch, name: str | None) -> pa.Array | None:
    """A key column: text and bytes as they are, whole numbers as their decimal text."""
    if name is None:
        return None
    column = _column(batch, name)
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_integer(column.type):
        column = column.cast(pa.string())
    try:
        return column.cast(pa.binary())
    except pa.ArrowInvalid as error:
        raise Unfit(
            name, "a key column of text, bytes or whole numbers", str(column.type)
        ) from error


def by_partition(
    batch: pa.RecordBatch, partitions: int, turn: int
) -> list[tuple[int, pa.RecordBatch]]:
    """The rows of each partition, in their order; rows without a key go to partition `turn`."""
    if partitions == 1:
        return [(0, batch)]
    if "key" not in batch.schema.names:
        return [(turn, batch)]
    encoded = batch.column("key").dictionary_encode()
    of_keys = [zlib.crc32(key) % partitions for key in encoded.dictionary.to_pylist()]
    of_rows = pc.take(pa.array(of_keys, pa.int32()), encoded.indices).fill_null(turn)
    parts: list[tuple[int, pa.RecordBatch]] = []
    for partition in sorted(of_rows.unique().to_pylist()):
        parts.append((partition, batch.filter(pc.equal(of_rows, partition))))
    return parts
