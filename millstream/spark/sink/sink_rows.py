"""Rows of a sink: checked, and sorted by topic and partition. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from millstream.errors import ConfigError, Unfit
from millstream.events.event import RESERVED_PREFIXES
from millstream.events.packs.pack import envelope
from millstream.events.row_buffer import by_partition
from millstream.events.subject import KEY_BYTES_MAX

__all__ = ["SINK_COLUMNS", "by_topic", "check_columns", "enveloped", "partitioned"]

SINK_COLUMNS: Final[Mapping[str, str]] = {
    "key": "binary or string",
    "value": "binary, string or struct",
    "headers": "array<struct<key: string, value: binary>>",
    "timestamp": "timestamp",
    "topic": "string",
    "partition": "int",
}


def check_columns(schema: pa.Schema, topic: str | None, is_table: bool) -> None:
    """Reject rows with columns that a sink does not accept, before any is written."""
    names: list[str] = schema.names
    for name in names:
        if name not in SINK_COLUMNS:
            raise ConfigError(
                f"the sink takes the columns {', '.join(SINK_COLUMNS)}; drop '{name}', or make it "
                f"part of the value: struct(...) AS value"
            )
    if "value" not in names:
        raise ConfigError("the sink needs a column 'value'")
    if topic is None and "topic" not in names:
        raise ConfigError("no topic to write to: set the option 'topic', or add a column 'topic'")
    if is_table and "key" not in names:
        raise ConfigError("a table needs a column 'key'")
    for name in names:
        if not _fits(name, schema.field(name).type):
            raise ConfigError(
                f"column '{name}' must be {SINK_COLUMNS[name]}, not {schema.field(name).type}"
            )


def _fits(name: str, kind: pa.DataType) -> bool:
    types = pa.types
    text = types.is_binary(kind) or types.is_string(kind)
    if name in ("key", "topic"):
        return bool(text)
    if name == "value":
        return bool(text or types.is_struct(kind))
    if name == "timestamp":
        return bool(types.is_timestamp(kind))
    if name == "partition":
        return bool(types.is_integer(kind))
    return bool(types.is_list(kind) and types.is_struct(kind.value_type))


def by_topic(batch: pa.RecordBatch, topic: str | None) -> Iterator[tuple[str, pa.RecordBatch]]:
    """The rows of each topic, in their order; an option names one for all."""
    if topic is not None:
        yield topic, batch
        return
    names = batch.column("topic")
    if names.null_count:
        raise Unfit("topic", "the name of a topic in every row", "null")
    for name in sorted(names.unique().to_pylist()):
        yield name, batch.filter(pc.equal(names, name))


def enveloped(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The rows as events: key, timestamp, headers and value."""
    columns = {name: batch.column(name) for name in batch.schema.names}
    key = columns.get("key")
    if key is not None:
        longest = pc.max(pc.binary_length(key)).as_py()
        if longest is not None and longest > KEY_BYTES_MAX:
            raise Unfit("key", f"at most {KEY_BYTES_MAX:,} bytes", f"{longest:,}")
    return envelope(
        columns["value"],
        key=key,
        timestamp=columns.get("timestamp"),
        headers=_headers(columns.get("headers")),
    )


def _headers(column: pa.Array | None) -> pa.Array | None:
    if column is None:
        return None
    names, values = column.flatten().flatten()
    if names.null_count or values.null_count:
        raise Unfit("headers", "a key and a value in every header", "null")
    for name in names.unique().to_pylist():
        if name.startswith(RESERVED_PREFIXES):
            raise Unfit("headers", "names that do not start with Nats- or Mill-", repr(name))
    return column


def partitioned(
    rows: pa.RecordBatch, chosen: pa.Array | None, partitions: int, turn: int
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """The events of each partition: the one a row names, else by key; without a key by `turn`."""
    if chosen is None or chosen.null_count == len(chosen):
        yield from by_partition(rows, partitions, turn % partitions)
        return
    for number in sorted(n for n in chosen.unique().to_pylist() if n is not None):
        if not 0 <= number < partitions:
            raise Unfit("partition", f"0 to {partitions - 1}", str(number))
        yield number, rows.filter(pc.fill_null(pc.equal(chosen, number), False))
    if chosen.null_count:
        rest = rows.filter(pc.is_null(chosen))
        yield from by_partition(rest, partitions, turn % partitions)
