"""Pure parts of the sink: folding events, writing rows, fitting columns."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from millstream.cdc.sink.csv_rows import csv_rows
from millstream.cdc.sink.fitting import fits_postgres, fits_sqlite
from millstream.cdc.sink.fold import RowEvents, flatten, fold, truncates, worker_of
from millstream.cdc.sink.sql import postgres_type, postgres_type_of, sqlite_type
from millstream.errors import SinkError
from millstream.schemas import types as t

ROW = pa.struct([("id", pa.int64()), ("text", pa.string()), ("list", pa.list_(pa.int32()))])
CHANGE = pa.struct(
    [
        ("op", pa.string()),
        ("before", ROW),
        ("after", ROW),
        ("unchanged", pa.list_(pa.string())),
        ("source", pa.struct([("commit", pa.uint64())])),
    ]
)
HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))


def batch(values: list[Any], kind: pa.DataType, keys: list[Any], headers: Any = None) -> Any:
    count = len(values)
    return pa.RecordBatch.from_arrays(
        [
            pa.array([None if key is None else key.encode() for key in keys], pa.binary()),
            pa.array(headers or [None] * count, HEADERS),
            pa.array(values, kind),
            pa.array([0] * count, pa.int32()),
            pa.array([5] * count, pa.int64()),
            pa.array(range(count), pa.int32()),
        ],
        names=["key", "headers", "value", "partition", "offset", "index"],
    )


def changes(*given: tuple[str, dict[str, Any] | None, list[str] | None]) -> pa.RecordBatch:
    values = [
        {
            "op": op,
            "before": row if op == "d" else None,
            "after": None if op == "d" else row,
            "unchanged": names,
            "source": {"commit": 1},
        }
        for op, row, names in given
    ]
    return batch(values, CHANGE, [None if row is None else str(row["id"]) for _, row, _ in given])


def folded(*given: tuple[str, dict[str, Any] | None, list[str] | None]) -> list[tuple[Any, ...]]:
    found = fold(flatten([changes(*given)], "changes", ["id"]), ["id"])
    names = [None] * len(found) if found.unchanged is None else found.unchanged.to_pylist()
    rows = [tuple(row.values()) for row in found.rows.to_pylist()]
    return list(zip(rows, found.deleted.to_pylist(), names, strict=True))


def test_the_last_change_of_each_key_counts() -> None:
    assert folded(
        ("c", {"id": 1, "text": "a", "list": [1]}, None),
        ("c", {"id": 2, "text": "b", "list": None}, None),
        ("u", {"id": 1, "text": "c", "list": [2]}, None),
        ("d", {"id": 2}, None),
    ) == [((1, "c", [2]), False, None), ((2, None, None), True, None)]


def test_columns_that_were_not_sent_come_from_earlier_changes_of_the_key() -> None:
    assert folded(
        ("c", {"id": 1, "text": "a", "list": [1]}, None),
        ("u", {"id": 1, "text": None, "list": [2]}, ["text"]),
        ("u", {"id": 1, "text": None, "list": None}, ["text", "list"]),
        ("u", {"id": 2, "text": None, "list": [3]}, ["text"]),
        ("u", {"id": 2, "text": None, "list": None}, ["text", "list"]),
        ("u", {"id": 3, "text": None, "list": None}, ["text"]),
        ("d", {"id": 3}, None),
    ) == [
        ((1, "a", [2]), False, None),
        ((2, None, [3]), False, ["text"]),
        ((3, None, None), True, None),
    ]


def test_a_value_that_became_null_is_not_one_that_was_not_sent() -> None:
    assert folded(
        ("c", {"id": 1, "text": "a", "list": [1]}, None),
        ("u", {"id": 1, "text": None, "list": None}, ["list"]),
    ) == [((1, None, [1]), False, None)]


def test_an_operation_that_is_not_known_is_refused() -> None:
    with pytest.raises(SinkError, match=r"offset 5, index 0, has the operation 'z'"):
        flatten([changes(("z", {"id": 1}, None))], "changes", ["id"])


def test_a_row_without_its_key_is_refused() -> None:
    with pytest.raises(SinkError, match=r"a row \(.*offset 5, index 0\) has no value of .*'id'"):
        flatten([batch([{"id": None}], ROW, [None])], "rows", ["id"])


def test_a_deletion_is_found_by_the_key_of_its_event() -> None:
    kind = pa.struct(
        [("a", pa.decimal128(6, 2)), ("at", pa.timestamp("us", "UTC")), ("n", pa.int8())]
    )
    keys = ['["1.50","2026-01-02T03:04:05Z"]', '["2.50","2026-01-02T03:04:05Z"]']
    moment = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    values = [None, {"a": Decimal("2.50"), "at": moment, "n": 1}]
    found = flatten([batch(values, kind, keys)], "rows", ["a", "at"])
    assert found.deleted.to_pylist() == [True, False]
    assert found.rows.column("a").to_pylist() == [Decimal("1.50"), Decimal("2.50")]
    assert found.rows.column("at").to_pylist() == [moment, moment]
    with pytest.raises(SinkError, match="no value of column 'id'"):
        flatten([batch([None], ROW, ["x"])], "rows", ["id"])


def test_truncations_are_found_in_changes_and_in_rows() -> None:
    found = changes(("c", {"id": 1}, None), ("t", None, None), ("c", {"id": 1}, None))
    assert truncates(found, "changes") == [1]
    marks = [None, [{"key": "Cdc-Op", "value": b"t"}], [{"key": "Cdc-Op", "value": b"c"}]]
    assert truncates(batch([{"id": 1}, {}, {}], ROW, ["1", None, None], marks), "rows") == [1]


def test_all_events_of_a_key_go_to_one_worker() -> None:
    rows = pa.record_batch({"a": [1, 2, 1, 3] * 50, "b": ["x", "y", "x", "z"] * 50})
    nothing = pa.array([0] * 200)
    events = RowEvents(rows, pa.array([False] * 200), None, nothing, nothing, nothing)
    numbers = worker_of(events, ["a", "b"], 4).to_pylist()
    assert numbers[0] == numbers[2]
    assert numbers[:4] * 50 == numbers
    assert set(worker_of(events, ["a"], 1).to_pylist()) == {0}


# -- CSV ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "kind", "lines"),
    [
        (["", None, 'a"b'], pa.string(), '"",0\n,0\n"a""b",0\n'),
        ([b"\x00\xff", None], pa.binary(), '"\\x00ff",0\n,0\n'),
        ([[1, None], [], None], pa.list_(pa.int32()), '"{1,NULL}",0\n"{}",0\n,0\n'),
        ([['a"', "", None]], pa.list_(pa.string()), '"{""a\\"""","""",NULL}",0\n'),
        ([[[1], [2]]], pa.list_(pa.list_(pa.int8())), '"{{1},{2}}",0\n'),
        ([1, None], pa.duration("us"), '"1 microseconds",0\n,0\n'),
        ([{"x": 1}], pa.struct([("x", pa.int8())]), '"{""x"":1}",0\n'),
        ([[("k", 1)]], pa.map_(pa.string(), pa.int8()), '"{""k"":1}",0\n'),
        ([date(2026, 1, 2)], pa.date32(), "2026-01-02,0\n"),
        ([-800_000, 0], pa.date32(), '"0222-09-04 BC",0\n"1970-01-01",0\n'),
        ([4 * 10**17], pa.timestamp("us", "UTC"), '"14645-06-30 15:06:40.000000+00",0\n'),
        ([True, None], pa.bool_(), "true,0\n,0\n"),
        ([float("nan"), 0.1], pa.float64(), "nan,0\n0.1,0\n"),
    ],
)
def test_values_are_written_as_copy_reads_them(
    values: list[Any], kind: pa.DataType, lines: str
) -> None:
    column = pa.array(values, kind)
    rows = pa.RecordBatch.from_arrays([column, pa.array([0] * len(column))], names=["a", "b"])
    assert csv_rows(rows).decode() == lines
    # A slice is written like an array of its own.
    twice = pa.concat_arrays([column, column]).slice(len(column))
    part = pa.RecordBatch.from_arrays([twice, pa.array([0] * len(column))], names=["a", "b"])
    assert csv_rows(part).decode() == lines


def test_lists_are_json_in_a_column_of_documents() -> None:
    rows = pa.record_batch({"a": pa.array([["x", None]])})
    assert csv_rows(rows, {"a"}).decode() == '"[""x"",null]"\n'


# -- types --------------------------------------------------------------------------------


def test_columns_of_new_tables_hold_every_value() -> None:
    assert postgres_type_of(t.Nullable(of=t.List(item=t.Uuid()))) == "uuid[]"
    assert postgres_type_of(t.List(item=t.List(item=t.Int(32)))) == "integer[]"
    assert postgres_type_of(t.Map(value=t.Int())) == "jsonb"
    assert postgres_type(pa.list_(pa.struct([("a", pa.int8())]))) == "jsonb"
    assert sqlite_type(pa.uint64()) == "TEXT"
    assert sqlite_type(pa.timestamp("us")) == "TEXT"


@pytest.mark.parametrize(
    ("kind", "found", "fits"),
    [
        (t.Int(16), "integer", True),
        (t.Int(64), "integer", False),
        (t.Int(64), "numeric(20,0)", True),
        (t.Int(64), "numeric(10,0)", False),
        (t.Int(64), "text", True),
        (t.Decimal(10, 2), "numeric", True),
        (t.Decimal(10, 2), "numeric(10,1)", False),
        (t.Decimal(10, 2), "double precision", False),
        (t.Float(32), "double precision", True),
        (t.Float(64), "real", False),
        (t.String(), "jsonb", True),
        (t.String(), "numeric", True),  # captured as text when it has no limits
        (t.Timestamp(), "timestamp(3) with time zone", True),
        (t.Timestamp(), "timestamp without time zone", False),
        (t.Uuid(), "uuid", True),
        (t.Uuid(), "bytea", False),
        (t.Binary(), "bytea", True),
        (t.List(item=t.Int(32)), "bigint[]", True),
        (t.List(item=t.Int(32)), "jsonb", True),
        (t.List(item=t.Int(32)), "integer", False),
        (t.Bool(), "character varying(5)", True),
    ],
)
def test_a_column_of_postgresql_fits_if_it_holds_every_value(
    kind: t.Type, found: str, fits: bool
) -> None:
    assert fits_postgres(kind, found) is fits
    assert fits_postgres(t.Nullable(of=kind), found) is fits


@pytest.mark.parametrize(
    ("kind", "found", "fits"),
    [
        (t.Int(), "INTEGER", True),
        (t.Int(), "DATETIME", True),
        (t.String(), "VARCHAR(20)", True),
        (t.String(), "INTEGER", False),
        (t.String(), "DECIMAL(10,2)", False),
        (t.Decimal(10, 2), "DECIMAL(10,2)", True),
        (t.Decimal(20, 2), "DECIMAL(20,2)", False),
        (t.Timestamp(), "DATETIME", True),
        (t.Float(), "REAL", True),
        (t.Float(), "INTEGER", False),
        (t.Binary(), "", True),
        (t.Binary(), "TEXT", False),
    ],
)
def test_a_column_of_sqlite_fits_if_it_keeps_values_as_they_are(
    kind: t.Type, found: str, fits: bool
) -> None:
    assert fits_sqlite(kind, found) is fits
