"""A PostgreSQL with rows to capture, and readers that do less than a capture, for bench/cdc.py."""

from __future__ import annotations

import select
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any, Final

import pyarrow as pa

from bench.harness import PeerAbsent
from tools.postgres_server import Postgres, PostgresAbsent, running_postgres

__all__ = ["COPIES", "SOURCE", "Database", "running_database"]

SOURCE: Final = "source"
COPIES: Final = "copies"  # the database that topics are applied to
WAIT_SECONDS: Final = 300.0
BLOCK: Final = 4 * 1024 * 1024  # bytes of CSV that are decoded at once
COLUMNS: Final = (
    "id bigint PRIMARY KEY, name text, amount numeric(12,2), quantity int, paid bool, "
    "at timestamptz, note text"
)
ARROW_TYPES: Final = {
    "id": pa.int64(),
    "name": pa.string(),
    "amount": pa.decimal128(12, 2),
    "quantity": pa.int32(),
    "paid": pa.bool_(),
    "at": pa.timestamp("us", "UTC"),
    "note": pa.string(),
}
ROW: Final = (
    "SELECT n, 'customer ' || n % 5000, (n % 1000000) / 100.0, n % 100, n % 3 = 0, "
    "timestamptz '2026-01-01 00:00:00+00' + n * interval '1 second', 'note of row ' || n "
    "FROM generate_series({first}, {last}) AS n"
)
# Rows of the transactions of one cycle: many small ones, most rows in few large ones.
CYCLE: Final = (*(1,) * 20, *(10,) * 10, *(100,) * 5, *(1000,) * 3, 10_000)
INSERTED, UPDATED, DELETED = b"I"[0], b"U"[0], b"D"[0]


class Database:
    """The source of the measurements."""

    def __init__(self, server: Postgres) -> None:
        self.server = server
        self.url = server.create_database(SOURCE)
        self.copies = server.create_database(COPIES)

    def execute(self, *statements: str) -> None:
        """Run statements, each in a transaction of its own."""
        with self.server.connect(SOURCE) as connection:
            for statement in statements:
                connection.execute(statement)

    def value(self, query: str) -> Any:
        """The only value of a query."""
        with self.server.connect(SOURCE) as connection:
            row = connection.execute(query).fetchone()
        return None if row is None else row[0]

    def create(self, table: str, rows: int) -> None:
        """A table with so many rows."""
        filled = f"INSERT INTO {table} {ROW.format(first=1, last=rows)}"
        self.execute(f"CREATE TABLE {table} ({COLUMNS})", filled, f"VACUUM ANALYZE {table}")

    # -- changes ----------------------------------------------------------------------------

    def change(self, table: str, rows: int) -> int:
        """Change about so many rows, in transactions of one to ten thousand; gives how many."""
        done, top = 0, self.value(f"SELECT coalesce(max(id), 0) FROM {table}")
        with self.server.connect(SOURCE) as connection:
            while done < rows:
                for number, size in enumerate(CYCLE):
                    if number % 3 == 0:
                        first, top = top + 1, top + size
                        statement = f"INSERT INTO {table} {ROW.format(first=first, last=top)}"
                    else:
                        low = 1 + (done * 7) % max(1, top - size)
                        statement = (
                            f"UPDATE {table} SET amount = amount + 1, quantity = quantity + 1 "
                            f"WHERE id BETWEEN {low} AND {low + size - 1}"
                        )
                    done += connection.execute(statement).rowcount
        return done

    def position(self) -> int:
        """The end of the log."""
        return int(self.value("SELECT (pg_current_wal_lsn() - '0/0')::bigint"))

    def create_slot(self, name: str) -> None:
        """A slot for a reader that only counts."""
        self.execute(f"SELECT pg_create_logical_replication_slot('{name}', 'pgoutput')")

    def count_changes(self, slot: str, publication: str, rows: int) -> float:
        """Read changes of so many rows from a slot, and only count them; gives the seconds."""
        import psycopg

        began = time.perf_counter()
        found, until = 0, time.monotonic() + WAIT_SECONDS
        connection = psycopg.connect(f"{self.url}?replication=database", autocommit=True)
        with closing(connection):
            connection.execute(
                f"START_REPLICATION SLOT {slot} LOGICAL 0/0 "
                f"(proto_version '1', publication_names '{publication}')"
            )
            low = connection.pgconn
            while found < rows:
                size, data = low.get_copy_data(1)
                if size > 0:
                    if data[0] == b"w"[0] and data[25] in (INSERTED, UPDATED, DELETED):
                        found += 1
                elif size == 0:
                    select.select([low.socket], [], [], 1.0)
                    low.consume_input()
                    if time.monotonic() > until:
                        raise TimeoutError(f"{found} of {rows} rows from slot {slot}")
                else:
                    raise ConnectionError(low.get_error_message())
            seconds = time.perf_counter() - began
        self.wait_free(slot)
        self.execute(f"SELECT pg_replication_slot_advance('{slot}', pg_current_wal_lsn())")
        return seconds

    def wait_free(self, slot: str) -> None:
        """Until nobody reads from a slot."""
        query = f"SELECT active FROM pg_replication_slots WHERE slot_name = '{slot}'"
        until = time.monotonic() + WAIT_SECONDS
        while self.value(query):
            if time.monotonic() > until:
                raise TimeoutError(f"slot {slot} stays in use")
            time.sleep(0.01)

    # -- rows -------------------------------------------------------------------------------

    def copy_to_arrow(self, table: str) -> int:
        """COPY ... TO STDOUT as CSV, decoded into Arrow, and nothing else; gives the rows."""
        from pyarrow import csv

        options = csv.ConvertOptions(
            column_types=ARROW_TYPES, true_values=["t"], false_values=["f"], null_values=[""]
        )
        names = csv.ReadOptions(column_names=list(ARROW_TYPES))
        rows = 0

        def decode(block: bytes) -> int:
            found = csv.read_csv(pa.BufferReader(block), names, convert_options=options)
            return int(found.num_rows)

        with self.server.connect(SOURCE) as connection:
            connection.execute("SET timezone = 'UTC'")
            with connection.cursor().copy(f"COPY {table} TO STDOUT (FORMAT csv)") as copy:
                waiting: list[bytes] = []  # PostgreSQL sends whole lines
                size = 0
                for data in copy:
                    waiting.append(bytes(data))
                    size += len(data)
                    if size >= BLOCK:
                        rows += decode(b"".join(waiting))
                        waiting, size = [], 0
                if waiting:
                    rows += decode(b"".join(waiting))
        return rows

    def adbc_to_arrow(self, table: str) -> int:
        """ADBC's batches in the types of the topic, and nothing else; gives the rows."""
        import adbc_driver_postgresql.dbapi as adbc

        names = ", ".join("amount::text AS amount" if n == "amount" else n for n in ARROW_TYPES)
        rows = 0
        with adbc.connect(self.url) as connection, connection.cursor() as cursor:
            hint = {"adbc.postgresql.batch_size_hint_bytes": str(1024 * 1024)}
            cursor.adbc_statement.set_options(**hint)
            cursor.execute(f"SELECT {names} FROM {table} ORDER BY id")
            for batch in cursor.fetch_record_batch():
                batch.column("amount").cast(ARROW_TYPES["amount"])
                rows += batch.num_rows
        return rows


@contextmanager
def running_database() -> Iterator[Database]:
    """A new PostgreSQL that syncs every transaction."""
    try:
        # The log of a round must stay: no checkpoint may interrupt the next one.
        with running_postgres(fsync="on", max_wal_size="8GB", shared_buffers="128MB") as server:
            yield Database(server)
    except PostgresAbsent as error:
        raise PeerAbsent(str(error)) from None
