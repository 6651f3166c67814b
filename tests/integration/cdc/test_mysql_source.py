"""MariaDB as a source, through its protocol: a real server in a temporary folder."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from millstream import errors
from millstream.cdc.model import RowChanges
from millstream.cdc.mysql import binlog
from millstream.cdc.mysql.source import MysqlSource
from millstream.cdc.settings import CaptureSettings
from tests.mariadb import Database, running_mariadb

LIMIT = 60.0  # seconds, for a stalled machine


def settings_of(database: Database, **changed: Any) -> CaptureSettings:
    return CaptureSettings(name="shop", source=database.url, **changed)


@asynccontextmanager
async def capturing(
    database: Database, start: int = 0, **changed: Any
) -> AsyncIterator[MysqlSource]:
    """A source that is ready to give changes."""
    source = MysqlSource(settings_of(database, **changed))
    await source.open()
    try:
        assert not await source.prepare(await source.tables())
        source.start_at(start)
        yield source
    finally:
        await source.close()


async def received(source: MysqlSource, count: int) -> list[RowChanges]:
    """Changes, until there are so many."""
    found: list[RowChanges] = []
    stream = source.changes()
    async with asyncio.timeout(LIMIT):
        async for one in stream:
            assert all(
                commit <= one.upto + 1 for c in one.changes for commit in c.commit.to_pylist()
            )
            found += one.changes
            if sum(map(len, found)) >= count:
                break
    await stream.aclose()
    return found


def placed(changes: Iterable[RowChanges]) -> list[tuple[tuple[int, int], tuple[str, Any, Any]]]:
    """Position and (op, before, after) of each change, in the order of positions."""
    rows = []
    for one in changes:
        positions = zip(one.commit.to_pylist(), one.place.to_pylist(), strict=True)
        assert one.before is not None
        parts = zip(one.op.to_pylist(), one.before.to_pylist(), one.after.to_pylist(), strict=True)
        rows += list(zip(positions, parts, strict=True))
    assert len({position for position, _ in rows}) == len(rows), "a position is used once"
    return sorted(rows, key=lambda row: row[0])


def column(changes: Iterable[RowChanges], name: str) -> list[Any]:
    return [value for one in changes for value in getattr(one, name).to_pylist()]


def flat(changes: Iterable[RowChanges]) -> list[tuple[str, Any, Any]]:
    return [part for _, part in placed(changes)]


async def test_changes_arrive_in_order_with_their_transaction(mariadb: Database) -> None:
    mariadb.execute("CREATE TABLE items (id int PRIMARY KEY, name varchar(20))")
    async with capturing(mariadb) as source:
        mariadb.execute(
            "INSERT INTO items VALUES (1, 'pen')",
            "BEGIN",
            "INSERT INTO items VALUES (2, 'cup'), (3, 'pot')",
            "UPDATE items SET name = 'pan' WHERE id = 3",
            "UPDATE items SET id = 9 WHERE id = 1",
            "COMMIT",
            "BEGIN",
            "DELETE FROM items",
            "ROLLBACK",
            "DELETE FROM items WHERE id = 2",
        )
        found = await received(source, 7)
    rows = placed(found)
    pen, cup, pot = ({"id": n, "name": name} for n, name in ((1, "pen"), (2, "cup"), (3, "pot")))
    assert [part for _, part in rows] == [
        ("c", None, pen),
        ("c", None, cup),
        ("c", None, pot),
        ("u", pot, {"id": 3, "name": "pan"}),
        ("d", pen, None),
        ("c", None, {"id": 9, "name": "pen"}),
        ("d", cup, None),
    ]
    assert [place for (_, place), _ in rows] == [2, 2, 4, 6, 7, 8, 2]
    commits = [commit for (commit, _), _ in rows]
    assert commits[1:6] == [commits[1]] * 5
    assert len(set(commits)) == 3
    # They may arrive in several parts.
    assert column(found, "number") == [1, 1, 2, 3, 4, 4, 1]
    assert column(found, "total") == [1, 4, 4, 4, 4, 4, 1]
    assert len(set(column(found, "transaction"))) == 3
    ages = [abs((datetime.now(UTC) - time).total_seconds()) for time in column(found, "time")]
    assert max(ages) < 3600


async def test_a_capture_goes_on_with_the_transaction_of_which_a_part_is_stored(
    mariadb: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(binlog, "OPEN_ROWS", 300)
    monkeypatch.setattr(binlog, "PIECE_ROWS", 70)
    mariadb.execute("CREATE TABLE items (id int PRIMARY KEY, name varchar(20))")
    values = ", ".join(f"({n}, 'x')" for n in range(1000))
    async with capturing(mariadb) as source:
        mariadb.execute(
            "INSERT INTO items VALUES (-1, 'first')", f"INSERT INTO items VALUES {values}"
        )
        everything = placed(await received(source, 1001))
    assert [row["id"] for _, (_, _, row) in everything] == [-1, *range(1000)]
    for stored in (0, 1, 500, 1000):
        (commit, _), _ = everything[stored]
        async with capturing(mariadb, commit) as source:
            mariadb.execute("UPDATE items SET name = concat(name, 'y') WHERE id = -1")
            again = placed(await received(source, 1001 - (stored > 0) + 1))
        after = [one for one in again if one[0] > everything[stored][0]]
        assert after[: len(everything) - stored - 1] == everything[stored + 1 :]


async def test_nothing_is_missing_when_the_server_is_killed_and_its_log_goes_on_in_a_new_file() -> (
    None
):
    with running_mariadb() as server:
        server_url = Database(server, "shop")
        Database(server, "mysql").execute("CREATE DATABASE shop")
        server_url.execute(
            "CREATE TABLE items (id int PRIMARY KEY)", "INSERT INTO items VALUES (0)"
        )
        async with capturing(server_url) as source:
            identity = await source.identity()
            server_url.execute("INSERT INTO items VALUES (1)")
            first = placed(await received(source, 1))
        await asyncio.to_thread(server.kill)
        async with asyncio.timeout(LIMIT):
            with pytest.raises(errors.SourceUnreachable, match="no connection"):
                await MysqlSource(settings_of(server_url)).open()
        await asyncio.to_thread(server.start)
        server_url.execute("INSERT INTO items VALUES (2)", "FLUSH BINARY LOGS")
        server_url.execute("INSERT INTO items VALUES (3)")
        async with capturing(server_url, first[0][0][0]) as source:
            assert await source.identity() == identity
            again = placed(await received(source, 3))
            lag = await source.lag()
        assert [row["id"] for _, (_, _, row) in again] == [1, 2, 3]
        assert again[0] == first[0]
        assert lag.bytes is not None
        server_url.execute("FLUSH BINARY LOGS", "PURGE BINARY LOGS BEFORE now() + INTERVAL 1 DAY")
        async with capturing(server_url, first[0][0][0]) as source:
            with pytest.raises(errors.SourceLost, match=r"file 1 of the server's log is deleted"):
                await received(source, 1)


# -- values -------------------------------------------------------------------------------

TYPES = {
    "t1": "tinyint",
    "t2": "tinyint unsigned",
    "yes": "bool",
    "s1": "smallint",
    "m1": "mediumint",
    "m2": "mediumint unsigned",
    "i2": "int unsigned",
    "b1": "bigint",
    "b2": "bigint unsigned",
    "d1": "decimal(20, 5)",
    "d2": "decimal(50, 10)",
    "d3": "decimal(4, 4)",
    "f1": "float",
    "f2": "double",
    "c1": "char(5)",
    "c2": "varchar(300)",
    "c3": "text",
    "c4": "varchar(20) character set latin1",
    "x1": "binary(6)",
    "x2": "varbinary(300)",
    "x3": "blob",
    "a1": "date",
    "a2": "datetime",
    "a3": "datetime(6)",
    "a4": "timestamp(3) null",
    "a5": "time",
    "a6": "time(2)",
    "a7": "time(5)",
    "a8": "year",
    "e1": "enum('x', 'y', 'it''s')",
    "e2": "set('p', 'q', 'r')",
    "j1": "json",
    "g1": "bit(1)",
    "g2": "bit(20)",
    "v1": "bigint as (b1 / 2) virtual",
    "v2": "varchar(20) as (concat(c4, '!')) stored",
}
ROWS: list[dict[str, Any]] = [
    {},
    {
        "t1": -128,
        "t2": 255,
        "yes": 1,
        "s1": -32768,
        "m1": -8388608,
        "m2": 16777215,
        "i2": 2**32 - 1,
        "b1": -(2**63),
        "b2": 2**64 - 1,
        "d1": Decimal("-123456789012345.12345"),
        "d2": Decimal("1234567890123456789012345678901234567890.1"),
        "d3": Decimal("-0.0001"),
        "f1": 16777217,
        "f2": 0.1,
        "c1": "ab ",
        "c2": "é😀",
        "c3": "",
        "c4": "é€",
        "x1": b"\1\0\2\0\0\0",
        "x2": b"\0\0",
        "x3": b"\xff\x00'\"\\",
        "a1": "2024-02-29",
        "a2": "2024-02-29 23:59:59",
        "a3": "1000-01-01 00:00:00.000001",
        "a4": "2024-06-30 12:00:00.123",
        "a5": "-838:59:59",
        "a6": "-00:00:00.25",
        "a7": "-01:02:03.00001",
        "a8": 2155,
        "e1": "it's",
        "e2": "r,p",
        "j1": '{"a": [1, "é"]}',
        "g1": b"\1",
        "g2": b"\x0f\xff\xfe",
    },
    {
        "d1": Decimal(0),
        "d3": Decimal("0.9999"),
        "f1": -1.5e-38,
        "f2": 1.7976931348623157e308,
        "a5": "00:00:00",
        "a6": "-12:34:56.99",
        "a7": "800:00:00.5",
        "a8": 0,
        "e2": "",
        "a4": "1970-01-01 03:00:01",
        "g1": b"\0",
        "g2": b"\0",
        "c2": " x ",
        "x1": b"",
        "a3": "9999-12-31 23:59:59.999999",
        "j1": "null",
        "yes": 7,
    },
]


def insert(database: Database, rows: Iterable[dict[str, Any]]) -> None:
    connection = database.connect(init_command="SET time_zone = '+03:00'")
    with connection, connection.cursor() as cursor:
        for row in rows:
            marks = ", ".join("%s" for _ in row)
            names = ", ".join(row)
            cursor.execute(f"INSERT INTO v ({names}) VALUES ({marks})", list(row.values()))


async def test_values_are_the_same_in_snapshot_and_log_and_of_the_declared_types(
    mariadb: Database,
) -> None:
    columns = ", ".join(f"{name} {type_}" for name, type_ in TYPES.items())
    mariadb.execute(f"CREATE TABLE v (id int PRIMARY KEY AUTO_INCREMENT, {columns})")
    dice = random.Random(7)
    more = [
        {
            "d1": Decimal(dice.randrange(-(10**20) + 1, 10**20)).scaleb(-5),
            "a7": f"{dice.choice(['', '-'])}{dice.randrange(800)}:{dice.randrange(60)}:"
            f"{dice.randrange(60)}.{dice.randrange(100_000):05}",
            "f1": dice.uniform(-1e9, 1e9),
            "f2": dice.uniform(-1e300, 1e300),
            "x3": dice.randbytes(dice.randrange(50)),
        }
        for _ in range(200)
    ]
    async with capturing(mariadb) as source:
        insert(mariadb, [*ROWS, *more])
        found = await received(source, len(ROWS) + len(more))
        async with source.snapshot() as view:
            (shape,) = await source.tables()
            batches = [batch async for batch, _ in view.rows(shape, None)]
    assert len({one.table for one in found}) == 1
    assert found[0].table == shape
    logged = [after for _, _, after in flat(found)]
    assert logged == pa.Table.from_batches(batches).to_pylist()
    _, full, third, *rest = logged
    assert all(value is None for name, value in logged[0].items() if name != "id")
    assert full["b2"] == 2**64 - 1
    assert (full["d1"], full["d3"]) == (Decimal("-123456789012345.12345"), Decimal("-0.0001"))
    assert full["d2"] == "1234567890123456789012345678901234567890.1000000000"
    assert (full["f1"], full["f2"], full["yes"], third["yes"]) == (16777216.0, 0.1, 1, 7)
    assert (full["c1"], full["c2"], full["c3"], full["c4"]) == ("ab", "é😀", "", "é€")
    assert (full["x1"], third["x1"]) == (b"\1\0\2\0\0\0", bytes(6))
    assert (full["a1"], full["a2"]) == (
        date(2024, 2, 29),
        datetime.fromisoformat("2024-02-29T23:59:59"),
    )
    assert full["a4"] == datetime(2024, 6, 30, 9, 0, 0, 123_000, tzinfo=UTC)
    assert third["a4"] == datetime.fromtimestamp(1, UTC)
    assert (full["a5"], full["a6"], full["a7"]) == ("-838:59:59", "-00:00:00.25", "-01:02:03.00001")
    assert (third["a5"], third["a6"], third["a7"]) == ("00:00:00", "-12:34:56.99", "800:00:00.5")
    assert (full["a8"], third["a8"]) == (2155, 0)
    assert (full["e1"], full["e2"], third["e2"]) == ("it's", "p,r", "")
    assert (full["g1"], third["g1"], full["g2"]) == (True, False, 0xFFFFE)
    assert (full["v1"], full["v2"]) == (-(2**62), "é€!")
    assert [row["d1"] for row in rest] == [row["d1"] for row in more]
    assert [row["f2"] for row in rest] == [row["f2"] for row in more]


async def test_dates_that_do_not_exist_become_null(mariadb: Database) -> None:
    mariadb.execute(
        "CREATE TABLE z (id int PRIMARY KEY, d date, t datetime, s timestamp NULL)",
    )
    async with capturing(mariadb) as source:
        mariadb.execute(
            "SET sql_mode = ''",
            "INSERT INTO z VALUES (1, '0000-00-00', '0000-00-00', '0000-00-00'), "
            "(2, '2024-02-00', '2024-00-10', '2024-02-01')",
        )
        logged = [after for _, _, after in flat(await received(source, 2))]
        async with source.snapshot() as view:
            (shape,) = await source.tables()
            rows = [row async for batch, _ in view.rows(shape, None) for row in batch.to_pylist()]
    assert logged == rows
    assert [row["d"] or row["t"] for row in logged] == [None, None]
    assert [row["s"] is None for row in logged] == [True, False]
