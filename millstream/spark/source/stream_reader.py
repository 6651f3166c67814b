"""The driver's side of a streaming source: which offsets are next, and who reads them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from millstream.deadline import Deadline
from millstream.settings import ConnectionSettings
from millstream.spark.broker_access import jetstream_to
from millstream.spark.options import SourceOptions
from millstream.spark.source.offsets import Offsets, Position, Where, from_json, to_json
from millstream.spark.source.partitions import check_fingerprint, find_logs, positions_at
from millstream.spark.source.planning import (
    Cut,
    Log,
    check_log,
    limited,
    pieces,
    report_loss,
    sizes,
    tasks_for,
)
from millstream.spark.source.range_reader import RangeReader, RangeTask, task_of
from millstream.wire.sync.streams import get_message

__all__ = ["StreamReader"]

# How long the driver waits for news before it answers that there are none. Spark asks again after
# 10 ms; without a wait of our own every idle query would ask the broker 90 times a second.
IDLE_SECONDS: Final = 0.2
IDLE_PAUSE_SECONDS: Final = 0.01


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """One query's source. Lives in one process for the length of a run.

    Spark keeps only the end of a batch. The start of batch 0 would be asked for again when it is
    re-run, and "latest" would then be another place: so batch 0 of a new query is always empty,
    and its end pins the start.
    """

    def __init__(
        self, settings: ConnectionSettings, options: SourceOptions, reader: RangeReader
    ) -> None:
        self._settings = settings
        self._options = options
        self._reader = reader
        self._first: Offsets | None = None  # where the query begins, once asked for
        self._fresh = False  # the query is new, and its start is not pinned yet
        self._begun = False  # a batch was planned in this run
        self._checked: set[Where] = set()  # fingerprints are looked at once in a run
        self._target: dict[Where, Log] | None = None  # where an AvailableNow run ends
        self._logs: dict[Where, Log] = {}

    # -- offsets --------------------------------------------------------------------------

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """Where a new query begins."""
        self._fresh = not self._begun
        if self._first is None:
            jetstream = jetstream_to(self._settings)
            logs = self._look()
            options = self._options
            self._first = positions_at(jetstream, logs, options.start, "startingOffsets")
            for where, position in self._first.items():
                if not options.subjects:
                    check_log(position, logs[where], options.fail_on_data_loss)
        return to_json(self._first)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """How much one batch takes."""
        most = self._options.offsets_per_trigger
        return ReadAllAvailable() if most is None else ReadMaxRows(most)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """What is there now is what an AvailableNow run reads."""
        self._target = self._look()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """The end of the next batch; the start itself when there is nothing new."""
        fresh, self._fresh, self._begun = self._fresh, False, True
        if fresh or self._told_to_stop():
            return start
        begin = from_json(start)
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        patience = Deadline(0 if self._target is not None else IDLE_SECONDS)
        while True:
            logs = self._look()
            self._check(begin, logs)
            ends = limited(begin, self._goals(logs), most)
            if self._moved(begin, ends, logs) or patience.passed:
                break
            time.sleep(patience.left(at_most=IDLE_PAUSE_SECONDS))
        if not self._moved(begin, ends, logs):
            return start
        return to_json(self._positions(begin, ends, logs))

    def _told_to_stop(self) -> bool:
        """Spark stops in mid-batch; a query whose source offers nothing ends its batch first."""
        file = self._options.stop_file
        return file is not None and Path(file).exists()

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        """The end of the log, for the query's progress: what is behind it is the lag."""
        if not self._logs:
            return None
        return to_json({w: Position(log.next, log.created) for w, log in self._logs.items()})

    def _look(self) -> dict[Where, Log]:
        self._logs = find_logs(jetstream_to(self._settings), self._options)
        return self._logs

    def _goals(self, logs: dict[Where, Log]) -> dict[Where, Log]:
        """The logs up to where this run may read."""
        if self._target is None:
            return logs
        return {
            where: self._target[where]
            for where, log in logs.items()
            if where in self._target and self._target[where].created == log.created
        }

    @staticmethod
    def _moved(begin: Offsets, ends: Mapping[Where, int], logs: Mapping[Where, Log]) -> bool:
        return any(
            where not in begin
            or begin[where].next != following
            or begin[where].log != logs[where].created
            for where, following in ends.items()
        )

    def _positions(
        self, begin: Offsets, ends: Mapping[Where, int], logs: dict[Where, Log]
    ) -> Offsets:
        """The end of a batch; where a partition has nothing new, its old entry as it was."""
        wanted = {where: Position(n, logs[where].created) for where, n in ends.items()}
        options = self._options
        cut = Cut(options.min_tasks, options.messages_per_task)
        tasks = tasks_for(sizes(begin, wanted), logs, cut)
        result: Offsets = {}
        for where, position in wanted.items():
            old = begin.get(where)
            if old is not None and old.next == position.next and old.log == position.log:
                result[where] = old
            else:
                last = self._time_before(logs[where], position.next)
                result[where] = Position(position.next, position.log, last, tasks[where])
        # What an AvailableNow run does not reach keeps its place.
        for where, old in begin.items():
            if where not in result and where in logs:
                result[where] = old
        return result

    def _time_before(self, log: Log, following: int) -> str:
        """When the message before a sequence was stored; empty when it is gone."""
        if following == log.next:
            return log.last_time
        ask = {"seq": following - 1}
        found = get_message(jetstream_to(self._settings), log.stream, ask)
        return "" if found is None else found.time

    def _check(self, begin: Offsets, logs: dict[Where, Log]) -> None:
        options = self._options
        fail = options.fail_on_data_loss
        for where, position in begin.items():
            log = logs.get(where)
            if log is None:
                report_loss(f"'{where[0]}/{where[1]}' is gone: what was not read is lost", fail)
                continue
            check_log(position, log, fail)
            if where not in self._checked:
                self._checked.add(where)
                check_fingerprint(jetstream_to(self._settings), position, log, fail)

    # -- tasks ----------------------------------------------------------------------------

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """The tasks of a batch: the same for the same two offsets, whenever it is run."""
        self._fresh, self._begun = False, True
        begin, goal = from_json(start), from_json(end)
        logs = self._logs or self._look()
        if any(where not in logs for where in goal):
            logs = self._look()
        self._check(begin, logs)
        return [task_of(piece, logs) for piece in pieces(begin, goal) if self._there(piece, logs)]

    def _there(self, piece: Any, logs: Mapping[Where, Log]) -> bool:
        if (piece.topic, piece.partition) in logs:
            return True
        report_loss(
            f"'{piece.topic}/{piece.partition}' is gone: the offsets {piece.start} to "
            f"{piece.end - 1} of a batch that is run again are lost",
            self._options.fail_on_data_loss,
        )
        return False

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one task; runs in a worker."""
        return self._reader.read(partition) if isinstance(partition, RangeTask) else iter(())

    def commit(self, end: dict[str, Any]) -> None:
        """Nothing is kept for a query outside its checkpoint."""

    def stop(self) -> None:
        """Nothing needs a goodbye."""
