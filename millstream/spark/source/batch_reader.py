"""Batch reads: a fixed range, narrowed by the query's filters where that saves reading."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition

from millstream.settings import ConnectionSettings
from millstream.spark.broker_access import jetstream_to
from millstream.spark.options import SourceOptions
from millstream.spark.source.offsets import Offsets, Position
from millstream.spark.source.partitions import find_logs, positions_at
from millstream.spark.source.planning import Cut, check_log, pieces, sizes, tasks_for
from millstream.spark.source.pushdown import Narrowed, narrow
from millstream.spark.source.range_reader import RangeReader, RangeTask

__all__ = ["BatchReader", "FilteringBatchReader"]


class BatchReader(DataSourceReader):
    """Reads what is between two positions that are fixed when the query is planned."""

    def __init__(
        self, settings: ConnectionSettings, options: SourceOptions, reader: RangeReader
    ) -> None:
        self._settings = settings
        self._options = options
        self._reader = reader
        self._narrowed = Narrowed()

    def partitions(self) -> list[InputPartition]:
        """The tasks of the read."""
        jetstream = jetstream_to(self._settings)
        options, narrowed = self._options, self._narrowed
        logs = find_logs(jetstream, options)
        start = positions_at(jetstream, logs, options.start, "startingOffsets")
        end = positions_at(jetstream, logs, options.end, "endingOffsets")
        for where, position in start.items():
            check_log(position, logs[where], options.fail_on_data_loss)
        logs = {where: log for where, log in logs.items() if narrowed.takes(log)}
        first: Offsets = {}
        last: Offsets = {}
        for where, log in logs.items():
            first[where] = Position(max(start[where].next, narrowed.first), log.created)
            last[where] = Position(min(end[where].next, narrowed.end), log.created)
        cut = Cut(options.min_tasks, options.messages_per_task, by_size=True)
        tasks = tasks_for(sizes(first, last), logs, cut)
        goal = {w: Position(p.next, p.log, tasks=tasks[w]) for w, p in last.items()}
        found: list[InputPartition] = [
            RangeTask(logs[p.topic, p.partition], p.start, p.end, narrowed.row_filter)
            for p in pieces(first, goal)
        ]
        return found or [InputPartition(None)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one task; runs in a worker."""
        if not isinstance(partition, RangeTask):
            return iter(())
        return self._reader.read(partition)


class FilteringBatchReader(BatchReader):
    """The same with filters; only for sessions in which Spark pushes them down."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Any]:  # noqa: N802
        """Take what narrows the read; every filter is given back, so Spark applies it again."""
        self._narrowed = narrow(filters)
        return filters
