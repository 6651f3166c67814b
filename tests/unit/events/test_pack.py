"""Packs: what goes in comes out, without copies, within limits."""

from __future__ import annotations

import os
import pickle
import struct
import zlib
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.errors import ConfigError, PackError, PayloadTooLarge, Unfit
from millstream.events.packs import pack
from millstream.events.packs.pack import ReadLimits, decode, encode, envelope, split
from millstream.events.packs.packing import Packing
from millstream.events.packs.rows import to_python
from millstream.events.packs.types import time_zone

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))


def orders(count: int, text: int = 8) -> pa.RecordBatch:
    """Typed values, key, time and id."""
    numbers = range(count)
    return envelope(
        pa.RecordBatch.from_pydict(
            {"order": list(numbers), "text": ["x" * text] * count, "paid": [True] * count}
        ),
        key=pa.array([f"k{number % 7}" for number in numbers]),
        timestamp=pa.array([NOON] * count, pa.timestamp("us", "UTC")),
        id=pa.array([str(number) for number in numbers]),
    )


def reread(batch: pa.RecordBatch, **options: Any) -> pack.Pack:
    made = encode(batch, **options)
    return decode(made.headers, made.payload)


def sign(payload: bytes, count: int) -> dict[str, str]:
    return {**pack.empty().headers, "Mill-Count": str(count), "Mill-Checksum": crc(payload)}


def crc(payload: bytes | pa.Buffer) -> str:
    return f"{zlib.crc32(payload):08x}"


# -- round trips --------------------------------------------------------------------------------


@pytest.mark.parametrize("compression", ["none", "lz4", "zstd"])
def test_events_come_out_as_they_went_in(compression: Any) -> None:
    batch = orders(500)
    found = reread(batch, compression=compression, schema_id="orders-3")
    assert found.batch.equals(batch)
    assert (found.count, len(found), found.schema_id, found.typed) == (500, 500, "orders-3", True)
    assert found.compression == (None if compression == "none" else compression)
    nanoseconds = int(NOON.timestamp()) * 10**9
    value = {"order": 9, "text": "xxxxxxxx", "paid": True}
    assert found.events()[9] == ("k2", nanoseconds, None, "9", value)


@pytest.mark.parametrize("compression", ["none", "auto"])
@pytest.mark.parametrize("rows", [1, 2, 30, 200, 450])
def test_a_pack_is_an_arrow_stream_whatever_its_size(rows: int, compression: Any) -> None:
    headers = pa.array([[("a", b"1")], None, []] * (rows // 3 + 1), HEADERS)[:rows]
    value = pa.array([os.urandom(50), None, b""] * (rows // 3 + 1), pa.binary())[:rows]
    batch = envelope(value, headers=headers)
    for part in (batch, batch.slice(rows // 2)):
        expected = pa.BufferOutputStream()
        with pa.ipc.new_stream(expected, part.schema) as writer:
            writer.write_batch(part)
        found = encode(part, compression=compression)
        assert found.payload.to_pybytes() == expected.getvalue().to_pybytes()


def test_columns_that_share_their_memory_are_as_large_as_what_is_written() -> None:
    """All rows null: Arrow keeps one buffer of zeros for all columns."""
    shared = pa.nulls(900, pa.struct([(f"c{number}", pa.int64()) for number in range(100)]))
    made = encode(envelope(shared), compression="auto")
    assert made.payload.size < 900 * 100  # compressed: it is 720,000 bytes of zeros
    assert decode(made.headers, made.payload).values() == [None] * 900
    many = pa.nulls(60_000, pa.struct([(f"c{number}", pa.bool_()) for number in range(1000)]))
    with pytest.raises(ConfigError, match="Split the events"):
        encode(envelope(many))


def test_packs_of_several_schemas_in_turn() -> None:
    plain = envelope(pa.array([b"v"]))
    keyed = envelope(pa.array([b"v"]), key=pa.array(["k"]))
    for batch in (plain, keyed, plain, orders(1), keyed, orders(2), plain):
        again = reread(batch)
        assert again.schema.names == batch.schema.names
        assert again.batch.equals(batch)


def test_the_headers_describe_the_payload() -> None:
    made = encode(orders(3), schema_id="orders-3")
    assert made.headers == {
        "Content-Type": "application/vnd.apache.arrow.stream",
        "Mill-Pack": "1",
        "Mill-Count": "3",
        "Mill-Checksum": crc(made.payload),
        "Mill-Schema": "orders-3",
    }
    block = "NATS/1.0\r\n" + "".join(f"{k}: {v}\r\n" for k, v in made.headers.items()) + "\r\n"
    assert made.size == len(block) + made.payload.size


def test_columns_that_were_not_sent_read_as_null() -> None:
    found = reread(envelope(pa.array([b"a", b"b"])))
    assert found.schema.names == ["value"]
    assert found.events() == [(None, None, None, None, b"a"), (None, None, None, None, b"b")]
    assert found.complete().schema.names == ["key", "timestamp", "headers", "id", "value"]
    assert found.column("headers").null_count == 2
    with pytest.raises(KeyError, match="not 'offset'"):
        found.column("offset")


def test_columns_without_any_value_are_not_sent() -> None:
    batch = envelope(pa.array([b"a"]), key=pa.array([None], pa.binary()), id=pa.array(["1"]))
    assert batch.schema.names == ["id", "value"]


def test_headers_keep_their_order_and_repeated_keys() -> None:
    rows = [[("a", b"1"), ("a", b"2")], None, [], [("b", b"")]]
    column = pa.array(
        [None if row is None else [{"key": k, "value": v} for k, v in row] for row in rows], HEADERS
    )
    assert reread(envelope(pa.array([b""] * 4), headers=column)).headers() == rows


def test_keys_that_are_not_utf_8_are_reversible() -> None:
    keys = [b"\xff\x00", b"caf\xc3\xa9", None, b""]
    found = reread(envelope(pa.array([b""] * 4), key=pa.array(keys))).keys()
    assert [k if k is None else k.encode("utf-8", "surrogateescape") for k in found] == keys
    assert found[1] == "café"


def test_batches_of_different_columns_become_one_pack() -> None:
    keyed = envelope(pa.array([b"a"]), key=pa.array([b"k"]))
    plain = envelope(pa.array([b"b", b"c"]))
    made = encode([plain, keyed])
    found = decode(made.headers, made.payload)
    assert len(found.batches) == 2
    assert found.keys() == [None, None, "k"]
    assert found.values() == [b"b", b"c", b"a"]
    assert found.batch.num_rows == 3


def test_batches_of_different_values_are_refused() -> None:
    with pytest.raises(Unfit, match="the same type in all batches"):
        encode([orders(1), envelope(pa.array([b"a"]))])


def test_an_empty_pack_has_no_payload() -> None:
    made = encode([], schema_id="orders-3")
    found = decode(made.headers, made.payload)
    assert (made.payload.size, found.count, found.schema_id) == (0, 0, "orders-3")
    assert found.events() == []
    assert found.batch.num_rows == 0
    assert found.complete().num_columns == 5


def test_foreign_types_become_plain_types() -> None:
    values = pa.RecordBatch.from_arrays(
        [
            pa.array(["a", "b", "a"]).dictionary_encode(),
            pa.array(["x", "y", "z"], pa.string_view()),
            pa.ExtensionArray.from_storage(pa.uuid(), pa.array([b"0" * 16] * 3, pa.binary(16))),
        ],
        schema=pa.schema(
            [
                pa.field("kind", pa.dictionary(pa.int32(), pa.string()), metadata={"a": "b"}),
                pa.field("view", pa.string_view()),
                pa.field("uuid", pa.uuid()),
            ],
            metadata={"pandas": "{}"},
        ),
    )
    batch = envelope(values, key=pa.array(["k"] * 3), timestamp=pa.array([NOON] * 3))
    found = reread(batch)
    assert found.values()[1] == {"kind": "b", "view": "y", "uuid": b"0" * 16}
    assert found.schema.field("value").type.field("kind").type == pa.string()
    assert found.schema.metadata is None


def test_metadata_of_the_callers_schema_is_not_sent() -> None:
    batch = orders(2)
    noted = batch.replace_schema_metadata({"secret": "in the schema"})
    assert b"secret" not in bytes(encode(noted).payload)
    assert encode(noted).payload.equals(encode(batch).payload)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"value": pa.array([1])}, "field 'value': expected a struct of columns, or binary"),
        ({"key": pa.array([b"k"])}, "and a column 'value'"),
        ({"value": pa.array([b"a"]), "price": pa.array([1])}, "field 'price'"),
        ({"value": pa.array([b"a"]), "key": pa.array([1])}, "field 'key': expected binary"),
        ({"value": pa.array([b"a"]), "timestamp": pa.array([1])}, "expected timestamps"),
        ({"value": pa.array([{"x": None}], pa.struct([("x", pa.null())]))}, "'value.x'"),
        ({"value": pa.array([{}], pa.struct([]))}, "one or more columns"),
        (
            {"value": pa.array([{"t": 0}], pa.struct([("t", pa.timestamp("us", "Moon/Tycho"))]))},
            "'value.t': expected a time zone",
        ),
    ],
)
def test_columns_that_packs_do_not_hold_are_refused(columns: Any, message: str) -> None:
    with pytest.raises(Unfit, match=message):
        encode(pa.RecordBatch.from_pydict(columns))


def test_columns_of_different_length_are_refused() -> None:
    with pytest.raises(Unfit, match="field 'key': expected 2 rows"):
        envelope(pa.array([b"a", b"b"]), key=pa.array([b"k"]))


def test_wrong_options_are_refused() -> None:
    with pytest.raises(ConfigError, match="'gzip'"):
        encode(orders(1), compression="gzip")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="schema id"):
        encode(orders(1), schema_id="a\r\nb")
    for count in (0, 1_000_001):
        with pytest.raises(ConfigError, match="max_events"):
            Packing(max_events=count)
    with pytest.raises(ConfigError, match="max_bytes"):
        Packing(max_bytes=100)
    for max_events, max_bytes in ((0, 40_000), (1, 4096)):
        with pytest.raises(ConfigError, match="the least is 1 event and 4,097 bytes"):
            split(orders(1), max_events, max_bytes)
    with pytest.raises(ConfigError, match="max_rows"):
        ReadLimits(max_rows=0)


def test_an_error_keeps_its_reason_through_pickle() -> None:
    with pytest.raises(PackError) as caught:
        decode({}, b"")
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.reason) == (str(caught.value), "version")


# -- copies -------------------------------------------------------------------------------------


def addresses(batch: pa.RecordBatch) -> list[int]:
    buffers = [buffer for column in batch.columns for buffer in column.buffers()]
    return [buffer.address for buffer in buffers if buffer is not None and buffer.size]


def test_columns_are_views_of_the_payload() -> None:
    payload = bytes(encode(orders(200)).payload)
    start = pa.py_buffer(payload).address
    before = pa.total_allocated_bytes()
    found = decode(sign(payload, 200), payload)
    assert pa.total_allocated_bytes() == before
    starts = addresses(found.batch)
    assert len(starts) >= 9
    assert all(start < address < start + len(payload) for address in starts)


def test_a_payload_at_an_odd_address_is_copied_once() -> None:
    payload = bytes(encode(orders(200)).payload)
    shifted = memoryview(b"." + payload)[1:]
    assert pa.py_buffer(shifted).address % 8
    before = pa.total_allocated_bytes()
    found = decode(sign(payload, 200), shifted)
    assert all(address % 8 == 0 for address in addresses(found.batch))
    assert 0 < pa.total_allocated_bytes() - before <= len(payload) + 64
    assert found.batch.equals(orders(200))


def test_slices_are_views_of_the_batch() -> None:
    batch = orders(1000)
    before = pa.total_allocated_bytes()
    slices = split(batch, 100, 1024 * 1024)
    assert pa.total_allocated_bytes() == before
    assert [part.num_rows for part in slices] == [100] * 10
    assert addresses(slices[7]) == addresses(batch)


# -- limits -------------------------------------------------------------------------------------


@pytest.mark.parametrize("compression", ["none", "lz4", "zstd"])
def test_a_large_batch_is_split_into_packs_that_fit(compression: Any) -> None:
    sizes = [number * number % 3000 for number in range(600)]
    batch = envelope(pa.array([os.urandom(size) for size in sizes]))
    packs = [encode(part, compression=compression) for part in split(batch, 5_000, 40_000)]
    assert all(made.size <= 40_000 for made in packs)
    events = [row for made in packs for row in decode(made.headers, made.payload).values()]
    assert events == batch.column("value").to_pylist()
    # Full enough: no more than twice as many packs as the bytes need.
    assert len(packs) <= 2 * sum(sizes) // 39_000 + 1


def test_a_single_event_that_does_not_fit_is_refused_before_anything_is_sent() -> None:
    batch = envelope(pa.array([b"a", b"b" * 50_000, b"c"]))
    with pytest.raises(PayloadTooLarge) as caught:
        split(batch, 5_000, 40_000)
    assert caught.value.size > 50_000
    assert caught.value.limit < 40_000


def test_the_encoder_refuses_what_readers_would_refuse() -> None:
    bits = pa.array([[True] * 1_000_000] * 9)
    with pytest.raises(ConfigError, match="max_values"):
        encode(envelope(pa.RecordBatch.from_arrays([bits], names=["bits"])))
    many = envelope(pa.RecordBatch.from_arrays([pa.array([True] * 1_000_001)], names=["x"]))
    with pytest.raises(ConfigError, match="1,000,001 events"):
        encode([many, many.slice(0, 0)])


def test_compression_that_does_not_help_is_left_out() -> None:
    batch = envelope(pa.array([os.urandom(64) for _ in range(20)]))
    found = reread(batch, compression="zstd")
    assert found.compression is None
    assert found.batch.equals(batch)


@pytest.mark.parametrize(
    ("limits", "compression", "message"),
    [
        (ReadLimits(max_rows=99), "none", "max_rows"),
        (ReadLimits(max_values=600), "none", "max_values"),
        (ReadLimits(max_decoded_bytes=4000), "none", "max_decoded_bytes"),
        (ReadLimits(max_decoded_bytes=4000), "zstd", "max_decoded_bytes"),
    ],
)
def test_a_reader_refuses_what_exceeds_its_limits(
    limits: ReadLimits, compression: Any, message: str
) -> None:
    made = encode(orders(100), compression=compression)
    with pytest.raises(PackError, match=message) as caught:
        decode(made.headers, made.payload, limits)
    assert caught.value.reason == "limit"


def test_a_compressed_pack_may_hold_buffers_left_uncompressed() -> None:
    text = bytes(range(100, 116))
    sink = pa.BufferOutputStream()
    batch = envelope(pa.array([text]))
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    with pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
        writer.write_batch(batch)
    payload = bytes(sink.getvalue())
    # The data buffer comes last: replace its size and LZ4 frame by -1 and the plain bytes.
    at = payload.rindex(bytes.fromhex("04224d18")) - 8
    body = payload.index(struct.pack("<q", 8) + bytes.fromhex("04224d18"))
    framed = 8 + 7 + 4 + 16 + 4
    raw = struct.pack("<q", -1) + text
    size = struct.pack("<qq", at - body, framed)
    assert payload.count(size) == 1
    changed = payload.replace(size, struct.pack("<qq", at - body, len(raw)))
    changed = changed[:at] + raw.ljust(len(changed) - 8 - at, b"\0") + changed[-8:]
    found = decode(sign(changed, 1), changed)
    assert (found.compression, found.values()) == ("lz4", [text])


# -- Python values ------------------------------------------------------------------------------

MOMENTS = pa.struct(
    [
        ("second", pa.timestamp("s", "UTC")),
        ("nano", pa.timestamp("ns", "Europe/Berlin")),
        ("shifted", pa.timestamp("ms", "+05:30")),
        ("naive", pa.timestamp("us")),
        ("day", pa.date32()),
        ("clock", pa.time64("ns")),
        ("span", pa.duration("ms")),
        ("price", pa.decimal128(8, 2)),
    ]
)


def test_times_become_pythons_own_types() -> None:
    nanos = int(NOON.timestamp()) * 10**9 + 1_234_567
    numbers = [
        nanos // 10**9,
        nanos,
        nanos // 10**6,
        nanos // 1000,
        20_000,
        3_723_000_004_567,
        1_500,
    ]
    columns = [
        pa.array([number, None], pa.int32() if kind.bit_width == 32 else pa.int64()).view(kind)
        for number, kind in zip(numbers, [field.type for field in MOMENTS], strict=False)
    ]
    columns.append(pa.array([Decimal("12.50"), None], MOMENTS.field("price").type))
    value = pa.StructArray.from_arrays(columns, fields=list(MOMENTS))
    first, second = reread(envelope(value)).values()
    moment = NOON + timedelta(microseconds=1234)
    assert first == {
        "second": NOON,
        "nano": moment,
        "shifted": NOON + timedelta(milliseconds=1),
        "naive": moment.replace(tzinfo=None),
        "day": date(2024, 10, 4),
        "clock": time(1, 2, 3, 4),
        "span": timedelta(seconds=1.5),
        "price": Decimal("12.50"),
    }
    assert first["nano"].utcoffset() == timedelta(hours=1)
    assert first["shifted"].utcoffset() == timedelta(hours=5, minutes=30)
    assert set(second.values()) == {None}


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.one_of(st.none(), st.integers(-(2**55), 2**55), st.integers(0, 2**53)), min_size=1),
    st.sampled_from(["UTC", "Europe/Berlin", "-03:30"]),
)
def test_no_microsecond_is_lost_in_python_values(micros: list[int | None], zone: str) -> None:
    column = pa.array(micros, pa.int64()).view(pa.timestamp("us", zone))
    found = to_python(column)
    epoch = datetime(1970, 1, 1, tzinfo=UTC)
    assert [moment and (moment - epoch) // timedelta(microseconds=1) for moment in found] == micros
    offset = None if zone == "UTC" else time_zone(zone)
    assert all(m is None or m.tzinfo == (offset or UTC) for m in found)


def test_a_time_beyond_pythons_names_its_column_and_stays_readable_as_arrow() -> None:
    value = pa.StructArray.from_arrays([pa.array([2**60]).view(pa.timestamp("s"))], names=["t"])
    found = reread(envelope(value))
    assert found.batch.num_rows == 1
    with pytest.raises(PackError, match=r"column value\.t .* Python cannot hold"):
        found.values()


def test_an_event_is_read_next_to_one_that_python_cannot_represent() -> None:
    times = pa.array([0, 2**60, 1]).view(pa.timestamp("s", "UTC"))
    found = reread(envelope(pa.StructArray.from_arrays([times], names=["t"])))
    with pytest.raises(PackError):
        found.events()
    assert found.event(2)[4] == {"t": datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC)}
    with pytest.raises(PackError, match=r"value\.t"):
        found.event(1)
    with pytest.raises(IndexError, match="there is no 3"):
        found.event(3)


def test_values_inside_a_null_struct_are_not_read() -> None:
    hidden = pa.array([2**60, 0]).view(pa.timestamp("s"))
    value = pa.StructArray.from_arrays([hidden], names=["t"], mask=pa.array([True, False]))
    epoch = datetime(1970, 1, 1, tzinfo=UTC).replace(tzinfo=None)
    assert reread(envelope(value)).values() == [None, {"t": epoch}]


def test_nested_values_come_out_of_slices_too() -> None:
    rows = [
        {"a": [["x"], None, []], "m": {"k": [1]}, "f": [1, 2]},
        {"a": [], "m": {}, "f": None},
        {"a": None, "m": None, "f": [3, None]},
        {"a": [[]], "m": {"k": []}, "f": [0, 0]},
    ]
    kind = pa.struct(
        [
            ("a", pa.list_(pa.list_(pa.string()))),
            ("m", pa.map_(pa.string(), pa.large_list(pa.int8()))),
            ("f", pa.list_(pa.int16(), 2)),
        ]
    )
    batch = envelope(pa.array(rows, kind))
    for start in range(5):
        for count in range(5 - start):
            part = batch.slice(start, count)
            assert reread(part).values() == rows[start : start + count]


def test_typed_columns_become_objects() -> None:
    columns = reread(orders(3)).value_columns()
    assert list(columns) == ["order", "text", "paid"]
    assert list(zip(*columns.values(), strict=True))[2] == (2, "xxxxxxxx", True)
    with pytest.raises(TypeError, match="are bytes"):
        reread(envelope(pa.array([b"a"]))).value_columns()


def test_the_encoder_fixes_empty_lists_that_do_not_start_at_zero() -> None:
    """Data of other libraries has such lists; Arrow's flatten() would crash the process."""
    items = pa.array([1, 2, 3, 4, 5, 6], pa.int8())
    five = pa.py_buffer(struct.pack("<i", 5))
    inner = pa.Array.from_buffers(pa.list_(pa.int8()), 0, [None, five], children=[items])
    zeros = pa.py_buffer(bytes(12))
    outer = pa.Array.from_buffers(pa.list_(inner.type), 2, [None, zeros], children=[inner])
    batch = envelope(pa.RecordBatch.from_arrays([outer], names=["x"]))
    for part in (batch, batch.slice(0, 0)):
        for compression in ("none", "lz4"):
            found = reread(part, compression=compression)
            assert found.values() == [{"x": []}] * part.num_rows
