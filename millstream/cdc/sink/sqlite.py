"""SQLite as the target of `apply`. Blocking."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from millstream.cdc.sink.csv_rows import document_texts
from millstream.cdc.sink.fitting import fits_sqlite
from millstream.cdc.sink.fold import RowEvents
from millstream.cdc.sink.postgres_rows import missing_row
from millstream.cdc.sink.sql import (
    columns_of,
    is_binary,
    is_document,
    is_list,
    quoted,
    quoted_table,
    sqlite_type,
)
from millstream.cdc.sink.target import DatabaseLost, FoundTable, RefusedRow, Session, SinkPlan
from millstream.errors import ConfigError, SinkError
from millstream.schemas import types as t
from millstream.schemas.arrow_types import arrow_type

__all__ = ["SqliteSession", "SqliteTable", "sqlite_path"]

LOCK_SECONDS: Final = 60.0  # for a transaction of another process
_SCHEME: Final = "sqlite:///"
_BUSY: Final = ("locked", "busy", "unable to open", "disk i/o error")


def sqlite_path(url: str) -> Path:
    """The file of an address: `sqlite:///shop.db`, or `sqlite:////var/shop.db`."""
    path = url.removeprefix(_SCHEME)
    if path == url or not path:
        raise ConfigError(f"{url!r}: write the file of a SQLite database as sqlite:///shop.db")
    return Path(path)


@dataclass(frozen=True, slots=True)
class SqliteTable:
    """A table as it is in the file."""

    name: str
    columns: dict[str, str]  # name: declared type
    computed: frozenset[str] = frozenset()
    primary_key: tuple[str, ...] = ()
    unique: tuple[frozenset[str], ...] = field(default=())

    def check_key(self, key: Sequence[str]) -> None:
        """Refuse a key that no unique index of the table has."""
        if not key or frozenset(key) not in self.unique:
            names = ", ".join(key) or "none are known"
            raise ConfigError(
                f"table {self.name} has no unique index on its key columns ({names}), so rows "
                f"could not be found by them. Give others (key=[...]), or create one: "
                f"CREATE UNIQUE INDEX ..."
            )


class SqliteSession(Session):
    """One connection to a file."""

    def __init__(self, url: str, plan: SinkPlan) -> None:
        super().__init__(plan)
        self._path = sqlite_path(url)
        self._connection: sqlite3.Connection | None = None

    def open(self) -> None:
        """Open the file; it is created if it is missing."""
        try:
            self._connection = sqlite3.connect(
                self._path, timeout=LOCK_SECONDS, isolation_level=None, check_same_thread=False
            )
        except sqlite3.OperationalError as error:
            raise DatabaseLost(f"{self._path}: {error}") from error

    def close(self) -> None:
        """Close the file."""
        if self._connection is not None:
            with suppress(sqlite3.Error):
                self._connection.close()

    @property
    def _open(self) -> sqlite3.Connection:
        if self._connection is None:
            raise DatabaseLost("it is not open")
        return self._connection

    def _run(self, statement: str, values: Sequence[Any] = ()) -> Any:
        return self._open.execute(statement, values)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        connection = self._open
        try:
            connection.execute("BEGIN IMMEDIATE")
            yield
            connection.execute("COMMIT")
        except BaseException as error:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            if isinstance(error, sqlite3.OperationalError):
                if any(word in str(error).lower() for word in _BUSY):
                    raise DatabaseLost(f"{self._path}: {error}") from error
                raise SinkError(f"{self._path}: {error}") from error
            if isinstance(error, sqlite3.Error | OverflowError):
                raise RefusedRow(str(error)) from error
            raise

    @contextmanager
    def _savepoint(self) -> Iterator[None]:
        connection = self._open
        connection.execute("SAVEPOINT part")
        try:
            yield
        except (sqlite3.IntegrityError, sqlite3.DataError, OverflowError) as error:
            connection.execute("ROLLBACK TO part")
            raise RefusedRow(str(error)) from error
        finally:
            if connection.in_transaction:
                connection.execute("RELEASE part")

    def _lock_creation(self) -> None:
        """One transaction writes at a time."""

    def _find(self, table: str) -> SqliteTable | None:
        schema, _, name = table.rpartition(".")
        prefix = f"{quoted(schema)}." if schema else ""
        rows = self._run(f"PRAGMA {prefix}table_xinfo({quoted(name)})").fetchall()
        if not rows:
            return None
        key = [row[1] for row in sorted(rows, key=lambda row: row[5]) if row[5]]
        unique = [frozenset(key)] if key else []
        for index in self._run(f"PRAGMA {prefix}index_list({quoted(name)})").fetchall():
            if index[2] and not index[4]:  # unique, not partial
                found = self._run(f"PRAGMA {prefix}index_info({quoted(index[1])})").fetchall()
                unique.append(frozenset(one[2] for one in found))
        return SqliteTable(
            table,
            {row[1]: row[2] for row in rows if row[6] != 1},
            frozenset(row[1] for row in rows if row[6] in (2, 3)),
            tuple(key),
            tuple(unique),
        )

    def _type_of(self, type_: t.Type) -> str:
        return sqlite_type(arrow_type(type_))

    def _fits(self, type_: t.Type, found: str) -> bool:
        return fits_sqlite(type_, found)

    def _empty_table(self) -> None:
        self._run(f"DELETE FROM {quoted_table(self.plan.table)}")

    def _write(self, table: FoundTable, events: RowEvents, key: tuple[str, ...]) -> None:
        computed = table.computed if isinstance(table, SqliteTable) else frozenset()
        names = [name for name in events.rows.schema.names if name not in computed]
        columns = {name: sqlite_values(events.rows.column(name)) for name in names}
        deleted = events.deleted.to_pylist()
        kept: list[Any] = [None] * len(deleted)
        if events.unchanged is not None:
            kept = events.unchanged.to_pylist()
        # Deletions first, so that other unique columns are free.
        gone = [row for row, one in enumerate(deleted) if one]
        if gone:
            keys = zip(*(_chosen(columns[name], gone) for name in key), strict=True)
            self._open.executemany(
                f"DELETE FROM {quoted_table(self.plan.table)} WHERE {_same(key)}", keys
            )
        groups: dict[frozenset[str], list[int]] = {}
        for row, one in enumerate(deleted):
            if not one:
                groups.setdefault(frozenset(kept[row] or ()), []).append(row)
        for without, rows in sorted(groups.items(), key=lambda item: not item[0]):
            if without:
                self._update(columns, (key, without), rows)
            else:
                self._upsert(columns, key, rows)

    def _upsert(self, columns: dict[str, list[Any]], key: tuple[str, ...], rows: list[int]) -> None:
        names = list(columns)
        changes = ", ".join(f"{quoted(n)} = excluded.{quoted(n)}" for n in names if n not in key)
        self._open.executemany(
            f"INSERT INTO {quoted_table(self.plan.table)} ({columns_of(names)}) "
            f"VALUES ({', '.join('?' * len(names))}) ON CONFLICT ({columns_of(key)}) "
            f"DO {f'UPDATE SET {changes}' if changes else 'NOTHING'}",
            zip(*(_chosen(columns[name], rows) for name in names), strict=True),
        )

    def _update(
        self,
        columns: dict[str, list[Any]],
        which: tuple[tuple[str, ...], frozenset[str]],
        rows: list[int],
    ) -> None:
        """Set what rows have; the other columns keep their values."""
        key, without = which
        names = [name for name in columns if name not in key and name not in without] or list(key)
        changes = ", ".join(f"{quoted(name)} = ?" for name in names)
        statement = f"UPDATE {quoted_table(self.plan.table)} SET {changes} WHERE {_same(key)}"
        values = zip(*(_chosen(columns[name], rows) for name in [*names, *key]), strict=True)
        for row, one in zip(rows, values, strict=True):
            if self._open.execute(statement, one).rowcount != 1:
                found = {name: columns[name][row] for name in key}
                raise missing_row(self.plan.table, found, without)


def _same(key: Sequence[str]) -> str:
    return " AND ".join(f"{quoted(name)} = ?" for name in key)


def _chosen(values: list[Any], rows: list[int]) -> list[Any]:
    return values if len(values) == len(rows) else [values[row] for row in rows]


def sqlite_values(column: pa.Array) -> list[Any]:
    """Values as SQLite stores them without loss: exact numbers and times as text."""
    types, kind = pa.types, column.type
    if is_list(kind) or is_document(kind):
        return list(document_texts(column))
    if types.is_duration(kind):
        column = column.cast(pa.duration("us")).cast(pa.int64())
    elif types.is_boolean(kind):
        column = column.cast(pa.int8())
    elif types.is_timestamp(kind) and kind.tz not in (None, "UTC"):
        column = column.cast(pa.timestamp("us", "UTC")).cast(pa.string())
    elif (
        not (types.is_integer(kind) or types.is_floating(kind) or is_binary(kind))
        or kind == pa.uint64()
    ):
        column = column.cast(pa.string())
    found: list[Any] = column.to_pylist()
    return found
