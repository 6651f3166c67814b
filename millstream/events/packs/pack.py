"""Packs: many events of one topic and partition in one message, as one Arrow IPC stream.

The format is specified byte by byte in docs/PACKS.md. Everything here is pure: headers and
payload in, headers and payload out, so that asyncio readers, blocking Spark workers and tests
share it.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from datetime import datetime
from functools import cached_property
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from millstream.bulk import moments
from millstream.errors import PackError
from millstream.events.packs.encode import (
    Compression,
    EncodedPack,
    empty,
    encode,
    split,
)
from millstream.events.packs.envelope import (
    COLUMN_TYPES,
    EMPTY_SCHEMA,
    ENVELOPE,
    complete,
    envelope,
)
from millstream.events.packs.headers import message_size, read_headers
from millstream.events.packs.ipc import ReadLimits, Stream, read_stream
from millstream.events.packs.rows import headers_to_python, keys_to_python, to_python

__all__ = [
    "Compression",
    "EncodedPack",
    "Headers",
    "Pack",
    "ReadLimits",
    "decode",
    "empty",
    "encode",
    "envelope",
    "message_size",
    "split",
]

_DEFAULT_LIMITS = ReadLimits()
_ALIGNMENT = 8  # Arrow's compiled loops may assume it; an unaligned payload is copied once

# The years 1 to 9999 in microseconds since 1970: what Python, SQL and Spark can hold.
_FIRST_TIME = -62_135_596_800_000_000
_LAST_TIME = 253_402_300_799_999_999

Payload: TypeAlias = "bytes | bytearray | memoryview | pa.Buffer"
Headers: TypeAlias = "list[tuple[str, bytes]]"
Row: TypeAlias = "tuple[str | None, int | None, Headers | None, str | None, Any]"


def decode(
    headers: Mapping[str, str], payload: Payload, limits: ReadLimits = _DEFAULT_LIMITS
) -> Pack:
    """The checked pack of a message; its columns are views of `payload` if uncompressed.

    The payload must not be changed while the pack or anything read from it is in use. Raises
    `PackError` with the reason for anything invalid, and takes no more memory than `limits` allows.
    Full validation is not optional: a wrong offset would crash the process on first use, and it
    costs less than the checksum.
    """
    found = read_headers(headers)
    if found.count > limits.max_rows:
        raise PackError(
            f"{found.count:,} events; this reader accepts {limits.max_rows:,} (max_rows)", "limit"
        )
    buffer = payload if isinstance(payload, pa.Buffer) else pa.py_buffer(payload)
    if zlib.crc32(buffer) != found.checksum:
        raise PackError(
            f"the payload's CRC-32 is {zlib.crc32(buffer):08x}, the header says "
            f"{found.checksum:08x}: it was damaged or truncated on the way",
            "checksum",
        )
    if buffer.size == 0:
        if found.count:
            raise PackError(f"{found.count:,} events and no payload", "count")
        return Pack(Stream(EMPTY_SCHEMA, (), None), 0, found.schema_id)
    if buffer.address % _ALIGNMENT:
        buffer = _aligned(buffer)
    stream = read_stream(buffer, limits, found.count)
    for batch in stream.batches:
        _check_envelope(batch)
    return Pack(stream, found.count, found.schema_id)


def _aligned(buffer: pa.Buffer) -> pa.Buffer:
    copy = pa.allocate_buffer(buffer.size)
    with pa.FixedSizeBufferWriter(copy) as sink:
        sink.write(buffer)
    return copy


def _check_envelope(batch: pa.RecordBatch) -> None:
    names = batch.schema.names
    if "timestamp" in names:
        span = pc.min_max(batch.column("timestamp").view(pa.int64())).as_py()
        if span["min"] is not None and (span["min"] < _FIRST_TIME or span["max"] > _LAST_TIME):
            raise PackError("an event's timestamp is outside the years 1 to 9999", "values")
    if "headers" in names:
        entries = batch.column("headers").flatten()
        if any(part.null_count for part in entries.flatten()):
            raise PackError("a header has no key or no value", "values")


class Pack:
    """The events of one message, by column or one by one; returned by `decode`, so always valid.

    `count` is the number of events, `schema_id` the schema of typed values, `compression` the
    codec of the payload. Rows are numbered from 0, an event's `index`.
    """

    def __init__(self, stream: Stream, count: int, schema_id: str | None) -> None:
        self.count = count
        self.schema_id = schema_id
        self.compression = stream.compression
        self.schema: pa.Schema = stream.schema
        self.batches: tuple[pa.RecordBatch, ...] = stream.batches

    def __len__(self) -> int:
        return self.count

    def __repr__(self) -> str:
        return f"<Pack of {self.count:,} events, columns {', '.join(self.schema.names)}>"

    @property
    def typed(self) -> bool:
        """Whether values are structs of typed columns rather than bytes."""
        return bool(pa.types.is_struct(self.schema.field("value").type))

    @cached_property
    def batch(self) -> pa.RecordBatch:
        """All events as one batch with the columns that were sent.

        A view when the pack has one record batch, as Millstream's producers write them; several
        are joined.
        """
        if len(self.batches) == 1:
            return self.batches[0]
        if not self.batches:
            return pa.RecordBatch.from_pylist([], schema=self.schema)
        return pa.concat_batches(self.batches)

    def complete(self) -> pa.RecordBatch:
        """All events as one batch with all five envelope columns; those not sent are null."""
        return complete(self.batch)

    def column(self, name: str) -> pa.Array:
        """One envelope column of all events; one that was not sent is null."""
        if name in self.schema.names:
            return self.batch.column(name)
        if name not in COLUMN_TYPES:
            raise KeyError(f"packs have the columns {', '.join(ENVELOPE)}, not {name!r}")
        return pa.nulls(self.count, COLUMN_TYPES[name])

    def _has(self, name: str) -> bool:
        return name in self.schema.names and self.count > 0

    def keys(self) -> list[str | None]:
        """Each event's key; keys that are not UTF-8 have surrogate escapes."""
        return keys_to_python(self.column("key")) if self._has("key") else [None] * self.count

    def timestamps(self) -> list[int | None]:
        """Each event's time in nanoseconds since 1970; None stands for the message's own time."""
        if not self._has("timestamp"):
            return [None] * self.count
        column = self.column("timestamp")
        micros = column.view(pa.int64()).to_pylist()
        if column.null_count:
            return [None if time is None else time * 1000 for time in micros]
        return [time * 1000 for time in micros]

    def moments(self) -> list[datetime | None]:
        """Each event's time as a datetime in UTC; None stands for the message's own time."""
        if not self._has("timestamp"):
            return [None] * self.count
        return moments(self.column("timestamp").view(pa.int64()))

    def headers(self) -> list[Headers | None]:
        """Each event's headers as (key, value) pairs; None where it has none."""
        if not self._has("headers"):
            return [None] * self.count
        return headers_to_python(self.column("headers"))

    def ids(self) -> list[str | None]:
        """Each event's id."""
        if not self._has("id"):
            return [None] * self.count
        ids: list[str | None] = self.column("id").to_pylist()
        return ids

    def values(self) -> list[Any]:
        """Each event's value: a dict when typed, else bytes; None for a deletion."""
        return to_python(self.column("value"))

    def value_columns(self) -> dict[str, list[Any]]:
        """The typed columns as Python lists, the fastest path to objects: `map(Order, *columns)`.

        A deletion (null value) is None in every column. Raises `TypeError` for values that are
        bytes.
        """
        if not self.typed:
            raise TypeError("the values of this pack are bytes; value_columns() needs typed ones")
        value = self.column("value")
        children = value.flatten()
        names = [value.type.field(number).name for number in range(value.type.num_fields)]
        return {
            name: to_python(child, f"value.{name}")
            for name, child in zip(names, children, strict=True)
        }

    def event(self, index: int) -> Row:
        """One event by its index: slow, but works if other values do not fit Python's types."""
        if not 0 <= index < self.count:
            raise IndexError(f"the pack has {self.count:,} events, from 0; there is no {index}")
        stream = Stream(self.schema, (self.batch.slice(index, 1),), self.compression)
        return Pack(stream, 1, self.schema_id).events()[0]

    def events(self) -> list[Row]:
        """All events as tuples (key, timestamp, headers, id, value), in order."""
        columns = (self.keys(), self.timestamps(), self.headers(), self.ids(), self.values())
        return list(zip(*columns, strict=True))
