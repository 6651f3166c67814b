"""Reading a topic as a table: the latest row of each key, folded from all of its events.

A topic takes packs, a table of Millstream does not: a large table is written to a topic of changes
many times faster, and this is how it is read. Each partition is folded by one task as columns, so
that Spark gets no row that was replaced or deleted since.

What was folded is kept in a file of the Spark application when a partition is read a second time,
as in a join with a stream: from then on only later events are read.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import DataSourceReader, InputPartition

from millstream.errors import ConfigError
from millstream.messaging.topics.forgotten import check_created, first_after, past_time
from millstream.settings import ConnectionSettings
from millstream.spark.broker_access import PATIENCE_SECONDS, connection_to, jetstream_to
from millstream.spark.options import SourceOptions
from millstream.spark.short_errors import short_errors
from millstream.spark.source.change_schema import (
    ChangeColumns,
    RowColumns,
    latest_shape,
    row_record,
)
from millstream.spark.source.frames import read_frames
from millstream.spark.source.latest_fold import (
    COMMIT,
    NUMBER,
    TRUNCATE,
    CommitPosition,
    LatestRows,
)
from millstream.spark.source.offsets import FIRST, OffsetLimit, PartitionOffset, PartitionState
from millstream.spark.source.partitions import (
    check_partition,
    find_partitions,
    offsets_at,
    report_loss,
)
from millstream.spark.source.range_reader import WINDOW, RangeReader, joined
from millstream.wire.sync.streams import sequence_at, stream_info

__all__ = ["LatestPartition", "LatestReader"]

_log = logging.getLogger("millstream.spark")

# A fold is kept again when the events after the last one are this many, and this part of its rows:
# reading an event costs a few times what writing a row does.
KEPT_AFTER: Final = 20_000
KEPT_PART: Final = 4
# Streams of which this process remembers the last truncation.
SCANNED_MAX: Final = 256
_scanned: dict[tuple[str, str], tuple[int, CommitPosition | None]] = {}


class LatestPartition(InputPartition):
    """One partition. Without an end, each read takes the events that are there then."""

    def __init__(
        self, state: PartitionState, end: int | None, others: tuple[tuple[PartitionState, int], ...]
    ) -> None:
        super().__init__((state.stream, end))
        self.state = state
        self.end = end
        self.others = others  # partitions that may have truncations, with their ends (0: none set)


class LatestReader(DataSourceReader):
    """Reads one row for each key.

    A stream that is joined with it sees the rows as they are at each batch: Spark plans the tasks
    of a static side once, so their ends must not be part of the plan.
    """

    def __init__(
        self, settings: ConnectionSettings, options: SourceOptions, reader: RangeReader
    ) -> None:
        self._settings = settings
        self._options = options
        self._reader = reader

    @short_errors()
    def partitions(self) -> list[InputPartition]:
        """One task for each partition of the topic."""
        states = list(find_partitions(jetstream_to(self._settings), self._options).values())
        ends = self._ends(states)
        for state, end in zip(states, ends, strict=True):
            start = PartitionOffset(FIRST, state.created)
            check_partition(start, state, self._options.fail_on_data_loss, end)
        set_ends = [0 if end is None else end for end in ends]
        return [
            LatestPartition(
                state,
                ends[n],
                tuple((other, set_ends[m]) for m, other in enumerate(states) if m != n),
            )
            for n, state in enumerate(states)
        ]

    def _ends(self, states: list[PartitionState]) -> list[int | None]:
        options = self._options
        if options.as_of is not None:
            return self._ends_at(states, options.as_of)
        if options.end == OffsetLimit("latest"):
            return [None] * len(states)
        by_name = {state.topic_partition: state for state in states}
        found = offsets_at(jetstream_to(self._settings), by_name, options.end, "endingOffsets")
        return [found[state.topic_partition].next for state in states]

    def _ends_at(self, states: list[PartitionState], time: datetime) -> list[int | None]:
        jetstream, topic = jetstream_to(self._settings), states[0].topic
        infos = [stream_info(jetstream, state.stream, PATIENCE_SECONDS) for state in states]
        time = past_time(topic, time, infos)
        ends = []
        for state, info in zip(states, infos, strict=True):
            found = sequence_at(jetstream, state.stream, first_after(time), PATIENCE_SECONDS)
            ends.append(info.state.last_seq + 1 if found is None else found)
        check_created(topic, time, infos, ends)
        return [*ends]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The latest rows of one partition; runs in a worker."""
        return self._rows(partition) if isinstance(partition, LatestPartition) else iter(())

    def _rows(self, partition: LatestPartition) -> Iterator[pa.RecordBatch]:
        state, columns = partition.state, self._columns(partition.state)
        end = partition.end
        how = f"{self._options.undecodable} {self._options.fail_on_data_loss}"
        kept = None if end is not None else _KeptFold(state, columns.schema, how)
        rows, start = (LatestRows(), FIRST) if kept is None else kept.load()
        end = self._end_of(state) if end is None else end
        self._read(partition, columns, rows, (start, end))
        if kept is not None:
            kept.save(rows, end)
        gone = self._truncated_elsewhere(partition, columns)
        if gone is not None:
            rows.truncate(gone)
        if rows.missing is not None:
            report_loss(
                f"a change of the row {rows.missing.key!r} of '{state.topic}' does not have the "
                f"column '{rows.missing.column}', which it did not change, and no earlier change "
                f"of that row in partition {state.partition} has it",
                self._options.fail_on_data_loss,
            )
        schema = self._reader.schema
        yield from joined(_result(batch, schema) for batch in rows.batches())

    def _columns(self, state: PartitionState) -> ChangeColumns | RowColumns:
        """What is read of the events: changes, or rows."""
        schema, topic = self._reader.schema, state.topic
        if "value" in schema.names:
            row = schema.field("value").type
        else:  # whether there is one must be read all the same
            row = latest_shape(self._reader.schemas, topic).types[0]
            row = pa.struct([row.field(0)]) if pa.types.is_struct(row) else row
        snapshot = self._reader.schemas.get(topic)
        if snapshot is not None and row_record(snapshot.latest.record) is not None:
            return ChangeColumns(schema, row)
        return RowColumns(schema, row)

    def _read(
        self,
        partition: LatestPartition,
        columns: ChangeColumns | RowColumns,
        rows: LatestRows,
        span: tuple[int, int],
    ) -> None:
        """Fold the messages of a span."""
        state, (start, end) = partition.state, span
        batches = replace(self._reader, schema=columns.schema).batches_of(state)
        seen = 0
        connection = connection_to(self._settings)
        for frames in read_frames(connection, state.stream, start, end, (), WINDOW):
            seen += len(frames)
            for batch in batches.of(frames):
                changes = columns.of(batch)
                _check_keys(changes, state)
                rows.add(changes)
        missing = end - start - seen - state.known_lost(start, end)
        if missing > 0 and not state.gaps:
            report_loss(
                f"{missing} of the offsets {start} to {end - 1} of "
                f"'{state.topic}/{state.partition}' expired or were deleted, so its latest rows "
                f"are not known",
                self._options.fail_on_data_loss,
            )
        if batches.dropped:
            _log.warning(
                "'%s/%s': %d event(s) could not be decoded and were dropped; the first at %s",
                *(state.topic, state.partition, batches.dropped, batches.first_dropped),
            )

    def _end_of(self, state: PartitionState) -> int:
        info = stream_info(jetstream_to(self._settings), state.stream, PATIENCE_SECONDS)
        return info.state.last_seq + 1

    # -- truncations ----------------------------------------------------------------------

    def _truncated_elsewhere(
        self, partition: LatestPartition, columns: ChangeColumns | RowColumns
    ) -> CommitPosition | None:
        """The last truncation in the other partitions.

        It is one event, without a key, so it is in one partition only and counts for all.
        """
        found = [self._scanned(state, end, columns) for state, end in partition.others]
        return max((position for position in found if position is not None), default=None)

    def _scanned(
        self, state: PartitionState, end: int, columns: ChangeColumns | RowColumns
    ) -> CommitPosition | None:
        name = (state.stream, state.created)
        start, found = (FIRST, None) if end else _scanned.get(name, (FIRST, None))
        last = end or self._end_of(state)
        batches = replace(self._reader, schema=columns.truncates).batches_of(state)
        connection = connection_to(self._settings)
        for frames in read_frames(connection, state.stream, start, last, (), WINDOW):
            for batch in batches.of(frames):
                for position in columns.truncations(batch).to_pylist():
                    one = CommitPosition(position[COMMIT], position[NUMBER])
                    found = one if found is None else max(found, one)
        if not end:
            if len(_scanned) >= SCANNED_MAX:
                _scanned.clear()
            _scanned[name] = (last, found)
        return found


def _check_keys(changes: pa.RecordBatch, state: PartitionState) -> None:
    keyless = changes.column("key").null_count
    if keyless and keyless > pc.sum(changes.column(TRUNCATE)).as_py():
        raise ConfigError(
            f"an event of '{state.topic}/{state.partition}' has no key, so there is no latest row "
            f"of a key: read the topic without the option 'rows'"
        )


def _result(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    if not len(schema):
        return pa.RecordBatch.from_struct_array(pa.array([{}] * batch.num_rows, pa.struct([])))
    return batch.select(schema.names).cast(schema)


# -- folds that are kept --------------------------------------------------------------------


class _KeptFold:
    """A fold in a file of the Spark application, which Spark removes when that ends.

    It is a copy of what the topic has: without it, or if it cannot be read or written, the topic
    is read from the first event. It is not written for a partition that is read only once.
    """

    def __init__(self, state: PartitionState, schema: pa.Schema, how: str) -> None:
        """`how`: what else the fold depends on."""
        name = hashlib.sha256()
        texts = (state.stream, state.created, how)
        for part in (*(text.encode() for text in texts), schema.serialize()):
            name.update(len(part).to_bytes(8, "big") + bytes(part))
        folder = _folder()
        self._file = None if folder is None else folder / f"{name.hexdigest()[:40]}.arrow"
        self._again = False  # the partition was read before
        self._rows = 0  # that the file has

    def load(self) -> tuple[LatestRows, int]:
        """The fold, and the offset of the first event that is not part of it."""
        if self._file is None:
            return LatestRows(), FIRST
        seen = self._file.with_suffix(".read")
        try:
            self._again = seen.exists()
            seen.touch()
            with pa.memory_map(str(self._file)) as source, pa.ipc.open_file(source) as file:
                notes = file.schema.metadata or {}
                batches = [file.get_batch(n) for n in range(file.num_record_batches)]
        except (OSError, pa.ArrowInvalid):
            return LatestRows(), FIRST
        commit, number, offset = (int(part) for part in notes[_NOTE].split())
        gone = None if commit < 0 else CommitPosition(commit, number)
        rows = [batch.replace_schema_metadata(None) for batch in batches]
        self._rows = sum(batch.num_rows for batch in rows)
        return LatestRows(rows, gone), offset

    def save(self, rows: LatestRows, offset: int) -> None:
        """Keep the fold of all events before an offset."""
        worth = rows.added >= max(KEPT_AFTER, self._rows // KEPT_PART)
        if self._file is None or not self._again or not worth:
            return
        if rows.ends_with_deletion or rows.missing is not None:
            return  # a later event may belong to the last one
        batches = list(rows.batches())
        if not batches:
            return
        part = self._file.with_suffix(f".{uuid4().hex}")
        try:
            self._write(part, batches, rows.truncated, offset)
            part.replace(self._file)
        except (OSError, pa.ArrowInvalid) as error:
            _log.warning("the latest rows of a topic cannot be kept in %s: %s", part, error)
            part.unlink(missing_ok=True)

    def _write(
        self, path: Path, batches: list[pa.RecordBatch], gone: CommitPosition | None, offset: int
    ) -> None:
        position = CommitPosition(-1, 0) if gone is None else gone
        note = f"{position.commit} {position.number} {offset}"
        schema = batches[0].schema.with_metadata({_NOTE: note.encode()})
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file, pa.ipc.new_file(file, schema) as writer:
            for batch in joined(batches):
                writer.write_batch(batch.replace_schema_metadata(schema.metadata))


_NOTE: Final = b"fold"  # commit and number of the last truncation, and the offset after the fold


def _folder() -> Path | None:
    """Where the files of this Spark application are on this machine."""
    from pyspark import SparkFiles

    root: Any = getattr(SparkFiles, "_root_directory", None)
    return Path(root) if root and Path(root).is_dir() else None
