"""The registry's records, and how values are bound to them, without a broker."""

from __future__ import annotations

import dataclasses
from typing import Any

import pyarrow as pa
import pytest

from millstream.errors import (
    ConfigError,
    ConnectionClosed,
    DataLoss,
    Incompatible,
    LimitReached,
    PayloadTooLarge,
    SchemaError,
    SchemaNotFound,
    Unfit,
)
from millstream.events.event import PublishOptions, Unreadable
from millstream.events.packs.pack import decode, encode, envelope
from millstream.schemas import Mode, Schema, declare, types
from millstream.schemas.registry.binding import RawValues, TypedValues
from millstream.schemas.registry.guard import refusal_of
from millstream.schemas.registry.guard_messages import _number, _options, key_in
from millstream.schemas.registry.records import (
    TABLE,
    VERSIONS_MAX,
    TopicSchemas,
    Version,
    matching,
    message_subject,
    new_record,
    next_version,
    problems_of,
    read_record,
    read_schema,
    record_key,
    schema_key,
)
from millstream.wire.api import ErrorCode
from millstream.wire.message import RawMessage
from millstream.wire.protocol import encode_headers

INT, TEXT = types.Int(64), types.String()


def schema(*fields: types.Field) -> Schema:
    return declare(types.Record("r", fields))


ONE = schema(types.Field("a", INT))
TWO = schema(types.Field("a", INT), types.Field("b", TEXT, default="-"))
BAD = schema(types.Field("a", INT), types.Field("b", TEXT))


def record(*schemas: Schema, format_: str = "json") -> TopicSchemas:
    made = new_record("t", format_, None)
    for id_, one in enumerate(schemas, 10):
        made = made.followed_by(id_, one.fingerprint)
    return made


# -- records ------------------------------------------------------------------------------


def test_a_record_comes_back_as_it_was() -> None:
    made = dataclasses.replace(record(ONE, TWO), mode=Mode.FULL_TRANSITIVE)
    assert read_record(made.to_json().encode()) == made
    assert made.latest == Version(2, 11, TWO.fingerprint)
    assert made.version(1).id == 10
    assert made.of(ONE.fingerprint) == made.versions[0]
    assert made.of("other") is None


@pytest.mark.parametrize("text", [b"", b"{}", b"[1]", b'{"topic": "t", "format": "xml"}'])
def test_an_unreadable_record_is_data_loss(text: bytes) -> None:
    with pytest.raises(DataLoss, match="not readable"):
        read_record(text)


def test_a_missing_version_is_named_in_the_error() -> None:
    for number in (0, 2, -1):
        with pytest.raises(SchemaNotFound, match=f"no schema version {number}; it has 1 to 1"):
            record(ONE).version(number)


def test_the_number_of_versions_is_limited() -> None:
    full = dataclasses.replace(record(), versions=(Version(1, 1, "f"),) * VERSIONS_MAX)
    with pytest.raises(SchemaError, match="which is the maximum"):
        full.followed_by(9, "g")


def test_a_record_needs_a_known_format_and_mode() -> None:
    assert new_record("t", None, None) == TopicSchemas("t", "json", Mode.BACKWARD)
    with pytest.raises(ConfigError, match="wire format 'xml'"):
        new_record("t", "xml", None)
    with pytest.raises(ConfigError, match="not a compatibility mode"):
        new_record("t", None, "SIDEWAYS")


def test_a_stored_schema_must_be_the_registered_one() -> None:
    subject = message_subject(schema_key(ONE.fingerprint))
    text = ONE.to_json().encode()
    assert read_schema(7, subject, text, ONE.fingerprint) == ONE
    with pytest.raises(DataLoss, match="damaged or restored"):
        read_schema(7, subject, text, TWO.fingerprint)
    with pytest.raises(SchemaNotFound, match="no schema with id 7"):
        read_schema(7, message_subject(record_key("t")), b"{}")
    assert subject.startswith(f"{TABLE}.schema/")


def test_the_next_version_is_checked_against_the_earlier_ones() -> None:
    assert next_version(record(ONE), [ONE], TWO) == TWO
    assert problems_of(record(ONE), [ONE], TWO) == []
    with pytest.raises(Incompatible, match="field 'b'"):
        next_version(record(ONE), [ONE], BAD)
    assert [p.field for p in problems_of(record(ONE), [ONE], BAD)] == ["b"]
    assert problems_of(record(ONE), [ONE], BAD, "NONE") == []
    known = record(ONE, TWO)
    assert next_version(known, [ONE, TWO], ONE) == ONE  # registered already: nothing to check


def test_in_protobuf_a_field_keeps_its_number() -> None:
    made = record(format_="protobuf")
    first = next_version(made, [], ONE)
    made = made.followed_by(10, first.fingerprint)
    turned = schema(types.Field("b", TEXT, default=""), types.Field("a", INT))
    second = next_version(made, [first], turned)
    assert {field.name: field.number for field in second.record.fields} == {"a": 1, "b": 2}
    assert matching(made, [first], ONE) == (made.latest, first)


def test_a_schema_finds_the_newest_version_with_its_fields() -> None:
    made = record(ONE, TWO)
    assert matching(made, [ONE, TWO], ONE) == (made.versions[0], ONE)
    assert matching(made, [ONE, TWO], BAD) is None


# -- values -------------------------------------------------------------------------------


async def nothing(id_: int) -> Schema:
    raise SchemaNotFound(f"id {id_} is not there")


def message(schema_id: str | None, data: bytes = b"{}") -> RawMessage:
    headers = (
        encode_headers([("Nats-Msg-Id", "x"), ("Mill-Schema", schema_id)]) if schema_id else b""
    )
    return RawMessage(b"t.k", b"", headers, data)


async def test_versions_are_fetched_once_and_failures_are_not_retried_immediately() -> None:
    asked: list[int] = []

    async def fetch(id_: int) -> Schema:
        asked.append(id_)
        if id_ == 77:
            raise ConnectionClosed("no broker")
        return TWO

    values = TypedValues(record(ONE), [ONE], fetch)
    await values.learn([message("10"), message(None), message("11"), message("11"), message("77")])
    await values.learn([message("11"), message("77")])
    assert asked == [11, 77]
    assert values.decode(b'{"a": 1, "b": "x"}', "11") == {"a": 1}
    with pytest.raises(ConnectionClosed, match="no broker"):  # which does not mean there is none
        values.decode(b"{}", "77")
    with pytest.raises(SchemaNotFound, match="was not looked up"):
        values.decode(b"{}", "78")


@pytest.mark.parametrize("id_", ["0", "-1", "x", "1.0", "\u0663", "1" * 20, "1" * 5000])
async def test_a_header_that_is_not_an_id_makes_only_its_own_value_unreadable(id_: str) -> None:
    asked: list[int] = []

    async def fetch(number: int) -> Schema:
        asked.append(number)
        return TWO

    values = TypedValues(record(ONE), [ONE], fetch)
    await values.learn([message(id_), message("11")])
    assert asked == [11]
    assert values.decode(b'{"a": 1, "b": "x"}', "11") == {"a": 1}
    with pytest.raises(SchemaNotFound, match="is not the id of a schema"):
        values.decode(b"{}", id_)


async def test_invalid_ids_do_not_fill_the_memory() -> None:
    values = TypedValues(record(ONE), [ONE], nothing)
    await values.learn(message(f"x{number}") for number in range(5000))
    assert len(values._missing) <= 2000


def packed(column: pa.Array, schema_id: str | None) -> Any:
    made = encode(envelope(column), schema_id=schema_id)
    return decode(made.headers, made.payload)


def test_rows_of_a_pack_are_read_one_by_one_if_one_is_unreadable() -> None:
    values = TypedValues(record(TWO), [TWO], nothing)
    column = pa.array(
        [{"a": 1, "b": "x"}, {"a": None, "b": "y"}, {"a": 3, "b": "z"}],
        pa.struct([("a", pa.int64()), ("b", pa.string())]),
    )
    rows = values.values(packed(column, "10"))
    assert (rows[0], rows[2]) == ({"a": 1, "b": "x"}, {"a": 3, "b": "z"})
    assert isinstance(rows[1], Unreadable)
    assert isinstance(rows[1].error, Unfit)


def test_a_column_may_have_nulls() -> None:
    values = TypedValues(record(TWO), [TWO], nothing)
    column = values.column([{"a": 1}, None, {"a": 2, "b": "x"}])
    assert column.to_pylist() == [{"a": 1, "b": "-"}, None, {"a": 2, "b": "x"}]
    read = values.resolve(column, "10")
    assert read.to_pylist() == column.to_pylist()
    assert values.read_column([(None, None), (b'{"a": 5}', "10")]).to_pylist() == [
        None,
        {"a": 5, "b": "-"},
    ]
    with pytest.raises(Unfit, match="row 1"):
        values.column([{"a": 1}, {"a": "x"}])


def test_json_text_becomes_a_value_of_any_wire_format() -> None:
    values = TypedValues(record(TWO, format_="avro"), [TWO], nothing)
    parsed = values.parse(b'{"a": 5}')
    assert parsed == {"a": 5, "b": "-"}
    assert values.decode(values.encode(parsed), values.schema_id) == parsed


def test_values_opened_as_bytes_cannot_be_written() -> None:
    raw = RawValues("t")
    assert raw.decode(b"x", "3") == b"x"
    for write in (
        lambda: raw.encode(b"x"),
        lambda: raw.column([]),
        lambda: raw.conform(None),
        lambda: raw.parse(b""),
        lambda: raw.schema_id,
    ):
        with pytest.raises(SchemaError, match="opened with type=bytes"):
            write()


# -- the guard's pure parts ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("subject", "key"),
    [
        ("ingress.t", None),
        ("ingress.t._", None),
        ("ingress.t.a", "a"),
        ("ingress.t.a=2Eb", "a.b"),
        ("ingress.t.eu.7", "eu.7"),
        ("ingress.t.=", ""),
    ],
)
def test_the_key_of_a_guarded_subject(subject: str, key: str | None) -> None:
    assert key_in(subject, "ingress.t") == key


@pytest.mark.parametrize("text", ["", "x", "-1", "1.5", "\u00b2", "\u0663", "1" * 20, "1" * 5000])
def test_a_header_without_a_number_is_an_error_of_the_sender(text: str) -> None:
    with pytest.raises(ConfigError, match=r"header Mill-Time .*: expected nanoseconds"):
        _number({"Mill-Time": text}, "Mill-Time", "nanoseconds")
    with pytest.raises(ConfigError, match=r"header Nats-Expected-.*: expected a sequence number"):
        _options({"Nats-Expected-Last-Subject-Sequence": text})


@pytest.mark.parametrize("ttl", ["", "x", "-1", "\u00b2", "1" * 5000])
def test_a_time_to_live_that_is_none_is_an_error_of_the_sender(ttl: str) -> None:
    with pytest.raises(ConfigError, match="not a duration"):
        _options({"Nats-TTL": ttl})


def test_options_are_taken_out_of_the_headers() -> None:
    headers = {"Nats-TTL": "90", "Nats-Expected-Last-Subject-Sequence": "7", "mine": "x"}
    assert _options(headers) == PublishOptions(ttl=90.0, expected_last=7)
    assert _options(headers) is None
    assert _options({"Nats-TTL": "1m30s"}) == PublishOptions(ttl=90.0)
    assert headers == {"mine": "x"}


@pytest.mark.parametrize(
    ("error", "code", "err_code"),
    [
        (Unfit("a", "int", "str"), 400, ErrorCode.GUARD_UNFIT),
        (ConfigError("x"), 400, ErrorCode.GUARD_HEADER),
        (LimitReached(503, 10077, "full"), 503, 10077),
        (PayloadTooLarge(9, 8), 400, 10054),
        (ConnectionClosed("x"), 503, ErrorCode.GUARD_NOT_STORED),
        (TimeoutError(), 503, ErrorCode.GUARD_NOT_STORED),
    ],
)
def test_every_refusal_has_a_code_like_jetstreams(
    error: Exception, code: int, err_code: int
) -> None:
    refusal = refusal_of(error)
    assert (refusal.code, refusal.err_code) == (code, err_code)
    assert refusal.description
