"""MySQL and MariaDB as a source of changes: their binary log, read as a replica reads it.

The position of a change is where its transaction begins in the log, and its number in it.
Transactions are in the log in the order of their commits, each as a whole, and only when they are
committed.

Compared with PostgreSQL:

- Every change arrives exactly once and in the order of the commits, with its transaction, as there.
- Weaker: the server keeps no position for a capture. It deletes old files of its log by age,
  captured or not: a capture that was stopped for longer must begin again, and says so.
  Where to go on is known from the topics. So outbox tables are refused, and a capture without a
  snapshot that ends before its first event or heartbeat begins at a later position the next time.
- Weaker: rows that foreign keys change by CASCADE or SET NULL are not in the log. Such tables are
  refused.
- Weaker: a session with the right to set sql_log_bin = 0 can hide changes; nothing shows that.
- Weaker: a server that takes over from another one has another log. That is noticed by its name,
  and stops the capture.
- Tables that are truncated: see the setting `truncate`. DROP, RENAME and partitions that are
  removed or exchanged stop the capture, as the log does not show the rows.
- As with PostgreSQL, nothing is sent for rows that get a default value with ADD COLUMN.
- Times of commits are whole seconds.

Tested with MariaDB 10.11. The statements for MySQL 8 (SHOW BINARY LOG STATUS, FLUSH TABLES WITH
READ LOCK, server_uuid) follow its manual.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, ParamSpec, TypeVar

import pyarrow as pa

from millstream import errors
from millstream.cdc.model import CaptureLag, Finding, Received, RowChanges, TableShape
from millstream.cdc.mysql.address import Address, connect, error_of
from millstream.cdc.mysql.binlog import (
    HEARTBEAT_SECONDS,
    BinlogReader,
    LogBoundary,
    Piece,
    position_of,
    start_of,
)
from millstream.cdc.mysql.catalog import (
    MARIADB,
    log_files,
    log_status,
    rows_of,
    table_of,
    tables_of,
)
from millstream.cdc.mysql.checks import findings_about
from millstream.cdc.mysql.layout import Placed, TableLayout, changes_of
from millstream.cdc.mysql.snapshot import MysqlView, begin_view, is_after
from millstream.cdc.settings import CaptureSettings
from millstream.deadline import now_ns
from millstream.schemas.extras import needed

__all__ = ["MysqlSource"]

RECEIVE_ROWS: Final = 5_000
RECEIVE_BYTES: Final = 8 * 1024 * 1024

P = ParamSpec("P")
T = TypeVar("T")


class MysqlSource:
    """Captures the changes of a database, `mysql://user:password@host:port/database`."""

    def __init__(self, settings: CaptureSettings) -> None:
        self._settings = settings
        self._address = Address.parse(settings.source)
        self._connection: Any = None
        self._version = ""
        self._layouts: dict[str, TableLayout] = {}  # of tables as they are now, by name
        self._start = 0  # number of the boundary to begin at; 0: where the log ends
        self._end: LogBoundary | None = None  # of the log, when the capture was prepared
        self._reader: BinlogReader | None = None
        self._upto = 0  # commit position up to which everything was handed over
        self._failure: errors.MillstreamError | None = None
        self._last_time: int | None = None  # of the last transaction that was received

    # -- connection -----------------------------------------------------------------------

    async def open(self) -> None:
        """Connect."""
        await self._run(self._open)

    def _open(self) -> None:
        if self._connection is None:
            self._connection = connect(self._address)
            self._version = str(rows_of(self._connection, "SELECT version() AS v")[0]["v"])

    async def close(self) -> None:
        """Disconnect, whatever state it is in."""
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        reader, self._reader = self._reader, None
        connection, self._connection = self._connection, None
        self._failure = None
        if reader is not None:
            reader.close()
        if connection is not None:
            connection._force_close()

    async def _run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call what blocks, in a thread, with errors that say what they mean."""
        pymysql = needed("pymysql", "cdc")
        try:
            return await asyncio.to_thread(function, *args, **kwargs)
        except (pymysql.MySQLError, OSError) as error:
            raise error_of(error, self._settings.name, self._address) from error

    def _connected(self) -> Any:
        if self._connection is None:
            raise errors.CaptureError("open the source first: 'await source.open()'")
        try:
            self._connection.ping()
        except needed("pymysql", "cdc").MySQLError:  # it may have been idle for hours
            self._connection = connect(self._address)
        return self._connection

    @property
    def _mariadb(self) -> bool:
        return MARIADB in self._version.lower()

    # -- about it -------------------------------------------------------------------------

    async def identity(self) -> str:
        """The server's own name for itself, and the database."""
        return await self._run(self._identity)

    def _identity(self) -> str:
        variables = {
            str(row["Variable_name"]).lower(): str(row["Value"])
            for row in rows_of(
                self._connected(),
                "SHOW GLOBAL VARIABLES WHERE Variable_name IN "
                "('server_uuid', 'server_uid', 'server_id')",
            )
        }
        names = ("server_uuid", "server_uid", "server_id")
        name = next(variables[one] for one in names if one in variables)
        return f"{MARIADB if self._mariadb else 'mysql'} {name} {self._address.database}"

    async def check(self) -> list[Finding]:
        """What is missing for a capture, found without changing anything."""
        return await self._run(
            lambda: findings_about(self._connected(), self._address.database, self._settings)
        )

    async def tables(self) -> list[TableShape]:
        """The captured tables as they are now; one that `check` refuses has no columns."""
        await self._run(self._read_tables)
        return [layout.shape for layout in self._layouts.values()]

    def _read_tables(self) -> None:
        database = self._address.database
        found = {}
        for table in tables_of(self._connected(), database, self._settings):
            own = self._settings.settings_of(f"{database}.{table.name}")
            try:
                shape, kinds = table_of(table, database, own)
            except errors.ConfigError:
                shape, kinds = TableShape(database, table.name, (), ()), []
            found[table.name] = TableLayout(shape, tuple(kinds))
        self._layouts = found

    async def prepare(self, tables: Sequence[TableShape]) -> bool:
        """Remember where the log ends: the server keeps nothing for a capture."""
        found = await self._run(lambda: log_status(self._connected()))
        if found is None:
            raise errors.CaptureError("the server writes no log of changes: 'millstream cdc check'")
        self._end = LogBoundary(*found)
        return False

    async def lag(self) -> CaptureLag:
        """How much of the log is not read yet."""
        files = await self._run(lambda: log_files(self._connected()))
        status = await self._run(lambda: log_status(self._connected()))
        if status is None:
            return CaptureLag()
        details: dict[str, Any] = {"log": f"{status[0]}:{status[1]}"}
        number = start_of(self._upto) if self._reader is not None else self._start
        if not number:
            return CaptureLag(details=details)
        end = LogBoundary(*status)
        waiting = sum(
            (end.position if file == end.file else size)
            - (number & 0xFFFFFFFF if LogBoundary(file, 0).number >> 32 == number >> 32 else 0)
            for file, size in files
            if LogBoundary(file, 0).number >> 32 >= number >> 32
        )
        seconds = None
        if waiting > 0 and self._last_time is not None:
            seconds = max(0.0, now_ns() / 1e9 - self._last_time)
        return CaptureLag(bytes=max(0, waiting), seconds=seconds or 0.0, details=details)

    async def reset(self) -> None:
        """Nothing: there is nothing of a capture at the server."""

    # -- the snapshot ---------------------------------------------------------------------

    @asynccontextmanager
    async def snapshot(self) -> AsyncIterator[MysqlView]:
        """A view of the database as it is now."""
        connection, boundary = await self._run(begin_view, self._address, self._mariadb)
        view = MysqlView(connection, boundary, self._layouts.__getitem__)
        # Nothing before it is wanted by tables that have no position yet.
        self._start = min(self._start or boundary.number, boundary.number)
        try:
            yield view
        finally:
            await asyncio.to_thread(view.close)

    def is_after(self, table: TableShape, keys: pa.RecordBatch, edge: Sequence[str]) -> pa.Array:
        """Which keys are after `edge` in the order of snapshots."""
        return is_after(table, keys, edge)

    # -- changes --------------------------------------------------------------------------

    def start_at(self, commit: int) -> None:
        """Changes up to this position are stored; 0: none are."""
        self._start = start_of(commit)

    async def changes(self) -> AsyncGenerator[Received, None]:
        """All changes since what is stored, for ever."""
        start = await self._run(self._boundary_to_start)
        shapes = {name: layout.shape for name, layout in self._layouts.items()}
        reader = self._reader = BinlogReader(self._address, self._settings, shapes, start)
        self._upto = position_of(start.number) - 1
        self._failure = None
        try:
            while True:
                yield await self._run(self._next, reader)
        finally:
            await asyncio.to_thread(reader.close)

    def _boundary_to_start(self) -> LogBoundary:
        if not self._start:
            if self._end is None:
                raise errors.CaptureError("prepare the capture before its changes are read")
            return self._end
        files = [name for name, _ in log_files(self._connected())]
        number, position = self._start >> 32, self._start & 0xFFFFFFFF
        for file in files:
            if LogBoundary(file, 0).number >> 32 == number:
                return LogBoundary(file, position)
        raise errors.SourceLost(
            self._settings.name,
            f"file {number} of the server's log is deleted; it has {', '.join(files[:1])} to "
            f"{', '.join(files[-1:])}",
        )

    def _next(self, reader: BinlogReader) -> Received:
        """What has come: several small transactions together. Blocks for a second at most."""
        if self._failure is not None:
            raise self._failure
        piece = reader.next(2 * HEARTBEAT_SECONDS)
        pieces = [] if piece is None else [piece]
        idle = piece is None
        while not idle and not _is_full(pieces):
            try:
                more = reader.next(0)
            except errors.MillstreamError:
                idle = True  # it is raised again, after what precedes it is stored
                break
            if more is None:
                idle = True
            else:
                pieces.append(more)
        return self._received(reader, pieces, idle)

    def _received(self, reader: BinlogReader, pieces: Sequence[Piece], idle: bool) -> Received:
        """Pieces as changes; up to the first that cannot be, which is then the failure."""
        try:
            changes = _changes(reader.layouts, pieces)
        except errors.MillstreamError as error:
            changes, good = [], []
            for piece in pieces:
                try:
                    changes += _changes(reader.layouts, [piece])
                except errors.MillstreamError:
                    break
                good.append(piece)
            self._failure, pieces, idle = error, good, True  # what precedes it is stored at once
        if pieces:
            self._upto = pieces[-1].upto
            self._last_time = max((one.time for one in pieces), default=0) or self._last_time
        return Received(changes, self._upto, idle)

    async def confirm(self, upto: int) -> None:
        """Nothing: the server keeps no position for a capture, the topics know it."""


def _is_full(pieces: Sequence[Piece]) -> bool:
    rows, size = sum(len(one.rows) for one in pieces), sum(one.size for one in pieces)
    return rows >= RECEIVE_ROWS or size >= RECEIVE_BYTES or len(pieces) >= RECEIVE_ROWS


def _changes(layouts: Sequence[TableLayout], pieces: Sequence[Piece]) -> list[RowChanges]:
    """The rows of pieces, those of one shape of a table together."""
    found: dict[int, Placed] = {}
    for piece in pieces:
        for number, row in enumerate(piece.rows, piece.first):
            placed = found.get(row.layout)
            if placed is None:
                placed = found[row.layout] = Placed([], [], [], [], [], [])
            placed.rows.append(row)
            placed.commit.append(piece.commit)
            placed.number.append(number)
            placed.total.append(piece.total)
            placed.transaction.append(piece.transaction)
            placed.time.append(piece.time)
    return [changes_of(layouts[number], placed) for number, placed in found.items()]
