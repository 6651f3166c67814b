"""Reading a table as a DataFrame: the value of each key when a task reads it, or at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from itertools import repeat
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import DataSourceReader, InputPartition

from millstream.errors import HistoryGone
from millstream.events.subject import key_token
from millstream.messaging.topics.forgotten import (
    LOOKED_AT,
    check_created,
    doubt,
    first_after,
    history_of,
    nothing_removed,
    overwritten,
    past_time,
    was_first,
)
from millstream.settings import ConnectionSettings
from millstream.spark.broker_access import PATIENCE_SECONDS, connection_to, jetstream_to
from millstream.spark.options import SourceOptions
from millstream.spark.short_errors import short_errors
from millstream.spark.source.frames import read_frames
from millstream.spark.source.offsets import PartitionOffset, PartitionState
from millstream.spark.source.partitions import check_partition, find_partitions
from millstream.spark.source.range_reader import WINDOW, Batches, RangeReader, joined
from millstream.spark.source.row_schema import shape_of
from millstream.wire.message import StoredMessage
from millstream.wire.sync.connection import BlockingJetStream
from millstream.wire.sync.streams import get_messages, sequence_at, stream_info

__all__ = ["TablePartition", "TableReader"]

# Each round reads what changed during the round before, so they soon take no time.
ROUNDS_MAX: Final = 20


class TablePartition(InputPartition):
    """One partition of a table. It has no offsets: each read takes the table as it is then.

    With a time it has the offset that comes after it.
    """

    def __init__(
        self, state: PartitionState, time: datetime | None = None, end: int | None = None
    ) -> None:
        super().__init__(state.stream)
        self.state = state
        self.time = time
        self.end = end


class TableReader(DataSourceReader):
    """Reads the current value of each key.

    A stream that is joined with a table sees the table as it is at each batch: Spark plans the
    tasks of a static side once, so their offsets must not be part of the plan.
    """

    def __init__(
        self, settings: ConnectionSettings, options: SourceOptions, reader: RangeReader
    ) -> None:
        self._settings = settings
        self._options = options
        self._reader = reader

    @short_errors()
    def partitions(self) -> list[InputPartition]:
        """One task for each partition of the table."""
        states = find_partitions(jetstream_to(self._settings), self._options)
        for state in states.values():
            start = PartitionOffset(state.first, state.created)
            check_partition(start, state, self._options.fail_on_data_loss)
        if self._options.as_of is not None:
            return self._at(list(states.values()), self._options.as_of)
        return [TablePartition(state) for state in states.values()]

    def _at(self, states: list[PartitionState], time: datetime) -> list[InputPartition]:
        """The partitions as they were at a time."""
        jetstream, table = jetstream_to(self._settings), states[0].topic
        infos = [stream_info(jetstream, state.stream, PATIENCE_SECONDS) for state in states]
        time = past_time(table, time, infos)
        ends = []
        for state, info in zip(states, infos, strict=True):
            found = sequence_at(jetstream, state.stream, first_after(time), PATIENCE_SECONDS)
            ends.append(info.state.last_seq + 1 if found is None else found)
        check_created(table, time, infos, ends)
        return [TablePartition(*one) for one in zip(states, repeat(time), ends, strict=False)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The current rows of one partition; deleted keys are left out."""
        if not isinstance(partition, TablePartition):
            return iter(())
        if partition.time is not None and partition.end is not None:
            return self._rows_at(partition.state, partition.time, partition.end)
        return self._rows(partition.state)

    def _rows(self, state: PartitionState) -> Iterator[pa.RecordBatch]:
        batches = _with_key_and_offset(self._reader).batches_of(state)
        found, _ = self._until_now(batches, state, 1)
        if found:
            yield from joined(_latest(found, self._reader.schema).to_batches())

    def _rows_at(self, state: PartitionState, time: datetime, end: int) -> Iterator[pa.RecordBatch]:
        """The rows before an offset; HistoryGone if one of them may be removed."""
        batches = _with_key_and_offset(self._reader).batches_of(state)
        keys_only = replace(self._reader, schema=pa.schema([pa.field("key", pa.binary())]))
        keys = keys_only.batches_of(state)
        found: list[pa.RecordBatch] = []
        known: set[bytes] = set()
        connection = connection_to(self._settings)
        for frames in read_frames(connection, state.stream, 1, end, (), WINDOW):
            found.extend(batches.of(frames))
            known.update(_counts(list(keys.of(frames))))
        # Who was overwritten since then has as many values after it as the table keeps.
        later, complete = self._until_now(keys, state, end)
        forgotten = _Forgotten(jetstream_to(self._settings), state, time)
        forgotten.check(_counts(later), known, complete)
        if found:
            yield from joined(_latest(found, self._reader.schema).to_batches())

    def _until_now(
        self, batches: Batches, state: PartitionState, start: int
    ) -> tuple[list[pa.RecordBatch], bool]:
        """The rows from an offset on, and whether nothing comes after them."""
        connection = connection_to(self._settings)
        jetstream = jetstream_to(self._settings)
        found: list[pa.RecordBatch] = []
        # A key that changes while we read moves to an offset after the end that was set: the end
        # is moved until nothing comes after it.
        for _ in range(ROUNDS_MAX):
            end = stream_info(jetstream, state.stream, PATIENCE_SECONDS).state.last_seq + 1
            if end <= start:
                return found, True
            for frames in read_frames(connection, state.stream, start, end, (), WINDOW):
                found.extend(batches.of(frames))
            start = end
        return found, False


class _Forgotten:
    """Decides whether keys without a value at a time had one that is removed."""

    def __init__(self, jetstream: BlockingJetStream, state: PartitionState, time: datetime) -> None:
        self._jetstream = jetstream
        self._state = state
        self._time = time

    def check(self, later: dict[bytes, int], known: set[bytes], complete: bool) -> None:
        """HistoryGone if so. `later`: how many values each key has after the time."""
        state = self._state
        info = stream_info(self._jetstream, state.stream, PATIENCE_SECONDS)
        why = doubt(info, self._time)
        if not complete:
            why = why or "it changes faster than it can be read"
        if why is not None:
            raise HistoryGone(state.topic, None, self._time, why)
        history = history_of(info)
        if nothing_removed(info) or history is None:
            return
        full = [key for key, count in later.items() if count >= history and key not in known]
        for start in range(0, len(full), LOOKED_AT):
            part = full[start : start + LOOKED_AT]
            for number, (key, oldest) in enumerate(zip(part, self._oldest(part), strict=True)):
                if not was_first(oldest):
                    text = key.decode("utf-8", "surrogateescape")
                    others = len(full) - start - number - 1
                    raise overwritten(state.topic, text, self._time, history, oldest, others)

    def _oldest(self, keys: list[bytes]) -> list[StoredMessage | None]:
        prefix = self._state.prefix or ""
        asks = [{"seq": 1, "next_by_subj": f"{prefix}.{key_token(key)}"} for key in keys]
        return get_messages(self._jetstream, self._state.stream, asks, PATIENCE_SECONDS)


def _counts(batches: list[pa.RecordBatch]) -> dict[bytes, int]:
    """How many rows each key has."""
    if not batches:
        return {}
    counted = pa.Table.from_batches(batches).group_by("key").aggregate([("key", "count")])
    keys, counts = counted.column("key").to_pylist(), counted.column("key_count").to_pylist()
    return {key: count for key, count in zip(keys, counts, strict=True) if key is not None}


def _with_key_and_offset(reader: RangeReader) -> RangeReader:
    """The reader with the columns that show which row of a key is the last one."""
    schema = reader.schema
    for field in (pa.field("key", pa.binary()), pa.field("offset", pa.int64())):
        if field.name not in schema.names:
            schema = schema.append(field)
    if "value" not in schema.names:
        value = shape_of(reader.schemas, sorted(reader.schemas)).types[0]
        schema = schema.append(pa.field("value", value))
    return replace(reader, schema=schema)


def _latest(batches: list[pa.RecordBatch], schema: pa.Schema) -> pa.Table:
    """The last row of each key, without those that were deleted."""
    table = pa.Table.from_batches(batches)
    numbers = pa.chunked_array([pa.array(range(table.num_rows), pa.int64())])
    keyed = pa.table({"key": table.column("key"), "row": numbers})
    last = keyed.group_by("key").aggregate([("row", "max")]).column("row_max")
    rows = table.take(last.combine_chunks().sort())
    present = pc.is_valid(rows.column("value"))
    if "reason" in rows.schema.names:
        present = pc.or_(present, pc.is_valid(rows.column("reason")))
    return rows.filter(present).select(schema.names).cast(schema)
