"""Captures of a real PostgreSQL at their edges: what is rare, large, or happens at a bad moment."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from functools import partial
from typing import Any

import pytest

from millstream import Mill
from millstream.cdc.capture import Capture
from millstream.cdc.postgres import collector
from millstream.cdc.settings import CaptureSettings, TableSettings
from millstream.cdc.sources import open_source
from millstream.cdc.status import CaptureStatus
from millstream.cdc.table_topic import TableTopic
from millstream.errors import BreakingChange, CaptureError, ConfigError
from millstream.settings import Secret
from tests.integration.cdc.captures import (
    capturing,
    events_of,
    folded,
    incompressible,
    settings_for,
    source_rows,
    until,
)
from tests.postgres import Database, running_postgres


async def once(mill: Mill, settings: CaptureSettings) -> None:
    """Capture until it has caught up."""
    async with asyncio.timeout(60):
        await Capture(mill, open_source(settings), settings).run(once=True)


async def interrupted(
    mill: Mill, settings: CaptureSettings, monkeypatch: pytest.MonkeyPatch, batches: int = 1
) -> None:
    """Run a capture whose snapshot is cut off after so many stored batches of rows."""
    write, count = TableTopic.write_rows, 0

    async def some(self: TableTopic, rows: Any, last: list[str]) -> None:
        nonlocal count
        await write(self, rows, last)
        await self.writer.flush()
        count += 1
        if count >= batches:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(TableTopic, "write_rows", some)
        with pytest.raises((KeyboardInterrupt, asyncio.CancelledError)):
            await Capture(mill, open_source(settings), settings).run()


async def test_what_stopped_a_capture_stops_it_again_and_is_never_confirmed(
    mill: Mill, postgres: Database
) -> None:
    postgres.execute("CREATE TABLE items (id int PRIMARY KEY)", "INSERT INTO items VALUES (1)")
    settings = settings_for(postgres)
    async with capturing(mill, settings) as running:
        await running.streaming()
        postgres.execute("TRUNCATE items", "INSERT INTO items VALUES (2)")
        await running.failed()
    for _ in range(2):
        async with capturing(mill, settings) as running:
            error = await running.failed()
        assert "public.items was truncated" in str(error)
    settings = settings_for(postgres, truncate="event")
    await once(mill, settings)
    assert folded(await events_of(mill, "items")) == source_rows(postgres, "items")


async def test_a_column_that_was_added_while_no_capture_ran_is_captured(
    mill: Mill, postgres: Database
) -> None:
    postgres.execute("CREATE TABLE items (id int PRIMARY KEY)", "INSERT INTO items VALUES (1)")
    settings = settings_for(postgres)
    await once(mill, settings)
    postgres.execute(
        "ALTER TABLE items ADD COLUMN extra text", "INSERT INTO items VALUES (2, 'new')"
    )
    await once(mill, settings)
    events = await events_of(mill, "items")
    assert events[-1]["value"]["after"] == {"id": 2, "extra": "new"}


async def test_a_column_that_was_renamed_while_no_capture_ran_stops_it(
    mill: Mill, postgres: Database
) -> None:
    postgres.execute("CREATE TABLE items (id int PRIMARY KEY, n int)")
    settings = settings_for(postgres)
    await once(mill, settings)
    postgres.execute("ALTER TABLE items RENAME COLUMN n TO m", "INSERT INTO items VALUES (2, 7)")
    with pytest.raises(BreakingChange, match="renamed from 'n'"):
        await once(mill, settings)


async def test_a_table_that_is_dropped_and_made_again_begins_again(
    mill: Mill, postgres: Database
) -> None:
    make = "CREATE TABLE items (id int PRIMARY KEY, n int)"
    postgres.execute(make, "INSERT INTO items VALUES (1, 1), (2, 2)")
    settings = settings_for(postgres, heartbeat=0.2)
    async with capturing(mill, settings) as running:
        await running.streaming()
        postgres.execute("DROP TABLE items", make, "INSERT INTO items VALUES (2, 5), (3, 6)")
        events = await running.caught_up("items", 2 + 1 + 2)
        assert folded(events) == source_rows(postgres, "items")
    # The same while no capture runs.
    postgres.execute("DROP TABLE items", make, "INSERT INTO items VALUES (9, 9)")
    await once(mill, settings)
    assert folded(await events_of(mill, "items")) == source_rows(postgres, "items")
    postgres.execute("INSERT INTO items VALUES (10, 9)")
    await once(mill, settings)
    assert folded(await events_of(mill, "items")) == source_rows(postgres, "items")


async def test_a_killed_snapshot_continues_with_keys_longer_than_a_note(
    mill: Mill, postgres: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millstream.cdc.postgres.snapshot.BATCH_BYTES", 64 * 1024)
    postgres.execute(
        "CREATE TABLE items (id text PRIMARY KEY, n int)",
        "INSERT INTO items SELECT lpad(g::text, 6, '0') || repeat('\u00e4\n', 600), g "
        "FROM generate_series(1, 500) g",
    )
    settings = settings_for(postgres)
    await interrupted(mill, settings, monkeypatch, 2)
    stored = len(await events_of(mill, "items"))
    assert 0 < stored < 500
    postgres.execute("UPDATE items SET n = -n WHERE n IN (1, 499)")
    await once(mill, settings)
    events = await events_of(mill, "items")
    assert folded(events) == source_rows(postgres, "items")
    assert [event["value"]["op"] for event in events] == [*["r"] * 500, "u"]


async def test_a_table_truncated_between_two_attempts_of_its_snapshot_folds_to_the_table(
    mill: Mill, postgres: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millstream.cdc.postgres.snapshot.BATCH_BYTES", 16 * 1024)
    postgres.execute(
        "CREATE TABLE items (id int PRIMARY KEY, n int)",
        "INSERT INTO items SELECT g, g FROM generate_series(1, 5000) g",
    )
    settings = settings_for(postgres, truncate="event")
    await interrupted(mill, settings, monkeypatch)
    postgres.execute(
        "TRUNCATE items", "INSERT INTO items VALUES (1, 1)", "INSERT INTO items VALUES (4999, 1)"
    )
    await once(mill, settings)
    assert folded(await events_of(mill, "items")) == source_rows(postgres, "items")


async def test_topics_of_another_database_are_not_written_on_in_silence(
    mill: Mill, postgres: Database
) -> None:
    make = "CREATE TABLE items (id int PRIMARY KEY)"
    postgres.execute(make, "INSERT INTO items VALUES (1)")
    postgres.execute("SELECT pg_switch_wal()", "SELECT pg_switch_wal()", "CHECKPOINT")
    settings = settings_for(postgres)
    await once(mill, settings)
    await Capture(mill, open_source(settings), settings).reset(keep_topics=True)
    with running_postgres() as server:
        server.create_database("other")
        other = Database(server, "other")
        other.execute(make, "INSERT INTO items VALUES (2)")
        with pytest.raises(CaptureError, match="cdc reset"):
            await once(mill, settings_for(other))


async def test_a_large_key_that_an_update_did_not_touch_stays_the_key(
    mill: Mill, postgres: Database
) -> None:
    postgres.execute(
        "CREATE TABLE items (a int, b text, n int, body text, PRIMARY KEY (a, b))",
        "ALTER TABLE items ALTER COLUMN b SET STORAGE EXTERNAL",
        f"INSERT INTO items VALUES (1, {incompressible(2_500)}, 0, {incompressible(8_000)})",
    )
    async with capturing(mill, settings_for(postgres)) as running:
        await running.streaming()
        postgres.execute("UPDATE items SET n = 1", "UPDATE items SET a = 2")
        events = await running.caught_up("items", 4)
    assert [e["value"]["op"] for e in events] == ["r", "u", "d", "c"]
    assert events[0]["key"] == events[1]["key"] == events[2]["key"]
    assert [*folded(events).values()] == [*source_rows(postgres, "items", "a").values()]


async def test_names_may_have_capitals_spaces_quotes_percent_signs_and_any_letters(
    mill: Mill, postgres: Database
) -> None:
    table = '"My Schema"."Ta ""ble %s \u00fc"'
    columns = (
        "Up Per",
        'qu"ote',
        "o'brien",
        "gr\u00f6\u00dfe \u2603",
        "[0]",
        "{x}",
        "$1",
        "%",
        "op",
    )
    listed = ", ".join('"' + name.replace('"', '""') + '" text' for name in columns)
    values = ", ".join(f"'{number}'" for number in range(len(columns)))
    postgres.execute(
        'CREATE SCHEMA "My Schema"',
        f'CREATE TABLE {table} ("Id %s" text PRIMARY KEY, {listed}, "bo %s dy" text)',
        f"INSERT INTO {table} VALUES ('k', {values}, {incompressible(9_000)})",
    )
    own = TableSettings(topic="odd", mask={"[0]": "redact"})
    settings = settings_for(postgres, table={'My Schema.Ta "ble %s \u00fc': own})
    async with capturing(mill, settings) as running:
        await running.streaming()
        postgres.execute(
            f"UPDATE {table} SET \"op\" = 'new'",
            f"UPDATE {table} SET \"Id %s\" = 'z%s'",
        )
        events = await running.caught_up("odd", 4)
        (wanted,) = source_rows(postgres, table, "Id %s").values()
        assert folded(events) == {"z%s": {**wanted, "[0]": "***"}}
        postgres.execute(f"DELETE FROM {table}")
        events = await running.caught_up("odd", 5)
    assert folded(events) == {}


async def test_a_hash_of_an_array_is_refused_and_a_truncation_of_rows_named(
    mill: Mill, postgres: Database
) -> None:
    postgres.execute("CREATE TABLE items (id int PRIMARY KEY, tags int[])")
    own = TableSettings(mask={"tags": "hash"})
    settings = settings_for(postgres, table={"public.items": own}, mask_key=Secret("salt"))
    with pytest.raises(ConfigError, match="'hash' is for single values"):
        await once(mill, settings)
    postgres.execute("ALTER TABLE items DROP COLUMN tags")
    await Capture(mill, open_source(settings), settings_for(postgres)).reset()
    async with capturing(mill, settings_for(postgres, format="rows", truncate="event")) as running:
        await running.streaming()
        postgres.execute("INSERT INTO items VALUES (1)", "TRUNCATE items")
        error = await running.failed()
    assert isinstance(error, CaptureError)
    assert "public.items was truncated" in str(error)


@pytest.mark.parametrize(
    "address",
    [
        "postgresql://ann:sec%zzret@localhost/db",
        "postgresql://ann:sec ret@localhost/db",
        "postgresql://ann:secret@[::1/db",
    ],
)
async def test_an_address_that_cannot_be_read_is_refused_without_its_password(
    address: str,
) -> None:
    source = open_source(CaptureSettings(name="shop", source=address))
    with pytest.raises(ConfigError, match="not an address of PostgreSQL") as caught:
        await source.open()
    assert "sec" not in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("when", ["snapshot", "stream", "whole"])
async def test_a_row_up_to_the_largest_message_is_captured_and_a_larger_one_named(
    mill: Mill, postgres: Database, when: str
) -> None:
    postgres.execute("CREATE TABLE items (id int PRIMARY KEY, body text)")
    most = mill.connection.info.max_payload
    statements = (
        "INSERT INTO items VALUES (1, 'a')",
        f"INSERT INTO items VALUES (2, repeat('b', {most - 100_000}))",
        f"INSERT INTO items VALUES (3, repeat('c', {most}))",
    )
    if when == "snapshot":
        postgres.execute(*statements)
    settings = settings_for(postgres, whole_transactions=when == "whole")
    async with capturing(mill, settings) as running:
        if when != "snapshot":
            await running.streaming()
            postgres.execute(*statements)
        error = await running.failed()
    assert isinstance(error, CaptureError)
    assert "public.items: the event of the row with key '3'" in str(error)
    # What the error says: leave the column out.
    own = TableSettings(exclude=("body",))
    if when == "stream":
        assert len(await events_of(mill, "items")) == 2
        await once(mill, settings_for(postgres, table={"public.items": own}))
        keys = [event["key"] for event in await events_of(mill, "items")]
        assert keys == [b"1", b"2", b"3"]


async def test_many_large_transactions_are_handed_over_in_small_parts(
    mill: Mill, postgres: Database
) -> None:
    postgres.execute("CREATE TABLE items (id int PRIMARY KEY, body text)")
    source = open_source(settings_for(postgres))
    await source.open()
    try:
        await source.prepare(await source.tables())
        body = "repeat('x', 1000000)"
        postgres.execute(*(f"INSERT INTO items VALUES ({n}, {body})" for n in range(20)))
        sizes = []
        found: Any = source.changes()
        async with asyncio.timeout(60), aclosing(found) as changes:
            async for received in changes:
                sizes.append(sum(len(one) for one in received.changes))
                if sum(sizes) == 20:
                    break
    finally:
        await source.close()
    assert max(sizes) <= collector.OPEN_BYTES // 1_000_000 + 1


async def test_a_row_that_moved_from_a_column_dropped_since_does_not_stop_a_capture(
    mill: Mill, postgres: Database
) -> None:
    postgres.execute(
        "CREATE TABLE docs (id int PRIMARY KEY, a text, b text)",
        f"INSERT INTO docs VALUES (1, {incompressible(9_000)}, {incompressible(9_000)})",
    )
    settings = settings_for(postgres)
    await once(mill, settings)
    postgres.execute(
        "UPDATE docs SET id = 2", "ALTER TABLE docs DROP COLUMN b", "INSERT INTO docs VALUES (3)"
    )
    await once(mill, settings)
    (row,) = postgres.rows("SELECT a FROM docs WHERE id = 2")
    rows = folded(await events_of(mill, "docs"))
    assert rows["2"] == {"id": 2, "a": row[0], "b": None}
    assert set(rows) == {"2", "3"}


@pytest.mark.parametrize("state", ["checking", "snapshot"])
async def test_a_capture_that_waits_for_open_transactions_can_be_stopped(
    mill: Mill, postgres: Database, state: str
) -> None:
    postgres.execute("CREATE TABLE items (id int PRIMARY KEY)", "INSERT INTO items VALUES (1)")
    settings = settings_for(postgres)
    if state == "snapshot":
        source = open_source(settings)
        await source.open()
        await source.prepare(await source.tables())
        await source.close()
    with postgres.connect(autocommit=False) as connection:
        connection.execute("INSERT INTO items VALUES (2)")
        waits = "SELECT 1 FROM pg_stat_activity WHERE wait_event = 'transactionid'"
        async with asyncio.timeout(20), capturing(mill, settings) as running:
            await until(lambda: postgres.rows(waits), "it waits")
            assert running.capture.status().state == state
        assert running.capture.status().state == "stopped"
        await until(lambda: not postgres.rows(waits), "nothing waits any more")
        connection.commit()
    await once(mill, settings)
    assert folded(await events_of(mill, "items")) == source_rows(postgres, "items")


async def test_a_table_that_cannot_be_captured_does_not_stop_the_others(
    mill: Mill, postgres: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millstream.cdc.capture.LAG_SECONDS", 0.2)
    postgres.execute("CREATE TABLE a (id int PRIMARY KEY)", "CREATE SCHEMA other")
    async with capturing(mill, settings_for(postgres, heartbeat=0.2)) as running:
        await running.streaming()
        status = running.capture.status
        for table, problem in (
            ("other.a (id int PRIMARY KEY)", "the same topic as"),
            ('b (id int PRIMARY KEY, "a.b" int)', "has a dot"),
        ):
            postgres.execute(f"CREATE TABLE {table}")
            await until(partial(_is_alarm, status, problem), problem)
            postgres.execute(f"DROP TABLE {table.partition(' ')[0]}")
        postgres.execute("INSERT INTO a VALUES (1)")
        await running.caught_up("a", 1)


async def test_a_cut_off_snapshot_that_changes_have_overtaken_begins_again(
    mill: Mill, postgres: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millstream.cdc.postgres.snapshot.BATCH_BYTES", 16 * 1024)
    postgres.execute(
        "CREATE TABLE items (id int PRIMARY KEY, n int)",
        "INSERT INTO items SELECT g, g FROM generate_series(1, 3000) g",
    )
    await interrupted(mill, settings_for(postgres), monkeypatch)
    postgres.execute("INSERT INTO items VALUES (5000, 1)")
    await once(mill, settings_for(postgres, snapshot=False))
    await once(mill, settings_for(postgres))
    assert folded(await events_of(mill, "items")) == source_rows(postgres, "items")


async def test_a_transaction_that_is_open_while_its_table_is_added_is_captured_once(
    mill: Mill, postgres: Database
) -> None:
    postgres.execute("CREATE TABLE a (id int PRIMARY KEY)", "INSERT INTO a VALUES (1)")
    settings = settings_for(postgres, heartbeat=0.2)
    async with capturing(mill, settings) as running:
        await running.streaming()
        with postgres.connect(autocommit=False) as connection:
            postgres.execute("CREATE TABLE b (id int PRIMARY KEY, n int)")
            connection.execute("INSERT INTO b VALUES (1, 1)")  # before the publication has it
            published = "SELECT 1 FROM pg_publication_tables WHERE tablename = 'b'"
            await until(lambda: postgres.rows(published), "the table is published")
            connection.execute("INSERT INTO b VALUES (2, 2)")
            connection.execute("INSERT INTO a VALUES (2)")
            connection.commit()
        postgres.execute("UPDATE b SET n = 7 WHERE id = 1")
        await until(
            lambda: "public.b" in {t.table for t in running.capture.status().tables}, "b is open"
        )
        await running.streaming()
        postgres.execute("INSERT INTO b VALUES (3, 3)", "INSERT INTO a VALUES (3)")
        await running.caught_up("a", 3)

        async def same() -> bool:
            return folded(await events_of(mill, "b")) == source_rows(postgres, "b")

        await until(same, "b is the same")
    rows = [e["key"] for e in await events_of(mill, "b") if e["value"]["op"] in "rc"]
    assert len(rows) == len(set(rows)) == 3


def _is_alarm(status: Callable[[], CaptureStatus], problem: str) -> bool:
    return any(problem in text for text in status().alarms)
