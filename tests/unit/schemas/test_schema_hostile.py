"""Hostile schemas and bytes: bounded work, clear errors."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from millstream import errors
from millstream.schemas import Schema, declare, make_codec
from millstream.schemas import types as t

DEEP = 5_000


def nested_json(open_: str, close: str, inside: str = '"int"') -> str:
    return open_ * DEEP + inside + close * DEEP


@pytest.mark.parametrize(
    ("text", "format_"),
    [
        ('{"type":"record","name":"R","fields":[{"name":"x","type":'
         + nested_json('{"type":"array","items":', "}") + "}]}", "avro"),
        ('{"type":"object","properties":{"x":'
         + nested_json('{"type":"array","items":', "}", '{"type":"integer"}') + "}}", "json"),
        ('syntax = "proto3"; ' + "message A { " * DEEP + "int64 a = 1;" + "}" * DEEP, "protobuf"),
        ('syntax = "proto3"; message A { int64 a = 1 [(x) = ' + "{a: " * DEEP + "}" * DEEP + "]; }",
         "protobuf"),
    ],
    ids=["avro", "json", "proto messages", "proto options"],
)  # fmt: skip
def test_deep_nesting_is_refused(text: str, format_: str) -> None:
    with pytest.raises(errors.SchemaError, match=r"nested|deep"):
        declare(text, format=format_)


def test_deep_nesting_below_the_recursion_limit_is_refused_too() -> None:
    form: Any = "int"
    for _ in range(t.MAX_DEPTH * 2 + 1):
        form = {"type": "array", "items": form}
    record = {"type": "record", "name": "R", "fields": [{"name": "x", "type": form}]}
    with pytest.raises(errors.SchemaError, match="nested"):
        declare(record)
    type_: t.Type = t.Int(64)
    for _ in range(t.MAX_DEPTH):
        type_ = t.List(type_)
    with pytest.raises(errors.SchemaError, match="nested more than 32"):
        t.List(type_)


def bomb_avro() -> dict[str, Any]:
    """Thirty small records, each using the one before twice: 2^30 types when expanded."""
    form: Any = {"type": "record", "name": "R0", "fields": [{"name": "a", "type": "int"}]}
    for level in range(1, 30):
        form = {"type": "record", "name": f"R{level}", "fields": [
            {"name": "a", "type": form}, {"name": "b", "type": f"R{level - 1}"}]}  # fmt: skip
    return {**form, "name": "Top"}


def bomb_json() -> dict[str, Any]:
    leaf = {"type": "object", "properties": {"a": {"type": "integer"}}}
    definitions: dict[str, Any] = {"D0": leaf}
    for level in range(1, 25):
        ref = {"$ref": f"#/$defs/D{level - 1}"}
        definitions[f"D{level}"] = {"type": "object", "properties": {"a": ref, "b": ref}}
    return {"$ref": "#/$defs/D24", "$defs": definitions, "title": "Top"}


def bomb_proto() -> str:
    parts = ['syntax = "proto3"; message M0 { int64 a = 1; }']
    parts += [f"message M{n} {{ M{n - 1} a = 1; M{n - 1} b = 2; }}" for n in range(1, 30)]
    return " ".join(parts)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("bomb", [bomb_avro, bomb_json, bomb_proto])
def test_a_schema_that_explodes_when_expanded_is_refused_quickly(bomb: Any) -> None:
    with pytest.raises(errors.SchemaError, match="more than 5,000 types"):
        declare(bomb())


def test_size_is_bounded() -> None:
    fields = [{"name": f"f{n}", "type": "int"} for n in range(t.MAX_NODES + 1)]
    with pytest.raises(errors.SchemaError, match="more than 5,000 types"):
        declare({"type": "record", "name": "R", "fields": fields})
    with pytest.raises(errors.SchemaError, match="1,048,576"):
        declare(" " * (1 << 20) + "{}")
    with pytest.raises(errors.SchemaError, match="1,048,576"):
        declare(bytes((1 << 20) + 1))
    with pytest.raises(errors.SchemaError, match="symbols"):
        t.Enum("E", tuple(f"S{n}" for n in range(t.MAX_SYMBOLS + 1)))


@pytest.mark.parametrize(
    "field",
    [
        {"name": "x", "type": "int", "aliases": "abc"},
        {"name": "x", "type": "int", "doc": 5},
        {"name": "x", "type": {"type": "enum", "name": "E", "symbols": "ABC"}},
        {"name": "x", "type": "int", "millstream": {"number": 0}},
        {"name": "x", "type": "int", "millstream": {"number": True}},
    ],
)
def test_facts_of_the_wrong_kind_are_refused(field: dict[str, Any]) -> None:
    with pytest.raises(
        errors.SchemaError, match=r"not a list of texts|must be text|not a field number"
    ):
        declare({"type": "record", "name": "R", "fields": [field]})


@pytest.mark.parametrize("name", ["", "a.b", "a\n", "a\x00", "x" * 256, None, 7])
def test_names_that_would_break_something_later_are_refused(name: Any) -> None:
    with pytest.raises(errors.SchemaError, match="not a usable field name"):
        t.Field(name, t.Bool())


KEPT: dict[str, Any] = {"type": "record", "name": "R", "fields": [{"name": "a", "type": "int8"}]}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "null",
        '{"record": 5}',
        '{"record": "int8"}',
        '{"record": {"type": "record"}}',
        '{"record": {"type": "list", "item": "int8"}}',
        '{"record": {"type": "nope"}}',
        json.dumps({"record": {**KEPT, "fields": [{"name": "a", "type": "decimal(99,1)"}]}}),
        json.dumps({"record": {**KEPT, "fields": [{"name": "a", "type": "int8", "default": "x"}]}}),
        json.dumps({"record": KEPT, "origin": {"format": "?", "text": ""}}),
        json.dumps({"record": KEPT, "origin": 7}),
    ],
)
def test_a_damaged_stored_schema_is_refused(text: str) -> None:
    with pytest.raises(errors.SchemaError):
        Schema.from_json(text)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
    | st.sampled_from(["record", "array", "int", "object", "string", "enum", "map", "fixed"]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(["type", "name", "fields", "items", "values", "symbols", "properties",
                         "anyOf", "$ref", "enum", "default", "size", "required", "millstream",
                         "x-millstream", "logicalType", "precision", "options", "of"]),
        inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(JSON_VALUES, st.sampled_from(["avro", "json"]))
@example({"type": "record", "name": "R", "fields": [{"name": "x", "type": {"type": 5}}]}, "avro")
@example({"type": "object", "properties": {"x": {"type": "string", "enum": 5}}}, "json")
@example({"type": "object", "properties": {"x": {"anyOf": 5}}}, "json")
def test_any_json_is_a_schema_or_a_schema_error(form: Any, format_: str) -> None:
    try:
        declare(json.dumps(form), format=format_)
    except errors.SchemaError as error:
        refused = str(error)
        if not refused:
            raise


RECORD = t.Record(
    "R",
    (
        t.Field("id", t.Int(8)),
        t.Field("text", t.Nullable(t.String())),
        t.Field("list", t.List(t.Union((t.Int(64), t.String(), t.Record("I", (t.Field("a",
         t.Uuid()),)))))),
        t.Field("map", t.Map(t.Decimal(20, 3))),
        t.Field("at", t.Timestamp()),
        t.Field("kind", t.Enum("E", ("A", "B"))),
    ),
)  # fmt: skip
PROTO_RECORD = t.Record(
    "R",
    (
        *(f for f in RECORD.fields if f.name != "list"),
        t.Field("one", t.Union((t.Int(64), t.Duration()))),
        t.Field("day", t.Date()),
    ),
)


@pytest.mark.parametrize(
    ("wire", "record"), [("avro", RECORD), ("json", RECORD), ("protobuf", PROTO_RECORD)]
)
def test_any_bytes_are_an_event_or_unfit(wire: Any, record: t.Record) -> None:
    codec = make_codec(Schema(record), wire)

    @settings(max_examples=150, deadline=None)
    @given(st.binary(max_size=60) | JSON_VALUES.map(lambda v: json.dumps(v).encode()))
    @example(b"[" * 100_000)
    @example(b"\x02\x00" + b"\xff" * 9 + b"\x7f")
    @example(b'{"id": 1e400}')
    def feed(data: bytes) -> None:
        try:
            value = codec.decode(data)
        except errors.Unfit:
            return
        assert codec.decode(codec.encode(value)) == value

    feed()
