"""Whole captures of SQLite and MariaDB: runs that end, new tables, outboxes, other databases."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from millstream import Mill
from millstream.cdc.capture import Capture
from millstream.cdc.settings import CaptureSettings, OutboxSettings
from millstream.cdc.sources import open_source
from millstream.errors import SourceLost
from tests.integration.cdc.captures import capturing, events_of, folded
from tests.mariadb import Database


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(tmp_path / "shop.db", isolation_level=None)) as db:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("CREATE TABLE items (id INTEGER PRIMARY KEY, name TEXT)")
        yield db


def file_of(db: sqlite3.Connection) -> str:
    ((_, _, path),) = db.execute("PRAGMA database_list").fetchall()
    return f"sqlite:///{path}"


async def run_once(mill: Mill, settings: CaptureSettings) -> None:
    async with asyncio.timeout(60):
        await Capture(mill, open_source(settings), settings).run(once=True)


async def test_a_run_of_sqlite_ends_when_it_has_caught_up_and_the_next_goes_on(
    mill: Mill, shop: sqlite3.Connection
) -> None:
    settings = CaptureSettings("shop", file_of(shop))
    shop.execute("INSERT INTO items VALUES (1, 'a'), (2, 'b')")
    await run_once(mill, settings)
    shop.execute("UPDATE items SET name = 'c' WHERE id = 2")
    shop.execute("ALTER TABLE items ADD COLUMN size INT")
    shop.execute("UPDATE items SET size = 3 WHERE id = 1")
    await run_once(mill, settings)
    await run_once(mill, settings)
    events = await events_of(mill, "items")
    assert [event["value"]["op"] for event in events] == ["r", "r", "u", "u", "u"]
    assert {key: row["size"] for key, row in folded(events).items()} == {"1": 3, "2": None}
    assert shop.execute("SELECT count(*) FROM _millstream_changes_shop").fetchone() == (0,)


async def test_a_new_table_and_an_outbox_of_sqlite_are_captured(
    mill: Mill, shop: sqlite3.Connection
) -> None:
    shop.execute("CREATE TABLE outbox (id INTEGER PRIMARY KEY, topic TEXT, key TEXT, value TEXT)")
    outbox = (OutboxSettings("outbox"),)
    settings = CaptureSettings("shop", file_of(shop), heartbeat=0.2, outbox=outbox)
    async with capturing(mill, settings) as running:
        await running.streaming()
        shop.execute("CREATE TABLE later (id INTEGER PRIMARY KEY)")
        shop.execute("CREATE TABLE no_key (a INT)")  # does not disturb the others
        shop.execute("INSERT INTO outbox(topic, key, value) VALUES ('mail', 'ann', '{}')")
        shop.execute("INSERT INTO items VALUES (1, 'a')")
        await running.caught_up("items", 1)
        await running.caught_up("mail", 1)
        shop.execute("DROP TABLE no_key")
        shop.execute("INSERT INTO later VALUES (5)")
        found = await running.caught_up("later", 1)
    assert folded(found) == {"5": {"id": 5}}


async def test_a_capture_of_sqlite_refuses_another_file_with_the_same_name(
    mill: Mill, shop: sqlite3.Connection, tmp_path: Path
) -> None:
    await run_once(mill, CaptureSettings("shop", file_of(shop)))
    other = tmp_path / "other" / "shop.db"
    other.parent.mkdir()
    with closing(sqlite3.connect(other)) as db:
        db.execute("CREATE TABLE items (id INTEGER PRIMARY KEY, name TEXT)")
        settings = CaptureSettings("shop", file_of(db))
        with pytest.raises(SourceLost, match="position in the log"):
            await run_once(mill, settings)


async def test_a_run_of_mariadb_ends_when_it_has_caught_up_and_the_next_goes_on(
    mill: Mill, mariadb: Database
) -> None:
    settings = CaptureSettings("shop", mariadb.url, truncate="event", tables=("items", "later"))
    mariadb.execute(
        "CREATE TABLE items (id int PRIMARY KEY, name varchar(9))",
        "INSERT INTO items VALUES (1, 'a'), (2, 'b')",
    )
    await run_once(mill, settings)
    mariadb.execute(
        "TRUNCATE items",
        "INSERT INTO items VALUES (3, 'c')",
        "CREATE TABLE later (id int PRIMARY KEY)",
        "INSERT INTO later VALUES (1)",
        "ALTER TABLE items ADD COLUMN size int DEFAULT 4",
        "UPDATE items SET name = 'd'",
    )
    # `later` has no position yet; what `items` has missed is not lost by its snapshot.
    await run_once(mill, settings)
    events = await events_of(mill, "items")
    assert [event["value"]["op"] for event in events] == ["r", "r", "t", "c", "u"]
    assert folded(events) == {"3": {"id": 3, "name": "d", "size": 4}}
    assert folded(await events_of(mill, "later")) == {"1": {"id": 1}}
    assert len(await events_of(mill, "later")) == 1
