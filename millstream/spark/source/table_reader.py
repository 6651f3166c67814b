"""Reading a table as a DataFrame: the latest value of each key, as it is when a task reads it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import DataSourceReader, InputPartition

from millstream.settings import ConnectionSettings
from millstream.spark.broker_access import PATIENCE_SECONDS, connection_to, jetstream_to
from millstream.spark.options import SourceOptions
from millstream.spark.source.frames import read_frames
from millstream.spark.source.partitions import find_logs
from millstream.spark.source.planning import Log
from millstream.spark.source.range_reader import WINDOW, RangeReader, joined
from millstream.wire.sync.streams import stream_info

__all__ = ["TablePart", "TableReader"]

# Each round reads what changed during the one before, so they soon take no time at all.
ROUNDS_MAX: Final = 20


class TablePart(InputPartition):
    """One partition of a table. It names no offsets: each read finds the table as it is then."""

    def __init__(self, log: Log) -> None:
        super().__init__(log.stream)
        self.log = log


class TableReader(DataSourceReader):
    """Reads the present value of each key.

    A join of a stream with it sees the table of each batch's time: Spark plans the tasks of a
    static side once, so their offsets must not be part of the plan.
    """

    def __init__(
        self, settings: ConnectionSettings, options: SourceOptions, reader: RangeReader
    ) -> None:
        self._settings = settings
        self._options = options
        self._reader = reader

    def partitions(self) -> list[InputPartition]:
        """One task for each partition of the table."""
        logs = find_logs(jetstream_to(self._settings), self._options)
        return [TablePart(log) for log in logs.values()]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The present rows of one partition; deleted keys are left out."""
        if not isinstance(partition, TablePart):
            return iter(())
        return self._rows(partition.log)

    def _rows(self, log: Log) -> Iterator[pa.RecordBatch]:
        reader = _with_place(self._reader)
        batches = reader.batches_of(log)
        connection = connection_to(self._settings)
        jetstream = jetstream_to(self._settings)
        found: list[pa.RecordBatch] = []
        start = 1
        # A key that changes while we read leaves its old place, and its new one is behind the end
        # that was set: so the end is moved until nothing is left behind it.
        for _ in range(ROUNDS_MAX):
            end = stream_info(jetstream, log.stream, PATIENCE_SECONDS).state.last_seq + 1
            if end == start:
                break
            for frames in read_frames(connection, log.stream, start, end, (), WINDOW):
                found.extend(batches.of(frames))
            start = end
        if found:
            yield from joined(_latest(found, self._reader.schema).to_batches())


def _with_place(reader: RangeReader) -> RangeReader:
    """The reader with the columns that tell which row of a key is the last one."""
    schema = reader.schema
    for field in (pa.field("key", pa.binary()), pa.field("offset", pa.int64())):
        if field.name not in schema.names:
            schema = schema.append(field)
    if "value" not in schema.names:
        schema = schema.append(pa.field("value", _value_type(reader)))
    return RangeReader(
        reader.settings,
        schema,
        reader.subjects,
        reader.undecodable,
        reader.fail_on_data_loss,
        reader.types,
    )


def _value_type(reader: RangeReader) -> pa.DataType:
    typed = next(iter(reader.types.values()), None)
    return pa.binary() if typed is None else typed.shape.types[0]


def _latest(batches: list[pa.RecordBatch], schema: pa.Schema) -> pa.Table:
    """The last row of each key, without those that were deleted."""
    table = pa.Table.from_batches(batches)
    places = pa.chunked_array([pa.array(range(table.num_rows), pa.int64())])
    keyed = pa.table({"key": table.column("key"), "place": places})
    last = keyed.group_by("key").aggregate([("place", "max")]).column("place_max")
    rows = table.take(last.combine_chunks().sort())
    present = pc.is_valid(rows.column("value"))
    if "reason" in rows.schema.names:
        present = pc.or_(present, pc.is_valid(rows.column("reason")))
    return rows.filter(present).select(schema.names).cast(schema)
