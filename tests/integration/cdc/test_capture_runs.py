"""How captures of a real PostgreSQL are run: begun, continued, stopped, reset, watched."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from millstream import Mill
from millstream.cdc.capture import Capture
from millstream.cdc.sources import open_source
from millstream.errors import ConfigError, SourceLost
from tests.integration.cdc.captures import (
    capturing,
    events_of,
    folded,
    settings_for,
    source_rows,
    until,
)
from tests.postgres import Database, running_postgres


async def test_a_lost_slot_is_a_clear_error_with_a_way_back(mill: Mill, postgres: Database) -> None:
    postgres.execute("CREATE TABLE items (id int PRIMARY KEY)", "INSERT INTO items VALUES (1), (2)")
    settings = settings_for(postgres)
    async with capturing(mill, settings) as running:
        await running.streaming()
    postgres.execute(
        "SELECT pg_drop_replication_slot('millstream_shop')",
        "DELETE FROM items WHERE id = 1",
        "INSERT INTO items VALUES (3)",
    )
    for _ in range(2):  # it does not go on by itself the second time
        async with capturing(mill, settings) as running:
            error = await running.failed()
        assert isinstance(error, SourceLost)
        assert "cdc reset" in str(error)
    async with capturing(mill, settings) as running:
        await running.failed()
        await running.capture.reset(keep_topics=True)
    async with capturing(mill, settings) as running:
        events = await running.caught_up("items", 2 + 1 + 2)
    assert [event["value"]["op"] for event in events] == ["r", "r", "t", "r", "r"]
    assert folded(events) == source_rows(postgres, "items")


async def test_a_table_that_is_added_later_gets_its_own_snapshot(
    mill: Mill, postgres: Database
) -> None:
    postgres.execute("CREATE TABLE a (id int PRIMARY KEY)", "INSERT INTO a VALUES (1)")
    async with capturing(mill, settings_for(postgres)) as running:
        await running.streaming()
    postgres.execute(
        "CREATE TABLE b (id int PRIMARY KEY)",
        "INSERT INTO b VALUES (1)",
        "INSERT INTO a VALUES (2)",
    )
    async with capturing(mill, settings_for(postgres)) as running:
        await running.streaming()
        postgres.execute("INSERT INTO b VALUES (2)")
        a, b = await running.caught_up("a", 2), await running.caught_up("b", 2)
    assert [event["value"]["op"] for event in (*a, *b)] == ["r", "c", "r", "c"]


async def test_a_table_that_is_made_while_it_runs_is_captured_and_one_without_a_key_is_not(
    mill: Mill, postgres: Database
) -> None:
    postgres.execute("CREATE TABLE a (id int PRIMARY KEY)", "INSERT INTO a VALUES (1)")
    async with capturing(mill, settings_for(postgres, heartbeat=0.2)) as running:
        await running.streaming()
        postgres.execute("CREATE TABLE b (id int PRIMARY KEY)", "INSERT INTO b VALUES (1)")
        await running.caught_up("b", 1)
        postgres.execute("CREATE TABLE c (n int)", "INSERT INTO a VALUES (2)")
        await running.caught_up("a", 2)
        alarms = running.capture.status
        await until(lambda: any("public.c" in text for text in alarms().alarms), "an alarm")
        postgres.execute("INSERT INTO b VALUES (2)")
        events = await running.caught_up("b", 2)
    assert [event["value"]["op"] for event in events] == ["r", "c"]


async def test_a_capture_that_runs_once_ends_when_it_has_caught_up(
    mill: Mill, postgres: Database
) -> None:
    postgres.execute("CREATE TABLE a (id int PRIMARY KEY)", "INSERT INTO a VALUES (1)")
    settings = settings_for(postgres)
    for number in (2, 3):
        async with asyncio.timeout(60):
            await Capture(mill, open_source(settings), settings).run(once=True)
        assert len(await events_of(mill, "a")) == number - 1
        postgres.execute(f"INSERT INTO a VALUES ({number})")


async def test_an_idle_table_does_not_keep_the_log_of_its_neighbours(
    mill: Mill, postgres: Database
) -> None:
    postgres.execute("CREATE TABLE idle (id int PRIMARY KEY)", "CREATE TABLE noise (t text)")
    async with capturing(mill, settings_for(postgres, tables=("public.idle",))) as running:
        await running.streaming()
        postgres.execute("INSERT INTO noise SELECT repeat('n', 200) FROM generate_series(1, 2000)")
        (end,) = postgres.rows("SELECT pg_current_wal_lsn()::text")
        confirmed = (
            "SELECT 1 FROM pg_replication_slots WHERE slot_name = 'millstream_shop' AND "
            f"confirmed_flush_lsn >= '{end[0]}'"
        )
        await until(lambda: postgres.rows(confirmed), "the slot moves on")
        # The topic knows that nothing has changed up to there.
        high, low = end[0].split("/")
        wanted = int(high, 16) << 32 | int(low, 16)
        table = running.capture.status().tables[0]
        await until(
            lambda: int((table.position or "0:0").partition(":")[0]) >= wanted, "a heartbeat"
        )


async def test_a_second_capture_of_the_same_name_waits_and_harms_nothing(
    mill: Mill, postgres: Database
) -> None:
    postgres.execute("CREATE TABLE items (id int PRIMARY KEY)")
    settings = settings_for(postgres)
    async with capturing(mill, settings) as first:
        await first.streaming()
        async with capturing(mill, settings) as second:
            await until(lambda: second.capture.status().error, "it says why it waits")
            assert "in use" in (second.capture.status().error or "")
            postgres.execute("INSERT INTO items VALUES (1)")
            await first.caught_up("items", 1)


async def test_settings_of_another_format_or_topic_are_refused(
    mill: Mill, postgres: Database
) -> None:
    postgres.execute("CREATE TABLE items (id int PRIMARY KEY)")
    settings = settings_for(postgres)
    async with capturing(mill, settings) as running:
        await running.streaming()
    rows = dataclasses.replace(settings, format="rows")
    for changed in (rows, dataclasses.replace(settings, topic="other-{table}")):
        async with capturing(mill, changed) as running:
            assert isinstance(await running.failed(), ConfigError)


async def test_an_alarm_comes_before_the_source_keeps_more_log_than_it_may(
    mill: Mill, postgres: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millstream.cdc.capture.LAG_SECONDS", 0.1)
    postgres.execute("CREATE TABLE a (id int PRIMARY KEY)", "CREATE TABLE noise (t text)")
    settings = settings_for(postgres, tables=("public.a",), log_budget=100_000)
    async with capturing(mill, settings) as running:
        await running.streaming()
        status = running.capture.status
        await until(lambda: status().lag.bytes is not None, "the lag is known")
        # What is confirmed is kept until the next checkpoint all the same.
        postgres.execute("INSERT INTO noise SELECT repeat('n', 200) FROM generate_series(1, 2000)")
        await until(lambda: status().alarms, "an alarm")
        assert "of 100,000 that it may" in status().alarms[0]
        assert (status().lag.kept_bytes or 0) > 80_000
        assert status().lag.seconds is not None


async def test_log_that_the_server_dropped_is_an_error_with_a_way_back(mill: Mill) -> None:
    with running_postgres(max_slot_wal_keep_size="1MB", min_wal_size="32MB") as server:
        postgres = Database(server, "postgres")
        postgres.execute("CREATE TABLE a (id int PRIMARY KEY)", "INSERT INTO a VALUES (1)")
        settings = settings_for(postgres)
        await Capture(mill, open_source(settings), settings).run(once=True)
        postgres.execute("INSERT INTO a VALUES (2)")
        for number in range(4):
            postgres.execute(f"INSERT INTO a VALUES ({number + 10})", "SELECT pg_switch_wal()")
        postgres.execute("CHECKPOINT")
        assert postgres.rows("SELECT wal_status FROM pg_replication_slots") == [("lost",)]
        with pytest.raises((ConfigError, SourceLost), match="cdc reset --yes"):
            await Capture(mill, open_source(settings), settings).run(once=True)
        await Capture(mill, open_source(settings), settings).reset()
        await Capture(mill, open_source(settings), settings).run(once=True)
        rows = folded(await events_of(mill, "a"))
        assert rows == source_rows(postgres, "a")
        assert len(rows) == 6
