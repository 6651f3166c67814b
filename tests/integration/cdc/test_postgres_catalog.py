"""What the catalog of a real PostgreSQL says about tables."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import psycopg
import pytest

from millstream.cdc.model import TableShape
from millstream.cdc.postgres.catalog import (
    Catalog,
    TableFacts,
    read_catalog,
    read_relation_facts,
    shape_of_relation,
    shape_of_table,
)
from millstream.cdc.postgres.pgoutput import (
    DELETE,
    INSERT,
    RELATION,
    UPDATE,
    Relation,
    parse_relation,
    relation_of,
)
from millstream.cdc.postgres.row_texts import DecodedRows, decode_rows
from millstream.cdc.settings import CaptureSettings, OutboxSettings, TableSettings
from millstream.schemas import types as t
from tests.postgres import Database

SLOT = "watched"


@pytest.fixture
async def connection(postgres: Database) -> AsyncIterator[psycopg.AsyncConnection[Any]]:
    url = postgres.url
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connected:
        yield connected


async def read(connection: psycopg.AsyncConnection[Any], *patterns: str, **more: Any) -> Catalog:
    return await read_catalog(connection, CaptureSettings("c", "", patterns or ("*",), **more))


def table_of(catalog: Catalog, name: str) -> TableFacts:
    return next(table for table in catalog.tables if table.full_name == name)


def names_of(catalog: Catalog) -> list[str]:
    return [table.full_name for table in catalog.tables]


def watch(postgres: Database, *tables: str) -> None:
    via = "WITH (publish_via_partition_root = true)"
    postgres.execute(
        f"CREATE PUBLICATION {SLOT} FOR TABLE {', '.join(tables)} {via}",
        f"SELECT pg_create_logical_replication_slot('{SLOT}', 'pgoutput')",
    )


def watched(postgres: Database) -> list[tuple[Relation, DecodedRows]]:
    """Each relation that the slot has, with its changes until the next one."""
    with postgres.connect() as connection:
        rows = connection.execute(
            "SELECT data FROM pg_logical_slot_get_binary_changes(%s, NULL, NULL,"
            " 'proto_version', '1', 'publication_names', %s)",
            (SLOT, SLOT),
        ).fetchall()
    known: dict[int, Relation] = {}  # also partitions, though changes are those of their root
    runs: list[tuple[Relation, list[bytes]]] = []
    for (data,) in rows:
        payload = bytes(data)
        if payload[0] == RELATION:
            relation = parse_relation(payload)
            known[relation.oid] = relation
        elif payload[0] in (INSERT, UPDATE, DELETE):
            relation = known[relation_of(payload)]
            if not runs or runs[-1][0] is not relation:
                runs.append((relation, []))
            runs[-1][1].append(payload)
    return [(relation, decode_rows(relation, payloads)) for relation, payloads in runs]


async def test_only_tables_that_are_in_the_log_are_captured(
    postgres: Database, connection: psycopg.AsyncConnection[Any]
) -> None:
    postgres.execute(
        "CREATE SCHEMA shop",
        "CREATE TABLE shop.orders (id int PRIMARY KEY)",
        "CREATE TABLE shop.orders_old (id int PRIMARY KEY)",
        "CREATE TABLE public.orders (id int PRIMARY KEY)",
        "CREATE TABLE public.inbox (id int PRIMARY KEY)",
        "CREATE VIEW shop.orders_view AS SELECT 1 AS one",
        "CREATE MATERIALIZED VIEW shop.orders_seen AS SELECT 1 AS one",
        "CREATE UNLOGGED TABLE shop.orders_fast (id int)",
        "CREATE TABLE shop.orders_empty ()",
    )
    catalog = await read(connection, "shop.orders*", "!shop.*_old")
    assert names_of(catalog) == ["shop.orders"]
    reasons = {one.name: one.reason for one in catalog.left_out}
    assert sorted(reasons) == [
        *("shop.orders_empty", "shop.orders_fast", "shop.orders_seen", "shop.orders_view")
    ]
    assert "unlogged" in reasons["shop.orders_fast"]
    assert "shop.orders_old" in catalog.other_names
    outbox = (OutboxSettings("public.inbox"),)
    assert names_of(await read(connection, "shop.orders", outbox=outbox)) == [
        *("public.inbox", "shop.orders")
    ]
    everything = await read(connection)
    assert {table.namespace for table in everything.tables} == {"public", "shop"}


async def test_a_partitioned_table_is_captured_as_its_root(
    postgres: Database, connection: psycopg.AsyncConnection[Any]
) -> None:
    postgres.execute(
        "CREATE TABLE log (at date, id int, note text, PRIMARY KEY (id, at))"
        " PARTITION BY RANGE (at)",
        "CREATE TABLE log_26 PARTITION OF log FOR VALUES FROM ('2026-01-01') TO ('2027-01-01')",
    )
    catalog = await read(connection)
    assert names_of(catalog) == ["public.log"]
    (table,) = catalog.tables
    assert (table.kind, table.partitions) == ("p", (("public.log_26", "d"),))
    assert [column.name for column in table.columns if column.toastable] == ["note"]
    watch(postgres, "log")
    postgres.execute("INSERT INTO log VALUES ('2026-05-05', 1, 'x')")
    ((relation, rows),) = watched(postgres)
    facts = await read_relation_facts(connection, relation)
    shape = shape_of_relation(relation, facts, TableSettings())
    assert shape == shape_of_table(table, TableSettings())
    assert shape.key == ("id", "at")  # in the order of the primary key, not of the columns
    assert len(rows) == 1
    assert names_of(await read(connection, "log_26")) == ["public.log_26"]


async def test_the_facts_of_columns_and_indexes_are_known(
    postgres: Database, connection: psycopg.AsyncConnection[Any]
) -> None:
    postgres.execute(
        "CREATE TABLE small (id int PRIMARY KEY, v varchar(5), d numeric(10,2))",
        "CREATE TABLE wide (id int PRIMARY KEY, v varchar(5), w varchar(500), n numeric(10,2),"
        " t text NOT NULL, g int GENERATED ALWAYS AS (id * 2) STORED, gone int)",
        "ALTER TABLE wide DROP COLUMN gone",
        "CREATE UNIQUE INDEX wide_t ON wide (t) INCLUDE (w)",
        "CREATE UNIQUE INDEX wide_part ON wide (v) WHERE id > 50",
        "CREATE UNIQUE INDEX wide_expression ON wide (lower(t))",
        "CREATE INDEX wide_plain ON wide (v)",
        "ALTER TABLE wide ADD CONSTRAINT wide_later UNIQUE (v, w) DEFERRABLE",
        "ALTER TABLE wide REPLICA IDENTITY USING INDEX wide_t",
        "INSERT INTO wide SELECT n, '', n, 1, n FROM generate_series(1, 50) AS n",
        "ANALYZE wide",
    )
    catalog = await read(connection)
    wide, small = table_of(catalog, "public.wide"), table_of(catalog, "public.small")
    assert [c.name for c in wide.columns if c.toastable] == ["w", "t"]
    assert not any(column.toastable for column in small.columns)
    assert [c.name for c in wide.columns if c.generated] == ["g"]
    assert [c.name for c in wide.columns if c.not_null] == ["id", "t"]
    assert [(i.name, i.columns, i.deferrable) for i in wide.indexes] == [
        ("wide_pkey", ("id",), False),
        ("wide_later", ("v", "w"), True),
        ("wide_t", ("t",), False),
    ]
    assert wide.rows == 50
    assert wide.identity_columns == ("t",)
    assert wide.key_of(TableSettings()) == ("id",)
    assert small.identity_columns == ("id",)
    assert [one.name for one in catalog.left_out] == ["public.wide.g"]


async def test_the_stream_is_understood_though_the_table_has_changed_since(
    postgres: Database, connection: psycopg.AsyncConnection[Any]
) -> None:
    postgres.execute(
        "CREATE TYPE mood AS ENUM ('sad')",
        "CREATE TABLE people (id int PRIMARY KEY, name text, mood mood, total numeric(6,2))",
    )
    watch(postgres, "people")
    postgres.execute(
        "INSERT INTO people VALUES (1, 'a', 'sad', 1.5)",
        "ALTER TABLE people RENAME COLUMN name TO called",
        "ALTER TABLE people DROP COLUMN total",
        "ALTER TABLE people ADD COLUMN age int2",
        "ALTER TYPE mood ADD VALUE 'ok'",
        "INSERT INTO people VALUES (2, 'b', 'ok', 7)",
    )
    found: list[TableShape] = []
    for relation, _ in watched(postgres):
        facts = await read_relation_facts(connection, relation)
        found.append(shape_of_relation(relation, facts, TableSettings(text=("age",))))
    first, second = found
    mood = t.Enum("mood", ("sad", "ok"))
    assert [(c.name, c.type, c.identity) for c in first.columns] == [
        ("id", t.Int(32), 1),
        ("name", t.String(), 0),  # the catalog does not know this name any more
        ("mood", mood, 3),
        ("total", t.Decimal(6, 2), 0),
    ]
    assert first.columns[3].source_type == "numeric(6,2)"
    assert [(c.name, c.type) for c in second.columns] == [
        *(("id", t.Int(32)), ("called", t.String()), ("mood", mood), ("age", t.String()))
    ]
    postgres.execute("INSERT INTO people VALUES (3, 'c', 'ok', 8)", "DROP TABLE people")
    ((relation, rows),) = watched(postgres)
    facts = await read_relation_facts(connection, relation)
    assert shape_of_relation(relation, facts, TableSettings(key=("id",))).key == ("id",)
    assert len(rows) == 1


async def test_the_stream_says_what_is_unchanged_and_what_an_old_row_was(
    postgres: Database,
) -> None:
    postgres.execute(
        "CREATE TABLE docs (id int PRIMARY KEY, body text, n int)",
        "ALTER TABLE docs ALTER COLUMN body SET STORAGE EXTERNAL",
    )
    watch(postgres, "docs")
    postgres.execute(
        "INSERT INTO docs VALUES (1, repeat('x', 9000), 1)",
        "UPDATE docs SET n = 2",
        "UPDATE docs SET id = 5",
        "DELETE FROM docs",
    )
    ((_, rows),) = watched(postgres)
    body, number = rows.new[1], rows.new[2]
    assert body is not None
    assert number is not None
    assert bytes(rows.kind) == b"IUUD"
    assert body.unchanged is not None
    assert body.unchanged.to_pylist() == [False, True, True, False]
    assert body.texts.to_pylist() == ["x" * 9000, None, None, None]
    assert number.texts.to_pylist() == ["1", "2", "2", None]
    assert bytes(rows.old_kind) == b"\0\0KK"
    assert rows.old is not None
    assert rows.old[0] is not None
    assert rows.old[0].texts.to_pylist() == [None, None, "1", "5"]
