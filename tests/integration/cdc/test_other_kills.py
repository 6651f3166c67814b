"""Captures of SQLite and MariaDB are killed while an application works: each change arrives once.

The application counts up the `version` of a row with each change, also of its key; a row that
returns after a deletion begins a new `life`.
"""

from __future__ import annotations

import asyncio
import random
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from millstream import Mill
from tests.integration.cdc.captures import events_of, folded, until
from tests.mariadb import Database

ROWS = 600  # before the capture begins
KEYS = 300
KILLS = 4
TABLES = ("rows_a", "rows_b")
Execute = Callable[..., Any]


class Application:
    """Writes in transactions, some of which are rolled back, until it is stopped."""

    def __init__(self, connect: Callable[[], Any], mark: str, begin: str, seed: int) -> None:
        self._connect, self._mark, self._begin = connect, mark, begin
        self._dice = random.Random(seed)
        self._stop = threading.Event()
        self._alter = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.transactions = 0
        self._error: BaseException | None = None
        self._lives = 0
        self._columns = {"rows_a": 4, "rows_b": 4}

    @contextmanager
    def working(self) -> Iterator[Application]:
        self._thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            self._thread.join(60)
        self.check()

    def add_a_column(self) -> None:
        self._alter.set()

    def _run(self) -> None:
        try:
            with closing(self._connect()) as db:
                cursor = db.cursor()
                while not self._stop.is_set():
                    if self._alter.is_set():
                        self._alter.clear()
                        cursor.execute("ALTER TABLE rows_b ADD COLUMN extra VARCHAR(20)")
                        self._columns["rows_b"] = 5
                    self._transaction(cursor.execute, cursor)
                    self.transactions += 1
                    self._stop.wait(0.005)
        except BaseException as error:
            self._error = error

    def check(self) -> None:
        """Raise what has ended it."""
        if self._error is not None:
            raise self._error

    def _transaction(self, execute: Execute, cursor: Any) -> None:
        execute(self._begin)
        for _ in range(self._dice.choice([1, 1, 3, 40])):
            self._change(execute, cursor)
        execute(self._dice.choice(["COMMIT"] * 4 + ["ROLLBACK"]))

    def _change(self, execute: Execute, cursor: Any) -> None:
        table, key = self._dice.choice(TABLES), self._dice.randrange(KEYS)
        mark = self._mark
        cursor.execute(f"SELECT life, version FROM {table} WHERE id = {mark}", (key,))
        found = cursor.fetchone()
        if found is None:
            self._lives += 1
            execute(
                f"INSERT INTO {table} (id, life, version, text) VALUES ({mark}, {mark}, 1, {mark})",
                (key, self._lives, f"new {key}"),
            )
            return
        action = self._dice.choice(["update"] * 5 + ["delete", "move"])
        extra = f", extra = 'e{found[1]}'" if self._columns[table] == 5 else ""
        if action == "delete":
            execute(f"DELETE FROM {table} WHERE id = {mark}", (key,))
        elif action == "update":
            execute(f"UPDATE {table} SET version = version + 1{extra} WHERE id = {mark}", (key,))
        else:
            execute(
                f"UPDATE {table} SET id = {mark}, version = version + 1{extra} WHERE id = {mark}",
                (KEYS + self._dice.randrange(10**9), key),
            )


Rows = Callable[[str], list[tuple[Any, ...]]]


async def captured_under_kills(
    mill: Mill, addresses: tuple[str, str], app: Application, rows: Rows
) -> None:
    """Run the capture, kill it at random, and let it catch up at the end."""
    dice = random.Random(3)
    command = [sys.executable, "-m", "tests.integration.cdc.capture_child", *addresses]
    with app.working():
        for number in range(KILLS):
            with running(command) as child:
                await stores_more(mill, await messages(mill), app, child)
                await asyncio.sleep(dice.uniform(0, 0.5))  # any moment will do
            if number == KILLS // 2:
                app.add_a_column()
        assert app.transactions > 20
    with running(command) as child:
        for table in TABLES:
            await caught_up(mill, table, rows, child)


@contextmanager
def running(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen(command)
    try:
        yield child
        assert child.poll() is None, "the capture ended by itself"
    finally:
        child.kill()
        child.wait()


async def messages(mill: Mill) -> int:
    """How many messages the topics have: they are packs of events, and fences."""
    return sum(topic.messages for topic in await mill.topics() if topic.name in TABLES)


async def stores_more(
    mill: Mill, before: int, app: Application, child: subprocess.Popen[bytes]
) -> None:
    async def more() -> bool:
        app.check()
        assert child.poll() is None, "the capture ended by itself"
        # Its first messages are only its claims on the topics.
        return await messages(mill) > before + len(TABLES) + 3

    await until(more, "the capture stores")


async def caught_up(mill: Mill, table: str, rows: Rows, child: subprocess.Popen[bytes]) -> None:
    """Wait until the topic folds to the table, then check how it came there."""
    columns = ("id", "life", "version", "text", *(("extra",) if table == "rows_b" else ()))
    expected = {
        str(row[0]): dict(zip(columns, row, strict=True))
        for row in rows(f"SELECT {', '.join(columns)} FROM {table}")
    }
    events: list[dict[str, Any]] = []
    found: dict[str, Any] = {}

    async def equal() -> bool:
        assert child.poll() is None, "the capture ended by itself"
        events[:] = await events_of(mill, table)
        found.update(folded(events))
        return folded(events).keys() == expected.keys() and all(
            {name: row.get(name) for name in columns} == expected[key]
            for key, row in folded(events).items()
        )

    try:
        await until(equal, f"{table} is captured")
    finally:
        check(events)
    assert {event["value"]["op"] for event in events} == {"r", "c", "u", "d"}


def check(events: list[dict[str, Any]]) -> None:
    """Every version of a row with one key once and in order, until it is deleted.

    Between the two attempts of a snapshot a row may get another key: it is read with both, and
    what happened to the first one follows.
    """
    alive: dict[str, tuple[int, int]] = {}
    for number, event in enumerate(events):
        value, key = event["value"], event["key"].decode()
        op, before, row = value["op"], value["before"], value["after"]
        if op == "d":
            assert alive.pop(key) == (before["life"], before["version"]), (number, value)
            continue
        life, version = row["life"], row["version"]
        if op in "rc":
            assert key not in alive, (number, alive[key], value)
        elif before is None:
            # SQLite: a column was added and filled before the capture saw it.
            assert alive[key] == (life, version), (number, alive[key], value)
            assert row["extra"] is not None
        else:
            assert alive[key] == (life, version - 1), (number, alive[key], value)
        alive[key] = (life, version)


def created(execute: Execute) -> None:
    for table in TABLES:
        execute(
            f"CREATE TABLE {table} (id INTEGER PRIMARY KEY, life INTEGER, version INTEGER, "
            f"text VARCHAR(50))"
        )
        for n in range(ROWS):
            execute(f"INSERT INTO {table} VALUES ({n}, {-n - 1}, 1, 'old {n}')")


async def test_changes_of_sqlite_arrive_once_though_the_capture_is_killed(
    mill: Mill, millstream_url: str, tmp_path: Path
) -> None:
    path = tmp_path / "shop.db"

    def connect() -> sqlite3.Connection:
        return sqlite3.connect(path, isolation_level=None, timeout=60)

    with closing(connect()) as db:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = OFF")
        db.execute("BEGIN")
        created(db.execute)
        db.execute("COMMIT")
    app = Application(connect, "?", "BEGIN IMMEDIATE", 1)
    addresses = (millstream_url, f"sqlite:///{path}")
    with closing(connect()) as db:
        await captured_under_kills(mill, addresses, app, lambda query: db.execute(query).fetchall())


async def test_changes_of_mariadb_arrive_once_though_the_capture_is_killed(
    mill: Mill, millstream_url: str, mariadb: Database
) -> None:
    with closing(mariadb.connect()) as db, db.cursor() as cursor:
        cursor.execute("BEGIN")
        created(cursor.execute)
        cursor.execute("COMMIT")
    app = Application(mariadb.connect, "%s", "BEGIN", 2)
    await captured_under_kills(mill, (millstream_url, mariadb.url), app, mariadb.rows)
