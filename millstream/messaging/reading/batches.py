"""Events as Arrow record batches: one for each pack, plain messages gathered between them.

Columns: key, timestamp, headers, id and value as in packs (docs/PACKS.md), then partition, offset
and index. Column data of a pack is not copied, neither here nor by resolving it to the reader's
schema version where its columns are the same.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from millstream.errors import SchemaError
from millstream.events.classify import kind_of
from millstream.events.event import (
    SCHEMA_HEADER,
    Partition,
    PlainEvent,
)
from millstream.events.packs.envelope import COLUMN_TYPES
from millstream.events.subject import key_bytes
from millstream.events.unpack import PackMessage, open_pack
from millstream.events.value_type import ValueType
from millstream.messaging.reading.replay import ReadPlan, read_messages
from millstream.wire.aio.jetstream import JetStream
from millstream.wire.message import RawMessage

__all__ = ["COLUMNS", "batches_of_messages", "read_batches"]

COLUMNS: Final = ("key", "timestamp", "headers", "id", "value", "partition", "offset", "index")
# Row numbers that are built once; larger packs build their own.
_NUMBERED: Final = 10_000
_NUMBERS: Final = pa.array(range(_NUMBERED), pa.int32())


async def read_batches(
    jetstream: JetStream,
    partitions: Sequence[Partition],
    plan: ReadPlan,
    value_type: ValueType | None,
) -> AsyncGenerator[pa.RecordBatch, None]:
    """The events of a plan as record batches, in order within each partition; each exactly once."""
    wanted = pa.array([key_bytes(key) for key in plan.keys], pa.binary())
    async for partition, messages in read_messages(jetstream, partitions, plan):
        for batch in batches_of_messages(partition, messages, value_type):
            if plan.keys:
                chosen = batch.filter(pc.is_in(batch.column("key"), wanted))
                if chosen.num_rows:
                    yield chosen
            else:
                yield batch


def batches_of_messages(
    partition: Partition, messages: Sequence[RawMessage], value_type: ValueType | None
) -> Iterator[pa.RecordBatch]:
    """The events of some messages as record batches, in order. Pure.

    Copies redriven for one subscription are skipped: they have been read here before.
    """
    plain: list[PlainEvent] = []
    for raw in messages:
        kind = kind_of(raw.subject, raw.headers, partition.prefix_size)
        if kind.redriven:
            continue
        if kind.is_pack:
            if plain:
                yield _gathered(plain, value_type)
                plain = []
            message = open_pack(partition, raw)
            if message.pack.count:
                yield _of_pack(message, value_type)
        elif kind.is_plain:
            plain.append(PlainEvent(partition, raw))
    if plain:
        yield _gathered(plain, value_type)


# -- packs --------------------------------------------------------------------------------


def _of_pack(message: PackMessage, value_type: ValueType | None) -> pa.RecordBatch:
    pack, address = message.pack, message.address
    count = pack.count
    value = pack.column("value")
    if value_type is not None:
        where = f"{message.partition.topic}/{message.partition.number}@{address.sequence}"
        if pack.typed:
            value = _named(where, lambda: value_type.resolve(value, pack.schema_id))
        else:
            payloads = [(data, pack.schema_id) for data in value.to_pylist()]
            value = _named(where, lambda: value_type.read_column(payloads))
    stored = pa.scalar(address.timestamp_ns // 1000, COLUMN_TYPES["timestamp"])
    if "timestamp" not in pack.schema.names:
        timestamp = pa.repeat(stored, count)
    else:
        timestamp = pack.column("timestamp")
        timestamp = timestamp.fill_null(stored) if timestamp.null_count else timestamp
    headers = pack.column("headers")
    if headers.type != COLUMN_TYPES["headers"]:
        headers = headers.cast(COLUMN_TYPES["headers"])  # another language's name of list items
    columns = [
        pack.column("key"),
        timestamp,
        headers,
        pack.column("id"),
        value,
        pa.repeat(pa.scalar(message.partition.number, pa.int32()), count),
        pa.repeat(pa.scalar(address.sequence, pa.int64()), count),
        _numbers(count),
    ]
    return pa.RecordBatch.from_arrays(columns, names=list(COLUMNS))


def _numbers(count: int) -> pa.Array:
    return _NUMBERS[:count] if count <= _NUMBERED else pa.array(range(count), pa.int32())


def _named(where: str, make: Any) -> Any:
    """The result, or the schema's error with the position of the message."""
    try:
        return make()
    except SchemaError as error:
        raise SchemaError(f"{where}: {error}") from error


# -- plain messages -----------------------------------------------------------------------


def _gathered(events: list[PlainEvent], value_type: ValueType | None) -> pa.RecordBatch:
    keys = [None if event.key is None else key_bytes(event.key) for event in events]
    headers = [_header_items(event) for event in events]
    columns = [
        pa.array(keys, COLUMN_TYPES["key"]),
        pa.array([e.timestamp_ns // 1000 for e in events], pa.int64()).view(
            COLUMN_TYPES["timestamp"]
        ),
        pa.array(headers, COLUMN_TYPES["headers"]),
        pa.array([event.id for event in events], COLUMN_TYPES["id"]),
        _values(events, value_type),
        pa.array([event.partition for event in events], pa.int32()),
        pa.array([event.offset for event in events], pa.int64()),
        pa.repeat(pa.scalar(0, pa.int32()), len(events)),
    ]
    return pa.RecordBatch.from_arrays(columns, names=list(COLUMNS))


def _header_items(event: PlainEvent) -> list[dict[str, Any]] | None:
    own = event.headers
    if not own:
        return None
    return [
        {"key": name, "value": text.encode("utf-8", "surrogateescape")}
        for name, text in own.items()
    ]


def _values(events: list[PlainEvent], value_type: ValueType | None) -> pa.Array:
    payloads = [
        (None if event.is_deletion else event.data, event.header(SCHEMA_HEADER)) for event in events
    ]
    if value_type is None:
        return pa.array([data for data, _ in payloads], pa.binary())
    try:
        return value_type.read_column(payloads)
    except SchemaError:
        for event, payload in zip(events, payloads, strict=True):
            where = f"{event.topic}/{event.partition}@{event.offset}"
            _named(where, lambda one=payload: value_type.read_column([one]))
        raise
