"""Kafka's record batches to columns of a pack and back. Pure.

Records are read and written by aiokafka's compiled classes. They are meant for answers of a
broker: sizes are compared with what is there before memory is taken, but numbers are read
without looking for the end of the buffer, and headers become objects as many as a record says.
So they get buffers with zeros after their end, and records that could hold very many headers are
looked at before.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, repeat
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
from aiokafka.errors import CorruptRecordException
from aiokafka.record._crecords import DefaultRecordBatch, DefaultRecordBatchBuilder

from millstream.events.event import PlainEvent
from millstream.events.packs.envelope import COLUMN_TYPES
from millstream.events.packs.pack import Pack
from millstream.events.packs.packing import PACK_BYTES_MAX, PACK_EVENTS_MAX
from millstream.events.subject import key_bytes
from millstream.gateways.kafka.batch_codecs import decompress
from millstream.gateways.kafka.batch_heads import (
    BEFORE_LENGTH,
    HEAD_SIZE,
    NO_TIME,
    NUMBERED,
    RECORD_SIZE_MIN,
    BadBatch,
    BatchHead,
    RawBatch,
    empty_batch,
    head_of,
    split_batches,
    uncompressed_head,
    with_base_offset,
)
from millstream.gateways.kafka.bulk_records import RECORDS_MIN as WRITTEN_MIN
from millstream.gateways.kafka.bulk_records import written_records
from millstream.gateways.kafka.equal_records import RECORDS_MIN, read_equal
from millstream.gateways.kafka.protocol import ErrorCode

__all__ = [
    "BadBatch",
    "BatchHead",
    "RawBatch",
    "Records",
    "empty_batch",
    "from_events",
    "from_pack",
    "read_records",
    "split_batches",
    "with_base_offset",
]

# The years 1 to 9999 in milliseconds since 1970.
_FIRST_MS: Final = -62_135_596_800_000
_LAST_MS: Final = 253_402_300_799_999
_OFFSET_SIZE: Final = 8
_PAD: Final = bytes(32)  # after a buffer's end: numbers end at the first zero
_HEADERS_MAX: Final = 500_000  # of the records of one batch
_LARGE_RECORD: Final = 64 * 1024  # may hold very many headers
_LARGE_BODY: Final = 1024 * 1024
_FEW: Final = 32  # records
_NO_HEADERS: Final[list[tuple[str, bytes | None]]] = []
_BATCH_MAX: Final = 2**31 - 1
_DELTA_MAX: Final = 2**31 - 1


# -- produce ----------------------------------------------------------------------------------


class Records(NamedTuple):
    """The records of some batches, one after the other, as they are stored."""

    columns: pa.RecordBatch  # for a pack: key, timestamp, headers and a value of bytes
    times: tuple[int, int] | None  # the smallest and the largest, in ms; None: none has a time
    all_timed: bool  # every record has a time; one without has that of storing
    # Whether a reader of the stored columns gets what the batches had, byte for byte: then the
    # batches may be handed out instead of them. The value null of a header becomes empty.
    same_as_sent: bool


def read_records(
    batches: Sequence[RawBatch],
    *,
    max_bytes: int = PACK_BYTES_MAX,
    max_records: int = PACK_EVENTS_MAX,
) -> Records:
    """The records of some batches, one after the other.

    BadBatch, with the number of the batch, for records that cannot be read, and when they are more
    than the limits allow, which are checked before memory is taken.
    """
    if sum(batch.head.count for batch in batches) > max_records:
        raise BadBatch(
            ErrorCode.message_too_large, f"more than {max_records:,} records; send smaller batches"
        )
    rows = _Rows()
    left = max_bytes
    starts = []
    for number, batch in enumerate(batches):
        starts.append(rows.count)
        try:
            left -= rows.read(batch, left)
        except BadBatch as error:
            error.batch = number
            raise
    try:
        return rows.records()
    except BadBatch as error:
        row = error.index or 0
        error.batch = bisect_right(starts, row) - 1
        error.index = row - starts[error.batch]
        raise


class _Rows:
    """The records of some batches, column by column."""

    def __init__(self) -> None:
        self.count = 0
        self._columns: list[tuple[pa.Array, Any, pa.Array]] = []  # keys, times, values
        self._headers: dict[int, list[tuple[str, bytes | None]]] = {}  # by row, where there are any

    def read(self, batch: RawBatch, limit: int) -> int:
        """Add the records of a batch; returns their size."""
        head, raw = batch
        plain = raw if head.codec == 0 else _decompressed(batch, limit)
        size = len(plain) - HEAD_SIZE
        if head.count > size // RECORD_SIZE_MIN:
            raise BadBatch(
                ErrorCode.invalid_record,
                f"{size:,} bytes of records say {head.count:,} records",
            )
        equal = read_equal(plain, HEAD_SIZE, head.count) if head.count >= RECORDS_MIN else None
        if equal is None:
            self._columns.append(self._read_one_by_one(plain, head.count))
        else:
            times = head.first_time_ms + equal.time_deltas
            self._columns.append((equal.keys, times, equal.values))
        self.count += head.count
        return size

    def _read_one_by_one(
        self, plain: bytes | memoryview, count: int
    ) -> tuple[pa.Array, Any, pa.Array]:
        # The client's base offset, which means nothing, becomes 0.
        padded = b"".join((bytes(_OFFSET_SIZE), memoryview(plain)[_OFFSET_SIZE:], _PAD))
        buffer = memoryview(padded)[: -len(_PAD)]
        if len(plain) > _LARGE_BODY:
            _check_large_records(count, padded)
        keys: list[bytes | None] = []
        times: list[int] = []
        values: list[bytes | None] = []
        header_count = 0
        try:
            for index, record in enumerate(DefaultRecordBatch(buffer)):
                if record.offset != index:
                    raise BadBatch(
                        ErrorCode.invalid_record, f"its offset delta is {record.offset}", index
                    )
                if record.headers:
                    header_count += len(record.headers)
                    if header_count > _HEADERS_MAX:
                        raise _too_many_headers(index)
                    self._headers[self.count + index] = record.headers
                keys.append(record.key)
                times.append(record.timestamp)
                values.append(record.value)
        except BadBatch:
            raise
        except UnicodeDecodeError:
            raise BadBatch(
                ErrorCode.invalid_record, "a header's name is not UTF-8", len(keys)
            ) from None
        except (CorruptRecordException, ValueError, OverflowError, MemoryError) as error:
            raise BadBatch(
                ErrorCode.corrupt_message, f"it cannot be read: {error!s:.200}", len(keys)
            ) from error
        return _binary(keys), times, _binary(values)

    def records(self) -> Records:
        """All of them."""
        keys, times, values = zip(*self._columns, strict=True)
        timestamps, span = _time_column(times)
        all_timed = not timestamps.null_count
        headers, has_nulls = self._header_column()
        columns = {
            "key": _one(keys),
            "timestamp": timestamps,
            "headers": headers,
            "value": _one(values),
        }
        found = {
            name: column
            for name, column in columns.items()
            if column is not None and (name == "value" or column.null_count < self.count)
        }
        return Records(
            pa.RecordBatch.from_arrays([*found.values()], [*found]),
            span,
            all_timed,
            same_as_sent=not has_nulls and all_timed,
        )

    def _header_column(self) -> tuple[pa.Array | None, bool]:
        """The column, and whether a header has no value."""
        if not self._headers:
            return None, False
        found = self._headers
        counts = [len(found.get(row, ())) for row in range(self.count)]
        starts: list[int | None] = list(accumulate(counts, initial=0))
        for row, count in enumerate(counts):
            if not count:
                starts[row] = None  # no headers: null, as in packs of the SDK
        entries = [entry for row in sorted(found) for entry in found[row]]
        names = pa.array([name for name, _ in entries], pa.string())
        values = pa.array([value for _, value in entries], pa.binary())
        has_nulls = values.null_count > 0
        filled = values.fill_null(b"") if has_nulls else values
        pairs = pa.StructArray.from_arrays([names, filled], ["key", "value"])
        return pa.ListArray.from_arrays(pa.array(starts, pa.int32()), pairs), has_nulls


def _time_column(parts: Sequence[Any]) -> tuple[pa.Array, tuple[int, int] | None]:
    """Times in milliseconds as a column, with the smallest and the largest; None: none is known."""
    if len(parts) == 1 and len(parts[0]) <= _FEW:
        few = parts[0]  # numpy takes long to begin, too
        first, last = min(few), max(few)
        if NO_TIME not in few and first >= _FIRST_MS and last <= _LAST_MS:
            return _timestamps(array("q", [time * 1000 for time in few])), (first, last)
    times = np.concatenate(parts)
    first, last = int(times.min()), int(times.max())
    if first < _FIRST_MS or last > _LAST_MS:
        row = int(np.flatnonzero((times < _FIRST_MS) | (times > _LAST_MS))[0])
        raise BadBatch(
            ErrorCode.invalid_timestamp,
            f"the time {times[row]} ms since 1970 is not of the years 1 to 9999",
            row,
        )
    unknown = times == NO_TIME if first <= NO_TIME <= last else None
    if unknown is None or not unknown.any():
        return _timestamps(times * 1000), (first, last)
    known = times[~unknown]
    column = pa.array(times * 1000, mask=unknown).view(COLUMN_TYPES["timestamp"])
    return column, (int(known.min()), int(known.max())) if len(known) else None


def _timestamps(micros: Any) -> pa.Array:
    buffers = [None, pa.py_buffer(micros)]
    return pa.Array.from_buffers(COLUMN_TYPES["timestamp"], len(micros), buffers)


def _binary(items: Sequence[bytes | None]) -> pa.Array:
    """An array of them. Arrow's conversion takes long to begin, which counts for few."""
    known = [item for item in items if item is not None]
    if len(items) > _FEW or 0 < len(known) < len(items):
        return pa.array(items, pa.binary())
    if not known:
        return pa.nulls(len(items), pa.binary())
    ends = array("i", accumulate(map(len, known), initial=0))
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(b"".join(known))]
    return pa.Array.from_buffers(pa.binary(), len(known), buffers)


def _decompressed(batch: RawBatch, limit: int) -> bytes:
    """The batch without compression; its checksum is not right."""
    head, raw = batch
    return b"".join(
        [uncompressed_head(raw), *decompress(head.codec, memoryview(raw)[HEAD_SIZE:], limit)]
    )


def _one(arrays: Sequence[pa.Array]) -> pa.Array:
    return arrays[0] if len(arrays) == 1 else pa.concat_arrays(arrays)


def _check_large_records(count: int, padded: bytes) -> None:
    """Refuse records with very many headers before they become objects."""
    buffer = memoryview(padded)[: -len(_PAD)]
    at = HEAD_SIZE
    for index in range(count):
        # Nearly all have sizes of one byte or two, and cannot have many headers.
        first, second = padded[at], padded[at + 1]
        if first & 1 or first & second & 0x80:
            at = _checked_record(buffer, at, index)
        elif first < 0x80:
            at += 1 + (first >> 1)
        else:
            at += 2 + ((first & 0x7F | second << 7) >> 1)
        if at > len(buffer):
            raise _cut_off(index)


def _checked_record(buffer: memoryview, at: int, index: int) -> int:
    """Where a record ends; BadBatch if it has too many headers."""
    size, at = _number(buffer, at, index)
    end = at + size
    if size < 0 or end > len(buffer):
        raise _cut_off(index)
    if size > _LARGE_RECORD:
        at += 1  # attributes
        for _ in range(2):  # time, offset
            _, at = _number(buffer, at, index)
        for _ in range(2):  # key, value
            length, at = _number(buffer, at, index)
            at += max(length, 0)
            if at >= end:
                raise _cut_off(index)
        headers, at = _number(buffer, at, index)
        if headers > _HEADERS_MAX:
            raise _too_many_headers(index)
    return end


def _number(buffer: memoryview, at: int, index: int) -> tuple[int, int]:
    """A number of variable length, and where the next begins."""
    found = shift = 0
    for place in range(at, min(at + 10, len(buffer))):
        byte = buffer[place]
        found |= (byte & 0x7F) << shift
        if byte < 0x80:
            return (found >> 1) ^ -(found & 1), place + 1
        shift += 7
    raise _cut_off(index)


def _cut_off(index: int) -> BadBatch:
    return BadBatch(ErrorCode.corrupt_message, "a number in it cannot be read", index)


def _too_many_headers(index: int) -> BadBatch:
    return BadBatch(
        ErrorCode.invalid_record, f"more than {_HEADERS_MAX:,} headers in one batch", index
    )


# -- fetch ------------------------------------------------------------------------------------


def from_pack(
    pack: Pack,
    base_offset: int,
    stored_ms: int,
    values: Callable[[pa.Array], list[bytes | None]] | None = None,
    leader_epoch: int = 0,
) -> tuple[bytes | bytearray | memoryview, ...]:
    """The events of a pack as one batch, without compression, in pieces to be joined.

    `stored_ms` is the time of events that have none. `values` makes bytes of a typed value column;
    a pack with typed values needs it.
    """
    if not pack.count:
        raise ValueError("a pack without events is no batch: it takes no offset")
    names = pack.schema.names
    payloads = pack.column("value")
    if pack.typed:
        if values is None:
            raise ValueError("the values of this pack are typed: give what makes bytes of them")
        payloads = pa.array(values(payloads), pa.binary())
        if not isinstance(payloads, pa.Array):  # Arrow makes several of them
            raise ValueError("the values of this pack are more than 2 GiB as bytes")
    keys = pack.column("key") if "key" in names else None
    times = _pack_times(pack, stored_ms)
    plain = "headers" not in names or pack.column("headers").null_count == pack.count
    if plain and pack.count >= WRITTEN_MIN:
        try:
            pieces = list(written_records(keys, payloads, times))
        except pa.ArrowCapacityError as error:
            raise ValueError(f"the records of this pack are too large: {error}") from error
        return head_of(pieces, times, base_offset, leader_epoch), *pieces
    builder = _builder()
    _append_all(
        builder,
        range(pack.count),
        times.tolist(),
        repeat(None) if keys is None else keys.to_pylist(),
        payloads.to_pylist(),
        None if plain else pack.headers(),
    )
    return (_numbered(builder, base_offset, leader_epoch),)


def from_events(
    events: Sequence[tuple[int, PlainEvent]],
    values: Callable[[Sequence[PlainEvent]], list[bytes | None]] | None = None,
    leader_epoch: int = 0,
) -> bytearray:
    """Plain events with their offsets as one batch, without compression; offsets may have gaps.

    `values` makes the bytes of all of them where the topic's values are not sent as they are
    stored.
    """
    if not events:
        raise ValueError("there are no events to make a batch of")
    base_offset = events[0][0]
    if events[-1][0] - base_offset > _DELTA_MAX:
        raise ValueError(f"offsets {base_offset} to {events[-1][0]} do not fit one batch")
    plain = [event for _, event in events]
    if values is None:
        payloads = [None if event.is_deletion else event.data for event in plain]
    else:
        payloads = values(plain)
    builder = _builder()
    _append_all(
        builder,
        [offset - base_offset for offset, _ in events],
        [_time_ms(event.timestamp_ns // 1_000_000) for event in plain],
        [None if event.key is None else key_bytes(event.key) for event in plain],
        payloads,
        [_event_headers(event) for event in plain],
    )
    return _numbered(builder, base_offset, leader_epoch)


def _event_headers(event: PlainEvent) -> list[tuple[str, bytes]]:
    # Names are text in Kafka; in a message they can be any bytes.
    return [
        (_as_bytes(name).decode("utf-8", "replace"), _as_bytes(text))
        for name, text in event.headers.items()
    ]


def _as_bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _pack_times(pack: Pack, stored_ms: int) -> Any:
    """In milliseconds, as a numpy array."""
    if "timestamp" not in pack.schema.names:
        return np.full(pack.count, stored_ms, np.int64)
    column = pack.column("timestamp").view(pa.int64())
    filled = column.fill_null(stored_ms * 1000) if column.null_count else column
    found = filled.to_numpy(zero_copy_only=False) // 1000
    found[found == NO_TIME] = 0
    return found


def _time_ms(time: int) -> int:
    """The time as a record's; the one millisecond that means "no time" in Kafka is 1970's first."""
    return 0 if time == NO_TIME else time


def _builder() -> DefaultRecordBatchBuilder:
    return DefaultRecordBatchBuilder(2, 0, 0, -1, -1, -1, _BATCH_MAX)


def _append_all(
    builder: DefaultRecordBatchBuilder,
    deltas: Iterable[int],
    times: Iterable[int],
    keys: Iterable[bytes | None],
    values: Iterable[bytes | None],
    headers: Iterable[list[tuple[str, bytes]] | None] | None,
) -> None:
    """Append records; all but the deltas may go on for ever."""
    own = repeat(_NO_HEADERS) if headers is None else (found or _NO_HEADERS for found in headers)
    if None in map(builder.append, deltas, times, keys, values, own):
        raise ValueError(f"the events do not fit a batch of {_BATCH_MAX:,} bytes")


def _numbered(builder: DefaultRecordBatchBuilder, base_offset: int, leader_epoch: int) -> bytearray:
    raw: bytearray = builder.build()
    NUMBERED.pack_into(raw, 0, base_offset, len(raw) - BEFORE_LENGTH, leader_epoch)
    return raw
