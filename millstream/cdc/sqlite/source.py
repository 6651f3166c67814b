"""SQLite as a source of changes: triggers record them in a table of the same database.

SQLite has no log of changes that others can read. Triggers work for every process that writes to
the database, whether a capture is running or not, and what they record is committed or rolled back
together with the change itself.

Compared with PostgreSQL:

- Every change arrives exactly once and in the order of the commits, as there.
- Weaker: triggers do not know transactions, so each change counts as a transaction of its own.
- Weaker: every change is written twice, and the application's transactions carry that cost.
- Weaker: a capture writes to the database too, every few seconds: it deletes what is stored. As
  with any second writer, a transaction that reads before it writes should begin with BEGIN
  IMMEDIATE: else SQLite may refuse its first write (SQLITE_BUSY).
- Weaker: if the database loses commits (a restored backup; a power cut with synchronous = OFF, or
  NORMAL in WAL mode), topics may have changes that the database no longer has. A database that is
  older than the topics is refused.
- Weaker: a table that is dropped and created again loses its triggers; this is noticed and stops
  the capture. SQLite refuses to drop a captured column while triggers name it: exclude it from the
  capture first.
- Weaker: for changes between ADD COLUMN and the next look of a running capture, only the last
  values of the new column are known: the rows are recorded once more. As with PostgreSQL, nothing
  is sent for rows that get a default value.
- `INSERT OR REPLACE` of an existing key arrives as "c" without `before`.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, ParamSpec, TypeVar

import pyarrow as pa

from millstream import errors
from millstream.cdc.model import CaptureLag, Column, Finding, Received, RowChanges, TableShape
from millstream.cdc.settings import CaptureSettings
from millstream.cdc.sqlite import rows as arrow
from millstream.cdc.sqlite.catalog import definition_of, findings_about, shape_of, wanted_tables
from millstream.cdc.sqlite.log import ChangeLog, LoggedChange
from millstream.cdc.sqlite.triggers import quoted
from millstream.cdc.sqlite.types import Value, is_textual
from millstream.deadline import now_ns
from millstream.schemas import types as t

__all__ = ["SqliteSource"]

log = logging.getLogger(__name__)

POLL_SECONDS: Final = 0.05
IDLE_SECONDS: Final = 1.0  # at most between two answers of `changes`
BUSY_SECONDS: Final = 5.0  # that a lock of the application is waited for
BUSY_ATTEMPTS: Final = 60  # in a row
# Confirmed changes are deleted after so many seconds, or when there are so many. Not more often: a
# transaction that reads before it writes is refused by SQLite if somebody else wrote in between.
TRIM_SECONDS: Final = 5.0
TRIM_CHANGES: Final = 20_000
SNAPSHOT_ROWS: Final = 10_000  # of one batch
SNAPSHOT_BYTES: Final = 8 * 1024 * 1024
_FETCH: Final = 250  # rows between two looks at the size
_URL: Final = "sqlite:///"

P = ParamSpec("P")
T = TypeVar("T")


class SqliteSource:
    """Captures the changes of a SQLite database, `sqlite:///file` or `sqlite:////folder/file`."""

    def __init__(self, settings: CaptureSettings) -> None:
        if not settings.source.startswith(_URL) or settings.source == _URL:
            raise errors.ConfigError(
                f"source: '{settings.source}' names no file. Write sqlite:///shop.db, or "
                f"sqlite:////folder/shop.db for an absolute path"
            )
        self._settings = settings
        self._path = Path(settings.source.removeprefix(_URL))
        self._thread: ThreadPoolExecutor | None = None
        self._db: sqlite3.Connection | None = None
        self._change_log: ChangeLog | None = None
        self._stored = 0  # number of a change that is stored
        self._confirmed = 0  # number of the last change that need not be kept
        self._trimmed = 0
        self._trim_due = 0.0
        self._data_version: int | None = None

    # -- connection -----------------------------------------------------------------------

    async def open(self) -> None:
        """Open the database file, which must exist."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, f"millstream-cdc-{self._settings.name}")
        try:
            await self._run(self._connect)
        except BaseException:
            await self.close()
            raise

    def _connect(self) -> None:
        if self._db is not None:
            return
        if not self._path.is_file():
            raise errors.ConfigError(
                f"source: there is no SQLite database '{self._path}'. Create it first, or correct "
                f"the path (sqlite:////folder/file for an absolute one)"
            )
        db = self._connected()
        try:
            db.execute("SELECT count(*) FROM sqlite_master").fetchone()
        except sqlite3.Error:
            db.close()
            raise
        self._db = db
        self._change_log = ChangeLog(db, self._settings)

    def _connected(self) -> sqlite3.Connection:
        return sqlite3.connect(
            f"{self._path.absolute().as_uri()}?mode=rw",
            uri=True,
            isolation_level=None,
            timeout=BUSY_SECONDS,
        )

    async def close(self) -> None:
        """Close the file, whatever state it is in."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        try:
            await asyncio.get_running_loop().run_in_executor(thread, self._disconnect)
        finally:
            thread.shutdown(wait=False)

    def _disconnect(self) -> None:
        db, self._db = self._db, None
        change_log, self._change_log = self._change_log, None
        if db is None or change_log is None:
            return
        try:
            if self._confirmed > self._trimmed:
                change_log.trim(self._confirmed)
        except sqlite3.Error as error:
            log.info("capture '%s': confirmed changes stay: %s", self._settings.name, error)
        finally:
            db.close()

    async def _run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call what blocks, in the one thread that uses the connection."""
        if self._thread is None:
            raise errors.CaptureError("open the source first: 'await source.open()'")
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._thread, lambda: function(*args, **kwargs)
            )
        except sqlite3.Error as error:
            if _is_busy(error):
                raise errors.SourceUnreachable(
                    f"database '{self._path}' was locked by another process for more than "
                    f"{BUSY_SECONDS:g} s. Make the application's transactions shorter"
                ) from error
            raise errors.CaptureError(f"database '{self._path}': {error}") from error

    @property
    def _open_db(self) -> sqlite3.Connection:
        if self._db is None:
            raise errors.CaptureError("open the source first: 'await source.open()'")
        return self._db

    @property
    def _log(self) -> ChangeLog:
        if self._change_log is None:
            raise errors.CaptureError("open the source first: 'await source.open()'")
        return self._change_log

    # -- about it -------------------------------------------------------------------------

    async def identity(self) -> str:
        """The name of the file. Another file of that name has no table of changes."""
        return f"sqlite {self._path.name}"

    async def check(self) -> list[Finding]:
        """What is missing for a capture, found without changing anything."""
        return await self._run(lambda: findings_about(self._open_db, self._settings))

    async def tables(self) -> list[TableShape]:
        """The captured tables as they are now; one that `check` refuses has no columns."""
        return await self._run(self._read_tables)

    def _read_tables(self) -> list[TableShape]:
        found = []
        for name in wanted_tables(self._open_db, self._settings):
            own = self._settings.settings_of(name)
            try:
                found.append(shape_of(definition_of(self._open_db, name, own), own))
            except errors.ConfigError:
                found.append(TableShape("", name, (), ()))
        return found

    async def prepare(self, tables: Sequence[TableShape]) -> bool:
        """Create the table of changes and the triggers; whether the table was created now."""
        return await self._run(self._prepare, [table.name for table in tables])

    def _prepare(self, tables: Sequence[str]) -> bool:
        settings = self._settings.settings_of
        definitions = [definition_of(self._open_db, name, settings(name)) for name in tables]
        return self._log.prepare(definitions)

    async def lag(self) -> CaptureLag:
        """How much is recorded and not confirmed."""
        kept = await self._run(lambda: self._log.kept(self._confirmed))
        age = None if kept.oldest is None else max(0.0, now_ns() / 1e9 - kept.oldest / 1e3)
        return CaptureLag(
            bytes=kept.waiting_bytes,
            seconds=age,
            kept_bytes=kept.bytes,
            budget_bytes=self._settings.log_budget,
            details={"changes": kept.waiting},
        )

    async def reset(self) -> None:
        """Drop the triggers and the table of changes."""
        await self._run(lambda: self._log.drop())

    # -- the snapshot ---------------------------------------------------------------------

    @asynccontextmanager
    async def snapshot(self) -> AsyncIterator[_View]:
        """A view of the database as it is now.

        In WAL mode it is a transaction that only reads. In other modes that would keep the
        application from committing, so the view is a temporary copy of the database.
        """
        view = await self._run(self._open_view)
        try:
            yield view
        finally:
            await self._run(view.close)

    def _open_view(self) -> _View:
        (mode,) = self._open_db.execute("PRAGMA journal_mode").fetchone()
        db = self._connected() if mode == "wal" else sqlite3.connect("", isolation_level=None)
        try:
            if mode != "wal":
                self._open_db.backup(db)
            db.execute("BEGIN")
            # The first read is what fixes the moment.
            point = arrow.commit_of(self._log.last(db) + 1)
        except BaseException:
            db.close()
            raise
        return _View(point, db, self._settings, self._run)

    def is_after(self, table: TableShape, keys: pa.RecordBatch, edge: Sequence[str]) -> pa.Array:
        """Which keys are after `edge` in the order of snapshots."""
        return arrow.is_after(table, keys, edge)

    # -- changes --------------------------------------------------------------------------

    def start_at(self, commit: int) -> None:
        """A database whose last change is before this one is refused: it has gone back in time."""
        self._stored = commit // 2

    async def changes(self) -> AsyncGenerator[Received, None]:
        """All changes that are not confirmed, for ever."""
        clock = asyncio.get_running_loop().time
        after = await self._run(lambda: self._log.first(self._stored))
        self._data_version = None
        self._trimmed = after
        answered, busy = clock(), 0
        while True:
            try:
                received = await self._run(self._read, after)
                busy = 0
            except errors.SourceUnreachable:
                busy += 1
                if busy >= BUSY_ATTEMPTS:
                    raise
                received = None
            if received is not None:
                after = received.upto // 2
                answered = clock()
                yield received
                if not received.idle:
                    continue
            elif clock() - answered > IDLE_SECONDS:
                answered = clock()
                yield Received((), arrow.commit_of(after), idle=True)
            await self._trim_if_due()
            await asyncio.sleep(POLL_SECONDS)

    def _read(self, after: int) -> Received | None:
        """The next changes; None if nothing was committed since there were none."""
        (version,) = self._open_db.execute("PRAGMA data_version").fetchone()
        if version == self._data_version:
            return None
        entries, complete = self._log.read(after)
        if complete:
            self._data_version = version
        if not entries:
            return None
        changes, good = self._typed(entries)
        # What precedes a failure is stored at once.
        idle = complete or good < len(entries)
        return Received(changes, arrow.commit_of(entries[good - 1].seq), idle)

    def _typed(self, entries: Sequence[LoggedChange]) -> tuple[list[RowChanges], int]:
        """Entries as changes, up to the first that cannot be: it is raised when it comes first."""

        def typed(count: int) -> list[RowChanges]:
            return arrow.changes_of(entries[:count], self._log.definition, self._settings)

        try:
            return typed(len(entries)), len(entries)
        except errors.SchemaError:
            good, bad = 0, len(entries)  # so many can be typed, so many cannot
            while bad - good > 1:
                middle = (good + bad) // 2
                try:
                    typed(middle)
                    good = middle
                except errors.SchemaError:
                    bad = middle
            if not good:
                raise
            self._data_version = None
            return typed(good), good

    async def confirm(self, upto: int) -> None:
        """Changes up to here are stored: they are deleted soon, many in one transaction."""
        self._confirmed = max(self._confirmed, upto // 2)
        await self._trim_if_due()

    async def _trim_if_due(self) -> None:
        now = asyncio.get_running_loop().time()
        waiting = self._confirmed - self._trimmed
        if waiting <= 0 or (now < self._trim_due and waiting < TRIM_CHANGES):
            return
        self._trim_due = now + TRIM_SECONDS
        upto = self._confirmed
        try:
            if await self._run(lambda: self._log.trim(upto)):
                self._trimmed = upto
            else:
                self._trim_due = now  # more of them at the next occasion
        except errors.SourceUnreachable as error:
            log.warning("capture '%s': confirmed changes stay: %s", self._settings.name, error)


class _View:
    """The rows of the database at one moment."""

    def __init__(
        self,
        point: int,
        db: sqlite3.Connection,
        settings: CaptureSettings,
        run: Callable[..., Any],
    ) -> None:
        self.point = point
        self._db = db
        self._settings = settings
        self._run = run

    def close(self) -> None:
        self._db.close()

    async def rows(
        self, table: TableShape, after: Sequence[str] | None
    ) -> AsyncIterator[tuple[pa.RecordBatch, list[str]]]:
        """Rows in the order of the key; each batch with the key of its last row."""
        cursor = await self._run(self._select, table, after)
        while True:
            found = await self._run(self._batch, cursor, table)
            if found is None:
                return
            yield found

    def _select(self, table: TableShape, after: Sequence[str] | None) -> sqlite3.Cursor:
        """One statement for all rows: it reads along an index, or sorts only once."""
        columns = {column.name: column for column in table.columns}
        key = [columns[name] for name in table.key]
        order = [_order(column) for column in key]
        where, values = "", []
        if after is not None:
            values = [
                arrow.key_value(column.type, text) for column, text in zip(key, after, strict=True)
            ]
            marks = ", ".join("?" for _ in values)
            where = f" WHERE ({', '.join(order)}) > ({marks})"
        names = ", ".join(quoted(name) for name in columns)
        return self._db.execute(
            f"SELECT {names} FROM {quoted(table.name)}{where} ORDER BY {', '.join(order)}", values
        )

    def _batch(
        self, cursor: sqlite3.Cursor, table: TableShape
    ) -> tuple[pa.RecordBatch, list[str]] | None:
        rows: list[tuple[Value, ...]] = []
        size = 0
        while len(rows) < SNAPSHOT_ROWS and size < SNAPSHOT_BYTES:
            some = cursor.fetchmany(_FETCH)
            rows.extend(some)
            size += sum(
                len(value) for row in some for value in row if isinstance(value, (str, bytes))
            )
            if len(some) < _FETCH:
                break
        if not rows:
            return None
        return arrow.batch_of(table, self._settings, rows), arrow.key_of(table, rows[-1])


def _order(column: Column) -> str:
    """The expression by which rows are ordered, as Arrow compares the values too."""
    name = quoted(column.name)
    if isinstance(column.type, (t.Int, t.Binary)):
        return name
    # Only a column that is text anyway is read along its index.
    return f"{name if is_textual(column.source_type) else f'CAST({name} AS TEXT)'} COLLATE BINARY"


def _is_busy(error: sqlite3.Error) -> bool:
    code = getattr(error, "sqlite_errorcode", None)
    return code is not None and code & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
