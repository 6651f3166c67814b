"""Batch reads: a fixed range, narrowed by the query's filters where that saves reading."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition

from millstream.events.subject import PACK_TOKEN
from millstream.settings import ConnectionSettings
from millstream.spark.broker_access import jetstream_to
from millstream.spark.options import SourceOptions
from millstream.spark.short_errors import short_errors
from millstream.spark.source.offsets import (
    PartitionOffset,
    PartitionState,
    SourceOffset,
    TaskSplit,
    message_counts,
    offset_ranges,
    task_counts,
)
from millstream.spark.source.partitions import check_partition, find_partitions, offsets_at
from millstream.spark.source.pushdown import Narrowed, RowFilter, narrow
from millstream.spark.source.range_reader import RangeReader, RangeTask
from millstream.wire.sync.connection import BlockingJetStream
from millstream.wire.sync.streams import has_subjects

__all__ = ["BatchReader", "FilteringBatchReader"]


class BatchReader(DataSourceReader):
    """Reads the range between two offsets, which are fixed when the query is planned."""

    def __init__(
        self, settings: ConnectionSettings, options: SourceOptions, reader: RangeReader
    ) -> None:
        self._settings = settings
        self._options = options
        self._reader = reader
        self._narrowed = Narrowed()

    @short_errors()
    def partitions(self) -> list[InputPartition]:
        """The tasks of the read."""
        jetstream = jetstream_to(self._settings)
        options, narrowed = self._options, self._narrowed
        states = find_partitions(jetstream, options)
        start = offsets_at(jetstream, states, options.start, "startingOffsets")
        end = offsets_at(jetstream, states, options.end, "endingOffsets")
        for partition, reached in start.items():
            ending = end[partition].next
            check_partition(reached, states[partition], options.fail_on_data_loss, ending)
        states = {key: state for key, state in states.items() if narrowed.takes(state)}
        first: SourceOffset = {}
        last: SourceOffset = {}
        for key, state in states.items():
            first[key] = PartitionOffset(max(start[key].next, narrowed.first), state.created)
            last[key] = PartitionOffset(min(end[key].next, narrowed.end), state.created)
        split = TaskSplit(options.min_tasks, options.messages_per_task, by_size=True)
        tasks = task_counts(message_counts(first, last), states, split)
        last = {key: replace(reached, tasks=tasks[key]) for key, reached in last.items()}
        # The ends are fixed by now: a pack that is stored later is in none of the ranges.
        filters = {key: _row_filter(jetstream, state, narrowed) for key, state in states.items()}
        found: list[InputPartition] = [
            RangeTask(states[r.topic, r.partition], r.start, r.end, filters[r.topic, r.partition])
            for r in offset_ranges(first, last)
        ]
        return found or [InputPartition(None)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one task; runs in a worker."""
        if not isinstance(partition, RangeTask):
            return iter(())
        return self._reader.read(partition)


def _row_filter(
    jetstream: BlockingJetStream, state: PartitionState, narrowed: Narrowed
) -> RowFilter | None:
    """The filter of a partition's rows, without packs where it holds none."""
    rows = narrowed.row_filter
    if rows is None or not rows.subjects(state.prefix):
        return rows
    packs = has_subjects(jetstream, state.stream, f"{state.prefix}.{PACK_TOKEN}.>")
    return replace(rows, packs=packs)


class FilteringBatchReader(BatchReader):
    """The same with filters; only for sessions in which Spark pushes filters down."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Any]:  # noqa: N802
        """Use the filters that narrow the read; all are returned, so Spark applies them again."""
        self._narrowed = narrow(filters)
        return filters
