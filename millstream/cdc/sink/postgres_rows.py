"""Rows of a record batch into a table of PostgreSQL: upserted, deleted, by their key. Blocking.

    with psycopg.connect(url) as connection:
        upsert_rows(connection, "public.orders", batch, ["id"])
        connection.commit()

Rows are copied into a temporary table and go on from there with one statement each for deletions,
partial updates and upserts: several times as fast as a statement for each row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from millstream.cdc.sink.csv_rows import csv_rows
from millstream.cdc.sink.sql import columns_of, quoted, quoted_table, stage_name
from millstream.errors import ConfigError, SinkError

if TYPE_CHECKING:
    from psycopg import Connection

__all__ = ["PostgresTable", "find_table", "upsert_rows"]

_MARK: Final = "millstream_mark"  # a column of the temporary table: what to do with a row
_UPSERT: Final = 0
_DELETE: Final = 1
_FIRST_PARTIAL: Final = 2  # from here on: rows that do not have every column

_COLUMNS: Final = """
    SELECT a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull,
           a.attgenerated <> '' OR a.attidentity = 'a'
    FROM pg_attribute a
    WHERE a.attrelid = to_regclass(%s) AND a.attnum > 0 AND NOT a.attisdropped
    ORDER BY a.attnum
"""
_KEYS: Final = """
    SELECT i.indisprimary, array_agg(a.attname ORDER BY k.ordinal)
    FROM pg_index i
    CROSS JOIN LATERAL unnest(i.indkey::int2[]) WITH ORDINALITY AS k(number, ordinal)
    JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.number
    WHERE i.indrelid = to_regclass(%s) AND i.indisunique AND i.indpred IS NULL
      AND i.indexprs IS NULL AND i.indisvalid AND i.indimmediate AND k.ordinal <= i.indnkeyatts
    GROUP BY i.indexrelid, i.indisprimary
    ORDER BY i.indisprimary DESC
"""
# A temporary table has no statistics: these keep the planner from reading the whole target for
# each group of rows.
_PLANNER: Final = (
    "SELECT set_config('enable_hashjoin', 'off', true), set_config('jit', 'off', true), "
    "set_config('enable_mergejoin', 'off', true)"
)


@dataclass(frozen=True, slots=True)
class PostgresTable:
    """A table as it is in the database."""

    name: str  # "public.orders" or "orders"
    columns: Mapping[str, str]  # name: type
    required: frozenset[str] = frozenset()  # columns that may not be null
    computed: frozenset[str] = frozenset()  # columns that take no values
    primary_key: tuple[str, ...] = ()
    unique: tuple[frozenset[str], ...] = field(default=())  # columns of each unique index

    def check_key(self, key: Sequence[str]) -> None:
        """Refuse a key that no unique index of the table has."""
        if not key:
            raise ConfigError(f"table {self.name}: no key columns are known; give them: key=['id']")
        missing = [name for name in key if name not in self.columns]
        if missing:
            raise ConfigError(
                f"table {self.name} has no column '{missing[0]}', which is in the key"
            )
        if frozenset(key) not in self.unique:
            names = ", ".join(key)
            raise ConfigError(
                f"table {self.name} has no unique index on ({names}), so rows could not be found "
                f"by it. Create one: ALTER TABLE {quoted_table(self.name)} ADD PRIMARY KEY "
                f"({columns_of(key)})"
            )


def find_table(connection: Connection[Any], table: str) -> PostgresTable | None:
    """The table as it is now; None if there is none of that name."""
    name = quoted_table(table)
    rows = connection.execute(_COLUMNS, [name]).fetchall()
    if not rows:
        return None
    keys = connection.execute(_KEYS, [name]).fetchall()
    return PostgresTable(
        table,
        {row[0]: row[1] for row in rows},
        frozenset(row[0] for row in rows if row[2]),
        frozenset(row[0] for row in rows if row[3]),
        next((tuple(names) for primary, names in keys if primary), ()),
        tuple(frozenset(names) for _, names in keys),
    )


def upsert_rows(
    connection: Connection[Any],
    table: str | PostgresTable,
    batch: pa.RecordBatch,
    key: Sequence[str],
    deleted: pa.Array | None = None,
    unchanged: pa.Array | None = None,
) -> int:
    """Insert or update the rows of a batch by their key, and delete those that are `deleted`.

    A key may be in the batch once (`fold` keeps the last event of each). `deleted` is a
    boolean for each row, of which only the key columns count then. `unchanged` is a list of column
    names for each row, or null: these keep the value that they have in the table. Columns of the
    table that the batch does not have are not touched. Nothing is committed, and the connection
    must not be in autocommit mode. Returns the number of rows.
    """
    found = find_table(connection, table) if isinstance(table, str) else table
    if found is None:
        raise ConfigError(f"there is no table {table} in the database: create it first")
    found.check_key(key)
    unknown = [name for name in batch.schema.names if name not in found.columns]
    if unknown:
        raise ConfigError(f"table {found.name} has no column '{unknown[0]}': add it first")
    if not batch.num_rows:
        return 0
    computed = [name for name in batch.schema.names if name in found.computed]
    if computed:
        batch = batch.drop_columns(computed)
    marks, partial = _marks(batch.num_rows, deleted, unchanged)
    _copy(connection, found, batch, marks)
    statements = _Statements(found.name, tuple(batch.schema.names), tuple(key))
    counts = {row["values"]: row["counts"] for row in pc.value_counts(marks).to_pylist()}
    if counts.get(_DELETE):
        connection.execute(statements.delete)
    for mark, names in partial.items():
        done = connection.execute(statements.update(mark, names)).rowcount
        if done != counts[mark]:
            _refuse_missing(connection, statements, mark, names)
    if counts.get(_UPSERT):
        connection.execute(statements.upsert)
    return int(batch.num_rows)


def _marks(
    count: int, deleted: pa.Array | None, unchanged: pa.Array | None
) -> tuple[pa.Array, dict[int, frozenset[str]]]:
    """What to do with each row, and the columns that rows of a mark keep."""
    marks = pa.repeat(pa.scalar(_UPSERT, pa.int32()), count)
    partial: dict[int, frozenset[str]] = {}
    if unchanged is not None and pc.any(pc.greater(pc.list_value_length(unchanged), 0)).as_py():
        numbers: dict[frozenset[str], int] = {frozenset(): _UPSERT}
        each = []
        for names in unchanged.to_pylist():
            kept = frozenset(names or ())
            each.append(numbers.setdefault(kept, len(numbers) + _FIRST_PARTIAL - 1))
        marks = pa.array(each, pa.int32())
        partial = {number: kept for kept, number in numbers.items() if kept}
    if deleted is not None:
        marks = pc.if_else(deleted.fill_null(False), pa.scalar(_DELETE, pa.int32()), marks)
        left = set(pc.unique(marks).to_pylist())
        partial = {number: kept for number, kept in partial.items() if number in left}
    return marks, partial


def _copy(
    connection: Connection[Any], table: PostgresTable, batch: pa.RecordBatch, marks: pa.Array
) -> None:
    """Put the rows into the temporary table, whose columns have the types of the target's."""
    names = batch.schema.names
    stage = quoted(stage_name(table.name, names))
    connection.execute(_PLANNER)
    connection.execute(
        f"CREATE TEMPORARY TABLE IF NOT EXISTS {stage} ON COMMIT DELETE ROWS AS "
        f"SELECT {columns_of(names)}, 0 AS {quoted(_MARK)} FROM {quoted_table(table.name)} "
        f"WITH NO DATA"
    )
    connection.execute(f"DELETE FROM {stage}")  # what an earlier call of this transaction left
    documents = {name for name in names if table.columns[name] in ("json", "jsonb")}
    data = csv_rows(batch.append_column(_MARK, marks), documents)
    with connection.cursor().copy(f"COPY {stage} FROM STDIN (FORMAT csv, ENCODING 'UTF8')") as out:
        out.write(data)


class _Statements:
    """The statements from the temporary table to the target."""

    def __init__(self, table: str, names: tuple[str, ...], key: tuple[str, ...]) -> None:
        self.table, self.key = table, key
        self._target = quoted_table(table)
        self._stage = quoted(stage_name(table, names))
        self._names = names
        self._others = [name for name in names if name not in key]
        self._mark = f"s.{quoted(_MARK)}"
        # Not "IS NOT DISTINCT FROM", which no index serves: a key is never null.
        self._same = " AND ".join(f"t.{quoted(name)} = s.{quoted(name)}" for name in key)

    @property
    def delete(self) -> str:
        return (
            f"DELETE FROM {self._target} t USING {self._stage} s "
            f"WHERE {self._mark} = {_DELETE} AND {self._same}"
        )

    @property
    def upsert(self) -> str:
        changes = ", ".join(f"{quoted(n)} = EXCLUDED.{quoted(n)}" for n in self._others)
        action = f"UPDATE SET {changes}" if changes else "NOTHING"
        columns = columns_of(self._names)
        return (
            f"INSERT INTO {self._target} ({columns}) SELECT {columns} FROM {self._stage} s "
            f"WHERE {self._mark} = {_UPSERT} ON CONFLICT ({columns_of(self.key)}) DO {action}"
        )

    def update(self, mark: int, kept: frozenset[str]) -> str:
        """Sets what rows of a mark have. Without a column to set it still counts the rows."""
        names = [name for name in self._others if name not in kept] or list(self.key)
        changes = ", ".join(f"{quoted(name)} = s.{quoted(name)}" for name in names)
        return (
            f"UPDATE {self._target} t SET {changes} FROM {self._stage} s "
            f"WHERE {self._mark} = {mark} AND {self._same}"
        )

    def missing(self, mark: int) -> str:
        """The key of a row that the target does not have."""
        return (
            f"SELECT {columns_of(self.key, 's.')} FROM {self._stage} s WHERE {self._mark} = {mark} "
            f"AND NOT EXISTS (SELECT FROM {self._target} t WHERE {self._same}) LIMIT 1"
        )


def _refuse_missing(
    connection: Connection[Any], statements: _Statements, mark: int, kept: frozenset[str]
) -> None:
    row = connection.execute(statements.missing(mark)).fetchone()
    key = dict(zip(statements.key, row, strict=True)) if row else "unknown"
    raise missing_row(statements.table, key, kept)


def missing_row(table: str, key: object, kept: frozenset[str]) -> SinkError:
    """The error for an update that says nothing of some columns, of a row that does not exist."""
    names = ", ".join(f"'{name}'" for name in sorted(kept))
    return SinkError(
        f"table {table}, key {key}: the source sent an update without the column {names}, whose "
        f"value it did not change, and the table has no such row to keep it from. Nothing of this "
        f"group was stored. Apply the topic from a snapshot on, or copy the rows first"
    )
