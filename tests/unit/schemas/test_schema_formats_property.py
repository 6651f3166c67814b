"""Every type through every format and back."""

from __future__ import annotations

import json
from typing import Any

import fastavro
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream import errors
from millstream.schemas import (
    ColumnBuilder,
    Conformer,
    RowReader,
    Schema,
    arrow_type,
    declare,
    from_arrow,
    from_avro,
    from_descriptor,
    from_json_schema,
    make_codec,
    spark_arrow_type,
    to_arrow,
    to_avro,
    to_descriptor,
    to_json_schema,
    to_proto,
    to_spark,
)
from millstream.schemas import types as t
from millstream.schemas.canonical import dump, load
from millstream.schemas.formats.proto_reading import load_set, load_text
from millstream.schemas.schema import checked
from tests.unit.schemas.schema_strategies import LEAVES, quick, records, records_and_values, values


@quick
@given(records())
def test_the_canonical_form_gives_the_same_record_and_fingerprint_back(record: t.Record) -> None:
    schema = Schema(record)
    again = Schema.from_json(schema.to_json())
    assert again == schema
    assert again.fingerprint == schema.fingerprint
    assert load(dump(schema.record)) == schema.record


@quick
@given(records())
def test_arrow_gives_the_same_record_back(record: t.Record) -> None:
    record = checked(record)
    kept = pa.ipc.read_schema(to_arrow(record).serialize())
    assert from_arrow(kept) == record


@quick
@given(records())
def test_avro_gives_the_same_record_back_or_refuses_with_the_field(record: t.Record) -> None:
    record = checked(record)
    try:
        form = to_avro(record)
    except errors.Unmappable as refused:
        _names_the_field(refused, "Avro")
        return
    fastavro.parse_schema(json.loads(json.dumps(form)), named_schemas={})
    assert from_avro(json.dumps(form)) == record


@quick
@given(records())
def test_json_schema_gives_the_same_record_back_or_refuses(record: t.Record) -> None:
    record = checked(record)
    try:
        form = to_json_schema(record)
    except errors.Unmappable as refused:
        _names_the_field(refused, "JSON Schema")
        return
    assert from_json_schema(json.dumps(form)) == record


@quick
@given(records())
def test_protobuf_text_and_descriptor_give_the_same_record_back_or_refuse(record: t.Record) -> None:
    record = checked(record)
    try:
        text = to_proto(record)
    except errors.Unmappable as refused:
        _names_the_field(refused, "Protobuf")
        return
    assert from_descriptor(load_text(text)) == record
    files = load_set(_one_file(to_descriptor(record)))
    assert from_descriptor(files) == record


def _one_file(file: Any) -> bytes:
    from google.protobuf import descriptor_pb2

    data: bytes = descriptor_pb2.FileDescriptorSet(file=[file]).SerializeToString()
    return data


def _names_the_field(refused: errors.Unmappable, format_: str) -> None:
    assert refused.field
    assert refused.reason
    assert refused.format == format_


@quick
@given(records())
def test_every_record_has_spark_ddl(record: t.Record) -> None:
    ddl = to_spark(checked(record))
    assert all(field.name in ddl for field in record.fields)
    assert pa.types.is_struct(spark_arrow_type(record))


@quick
@given(records_and_values())
def test_values_become_columns_and_come_back(pair: tuple[t.Record, list[Any]]) -> None:
    record, rows = pair
    array = ColumnBuilder(record).build(rows)
    array.validate(full=True)
    assert array.type == arrow_type(record)
    assert RowReader(record).read(array) == rows
    assert RowReader(record).read(array.slice(1)) == rows[1:]
    assert Conformer(record).conform(array).equals(array)


@quick
@given(records_and_values())
def test_the_fast_and_the_slow_path_build_the_same_columns(
    pair: tuple[t.Record, list[Any]],
) -> None:
    record, rows = pair
    builder = ColumnBuilder(record)
    slow = builder._build(builder._plain(rows))
    assert builder.build(rows).equals(slow)


@pytest.mark.parametrize("wire", ["avro", "json", "protobuf"])
def test_values_are_encoded_and_come_back(wire: Any) -> None:
    @settings(quick, max_examples=25)
    @given(records_and_values(finite=True))
    def check(pair: tuple[t.Record, list[Any]]) -> None:
        record, rows = pair
        try:
            codec = make_codec(Schema(record), wire)
        except errors.Unmappable:
            return
        for row in rows:
            assert codec.decode(codec.encode(row)) == row

    check()


@pytest.mark.parametrize("type_", LEAVES, ids=t.kind)
def test_every_leaf_goes_through_every_format_that_has_it(type_: t.Type) -> None:
    record = checked(t.Record("R", (t.Field("x", type_), t.Field("y", t.Nullable(type_), None))))
    assert from_arrow(to_arrow(record)) == record
    assert from_json_schema(to_json_schema(record)) == record
    assert from_descriptor(load_text(to_proto(record))) == record
    if type_ == t.Int(64, signed=False):
        with pytest.raises(errors.Unmappable, match="'x': uint64"):
            to_avro(record)
    else:
        assert from_avro(to_avro(record)) == record

    @settings(quick, max_examples=15)
    @given(st.lists(values(record, finite=True), min_size=1, max_size=3))
    def check(rows: list[Any]) -> None:
        assert RowReader(record).read(ColumnBuilder(record).build(rows)) == rows
        for wire in ("avro", "json", "protobuf"):
            if wire == "avro" and type_ == t.Int(64, signed=False):
                continue
            codec = make_codec(Schema(record), wire)
            assert [codec.decode(codec.encode(row)) for row in rows] == rows

    check()


@quick
@given(records_and_values(finite=True))
def test_a_schema_declared_from_any_of_its_own_texts_writes_the_same_values(
    pair: tuple[t.Record, list[Any]],
) -> None:
    record, rows = pair
    for write, wire in ((to_avro, "avro"), (to_proto, "protobuf")):
        try:
            text = write(checked(record))
        except errors.Unmappable:
            continue
        schema = declare(text)
        codec = make_codec(schema, wire)  # type: ignore[arg-type]
        kept = Schema.from_json(schema.to_json())
        again = make_codec(kept, wire)  # type: ignore[arg-type]
        for row in rows:
            assert again.decode(codec.encode(row), kept) == row
