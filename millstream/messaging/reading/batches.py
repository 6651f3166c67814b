"""Events as Arrow record batches: one for each pack, plain messages gathered between them.

Columns: key, timestamp, headers, id and value as in packs (docs/PACKS.md), then partition, offset
and index. Column data of a pack is not copied, neither here nor by resolving it to the reader's
schema version where its columns are the same.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from millstream.errors import Undecodable
from millstream.events.classify import kind_of
from millstream.events.escapes import escaped, header_pairs
from millstream.events.event import (
    SCHEMA_HEADER,
    Partition,
    PlainEvent,
)
from millstream.events.packs.envelope import COLUMN_TYPES
from millstream.events.start import Start
from millstream.events.subject import key_bytes
from millstream.events.undecodable import DECODE_FAILURES, Report, reason_of
from millstream.events.unpack import open_pack, undecodable
from millstream.events.value_type import ValueType
from millstream.messaging.reading.last_per_key import check_follow, last_messages
from millstream.messaging.reading.replay import ReadPlan, end_of, holds_packs, read_messages
from millstream.wire.aio.jetstream import JetStream
from millstream.wire.message import RawMessage

__all__ = ["COLUMNS", "batches_of_messages", "read_batches"]

COLUMNS: Final = ("key", "timestamp", "headers", "id", "value", "partition", "offset", "index")
# Row numbers that are built once; larger packs build their own.
_NUMBERED: Final = 10_000
# Rows of a topic with packs that are held before only the last of each key are kept.
LAST_ROWS: Final = 50_000
_NUMBERS: Final = pa.array(range(_NUMBERED), pa.int32())


async def read_batches(
    jetstream: JetStream,
    partitions: Sequence[Partition],
    plan: ReadPlan,
    value_type: ValueType | None,
) -> AsyncGenerator[pa.RecordBatch, None]:
    """The events of a plan as record batches, in order within each partition; each exactly once."""
    wanted = pa.array([key_bytes(key) for key in plan.keys], pa.binary())
    report = plan.report()
    chosen = plan.chosen(partitions)
    if plan.start == Start.LAST_PER_KEY:
        if not plan.follow:
            for partition in chosen:
                async for batch in _last_batches(jetstream, partition, plan, value_type):
                    yield batch
            return
        await check_follow(jetstream, chosen)
    async for partition, messages in read_messages(jetstream, chosen, plan):
        for batch in batches_of_messages(partition, messages, value_type, report):
            found = batch.filter(pc.is_in(batch.column("key"), wanted)) if plan.keys else batch
            if found.num_rows:
                yield found


async def _last_batches(
    jetstream: JetStream, partition: Partition, plan: ReadPlan, value_type: ValueType | None
) -> AsyncGenerator[pa.RecordBatch, None]:
    """The last event of each key."""
    end = await end_of(jetstream, partition, plan.end)
    if not await holds_packs(jetstream, partition):
        report = plan.report()
        async for messages in last_messages(jetstream, partition, plan, end):
            for batch in batches_of_messages(partition, messages, value_type, report):
                yield batch
        return
    everything = replace(plan, start=Start.ALL, end=end)
    found: list[pa.RecordBatch] = []
    rows, limit = 0, LAST_ROWS
    async for batch in read_batches(jetstream, [partition], everything, value_type):
        found.append(batch)
        rows += batch.num_rows
        if rows > limit:
            found = [_last_rows(found)]
            rows = found[0].num_rows
            limit = max(LAST_ROWS, 2 * rows)
    if found:
        yield _last_rows(found)


def _last_rows(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    """The last row of each key, in order."""
    batch = pa.concat_batches(batches)
    numbered = pa.table({"key": batch.column("key"), "row": pa.array(range(batch.num_rows))})
    last = numbered.group_by("key").aggregate([("row", "max")]).column("row_max")
    return batch.take(last.combine_chunks().sort())


def batches_of_messages(
    partition: Partition,
    messages: Sequence[RawMessage],
    value_type: ValueType | None,
    report: Report | None = None,
) -> Iterator[pa.RecordBatch]:
    """The events of some messages as record batches, in order. Pure.

    The first event that cannot be decoded is raised after those before it; with `report` that is
    called with each of them, and they are left out.

    Copies redriven for one subscription are skipped: they have been read here before.
    """
    plain: list[PlainEvent] = []
    for raw in messages:
        kind = kind_of(raw.subject, raw.headers, partition.prefix_size)
        if kind.redriven:
            continue
        if kind.is_pack:
            if plain:
                yield from _gathered(plain, value_type, report)
                plain = []
            yield from _of_pack(partition, raw, value_type, report)
        elif kind.is_plain:
            plain.append(PlainEvent(partition, raw))
    if plain:
        yield from _gathered(plain, value_type, report)


def _decoded(
    columns: dict[str, Any],
    values: Callable[[int, int], Any],  # from a row on, so many
    position: Callable[[int, str], Undecodable],  # of a row, with the reason
    report: Report | None,
) -> Iterator[pa.RecordBatch]:
    """The columns with their values, without the rows whose values cannot be decoded."""
    count = len(columns["offset"])
    error: Undecodable | None = None
    try:
        columns["value"] = values(0, count)
    except DECODE_FAILURES:
        rows: list[int] = []
        found: list[pa.Array] = []
        for row in range(count):  # one by one, because one of them cannot be decoded
            try:
                found.append(values(row, 1))
                rows.append(row)
            except DECODE_FAILURES as cause:
                error = position(row, reason_of(cause))
                if report is None:
                    break
                report(error)
        kept = pa.array(rows, pa.int64())
        columns = {name: column.take(kept) for name, column in columns.items()}
        columns["value"] = pa.concat_arrays(found) if found else None
    if columns["value"] is not None:
        yield pa.RecordBatch.from_arrays([columns[name] for name in COLUMNS], names=list(COLUMNS))
    if error is not None and report is None:
        raise error


# -- packs --------------------------------------------------------------------------------


def _of_pack(
    partition: Partition, raw: RawMessage, value_type: ValueType | None, report: Report | None
) -> Iterator[pa.RecordBatch]:
    try:
        message = open_pack(partition, raw)
    except DECODE_FAILURES as cause:
        error = undecodable(partition, raw, cause)
        if report is None:
            raise error from cause
        report(error)
        return
    pack, address = message.pack, message.address
    count = pack.count
    if not count:
        return
    stored = pa.scalar(address.timestamp_ns // 1000, COLUMN_TYPES["timestamp"])
    if "timestamp" not in pack.schema.names:
        timestamp = pa.repeat(stored, count)
    else:
        timestamp = pack.column("timestamp")
        timestamp = timestamp.fill_null(stored) if timestamp.null_count else timestamp
    headers = pack.column("headers")
    if headers.type != COLUMN_TYPES["headers"]:
        headers = headers.cast(COLUMN_TYPES["headers"])  # another language's name of list items
    columns = {
        "key": pack.column("key"),
        "timestamp": timestamp,
        "headers": headers,
        "id": pack.column("id"),
        "partition": pa.repeat(pa.scalar(partition.number, pa.int32()), count),
        "offset": pa.repeat(pa.scalar(address.sequence, pa.int64()), count),
        "index": _numbers(count),
    }
    value = pack.column("value")

    def values(start: int, length: int) -> pa.Array:
        part = value.slice(start, length)
        if value_type is None:
            return part
        if pack.typed:
            return value_type.resolve(part, pack.schema_id)
        return value_type.read_column([(data, pack.schema_id) for data in part.to_pylist()])

    def position(row: int, reason: str) -> Undecodable:
        return Undecodable(partition.topic, partition.number, address.sequence, row, reason)

    yield from _decoded(columns, values, position, report)


def _numbers(count: int) -> pa.Array:
    return _NUMBERS[:count] if count <= _NUMBERED else pa.array(range(count), pa.int32())


# -- plain messages -----------------------------------------------------------------------


def _gathered(
    events: list[PlainEvent], value_type: ValueType | None, report: Report | None
) -> Iterator[pa.RecordBatch]:
    keys = [None if event.key is None else key_bytes(event.key) for event in events]
    ids = [None if event.id is None else escaped(event.id) for event in events]
    times = pa.array([event.timestamp_ns // 1000 for event in events], pa.int64())
    columns = {
        "key": pa.array(keys, COLUMN_TYPES["key"]),
        "timestamp": times.view(COLUMN_TYPES["timestamp"]),
        "headers": pa.array(
            [header_pairs(event.headers) or None for event in events], COLUMN_TYPES["headers"]
        ),
        "id": pa.array(ids, COLUMN_TYPES["id"]),
        "partition": pa.array([event.partition for event in events], pa.int32()),
        "offset": pa.array([event.offset for event in events], pa.int64()),
        "index": pa.repeat(pa.scalar(0, pa.int32()), len(events)),
    }

    def values(start: int, length: int) -> pa.Array:
        payloads = [
            (None if event.is_deletion else event.data, event.header(SCHEMA_HEADER))
            for event in events[start : start + length]
        ]
        if value_type is None:
            return pa.array([data for data, _ in payloads], pa.binary())
        return value_type.read_column(payloads)

    def position(row: int, reason: str) -> Undecodable:
        return Undecodable(events[row].topic, *events[row].position, reason)

    yield from _decoded(columns, values, position, report)
