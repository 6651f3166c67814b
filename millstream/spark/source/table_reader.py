"""Reading a table as a DataFrame: the value of each key at the time a task reads it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import DataSourceReader, InputPartition

from millstream.settings import ConnectionSettings
from millstream.spark.broker_access import PATIENCE_SECONDS, connection_to, jetstream_to
from millstream.spark.options import SourceOptions
from millstream.spark.short_errors import short_errors
from millstream.spark.source.frames import read_frames
from millstream.spark.source.offsets import PartitionOffset, PartitionState
from millstream.spark.source.partitions import check_partition, find_partitions
from millstream.spark.source.range_reader import WINDOW, RangeReader, joined
from millstream.spark.source.row_schema import shape_of
from millstream.wire.sync.streams import stream_info

__all__ = ["TablePartition", "TableReader"]

# Each round reads what changed during the round before, so they soon take no time.
ROUNDS_MAX: Final = 20


class TablePartition(InputPartition):
    """One partition of a table. It has no offsets: each read takes the table as it is then."""

    def __init__(self, state: PartitionState) -> None:
        super().__init__(state.stream)
        self.state = state


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
        return [TablePartition(state) for state in states.values()]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The current rows of one partition; deleted keys are left out."""
        if not isinstance(partition, TablePartition):
            return iter(())
        return self._rows(partition.state)

    def _rows(self, state: PartitionState) -> Iterator[pa.RecordBatch]:
        batches = _with_key_and_offset(self._reader).batches_of(state)
        connection = connection_to(self._settings)
        jetstream = jetstream_to(self._settings)
        found: list[pa.RecordBatch] = []
        start = 1
        # A key that changes while we read moves to an offset after the end that was set: the end
        # is moved until nothing comes after it.
        for _ in range(ROUNDS_MAX):
            end = stream_info(jetstream, state.stream, PATIENCE_SECONDS).state.last_seq + 1
            if end == start:
                break
            for frames in read_frames(connection, state.stream, start, end, (), WINDOW):
                found.extend(batches.of(frames))
            start = end
        if found:
            yield from joined(_latest(found, self._reader.schema).to_batches())


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
