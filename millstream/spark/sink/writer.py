"""The sink as Spark calls it: tasks write, the driver commits. Names of the writers' fences."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)

from millstream.errors import ConfigError
from millstream.settings import ConnectionSettings
from millstream.spark.options import SinkOptions
from millstream.spark.sink.staging import StagedPack, Staging
from millstream.spark.sink.table_sink import write_table
from millstream.spark.sink.targets import Target, find_target
from millstream.spark.sink.task_sink import TaskRows, write_chains
from millstream.wire.protocol import unique_token

__all__ = ["BatchWriter", "Job", "StreamWriter", "Written"]

QUERY_ID_CHARS = 16  # of a query's id: 64 bits, so that no two queries share a name


@dataclass
class Written(WriterCommitMessage):
    """What one task reports to the driver."""

    writer: str  # without the number of the task
    batch: int
    rows: int
    staged: tuple[StagedPack, ...] = ()


@dataclass(frozen=True)
class Job:
    """What every task of a write needs; created on the driver."""

    settings: ConnectionSettings
    options: SinkOptions
    target: Target | None

    def write(self, batches: Iterator[pa.RecordBatch], writer: str, batch: int) -> Written:
        """Write the rows of this task under a writer's name, as part of a batch."""
        context = TaskContext.get()
        task = context.partitionId() if context is not None else 0
        if self.target is not None and self.target.demands:
            find_target(self.settings, self.target.topic)  # the worker's server must do it too
        rows = TaskRows(self.settings, self.options, self.target, task)
        if self.options.is_table:
            total = write_table(rows, batches, f"{writer}-{task}", batch)
            return Written(writer, batch, total)
        if self.options.staged:
            staging = Staging(self.settings, writer, batch)
            total, packs = staging.stage(rows, batches)
            return Written(writer, batch, total, packs)
        return Written(writer, batch, write_chains(rows, batches, f"{writer}-{task}", batch))

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """What is left to do after every task has written."""
        done = [message for message in messages if isinstance(message, Written)]
        if not self.options.staged or not done:
            return
        packs = [pack for message in done for pack in message.staged]
        Staging(self.settings, done[0].writer, done[0].batch).commit(packs)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Remove what tasks staged and will not be committed; what they wrote directly stays."""
        done = [message for message in messages if isinstance(message, Written)]
        if self.options.staged and done:
            # A write with a name belongs to a query, which runs a batch that failed again.
            again = bool(self.options.writer)
            Staging(self.settings, done[0].writer, done[0].batch).discard(unless_listed=again)


def _query() -> tuple[str, int] | None:
    """The id of the streaming query and its batch that this task belongs to."""
    context = TaskContext.get()
    if context is None:
        return None
    query = context.getLocalProperty("sql.streaming.queryId")
    batch = context.getLocalProperty("streaming.sql.batchId")
    return None if query is None or batch is None else (query, int(batch))


def _name(query: str, name: str) -> str:
    short = query.replace("-", "")[:QUERY_ID_CHARS]
    return f"spark-{short}-{name}" if name else f"spark-{short}"


class StreamWriter(DataSourceStreamArrowWriter):
    """Writes each row of a streaming query once, however many times a batch or task is run."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Runs in a worker, once for each attempt of each task."""
        found = _query()
        if found is None:
            raise ConfigError("a streaming sink runs in a streaming query only")
        query, batch = found
        return self._job.write(iterator, _name(query, self._job.options.writer), batch)

    def commit(
        self,
        messages: list[WriterCommitMessage | None],
        batchId: int,  # noqa: N803
    ) -> None:
        """Runs on the driver when every task of a batch is done."""
        self._job.commit(messages)

    def abort(
        self,
        messages: list[WriterCommitMessage | None],
        batchId: int,  # noqa: N803
    ) -> None:
        """Nothing is removed: the batch is run again and finds what is already stored."""


class BatchWriter(DataSourceArrowWriter):
    """Writes a DataFrame: staged, so that none of it is visible before all of it is written."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._id = unique_token(QUERY_ID_CHARS)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Runs in a worker, once for each attempt of each task."""
        found = _query()
        name = self._job.options.writer
        if found is None:
            return self._job.write(iterator, f"spark-{self._id}", 0)
        if not name:
            raise ConfigError(
                "a write inside foreachBatch needs the option writerName, a different one for each "
                "write of the function, so that a batch that is run again writes nothing twice. "
                "Or use millstream.spark.topic_writer(...)"
            )
        return self._job.write(iterator, _name(found[0], name), found[1])

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Runs on the driver when every task is done."""
        self._job.commit(messages)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Runs on the driver when the write failed."""
        self._job.abort(messages)
