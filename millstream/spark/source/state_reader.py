"""Past states: the states of all aggregates of an event store as of a time, folded in parallel.

A task folds the aggregates of its share: each task of a partition reads all of its messages and
keeps those whose subject falls to it, so an aggregate is folded by one task, in order.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition

from millstream.errors import ConfigError
from millstream.event_store.messages import AppendMessage, open_append
from millstream.events.event import Partition, whole_microsecond
from millstream.schemas import ColumnBuilder
from millstream.settings import ConnectionSettings
from millstream.spark.broker_access import connection_to, jetstream_to
from millstream.spark.options import SourceOptions, StoreOptions
from millstream.spark.short_errors import short_errors
from millstream.spark.source.frames import Frames, read_frames
from millstream.spark.source.offsets import (
    OffsetLimit,
    PartitionOffset,
    PartitionState,
    TaskSplit,
    message_counts,
    task_counts,
)
from millstream.spark.source.partitions import check_partition, find_partitions, offsets_at
from millstream.spark.source.range_reader import BATCH_ROWS, WINDOW, RangeReader
from millstream.spark.source.values import fitted
from millstream.spark.state_classes import StateClasses, find_classes
from millstream.spark.stores import StoreSnapshot

__all__ = ["StateReader", "StateTask"]

# Every task of a partition reads all of it: with more than these, reading takes the time.
SHARES_MAX: Final = 8
_TIME: Final = pa.timestamp("us", "UTC")


class StateTask(InputPartition):
    """One of `shares` equal parts of the aggregates of a partition."""

    def __init__(self, state: PartitionState, end: int, share: int, shares: int) -> None:
        super().__init__((state.stream, end, share, shares))
        self.state = state
        self.end = end  # offset, exclusive
        self.share = share
        self.shares = shares


class StateReader(DataSourceReader):
    """Reads one row for each aggregate."""

    def __init__(
        self, settings: ConnectionSettings, options: SourceOptions, reader: RangeReader
    ) -> None:
        self._settings = settings
        self._options = options
        if options.store is None or options.store.as_of is None or reader.store is None:
            raise ConfigError("past states need the options 'eventStore' and 'asOf'")
        self._how: StoreOptions = options.store
        self._as_of = whole_microsecond(options.store.as_of)
        self._store: StoreSnapshot = reader.store
        self._schema = reader.schema
        find_classes(self._store, self._how)  # refuses what tasks could not use

    @short_errors()
    def partitions(self) -> list[InputPartition]:
        """The tasks: the shares of every partition, up to the time if it is that of storing."""
        jetstream = jetstream_to(self._settings)
        options = self._options
        states = find_partitions(jetstream, options)
        limit = OffsetLimit("latest")
        if self._how.clock == "stored":  # the server knows milliseconds; tasks look closer
            limit = OffsetLimit(time=self._as_of // 1_000_000 + 1, when_none="latest")
        ends = offsets_at(jetstream, states, limit, "asOf")
        starts = {key: PartitionOffset(1, state.created) for key, state in states.items()}
        for key, start in starts.items():
            check_partition(start, states[key], options.fail_on_data_loss, ends[key].next)
        split = TaskSplit(options.min_tasks, options.messages_per_task, by_size=True)
        counts = task_counts(message_counts(starts, ends), states, split)
        tasks: list[InputPartition] = []
        for key, state in states.items():
            shares = counts[key] if options.min_tasks else min(counts[key], SHARES_MAX)
            end = ends[key].next
            if end > 1:
                tasks += [StateTask(state, end, share, shares) for share in range(shares)]
        return tasks or [InputPartition(None)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The states of one task's aggregates; runs in a worker."""
        return self._rows(partition) if isinstance(partition, StateTask) else iter(())

    def _rows(self, task: StateTask) -> Iterator[pa.RecordBatch]:
        classes = find_classes(self._store, self._how)
        folded = _Folded(classes, self._how, self._as_of, self._settings)
        state = task.state
        where = Partition(state.stream, state.topic, state.partition, state.prefix)
        connection = connection_to(self._settings)
        subjects = self._options.subjects
        for frames in read_frames(connection, state.stream, 1, task.end, subjects, WINDOW):
            for number in _share(frames, task.share, task.shares):
                append = open_append(where, frames.message(number))
                if append is not None:
                    folded.add(append)
        yield from folded.batches(self._schema)


def _share(frames: Frames, share: int, shares: int) -> Iterator[int]:
    """The messages of a share of the aggregates."""
    if shares == 1:
        yield from range(len(frames))
        return
    subjects = frames.cut(frames.subject, frames.subject_end).to_pylist()
    hashes = np.fromiter(map(zlib.crc32, subjects), np.int64, len(subjects))
    yield from np.flatnonzero(hashes % shares == share).tolist()


class _Folded:
    """The states of aggregates so far; those that were deleted are left out."""

    def __init__(
        self,
        classes: StateClasses,
        how: StoreOptions,
        as_of: int,
        settings: ConnectionSettings,
    ) -> None:
        self._classes = classes
        self._by_stored = how.clock == "stored"
        self._as_of = as_of
        self._settings = settings
        self._found: dict[str, tuple[Any, int, int]] = {}  # state, version, event time
        self._deleted: set[str] = set()

    def add(self, append: AppendMessage) -> None:
        """The next append of an aggregate."""
        if append.ends:
            self._deleted.add(append.id)
            return
        time = append.timestamp_ns
        if (append.stored_ns if self._by_stored else time) > self._as_of:
            return
        found = self._found.get(append.id)
        state = self._classes.folding.make() if found is None else found[0]
        for event in self._classes.decoded(append, self._settings):
            state = self._classes.folding.fold(state, event)
        self._found[append.id] = (state, append.last, time // 1000)

    def batches(self, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """One row for each aggregate."""
        for id in self._deleted:
            self._found.pop(id, None)
        builder = ColumnBuilder(self._classes.record)
        ids = list(self._found)
        for start in range(0, len(ids), BATCH_ROWS):
            some = ids[start : start + BATCH_ROWS]
            states, versions, times = zip(*(self._found[id] for id in some), strict=True)
            texts = [id.encode("utf-8", "surrogateescape") for id in some]
            columns = {
                "aggregate": pa.array(texts, pa.binary()),
                "version": pa.array(versions, pa.int64()),
                "timestamp": pa.array(times, pa.int64()).cast(_TIME),
            }
            if "state" in schema.names:
                columns["state"] = builder.build(list(states))
            arrays = [fitted(columns[field.name], field.type) for field in schema]
            if arrays:
                yield pa.RecordBatch.from_arrays(arrays, schema=schema)
            else:
                yield pa.RecordBatch.from_struct_array(pa.array([{}] * len(some), pa.struct([])))
