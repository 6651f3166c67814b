"""Schemas declared in every supported form, and what is refused for which reason."""

from __future__ import annotations

import dataclasses
import datetime as dt
import decimal
import subprocess
import sys
import uuid
from typing import Annotated, Any, Literal

import msgspec
import pyarrow as pa
import pydantic
import pytest
from google.protobuf import descriptor_pb2, timestamp_pb2

from millstream import errors
from millstream.schemas import (
    Aliases,
    Doc,
    Schema,
    declare,
    make_codec,
    pin_numbers,
    to_avro,
)
from millstream.schemas import types as t

F = t.Field


@dataclasses.dataclass
class Address:
    """Where somebody lives."""

    street: str
    number: int | None = None


@dataclasses.dataclass
class Person:
    id: uuid.UUID
    name: Annotated[str, Doc("as on the passport"), Aliases("full_name")]
    born: dt.date
    address: Address
    balance: Annotated[decimal.Decimal, t.Decimal(12, 2)] = decimal.Decimal(0)
    small: Annotated[int, t.Int(16)] = 0
    kind: Literal["a", "b"] = "a"
    seen: Annotated[dt.datetime, t.Timestamp(utc=False)] | None = None
    tags: list[str] = dataclasses.field(default_factory=list)
    made: dt.datetime = dataclasses.field(default_factory=lambda: dt.datetime.now(dt.UTC))


ADDRESS = t.Record(
    "Address",
    (F("street", t.String()), F("number", t.Nullable(t.Int(64)), None)),
    "Where somebody lives.",
)


def test_a_dataclass_gives_names_types_defaults_docs_and_aliases() -> None:
    assert declare(Person).record == t.Record(
        "Person",
        (
            F("id", t.Uuid()),
            F("name", t.String(), doc="as on the passport", aliases=("full_name",)),
            F("born", t.Date()),
            F("address", ADDRESS),
            F("balance", t.Decimal(12, 2), decimal.Decimal("0.00")),
            F("small", t.Int(16), 0),
            F("kind", t.Enum("kind", ("a", "b")), "a"),
            F("seen", t.Nullable(t.Timestamp(utc=False)), None),
            F("tags", t.List(t.String()), []),
            # A default that differs each time is not one that readers can use.
            F("made", t.Timestamp()),
        ),
    )


class Model(pydantic.BaseModel):
    id: int = pydantic.Field(description="the key")
    price: decimal.Decimal = pydantic.Field(max_digits=10, decimal_places=2)
    local: pydantic.NaiveDatetime
    zoned: pydantic.AwareDatetime
    names: dict[str, int] = {}


class Struct(msgspec.Struct):
    id: Annotated[int, t.Int(32)]
    local: Annotated[dt.datetime, msgspec.Meta(tz=False)]
    either: int | str | None = None


def test_pydantic_models_and_structs_use_their_libraries_metadata() -> None:
    assert declare(Model).record.fields == (
        F("id", t.Int(64), doc="the key"),
        F("price", t.Decimal(10, 2)),
        F("local", t.Timestamp(utc=False)),
        F("zoned", t.Timestamp()),
        F("names", t.Map(t.Int(64)), {}),
    )
    assert declare(Struct).record.fields == (
        F("id", t.Int(32)),
        F("local", t.Timestamp(utc=False)),
        F("either", t.Nullable(t.Union((t.Int(64), t.String()))), None),
    )


@dataclasses.dataclass
class Tree:
    child: Tree | None = None


def one(hint: Any) -> type:
    return dataclasses.make_dataclass("One", [("x", hint)])


@pytest.mark.parametrize(
    ("hint", "reason"),
    [
        (decimal.Decimal, "set its digits"),
        (Any, "any value' is not a type"),
        (list, "set its item type"),
        (set[int], "no format has sets"),
        (tuple[int, str], "tuples of fixed length"),
        (complex, "no such type"),
        (Literal[1, 2], "only text"),
        (str | bytes | Literal["a"], "ambiguous"),
        (Annotated[int, t.String()], "which is another type"),
        (Annotated[int, pydantic.Field(gt=0)], "the constraint gt=0"),
        (Annotated[str, msgspec.Meta(pattern="a+")], "the constraint pattern='a\\+'"),
    ],
)
def test_what_python_cannot_express_is_refused_with_field_and_reason(
    hint: Any, reason: str
) -> None:
    with pytest.raises(errors.Unmappable, match=f"field 'x': .*({reason})"):
        declare(one(hint))


def test_a_class_that_contains_itself_is_refused() -> None:
    with pytest.raises(errors.Unmappable, match=r"field 'child': .*contains itself"):
        declare(Tree)


def test_constraints_are_dropped_only_on_request() -> None:
    cls = one(Annotated[str, msgspec.Meta(max_length=3)])
    assert declare(cls, drop_constraints=True).record.fields == (F("x", t.String()),)


@pytest.mark.parametrize(
    ("arrow", "reason"),
    [
        (pa.timestamp("ns", "UTC"), "cast the column to us"),
        (pa.timestamp("us", "Europe/Berlin"), "zone Europe/Berlin would be lost"),
        (pa.float16(), "no such type"),
        (pa.date64(), "date32"),
        (pa.null(), "no such type"),
        (pa.decimal256(50, 2), "at most 38 digits"),
        (pa.dense_union([pa.field("a", pa.int64())]), "no such type"),
        (pa.list_(pa.int64(), 3), "no such type"),
    ],
)
def test_arrow_types_outside_the_model_are_refused(arrow: pa.DataType, reason: str) -> None:
    with pytest.raises(errors.Unmappable, match=f"field 'x'.*{reason}"):
        declare(pa.schema([("x", arrow)]))


def test_an_arrow_schema_and_its_storage_variants_are_read() -> None:
    schema = pa.schema([
        pa.field("a", pa.dictionary(pa.int8(), pa.large_string()), nullable=False),
        pa.field("b", pa.struct([pa.field("c", pa.int8())])),
    ])  # fmt: skip
    inner = t.Record("Event_b", (F("c", t.Nullable(t.Int(8)), None),))
    record = declare(schema, name="Event").record
    assert record.fields == (F("a", t.String()), F("b", t.Nullable(inner), None))


AVRO = """{"type": "record", "name": "Order", "namespace": "shop", "fields": [
  {"name": "id", "type": "long"},
  {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
  {"name": "price", "type": {"type": "fixed", "name": "Price", "size": 8,
                             "logicalType": "decimal", "precision": 10, "scale": 2}},
  {"name": "line", "type": {"type": "record", "name": "Line", "fields": [
      {"name": "sku", "type": "string", "default": "none", "aliases": ["code"]}]}},
  {"name": "other", "type": ["null", "Line"], "default": null},
  {"name": "raw", "type": "bytes", "default": "\\u00ff"}]}"""


def test_an_avro_schema_is_read_and_written_exactly_as_declared() -> None:
    schema = declare(AVRO)
    line = t.Record("shop.Line", (F("sku", t.String(), "none", aliases=("code",)),))
    assert schema.record == t.Record(
        "shop.Order",
        (
            F("id", t.Int(64)),
            F("at", t.Timestamp(True, "ms")),
            F("price", t.Decimal(10, 2)),
            F("line", line),
            F("other", t.Nullable(line), None),
            F("raw", t.Binary(), b"\xff"),
        ),
    )
    value = {"id": 1, "at": dt.datetime(1970, 1, 1, 0, 0, 1, tzinfo=dt.UTC),
             "price": decimal.Decimal("1.00"), "line": {}}  # fmt: skip
    data = make_codec(Schema.from_json(schema.to_json()), "avro").encode(value)
    # long 1; 1,000 milliseconds; fixed(8) of 100; "none"; null; one byte ff.
    assert data.hex() == "02" + "d00f" + "0000000000000064" + "086e6f6e65" + "00" + "02ff"


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        ('{"type": "record", "name": "R", "fields": [{"name": "r", "type": ["null", "R"]}]}',
         "contains itself"),
        ('{"type": "record", "name": "R", "fields": [{"name": "x", "type": "null"}]}',
         "null alone"),
        ('{"type": "record", "name": "R", "fields": [{"name": "x", "type": "Foo"}]}',
         "no Avro type named"),
        ('{"type": "record", "name": "R", "fields": [{"name": "x", "type": {"type": "long", '
         '"logicalType": "timestamp-nanos"}}]}', "microseconds"),
        ('{"type": "record", "name": "R", "fields": [{"name": "x", "type": "int", '
         '"default": "a"}]}',
         "default 'a' does not fit int32"),
        ('{"type": "record", "name": "R", "fields": [{"name": "x", "type": ["string", '
         '{"type": "enum", "name": "E", "symbols": ["A"]}]}]}', "ambiguous"),
        ('{"type": "record", "name": "R", "fields": []}', "no fields"),
        ('{"type": "record", "name": "R", "fields": 7}', "malformed"),
        ('{"type": "record", "fields": [', "not JSON"),
        ('{"type": "record", "name": "R", "fields": [{"name": "x", "type": {"type": "int", '
         '"millstream": "duration"}}]}', "annotated as duration"),
    ],
)  # fmt: skip
def test_avro_schemas_outside_the_model_are_refused(form: str, reason: str) -> None:
    with pytest.raises(errors.SchemaError, match=reason):
        declare(form, format="avro")


@pytest.mark.parametrize(
    ("type_", "default"),
    [
        (t.Union((t.Int(64), t.String())), "a"),
        (t.List(t.Nullable(t.Int(64))), [1]),
        (t.Record("I", (F("u", t.Union((t.Int(64), t.String()))),)), {"u": "a"}),
    ],
)
def test_defaults_that_avro_would_read_as_another_option_are_refused(
    type_: t.Type, default: Any
) -> None:
    schema = Schema(t.Record("R", (F("x", type_, default),)))
    with pytest.raises(errors.Unmappable, match=r"field 'x'.*first option of each union"):
        to_avro(schema.record)


JSON_SCHEMA: dict[str, Any] = {
    "title": "Order",
    "type": "object",
    "properties": {
        "id": {"type": "integer"},
        "email": {"type": "string", "format": "email"},
        "at": {"type": ["string", "null"], "format": "date-time"},
        "line": {"$ref": "#/$defs/Line"},
        "kind": {"enum": ["a", "b"], "default": "a"},
        "extra": {"type": "object", "additionalProperties": {"type": "number"}},
    },
    "required": ["id", "email", "at", "line"],
    "$defs": {"Line": {"type": "object", "properties": {"n": {"type": "boolean"}},
     "required": ["n"]}},
}  # fmt: skip


def test_a_json_schema_is_read_with_references_and_optional_properties() -> None:
    assert declare(JSON_SCHEMA).record == t.Record(
        "Order",
        (
            F("id", t.Int(64)),
            F("email", t.String()),
            F("at", t.Nullable(t.Timestamp())),
            F("line", t.Record("Line", (F("n", t.Bool()),))),
            F("kind", t.Enum("Order_kind", ("a", "b")), "a"),
            F("extra", t.Nullable(t.Map(t.Float(64))), None),
        ),
    )


@pytest.mark.parametrize(
    ("prop", "reason"),
    [
        ({"type": "string", "pattern": "a+"}, "pattern.*would be lost"),
        ({"type": "integer", "minimum": 3}, "only the ranges"),
        ({"type": "array"}, "set its type"),
        ({}, "no 'type'"),
        (True, "any value' is not a type"),
        ({"type": "object"}, "set its 'properties'"),
        ({"$ref": "#/$defs/Nope"}, "no such definition"),
        ({"$ref": "https://example.org/x"}, "inside the document"),
        ({"$ref": "#"}, "contains itself"),
        ({"type": "null"}, "no 'type'"),
        ({"enum": [1]}, "only text"),
        ({"type": "string", "contentEncoding": "base16"}, "base64"),
        ({"type": "integer", "default": "x"}, "default does not fit"),
        ({"type": "string", "x-millstream": "int8"}, "annotated as int8"),
        ({"anyOf": [{"type": "string"}, {"type": "string", "enum": ["a"]}]}, "ambiguous"),
        ({"allOf": [{"type": "string"}]}, "no 'type'"),
    ],
)
def test_json_schemas_outside_the_model_are_refused(prop: Any, reason: str) -> None:
    with pytest.raises(errors.SchemaError, match=reason):
        declare({"type": "object", "properties": {"x": prop}, "$defs": {}})


PROTO = """
syntax = "proto3";
package shop;
import "google/protobuf/timestamp.proto";

/* What was bought. */
message Order {
  // The key.
  sint64 id = 3;
  optional string note = 1;
  google.protobuf.Timestamp at = 7;
  repeated Line lines = 8;
  map<int32, bytes> blobs = 9;
  Kind kind = 10;
  oneof pay { string card = 11; Line cash = 12; }
  reserved 20 to 30, 40;
  enum Kind { UNKNOWN = 0; BIG = 5; }
  message Line { fixed32 n = 1; }
}
"""
LINE = t.Record("shop.Order.Line", (F("n", t.Int(32, signed=False), 0, number=1),))
ORDER = t.Record(
    "shop.Order",
    (
        F("id", t.Int(64), 0, "The key.", number=3),
        F("note", t.Nullable(t.String()), None, number=1),
        F("at", t.Nullable(t.Timestamp()), None, number=7),
        F("lines", t.List(LINE), [], number=8),
        F("blobs", t.Map(t.Binary(), t.Int(32)), {}, number=9),
        F("kind", t.Enum("shop_Order_Kind", ("UNKNOWN", "BIG")), "UNKNOWN", number=10),
        F("pay", t.Nullable(t.Union((t.String(), LINE))), None),
    ),
    "What was bought.",
)


def test_proto_text_is_read_with_presence_numbers_comments_and_oneofs() -> None:
    assert declare(PROTO).record == ORDER


def test_protobuf_events_are_written_with_the_declared_numbers_and_encodings() -> None:
    codec = make_codec(declare(PROTO), "protobuf")
    value = {"id": -1, "kind": "BIG", "pay": {"n": 7}, "blobs": {1: b"x"}}
    data = codec.encode(value)
    # note absent; id (3) as sint64; blobs (9); kind (10) by its number 5; cash (12) a message.
    assert data.hex() == "1801" + "4a05080112" + "0178" + "5005" + "62050d07000000"
    assert codec.decode(data) == {**value, "note": None, "at": None, "lines": []}
    with pytest.raises(errors.Unfit, match="'#99': expected no field with that number"):
        codec.decode(data + bytes.fromhex("980601"))
    with pytest.raises(errors.Unfit, match=r"field 'kind'.*the number 3"):
        codec.decode(bytes.fromhex("5003"))
    with pytest.raises(errors.Unfit, match="in Protobuf"):
        codec.decode(b"\xff")


def test_descriptors_sets_and_message_classes_are_accepted_too() -> None:
    from millstream.schemas import parse_proto

    file = parse_proto(PROTO)
    files = descriptor_pb2.FileDescriptorSet(file=[file])
    for source in (file, files, files.SerializeToString()):
        assert declare(source).record == ORDER
    record = declare(timestamp_pb2.Timestamp).record
    assert [field.name for field in record.fields] == ["seconds", "nanos"]
    schema = declare(files, message="shop.Order.Line")
    assert schema.record == LINE
    kept = Schema.from_json(schema.to_json())
    assert make_codec(kept, "protobuf").encode({"n": 1}) == b"\x0d\x01\x00\x00\x00"


def test_the_event_is_the_message_that_no_other_message_uses() -> None:
    text = 'syntax = "proto3"; message B { int64 b = 1; } message A { map<string, B> m = 1; }'
    assert declare(text).record.name == "A"
    assert declare(text, message="B").record.name == "B"


PROTO2 = """
syntax = "proto2";
message Old {
  required int32 id = 1;
  optional string name = 2 [default = "nobody"];
  optional bool flag = 3;
  repeated int32 n = 4 [packed = true];
}
"""


def test_proto2_required_and_default_fields_are_understood() -> None:
    schema = declare(PROTO2)
    assert schema.record.fields == (
        F("id", t.Int(32), number=1),
        F("name", t.String(), "nobody", number=2),
        F("flag", t.Nullable(t.Bool()), None, number=3),
        F("n", t.List(t.Int(32)), [], number=4),
    )
    codec = make_codec(schema, "protobuf")
    assert codec.decode(b"\x08\x05") == {"id": 5, "name": "nobody", "flag": None, "n": []}
    assert codec.encode({"id": 5, "n": [1, 2]}).hex() == "0805" + "12066e6f626f6479" + "22020102"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("message A { A a = 1; }", "contains itself"),
        ("message A { int64 id = 1 int32 b = 2; }", r"line 1, column \d+: mismatched input"),
        ("message A { int64 id = 1; int32 b = 1; }", "duplicate field number"),
        ("message A { Foo b = 1; }", "couldn't resolve name 'Foo'"),
        ("message A { int64 id = 0; }", "not a field number"),
        ("message A { oneof x { string a = 1; string b = 2; } }", "ambiguous"),
        ("message A { map<bool, string> m = 1; }", "keys of a map"),
        ('import "other.proto"; message A { int64 id = 1; }', "include_imports"),
        ('import "google/protobuf/any.proto"; message A { google.protobuf.Any a = 1; }',
         "use a scalar"),
        ("message A { int64 a = 1; } message B { int64 b = 1; }", "choose the event's message"),
        ("message A { }", "no fields"),
        ("message A { E e = 1; enum E { option allow_alias = true; X = 0; Y = 0; } }",
         "share a number"),
        ("message A {\n// @millstream {\"type\": \"uuid\"}\n int64 a = 1; }", "annotated as uuid"),
        ("message A {\n// @millstream nonsense\n int64 a = 1; }", "not JSON"),
    ],
)  # fmt: skip
def test_proto_texts_outside_the_model_are_refused(body: str, reason: str) -> None:
    with pytest.raises(errors.SchemaError, match=reason):
        declare(f'syntax = "proto3"; {body}')


def test_pinned_numbers_survive_new_and_removed_fields() -> None:
    one_ = pin_numbers(t.Record("R", (F("a", t.Int(64)), F("b", t.Int(64)))))
    two = pin_numbers(t.Record("R", (F("c", t.Int(64)), F("a", t.Int(64)))), [one_])
    three = pin_numbers(t.Record("R", (F("d", t.Int(64)), F("x", t.Int(64), aliases=("c",)))),
                        [one_, two])  # fmt: skip
    numbers = [{f.name: f.number for f in r.fields} for r in (one_, two, three)]
    assert numbers == [{"a": 1, "b": 2}, {"c": 3, "a": 1}, {"d": 4, "x": 3}]


def test_names_that_clash_only_in_protobuf_are_refused() -> None:
    union = t.Union((t.Int(64), t.String()))
    with pytest.raises(errors.Unmappable, match="duplicate json_name"):
        make_codec(Schema(t.Record("R", (F("a", union), F("a0", t.Int(64))))), "protobuf")
    with pytest.raises(errors.Unmappable, match="duplicate"):
        make_codec(Schema(t.Record("R", (F("a", union), F("a_0", t.Int(64))))), "protobuf")


def test_nothing_else_is_accepted_as_a_schema() -> None:
    for source in (7, object(), {"a": 1}, int, "{}"):
        with pytest.raises(errors.SchemaError, match=r"(?i)schema"):
            declare(source)


def test_importing_the_room_loads_no_heavy_library() -> None:
    heavy = ("pyarrow", "fastavro", "google.protobuf", "pydantic", "antlr4", "proto_schema_parser")
    code = f"import sys, millstream.schemas; sys.exit(any(m in sys.modules for m in {heavy!r}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("module", "use"),
    [
        ("fastavro", lambda: make_codec(declare(AVRO), "avro")),
        ("proto_schema_parser", lambda: declare(PROTO)),
    ],
)
def test_a_missing_extra_is_reported_with_the_pip_command(
    module: str, use: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(errors.MissingExtra, match=r"pip install 'millstream\[schemas\]'"):
        use()
