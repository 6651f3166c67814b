"""PostgreSQL as a source of changes: a publication, a replication slot, and snapshots.

The position of a change is the LSN of its commit and its number in the transaction. An LSN alone
is none: all rows of one COPY have the same, and those of overlapping transactions are not in order.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any, Final

import pyarrow as pa

from millstream.cdc.masks import masked_errors
from millstream.cdc.model import CaptureLag, Finding, Received, RowChanges, TableShape
from millstream.cdc.postgres.catalog import (
    ROOTS_VERSION,
    Catalog,
    from_item,
    read_catalog,
    read_relation_facts,
    shape_of_relation,
    shape_of_table,
    slot_name,
)
from millstream.cdc.postgres.checks import check
from millstream.cdc.postgres.collector import (
    OPEN_BYTES,
    WHOLE_BYTES,
    WHOLE_ROWS,
    RowRun,
    Spill,
    TransactionCollector,
    Truncated,
)
from millstream.cdc.postgres.link import ReplicationLink
from millstream.cdc.postgres.moved_rows import with_left_values
from millstream.cdc.postgres.pgoutput import Relation, lsn_number, lsn_text
from millstream.cdc.postgres.row_changes import changes_of, truncation_of
from millstream.cdc.postgres.snapshot import PostgresSnapshot, is_after
from millstream.cdc.postgres.types import SESSION_OPTIONS, quoted
from millstream.cdc.settings import CaptureSettings
from millstream.deadline import now_ns
from millstream.errors import (
    CaptureError,
    ConfigError,
    MillstreamError,
    SourceLost,
    SourceUnreachable,
    Unfit,
)

__all__ = ["PostgresSource"]

RECEIVE_ROWS: Final = 5_000  # handed over together
GATHER_SECONDS: Final = 0.01  # to wait for more rows than a few
GATHER_ROWS: Final = 2_000
WAIT_SECONDS: Final = 1.0
CONNECT_SECONDS: Final = 10
_QUOTED: Final = re.compile('".*"')


class PostgresSource:
    """A database of a PostgreSQL server, version 12 or later."""

    def __init__(self, settings: CaptureSettings) -> None:
        self._settings = settings
        self.slot = self.publication = slot_name(settings)
        self._sql: Any = None  # psycopg.AsyncConnection
        self._link: ReplicationLink | None = None
        self._catalog: Catalog | None = None
        self._from_items: dict[str, str] = {}  # what to select from, by the full name of a table
        self._shapes: dict[Relation, TableShape] = {}
        self._failure: MillstreamError | None = None  # of what follows the changes handed over
        self._last_commit: int | None = None  # time of the last one received, while more wait

    # -- connections ----------------------------------------------------------------------

    def _conninfo(self, **more: Any) -> str:
        from psycopg import ProgrammingError
        from psycopg.conninfo import conninfo_to_dict, make_conninfo

        try:
            given = conninfo_to_dict(self._settings.source)
            options = f"{given.get('options') or ''} {SESSION_OPTIONS}".strip()
            name = f"millstream cdc {self._settings.name}"
            wait = given.get("connect_timeout") or CONNECT_SECONDS
            return make_conninfo(
                self._settings.source,
                options=options,
                application_name=name,
                connect_timeout=wait,
                **more,
            )
        except ProgrammingError as error:
            # What it quotes is the address, or the password.
            reason = _QUOTED.sub('"..."', _short(error))
            raise ConfigError(f"source: not an address of PostgreSQL: {reason}") from None

    async def open(self) -> None:
        """Connect for statements."""
        from psycopg import AsyncConnection, OperationalError

        try:
            self._sql = await AsyncConnection.connect(self._conninfo(), autocommit=True)
        except OperationalError as error:
            raise SourceUnreachable(f"cannot connect to the source: {_short(error)}") from error

    async def close(self) -> None:
        """Disconnect."""
        if self._sql is not None:
            await self._sql.close()
        self._sql, self._link, self._catalog, self._failure = None, None, None, None
        self._shapes.clear()

    async def _rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        with _asking():
            cursor = await self._sql.execute(query, values or None)
            return list(await cursor.fetchall()) if cursor.description else []

    async def _replication(self, *statements: str) -> tuple[Any, list[Any]]:
        """A replication connection after some commands, and the answer of the last one."""
        import psycopg

        opened: list[Any] = []

        def run() -> tuple[Any, list[Any]]:
            connection = psycopg.connect(self._conninfo(replication="database"), autocommit=True)
            opened.append(connection)
            try:
                answer: list[Any] = []
                for statement in statements:
                    cursor = connection.execute(statement)
                    answer = cursor.fetchall() if cursor.description else []
            except BaseException:
                connection.close()
                raise
            return connection, answer

        try:
            return await asyncio.to_thread(run)
        except asyncio.CancelledError:
            # A new slot waits for transactions that are open, as long as they are.
            for connection in opened:
                await asyncio.to_thread(connection.cancel_safe, timeout=CONNECT_SECONDS)
            raise
        except psycopg.errors.ObjectInUse as error:
            raise SourceUnreachable(
                f"slot '{self.slot}' is in use: another capture of this name may be running "
                f"({_short(error)})"
            ) from error
        except psycopg.errors.ObjectNotInPrerequisiteState as error:
            raise SourceLost(self._settings.name, _short(error)) from error
        except psycopg.OperationalError as error:
            raise SourceUnreachable(f"no replication connection: {_short(error)}") from error
        except psycopg.Error as error:
            raise CaptureError(f"the source refused to replicate: {_short(error)}") from error

    # -- what there is, and what it needs -------------------------------------------------

    async def identity(self) -> str:
        """The identifier of the server's data folder, and the database."""
        connection, rows = await self._replication("IDENTIFY_SYSTEM")
        await asyncio.to_thread(connection.close)
        return f"{rows[0][0]}/{rows[0][3]}"

    async def check(self) -> list[Finding]:
        """What is missing for a capture."""
        with _asking():
            return await check(self._sql, self._settings)

    async def _read(self) -> Catalog:
        with _asking():
            catalog = self._catalog = await read_catalog(self._sql, self._settings)
        self._from_items = {table.full_name: from_item(table) for table in catalog.tables}
        return catalog

    async def tables(self) -> list[TableShape]:
        """The captured tables as they are now."""
        catalog = await self._read()
        return [
            shape_of_table(table, self._settings.settings_of(table.full_name))
            for table in catalog.tables
        ]

    async def prepare(self, tables: Sequence[TableShape]) -> bool:
        """Create the publication, or change its tables; then the slot, if it is missing."""
        await self._publish(tables)
        slots = await self._rows(
            "SELECT active_pid, to_jsonb(s) ->> 'wal_status' FROM pg_replication_slots s "
            "WHERE slot_name = %s",
            self.slot,
        )
        if not slots:
            await self._rows("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", self.slot)
            return True
        active, status = slots[0]
        if status == "lost":
            raise SourceLost(
                self._settings.name,
                f"slot '{self.slot}' is lost: the server removed log that it needed, because it "
                f"was more than max_slot_wal_keep_size",
            )
        if active is not None:
            raise SourceUnreachable(
                f"slot '{self.slot}' is in use by process {active} of the server: another capture "
                f"of this name may be running"
            )
        return False

    async def _publish(self, tables: Sequence[TableShape]) -> None:
        catalog = self._catalog or await self._read()
        facts = {table.full_name: table for table in catalog.tables}
        listed = ", ".join(facts[table.full_name].sql_name for table in tables)
        name = quoted(self.publication)
        found = await self._rows(
            "SELECT puballtables FROM pg_publication WHERE pubname = %s", self.publication
        )
        if not found:
            roots = catalog.version >= ROOTS_VERSION
            with_roots = " WITH (publish_via_partition_root = true)" if roots else ""
            await self._rows(f"CREATE PUBLICATION {name} FOR TABLE {listed}{with_roots}")
            return
        known = await self._rows(
            "SELECT schemaname || '.' || tablename FROM pg_publication_tables WHERE pubname = %s",
            self.publication,
        )
        published = {one for (one,) in known}
        # One that has too many, made by an administrator, is left as it is.
        own = all(table.is_owner for table in catalog.tables) and not found[0][0]
        if facts.keys() - published or (own and published - facts.keys()):
            await self._rows(f"ALTER PUBLICATION {name} SET TABLE {listed}")

    async def reset(self) -> None:
        """Drop the slot and the publication."""
        await self._rows(
            "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots "
            "WHERE slot_name = %s",
            self.slot,
        )
        await self._rows(f"DROP PUBLICATION IF EXISTS {quoted(self.publication)}")

    # -- snapshots ------------------------------------------------------------------------

    @asynccontextmanager
    async def snapshot(self) -> AsyncIterator[PostgresSnapshot]:
        """A view of the database at a position that a temporary slot gives."""
        if self._catalog is None:
            await self._read()
        connection, rows = await self._replication(
            f"CREATE_REPLICATION_SLOT {quoted(self.slot + '_snapshot')} TEMPORARY LOGICAL pgoutput "
            f"EXPORT_SNAPSHOT"
        )
        _, point, name, _ = rows[0]
        view = PostgresSnapshot(self._conninfo(), name, lsn_number(point), self._from_items)
        async with AsyncExitStack() as stack:
            stack.push_async_callback(asyncio.to_thread, connection.close)
            await stack.enter_async_context(view)
            # The view is open: neither the slot nor what it keeps is needed any more.
            await asyncio.to_thread(connection.close)
            yield view

    def is_after(self, table: TableShape, keys: pa.RecordBatch, edge: Sequence[str]) -> pa.Array:
        """Which keys are after `edge` in the order of snapshots."""
        return is_after(table, keys, edge)

    # -- changes --------------------------------------------------------------------------

    def start_at(self, commit: int) -> None:
        """The slot knows where to start."""

    async def changes(self) -> AsyncIterator[Received]:
        """Changes of whole transactions, as they are committed."""
        outboxes = {one.table for one in self._settings.outbox}
        captured = {table.full_name for table in (self._catalog or await self._read()).tables}
        wanted = captured | outboxes
        collector = TransactionCollector(
            lambda one: f"{one.namespace}.{one.name}" in wanted,
            whole=self._settings.whole_transactions,
        )
        connection, _ = await self._replication(
            f"START_REPLICATION SLOT {quoted(self.slot)} LOGICAL 0/0 "
            f"(proto_version '1', publication_names '{quoted(self.publication)}')"
        )
        async with ReplicationLink(connection) as self._link:
            while True:
                before = collector.upto
                idle = await self._fill(self._link, collector)
                changes = await self._typed(collector.take())
                if self._failure is not None:
                    # What failed must be sent again: nothing since `before` may be confirmed.
                    yield Received(changes, before, idle=True)
                    raise self._failure
                if collector.is_large:
                    yield Received(changes, collector.upto)
                    async for received in self._large(self._link, collector):
                        yield received
                    continue
                if idle and not collector.in_transaction:
                    # Nothing that was sent is waiting: the log up to here has nothing for us.
                    collector.upto = max(collector.upto, self._link.end)
                    self._last_commit = None
                yield Received(changes, collector.upto, idle)

    async def _fill(self, link: ReplicationLink, collector: TransactionCollector) -> bool:
        """Feed what arrives until it is enough; true if nothing more is waiting."""
        clock = asyncio.get_running_loop().time
        until = clock() + WAIT_SECONDS
        while True:
            link.keep_alive()
            while (payload := link.next()) is not None:
                ended = collector.feed(payload)
                if ended and (collector.rows >= RECEIVE_ROWS or collector.bytes >= OPEN_BYTES):
                    return False
                if collector.is_large:
                    return False
            if collector.in_transaction:
                await link.wait(WAIT_SECONDS)  # the rest is on its way
                continue
            if collector.rows:
                if collector.rows >= GATHER_ROWS or not await link.wait(GATHER_SECONDS):
                    return collector.rows < GATHER_ROWS
                continue
            left = until - clock()
            if left <= 0 or not await link.wait(left):
                return True
            if link.end > collector.upto and clock() > until - WAIT_SECONDS / 2:
                return True

    async def _large(
        self, link: ReplicationLink, collector: TransactionCollector
    ) -> AsyncIterator[Received]:
        """A transaction that does not fit into memory, in parts, by way of a file."""
        if self._settings.whole_transactions:
            raise CaptureError(
                f"a transaction has more than {WHOLE_ROWS:,} rows or {WHOLE_BYTES >> 20} MiB: too "
                f"large to be stored in one step. Set whole_transactions = false"
            )
        before, spill = collector.upto, Spill()
        try:
            ended = False
            while not ended:
                link.keep_alive()
                while not ended and not collector.is_large:
                    payload = link.next()
                    if payload is None:
                        await link.wait(WAIT_SECONDS)
                        link.keep_alive()
                    else:
                        ended = collector.feed(payload)
                await asyncio.to_thread(spill.write, collector.spill())
            collector.begin_replay()
            await asyncio.to_thread(spill.rewind)
            while part := await asyncio.to_thread(spill.read, RECEIVE_ROWS, OPEN_BYTES):
                collector.replay(part)
                yield Received(await self._typed(collector.take()), before)
                if self._failure is not None:
                    raise self._failure
                link.keep_alive()
            collector.end_replay()
            yield Received([], collector.upto)
        finally:
            spill.close()

    async def confirm(self, upto: int) -> None:
        """The server may remove its log up to a position."""
        if self._link is not None:
            self._link.confirm(upto)

    async def _typed(self, runs: Sequence[RowRun | Truncated]) -> list[RowChanges]:
        """The runs as changes; up to the first that cannot be, which is then the failure."""
        found: list[RowChanges] = []
        try:
            for run in runs:
                found += await self._typed_run(run)
        except SourceUnreachable:
            raise
        except MillstreamError as error:
            self._failure = error
        return found

    async def _typed_run(self, run: RowRun | Truncated) -> list[RowChanges]:
        shape = await self._shape(run.relation)
        if isinstance(run, Truncated):
            return self._truncated(run, shape)
        self._last_commit = run.transactions[-1].time
        try:
            changes = changes_of(run, shape)
        except Unfit:
            # An enum may have got a label, which the stream does not say: look again, once.
            self._shapes.pop(run.relation)
            shape = await self._shape(run.relation)
            with masked_errors(self._settings.settings_of(shape.full_name)):
                changes = changes_of(run, shape)
        item = f"{quoted(shape.namespace)}.{quoted(shape.name)}"
        item = self._from_items.get(shape.full_name, item)
        return [await with_left_values(changes, item, self._rows_if_there)]

    async def _rows_if_there(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        """As `_rows`; nothing from a table or a column that is gone by now."""
        from psycopg.errors import UndefinedColumn, UndefinedTable

        try:
            return await self._rows(query, *values)
        except CaptureError as error:
            if isinstance(error.__cause__, (UndefinedColumn, UndefinedTable)):
                return []
            raise

    def _truncated(self, one: Truncated, shape: TableShape) -> list[RowChanges]:
        choice = self._settings.truncate
        if choice == "stop":
            raise CaptureError(
                f"table {shape.full_name} was truncated (transaction {one.transaction.xid}, "
                f"{lsn_text(one.transaction.commit)}). Set truncate = 'event' for an event of "
                f"op 't', which sinks and tables in Spark follow, or truncate = 'ignore'"
            )
        return [truncation_of(one, shape)] if choice == "event" else []

    async def _shape(self, relation: Relation) -> TableShape:
        found = self._shapes.get(relation)
        if found is None:
            with _asking():
                facts = await read_relation_facts(self._sql, relation)
            own = self._settings.settings_of(facts.full_name)
            found = self._shapes[relation] = shape_of_relation(relation, facts, own)
        return found

    # -- lag ------------------------------------------------------------------------------

    async def lag(self) -> CaptureLag:
        """From the server's view of the slot."""
        rows = await self._rows(
            "SELECT pg_wal_lsn_diff(pg_current_wal_lsn(), confirmed_flush_lsn)::int8, "
            "pg_wal_lsn_diff(pg_current_wal_lsn(), restart_lsn)::int8, active, "
            "to_jsonb(s) ->> 'wal_status', (to_jsonb(s) ->> 'safe_wal_size')::int8, "
            "confirmed_flush_lsn::text, "
            "(SELECT setting::int8 FROM pg_settings WHERE name = 'max_slot_wal_keep_size') "
            "FROM pg_replication_slots s WHERE slot_name = %s",
            self.slot,
        )
        if not rows:
            return CaptureLag(details={"slot": self.slot, "status": "missing"})
        waiting, kept, active, status, safe, confirmed, limit = rows[0]
        seconds = 0.0
        if self._last_commit is not None:
            seconds = max(0.0, now_ns() / 1e9 - self._last_commit / 1e6)
        own = self._settings.log_budget
        budget = own if limit is None or limit < 0 else min(own, limit * 1024**2)
        details = {
            "slot": self.slot,
            "status": status,
            "active": active,
            "confirmed": confirmed,
            "safe_wal_size": safe,
        }
        return CaptureLag(waiting, seconds if waiting else 0.0, kept, budget, details)


@contextmanager
def _asking() -> Iterator[None]:
    """What the driver raises meanwhile, as errors of this package."""
    from psycopg import Error, OperationalError

    try:
        yield
    except OperationalError as error:
        raise SourceUnreachable(f"the source cannot be asked: {_short(error)}") from error
    except Error as error:
        raise CaptureError(f"the source refused a statement: {_short(error)}") from error


def _short(error: Exception) -> str:
    """The first line of what the server or the driver says; neither has the password."""
    return str(error).strip().partition("\n")[0]
