"""A snapshot that continues after a key, and changes that are compared with that key, agree."""

from __future__ import annotations

from collections.abc import Iterator

import adbc_driver_postgresql.dbapi as adbc
import psycopg
import pyarrow as pa
import pytest
from psycopg.conninfo import make_conninfo

from millstream.cdc.model import TableShape
from millstream.cdc.postgres.catalog import from_item, read_catalog, shape_of_table
from millstream.cdc.postgres.snapshot import is_after, statement
from millstream.cdc.postgres.types import SESSION_OPTIONS, from_adbc
from millstream.cdc.settings import CaptureSettings, TableSettings
from millstream.schemas import types as t
from tests.postgres import Database

KEYS = {
    "int8": ("-5", "10", "9", "0"),
    "bool": ("t", "f"),
    "bpchar(4)": ("a", "a b", "A", "é", "ab", ""),
    "text": ("a", "a ", "A", "é", "_", "b'c", "\\", "𝄞", "\uff5e"),
    "inet": ("10.0.0.1", "10.0.0.1/8", "9.0.0.1", "::1"),
    "mood": ("ok", "sad", "in two minds"),
    "uuid": ("00000000-0000-0000-0000-00000000000a", "ffffffff-0000-0000-0000-000000000000"),
    "numeric(6,2)": ("-1.50", "10", "9"),
    "numeric": ("10", "9", "-1"),
    "timestamptz": ("2026-01-02 00:00+00", "1960-01-02 00:00+00", "2026-01-02 00:00:00.5+00"),
    "date": ("2026-01-02", "1960-01-02"),
    "time": ("01:00", "00:30"),
    "bytea": ("\\x00", "\\xff", "\\x", "\\x0001"),
    "code": ("b", "a"),
}


async def shape_and_source(postgres: Database) -> tuple[TableShape, str]:
    url = make_conninfo(postgres.url, options=SESSION_OPTIONS)
    async with await psycopg.AsyncConnection.connect(url) as connection:
        settings = CaptureSettings("c", postgres.url, ("t",))
        (facts,) = (await read_catalog(connection, settings)).tables
    return shape_of_table(facts, TableSettings()), from_item(facts)


def selected(cursor: adbc.Cursor, query: str, type_: t.Type) -> tuple[pa.RecordBatch, list[str]]:
    """The keys of all rows, as arrays and as texts."""
    cursor.execute(query)
    table = cursor.fetch_arrow_table()
    keys = from_adbc(table.column(0), type_, "id")
    edges: list[str] = table.column(table.num_columns - 1).to_pylist()
    return pa.RecordBatch.from_arrays([keys], names=["id"]), edges


@pytest.fixture
def cursor(postgres: Database) -> Iterator[adbc.Cursor]:
    url = make_conninfo(postgres.url, options=SESSION_OPTIONS)
    with adbc.connect(url, autocommit=True) as driver, driver.cursor() as one:
        yield one


async def test_rows_after_a_key_are_the_same_for_the_server_and_for_us(
    postgres: Database, cursor: adbc.Cursor
) -> None:
    postgres.execute(
        "CREATE TYPE mood AS ENUM ('sad', 'in two minds', 'ok')", "CREATE DOMAIN code AS char(3)"
    )
    for source_type, texts in KEYS.items():
        values = ", ".join(f"(E'{text}')".replace("b'c", "b''c") for text in texts)
        postgres.execute(
            f"CREATE TABLE t (id {source_type} PRIMARY KEY)",
            f"INSERT INTO t VALUES {values.replace(chr(92), chr(92) * 2)}",
        )
        shape, source = await shape_and_source(postgres)
        type_ = shape.columns[0].type
        keys, edges = selected(cursor, statement(shape, source, None), type_)
        assert keys.num_rows == len(texts), source_type
        for at, edge in enumerate(edges):
            after = is_after(shape, keys, [edge]).to_pylist()
            assert after == [index > at for index in range(len(texts))], (source_type, edge)
            rest, _ = selected(cursor, statement(shape, source, [edge]), type_)
            assert rest == keys.slice(at + 1), (source_type, edge)
        postgres.execute("DROP TABLE t")


async def test_keys_of_several_columns_are_compared_from_left_to_right(
    postgres: Database, cursor: adbc.Cursor
) -> None:
    postgres.execute(
        "CREATE TABLE t (a text, b int, PRIMARY KEY (b, a))",
        "INSERT INTO t VALUES ('x', 1), ('a', 2), ('y', 1), ('b', 2)",
    )
    shape, source = await shape_and_source(postgres)
    assert shape.key == ("b", "a")
    cursor.execute(statement(shape, source, ["1", "x"]))
    rows = cursor.fetchall()
    assert [row[:2] for row in rows] == [("y", 1), ("a", 2), ("b", 2)]
    keys = pa.RecordBatch.from_pydict(
        {"a": pa.array(["x", "y", "a", "w"]), "b": pa.array([1, 1, 2, 1], pa.int32())}
    )
    assert is_after(shape, keys, ["1", "x"]).to_pylist() == [False, True, True, False]
