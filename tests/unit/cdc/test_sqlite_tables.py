"""Snapshots, changed tables and keys of SQLite as a source."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from millstream import errors
from millstream.cdc.settings import TableSettings
from millstream.cdc.sqlite import source as module
from millstream.cdc.sqlite.source import SqliteSource
from tests.unit.cdc.test_sqlite_source import (
    App,
    capturing,
    flat,
    folded,
    received,
    settings_of,
)


@pytest.fixture
def app(tmp_path: Path) -> Iterable[App]:
    found = App(tmp_path / "shop.db", "CREATE TABLE items (id INTEGER PRIMARY KEY, name TEXT)")
    with closing(found.db):
        yield found


async def keys_of(
    source: SqliteSource, view: Any, after: list[str] | None = None
) -> list[tuple[Any, ...]]:
    (shape,) = await source.tables()
    batches = [batch async for batch, _ in view.rows(shape, after)]
    if not batches:
        return []
    rows = pa.Table.from_batches(batches).select(list(shape.key)).to_pylist()
    return [tuple(row.values()) for row in rows]


@pytest.mark.parametrize("mode", ["wal", "delete"])
async def test_a_snapshot_shows_one_moment_and_changes_follow_it(
    app: App, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SNAPSHOT_ROWS", 10)
    monkeypatch.setattr(module, "_FETCH", 10)
    app.run(f"PRAGMA journal_mode = {mode}")
    app.db.executemany("INSERT INTO items VALUES (?, 'old')", [(n,) for n in range(100)])
    async with capturing(app) as source:
        app.run("INSERT INTO items VALUES (100, 'before')")
        async with source.snapshot() as view:
            (shape,) = await source.tables()
            rows = []
            async for batch, last in view.rows(shape, None):
                assert last == [str(batch.column("id")[-1])]
                assert batch.num_rows <= 10
                rows += batch.to_pylist()
                # The application commits while the snapshot is open, and does not wait.
                app.run("INSERT INTO items(name) VALUES ('after')", "UPDATE items SET name = 'new'")
        assert [row["id"] for row in rows] == list(range(101))
        assert {row["name"] for row in rows} == {"old", "before"}
        found = await received(source, 1 + 11 + sum(range(102, 113)))
    in_snapshot = [commit for one in found for commit in one.commit.to_pylist()]
    assert sum(commit < view.point for commit in in_snapshot) == 1
    assert view.point not in [commit - 1 for commit in in_snapshot]
    assert {key: row["name"] for key, row in folded(found).items()} == dict(
        app.rows("SELECT * FROM items")
    )


@pytest.mark.parametrize(
    ("columns", "values"),
    [
        ("k INTEGER PRIMARY KEY", [(n,) for n in (-5, 9, 10, 100, 2**62)]),
        ("k TEXT PRIMARY KEY COLLATE NOCASE", [("B",), ("Z",), ("a",), ("é",), ("\U0001f600",)]),
        ("k BLOB PRIMARY KEY", [(b"",), (b"\x00",), (b"\x00\x01",), (b"\xff",)]),
        ("k NUMERIC PRIMARY KEY", [(1,), (10,), (2,), ("x",)]),
        ("a TEXT, b INT, PRIMARY KEY (a, b)", [("a", 2), ("a", 10), ("b", 1), ("b", 3)]),
        ("a TEXT, b INT, PRIMARY KEY (b, a)) WITHOUT ROWID --", [("b", 1), ("a", 2), ("c", 2)]),
    ],
)
async def test_a_snapshot_goes_on_after_any_key_in_the_order_of_is_after(
    app: App, columns: str, values: list[tuple[Any, ...]]
) -> None:
    app.run(
        f"CREATE TABLE k ({columns}\n)" if "--" not in columns else f"CREATE TABLE k ({columns}"
    )
    marks = ", ".join("?" for _ in values[0])
    app.db.executemany(f"INSERT INTO k VALUES ({marks})", values[::-1])
    async with capturing(app, tables=("k",)) as source, source.snapshot() as view:
        (shape,) = await source.tables()
        batches = [batch async for batch, _ in view.rows(shape, None)]
        everything = batches[0].select(list(shape.key))
        ordered = await keys_of(source, view)
        names = [column.name for column in shape.columns]
        place = [names.index(name) for name in shape.key]
        wanted = [tuple(row[i] for i in place) for row in values]
        assert [tuple(map(str, key)) for key in ordered] == [tuple(map(str, k)) for k in wanted]
        for number, key in enumerate(ordered):
            edge = [one.hex() if isinstance(one, bytes) else str(one) for one in key]
            assert await keys_of(source, view, edge) == ordered[number + 1 :]
            after = source.is_after(shape, everything, edge).to_pylist()
            assert after == [False] * (number + 1) + [True] * (len(ordered) - number - 1)


# -- changed tables ---------------------------------------------------------------------------


async def test_an_added_column_arrives_also_for_changes_made_before_it_was_noticed(
    app: App,
) -> None:
    async with capturing(app) as source:
        app.run("INSERT INTO items VALUES (1, 'a'), (2, 'b'), (3, 'c')")
    # No capture runs.
    app.run(
        "ALTER TABLE items ADD COLUMN size INT",
        "UPDATE items SET size = 7 WHERE id = 1",
        "INSERT INTO items VALUES (4, 'd', 8)",
        "DELETE FROM items WHERE id = 3",
    )
    async with capturing(app) as source:
        app.run("UPDATE items SET size = 9 WHERE id = 2")
        found = await received(source, 9)
    assert [len(one.table.columns) for one in found[:2]] == [2, 3]
    sizes = {key: row.get("size") for key, row in folded(found).items()}
    assert sizes == {1: 7, 2: 9, 4: 8}


async def test_a_running_capture_follows_added_and_renamed_columns(app: App) -> None:
    async with capturing(app) as source:
        async with asyncio.timeout(30):
            stream = source.changes()
            app.run("INSERT INTO items VALUES (1, 'a')")
            first = (await anext(stream)).changes
            app.run("ALTER TABLE items ADD COLUMN size INT", "UPDATE items SET size = 1")
            seen = [*first]
            while not any("size" in row for _, _, row in flat(seen) if row):
                seen += (await anext(stream)).changes
            app.run("ALTER TABLE items RENAME COLUMN size TO volume", "UPDATE items SET volume = 2")
            while not any(row.get("volume") == 2 for _, _, row in flat(seen) if row):
                seen += (await anext(stream)).changes
            await stream.aclose()
    assert flat(seen)[-1][2] == {"id": 1, "name": "a", "volume": 2}


async def test_a_captured_column_can_be_dropped_after_it_was_excluded(app: App) -> None:
    app.run("ALTER TABLE items ADD COLUMN secret TEXT")
    async with capturing(app):
        with pytest.raises(sqlite3.OperationalError, match="no such column"):
            app.run("ALTER TABLE items DROP COLUMN secret")
    without = {"items": TableSettings(exclude=("secret",))}
    async with capturing(app, table=without) as source:
        app.run("INSERT INTO items VALUES (1, 'a', 'hidden')")
        app.run("ALTER TABLE items DROP COLUMN secret")
        found = await received(source, 1)
    assert flat(found) == [("c", None, {"id": 1, "name": "a"})]


async def test_a_table_that_was_dropped_and_created_again_is_a_gap(app: App) -> None:
    async with capturing(app):
        pass
    app.run(
        "CREATE TABLE other (id INTEGER PRIMARY KEY, name TEXT)",
        "DROP TABLE items",
        "ALTER TABLE other RENAME TO items",
        "INSERT INTO items VALUES (1, 'unseen')",
    )
    with pytest.raises(errors.SourceLost, match=r"trigger .* of table 'items' is gone"):
        async with capturing(app):
            pass


async def test_a_table_that_was_left_out_for_a_while_is_a_gap(app: App) -> None:
    app.run("CREATE TABLE other (id INTEGER PRIMARY KEY)")
    async with capturing(app):
        pass
    async with capturing(app, tables=("items",)) as source:
        app.run("INSERT INTO other VALUES (1)", "INSERT INTO items VALUES (1, 'a')")
        assert [one.table.name for one in await received(source, 1)] == ["items"]
    with pytest.raises(errors.SourceLost, match="left out of the capture"):
        async with capturing(app):
            pass


async def test_a_database_that_is_older_than_the_topics_is_refused(app: App) -> None:
    async with capturing(app) as source:
        app.run("INSERT INTO items VALUES (1, 'a')")
        last = (await received(source, 1))[0].commit[-1].as_py()
        source.start_at(last)
        await received(source, 1)
        source.start_at(last + 2)
        with pytest.raises(errors.SourceLost, match="restored, or has lost commits"):
            await received(source, 1)


# -- what can be captured -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("table", "own", "message"),
    [
        ("t (a TEXT)", TableSettings(), "no primary key"),
        ("t (r REAL PRIMARY KEY)", TableSettings(), "no exact text"),
        ("t (a TEXT UNIQUE)", TableSettings(key=("a",)), "may be null"),
        ("t (a TEXT NOT NULL)", TableSettings(key=("a",)), "no unique index"),
        ("t (a INTEGER PRIMARY KEY)", TableSettings(exclude=("b",)), "no column 'b'"),
    ],
)
async def test_a_table_that_cannot_be_captured_is_found_by_check_with_a_way_out(
    app: App, table: str, own: TableSettings, message: str
) -> None:
    app.run(f"CREATE TABLE {table}")
    source = SqliteSource(settings_of(app, table={"t": own}))
    await source.open()
    try:
        faults = [one for one in await source.check() if not one.ok]
        assert [one.subject for one in faults] == ["table t"]
        assert message in faults[0].text
        assert faults[0].fatal
        refused = [shape for shape in await source.tables() if shape.name == "t"]
        assert not refused[0].columns
        with pytest.raises(errors.ConfigError, match=message):
            await source.prepare(refused)
        nothing = "SELECT count(*) FROM sqlite_master WHERE name LIKE '%millstream%'"
        assert app.rows(nothing) == [(0,)]
    finally:
        await source.close()


async def test_unique_columns_that_are_not_null_can_be_the_key(app: App) -> None:
    app.run("CREATE TABLE t (a TEXT NOT NULL, b INT NOT NULL, c, UNIQUE (a, b))")
    own = {"t": TableSettings(key=("a", "b"))}
    async with capturing(app, tables=("t",), table=own) as source:
        app.run("INSERT INTO t VALUES ('x', 1, 2)", "UPDATE t SET b = 3")
        found = await received(source, 3)
    assert [op for op, _, _ in flat(found)] == ["c", "d", "c"]


async def test_a_missing_file_is_not_created(tmp_path: Path) -> None:
    source = SqliteSource(settings_of(App(tmp_path / "a.db")))
    (tmp_path / "a.db").unlink()
    with pytest.raises(errors.ConfigError, match="there is no SQLite database"):
        await source.open()
    assert not (tmp_path / "a.db").exists()


async def test_a_lock_of_the_application_is_waited_for(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BUSY_SECONDS", 0.05)
    app.run("PRAGMA journal_mode = delete")
    async with capturing(app) as source:
        app.run("INSERT INTO items VALUES (1, 'a')", "BEGIN EXCLUSIVE")
        waiting = asyncio.create_task(received(source, 1))
        with pytest.raises(errors.SourceUnreachable, match="locked by another process"):
            await source.lag()
        app.run("COMMIT")
        assert folded(await waiting).keys() == {1}
