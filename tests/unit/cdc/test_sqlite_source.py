"""SQLite as a source, through its protocol: real databases in temporary folders."""

from __future__ import annotations

import asyncio
import random
import sqlite3
import struct
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, closing
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from millstream import errors
from millstream.cdc.model import RowChanges
from millstream.cdc.settings import CaptureSettings, TableSettings
from millstream.cdc.sqlite.source import SqliteSource

LIMIT = 30.0  # seconds, for a stalled machine


class App:
    """The application that writes to the database."""

    def __init__(self, path: Path, *statements: str, mode: str = "wal") -> None:
        self.path = path
        self.db = sqlite3.connect(path, isolation_level=None)
        self.db.execute(f"PRAGMA journal_mode = {mode}")
        self.run(*statements)

    def run(self, *statements: str) -> None:
        for statement in statements:
            self.db.execute(statement)

    def rows(self, query: str) -> list[Any]:
        return self.db.execute(query).fetchall()


@pytest.fixture
def app(tmp_path: Path) -> Iterable[App]:
    found = App(
        tmp_path / "shop.db",
        "CREATE TABLE items (id INTEGER PRIMARY KEY, name TEXT, price DECIMAL(10, 2))",
    )
    with closing(found.db):
        yield found


def settings_of(app: App, **changed: Any) -> CaptureSettings:
    return CaptureSettings(name="shop", source=f"sqlite:///{app.path}", **changed)


@asynccontextmanager
async def capturing(app: App, **changed: Any) -> AsyncIterator[SqliteSource]:
    """A source that is ready to give changes."""
    source = SqliteSource(settings_of(app, **changed))
    await source.open()
    try:
        await source.prepare(await source.tables())
        yield source
    finally:
        await source.close()


async def received(source: SqliteSource, count: int) -> list[RowChanges]:
    """Changes, until there are so many."""
    found: list[RowChanges] = []
    async with asyncio.timeout(LIMIT):
        async for one in source.changes():
            found += one.changes
            if sum(map(len, found)) >= count:
                break
    return found


def flat(changes: Iterable[RowChanges]) -> list[tuple[str, Any, Any]]:
    """(op, before, after) of each change, in the order of positions."""
    rows = []
    for one in changes:
        positions = zip(one.commit.to_pylist(), one.place.to_pylist(), strict=True)
        assert one.before is not None
        parts = zip(one.op.to_pylist(), one.before.to_pylist(), one.after.to_pylist(), strict=True)
        rows += list(zip(positions, parts, strict=True))
    assert len({position for position, _ in rows}) == len(rows), "a position is used once"
    return [part for _, part in sorted(rows, key=lambda row: row[0])]


def folded(changes: Iterable[RowChanges], key: str = "id") -> dict[Any, Any]:
    """The table that changes make."""
    table: dict[Any, Any] = {}
    for op, before, after in flat(changes):
        if op == "d":
            table.pop(before[key], None)
        else:
            table[after[key]] = after
    return table


async def test_changes_arrive_in_order_with_what_was_before(app: App) -> None:
    async with capturing(app) as source:
        app.run(
            "INSERT INTO items VALUES (1, 'pen', 1.5), (2, 'cup', 4)",
            "UPDATE items SET price = 2.25 WHERE id = 1",
            "DELETE FROM items WHERE id = 2",
        )
        found = await received(source, 4)
    pen, cup = {"id": 1, "name": "pen"}, {"id": 2, "name": "cup", "price": Decimal("4.00")}
    assert flat(found) == [
        ("c", None, {**pen, "price": Decimal("1.50")}),
        ("c", None, cup),
        ("u", {**pen, "price": Decimal("1.50")}, {**pen, "price": Decimal("2.25")}),
        ("d", cup, None),
    ]
    (one,) = found
    assert one.commit.to_pylist() == sorted(set(one.commit.to_pylist()))
    assert one.number is not None
    assert one.total is not None
    assert (one.number.to_pylist(), one.total.to_pylist()) == ([1] * 4, [1] * 4)
    seconds = [abs((datetime.now(UTC) - time).total_seconds()) for time in one.time.to_pylist()]
    assert max(seconds) < 3600


async def test_what_is_rolled_back_never_appears(app: App) -> None:
    async with capturing(app) as source:
        app.run("BEGIN", "INSERT INTO items(name) VALUES ('ghost')", "ROLLBACK")
        app.run("BEGIN", "INSERT INTO items(name) VALUES ('a')", "SAVEPOINT s")
        app.run("INSERT INTO items(name) VALUES ('ghost')", "ROLLBACK TO s", "COMMIT")
        with pytest.raises(sqlite3.IntegrityError):
            app.run("INSERT INTO items(id, name) VALUES (7, 'ghost'), (1, 'ghost')")
        app.run("INSERT INTO items(name) VALUES ('b')")
        found = await received(source, 2)
    assert [after["name"] for _, _, after in flat(found)] == ["a", "b"]


async def test_a_key_change_is_a_deletion_and_a_new_row(app: App) -> None:
    async with capturing(app) as source:
        app.run("INSERT INTO items(id) VALUES (1)", "UPDATE items SET id = 9")
        found = await received(source, 3)
    assert [op for op, _, _ in flat(found)] == ["c", "d", "c"]
    (one,) = found
    assert one.place.to_pylist() == [1, 1, 2]
    assert one.commit[1] == one.commit[2]
    assert folded(found).keys() == {9}


async def test_confirmed_changes_are_deleted_and_their_numbers_are_not_used_again(app: App) -> None:
    async with capturing(app) as source:
        app.run("INSERT INTO items(id) VALUES (1), (2)")
        first = await received(source, 2)
        upto = max(one.commit.to_pylist()[-1] for one in first)
        await source.confirm(upto)
        assert (await source.lag()).details == {"changes": 0}
    async with capturing(app) as source:
        app.run("INSERT INTO items(id) VALUES (3)")
        second = await received(source, 1)
    assert [after["id"] for _, _, after in flat(second)] == [3]
    assert second[0].commit[0].as_py() > upto


async def test_changes_that_are_not_confirmed_come_again_with_the_same_positions(app: App) -> None:
    async with capturing(app) as source:
        app.run("INSERT INTO items(id) VALUES (1), (2)", "UPDATE items SET id = id + 10")
        first = await received(source, 6)
    async with capturing(app) as source:
        again = await received(source, 6)
    assert [one.commit for one in first] == [one.commit for one in again]
    assert [one.place for one in first] == [one.place for one in again]
    assert flat(first) == flat(again)


async def test_after_a_reset_numbers_are_larger_than_before(app: App) -> None:
    async with capturing(app) as source:
        app.run("INSERT INTO items(id) VALUES (1)")
        before = (await received(source, 1))[0].commit[0].as_py()
        await source.reset()
        left = app.rows("SELECT count(*) FROM sqlite_master WHERE name LIKE '\\_mill%' ESCAPE '\\'")
        assert left == [(0,)]
        app.run("INSERT INTO items(id) VALUES (2)")  # no trigger is in the way
        assert await source.prepare(await source.tables())
        assert not await source.prepare(await source.tables())
        app.run("INSERT INTO items(id) VALUES (3)")
        found = await received(source, 1)
    assert folded(found).keys() == {3}
    assert found[0].commit[0].as_py() > before


# -- values -------------------------------------------------------------------------------


async def test_every_value_arrives_exactly(app: App) -> None:
    app.run("CREATE TABLE v (id INTEGER PRIMARY KEY, i BIGINT, r REAL, t TEXT, b BLOB)")
    dice = random.Random(5)
    reals = [struct.unpack("<d", struct.pack("<Q", dice.getrandbits(64)))[0] for _ in range(300)]
    reals = [one for one in reals if one == one] + [0.1, -0.0, 5e-324, float("inf")]
    texts = ["", 'ü"\\\n\t', "a\x00b", "\U0001f600", "'; --", '{"r":"1"}']
    rows = [
        (
            dice.choice([2**63 - 1, -(2**63), 2**53 + 1, dice.getrandbits(62), None]),
            real,
            dice.choice(texts),
            dice.randbytes(dice.randrange(40)),
        )
        for real in reals
    ]
    async with capturing(app, tables=("v",)) as source:
        app.db.executemany("INSERT INTO v(i, r, t, b) VALUES (?, ?, ?, ?)", rows)
        found = await received(source, len(rows))
        async with source.snapshot() as view:
            (shape,) = await source.tables()
            batches = [batch async for batch, _ in view.rows(shape, None)]
    expected = [{"id": n, "i": i, "r": r, "t": t, "b": b} for n, (i, r, t, b) in enumerate(rows, 1)]
    assert [after for _, _, after in flat(found)] == expected
    assert pa.Table.from_batches(batches).to_pylist() == expected


async def test_declared_types_become_typed_values(app: App) -> None:
    app.run(
        "CREATE TABLE d (id INTEGER PRIMARY KEY, ok BOOLEAN, day DATE, at DATETIME, "
        "n NUMERIC(12, 3), any)"
    )
    async with capturing(app, tables=("d",)) as source:
        app.db.executemany(
            "INSERT INTO d(ok, day, at, n, any) VALUES (?, ?, ?, ?, ?)",
            [
                (1, "2024-02-29", "2024-02-29 12:30:00", "0.125", "x"),
                (0, 86_400, 1_700_000_000, 7, 12),
                (None, 2_460_369.5, "2024-02-29T12:30:00.25+02:00", None, b"\x01"),
                ("true", None, 2_460_370.25, 1e3, None),
            ],
        )
        found = [after for _, _, after in flat(await received(source, 4))]
    assert [row["ok"] for row in found] == [True, False, None, True]
    assert [row["day"] for row in found] == [
        *(date(2024, 2, 29), date(1970, 1, 2), date(2024, 2, 29), None)
    ]
    assert [row["at"] for row in found] == [
        datetime(2024, 2, 29, 12, 30, tzinfo=UTC),
        datetime(2023, 11, 14, 22, 13, 20, tzinfo=UTC),
        datetime(2024, 2, 29, 10, 30, 0, 250_000, tzinfo=UTC),
        datetime(2024, 2, 29, 18, tzinfo=UTC),
    ]
    assert [row["n"] for row in found] == [Decimal("0.125"), Decimal(7), None, Decimal(1000)]
    assert [row["any"] for row in found] == ["x", "12", "X'01'", None]


async def test_a_value_that_does_not_fit_names_its_column_and_the_way_out(app: App) -> None:
    async with capturing(app) as source:
        app.run(
            "INSERT INTO items VALUES (-2, 'a', 1), (-1, 'b', 2), (1, 'pen', 'cheap'), (3, '', 3)"
        )
        before = await received(source, 2)
        assert folded(before).keys() == {-2, -1}
        await source.confirm(before[0].commit[-1].as_py())
        with pytest.raises(errors.Unfit, match=r"items\.price.*decimal\(10,2\).*'cheap'.*text = "):
            await received(source, 1)
    as_text = {"items": TableSettings(text=("price",))}
    async with capturing(app, table=as_text) as source:
        app.run("INSERT INTO items VALUES (2, 'cup', 3.5)")
        found = await received(source, 3)
    assert [after["price"] for _, _, after in flat(found)] == ["cheap", "3", "3.5"]


# -- statements of SQLite -------------------------------------------------------------------


async def test_rows_that_replace_and_upsert_leave_the_same_table(app: App) -> None:
    app.run(
        "CREATE TABLE users (id INTEGER PRIMARY KEY, email TEXT COLLATE NOCASE UNIQUE, n INT)",
        "CREATE UNIQUE INDEX users_n ON users(n) WHERE n > 0",
    )
    async with capturing(app, tables=("users",)) as source:
        app.run(
            "INSERT INTO users VALUES (1, 'a', 1), (2, 'b', 2), (3, 'c', 3), (4, 'd', 4)",
            "REPLACE INTO users VALUES (1, 'a2', 1)",  # the same key
            "REPLACE INTO users VALUES (5, 'B', 5)",  # removes 2 by its email
            "REPLACE INTO users VALUES (6, 'c', 4)",  # removes 3 and 4
            "INSERT OR IGNORE INTO users VALUES (7, 'a2', 9)",
            "INSERT INTO users VALUES (8, 'a2', 8) ON CONFLICT(email) DO UPDATE SET n = 80",
            "INSERT INTO users VALUES (9, 'i', 9), (10, 'j', 10)",
            "UPDATE OR REPLACE users SET email = 'I' WHERE id = 10",  # removes 9
            "UPDATE OR REPLACE users SET id = 5 WHERE id = 10",
            "DELETE FROM users WHERE id = 1",
        )
        found = await received(source, 17)
    expected = {
        row[0]: dict(zip(("id", "email", "n"), row, strict=True))
        for row in app.rows("SELECT * FROM users")
    }
    assert folded(found) == expected
    deleted = [before["id"] for op, before, _ in flat(found) if op == "d"]
    assert deleted == [2, 3, 4, 9, 10, 1], "each once"


async def test_a_replaced_row_is_deleted_once_also_with_recursive_triggers(app: App) -> None:
    app.run("CREATE TABLE users (id INTEGER PRIMARY KEY, email TEXT UNIQUE)")
    app.run("PRAGMA recursive_triggers = ON")
    async with capturing(app, tables=("users",)) as source:
        app.run("INSERT INTO users VALUES (1, 'a')", "REPLACE INTO users VALUES (2, 'a')")
        found = await received(source, 3)
        assert len(app.rows("SELECT * FROM _millstream_changes_shop")) == 3
    assert [op for op, _, _ in flat(found)] == ["c", "d", "c"]


async def test_tables_without_rowid_generated_columns_and_cascades_are_captured(app: App) -> None:
    app.run(
        "PRAGMA foreign_keys = ON",
        'CREATE TABLE "odd "" name" ("a b" TEXT, n INT, twice INT AS (n * 2) STORED, '
        'thrice INT AS (n * 3), PRIMARY KEY ("a b", n)) WITHOUT ROWID',
        'CREATE TABLE child (id INTEGER PRIMARY KEY, "a b" TEXT, n INT, '
        'FOREIGN KEY ("a b", n) REFERENCES "odd "" name" ON DELETE CASCADE)',
    )
    async with capturing(app, tables=("odd*", "child")) as source:
        app.run(
            "INSERT INTO \"odd \"\" name\" VALUES ('x', 1), ('y', 2)",
            "INSERT INTO child VALUES (1, 'x', 1), (2, 'y', 2)",
            'DELETE FROM "odd "" name" WHERE n = 1',
            'DELETE FROM "odd "" name"',  # all rows: the shortcut must not be taken
        )
        found = await received(source, 8)
    odd = [one for one in found if one.table.name.startswith("odd")]
    assert odd[0].table.key == ("a b", "n")
    assert flat(odd)[0][2] == {"a b": "x", "n": 1, "twice": 2, "thrice": 3}
    assert folded([one for one in found if one.table.name == "child"]) == {}


async def test_a_table_with_many_columns_is_captured(app: App) -> None:
    names = [f"c{n}" for n in range(700)]
    app.run(f"CREATE TABLE wide (id INTEGER PRIMARY KEY, {', '.join(names)})")
    async with capturing(app, tables=("wide",)) as source:
        app.run("INSERT INTO wide(id, c0, c699) VALUES (1, 'first', 'last')")
        found = await received(source, 1)
    after = flat(found)[0][2]
    assert (after["c0"], after["c1"], after["c699"]) == ("first", None, "last")
