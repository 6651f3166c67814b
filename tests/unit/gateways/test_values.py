"""Values of typed topics as bytes, and bytes as values: each format, with prefix and without."""

from __future__ import annotations

import dataclasses
import datetime as dt
import io
import json
from collections.abc import Sequence
from decimal import Decimal
from typing import Annotated, Any, Literal

import fastavro
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.errors import SchemaError, Unfit
from millstream.events.packs.pack import Pack, decode, encode, envelope
from millstream.gateways.avro_columns import AvroColumns, NotFast
from millstream.gateways.kafka.values import skips_guard
from millstream.gateways.registry_prefix import (
    has_prefix,
    read_message_path,
    registry_prefix,
)
from millstream.gateways.rights import Rights
from millstream.gateways.typed_values import BadValue, KnownVersions
from millstream.gateways.value_bytes import VersionBytes, added_bytes, plain_texts
from millstream.gateways.values import ValueForm
from millstream.schemas import ColumnBuilder, Conformer, Mode, Schema, declare, make_codec, to_avro
from millstream.schemas import types as t
from millstream.schemas.codecs import WIRE_FORMATS, WireFormat
from millstream.schemas.registry.binding import TypedValues
from millstream.schemas.registry.records import TopicSchemas, Version, with_numbers
from tests.unit.schemas.schema_strategies import quick, records, values

PLACED = dt.datetime(2026, 5, 6, 7, 8, 9, 10, tzinfo=dt.UTC)


@dataclasses.dataclass
class Order:
    id: int
    customer: str
    price: Annotated[Decimal, t.Decimal(10, 2)]
    placed: dt.datetime
    status: Literal["open", "paid"] = "open"


@dataclasses.dataclass
class OrderWithNote(Order):
    note: str | None = None


def row(number: int) -> dict[str, Any]:
    return {
        "id": number,
        "customer": f"customer {number}",
        "price": Decimal(number - 60) / 4,
        "placed": PLACED + dt.timedelta(microseconds=number * 1_234_567),
        "status": ("open", "paid")[number % 2],
    }


async def no_schema(id_: int) -> Schema:
    raise SchemaError(f"there is no schema {id_}")


def known(
    wire: WireFormat, prefix: bool, form: WireFormat | None = None, *, classes: int = 2
) -> KnownVersions:
    """A topic with the versions 7 and 12."""
    schemas: list[Schema] = []
    for cls in (Order, OrderWithNote)[:classes]:
        schemas.append(with_numbers(wire, schemas, declare(cls, name="Order")))
    versions = [
        Version(number, id_, schema.fingerprint)
        for number, (id_, schema) in enumerate(zip((7, 12), schemas, strict=False), 1)
    ]
    record = TopicSchemas("orders", wire, Mode.BACKWARD, tuple(versions))
    typed = TypedValues(record, schemas, no_schema)
    return KnownVersions(record, typed, form or wire, prefix)


def columns_of(payloads: Sequence[bytes | None]) -> pa.RecordBatch:
    keys = pa.array([b"k%d" % n for n in range(len(payloads))])
    return envelope(pa.array(payloads, pa.binary()), key=keys)


def pack_of(batch: pa.RecordBatch, schema_id: str | None) -> Pack:
    made = encode(batch, schema_id=schema_id)
    return decode(made.headers, made.payload)


def stored_rows(topic: KnownVersions, payloads: Sequence[bytes | None]) -> list[Any]:
    return pack_of(topic.stored(columns_of(payloads)), topic.schema_id).values()


def codec_of(topic: KnownVersions, schema_id: str, form: WireFormat) -> Any:
    return make_codec(topic.typed.written(schema_id).schema, form)


# -- both ways ----------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 3, 600])
@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("form", WIRE_FORMATS)
def test_what_a_client_sends_is_what_a_client_gets(
    form: WireFormat, prefix: bool, count: int
) -> None:
    topic = known(form, prefix)
    rows: list[Any] = [{**row(n), "note": None if n % 3 else f"ä{n}"} for n in range(count)]
    codec = codec_of(topic, "12", form)
    start = registry_prefix(12, (0,) if form == "protobuf" else ()) if prefix else b""
    sent: list[bytes | None] = [start + codec.encode(one) for one in rows]
    sent[count // 2] = rows[count // 2] = None
    batch = topic.stored(columns_of(sent))
    pack = pack_of(batch, topic.schema_id)
    assert pack.typed or count == 1
    assert pack.values() == rows
    assert pack.keys() == [f"k{n}" for n in range(count)]
    assert topic.pack_values(pack)(pack.column("value")) == sent


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("form", WIRE_FORMATS)
@pytest.mark.parametrize("wire", WIRE_FORMATS)
def test_a_pack_of_an_old_version_is_given_as_it_was_written_or_as_the_latest(
    wire: WireFormat, form: WireFormat, prefix: bool
) -> None:
    topic = known(wire, prefix, form)
    old = topic.typed.written("7").schema
    pack = pack_of(envelope(ColumnBuilder(old.record).build([row(n) for n in range(150)])), "7")
    found = topic.pack_values(pack)(pack.column("value"))
    if prefix:
        start = registry_prefix(7, (0,) if form == "protobuf" else ())
        expected = [start + make_codec(old, form).encode(row(n)) for n in range(150)]
    else:
        latest = codec_of(topic, "12", form)
        expected = [latest.encode({**row(n), "note": None}) for n in range(150)]
    assert found == expected


@pytest.mark.parametrize("form", WIRE_FORMATS)
def test_values_of_two_versions_in_one_batch_become_the_latest(form: WireFormat) -> None:
    topic = known(form, True)
    path = (0,) if form == "protobuf" else ()
    old, new = (codec_of(topic, id_, form) for id_ in ("7", "12"))
    sent = [
        registry_prefix(7, path) + old.encode(row(1)),
        None,
        registry_prefix(12, path) + new.encode({**row(2), "note": "two"}),
        new.encode({**row(3), "note": "three"}),  # without prefix: the latest; id 3 is no zero
        registry_prefix(7, path) + old.encode(row(4)),
    ]
    assert stored_rows(topic, sent) == [
        {**row(1), "note": None},
        None,
        {**row(2), "note": "two"},
        {**row(3), "note": "three"},
        {**row(4), "note": None},
    ]


def test_a_batch_of_tombstones_is_stored_as_such() -> None:
    for form in WIRE_FORMATS:
        topic = known(form, True)
        pack = pack_of(topic.stored(columns_of([None] * 3)), topic.schema_id)
        assert pack.values() == [None] * 3
        assert topic.pack_values(pack)(pack.column("value")) == [None] * 3


def test_pretty_json_and_other_spaces_are_json() -> None:
    topic = known("json", False, classes=1)
    text = codec_of(topic, "7", "json").encode(row(1))
    pretty = json.dumps(json.loads(text), indent=2).encode()
    assert stored_rows(topic, [pretty, b" " + text + b"\r\n"] * 300) == [row(1)] * 600


# -- what is refused ------------------------------------------------------------------------


@pytest.mark.parametrize("count", [5, 600])
def test_a_value_that_does_not_fit_is_named_by_row_and_field(count: int) -> None:
    topic = known("json", False)
    codec = codec_of(topic, "12", "json")
    sent: list[bytes | None] = [codec.encode(row(n)) for n in range(count)]
    sent[1] = None
    sent[3] = (sent[3] or b"").replace(b'"id":3', b'"id":"three"')
    with pytest.raises(BadValue) as refused:
        topic.stored(columns_of(sent))
    assert refused.value.row == 3
    text = "field 'id': expected int64, found str 'three'"
    assert refused.value.text == f"a value of topic 'orders' (JSON, schema id 12): {text}"


@pytest.mark.parametrize("count", [5, 600])
@pytest.mark.parametrize("form", ["avro", "protobuf"])
def test_bytes_that_are_no_value_are_named_by_row(form: WireFormat, count: int) -> None:
    topic = known(form, True)
    start = registry_prefix(7, (0,) if form == "protobuf" else ())
    codec = codec_of(topic, "7", form)
    sent: list[bytes | None] = [start + codec.encode(row(n)) for n in range(count)]
    sent[0] = None
    sent[count - 2] = start + b"\xff\xff\xff"
    with pytest.raises(BadValue, match=r"schema id 7\): the value: expected record Order in") as e:
        topic.stored(columns_of(sent))
    assert e.value.row == count - 2


@pytest.mark.parametrize("form", WIRE_FORMATS)
def test_an_unknown_schema_id_is_refused(form: WireFormat) -> None:
    topic = known(form, True)
    data = registry_prefix(1, (0,)) + codec_of(topic, "12", form).encode(row(1))
    with pytest.raises(BadValue, match=r"names schema id 1 in its prefix, .* the latest are 7, 12"):
        topic.stored(columns_of([data]))


def test_a_zero_alone_is_no_json_text_and_no_protobuf_message() -> None:
    for form in ("json", "protobuf"):
        with pytest.raises(BadValue, match="begins with a zero"):
            known(form, False).stored(columns_of([b"\0\0"]))


def test_another_message_of_the_file_is_refused() -> None:
    topic = known("protobuf", True)
    data = registry_prefix(12, (1,)) + codec_of(topic, "12", "protobuf").encode(row(1))
    with pytest.raises(BadValue, match=r"is message \[1\] of the schema's file"):
        topic.stored(columns_of([data]))
    with pytest.raises(BadValue, match="message indexes are cut off"):
        topic.stored(columns_of([b"\0\0\0\0\x0c\xff"]))


def test_texts_that_end_in_another_record_are_refused() -> None:
    topic = known("json", False, classes=1)
    text = codec_of(topic, "7", "json").encode(row(1))
    for pair in ([text + text, b" "], [text + text[:9], text[9:]], [text, b""]):
        with pytest.raises(BadValue):
            topic.stored(columns_of(pair * 300))


def test_a_version_that_cannot_be_read_as_the_latest_is_refused() -> None:
    schemas = [Schema(t.Record("A", (t.Field("x", kind),))) for kind in (t.String(), t.Int(64))]
    versions = tuple(Version(n, n, s.fingerprint) for n, s in enumerate(schemas, 1))
    record = TopicSchemas("a", "json", Mode.NONE, versions)
    topic = KnownVersions(record, TypedValues(record, schemas, no_schema), "json", True)
    with pytest.raises(BadValue, match="cannot be read as") as refused:
        topic.stored(columns_of([b'{"x":1}', registry_prefix(1) + b'{"x":"a"}']))
    assert refused.value.row == 1


def test_defaults_cannot_blow_values_up() -> None:
    large = t.Field("text", t.String(), "x" * 100_000)
    item = t.Record("Item", (t.Field("y", t.Int(8), 0), large))
    fields = (t.Field("items", t.List(item), []),)
    assert added_bytes(t.Record("A", (large,))) == (100_002, 0)
    assert added_bytes(t.Record("A", fields)) == (2, 100_003)
    for schema in (Schema(t.Record("A", (large,))), Schema(t.Record("A", fields))):
        record = TopicSchemas("a", "json", Mode.NONE, (Version(1, 1, schema.fingerprint),))
        topic = KnownVersions(record, TypedValues(record, [schema], no_schema), "json", False)
        assert len(topic.stored(columns_of([b"{}"] * 10))) == 10
        many = [b'{"items":[%b{}]}' % (b"{}," * 100_000)] if schema.record.fields == fields else []
        with pytest.raises(BadValue, match="send smaller batches"):
            topic.stored(columns_of(many or [b"{}"] * 20_000))


def test_a_decimal_of_a_million_digits_takes_no_time() -> None:
    topic = known("avro", False, classes=1)
    out = io.BytesIO()
    form = {"type": "record", "name": "Order", "fields": [
        {"name": "id", "type": "long"}, {"name": "customer", "type": "string"},
        {"name": "price", "type": "bytes"},
    ]}  # fmt: skip
    fastavro.schemaless_writer(out, form, {"id": 1, "customer": "a", "price": b"\x7f" * 1_000_000})
    with pytest.raises(BadValue):
        topic.stored(columns_of([out.getvalue() + b"\0\0"]))


# -- Avro without prefix ------------------------------------------------------------------


def test_avro_that_begins_with_a_zero() -> None:
    """The setting says what is meant where both may be."""
    zero = row(0)
    for count in (1, 100):
        plain = known("avro", False)
        data = codec_of(plain, "12", "avro").encode(zero)
        assert data.startswith(b"\0")
        assert stored_rows(plain, [data] * count) == [{**zero, "note": None}] * count
        old = registry_prefix(7) + codec_of(plain, "7", "avro").encode(row(5))
        assert stored_rows(plain, [data, old]) == [
            {**zero, "note": None}, {**row(5), "note": None},
        ]  # fmt: skip
        with pytest.raises(BadValue, match="a gateway whose values have no prefix"):
            known("avro", True).stored(columns_of([data] * count))


# -- single events, and what cannot be read -----------------------------------------------


def payloads(topic: KnownVersions, given: list[tuple[bytes | None, str | None]]) -> Any:
    return topic._payloads(given)


def test_single_events_are_passed_on_where_they_can_be() -> None:
    topic = known("json", False)
    old, new = (codec_of(topic, id_, "json") for id_ in ("7", "12"))
    latest = new.encode({**row(2), "note": "x"})
    given = [(old.encode(row(1)), "7"), (latest, "12"), (latest, None), (None, None)]
    assert payloads(topic, given) == [new.encode(row(1)), latest, latest, None]
    prefixed = known("json", True)
    ids = (7, 12, 12)
    assert payloads(prefixed, given[:3]) == [
        registry_prefix(id_) + (data or b"") for id_, (data, _) in zip(ids, given, strict=False)
    ]
    avro = known("json", True, "avro")
    assert payloads(avro, given[:1]) == [
        registry_prefix(7) + codec_of(avro, "7", "avro").encode(row(1))
    ]
    assert payloads(known("json", False, "avro"), given[:1]) == [
        codec_of(avro, "12", "avro").encode(row(1))
    ]


@pytest.mark.parametrize("form", WIRE_FORMATS)
def test_what_cannot_be_read_is_given_as_it_is_stored(form: WireFormat) -> None:
    for prefix in (True, False):
        topic = known("json", prefix, form)
        assert payloads(topic, [(b"\xff\xfe", "999"), (b"\xff\xfe", "no id")]) == [b"\xff\xfe"] * 2
        foreign = envelope(pa.array([{"x": 1}, {"x": 2}]))
        for schema_id in ("999", "12"):
            pack = pack_of(foreign, schema_id)
            assert topic.pack_values(pack)(pack.column("value")) == [b'{"x":1}', b'{"x":2}']


def test_one_bad_row_of_another_writer_does_not_hide_the_others() -> None:
    kind = t.Record("A", (t.Field("at", t.Timestamp()),))
    schema = Schema(kind)
    record = TopicSchemas("a", "json", Mode.NONE, (Version(1, 1, schema.fingerprint),))
    topic = KnownVersions(record, TypedValues(record, [schema], no_schema), "json", False)
    times = pa.array([0, 2**62], pa.int64()).view(pa.timestamp("us", "UTC"))
    column = pa.StructArray.from_arrays([times], fields=[pa.field("at", times.type, False)])
    pack = pack_of(envelope(column), "1")
    first, second = topic.pack_values(pack)(pack.column("value"))
    assert first == b'{"at":"1970-01-01T00:00:00Z"}'
    assert b"unreadable" in (second or b"")


def test_rows_without_a_schema_are_json_texts() -> None:
    column = pa.array([{"a": 1, "b": b"x", "d": Decimal("1.50")}, None])
    assert plain_texts(column) == [b'{"a":1,"b":"eA==","d":"1.50"}', None]


def test_a_number_that_json_does_not_have_is_null() -> None:
    version = VersionBytes(Schema(t.Record("A", (t.Field("x", t.Float(64)),))), "json")
    assert version.rows(ColumnBuilder(version.schema.record).build([{"x": float("nan")}])) == [
        b'{"x":null}'
    ]


# -- the fast path for Avro ---------------------------------------------------------------


def both_ways(schema: Schema, data: list[bytes]) -> None:
    """The fast path reads what the codec reads, or says nothing."""
    codec = make_codec(schema, "avro")
    try:
        found = Conformer(schema.record).conform(AvroColumns(schema).column(data))
    except (NotFast, pa.ArrowException, Unfit):
        return
    exact = ColumnBuilder(schema.record).build([codec.decode(one) for one in data])
    assert found.equals(exact)
    assert found.to_pylist() == exact.to_pylist()


@quick
@given(st.data())
def test_generated_values_are_the_same_both_ways(data: st.DataObject) -> None:
    record = data.draw(records(unions=False))
    schema = Schema(record)
    try:
        codec = make_codec(schema, "avro")
        fast = AvroColumns(schema)
    except (SchemaError, NotFast):
        return
    rows = data.draw(st.lists(values(record), min_size=1, max_size=4))
    column = ColumnBuilder(record).build(rows)
    encoded = [codec.encode(one) for one in rows]
    assert fast.rows(column) == encoded
    both_ways(schema, encoded)


@quick
@given(st.lists(st.binary(max_size=40), min_size=1, max_size=4))
def test_any_bytes_are_the_same_both_ways(data: list[bytes]) -> None:
    schema = declare(OrderWithNote)
    try:
        both_ways(schema, data)
    except Unfit:
        pytest.fail("the fast path accepted what the codec refuses")


@quick
@given(st.data())
def test_damaged_values_are_the_same_both_ways(data: st.DataObject) -> None:
    schema = declare(OrderWithNote)
    codec = make_codec(schema, "avro")
    encoded = [codec.encode({**row(n), "note": "x" * n}) for n in range(3)]
    one = bytearray(encoded[data.draw(st.integers(0, 2))])
    one[data.draw(st.integers(0, len(one) - 1))] = data.draw(st.integers(0, 255))
    both_ways(schema, [*encoded[:1], bytes(one), encoded[2]])


def test_the_fast_path_takes_the_usual_schemas() -> None:
    kinds: tuple[t.Type, ...] = (
        t.Bool(), t.Int(8), t.Int(32), t.Int(64), t.Float(32), t.Float(64), t.String(), t.Binary(),
        t.Binary(3), t.Decimal(30, 4), t.Date(), t.Time(), t.Time("ms"), t.Timestamp(),
        t.Timestamp(True, "ms"), t.Timestamp(False), t.Duration(), t.Uuid(),
    )  # fmt: skip
    fields = [t.Field(f"f{n}", kind) for n, kind in enumerate(kinds)]
    inner = t.Record("Inner", tuple(fields))
    nullable = tuple(t.Field(f"n{f.name}", t.Nullable(f.type)) for f in fields)
    record = t.Record("A", (*fields, *nullable, t.Field("in", t.Nullable(inner))))
    AvroColumns(Schema(record))


def test_avro_is_readable_by_others() -> None:
    topic = known("avro", True)
    schema = topic.typed.schema
    data = stored = topic.stored(
        columns_of([registry_prefix(12) + make_codec(schema, "avro").encode(row(1))] * 150)
    )
    pack = pack_of(stored, topic.schema_id)
    for data in topic.pack_values(pack)(pack.column("value")):
        assert data is not None
        found = fastavro.schemaless_reader(io.BytesIO(data[5:]), to_avro(schema.record), None)
        assert found == {**row(1), "note": None}


# -- prefixes, settings, guards -------------------------------------------------------------


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=6).map(tuple))
def test_message_paths_are_read_back(path: tuple[int, ...]) -> None:
    data = registry_prefix(9, path) + b"rest"
    assert has_prefix(data)
    assert read_message_path(data) == (path, len(data) - 4)


def test_an_id_that_no_prefix_holds_is_refused() -> None:
    with pytest.raises(SchemaError, match="31 bits"):
        registry_prefix(2**31)


def test_the_form_of_a_topic() -> None:
    assert ValueForm().of("json") == ("json", False)
    assert ValueForm().of("avro") == ("avro", True)
    assert ValueForm("protobuf").of("json") == ("protobuf", True)
    assert ValueForm("avro", False).of("json") == ("avro", False)
    assert ValueForm("topic", True).of("json") == ("json", True)


def test_which_gateway_stores_in_a_guarded_topic_itself() -> None:
    admin = Rights("admin", "main")
    app = Rights("app", "main", publish_deny=("_guarded.>",))
    assert skips_guard(admin, "_guarded.orders")
    assert not skips_guard(app, "_guarded.orders")
    assert not skips_guard(admin, "orders")  # there is no guard
