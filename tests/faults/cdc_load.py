"""A database at work, for captures: python -m tests.faults.cdc_load URL --seed N --operations M

Several connections at once: transactions of one row to thousands, rollbacks, savepoints, COPY,
changed keys, deletions, large values that later updates do not touch, and a column that appears
half-way. A connection that is lost is opened again, as an application would.

Each row has a `uid` for life, and a `version` that every change counts up by one. Triggers write
each change into the table `audit`, in the same transaction: what is there was committed, and
nothing else was. The checker compares it with the topics.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import psycopg

__all__ = ["ALTERED", "AUDIT", "KEYS", "TABLES", "create_tables", "fill", "run"]

TABLES: Final = ("orders", "items")
AUDIT: Final = "audit"
KEYS: Final[dict[str, tuple[str, ...]]] = {"orders": ("id",), "items": ("shop", "place")}
ALTERED: Final = "extra"  # the column that appears half-way, in both tables
WORKERS: Final = 3
RECONNECT_SECONDS: Final = 60.0
LARGE_TEXT: Final = 10_000  # letters; PostgreSQL stores them outside of the row
BULK: Final = 2000  # rows of the largest transactions
SHOPS: Final = ("north", "south", 'a "quoted", one', "über", "")

SCHEMA: Final = """
CREATE SEQUENCE uids;
CREATE TABLE orders (
    id bigint PRIMARY KEY,
    uid bigint NOT NULL DEFAULT nextval('uids'),
    version int NOT NULL DEFAULT 1,
    customer text,
    amount numeric(12,2),
    rate float8,
    paid bool,
    at timestamptz,
    day date,
    ref uuid,
    body text,
    raw bytea
);
ALTER TABLE orders ALTER body SET STORAGE EXTERNAL;
CREATE TABLE items (
    shop text,
    place int,
    uid bigint NOT NULL DEFAULT nextval('uids'),
    version int NOT NULL DEFAULT 1,
    quantity smallint,
    label text,
    body text,
    PRIMARY KEY (shop, place)
);
ALTER TABLE items ALTER body SET STORAGE EXTERNAL;
ALTER TABLE items REPLICA IDENTITY FULL;
CREATE SEQUENCE order_ids;
CREATE SEQUENCE item_places;
CREATE TABLE audit (
    number bigserial PRIMARY KEY,
    tab text, op text, uid bigint, version int, xid text, lsn pg_lsn
);
CREATE FUNCTION note_change() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    what text := CASE TG_OP WHEN 'INSERT' THEN 'c' WHEN 'DELETE' THEN 'd' ELSE 'u' END;
    moved bool := false;
    row record := CASE TG_OP WHEN 'DELETE' THEN OLD ELSE NEW END;
BEGIN
    IF TG_OP = 'UPDATE' AND TG_TABLE_NAME = 'orders' THEN moved := OLD.id <> NEW.id; END IF;
    IF TG_OP = 'UPDATE' AND TG_TABLE_NAME = 'items' THEN
        moved := (OLD.shop, OLD.place) <> (NEW.shop, NEW.place);
    END IF;
    INSERT INTO audit (tab, op, uid, version, xid, lsn) VALUES (
        TG_TABLE_NAME, CASE WHEN moved THEN 'k' ELSE what END, row.uid, row.version,
        pg_current_xact_id()::text, pg_current_wal_insert_lsn());
    RETURN NULL;
END $$;
CREATE TRIGGER noted AFTER INSERT OR UPDATE OR DELETE ON orders
    FOR EACH ROW EXECUTE FUNCTION note_change();
CREATE TRIGGER noted AFTER INSERT OR UPDATE OR DELETE ON items
    FOR EACH ROW EXECUTE FUNCTION note_change();
"""

Connection = psycopg.Connection[Any]


def create_tables(url: str) -> None:
    """The tables, empty."""
    with psycopg.connect(url) as connection:
        connection.execute(SCHEMA)


def fill(url: str, rows: int, seed: int) -> None:
    """Rows that are there when the capture begins: so many orders, and a tenth as many items."""
    chance = random.Random(f"{seed}.fill")
    with psycopg.connect(url) as connection:
        for first in range(0, rows, BULK):
            _copy_orders(connection, chance, min(BULK, rows - first))
        for first in range(0, rows // 10, BULK):
            _copy_items(connection, chance, min(BULK, rows // 10 - first))


def run(url: str, seed: int, operations: int, pause: float = 0.0) -> None:
    """So many transactions, shared out over the workers; raises if one of them failed."""
    left = _Left(operations)
    workers = [_Worker(url, seed, number, left, pause) for number in range(WORKERS)]
    threads = [threading.Thread(target=worker.run, daemon=True) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for worker in workers:
        if worker.error is not None:
            raise worker.error


class _Left:
    """How many transactions are still to be made."""

    def __init__(self, operations: int) -> None:
        self._all = self._left = operations
        self._lock = threading.Lock()
        self._altered = False

    def take(self) -> bool:
        with self._lock:
            self._left -= 1
            return self._left >= 0

    def alter_now(self) -> bool:
        """True for one worker, half-way."""
        with self._lock:
            due = not self._altered and self._left < self._all / 2
            self._altered = self._altered or due
            return due


class _Worker:
    """One connection at work."""

    def __init__(self, url: str, seed: int, number: int, left: _Left, pause: float) -> None:
        self.error: BaseException | None = None
        self._url, self._left, self._pause = url, left, pause
        self._chance = random.Random(f"{seed}.{number}")
        self._lost_since: float | None = None

    def run(self) -> None:
        try:
            while self._work():
                pass
        except BaseException as error:  # raised by whoever waits for the thread
            self.error = error

    def _work(self) -> bool:
        """Work until the connection is lost (True) or everything is done (False)."""
        try:
            with psycopg.connect(self._url, connect_timeout=10) as connection:
                connection.execute("SET deadlock_timeout = '50ms'; SET lock_timeout = '5s'")
                connection.commit()
                self._lost_since = None
                while self._left.take():
                    self._transaction(connection)
                    time.sleep(self._chance.uniform(0, 2 * self._pause))
                return False
        except psycopg.OperationalError:
            now = time.monotonic()
            self._lost_since = self._lost_since or now
            if now - self._lost_since > RECONNECT_SECONDS:
                raise
            time.sleep(0.05)
            return True

    def _transaction(self, connection: Connection) -> None:
        if self._left.alter_now():
            self._alter(connection)
        change = self._chance.choices(list(CHANGES), list(CHANGES.values()))[0]
        try:
            for _ in range(self._chance.choice((1, 1, 1, 2, 4))):
                change(connection, self._chance)
            if self._chance.random() < 0.15:
                connection.rollback()
            else:
                connection.commit()
        except (psycopg.errors.DeadlockDetected, psycopg.errors.LockNotAvailable):
            connection.rollback()
        except psycopg.errors.UniqueViolation:  # two chose the same new key
            connection.rollback()

    def _alter(self, connection: Connection) -> None:
        """Until it is there: a server may be killed in the midst of it."""
        until = time.monotonic() + RECONNECT_SECONDS
        for table in TABLES:
            statement = f"ALTER TABLE {table} ADD COLUMN IF NOT EXISTS {ALTERED} int"
            while True:
                try:
                    if connection.closed:
                        connection = psycopg.connect(self._url, connect_timeout=10)
                    connection.execute(statement)
                    connection.commit()
                    break
                except psycopg.OperationalError:  # a lock that is not free, or the server is gone
                    if time.monotonic() > until:
                        raise
                    if not connection.closed:
                        connection.rollback()
                    time.sleep(0.05)


# -- what a transaction does --------------------------------------------------------------


def _text(chance: random.Random, length: int) -> str:
    return "".join(chance.choices("abcdefghijklmnopqrstuvwxyz \"'\\,\n\tß€😀", k=length))


def _large(chance: random.Random) -> str:
    """Long enough to be stored outside of its row; random, so that it stays long."""
    return f"{chance.getrandbits(LARGE_TEXT * 4):x}"


def _order(chance: random.Random) -> tuple[Any, ...]:
    return (
        None if chance.random() < 0.1 else _text(chance, chance.randrange(20)),
        None if chance.random() < 0.1 else f"{chance.randrange(-(10**11), 10**11) / 100:.2f}",
        chance.uniform(-1e6, 1e6),
        chance.random() < 0.5,
        f"2024-0{chance.randrange(1, 10)}-17 12:34:56.{chance.randrange(10**6):06}+05:30",
        f"19{chance.randrange(10, 99)}-11-30",
        f"{chance.getrandbits(128):032x}",
        _large(chance) if chance.random() < 0.05 else _text(chance, 5),
        chance.randbytes(chance.randrange(8)),
    )


def _ids(connection: Connection, sequence: str, count: int) -> list[int]:
    query = f"SELECT nextval('{sequence}') FROM generate_series(1, {count})"
    return [number for (number,) in connection.execute(query)]


def _copy_orders(connection: Connection, chance: random.Random, count: int) -> None:
    names = "id, customer, amount, rate, paid, at, day, ref, body, raw"
    ids = _ids(connection, "order_ids", count)
    with connection.cursor().copy(f"COPY orders ({names}) FROM STDIN") as copy:
        for number in ids:
            copy.write_row((number * 10, *_order(chance)))


def _copy_items(connection: Connection, chance: random.Random, count: int) -> None:
    places = _ids(connection, "item_places", count)
    with connection.cursor().copy(
        "COPY items (shop, place, quantity, label, body) FROM STDIN"
    ) as c:
        for place in places:
            body = _large(chance) if chance.random() < 0.05 else None
            c.write_row(
                (chance.choice(SHOPS), place, chance.randrange(-9, 9), _text(chance, 8), body)
            )


def _bulk_copy(connection: Connection, chance: random.Random) -> None:
    copy = chance.choice((_copy_orders, _copy_orders, _copy_items))
    copy(connection, chance, chance.choice((10, 100, 500, BULK)))


def _insert(connection: Connection, chance: random.Random) -> None:
    for number in _ids(connection, "order_ids", chance.randrange(1, 6)):
        connection.execute(
            "INSERT INTO orders (id, customer, amount, rate, paid, at, day, ref, body, raw)"
            " VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s)",
            (number * 10, *_order(chance)),
        )
        time.sleep(chance.uniform(0, 0.002))  # so that others commit in between


def _some(connection: Connection, chance: random.Random, table: str, most: int) -> str:
    """A condition for up to so many rows that follow each other, somewhere in a table."""
    count = chance.randrange(1, most + 1)
    if table == "orders":
        top = connection.execute("SELECT coalesce(max(id), 0) FROM orders").fetchone()
        first = chance.randrange((top or (0,))[0] + 1)
        query = f"SELECT id FROM orders WHERE id >= {first} ORDER BY id LIMIT {count}"
        return f"id IN ({query})"
    top = connection.execute("SELECT coalesce(max(place), 0) FROM items").fetchone()
    first = chance.randrange((top or (0,))[0] + 1)
    query = f"SELECT shop, place FROM items WHERE place >= {first} ORDER BY place LIMIT {count}"
    return f"(shop, place) IN ({query})"


def _update(connection: Connection, chance: random.Random) -> None:
    """Updates that leave large values alone."""
    where = _some(connection, chance, "orders", chance.choice((1, 5, 50)))
    if chance.random() < 0.7:
        connection.execute(
            f"UPDATE orders SET version = version + 1, amount = amount + 1, paid = NOT paid,"
            f" at = at + interval '1 day' WHERE {where}"
        )
    else:
        where = _some(connection, chance, "items", 20)
        connection.execute(f"UPDATE items SET version = version + 1, quantity = NULL WHERE {where}")


def _update_large(connection: Connection, chance: random.Random) -> None:
    """Large values that change, vanish and come back."""
    table = chance.choice(TABLES)
    body = chance.choice((None, _large(chance), "small"))
    where = _some(connection, chance, table, 3)
    connection.execute(
        f"UPDATE {table} SET version = version + 1, body = %s WHERE {where}", (body,)
    )


def _update_many(connection: Connection, chance: random.Random) -> None:
    where = _some(connection, chance, "orders", BULK)
    connection.execute(f"UPDATE orders SET version = version + 1, rate = -rate WHERE {where}")


def _update_added(connection: Connection, chance: random.Random) -> None:
    """The column that appears half-way, once it is there."""
    found = connection.execute(
        "SELECT 1 FROM information_schema.columns WHERE table_name = 'orders'"
        f" AND column_name = '{ALTERED}'"
    ).fetchone()
    if found is not None:
        where = _some(connection, chance, "orders", 10)
        connection.execute(
            f"UPDATE orders SET version = version + 1, {ALTERED} = %s WHERE {where}",
            (chance.randrange(1000),),
        )


def _delete(connection: Connection, chance: random.Random) -> None:
    table = chance.choice(TABLES)
    where = _some(connection, chance, table, chance.choice((1, 3, 30)))
    connection.execute(f"DELETE FROM {table} WHERE {where}")


def _move(connection: Connection, chance: random.Random) -> None:
    """Changed keys, backward and forward; some go where another row was before."""
    if chance.random() < 0.6:
        where = _some(connection, chance, "orders", 3)
        step = chance.choice((-10, -7, 1, 10, 100_000, -100_000))
        connection.execute(
            f"UPDATE orders SET version = version + 1, id = id + ({step}) WHERE {where}"
            f" AND NOT EXISTS (SELECT 1 FROM orders o WHERE o.id = orders.id + ({step}))"
        )
    else:
        where = _some(connection, chance, "items", 3)
        connection.execute(
            f"UPDATE items SET version = version + 1, shop = %s, place = place + 1000000"
            f" WHERE {where}",
            (chance.choice(SHOPS),),
        )


def _short_life(connection: Connection, chance: random.Random) -> None:
    """A row that is created, changed, moved and deleted in one transaction."""
    (number,) = _ids(connection, "order_ids", 1)
    row = number * 10 + 3
    connection.execute("INSERT INTO orders (id, customer) VALUES (%s, 'short')", (row,))
    connection.execute("UPDATE orders SET version = version + 1 WHERE id = %s", (row,))
    moved = "UPDATE orders SET version = version + 1, id = id + 1 WHERE id = %s"
    connection.execute(moved, (row,))
    if chance.random() < 0.5:
        connection.execute("DELETE FROM orders WHERE id = %s", (row + 1,))


def _savepoints(connection: Connection, chance: random.Random) -> None:
    """Parts that are rolled back inside of a transaction that is not."""
    _update(connection, chance)
    for _ in range(chance.randrange(1, 4)):
        connection.execute("SAVEPOINT part")
        chance.choice((_insert, _update, _delete, _move, _update_large))(connection, chance)
        if chance.random() < 0.5:
            connection.execute("ROLLBACK TO SAVEPOINT part")
        else:
            connection.execute("RELEASE SAVEPOINT part")
    _insert(connection, chance)


Change = Callable[[Connection, random.Random], None]
CHANGES: Final[dict[Change, int]] = {
    _insert: 20,
    _update: 30,
    _update_large: 8,
    _update_many: 2,
    _update_added: 8,
    _delete: 8,
    _move: 8,
    _short_life: 5,
    _savepoints: 10,
    _bulk_copy: 3,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Work on a database that has the tables."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.cdc_load", description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--operations", type=int, default=1000, help="transactions")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between two of them")
    chosen = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # the connections' ends roll back
    run(chosen.url, chosen.seed, chosen.operations, chosen.pause)
    return 0


if __name__ == "__main__":
    sys.exit(main())
