"""`check` on a real PostgreSQL: what is missing is found before anything is created."""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg.conninfo import make_conninfo

from millstream.cdc.model import Finding
from millstream.cdc.postgres.checks import check
from millstream.cdc.settings import CaptureSettings, TableSettings
from tests.postgres import Database, Postgres, running_postgres

PLACE = "millstream_shop"
MEGABYTES = 2**20


async def findings(url: str, **more: Any) -> list[Finding]:
    settings = CaptureSettings("shop", url, **{"tables": ("public.*",), **more})
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
        return await check(connection, settings)


async def fatal(url: str, **more: Any) -> dict[str, Finding]:
    """What makes a capture impossible, by subject."""
    return {one.subject: one for one in await findings(url, **more) if not one.ok and one.fatal}


async def warned(url: str, **more: Any) -> dict[str, Finding]:
    found = await findings(url, **more)
    return {one.subject: one for one in found if not one.ok and not one.fatal}


def role_of(postgres: Database, options: str = "") -> tuple[str, str]:
    """A new role without rights, and the URL with which it connects."""
    role = f"reader_{postgres.name}"
    postgres.execute(f"CREATE ROLE {role} LOGIN {options}")
    return role, make_conninfo(postgres.url, user=role)


async def test_a_database_that_is_ready_has_nothing_fatal(postgres: Database) -> None:
    postgres.execute("CREATE TABLE orders (id int PRIMARY KEY, note text)")
    found = await findings(postgres.url)
    assert not [one for one in found if not one.ok and one.fatal]
    texts = {one.subject: one.text for one in found if one.ok}
    assert texts["wal_level"] == "logical"
    assert texts["table public.orders"] == "key id, rows not counted yet"
    assert texts[f"slot {PLACE}"] == "does not exist yet; it will be created"
    assert texts[f"publication {PLACE}"] == "does not exist yet; it will be created"
    assert "unchanged" in (await warned(postgres.url))["table public.orders"].text


async def test_check_changes_nothing(postgres: Database) -> None:
    postgres.execute("CREATE TABLE orders (id int PRIMARY KEY)")
    await findings(postgres.url)
    counted = "SELECT count(*) FROM pg_publication"
    assert postgres.rows(counted) == [(0,)]
    assert postgres.rows(
        f"SELECT count(*) FROM pg_replication_slots WHERE slot_name = '{PLACE}'"
    ) == [(0,)]


async def test_no_table_is_fatal_with_the_near_names(postgres: Database) -> None:
    postgres.execute("CREATE TABLE orders (id int PRIMARY KEY)")
    one = (await fatal(postgres.url, tables=("public.order",)))["tables"]
    assert one.text == "no table can be captured by: public.order"
    assert one.fix == "did you mean public.orders?"


async def test_settings_for_a_table_that_is_not_captured_are_fatal(postgres: Database) -> None:
    postgres.execute("CREATE TABLE orders (id int PRIMARY KEY, secret text)")
    table = {"public.ordres": TableSettings(mask={"secret": "null"})}
    one = (await fatal(postgres.url, table=table))["table public.ordres"]
    assert one.fix == "did you mean 'public.orders'?"


async def test_a_table_without_identity_refuses_updates_once_published_as_check_says(
    postgres: Database,
) -> None:
    postgres.execute("CREATE TABLE orders (id int NOT NULL)", "INSERT INTO orders VALUES (1)")
    one = (await fatal(postgres.url))["table public.orders"]
    assert "refuses every UPDATE and DELETE" in one.text
    postgres.execute("CREATE UNIQUE INDEX orders_id ON orders (id)")
    one = (await fatal(postgres.url))["table public.orders"]
    postgres.execute(one.fix)
    assert not await fatal(postgres.url)
    postgres.execute("CREATE PUBLICATION p FOR TABLE orders", "UPDATE orders SET id = 2")


async def test_what_a_role_lacks_is_granted_by_the_fixes(postgres: Database) -> None:
    postgres.execute("CREATE SCHEMA shop", "CREATE TABLE shop.orders (id int PRIMARY KEY)")
    role, url = role_of(postgres)
    scope = {"tables": ("shop.*",)}
    found = await findings(url, **scope)
    wrong = [one for one in found if not one.ok and one.fatal]
    assert [one.subject for one in wrong] == [
        f"role {role}",
        f"publication {PLACE}",
        "table shop.orders",
        "table shop.orders",
    ]
    for one in wrong:
        statement = one.fix.removeprefix("as the owner of the tables: ").partition(" (on ")[0]
        postgres.execute(statement)
    assert not await fatal(url, **scope)


async def test_row_level_security_that_hides_rows_is_fatal(postgres: Database) -> None:
    role, url = role_of(postgres, "REPLICATION")
    postgres.execute(
        "CREATE TABLE orders (id int PRIMARY KEY)",
        "ALTER TABLE orders ENABLE ROW LEVEL SECURITY",
        f"GRANT SELECT ON orders TO {role}",
        f"CREATE PUBLICATION {PLACE} FOR TABLE orders",
    )
    one = (await fatal(url))["table public.orders"]
    assert "row level security hides rows" in one.text
    postgres.execute(one.fix)
    assert not await fatal(url)


async def test_a_publication_that_does_not_fit_is_found(postgres: Database) -> None:
    postgres.execute(
        "CREATE TABLE orders (id int PRIMARY KEY, note int)",
        "CREATE TABLE parts (id int PRIMARY KEY) PARTITION BY RANGE (id)",
        "CREATE TABLE parts_1 PARTITION OF parts FOR VALUES FROM (0) TO (10)",
        f"CREATE PUBLICATION {PLACE} FOR TABLE parts WITH (publish = 'insert')",
    )
    subject = f"publication {PLACE}"
    wrong = [one for one in await findings(postgres.url) if one.subject == subject and not one.ok]
    assert len(wrong) == 2
    postgres.execute(*(one.fix for one in wrong))
    found = {one.subject: one for one in await findings(postgres.url)}
    assert found[subject] == Finding(subject, True, "will be extended by public.orders")
    postgres.execute(f"ALTER PUBLICATION {PLACE} ADD TABLE orders (id)")
    assert "list of columns for public.orders" in (await fatal(postgres.url))[subject].text
    postgres.execute(f"ALTER PUBLICATION {PLACE} SET TABLE parts, orders")
    found = {one.subject: one for one in await findings(postgres.url)}
    assert found[subject] == Finding(subject, True, "exists and has every table")


async def test_a_slot_of_something_else_is_fatal(postgres: Database) -> None:
    postgres.execute(
        "CREATE TABLE orders (id int PRIMARY KEY)",
        f"SELECT pg_create_logical_replication_slot('{PLACE}', 'test_decoding')",
    )
    try:
        one = (await fatal(postgres.url))[f"slot {PLACE}"]
        assert one.text.startswith("it exists for something else (logical, test_decoding")
    finally:
        postgres.execute(f"SELECT pg_drop_replication_slot('{PLACE}')")


def use_up_the_log(server: Postgres) -> None:
    with server.connect() as connection:
        connection.execute("CREATE TABLE orders (id int PRIMARY KEY)")
        connection.execute(f"SELECT pg_create_logical_replication_slot('{PLACE}', 'pgoutput')")
        for number in range(4):
            connection.execute(f"INSERT INTO orders VALUES ({number})")
            connection.execute("SELECT pg_switch_wal()")
        connection.execute("CHECKPOINT")


async def test_a_lost_slot_and_a_small_budget_are_found() -> None:
    with running_postgres(max_slot_wal_keep_size="16MB", max_replication_slots=1) as server:
        use_up_the_log(server)
        found = await fatal(server.url)
        assert "changes are missing" in found[f"slot {PLACE}"].text
        assert found["max_replication_slots"].text == "1 of 1 in use, 1 needed"
        small = (await warned(server.url))["max_slot_wal_keep_size"]
        assert "16 MB is less than log_budget (10240 MB)" in small.text
        within = await warned(server.url, log_budget=16 * MEGABYTES)
        assert "max_slot_wal_keep_size" not in within


async def test_a_server_without_logical_replication_is_found() -> None:
    with running_postgres(wal_level="replica", max_wal_senders=1) as server:
        with server.connect() as connection:
            connection.execute("CREATE TABLE orders (id int PRIMARY KEY)")
        found = await fatal(server.url)
        assert found["wal_level"].text == "it is replica; a capture needs logical"
        assert found["max_wal_senders"].text == "0 of 1 in use, 2 needed"
        for subject in ("wal_level", "max_wal_senders"):
            with server.connect() as connection:
                connection.execute(found[subject].fix.partition(";")[0])
