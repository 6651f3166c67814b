"""Transactions from the binary log, read by a thread of its own into a queue of limited size.

mysql-replication decodes the events. Its own way to connect again is not used: it would go on
within a transaction. Everything begins at the start of a transaction, whose position is therefore
the position of its changes: what was stored of it before a crash is skipped, the rest follows.
"""

from __future__ import annotations

import pickle
import queue
import re
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import IO, Any, Final

from millstream import errors
from millstream.cdc.model import TableShape
from millstream.cdc.mysql.address import Address, error_of
from millstream.cdc.mysql.layout import Row, TableLayout, layout_of, signature_of
from millstream.cdc.mysql.statements import Meaning, meaning_of
from millstream.cdc.settings import CaptureSettings
from millstream.events import changes as ch
from millstream.schemas.extras import needed

__all__ = ["BinlogReader", "LogBoundary", "Piece", "position_of", "start_of"]

HEARTBEAT_SECONDS: Final = 0.5  # that the server sends while nothing happens
PIECE_ROWS: Final = 500
PIECE_BYTES: Final = 1024 * 1024
QUEUE_PIECES: Final = 64
OPEN_ROWS: Final = 20_000  # of a transaction in memory; the rest waits in a temporary file
OPEN_BYTES: Final = 32 * 1024 * 1024
# Types of events that begin a group: GTID, anonymous GTID, tagged GTID, MariaDB's GTID.
_BEGIN: Final = frozenset((33, 34, 42, 162))
_XA_PREPARE: Final = 38
# Types whose content would be missing.
_UNREADABLE: Final = {
    40: "a compressed transaction (binlog_transaction_compression)",
    **dict.fromkeys(range(165, 172), "a compressed event (log_bin_compress)"),
    39: "a partial update of JSON (binlog_row_value_options)",
}
_FILE: Final = re.compile(r"(.*\.)(\d+)")


@dataclass(frozen=True, slots=True)
class LogBoundary:
    """A position in the log between two transactions."""

    file: str
    position: int

    @property
    def number(self) -> int:
        """Grows with the log."""
        match = _FILE.fullmatch(self.file)
        if match is None:
            raise errors.LogUnreadable(f"'{self.file}' is not the name of a file of the log")
        return int(match[2]) << 32 | self.position


def position_of(number: int) -> int:
    """The commit position of the transaction that begins at a boundary, by its number.

    Every second position: the rows of a snapshot have the one before it.
    """
    return 2 * number


def start_of(commit: int) -> int:
    """The number of the boundary to begin at, if changes up to a commit position are stored."""
    return (commit + 1) // 2


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of one transaction, or only how far the log was read."""

    upto: int  # commit position up to which everything was handed over, with this piece
    rows: list[Row] = field(default_factory=list)
    commit: int = 0
    transaction: str = ""
    time: int = 0  # of the commit, seconds since 1970
    first: int = 1  # number of its first row in the transaction
    total: int = 0
    size: int = 0


class _Open:
    """The transaction that is being read. Rows beyond a limit wait in a temporary file."""

    def __init__(self, start: int, name: str) -> None:
        self.start, self.name = start, name
        self.count = 0
        self._rows: list[Row] = []
        self._bytes = 0
        self._file: IO[bytes] | None = None
        self._parts = 0

    def add(self, row: Row) -> None:
        self._rows.append(row)
        self.count += 1
        self._bytes += _size(row)
        if len(self._rows) >= OPEN_ROWS or self._bytes >= OPEN_BYTES:
            if self._file is None:
                self._file = tempfile.TemporaryFile()  # noqa: SIM115  # closed by close()
            for at in range(0, len(self._rows), PIECE_ROWS):
                pickle.dump(self._rows[at : at + PIECE_ROWS], self._file)
                self._parts += 1
            self._rows, self._bytes = [], 0

    def rows(self) -> Iterator[Row]:
        """All of them, once."""
        if self._file is not None:
            self._file.seek(0)
            for _ in range(self._parts):
                yield from pickle.load(self._file)
        yield from self._rows

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _size(row: Row) -> int:
    values = (*(row.before or ()), *(row.after or ()))
    return 64 + sum(len(value) if isinstance(value, (str, bytes)) else 8 for value in values)


class BinlogReader:
    """Reads the log from a boundary on; `next` gives what has come."""

    def __init__(
        self,
        address: Address,
        settings: CaptureSettings,
        tables: dict[str, TableShape],
        start: LogBoundary,
    ) -> None:
        self._address, self._settings, self._tables = address, settings, tables
        self._file, self._start = start.file, start
        self.upto = position_of(start.number) - 1
        self.layouts: list[TableLayout] = []
        self._known: dict[tuple[Any, ...], int] = {}
        self._open: _Open | None = None
        self._ready: queue.Queue[Piece | Exception] = queue.Queue(QUEUE_PIECES)
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name=f"millstream-cdc-{settings.name}-log", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """End the thread; blocks until the server's next heartbeat."""
        self._stop.set()
        self._thread.join(4 * HEARTBEAT_SECONDS)

    def next(self, timeout: float) -> Piece | None:
        """What has come next; None if nothing has within the time. Raises what ended the thread."""
        try:
            found = self._ready.get(timeout=timeout) if timeout else self._ready.get_nowait()
        except queue.Empty:
            return None
        if isinstance(found, Exception):
            self._ready.put(found)  # for whoever asks again: nothing else will come
            raise found
        return found

    # -- the thread -----------------------------------------------------------------------

    def _run(self) -> None:
        reader: Any = None
        try:
            reader = self._connected()
            while not self._stop.is_set():
                self._take(reader.fetchone())
        except errors.MillstreamError as error:
            self._put(error)
        except Exception as error:
            self._put(self._meaning(error))
        finally:
            if self._open is not None:
                self._open.close()
            if reader is not None:
                reader.close()

    def _meaning(self, error: Exception) -> errors.MillstreamError:
        pymysql = needed("pymysql", "cdc")
        if isinstance(error, (pymysql.MySQLError, OSError)):
            return error_of(error, self._settings.name, self._address)
        at = f"{self._file}, after position {self.upto // 2 & 0xFFFFFFFF}"
        found = errors.LogUnreadable(f"the log cannot be decoded ({at}): {error!r}")
        found.__cause__ = error
        return found

    def _put(self, item: Piece | Exception) -> None:
        while not self._stop.is_set():
            try:
                self._ready.put(item, timeout=HEARTBEAT_SECONDS)
                return
            except queue.Full:
                continue

    def _connected(self) -> Any:
        stream = needed("pymysqlreplication", "cdc")
        event, row_event = (
            needed(f"pymysqlreplication.{name}", "cdc") for name in ("event", "row_event")
        )
        return stream.BinLogStreamReader(
            connection_settings=self._address.options(),
            # Unique among the server's replicas; the same for another process of this capture,
            # which the server then cuts off.
            server_id=zlib.crc32(f"millstream cdc {self._settings.name}".encode()) | 1 << 31,
            only_events=[
                *(event.QueryEvent, event.XidEvent, event.GtidEvent, event.MariadbGtidEvent),
                *(event.RotateEvent, event.HeartbeatLogEvent, event.NotImplementedEvent),
                *(event.XAPrepareEvent, row_event.PartialUpdateRowsEvent),
                *(row_event.WriteRowsEvent, row_event.UpdateRowsEvent, row_event.DeleteRowsEvent),
            ],
            filter_non_implemented_events=False,
            only_schemas=[self._address.database],
            only_tables=list(self._tables),
            log_file=self._start.file,
            log_pos=self._start.position,
            resume_stream=True,
            blocking=True,
            slave_heartbeat=HEARTBEAT_SECONDS,
            pymysql_wrapper=_connecting_once,
            enable_logging=False,
        )

    def _take(self, event: Any) -> None:
        kind, packet = type(event).__name__, event.packet
        if packet.event_type in _UNREADABLE:
            raise errors.LogUnreadable(
                f"the log has {_UNREADABLE[packet.event_type]} at {self._file}:{packet.log_pos}, "
                f"which a capture cannot read. Switch that off at the server and begin again: "
                f"'millstream cdc reset --yes'"
            )
        if packet.event_type == _XA_PREPARE:
            self._prepared(packet)
        elif packet.event_type in _BEGIN:
            start = LogBoundary(self._file, packet.log_pos - packet.event_size).number
            name = str(getattr(event, "gtid", "") or f"{self._file}:{start & 0xFFFFFFFF}")
            self._open = _Open(start, name)
        elif kind.endswith("RowsEvent"):
            self._rows(event, kind)
        elif kind == "XidEvent":
            self._end(packet)
        elif kind == "QueryEvent":
            self._statement(event)
        elif kind == "RotateEvent":
            self._file = event.next_binlog
        elif kind == "HeartbeatLogEvent" and self._open is None:
            self._advance(LogBoundary(event.ident, packet.log_pos))

    def _advance(self, boundary: LogBoundary) -> None:
        self.upto = max(self.upto, position_of(boundary.number) - 1)
        self._put(Piece(self.upto))

    # -- rows -----------------------------------------------------------------------------

    def _rows(self, event: Any, kind: str) -> None:
        transaction = self._begun(event)
        number = self._layout(event)
        layout = self.layouts[number]
        for row in event.rows:
            if kind == "UpdateRowsEvent":
                before = layout.values(row["before_values"], row["before_none_sources"])
                after = layout.values(row["after_values"], row["after_none_sources"])
                transaction.add(Row(number, ch.UPDATE, before, after))
                continue
            values = layout.values(row["values"], row["none_sources"])
            if kind == "WriteRowsEvent":
                transaction.add(Row(number, ch.CREATE, None, values))
            else:
                transaction.add(Row(number, ch.DELETE, values, None))

    def _begun(self, event: Any) -> _Open:
        if self._open is None:
            raise errors.LogUnreadable(
                f"the log has rows outside of a transaction at {self._file}:{event.packet.log_pos}"
            )
        return self._open

    def _layout(self, event: Any) -> int:
        signature = (event.table, *signature_of(event.columns))
        number = self._known.get(signature)
        if number is None:
            shape = self._tables[event.table]
            number = self._known[signature] = len(self.layouts)
            self.layouts.append(layout_of(event.columns, shape, self._settings))
        return number

    def _end(self, packet: Any) -> None:
        transaction, self._open = self._open, None
        if transaction is None:
            return
        end = position_of(LogBoundary(self._file, packet.log_pos).number) - 1
        commit, first = position_of(transaction.start), 1
        rows: list[Row] = []
        size = 0

        def piece(upto: int) -> Piece:
            name, time, total = transaction.name, packet.timestamp, transaction.count
            return Piece(upto, rows, commit, name, time, first, total, size)

        try:
            for row in transaction.rows():
                if len(rows) >= PIECE_ROWS or size >= PIECE_BYTES:
                    self._put(piece(self.upto))
                    first += len(rows)
                    rows, size = [], 0
                rows.append(row)
                size += _size(row)
            self.upto = end
            self._put(piece(end))
        finally:
            transaction.close()

    def _prepared(self, packet: Any) -> None:
        """An XA transaction is in the log before it is known whether it will be committed."""
        transaction, self._open = self._open, None
        if transaction is None:
            return
        transaction.close()
        if transaction.count:
            raise errors.LogUnreadable(
                f"captured tables were changed in an XA transaction, which cannot be captured, at "
                f"{self._file}:{packet.log_pos}. Begin again, and change these tables in "
                f"ordinary transactions: 'millstream cdc reset --yes'"
            )

    # -- statements -----------------------------------------------------------------------

    def _statement(self, event: Any) -> None:
        statement = event.query if isinstance(event.query, str) else event.query.decode()
        words = statement.strip().upper().split(None, 2)
        first = words[0].rstrip(";") if words else ""
        if first in ("BEGIN", "START", "SAVEPOINT", "RELEASE"):
            return
        if first == "XA" and words[1] in ("START", "BEGIN", "END"):
            return
        if first == "COMMIT":
            self._end(event.packet)
            return
        if first == "ROLLBACK" and len(words) > 1 and words[1] == "TO":
            raise errors.LogUnreadable(
                f"the log has a transaction that was partly rolled back at "
                f"{self._file}:{event.packet.log_pos}: tables with and without transactions were "
                f"changed together"
            )
        if first == "ROLLBACK":
            if self._open is not None:
                self._open.close()
            self._open = None
            return
        schema = event.schema.decode() if isinstance(event.schema, bytes) else event.schema
        for meaning in meaning_of(statement, schema):
            if meaning.kind == "rows" and self._names_database(statement):
                meaning = Meaning("rows", self._address.database, "")
            self._meant(meaning, event)
        self._end(event.packet)

    def _names_database(self, statement: str) -> bool:
        name = re.escape(self._address.database)
        return re.search(rf"(?<!\w)[`\"]?{name}[`\"]?\s*\.", statement) is not None

    def _meant(self, meaning: Meaning, event: Any) -> None:
        if meaning.database != self._address.database:
            return
        if meaning.table and meaning.table not in self._tables:
            return
        where = f"{self._file}:{event.packet.log_pos}"
        full = f"{meaning.database}.{meaning.table or '*'}"
        again = f"'millstream cdc reset --table {full} --yes', then 'millstream cdc run'"
        match meaning.kind:
            case "truncated":
                self._truncated(meaning.table, full, event)
            case "rows":
                raise errors.LogUnreadable(
                    f"the log has a statement instead of its rows at {where}: a session has set "
                    f"binlog_format to another value than ROW. What it changed is not known. Begin "
                    f"again: 'millstream cdc reset --yes'"
                )
            case "partition":
                raise errors.CaptureError(
                    f"table {full}: at {where} rows were removed or exchanged with a partition, "
                    f"which the log does not show row by row. Begin the table again: {again}"
                )
            case _:
                raise errors.CaptureError(
                    f"table {full} was {meaning.kind} at {where}. If another table has its name "
                    f"now, begin it again: {again}. If not, start the capture again"
                )

    def _truncated(self, table: str, full: str, event: Any) -> None:
        choice = self._settings.truncate
        if choice == "stop":
            raise errors.CaptureError(
                f"table {full} was truncated ({self._file}:{event.packet.log_pos}). Set truncate "
                f"= 'event' for an event of op 't', which sinks and tables in Spark follow, or "
                f"truncate = 'ignore'"
            )
        if choice == "event":
            known = [one for one in self.layouts if one.shape.name == table]
            self.layouts.append(known[-1] if known else TableLayout(self._tables[table], ()))
            row = Row(len(self.layouts) - 1, ch.TRUNCATE, None, None)
            self._begun(event).add(row)


def _connecting_once(**options: Any) -> Any:
    """A connection whose loss is an error, not a reason to connect again behind our back."""
    pymysql = needed("pymysql", "cdc")
    if "db" in options:  # an old name, which the driver warns about
        options["database"] = options.pop("db")
    connection = pymysql.connect(**options)
    read: Callable[..., Any] = connection._read_packet

    def read_or_end(*args: Any, **kwargs: Any) -> Any:
        try:
            return read(*args, **kwargs)
        except pymysql.OperationalError as error:
            if error.args[0] in (2006, 2013):
                raise errors.SourceUnreachable(
                    f"source: the connection to {options['host']}:{options['port']} was lost"
                ) from error
            raise

    connection._read_packet = read_or_end
    return connection
