"""Rows of MySQL and MariaDB as they are at one position of the log.

MariaDB says at which position a consistent snapshot is, so nothing is locked. MySQL does not: for
an instant, FLUSH TABLES WITH READ LOCK keeps commits away while the snapshot begins and the
position is read. The methods with a leading underscore block; they run in a thread.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import decimal
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from millstream import errors
from millstream.cdc.model import Column, TableShape
from millstream.cdc.mysql.address import Address, connect
from millstream.cdc.mysql.binlog import LogBoundary, position_of
from millstream.cdc.mysql.catalog import log_status, rows_of
from millstream.cdc.mysql.layout import TableLayout, struct_of
from millstream.schemas import types as t
from millstream.schemas.extras import needed

__all__ = ["MysqlView", "begin_view", "is_after"]

BATCH_ROWS: Final = 10_000
BATCH_BYTES: Final = 8 * 1024 * 1024
LOCK_SECONDS: Final = 10  # that FLUSH TABLES WITH READ LOCK may wait for running statements
WRITE_SECONDS: Final = 3600  # that the server waits for us to take rows
_FETCH: Final = 250
_MARIADB_POSITION: Final = ("binlog_snapshot_file", "binlog_snapshot_position")


def begin_view(address: Address, mariadb: bool) -> tuple[Any, LogBoundary]:
    """A connection that sees the database as it is now, and where that is in the log; blocks."""
    connection = connect(address, autocommit=False)
    try:
        with connection.cursor() as cursor:
            cursor.execute("SET time_zone = '+00:00'")
            cursor.execute(f"SET net_write_timeout = {WRITE_SECONDS}")
            cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            boundary = _mariadb_boundary(connection, cursor) if mariadb else None
            return connection, boundary or _locked_boundary(connection, cursor)
    except BaseException:
        connection.close()
        raise


def _mariadb_boundary(connection: Any, cursor: Any) -> LogBoundary | None:
    cursor.execute("START TRANSACTION WITH CONSISTENT SNAPSHOT")
    rows = rows_of(connection, "SHOW STATUS LIKE 'binlog_snapshot_%%'")
    status = {str(row["Variable_name"]).lower(): row["Value"] for row in rows}
    file, position = (status.get(name) for name in _MARIADB_POSITION)
    return LogBoundary(str(file), int(position)) if file and position else None


def _locked_boundary(connection: Any, cursor: Any) -> LogBoundary:
    pymysql = needed("pymysql", "cdc")
    try:
        cursor.execute(f"SET lock_wait_timeout = {LOCK_SECONDS}")
        cursor.execute("FLUSH TABLES WITH READ LOCK")
    except pymysql.MySQLError as error:
        raise errors.CaptureError(
            f"the snapshot needs FLUSH TABLES WITH READ LOCK for an instant, and the server "
            f"refused it: {error.args[-1]}. GRANT RELOAD ON *.* to the user and end statements "
            f"that run for long; where a provider does not allow that, capture with "
            f"snapshot = false"
        ) from error
    try:
        cursor.execute("START TRANSACTION WITH CONSISTENT SNAPSHOT")
        found = log_status(connection)
    finally:
        cursor.execute("UNLOCK TABLES")
    if found is None:
        raise errors.CaptureError("the server writes no log of changes: 'millstream cdc check'")
    return LogBoundary(*found)


class MysqlView:
    """The rows of the database at one position of the log."""

    def __init__(
        self, connection: Any, boundary: LogBoundary, layout: Callable[[str], TableLayout]
    ) -> None:
        self.point = position_of(boundary.number)
        self._connection = connection
        self._layout = layout  # of a table, by its name

    def close(self) -> None:
        """End the transaction; blocks."""
        # Not with a closing packet: rows that nobody wants may still be on their way.
        self._connection._force_close()

    async def rows(
        self, table: TableShape, after: Sequence[str] | None
    ) -> AsyncIterator[tuple[pa.RecordBatch, list[str]]]:
        """Rows in the order of the key; each batch with the key of its last row."""
        layout = self._layout(table.name)
        cursor = await asyncio.to_thread(self._select, layout, after)
        while True:
            found = await asyncio.to_thread(_batch, cursor, layout)
            if found is None:
                return
            yield found

    def _select(self, layout: TableLayout, after: Sequence[str] | None) -> Any:
        """One statement for all rows; the server sends them as they are taken."""
        cursors = needed("pymysql.cursors", "cdc")
        shape = layout.shape
        columns = {column.name: column for column in shape.columns}
        key = [columns[name] for name in shape.key]
        order = ", ".join(_order(column) for column in key)
        where, values = "", []
        if after is not None:
            values = [_edge(column, text) for column, text in zip(key, after, strict=True)]
            where = f" WHERE ({order}) > ({', '.join('%s' for _ in values)})"
        kinds = zip(columns, layout.kinds, strict=True)
        # Text shows six digits of a float; as a double it is exact.
        picked = ", ".join(
            f"{_quoted(name)} + 0e0" if kind.name == "float" else _quoted(name)
            for name, kind in kinds
        )
        cursor = self._connection.cursor(cursors.SSCursor)
        table = f"{_quoted(shape.namespace)}.{_quoted(shape.name)}"
        query = f"SELECT {picked} FROM {table}{where} ORDER BY {order}"
        cursor.execute(query, values)
        return cursor


def _batch(cursor: Any, layout: TableLayout) -> tuple[pa.RecordBatch, list[str]] | None:
    rows: list[tuple[Any, ...]] = []
    size = 0
    while len(rows) < BATCH_ROWS and size < BATCH_BYTES:
        some = cursor.fetchmany(_FETCH)
        rows.extend(some)
        size += sum(len(v) for row in some for v in row if isinstance(v, (str, bytes)))
        if len(some) < _FETCH:
            break
    if not rows:
        return None
    batch = pa.RecordBatch.from_struct_array(struct_of(layout, rows))
    last = batch.slice(batch.num_rows - 1)
    return batch, [_key_text(last.column(name)[0].as_py()) for name in layout.shape.key]


def _quoted(name: str) -> str:
    """A name as an identifier in a statement with parameters, where % is their sign."""
    return "`" + name.replace("`", "``").replace("%", "%%") + "`"


# -- keys ---------------------------------------------------------------------------------


def _order(column: Column) -> str:
    """The expression by which rows are ordered, as Arrow compares the values too."""
    name = _quoted(column.name)
    match column.type:
        case t.String() | t.Enum():
            # Not by the collation of the column: Arrow compares bytes.
            return f"CAST(CONVERT({name} USING utf8mb4) AS BINARY)"
        case t.Bool():
            return f"{name} + 0"
        case t.Int(64, False) if "bit" in column.source_type:
            return f"{name} + 0"
        case _:
            return name


def _edge(column: Column, text: str) -> Any:
    """The last key of an earlier snapshot, for a comparison in the server."""
    value = _key_value(column.type, text)
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, dt.datetime):
        return value.replace(tzinfo=None).isoformat(" ")
    return value


def _key_text(value: Any) -> str:
    match value:
        case bytes():
            return value.hex()
        case bool():
            return str(int(value))
        case dt.datetime() | dt.date():
            return value.isoformat()
        case _:
            return str(value)


def _key_value(type_: t.Type, text: str) -> Any:
    match type_:
        case t.Bool():
            return text == "1"
        case t.Int():
            return int(text)
        case t.Binary():
            return bytes.fromhex(text)
        case t.Decimal():
            return decimal.Decimal(text)
        case t.Date():
            return dt.date.fromisoformat(text)
        case t.Timestamp():
            return dt.datetime.fromisoformat(text)
        case _:
            return text


def is_after(table: TableShape, keys: pa.RecordBatch, edge: Sequence[str]) -> pa.Array:
    """Which keys are after `edge`, in the order in which snapshots read rows."""
    types = {column.name: column.type for column in table.columns}
    after = pa.repeat(pa.scalar(False), keys.num_rows)
    for name, text in reversed(list(zip(table.key, edge, strict=True))):
        column = keys.column(name)
        value = pa.scalar(_key_value(types[name], text), column.type)
        after = pc.or_(pc.greater(column, value), pc.and_(pc.equal(column, value), after))
    return after
