"""Writes the batches of a flow into a table of PostgreSQL, each exactly once.

1. Tasks copy their rows into a staging table, each in a transaction of its own, marked with the
   attempt of the task. Rows of attempts that failed, or that Spark does not count, stay unused.
2. The driver stores the batch in ONE transaction: rows from the staging table to the target, the
   number of the batch to `millstream_batches`. A batch that is noted there is skipped.

Why not a transaction for each task, noted as (query, batch, task): that needs the same rows in the
same task when a batch is run again, which a shuffle or a joined table may change. And readers of
the table would see half a batch.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from millstream.cdc.sink.csv_rows import csv_rows
from millstream.cdc.sink.fold import RowEvents, fold
from millstream.cdc.sink.postgres_rows import PostgresTable
from millstream.cdc.sink.sql import columns_of, quoted, quoted_table
from millstream.errors import SinkError
from millstream.pipelines.postgres import DELETED_MARK, UNCHANGED_MARK
from millstream.pipelines.postgres_table import BATCHES, connected, stage_prefix, table_beside
from millstream.schemas.extras import needed
from millstream.settings import Secret

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["PostgresBatches"]

# More columns of the staging table.
_TASK: Final = "millstream_task"
_ATTEMPT: Final = "millstream_attempt"
_CHUNK: Final = "millstream_chunk"
# Rows of a task that are copied, and stored, at once. In a chunk a key is there once; chunks are
# stored in their order.
CHUNK_ROWS: Final = 100_000
_ANSWER: Final = "attempt BIGINT, chunks INT, rows BIGINT, deleted BIGINT, partial BIGINT"


@dataclass(frozen=True)
class PostgresBatches:
    """Writes the batches of one query; a function for `foreachBatch`."""

    output: str
    table: PostgresTable
    columns: tuple[str, ...]  # of the rows that are stored
    key: tuple[str, ...]  # empty: rows are appended
    address: Secret

    def __call__(self, batch: DataFrame, number: int) -> None:
        """Store a batch, unless it is stored already."""
        query = batch.sparkSession.sparkContext.getLocalProperty("sql.streaming.queryId")
        self.store(batch, str(query), number)

    def store(self, batch: DataFrame, query: str, number: int) -> None:
        """The same, for the query of this id."""
        stage = self._begin(query, number)
        if stage is None:
            return
        load = _Load(self, stage)

        def to_postgres(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            yield from load(batches)

        done = batch.mapInArrow(to_postgres, _ANSWER).collect()
        self._complete(query, number, stage, [row for row in done if row.rows])

    # -- driver ---------------------------------------------------------------------------

    def _begin(self, query: str, number: int) -> str | None:
        """Create the staging table; None if the batch is stored already."""
        prefix = stage_prefix(query)
        stage = table_beside(self.table.name, f"{prefix}{uuid.uuid4().hex[:12]}")
        batches = quoted_table(table_beside(self.table.name, BATCHES))
        with connected(self.address, self.output) as connection:
            connection.execute(
                f"INSERT INTO {batches} (query, batch) VALUES (%s, -1) ON CONFLICT DO NOTHING",
                [query],
            )
            connection.commit()
            if self._stored(connection, query, lock=False) >= number:
                return None
            self._remove_left(connection, prefix)
            marks = f"0 {quoted(_TASK)}, 0::bigint {quoted(_ATTEMPT)}, 0 {quoted(_CHUNK)}"
            marks += f", false {quoted(DELETED_MARK)}, NULL::text[] {quoted(UNCHANGED_MARK)}"
            connection.execute(
                f"CREATE UNLOGGED TABLE {quoted_table(stage)} AS "
                f"SELECT {columns_of(self.columns)}, {marks} "
                f"FROM {quoted_table(self.table.name)} WITH NO DATA"
            )
            connection.commit()
        return stage

    def _remove_left(self, connection: Any, prefix: str) -> None:
        """Remove staging tables of this query that a process left when it was killed."""
        found = connection.execute(
            "SELECT n.nspname, c.relname FROM pg_class c JOIN pg_namespace n "
            "ON n.oid = c.relnamespace WHERE c.relkind = 'r' AND starts_with(c.relname, %s)",
            [prefix],
        ).fetchall()
        locked = needed("psycopg", "cdc").errors.LockNotAvailable
        for schema, name in found:
            with suppress(locked), connection.transaction():
                connection.execute(f"DROP TABLE IF EXISTS {quoted(schema)}.{quoted(name)}")

    def _stored(self, connection: Any, query: str, lock: bool) -> int:
        """The number of the last batch that is stored; -1: none."""
        batches = quoted_table(table_beside(self.table.name, BATCHES))
        text = f"SELECT batch FROM {batches} WHERE query = %s{' FOR UPDATE' if lock else ''}"
        found = connection.execute(text, [query]).fetchone()
        if found is None:
            raise SinkError(
                f"'{self.output}': table {batches} has lost the row of this query, so it is not "
                f"known which batches are stored. Put it back from a backup, or reset the flow"
            )
        return int(found[0])

    def _complete(self, query: str, number: int, stage: str, done: Sequence[Any]) -> None:
        batches = quoted_table(table_beside(self.table.name, BATCHES))
        with connected(self.address, self.output) as connection:
            # An older driver that is still running waits here, and then finds the batch stored.
            if self._stored(connection, query, lock=True) < number:
                statements = _Statements(self, stage)
                attempts = [row.attempt for row in done]
                deleted, partial = (sum(row[name] for row in done) for name in _ANSWER_COUNTS)
                if deleted or partial:  # else the planner would guess how many rows it has
                    connection.execute(f"ANALYZE {quoted_table(stage)}")
                for chunk in range(max((row.chunks for row in done), default=0)):
                    place = {"chunk": chunk, "attempts": attempts}
                    if deleted:
                        connection.execute(statements.delete, place)
                    if partial:
                        self._update(connection, statements, place)
                    connection.execute(statements.insert, place)
                connection.execute(
                    f"UPDATE {batches} SET batch = %s, stored = now() WHERE query = %s",
                    [number, query],
                )
            connection.execute(f"DROP TABLE IF EXISTS {quoted_table(stage)}")
            connection.commit()

    def _update(self, connection: Any, statements: _Statements, place: dict[str, Any]) -> None:
        wanted = connection.execute(statements.partial, place).fetchone()[0]
        if connection.execute(statements.update, place).rowcount != wanted:
            raise SinkError(
                f"'{self.output}': an update does not have all columns of its row (see the column "
                f"'_unchanged'), and table {self.table.name} has no such row to keep them from. "
                f"Nothing of this batch was stored. Reset the flow, so that it begins with the "
                f"first change"
            )


_ANSWER_COUNTS: Final = ("deleted", "partial")


class _Statements:
    """From the staging table to the target: those rows of a chunk that count."""

    def __init__(self, to: PostgresBatches, stage: str) -> None:
        target, columns = quoted_table(to.table.name), columns_of(to.columns)
        rows = f"FROM {quoted_table(stage)} s WHERE s.{quoted(_CHUNK)} = %(chunk)s"
        rows += f" AND s.{quoted(_ATTEMPT)} = ANY(%(attempts)s)"
        if not to.key:
            self.insert = f"INSERT INTO {target} ({columns}) SELECT {columns} {rows}"
            return
        # A key that is in several tasks: the order of tasks is that of their rows.
        key = columns_of(to.key)
        last = f"(SELECT DISTINCT ON ({key}) * {rows} ORDER BY {key}, {quoted(_TASK)} DESC) s"
        deleted, unchanged = f"s.{quoted(DELETED_MARK)}", f"s.{quoted(UNCHANGED_MARK)}"
        same = " AND ".join(f"t.{quoted(name)} = s.{quoted(name)}" for name in to.key)
        others = [name for name in to.columns if name not in to.key]
        kept = ", ".join(
            f"{quoted(name)} = CASE WHEN {_text(name)} = ANY({unchanged}) "
            f"THEN t.{quoted(name)} ELSE s.{quoted(name)} END"
            for name in others or to.key
        )
        changes = ", ".join(f"{quoted(name)} = EXCLUDED.{quoted(name)}" for name in others)
        action = f"UPDATE SET {changes}" if changes else "NOTHING"
        some = f"NOT {deleted} AND {unchanged} IS NOT NULL"
        self.delete = f"DELETE FROM {target} t USING {last} WHERE {deleted} AND {same}"
        self.partial = f"SELECT count(*) FROM {last} WHERE {some}"
        self.update = f"UPDATE {target} t SET {kept} FROM {last} WHERE {some} AND {same}"
        self.insert = (
            f"INSERT INTO {target} ({columns}) SELECT {columns} FROM {last} "
            f"WHERE NOT {deleted} AND {unchanged} IS NULL ON CONFLICT ({key}) DO {action}"
        )


def _text(name: str) -> str:
    """A name as a text of SQL, in a statement that has placeholders."""
    return "'" + name.replace("'", "''").replace("%", "%%") + "'"


# -- tasks ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Load:
    """Copies the rows of a task into the staging table; says which attempt copied how many."""

    to: PostgresBatches
    stage: str

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        context = TaskContext.get()
        task, attempt = (0, 0)
        if context is not None:
            task, attempt = context.partitionId(), context.taskAttemptId()
        counts = {"attempt": attempt, "chunks": 0, "rows": 0, "deleted": 0, "partial": 0}
        first = next((batch for batch in batches if batch.num_rows), None)
        if first is not None:
            with connected(self.to.address, self.to.output) as connection:
                for chunk in _chunks(first, batches):
                    events = self._events(chunk)
                    self._copy(connection, events, (task, attempt, counts["chunks"]))
                    counts["chunks"] += 1
                    counts["rows"] += len(events)
                    counts["deleted"] += pc.sum(events.deleted).as_py() or 0
                    if events.unchanged is not None:
                        counts["partial"] += len(events) - events.unchanged.null_count
                connection.commit()
        types = {"chunks": pa.int32()}
        columns = {n: pa.array([c], types.get(n, pa.int64())) for n, c in counts.items()}
        yield pa.RecordBatch.from_pydict(columns)

    def _events(self, chunk: pa.RecordBatch) -> RowEvents:
        """The rows; with a key the last one of each."""
        count = chunk.num_rows
        deleted, unchanged = pa.repeat(False, count), None
        if DELETED_MARK in chunk.schema.names:
            deleted = chunk.column(DELETED_MARK).fill_null(False)
        if UNCHANGED_MARK in chunk.schema.names:
            unchanged = _named(chunk.column(UNCHANGED_MARK), self.to.columns)
        zeros = pa.repeat(0, count)
        rows = chunk.select(list(self.to.columns))
        events = RowEvents(rows, deleted, unchanged, zeros, zeros, zeros)
        if not self.to.key:
            return events
        self._check_keys(events)
        return fold(events, self.to.key)

    def _check_keys(self, events: RowEvents) -> None:
        for name in self.to.key:
            if events.rows.column(name).null_count:
                raise SinkError(
                    f"'{self.to.output}': a row has null in the column '{name}' of its key. "
                    f'Leave such rows out with where("{name} IS NOT NULL")'
                )

    def _copy(self, connection: Any, events: RowEvents, marks: tuple[int, int, int]) -> None:
        count = len(events)
        task, attempt, chunk = (pa.repeat(pa.scalar(mark, pa.int64()), count) for mark in marks)
        unchanged = events.unchanged
        if unchanged is None:
            unchanged = pa.nulls(count, pa.list_(pa.string()))
        added = {
            _TASK: task,
            _ATTEMPT: attempt,
            _CHUNK: chunk,
            DELETED_MARK: events.deleted,
            UNCHANGED_MARK: unchanged,
        }
        batch = events.rows
        for name, column in added.items():
            batch = batch.append_column(name, column)
        kinds = self.to.table.columns
        documents = {name for name in self.to.columns if kinds[name] in ("json", "jsonb")}
        statement = (
            f"COPY {quoted_table(self.stage)} ({columns_of(batch.schema.names)}) "
            f"FROM STDIN (FORMAT csv, ENCODING 'UTF8')"
        )
        with connection.cursor().copy(statement) as out:
            out.write(csv_rows(batch, documents))


def _named(lists: pa.Array, columns: Sequence[str]) -> pa.Array | None:
    """Lists of column names with those that are stored; null if there is none of them."""
    if not pc.any(pc.greater(pc.list_value_length(lists), 0)).as_py():
        return None
    known = set(columns)
    kept = [[name for name in names or () if name in known] for names in lists.to_pylist()]
    return pa.array([names or None for names in kept], pa.list_(pa.string()))


def _chunks(first: pa.RecordBatch, others: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The rows in batches of about CHUNK_ROWS."""
    waiting, rows = [first], first.num_rows
    for batch in others:
        if rows + batch.num_rows > CHUNK_ROWS:
            yield pa.concat_batches(waiting)
            waiting, rows = [], 0
        waiting.append(batch)
        rows += batch.num_rows
    if waiting:
        yield pa.concat_batches(waiting)
