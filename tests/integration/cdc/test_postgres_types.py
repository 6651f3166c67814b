"""Every type of PostgreSQL has the same values in the topic from a snapshot and from the stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import adbc_driver_postgresql.dbapi as adbc
import psycopg
import pyarrow as pa
import pytest
from psycopg.conninfo import make_conninfo

from millstream.cdc.model import TableShape
from millstream.cdc.postgres.catalog import (
    from_item,
    read_catalog,
    read_relation_facts,
    shape_of_relation,
    shape_of_table,
)
from millstream.cdc.postgres.pgoutput import INSERT, RELATION, Relation, parse_relation
from millstream.cdc.postgres.row_texts import decode_rows
from millstream.cdc.postgres.types import (
    SESSION_OPTIONS,
    from_adbc,
    from_text,
    output_text,
    select_expression,
)
from millstream.cdc.settings import CaptureSettings, TableSettings
from millstream.errors import Unfit
from millstream.schemas import types as t
from millstream.schemas.arrow_types import arrow_type
from tests.postgres import Database

SLOT = "compared"
TYPES = (
    "CREATE TYPE mood AS ENUM ('sad', 'in two minds', 'ok')",
    "CREATE TYPE pair AS (a int, b text)",
    "CREATE DOMAIN price AS numeric(10,2)",
    "CREATE DOMAIN positive_price AS price CHECK (VALUE > 0)",
    "CREATE DOMAIN code AS character(5)",
    "CREATE DOMAIN address AS inet",
    "CREATE DOMAIN tags AS text[]",
    "CREATE FUNCTION mood_text(mood) RETURNS text LANGUAGE sql AS $$ SELECT 'other' $$",
    "CREATE CAST (mood AS text) WITH FUNCTION mood_text(mood)",
)


def some(type_: t.Type) -> t.List:
    return t.List(item=t.Nullable(of=type_))


MOOD = t.Enum("mood", ("sad", "in two minds", "ok"))
UUID = "6f1a3e6e-5d1d-4ea3-9d0e-3a2c5c9b9b10"
CASES: dict[str, tuple[t.Type, tuple[str, ...]]] = {
    "bool": (t.Bool(), ("t", "f")),
    "int2": (t.Int(16), ("-32768", "32767", "0")),
    "int4": (t.Int(32), ("-2147483648", "2147483647")),
    "int8": (t.Int(64), ("-9223372036854775808", "9223372036854775807")),
    "oid": (t.Int(64), ("0", "4294967295")),
    "float4": (t.Float(32), ("NaN", "Infinity", "-Infinity", "-0", "1e-45", "3.4028235e+38")),
    "float8": (t.Float(64), ("NaN", "Infinity", "-0", "0.1", "5e-324", "1.7976931348623157e308")),
    "numeric(10,2)": (t.Decimal(10, 2), ("0", "-12345678.99", "0.005")),
    "numeric(38,38)": (t.Decimal(38, 38), ("0." + "9" * 38,)),
    "numeric(38)": (t.Decimal(38, 0), ("9" * 38, "-" + "9" * 38)),
    "numeric": (t.String(), ("NaN", "1e100", "0.10", "Infinity")),
    "numeric(39,2)": (t.String(), ("1",)),
    "numeric(3,5)": (t.String(), ("0.00123",)),
    "numeric(3,-2)": (t.String(), ("12345",)),
    "text": (t.String(), ("", "a\tb\n", "é∀𝄞", "NULL", "\\x00")),
    "varchar(5)": (t.String(), ("a  ", "")),
    "bpchar(5)": (t.String(), ("a", "", "abcde")),
    "name": (t.String(), ("n",)),
    '"char"': (t.String(), ("c", "")),
    "bytea": (t.Binary(), ("\\x", "\\x00ff5c78", "\\x" + "ab" * 5000)),
    "date": (t.Date(), ("0001-01-01", "1969-12-31", "9999-12-31")),
    "time": (t.Time(), ("00:00", "23:59:59.999999", "12:30:00.5")),
    "time(0)": (t.Time(), ("12:30:00.5",)),
    "timestamp": (t.Timestamp(utc=False), ("0001-01-01", "9999-12-31 23:59:59.999999")),
    "timestamptz": (t.Timestamp(), ("1970-01-01 00:00+05:30", "9999-12-31 23:59:59.999999Z")),
    "timestamptz(3)": (t.Timestamp(), ("2026-03-29 01:30:00.1239+00",)),
    "uuid": (t.Uuid(), (UUID,)),
    "json": (t.String(), ('{"b": 1,  "a": [null]}', "null", '"x"')),
    "jsonb": (t.String(), ('{"b": 1,  "a": [null]}', "null")),
    "mood": (MOOD, ("sad", "in two minds")),
    "price": (t.Decimal(10, 2), ("1.5",)),
    "positive_price": (t.Decimal(10, 2), ("1.5",)),
    "code": (t.String(), ("a",)),
    "address": (t.String(), ("10.0.0.1",)),
    "inet": (t.String(), ("10.0.0.1", "10.0.0.0/8", "::1")),
    "cidr": (t.String(), ("10.0.0.0/8",)),
    "macaddr": (t.String(), ("08:00:2b:01:02:03",)),
    "interval": (t.String(), ("1 year 2 mons -3 days 04:05:06.789", "0")),
    "money": (t.String(), ("-1234.5",)),
    "timetz": (t.String(), ("12:00:00+05:30",)),
    "xml": (t.String(), ("<a>b</a>",)),
    "bit(3)": (t.String(), ("101",)),
    "varbit": (t.String(), ("",)),
    "point": (t.String(), ("(1.5,-2)",)),
    "int4range": (t.String(), ("[1,5)", "empty")),
    "int4multirange": (t.String(), ("{[1,2), [5,9)}",)),
    "tsvector": (t.String(), ("'a':1 'b'",)),
    "pair": (t.String(), ("(,)", '(1,"a b")')),
    "regclass": (t.String(), ("pg_class",)),
    "oidvector": (t.String(), ("1 2 3",)),
    "pg_lsn": (t.String(), ("16/B374D848",)),
    "int4[]": (some(t.Int(32)), ("{}", "{1,NULL,-3}")),
    "bool[]": (some(t.Bool()), ("{t,f,NULL}",)),
    "text[]": (some(t.String()), ('{a,"b,c","d\\"e\\\\f",NULL,"NULL",""," ","{}",é}', "{}")),
    "bpchar(3)[]": (some(t.String()), ("{a,bcd}",)),
    "float8[]": (some(t.Float(64)), ("{NaN,-Infinity,0.1}",)),
    "numeric(6,3)[]": (some(t.Decimal(6, 3)), ("{1.5,NULL}",)),
    "numeric[]": (some(t.String()), ("{1.50,NaN}",)),
    "bytea[]": (some(t.Binary()), ('{"\\\\x00ff",NULL,"\\\\x"}',)),
    "date[]": (some(t.Date()), ("{2026-01-02}",)),
    "timestamp[]": (some(t.Timestamp(utc=False)), ('{"2026-01-02 03:04:05.6",NULL}',)),
    "timestamptz[]": (some(t.Timestamp()), ('{"2026-01-02 03:04:05+00"}',)),
    "uuid[]": (some(t.Uuid()), ("{" + UUID + "}",)),
    "json[]": (some(t.String()), ('{"{\\"a\\": 1}"}',)),
    "mood[]": (some(MOOD), ('{sad,"in two minds",NULL}',)),
    "price[]": (some(t.Decimal(10, 2)), ("{1.5}",)),
    "tags": (some(t.String()), ("{a,b}",)),
    "box[]": (t.String(), ("{(2,2),(1,1);(4,4),(3,3)}",)),
    "pair[]": (some(t.String()), ('{"(1,x)",NULL}',)),
}


class Table(NamedTuple):
    """One table, seen from the catalog and from the stream, with its rows by both ways."""

    shape: TableShape
    stream_shape: TableShape
    snapshot: dict[str, pa.Array]
    stream: dict[str, pa.Array]


def conninfo(database: Database) -> str:
    return make_conninfo(database.url, options=SESSION_OPTIONS)


def stream_of(database: Database) -> tuple[Relation, list[bytes]]:
    """What the slot has: the table and the payloads of its rows."""
    with psycopg.connect(conninfo(database), autocommit=True) as connection:
        rows = connection.execute(
            "SELECT data FROM pg_logical_slot_get_binary_changes(%s, NULL, NULL,"
            " 'proto_version', '1', 'publication_names', %s)",
            (SLOT, SLOT),
        ).fetchall()
    payloads = [bytes(data) for (data,) in rows]
    relation = next(parse_relation(one) for one in payloads if one[0] == RELATION)
    return relation, [one for one in payloads if one[0] == INSERT]


async def both_ways(database: Database, own: TableSettings | None = None) -> Table:
    """The rows of public.t, without converting anything that is not asked for."""
    own = own or TableSettings()
    settings = CaptureSettings("c", database.url, ("public.t",), {"public.t": own})
    relation, payloads = stream_of(database)
    async with await psycopg.AsyncConnection.connect(conninfo(database)) as connection:
        (facts,) = (await read_catalog(connection, settings)).tables
        shape = shape_of_table(facts, own)
        at_stream = await read_relation_facts(connection, relation)
        stream_shape = shape_of_relation(relation, at_stream, own)
    columns = ", ".join(select_expression(column) for column in shape.columns)
    with adbc.connect(conninfo(database)) as driver, driver.cursor() as cursor:
        cursor.execute(f"SELECT {columns} FROM {from_item(facts)} ORDER BY id")
        table = cursor.fetch_arrow_table()
    assert table.column_names == [column.name for column in shape.columns]
    snapshot = {
        column.name: from_adbc(table.column(i), column.type, f"t.{column.name}")
        for i, column in enumerate(shape.columns)
    }
    decoded = decode_rows(relation, payloads)
    stream = {}
    indexes = {column.name: index for index, column in enumerate(relation.columns)}
    for column in stream_shape.columns:
        texts = decoded.new[indexes[column.name]]
        assert texts is not None
        stream[column.name] = from_text(texts.texts, column.type, f"t.{column.name}")
    return Table(shape, stream_shape, snapshot, stream)


def create(database: Database, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """public.t with a column c0, c1, ... of each type, then a slot, then the rows."""
    listed = "".join(f", c{i} {type_}" for i, type_ in enumerate(columns))
    database.execute(
        *TYPES,
        f"CREATE TABLE t (id serial PRIMARY KEY{listed})",
        f"CREATE PUBLICATION {SLOT} FOR TABLE t",
        f"SELECT pg_create_logical_replication_slot('{SLOT}', 'pgoutput')",
    )
    names = ", ".join(f"c{i}" for i in range(len(columns)))
    marks = ", ".join(f"%s::text::{type_}" for type_ in columns)
    with database.connect() as connection:
        connection.cursor().executemany(f"INSERT INTO t ({names}) VALUES ({marks})", rows)


async def test_every_type_is_the_same_from_a_snapshot_and_from_the_stream(
    postgres: Database,
) -> None:
    columns = list(CASES)
    deepest = max(len(texts) for _, texts in CASES.values())
    rows: list[list[str | None]] = [[None] * len(columns)]
    for row in range(deepest):
        rows.append([texts[row] if row < len(texts) else None for _, texts in CASES.values()])
    create(postgres, columns, rows)
    found = await both_ways(postgres)
    assert found.shape == found.stream_shape
    for index, (source_type, (type_, texts)) in enumerate(CASES.items()):
        name = f"c{index}"
        (column,) = (c for c in found.shape.columns if c.name == name)
        assert column.type == type_, source_type
        snapshot, stream = found.snapshot[name], found.stream[name]
        snapshot.validate(full=True)
        stream.validate(full=True)
        assert stream.type == arrow_type(type_), source_type
        assert str(stream.to_pylist()) == str(snapshot.to_pylist()), source_type  # NaN, -0
        assert snapshot.type == stream.type, source_type
        assert stream.null_count == len(rows) - len(texts), source_type


async def test_values_are_those_that_were_written(postgres: Database) -> None:
    columns = ["bpchar(3)", "inet", "mood", "timestamptz", "bytea", "text[]", "pair", "numeric"]
    row = ["a", "10.0.0.1", "sad", "2026-01-02 05:30:00+05:30", "\\x00ff", '{"a,b",NULL}', "(,)"]
    create(postgres, columns, [[*row, "1.50"]])
    found = await both_ways(postgres)
    values = [found.stream[f"c{i}"][0].as_py() for i in range(len(columns))]
    assert values[3].isoformat() == "2026-01-02T00:00:00+00:00"
    assert values[:3] == ["a  ", "10.0.0.1", "sad"]
    assert values[4:] == [b"\x00\xff", ["a,b", None], "(,)", "1.50"]


async def test_columns_under_text_are_as_postgresql_writes_them(postgres: Database) -> None:
    cases = {
        "timestamp": "infinity",
        "timestamptz": "-infinity",
        "date": "0044-03-15 BC",
        "numeric(5,1)": "NaN",
        "int4[]": "{{1,2},{3,4}}",
        "time": "24:00:00",
        "bool": "t",
        "bpchar(3)": "a  ",
        "float8": "0.1",
        "bytea": "\\x00",
        "mood": "ok",
        "inet": "10.0.0.1",
        "uuid": UUID,
        "code": "a    ",
    }
    create(postgres, list(cases), [list(cases.values())])
    own = TableSettings(text=tuple(f"c{i}" for i in range(len(cases))))
    found = await both_ways(postgres, own)
    for index, (source_type, text) in enumerate(cases.items()):
        name = f"c{index}"
        assert found.stream[name].to_pylist() == [text], source_type
        assert found.snapshot[name].to_pylist() == [text], source_type
    with adbc.connect(conninfo(postgres)) as driver, driver.cursor() as cursor:
        texts = ", ".join(output_text(column) for column in found.shape.columns)
        cursor.execute(f"SELECT {texts} FROM public.t")
        assert list(cursor.fetchone() or ()) == ["1", *cases.values()]


NOT_HELD = (
    ("timestamp", "infinity"),
    ("timestamptz", "-infinity"),
    ("timestamptz", "10000-01-01 00:00:00+00"),
    ("timestamp", "0044-03-15 00:00:00 BC"),
    ("date", "infinity"),
    ("date", "10000-01-01"),
    ("numeric(10,2)", "NaN"),
    ("int4[]", "{{1,2},{3,4}}"),
    ("int4[]", "[0:1]={1,2}"),
    ("time", "24:00:00"),
    ("date[]", "{infinity}"),
)


async def test_a_value_that_the_type_cannot_hold_is_refused_in_both_ways(
    postgres: Database,
) -> None:
    create(
        postgres, [one for one, _ in NOT_HELD], [[None] * len(NOT_HELD), [v for _, v in NOT_HELD]]
    )
    relation, payloads = stream_of(postgres)
    decoded = decode_rows(relation, payloads)
    settings = CaptureSettings("c", postgres.url, ("public.t",))
    async with await psycopg.AsyncConnection.connect(conninfo(postgres)) as connection:
        (facts,) = (await read_catalog(connection, settings)).tables
    columns = shape_of_table(facts, TableSettings()).columns[1:]
    selected = ", ".join(map(select_expression, columns))
    with adbc.connect(conninfo(postgres)) as driver, driver.cursor() as cursor:
        cursor.execute(f"SELECT {selected} FROM public.t ORDER BY id")
        table = cursor.fetch_arrow_table()
    for index, (column, (source_type, text)) in enumerate(zip(columns, NOT_HELD, strict=True)):
        texts = decoded.new[index + 1]
        assert texts is not None
        assert texts.texts.to_pylist() == [None, text], source_type
        refused = rf"public\.t\.c{index}\b.*list the column under 'text'"
        with pytest.raises(Unfit, match=refused):
            from_text(texts.texts, column.type, f"public.t.{column.name}")
        with pytest.raises(Unfit, match=refused):
            from_adbc(table.column(index), column.type, f"public.t.{column.name}")
