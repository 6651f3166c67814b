"""Changes of a real PostgreSQL as events of topics."""

from __future__ import annotations

from datetime import UTC, date, datetime, time
from decimal import Decimal
from typing import Any

import pytest

from millstream import Mill
from millstream.cdc.postgres import collector, source
from millstream.cdc.settings import OutboxSettings, TableSettings
from millstream.errors import BreakingChange, CaptureError, ConfigError
from millstream.settings import Secret
from tests.integration.cdc.captures import (
    capturing,
    events_of,
    folded,
    incompressible,
    settings_for,
    source_rows,
)
from tests.postgres import Database


async def test_rows_then_changes_arrive_once_in_order_and_fold_to_the_table(
    mill: Mill, postgres: Database
) -> None:
    postgres.execute(
        "CREATE TABLE items (id int PRIMARY KEY, name text, qty int)",
        "INSERT INTO items SELECT g, 'n' || g, 0 FROM generate_series(1, 500) g",
    )
    async with capturing(mill, settings_for(postgres)) as running:
        await running.streaming()
        postgres.execute(
            "UPDATE items SET qty = qty + 1 WHERE id <= 100",
            "DELETE FROM items WHERE id > 490",
            "BEGIN; INSERT INTO items VALUES (900, 'never', 0); ROLLBACK",
            "INSERT INTO items VALUES (901, 'new', 7)",
        )
        events = await running.caught_up("items", 500 + 100 + 10 + 1)
    assert folded(events) == source_rows(postgres, "items")
    assert [event["value"]["op"] for event in events] == [
        *["r"] * 500, *["u"] * 100, *["d"] * 10, "c",
    ]  # fmt: skip
    deleted = events[600]["value"]
    assert deleted["before"]["id"] == 491
    assert deleted["after"] is None


async def test_every_row_says_its_transaction_its_number_and_the_total(
    mill: Mill, postgres: Database
) -> None:
    postgres.execute(
        "CREATE TABLE a (id int PRIMARY KEY, n int)", "CREATE TABLE b (id int PRIMARY KEY, n int)"
    )
    async with capturing(mill, settings_for(postgres)) as running:
        await running.streaming()
        postgres.execute(
            "BEGIN; INSERT INTO a VALUES (1, 1), (2, 2); INSERT INTO b VALUES (1, 1); "
            "UPDATE a SET n = 5 WHERE id = 1; COMMIT"
        )
        rows = [
            *await running.caught_up("a", 3),
            *await running.caught_up("b", 1),
        ]
    sources = [row["value"]["source"] for row in rows]
    assert sorted(one["number"] for one in sources) == [1, 2, 3, 4]
    assert {one["total"] for one in sources} == {4}
    assert len({(one["transaction"], one["commit"], one["time"]) for one in sources}) == 1


async def test_a_restarted_capture_continues_without_a_second_snapshot(
    mill: Mill, postgres: Database
) -> None:
    postgres.execute("CREATE TABLE items (id int PRIMARY KEY)", "INSERT INTO items VALUES (1), (2)")
    settings = settings_for(postgres)
    async with capturing(mill, settings) as running:
        await running.streaming()
    postgres.execute("INSERT INTO items VALUES (3)")
    async with capturing(mill, settings) as running:
        events = await running.caught_up("items", 3)
        postgres.execute("INSERT INTO items VALUES (4)")
        events = await running.caught_up("items", 4)
    assert [event["value"]["op"] for event in events] == ["r", "r", "c", "c"]


async def test_types_of_columns_are_those_of_the_topic(mill: Mill, postgres: Database) -> None:
    columns = (
        "id uuid PRIMARY KEY, price numeric(10,2), at timestamptz, local timestamp, day date, "
        "clock time, doc jsonb, tags text[], numbers int[], m mood, data bytea, free numeric, "
        "ratio float8, ok bool"
    )
    values = (
        "'6f2c1b6e-7f3c-4b5a-9a51-0d9d5a1f1a01', 12.30, '2026-01-02 03:04:05.6+00', "
        "'2026-01-02 03:04:05', '2026-01-02', '03:04:05.5', '{\"a\": 1}', '{a,NULL,\"b,c\"}', "
        "'{1,2}', 'ok', '\\x00ff', 1.230, 'NaN', true"
    )
    postgres.execute(
        "CREATE TYPE mood AS ENUM ('sad', 'ok')",
        f"CREATE TABLE things ({columns})",
        f"INSERT INTO things VALUES ({values})",
    )
    async with capturing(mill, settings_for(postgres)) as running:
        await running.streaming()
        postgres.execute(
            "DELETE FROM things",
            f"INSERT INTO things VALUES ({values})",
            "ALTER TYPE mood ADD VALUE 'glad'",
            "UPDATE things SET m = 'glad'",
        )
        read, _, created, updated = await running.caught_up("things", 4)
    row = read["value"]["after"]
    nan = row.pop("ratio")
    assert nan != nan
    assert row == {
        "id": "6f2c1b6e-7f3c-4b5a-9a51-0d9d5a1f1a01",
        "price": Decimal("12.30"),
        "at": datetime(2026, 1, 2, 3, 4, 5, 600_000, UTC),
        "local": datetime(2026, 1, 2, 3, 4, 5),  # noqa: DTZ001
        "day": date(2026, 1, 2),
        "clock": time(3, 4, 5, 500_000),
        "doc": '{"a": 1}',
        "tags": ["a", None, "b,c"],
        "numbers": [1, 2],
        "m": "ok",
        "data": b"\x00\xff",
        "free": "1.230",
        "ok": True,
    }
    streamed = created["value"]["after"]
    streamed.pop("ratio")
    assert streamed == row
    assert updated["value"]["after"]["m"] == "glad"


async def test_a_changed_key_is_a_deletion_and_a_new_row_with_all_its_values(
    mill: Mill, postgres: Database
) -> None:
    postgres.execute(
        "CREATE TABLE docs (id int PRIMARY KEY, n int, body text)",
        f"INSERT INTO docs VALUES (1, 0, {incompressible(20_000)})",
    )
    async with capturing(mill, settings_for(postgres)) as running:
        await running.streaming()
        postgres.execute("UPDATE docs SET id = 2", "UPDATE docs SET n = 1")
        events = await running.caught_up("docs", 4)
    assert [(e["value"]["op"], e["key"]) for e in events] == [
        ("r", b"1"), ("d", b"1"), ("c", b"2"), ("u", b"2"),
    ]  # fmt: skip
    assert folded(events) == source_rows(postgres, "docs")
    numbers = [event["value"]["source"]["number"] for event in events[1:3]]
    assert numbers == [1, 1]


async def test_large_values_that_an_update_did_not_touch_are_never_null(
    mill: Mill, postgres: Database
) -> None:
    for table, identity in (("plain", "DEFAULT"), ("whole", "FULL")):
        postgres.execute(
            f"CREATE TABLE {table} (id int PRIMARY KEY, n int, body text)",
            f"ALTER TABLE {table} REPLICA IDENTITY {identity}",
            f"INSERT INTO {table} VALUES (1, 0, {incompressible(20_000)})",
        )
    async with capturing(mill, settings_for(postgres)) as running:
        await running.streaming()
        postgres.execute("UPDATE plain SET n = 1", "UPDATE whole SET n = 1")
        plain = await running.caught_up("plain", 2)
        whole = await running.caught_up("whole", 2)
    assert plain[1]["value"]["unchanged"] == ["body"]
    assert folded(plain) == source_rows(postgres, "plain")
    assert whole[1]["value"]["unchanged"] is None
    assert whole[1]["value"]["after"]["body"] == whole[1]["value"]["before"]["body"]
    assert folded(whole) == source_rows(postgres, "whole")


async def test_topics_of_rows_have_rows_tombstones_and_marks_in_headers(
    mill: Mill, postgres: Database
) -> None:
    postgres.execute(
        "CREATE TABLE pairs (a int, b text, n int, PRIMARY KEY (a, b))",
        "ALTER TABLE pairs REPLICA IDENTITY FULL",
        "INSERT INTO pairs VALUES (1, 'x', 5)",
    )
    async with capturing(mill, settings_for(postgres, format="rows")) as running:
        await running.streaming()
        postgres.execute("UPDATE pairs SET n = 6", "DELETE FROM pairs")
        read, updated, gone = await running.caught_up("pairs", 3)
    assert read["value"] == {"a": 1, "b": "x", "n": 5}
    assert (updated["value"]["n"], updated["key"]) == (6, b'["1","x"]')
    assert (gone["value"], gone["key"]) == (None, b'["1","x"]')
    marks = [{one["key"]: one["value"] for one in event["headers"]} for event in (read, gone)]
    assert marks[0]["Cdc-Op"] == b"r"
    assert marks[1]["Cdc-Op"] == b"d"
    assert marks[1]["Cdc-Transaction"].endswith(b" 1/1")
    assert int(marks[1]["Cdc-Commit"]) > int(marks[0]["Cdc-Commit"])


async def test_a_topic_of_rows_without_whole_rows_is_refused_before_it_starts(
    mill: Mill, postgres: Database
) -> None:
    postgres.execute("CREATE TABLE docs (id int PRIMARY KEY, body text)")
    async with capturing(mill, settings_for(postgres, format="rows")) as running:
        error = await running.failed()
    assert isinstance(error, ConfigError)
    assert "REPLICA IDENTITY FULL" in str(error)
    assert not postgres.rows("SELECT 1 FROM pg_publication")


@pytest.mark.parametrize("choice", ["stop", "event", "ignore"])
async def test_truncate_does_what_the_settings_say(
    mill: Mill, postgres: Database, choice: Any
) -> None:
    postgres.execute("CREATE TABLE items (id int PRIMARY KEY)", "INSERT INTO items VALUES (1), (2)")
    async with capturing(mill, settings_for(postgres, truncate=choice)) as running:
        await running.streaming()
        postgres.execute("TRUNCATE items", "INSERT INTO items VALUES (3)")
        if choice == "stop":
            error = await running.failed()
            assert isinstance(error, CaptureError)
            assert "public.items was truncated" in str(error)
            return
        events = await running.caught_up("items", 4 if choice == "event" else 3)
    rows = folded(events)
    assert set(rows) == ({"3"} if choice == "event" else {"1", "2", "3"})


async def test_an_altered_table_becomes_the_next_version_of_the_schema(
    mill: Mill, postgres: Database
) -> None:
    postgres.execute(
        "CREATE TABLE items (id int PRIMARY KEY, n int, old text)",
        "INSERT INTO items VALUES (1, 1, 'a')",
    )
    async with capturing(mill, settings_for(postgres)) as running:
        await running.streaming()
        postgres.execute(
            "ALTER TABLE items ADD COLUMN extra numeric(6,2) DEFAULT 5",
            "INSERT INTO items VALUES (2, 2, 'b', 1.25)",
            "ALTER TABLE items ALTER COLUMN n TYPE bigint",
            f"INSERT INTO items VALUES (3, {2**40}, 'c', 1)",
            "ALTER TABLE items DROP COLUMN old",
            "INSERT INTO items VALUES (4, 4, 2)",
        )
        events = await running.caught_up("items", 4)
    rows = [event["value"]["after"] for event in events]
    assert rows[0] == {"id": 1, "n": 1, "old": "a", "extra": None}
    assert rows[1] == {"id": 2, "n": 2, "old": "b", "extra": Decimal("1.25")}
    assert rows[2]["n"] == 2**40
    assert rows[3] == {"id": 4, "n": 4, "old": None, "extra": Decimal("2.00")}
    assert len((await mill.schemas.topic("items")).versions) == 3


@pytest.mark.parametrize(
    ("statement", "column"),
    [
        ("ALTER TABLE items ALTER COLUMN n TYPE text", "n"),
        ("ALTER TABLE items RENAME COLUMN n TO m", "m"),
    ],
)
async def test_a_breaking_change_stops_with_the_column_named(
    mill: Mill, postgres: Database, statement: str, column: str
) -> None:
    postgres.execute("CREATE TABLE items (id int PRIMARY KEY, n int)")
    settings = settings_for(postgres)
    async with capturing(mill, settings) as running:
        await running.streaming()
        postgres.execute("INSERT INTO items VALUES (1, 1)", statement)
        postgres.execute("INSERT INTO items VALUES (2, '2')")
        error = await running.failed()
    assert isinstance(error, BreakingChange)
    assert (error.table, error.column) == ("public.items", column)
    assert len(await events_of(mill, "items")) == 1
    # The way back that the error names.
    async with capturing(mill, settings) as running:
        await running.failed()
        await running.capture.reset("public.items")
    async with capturing(mill, settings) as running:
        assert len(await running.caught_up("items", 2)) == 2


async def test_a_transaction_larger_than_memory_goes_through_a_file(
    mill: Mill, postgres: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collector, "OPEN_ROWS", 700)
    monkeypatch.setattr(source, "RECEIVE_ROWS", 300)
    postgres.execute("CREATE TABLE items (id int PRIMARY KEY, n int)")
    async with capturing(mill, settings_for(postgres)) as running:
        await running.streaming()
        postgres.execute(
            "INSERT INTO items VALUES (0, 0)",
            "BEGIN; INSERT INTO items SELECT g, 0 FROM generate_series(1, 1500) g; "
            "ALTER TABLE items ADD COLUMN extra int; UPDATE items SET n = 1, extra = id; COMMIT",
            "INSERT INTO items VALUES (5000, 0)",
        )
        events = await running.caught_up("items", 1 + 1500 + 1501 + 1)
    assert folded(events) == source_rows(postgres, "items")
    marks = [e["value"]["source"] for e in events[1:-1]]
    assert [one["number"] for one in marks] == list(range(1, 3002))
    assert {one["total"] for one in marks} == {3001}


async def test_whole_transactions_are_stored_in_one_step(mill: Mill, postgres: Database) -> None:
    postgres.execute("CREATE TABLE items (id int PRIMARY KEY, n text)")
    settings = settings_for(postgres, whole_transactions=True)
    async with capturing(mill, settings) as running:
        await running.streaming()
        text = "repeat(md5(g::text), 40)"  # more than one pack
        postgres.execute(
            f"INSERT INTO items SELECT g, {text} FROM generate_series(1, 12000) g",
        )
        seen: set[int] = set()
        while 12_000 not in seen:
            seen.add(len(await events_of(mill, "items")))
    assert seen <= {0, 12_000}


async def test_columns_are_left_out_and_masked_in_the_snapshot_and_in_changes(
    mill: Mill, postgres: Database
) -> None:
    postgres.execute(
        "CREATE TABLE people (id int PRIMARY KEY, name text, email text, phone text, pin int)",
        "ALTER TABLE people REPLICA IDENTITY FULL",
        "INSERT INTO people VALUES (1, 'Ann', 'ann@x', '555', 1234)",
    )
    own = TableSettings(
        topic="persons",
        exclude=("pin",),
        mask={"email": "hash", "phone": "null", "name": "redact"},
    )
    settings = settings_for(
        postgres, table={"public.people": own}, mask_key=Secret("salt and pepper")
    )
    async with capturing(mill, settings) as running:
        await running.streaming()
        postgres.execute("UPDATE people SET pin = 1", "INSERT INTO people VALUES (2, 'Bo')")
        read, updated, created = await running.caught_up("persons", 3)
    row = read["value"]["after"]
    assert row == {"id": 1, "name": "***", "email": row["email"], "phone": None}
    assert len(row["email"]) == 64
    assert updated["value"]["after"] == updated["value"]["before"] == row
    assert created["value"]["after"] == {"id": 2, "name": "***", "email": None, "phone": None}
    assert "ann@x" not in repr([read, updated, created])


async def test_rows_of_an_outbox_become_events_of_the_topics_they_name(
    mill: Mill, postgres: Database
) -> None:
    postgres.execute(
        "CREATE TABLE outbox (id bigserial PRIMARY KEY, topic text, key text, value jsonb, h jsonb)"
    )
    settings = settings_for(postgres, outbox=(OutboxSettings("public.outbox", headers="h"),))
    insert = "INSERT INTO outbox (topic, key, value, h) VALUES"
    async with capturing(mill, settings) as running:
        await running.streaming()
        postgres.execute(
            f"""{insert} ('orders', 'ann', '{{"n": 1}}', '{{"trace": "t1"}}')""",
            f"""BEGIN; {insert} ('orders', 'bob', '{{"n": 2}}', NULL), ('mails', NULL, '"hi"', """
            f"""NULL); DELETE FROM outbox; COMMIT""",
        )
        orders = await running.caught_up("orders", 2)
        (mail,) = await running.caught_up("mails", 1)
    assert [(e["key"], e["value"], e["id"]) for e in orders] == [
        (b"ann", b'{"n": 1}', "1"), (b"bob", b'{"n": 2}', "2"),
    ]  # fmt: skip
    assert orders[0]["headers"] == [{"key": "trace", "value": b"t1"}]
    assert (mail["key"], mail["value"]) == (None, b'"hi"')
