"""Many JSON texts at once are read exactly as the codec reads them one by one."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream import errors
from millstream.schemas import Schema, make_codec
from millstream.schemas import types as t
from millstream.schemas.formats.json_columns import JsonColumns
from tests.unit.schemas.schema_strategies import quick, records, values

FLAT = t.Record(
    "Flat",
    (
        t.Field("id", t.Int(64)),
        t.Field("small", t.Int(8, False)),
        t.Field("price", t.Float(64)),
        t.Field("narrow", t.Float(32)),
        t.Field("name", t.String()),
        t.Field("paid", t.Bool()),
        t.Field("at", t.Timestamp()),
        t.Field("local", t.Timestamp(False, "ms")),
        t.Field("day", t.Date()),
        t.Field("cost", t.Decimal(9, 2)),
        t.Field("color", t.Enum("Color", ("RED", "BLUE"))),
        t.Field("who", t.Uuid()),
        t.Field("note", t.Nullable(t.String())),
        t.Field("tip", t.Nullable(t.Int(64)), None),
        t.Field("tags", t.List(t.String())),
        t.Field("place", t.Nullable(t.Record("Place", (t.Field("x", t.Nullable(t.Int(32))),)))),
    ),
)


def both_ways(record: t.Record, texts: list[bytes]) -> tuple[Any, Any]:
    """The column, or the type of the refusal, by both ways."""
    columns = JsonColumns(Schema(record))
    block = b"".join(text + b"\n" for text in texts)
    found: list[Any] = []
    for read in (columns.column, columns.column_by_codec):
        try:
            found.append(read(block, len(texts)))
        except errors.Unfit as error:
            found.append(str(error))
    return found[0], found[1]


def assert_same(record: t.Record, texts: list[bytes]) -> None:
    fast, exact = both_ways(record, texts)
    if isinstance(exact, str):
        assert fast == exact
    else:
        assert fast.type == exact.type
        assert fast.equals(exact), (fast, exact)
        fast.validate(full=True)


@quick
@given(st.data())
def test_any_values_of_any_schema_are_read_as_the_codec_reads_them(data: st.DataObject) -> None:
    record = data.draw(records(unions=False))
    rows = data.draw(st.lists(values(record, finite=True), max_size=4))
    try:
        codec = make_codec(Schema(record), "json")
    except errors.MillstreamError:
        return
    assert_same(record, [codec.encode(row) for row in rows])


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_texts_of_other_programs_are_read_or_refused_as_by_the_codec(data: st.DataObject) -> None:
    field = data.draw(st.sampled_from(FLAT.fields))
    record = t.Record("One", (field, t.Field("z", t.Nullable(t.Int(8)), 7)))
    odd = [
        b"null", b"1", b"1.0", b"1e2", b"-0", b"0.1", b"1e400", b"NaN", b"300", b"true", b"[]",
        b"{}",
        b'"2026-01-01T10:00:00Z"', b'"2026-01-01T10:00:00.5Z"', b'"2026-01-01 10:00:00Z"',
        b'"2026-01-01T10:00:00.123456Z"', b'"2026-01-01T10:00:00.123"', b'"2026-01-01T10:00"',
        b'"2026-01-01T10:00:00"', b'"2026-01-01T10:00:00+01:00"', b'"2026-13-01T10:00:00Z"',
        b'"0000-01-01T10:00:00Z"', b'"2026-01-01T24:00:00Z"', b'"2026-01-01T10:00:60Z"',
        b'"2026-01-01"', b'"0000-01-01"', b'"20260101"', b'"2026-02-30"', b'"1.50"', b'"1.5"',
        b'"1e1"', b'"1.555"', b'"-0.00"', b'"12345678.00"', b'"RED"', b'"GREEN"', b'"red"',
        b'"00000000-0000-0000-0000-00000000000a"', b'"00000000-0000-0000-0000-00000000000A"',
        b'"\xff"', b'"\\ud800"', b'"\x01"', b'["a",null]', b'["a","b"]', b'{"x":null}',
        b'{"x":5}', b'{"y":5}', b'9007199254740993', b'16777217', b'0.10000000149011612',
    ]  # fmt: skip
    parts = [b'"%b":%b' % (field.name.encode(), value) for value in odd]
    rest = [b'"z":3', b'"z":null', b'"other":1', b' "z" : 4 ']
    lines = st.builds(
        lambda given: b"{" + b",".join(given) + b"}",
        st.lists(st.sampled_from(parts) | st.sampled_from(rest), max_size=3),
    )
    assert_same(record, data.draw(st.lists(lines, min_size=1, max_size=3)))


def test_usual_types_take_the_fast_path(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {
            "id": 1, "small": 255, "price": 0.1, "narrow": 0.5, "name": "é\n\"", "paid": True,
            "at": "2026-11-01T10:00:00Z", "local": "2026-11-01T10:00:00.123000",
            "day": "2026-11-01", "cost": "1.50", "color": "RED",
            "who": "00000000-0000-0000-0000-00000000000a", "note": None, "tip": None,
            "tags": ["a", "b"], "place": {"x": 5},
        },
        {
            "id": -5, "small": 0, "price": 3, "narrow": 2, "name": "", "paid": False,
            "at": "1969-11-01T10:00:00.000001Z", "local": "2026-11-01T10:00:00",
            "day": "0001-01-01", "cost": "-9999999.99", "color": "BLUE",
            "who": "00000000-0000-0000-0000-00000000000b", "note": "x", "tip": 5,
            "tags": [], "place": None,
        },
    ]  # fmt: skip
    codec = make_codec(Schema(FLAT), "json")
    texts = [codec.encode(codec.decode(json.dumps(row).encode())) for row in rows]
    assert_same(FLAT, texts)
    monkeypatch.setattr(JsonColumns, "column_by_codec", None)
    block = b"".join(text + b"\n" for text in texts)
    assert len(JsonColumns(Schema(FLAT)).column(block, 2)) == 2


def test_no_texts_are_an_empty_column() -> None:
    assert_same(FLAT, [])


NOTE = t.Record("Note", (t.Field("text", t.Nullable(t.String())),))


def test_a_missing_field_is_not_a_null() -> None:
    assert_same(NOTE, [b'{"text":null}', b'{"text":"a"}'])
    assert_same(NOTE, [b"{}", b'{"text":"\\"text\\":null"}'])
    assert isinstance(both_ways(NOTE, [b"{}"])[0], str)
    assert isinstance(both_ways(NOTE, [b'{"text":null}'])[0], pa.StructArray)
