"""The worker's side of a source: from a range of offsets to record batches, in bounded memory."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Protocol

import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from millstream.settings import ConnectionSettings
from millstream.spark.broker_access import (
    PATIENCE_SECONDS,
    SchemaSnapshot,
    connection_to,
    jetstream_to,
)
from millstream.spark.source.columns import RowBatches
from millstream.spark.source.frames import Frames, read_frames
from millstream.spark.source.offsets import PartitionState
from millstream.spark.source.partitions import report_loss
from millstream.spark.source.pushdown import RowFilter
from millstream.spark.source.values import BytesDecoder, TypedDecoder, ValueDecoder
from millstream.spark.stores import StoreSnapshot, load_event
from millstream.wire.sync.window import Window

__all__ = ["Batches", "RangeReader", "RangeTask", "joined"]

_log = logging.getLogger("millstream.spark")

# Small packs and windows are joined up to this size, because every batch has a cost in the JVM.
BATCH_ROWS: Final = 10_000
WINDOW: Final = Window(give_up_after=PATIENCE_SECONDS)


class Batches(Protocol):
    """Turns the messages of one partition into record batches."""

    dropped: int  # events that could not be decoded
    first_dropped: str

    def of(self, frames: Frames) -> Iterator[pa.RecordBatch]:
        """The rows of some messages, in order."""


class RangeTask(InputPartition):
    """What one task reads: the sequences start <= s < end of one partition."""

    def __init__(
        self, state: PartitionState, start: int, end: int, row_filter: RowFilter | None = None
    ) -> None:
        super().__init__((state.stream, start, end))
        self.state = state
        self.start = start
        self.end = end
        self.row_filter = row_filter


@dataclass(frozen=True)
class RangeReader:
    """Reads ranges as rows of one schema; travels to the workers, so it holds no connection."""

    settings: ConnectionSettings
    schema: pa.Schema
    subjects: tuple[str, ...] = ()  # only messages on these
    undecodable: str = "fail"
    fail_on_data_loss: bool = True
    schemas: Mapping[str, SchemaSnapshot] = field(default_factory=dict)  # by topic, if it has one
    store: StoreSnapshot | None = None  # the topic is that of an event store
    upcasters: str | None = None  # of its events

    def read(self, task: RangeTask) -> Iterator[pa.RecordBatch]:
        """The rows of a task, in the order of the partition."""
        state = task.state
        batches = self.batches_of(state)
        connection = connection_to(self.settings)
        subjects = self.subjects
        if task.row_filter is not None and not subjects:
            subjects = task.row_filter.subjects(state.prefix)
        seen = 0

        def found() -> Iterator[pa.RecordBatch]:
            nonlocal seen
            for frames in read_frames(
                connection, state.stream, task.start, task.end, subjects, WINDOW
            ):
                seen += len(frames)
                for batch in batches.of(frames):
                    yield batch if task.row_filter is None else task.row_filter.rows(batch)

        yield from joined(found())
        missing = task.end - task.start - seen - state.known_lost(task.start, task.end)
        if missing > 0 and not subjects and not state.gaps:
            report_loss(
                f"{missing} of the offsets {task.start} to {task.end - 1} of "
                f"'{state.topic}/{state.partition}' expired or were deleted before they were read",
                self.fail_on_data_loss,
            )
        if batches.dropped:
            _log.warning(
                "'%s/%s': %d event(s) could not be decoded and were dropped; the first at %s",
                state.topic,
                state.partition,
                batches.dropped,
                batches.first_dropped,
            )

    def batches_of(self, state: PartitionState) -> Batches:
        """Builds the rows of a partition's messages."""
        if self.store is not None:
            # Loaded only for event stores: every Python process of Spark pays for it.
            from millstream.spark.source.event_columns import KnownEvents
            from millstream.spark.source.event_rows import EventRows
            from millstream.spark.source.event_schema import asked_fields

            jetstream, store = jetstream_to(self.settings), self.store.store
            find = partial(load_event, jetstream, store)
            asked = asked_fields(self.schema, self.store)
            known = KnownEvents(self.store, self.upcasters, find, asked)
            return EventRows(self.schema, state, known, self.undecodable)
        return RowBatches(self.schema, state, self._decoder(state.topic), self.undecodable)

    def _decoder(self, topic: str) -> ValueDecoder:
        if topic in self.schemas:
            return TypedDecoder(self.schemas[topic], self.settings)
        has_value = "value" in self.schema.names
        return BytesDecoder(self.schema.field("value").type if has_value else pa.binary())


def joined(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same rows in fewer batches; large ones pass as they are."""
    waiting: list[pa.RecordBatch] = []
    rows = 0
    for batch in batches:
        if batch.num_rows == 0:
            continue
        if rows and rows + batch.num_rows > BATCH_ROWS:
            yield _one(waiting)
            waiting, rows = [], 0
        waiting.append(batch)
        rows += batch.num_rows
    if waiting:
        yield _one(waiting)


def _one(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)
