"""The driver's side of a streaming source: the offsets of the next batch, and its tasks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NoReturn

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from millstream.deadline import Deadline
from millstream.errors import MillstreamError
from millstream.settings import ConnectionSettings
from millstream.spark.broker_access import jetstream_to
from millstream.spark.options import SourceOptions
from millstream.spark.short_errors import short_errors
from millstream.spark.source.holds import QueryHolds
from millstream.spark.source.offsets import (
    OffsetRange,
    PartitionOffset,
    PartitionState,
    SourceOffset,
    TaskSplit,
    TopicPartition,
    from_json,
    limited_ends,
    message_counts,
    offset_ranges,
    task_counts,
    to_json,
)
from millstream.spark.source.partitions import (
    PartitionStates,
    check_fingerprint,
    check_partition,
    find_partitions,
    offsets_at,
    report_loss,
)
from millstream.spark.source.range_reader import RangeReader, RangeTask
from millstream.wire.sync.streams import get_message

__all__ = ["RefusedReader", "StreamReader"]

# How long the driver waits for new messages before it answers that there are none. Spark asks again
# after 10 ms; without this wait every idle query would ask the broker 90 times a second.
IDLE_SECONDS: Final = 0.2
IDLE_PAUSE_SECONDS: Final = 0.01


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """One query's source. Lives in one process for the length of a run.

    Spark keeps only the end of a batch. If batch 0 is run again, Spark asks for its start again,
    and "latest" would then be a different offset: so batch 0 of a new query is always empty, and
    its end pins the start.
    """

    def __init__(
        self, settings: ConnectionSettings, options: SourceOptions, reader: RangeReader
    ) -> None:
        self._settings = settings
        self._options = options
        self._reader = reader
        self._holds = QueryHolds(settings, options.group_id, options.fail_on_data_loss)
        self._initial: SourceOffset | None = None  # where the query starts, once asked for
        self._pin_start = False  # the query is new: its next batch is the empty one
        self._planned = False  # a batch was planned in this run
        self._checked: set[TopicPartition] = set()  # fingerprints are checked once in a run
        self._target: PartitionStates | None = None  # where an AvailableNow run ends
        self._states: PartitionStates = {}

    # -- offsets --------------------------------------------------------------------------

    @short_errors()
    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """Where a new query starts."""
        self._pin_start = not self._planned
        if self._initial is None:
            options, states = self._options, self._find()
            if self._holds.open(states, {}):
                states = self._find()  # everything stored from now on is kept
            jetstream = jetstream_to(self._settings)
            self._initial = offsets_at(jetstream, states, options.start, "startingOffsets")
            for partition, start in self._initial.items():
                if not options.subjects:
                    check_partition(start, states[partition], options.fail_on_data_loss)
        return to_json(self._initial)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """How much one batch takes."""
        most = self._options.offsets_per_trigger
        return ReadAllAvailable() if most is None else ReadMaxRows(most)

    @short_errors()
    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """An AvailableNow run reads what is stored now."""
        self._target = self._find()

    @short_errors()
    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """The end of the next batch; the start itself if there is nothing new."""
        pin_start, self._pin_start, self._planned = self._pin_start, False, True
        if pin_start or self._stop_requested():
            return start
        reached = from_json(start)
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        patience = Deadline(0 if self._target is not None else IDLE_SECONDS)
        while True:
            states = self._find()
            self._check(reached, states)
            ends = limited_ends(reached, self._readable(states), most)
            if self._has_new(reached, ends, states):
                return to_json(self._end_of_batch(reached, ends, states))
            if patience.passed:
                return start
            time.sleep(patience.left(at_most=IDLE_PAUSE_SECONDS))

    def _stop_requested(self) -> bool:
        """Spark stops in mid-batch; a query whose source offers nothing ends its batch first."""
        file = self._options.stop_file
        return file is not None and Path(file).exists()

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        """The end of every partition, for the query's progress: the lag is the distance to it."""
        if not self._states:
            return None
        return to_json({key: PartitionOffset(s.next, s.created) for key, s in self._states.items()})

    def _find(self) -> PartitionStates:
        self._states = find_partitions(jetstream_to(self._settings), self._options)
        return self._states

    def _readable(self, states: PartitionStates) -> PartitionStates:
        """The partitions up to where this run may read."""
        target = self._target
        if target is None:
            return states
        return {
            partition: target[partition]
            for partition, state in states.items()
            if partition in target and target[partition].created == state.created
        }

    @staticmethod
    def _has_new(
        start: SourceOffset, ends: Mapping[TopicPartition, int], states: PartitionStates
    ) -> bool:
        return any(
            partition not in start
            or start[partition].next != following
            or start[partition].created != states[partition].created
            for partition, following in ends.items()
        )

    def _end_of_batch(
        self, start: SourceOffset, ends: Mapping[TopicPartition, int], states: PartitionStates
    ) -> SourceOffset:
        """The offset that ends a batch; a partition with nothing new keeps its old entry."""
        wanted = {key: PartitionOffset(n, states[key].created) for key, n in ends.items()}
        split = TaskSplit(self._options.min_tasks, self._options.messages_per_task)
        tasks = task_counts(message_counts(start, wanted), states, split)
        result: SourceOffset = {}
        for partition, end in wanted.items():
            old = start.get(partition)
            if old is not None and old.next == end.next and old.created == end.created:
                result[partition] = old
            else:
                last_time = self._time_before(states[partition], end.next)
                result[partition] = replace(end, last_time=last_time, tasks=tasks[partition])
        # Partitions that an AvailableNow run does not reach keep their offset.
        for partition, old in start.items():
            if partition not in result and partition in states:
                result[partition] = old
        return result

    def _time_before(self, state: PartitionState, following: int) -> str:
        """When the message before a sequence was stored; empty if it no longer exists."""
        if following == state.next:
            return state.last_time
        query = {"seq": following - 1}
        found = get_message(jetstream_to(self._settings), state.stream, query)
        return "" if found is None else found.time

    def _check(self, start: SourceOffset, states: PartitionStates) -> None:
        self._holds.open(states, start)
        fail = self._options.fail_on_data_loss
        for partition, reached in start.items():
            state = states.get(partition)
            if state is None:
                topic, number = partition
                report_loss(f"'{topic}/{number}' is gone: what was not read is lost", fail)
                continue
            check_partition(reached, state, fail)
            if partition not in self._checked:
                self._checked.add(partition)
                check_fingerprint(jetstream_to(self._settings), reached, state, fail)

    # -- tasks ----------------------------------------------------------------------------

    @short_errors()
    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """The tasks of a batch: the same for the same two offsets, whenever it is run."""
        self._pin_start, self._planned = False, True
        first, last = from_json(start), from_json(end)
        states = self._states or self._find()
        if any(partition not in states for partition in last):
            states = self._find()
        self._check(first, states)
        self._holds.check(first)
        return [
            RangeTask(states[part.topic, part.partition], part.start, part.end)
            for part in offset_ranges(first, last)
            if self._exists(part, states)
        ]

    def _exists(self, part: OffsetRange, states: PartitionStates) -> bool:
        if (part.topic, part.partition) in states:
            return True
        report_loss(
            f"'{part.topic}/{part.partition}' is gone: the offsets {part.start} to "
            f"{part.end - 1} of a batch that is run again are lost",
            self._options.fail_on_data_loss,
        )
        return False

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one task; runs in a worker."""
        return self._reader.read(partition) if isinstance(partition, RangeTask) else iter(())

    @short_errors()
    def commit(self, end: dict[str, Any]) -> None:
        """A batch is complete: interest topics need not keep its events."""
        self._holds.move(from_json(end))

    def stop(self) -> None:
        """No cleanup needed."""


class RefusedReader(StreamReader):
    """Says at the first call why there is no reader.

    An error while Spark asks for a reader is lost: Spark then reports one of its own code.
    """

    def __init__(self, error: MillstreamError) -> None:
        self._error = error

    @short_errors()
    def getDefaultReadLimit(self) -> NoReturn:  # noqa: N802
        """The first call of every query but the following."""
        raise self._error

    @short_errors()
    def prepareForTriggerAvailableNow(self) -> NoReturn:  # noqa: N802
        """The first call of a query that ends when it has read everything."""
        raise self._error
