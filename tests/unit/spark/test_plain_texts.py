"""Texts that are read by where their quotes are give what the codec makes of them one by one."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.schemas import Schema
from millstream.schemas import types as t
from millstream.schemas.formats.json_columns import JsonColumns, NotFast
from millstream.spark.source.plain_texts import PlainTexts

FIELDS = (
    t.Field("amount", t.Int(64)),
    t.Field("small", t.Int(8, False)),
    t.Field("paid", t.Bool()),
    t.Field("note", t.String()),
    t.Field("at", t.Timestamp()),
    t.Field("color", t.Enum("Color", ("RED", "BLUE"))),
    t.Field("tip", t.Nullable(t.Int(32)), None),
    t.Field("remark", t.Nullable(t.String()), "none"),
)
NUMBERS = ["0", "5", "-7", "255", "256", "-1", "9223372036854775807", "9223372036854775808"]
TEXTS = ['""', '"salary"', '"é }{,:["', '"RED"', '"BLUE"', '"2026-01-01T10:00:00Z"', '"a b"']
ODD = [
    *("-0", "05", "+5", "0x1F", "1.0", "1e2", " 5", "5 ", "-", "", "null", "[]", "{}", "tru"),
    *("TRUE", "truer", "truefalse", "--5", "1_0", "٣", '"', '"a"b"', '"a\\"b"', '"\\u0041"'),
    *('"\t"', '"a","note":"b"', '5,"note":"x"', '"x"}\n{"amount":1', '"2026-13-01T10:00:00Z"'),
]


@st.composite
def texts_of(draw: st.DrawFn, fields: tuple[t.Field, ...]) -> bytes:
    """Mostly as the codec writes it."""
    values = []
    for field in fields:
        type_, _ = t.strip(field.type)
        usual = NUMBERS[:4] if isinstance(type_, t.Int) else TEXTS[:3]
        usual = ["true", "false"] if isinstance(type_, t.Bool) else usual
        usual = TEXTS[3:5] if isinstance(type_, t.Enum) else usual
        usual = TEXTS[5:6] if isinstance(type_, t.Timestamp) else usual
        chance = draw(st.integers(0, 40))
        odd = st.sampled_from(ODD if chance == 0 else NUMBERS + TEXTS)
        values.append(draw(odd if chance < 2 else st.sampled_from(usual)))
    names = [field.name for field in fields]
    form = draw(st.sampled_from(['"{}":{}'] * 30 + ['"{}" :{}', ' "{}":{}', '"x{}":{}']))
    parts = [form.format(name, value) for name, value in zip(names, values, strict=True)]
    if draw(st.integers(0, 30)) == 0:
        parts = draw(st.permutations(parts))[draw(st.integers(0, 1)) :]
    return ("{" + ",".join(parts) + "}").encode()


def read(way: Any, texts: bytes, count: int) -> Any:
    try:
        return way(texts, count)
    except (NotFast, pa.ArrowException, UnicodeDecodeError):
        return None


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_what_is_read_is_what_the_codec_reads(data: st.DataObject) -> None:
    """Never anything that the codec refuses, and never other values."""
    chosen = data.draw(st.lists(st.sampled_from(FIELDS), min_size=1, max_size=4, unique=True))
    fields = tuple(chosen)
    record = t.Record("Event", fields)
    texts = data.draw(st.lists(texts_of(fields), min_size=1, max_size=4))
    if data.draw(st.integers(0, 20)) == 0:
        texts[0] = texts[0].replace(b"a", b"\xff")
    block = b"".join(text + b"\n" for text in texts)
    same_or_refused(record, block, len(texts))


def same_or_refused(record: t.Record, texts: bytes, count: int) -> bool:
    """Whether the texts were read; then as the codec reads them."""
    found = read(PlainTexts(record, {f.name for f in record.fields}).column, texts, count)
    if found is None:
        return False
    found.validate(full=True)
    exact = JsonColumns(Schema(record)).column_by_codec(texts, count)
    assert found.type == exact.type
    assert found.equals(exact), texts
    return True


def test_every_odd_value_of_every_field_is_refused_or_read_as_by_the_codec() -> None:
    for field in FIELDS:
        for record in (
            t.Record("First", (field, t.Field("z", t.Int(8)))),
            t.Record("Last", (t.Field("z", t.String()), field)),
        ):
            other = '"z":1' if record.name == "First" else '"z":"a"'
            for value in NUMBERS + TEXTS + ODD:
                parts = [f'"{field.name}":{value}', other]
                text = ",".join(parts if record.name == "First" else parts[::-1])
                same_or_refused(record, f"{{{text}}}\n".encode(), 1)


def test_texts_with_one_wrong_byte_are_refused_or_read_as_by_the_codec() -> None:
    fields = (t.Field("n", t.Int(16)), t.Field("s", t.String()), t.Field("b", t.Bool()))
    texts = b'{"n":10,"s":"a","b":true}\n{"n":-2,"s":"","b":false}\n'
    turned = b'{"b":true,"s":"a","n":10}\n{"b":false,"s":"","n":5}\n'
    for order in (fields, fields[::-1]):
        record = t.Record("Event", order)
        block = texts if order == fields else turned
        assert same_or_refused(record, block, 2)
        for at in range(len(block)):
            for byte in (b"", *(bytes([code]) for code in b'"\\{}:,-0 x\n\r\xc3')):
                same_or_refused(record, block[:at] + byte + block[at + 1 :], 2)  # replaced
                same_or_refused(record, block[:at] + byte + block[at:], 2)  # in between


def test_texts_as_the_codec_writes_them_are_read() -> None:
    record = t.Record("Event", FIELDS)
    texts = (
        b'{"amount":-5,"small":0,"paid":true,"note":"","at":"2026-01-01T10:00:00Z",'
        b'"color":"RED","tip":7,"remark":"x"}\n'
        b'{"amount":123456789012345678,"small":255,"paid":false,"note":"\xc3\xa9 }{",'
        b'"at":"2026-01-01T10:00:00.000001Z","color":"BLUE","tip":0,"remark":"y"}\n'
    )
    found = PlainTexts(record, {field.name for field in FIELDS}).column(texts, 2)
    assert found.equals(JsonColumns(Schema(record)).column_by_codec(texts, 2))


def test_a_text_that_nobody_asked_for_is_checked_but_not_copied() -> None:
    record = t.Record("Event", (t.Field("amount", t.Int(64)), t.Field("note", t.String())))
    plain = PlainTexts(record, {"amount"})
    found = plain.column(b'{"amount":1,"note":"a"}\n{"amount":2,"note":"b"}\n', 2)
    assert found.to_pylist() == [{"amount": 1, "note": None}, {"amount": 2, "note": None}]
    for damaged in (b'"\xff"', b'"\\x"', b'"\x01"', b"5", b'"a', b'a"'):
        with pytest.raises((NotFast, UnicodeDecodeError)):
            plain.column(b'{"amount":1,"note":%b}\n' % damaged, 1)


@pytest.mark.parametrize(
    "fields",
    [
        (t.Field("price", t.Float(64)),),
        (t.Field("tags", t.List(t.String())),),
        (t.Field("größe", t.Int(64)),),
    ],
)
def test_records_with_other_types_are_left_to_the_parser(fields: tuple[t.Field, ...]) -> None:
    with pytest.raises(NotFast):
        PlainTexts(t.Record("Event", fields), ())
