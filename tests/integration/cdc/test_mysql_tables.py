"""Snapshots, changed tables and checks of MariaDB as a source."""

from __future__ import annotations

import asyncio
from contextlib import closing
from typing import Any

import pyarrow as pa
import pytest

from millstream import errors
from millstream.cdc.mysql import snapshot
from millstream.cdc.mysql.source import MysqlSource
from millstream.cdc.settings import CaptureSettings, OutboxSettings, TableSettings
from tests.integration.cdc.test_mysql_source import (
    LIMIT,
    capturing,
    flat,
    placed,
    received,
    settings_of,
)
from tests.mariadb import Database, running_mariadb


async def test_a_snapshot_shows_one_moment_and_changes_follow_it(
    mariadb: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "BATCH_ROWS", 20)
    monkeypatch.setattr(snapshot, "_FETCH", 20)
    values = ", ".join(f"({n}, 'old')" for n in range(100))
    mariadb.execute(
        "CREATE TABLE items (id int PRIMARY KEY, name varchar(20))",
        f"INSERT INTO items VALUES {values}",
    )
    async with capturing(mariadb) as source:
        mariadb.execute("UPDATE items SET name = 'before' WHERE id = 7")
        async with source.snapshot() as view:
            mariadb.execute("UPDATE items SET name = 'new'", "DELETE FROM items WHERE id = 99")
            (shape,) = await source.tables()
            rows = []
            async for batch, last in view.rows(shape, None):
                assert last == [str(batch.column("id")[-1])]
                assert batch.num_rows <= 20
                rows += batch.to_pylist()
        found = placed(await received(source, 101))
    assert [row["id"] for row in rows] == list(range(100))
    assert {row["name"] for row in rows} == {"old", "before"}
    # It begins exactly where the snapshot ends.
    assert len(found) == 101
    assert all(commit >= view.point for (commit, _), _ in found)


async def test_a_snapshot_that_is_left_early_leaves_nothing_behind(mariadb: Database) -> None:
    values = ", ".join(f"({n}, repeat('x', 1000))" for n in range(5000))
    mariadb.execute(
        "CREATE TABLE items (id int PRIMARY KEY, name varchar(1000))",
        f"INSERT INTO items VALUES {values}",
    )
    async with capturing(mariadb) as source:
        (shape,) = await source.tables()
        async with source.snapshot() as view:
            async for _ in view.rows(shape, None):
                break
        async with source.snapshot() as view:
            batches = [batch async for batch, _ in view.rows(shape, ["4000"])]
    assert sum(batch.num_rows for batch in batches) == 999


KEYS: list[tuple[str, list[tuple[Any, ...]]]] = [
    ("k int PRIMARY KEY", [(-5,), (9,), (10,), (100,)]),
    ("k bigint unsigned PRIMARY KEY", [(1,), (2**63,), (2**64 - 1,)]),
    ("k varchar(20) PRIMARY KEY", [("B",), ("Z",), ("a",), ("é",), ("😀",)]),
    ("k varchar(20) character set latin1 PRIMARY KEY", [("B",), ("a",), ("é",), ("€",)]),
    ("k varbinary(20) PRIMARY KEY", [(b"",), (b"\0",), (b"\0\1",), (b"\xff",)]),
    ("k binary(2) PRIMARY KEY", [(b"\0\0",), (b"\1\0",), (b"\1\1",)]),
    ("k decimal(10, 2) PRIMARY KEY", [("-10.50",), ("9.00",), ("10.00",)]),
    ("k date PRIMARY KEY", [("1999-12-31",), ("2024-01-01",)]),
    ("k datetime(3) PRIMARY KEY", [("1999-12-31 00:00:00.5",), ("2024-01-01 00:00:00",)]),
    ("k timestamp(3) PRIMARY KEY", [("1999-12-31 00:00:00.5",), ("2024-01-01 00:00:00",)]),
    ("k enum('z', 'a') PRIMARY KEY", [("a",), ("z",)]),
    ("k bit(9) PRIMARY KEY", [(b"\0\2",), (b"\1\0",)]),
    ("`a%%b` varchar(9), n int, PRIMARY KEY (`a%%b`, n)", [("a", 2), ("a", 10), ("b", 1)]),
]


@pytest.mark.parametrize(("columns", "values"), KEYS, ids=[columns for columns, _ in KEYS])
async def test_a_snapshot_goes_on_after_any_key_in_the_order_of_is_after(
    mariadb: Database, columns: str, values: list[tuple[Any, ...]]
) -> None:
    with closing(mariadb.connect()) as connection, connection.cursor() as cursor:
        cursor.execute(f"CREATE TABLE k ({columns}, x int)", ())
        marks = ", ".join("%s" for _ in values[0])
        cursor.executemany(f"INSERT INTO k VALUES ({marks}, 1)", values[::-1])
    async with capturing(mariadb) as source, source.snapshot() as view:
        (shape,) = await source.tables()
        batches = [batch async for batch, _ in view.rows(shape, None)]
        everything = pa.Table.from_batches(batches).combine_chunks().to_batches()[0]
        keys = everything.select(list(shape.key))
        assert keys.num_rows == len(values)
        for number in range(len(values)):
            (row,) = keys.slice(number, 1).to_pylist()
            edge = [snapshot._key_text(value) for value in row.values()]
            after = [batch async for batch, _ in view.rows(shape, edge)]
            rows = [row for batch in after for row in batch.to_pylist()]
            assert rows == everything.slice(number + 1).to_pylist()
            expected = [False] * (number + 1) + [True] * (len(values) - number - 1)
            assert source.is_after(shape, keys, edge).to_pylist() == expected


# -- changed tables -----------------------------------------------------------------------


async def test_a_changed_table_is_followed_with_the_shape_each_change_was_made_in(
    mariadb: Database,
) -> None:
    mariadb.execute("CREATE TABLE items (id int PRIMARY KEY, name varchar(20))")
    async with capturing(mariadb) as source:
        mariadb.execute(
            "INSERT INTO items VALUES (1, 'a')",
            "ALTER TABLE items ADD COLUMN size smallint unsigned FIRST",
            "UPDATE items SET size = 7",
            "ALTER TABLE items DROP COLUMN name",
            "INSERT INTO items VALUES (8, 2)",
            "ALTER TABLE items RENAME COLUMN size TO volume",
            "DELETE FROM items WHERE id = 1",
        )
        found = await received(source, 4)
    assert flat(found) == [
        ("c", None, {"id": 1, "name": "a"}),
        (
            "u",
            {"size": None, "id": 1, "name": "a"},
            {"size": 7, "id": 1, "name": "a"},
        ),
        ("c", None, {"size": 8, "id": 2}),
        ("d", {"volume": 7, "id": 1}, None),
    ]


async def test_columns_that_are_left_out_or_text_stay_so(mariadb: Database) -> None:
    mariadb.execute(
        "CREATE TABLE items (id int PRIMARY KEY, u uuid, price decimal(9, 2), secret text)"
    )
    own = TableSettings(exclude=("u", "secret"), text=("price",))
    tables = {f"{mariadb.name}.items": own}
    async with capturing(mariadb, table=tables) as source:
        mariadb.execute("INSERT INTO items VALUES (1, uuid(), 12.5, 'hidden')")
        found = await received(source, 1)
    assert flat(found) == [("c", None, {"id": 1, "price": "12.50"})]


@pytest.mark.parametrize("choice", ["stop", "event", "ignore"])
async def test_a_truncated_table_stops_the_capture_or_is_an_event(
    mariadb: Database, choice: str
) -> None:
    mariadb.execute("CREATE TABLE items (id int PRIMARY KEY)", "CREATE TABLE other (id int)")
    async with capturing(mariadb, truncate=choice, tables=("items",)) as source:
        mariadb.execute(
            "INSERT INTO items VALUES (1)",
            "TRUNCATE other",
            "TRUNCATE TABLE items",
            "INSERT INTO items VALUES (2)",
        )
        if choice == "stop":
            before = await received(source, 1)
            assert flat(before) == [("c", None, {"id": 1})]
            source.start_at(before[0].commit[0].as_py())
            with pytest.raises(errors.CaptureError, match=r"items was truncated.*'event'"):
                await received(source, 2)
            return
        found = await received(source, 3 if choice == "event" else 2)
    marks = [op for op, _, _ in flat(found)]
    assert marks == (["c", "t", "c"] if choice == "event" else ["c", "c"])


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("DROP TABLE items", "items was dropped"),
        ("RENAME TABLE items TO old, fresh TO items", "items was renamed"),
        ("ALTER TABLE parts TRUNCATE PARTITION p0", "parts: .* with a partition"),
        ("SET binlog_format = 'STATEMENT'; INSERT INTO items VALUES (9)", "a statement instead"),
        (
            "USE mysql; SET binlog_format = 'STATEMENT'; DELETE FROM SHOP.items",
            "a statement instead",
        ),
        (
            "XA START 'a'; DELETE FROM items; XA END 'a'; XA PREPARE 'a'; XA ROLLBACK 'a'",
            "XA trans",
        ),
        ("SET binlog_row_image = 'MINIMAL'; UPDATE items SET name = 'x'", "binlog_row_image"),
        ("SET binlog_row_image = 'MINIMAL'; DELETE FROM items", "binlog_row_image"),
    ],
)
async def test_what_the_log_does_not_show_row_by_row_stops_the_capture(
    mariadb: Database, statement: str, message: str
) -> None:
    mariadb.execute(
        "CREATE TABLE items (id int PRIMARY KEY, name varchar(9), size int)",
        "INSERT INTO items VALUES (1, 'a', 1)",
        "CREATE TABLE fresh LIKE items",
        "CREATE TABLE parts (id int PRIMARY KEY) PARTITION BY RANGE (id) "
        "(PARTITION p0 VALUES LESS THAN (10))",
    )
    async with capturing(mariadb) as source:
        statement = statement.replace("(9)", "(9, 'b', 2)").replace("SHOP", mariadb.name)
        mariadb.execute(*statement.split("; "))
        with pytest.raises(errors.CaptureError, match=message):
            await received(source, 1)


async def test_tables_without_transactions_large_rows_and_one_phase_commits_are_captured(
    mariadb: Database,
) -> None:
    mariadb.execute("CREATE TABLE items (id int PRIMARY KEY, body longblob) ENGINE = MyISAM")
    mariadb.execute("CREATE TABLE other (id int PRIMARY KEY)")
    async with capturing(mariadb, tables=("items",)) as source:
        assert [one.fatal for one in await source.check() if not one.ok] == [False]
        mariadb.execute(
            "INSERT INTO items VALUES (1, repeat('x', 3000000)), (2, repeat('y', 3000000))",
            # An XA transaction of others, and one that is committed at once.
            *("XA START 'a'", "INSERT INTO other VALUES (1)", "XA END 'a'", "XA PREPARE 'a'"),
            *("XA COMMIT 'a'", "XA START 'b'", "REPLACE INTO items VALUES (2, 'z')"),
            *("XA END 'b'", "XA COMMIT 'b' ONE PHASE"),
        )
        found = await received(source, 3)
    sizes = [(op, len(after["body"])) for op, _, after in flat(found)]
    assert sizes == [("c", 3_000_000), ("c", 3_000_000), ("u", 1)]


# -- checks -------------------------------------------------------------------------------


async def faults_of(settings: CaptureSettings) -> dict[str, str]:
    source = MysqlSource(settings)
    await source.open()
    try:
        return {
            one.subject: f"{one.text} | {one.fix}" for one in await source.check() if not one.ok
        }
    finally:
        await source.close()


async def test_check_finds_tables_that_cannot_be_captured(mariadb: Database) -> None:
    mariadb.execute(
        "CREATE TABLE parent (id int PRIMARY KEY)",
        "CREATE TABLE child (id int PRIMARY KEY, p int, "
        "FOREIGN KEY (p) REFERENCES parent (id) ON DELETE CASCADE)",
        "CREATE TABLE no_key (a int)",
        "CREATE TABLE loose (a int, UNIQUE (a))",
        "CREATE TABLE real_key (a double PRIMARY KEY)",
        "CREATE TABLE odd (id int PRIMARY KEY, u uuid)",
        "CREATE VIEW seen AS SELECT * FROM parent",
    )
    name = mariadb.name
    own = {f"{name}.loose": TableSettings(key=("a",))}
    outbox = (OutboxSettings(f"{name}.parent"),)
    found = await faults_of(settings_of(mariadb, table=own, outbox=outbox))
    assert "CASCADE" in found.pop(f"table {name}.child")
    assert "no primary key" in found.pop(f"table {name}.no_key")
    assert "NOT NULL" in found.pop(f"table {name}.loose")
    assert "no exact text" in found.pop(f"table {name}.real_key")
    assert "exclude" in found.pop(f"table {name}.odd")
    assert "lost" in found.pop("outbox")
    assert not found
    assert "no table" in (await faults_of(settings_of(mariadb, tables=("x*",))))["tables"]


async def test_check_finds_grants_that_are_missing(mariadb: Database) -> None:
    mariadb.execute("CREATE TABLE t (id int PRIMARY KEY)")
    mariadb.execute(
        "CREATE OR REPLACE USER 'poor'@'127.0.0.1' IDENTIFIED BY 'x'",
        f"GRANT INSERT ON {mariadb.name}.* TO 'poor'@'127.0.0.1'",
    )
    url = mariadb.server.url_of(mariadb.name, "poor", "x")
    found = await faults_of(CaptureSettings("shop", url))
    assert set(found) == {
        *("grant REPLICATION SLAVE", "grant BINLOG MONITOR", f"table {mariadb.name}.t")
    }
    assert "GRANT REPLICATION SLAVE, BINLOG MONITOR ON *.*" in found["grant REPLICATION SLAVE"]
    mariadb.execute(
        "GRANT REPLICATION SLAVE, BINLOG MONITOR ON *.* TO 'poor'@'127.0.0.1'",
        f"GRANT SELECT ON {mariadb.name}.* TO 'poor'@'127.0.0.1'",
    )
    assert await faults_of(CaptureSettings("shop", url)) == {}
    mariadb.execute("DROP USER 'poor'@'127.0.0.1'")
    with pytest.raises(errors.ConfigError, match="refused user 'poor'") as caught:
        await MysqlSource(CaptureSettings("shop", url)).open()
    assert "x@" not in str(caught.value)


async def test_check_finds_settings_of_the_server_and_a_log_without_names_is_a_gap() -> None:
    wrong = {"binlog-row-metadata": "NO_LOG", "binlog-format": "MIXED", "log-bin-compress": "ON"}
    with running_mariadb(**wrong) as server:
        shop = Database(server, "shop")
        Database(server, "mysql").execute("CREATE DATABASE shop")
        shop.execute("CREATE TABLE items (id int PRIMARY KEY)")
        found = await faults_of(settings_of(shop))
        assert set(found) == {"binlog_row_metadata", "binlog_format", "log_bin_compress"}
        assert "SET GLOBAL binlog_row_metadata = 'FULL'" in found["binlog_row_metadata"]
        async with capturing(shop) as source:
            shop.execute("SET binlog_format = 'ROW'", "INSERT INTO items VALUES (1)")
            async with asyncio.timeout(LIMIT):
                with pytest.raises(errors.SourceLost, match="without the names of its columns"):
                    await received(source, 1)
