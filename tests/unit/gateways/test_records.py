"""Kafka's record batches become columns of a pack, and packs and events become batches."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import cramjam
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.events.event import Partition, PlainEvent
from millstream.events.packs.pack import Pack, decode, encode, envelope
from millstream.gateways.kafka.records import (
    RawBatch,
    empty_batch,
    from_events,
    from_pack,
    read_records,
    split_batches,
    with_base_offset,
)
from millstream.wire.message import RawMessage
from tests.unit.gateways.kafka_batches import (
    CODECS,
    MemoryRecords,
    PythonBuilder,
    Row,
    batch_of,
    head_of,
    joined,
    patched,
)

LIMIT = 1 << 20
TIME = 1_700_000_000_000
ROWS = [
    Row(b"a", b"one", TIME, [("h", b"1"), ("h", b"2"), ("ü", b"")]),
    Row(None, b"", TIME + 5),
    Row(b"\xff\xfe", None, TIME - 7_000, [("x", b"\0\xff")]),
    Row(b"", b"x" * 1000, TIME + 1),
]


def batches(raw: bytes) -> list[RawBatch]:
    return split_batches(raw, LIMIT)


def packed(columns: pa.RecordBatch) -> Pack:
    pack = encode(columns)
    return decode(pack.headers, pack.payload)


def rows_of(columns: pa.RecordBatch) -> list[Row]:
    """The rows of columns, with times in milliseconds."""
    pack = packed(columns)
    times = [-1 if time is None else time // 1_000_000 for time in pack.timestamps()]
    keys = pack.column("key").to_pylist()
    found = zip(keys, pack.values(), times, pack.headers(), strict=True)
    return [Row(key, value, time, headers or ()) for key, value, time, headers in found]


def read_by_kafka_python(raw: bytes) -> list[tuple[int, Row]]:
    """Offsets and records as another library reads them; it checks checksum and sizes."""
    records = MemoryRecords(bytes(raw))
    found = []
    while records.has_next():
        batch = records.next_batch()
        assert batch.validate_crc()
        found += [
            (one.offset, Row(one.key, one.value, one.timestamp, one.headers)) for one in batch
        ]
    return found


def plain(rows: list[Row]) -> list[Row]:
    return [row._replace(headers=list(row.headers)) for row in rows]


def event(subject: str, payload: bytes, headers: bytes = b"", stored_ns: int = 5) -> PlainEvent:
    reply = f"$JS.ACK.t.c.1.9.9.{stored_ns}.0".encode()
    block = b"NATS/1.0\r\n" + headers + b"\r\n" if headers else b""
    raw = RawMessage(f"t.{subject}".encode(), reply, block, payload)
    return PlainEvent(Partition("t", "t", 0, "t"), raw)


# -- produce ----------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_a_batch_of_every_codec_becomes_the_same_columns(codec: int) -> None:
    (batch,) = batches(batch_of(ROWS, codec))
    assert batch.head.codec == codec
    assert rows_of(read_records([batch]).columns) == ROWS


@pytest.mark.parametrize("codec", [0, 1], ids=["none", "gzip"])  # others need more libraries
def test_a_batch_built_by_kafka_python_is_read(codec: int) -> None:
    builder = PythonBuilder(2, codec, False, 7, 3, 11, 1 << 20)
    for offset, row in enumerate(ROWS):
        builder.append(offset, row.time, row.key, row.value, list(row.headers))
    (batch,) = batches(bytes(builder.build()))
    assert rows_of(read_records([batch]).columns) == ROWS
    head = batch.head
    assert (head.producer_id, head.epoch, head.first_sequence, head.count) == (7, 3, 11, 4)


def test_snappy_in_javas_framing_is_read() -> None:
    raw = batch_of(ROWS)
    body = raw[61:]
    blocks = [bytes(cramjam.snappy.compress_raw(part)) for part in (body[:500], body[500:])]
    framed = b"\x82SNAPPY\0\0\0\0\1\0\0\0\1"
    framed += b"".join(len(block).to_bytes(4, "big") + block for block in blocks)
    assert rows_of(read_records(batches(patched(raw, framed, attributes=2))).columns) == ROWS


def test_frames_of_a_codec_one_after_the_other_are_one_batch() -> None:
    raw = batch_of(ROWS)
    for codec, name in ((1, "gzip"), (3, "lz4"), (4, "zstd")):
        compress = getattr(cramjam, name).compress
        body = bytes(compress(raw[61:300])) + bytes(compress(raw[300:]))
        assert rows_of(read_records(batches(patched(raw, body, attributes=codec))).columns) == ROWS


def test_batches_are_read_one_after_the_other() -> None:
    found = batches(batch_of(ROWS, 4) + batch_of(ROWS[:1], producer=(5, 0, 9)))
    assert [(batch.head.count, batch.head.producer_id) for batch in found] == [(4, -1), (1, 5)]
    assert rows_of(read_records(found).columns) == [*ROWS, ROWS[0]]


def test_a_head_says_what_was_sent() -> None:
    raw = patched(batch_of(ROWS, producer=(9, 2, 100)), attributes=0x10, max_time=TIME + 5)
    head = batches(raw)[0].head
    assert head.is_transactional
    assert not head.is_control
    assert (head.producer_id, head.epoch, head.first_sequence) == (9, 2, 100)
    assert (head.first_time_ms, head.max_time_ms) == (TIME, TIME + 5)
    assert head.size == len(raw)


def test_a_whole_buffer_of_one_batch_is_not_copied() -> None:
    raw = batch_of(ROWS)
    assert batches(raw)[0].raw is raw
    (batch,) = split_batches(memoryview(b"." + raw)[1:], LIMIT)
    assert batch.raw == raw


def test_columns_that_no_record_has_are_left_out() -> None:
    columns = read_records(batches(batch_of([Row(), Row()]))).columns
    assert columns.schema.names == ["timestamp", "value"]
    assert read_records(batches(batch_of([Row(b"k")]))).columns.schema.names == [
        "key",
        "timestamp",
        "value",
    ]


def test_a_record_without_a_time_has_the_time_of_storing() -> None:
    raw = patched(batch_of([Row(time=0), Row(time=1)]), first_time=-1)
    found = read_records(batches(raw))
    times = found.columns.column("timestamp").to_pylist()
    assert times == [None, datetime(1970, 1, 1, tzinfo=UTC)]
    assert (found.same_as_sent, found.all_timed, found.times) == (False, False, (0, 0))
    again = joined(from_pack(packed(found.columns), 0, TIME))
    assert [row.time for _, row in read_by_kafka_python(again)] == [TIME, 0]


def test_records_of_which_none_has_a_time() -> None:
    found = read_records(batches(patched(batch_of([Row()] * 3), first_time=-1)))
    assert found.columns.schema.names == ["value"]
    assert (found.same_as_sent, found.all_timed, found.times) == (False, False, None)


def test_a_header_without_a_value_becomes_empty() -> None:
    found = read_records(batches(batch_of([Row(headers=[("a", None), ("b", b"1")]), Row()])))
    assert packed(found.columns).headers() == [[("a", b""), ("b", b"1")], None]
    assert not found.same_as_sent
    assert read_records(batches(batch_of(ROWS))).same_as_sent


def test_the_times_of_records_are_their_smallest_and_largest() -> None:
    found = read_records(batches(batch_of(ROWS)))
    assert (found.times, found.all_timed) == ((TIME - 7_000, TIME + 5), True)
    before = read_records(batches(batch_of([Row(time=-5), Row(time=3)])))
    assert (before.times, before.all_timed) == ((-5, 3), True)
    both = read_records(batches(batch_of(ROWS) + batch_of([Row(time=9)])))
    assert both.times == (9, TIME + 5)


# -- fetch ------------------------------------------------------------------------------------


def test_a_pack_becomes_a_batch_that_other_libraries_read() -> None:
    pack = packed(read_records(batches(batch_of(ROWS, 3))).columns)
    raw = joined(from_pack(pack, 1_000, TIME, leader_epoch=4))
    assert read_by_kafka_python(raw) == list(enumerate(plain(ROWS), 1_000))
    head = head_of(raw)
    assert (head["base_offset"], head["leader_epoch"], head["last_delta"]) == (1_000, 4, 3)
    assert (head["first_time"], head["max_time"]) == (TIME, TIME + 5)
    assert (head["producer_id"], head["epoch"], head["first_sequence"]) == (-1, -1, -1)


def test_a_pack_of_values_alone_has_the_time_of_storing() -> None:
    raw = joined(from_pack(packed(envelope(pa.array([b"a", None], pa.binary()))), 7, TIME))
    expected = [Row(None, b"a", TIME, []), Row(None, None, TIME, [])]
    assert read_by_kafka_python(raw) == list(enumerate(expected, 7))


def test_a_pack_with_ids_and_some_times_is_read_without_the_ids() -> None:
    columns = envelope(
        pa.array(["a", "b"]),
        key=pa.array(["k", None]),
        timestamp=pa.array([None, 1_500_001], pa.timestamp("us", "UTC")),
        id=pa.array(["id-1", None]),
    )
    expected = [Row(b"k", b"a", TIME, []), Row(None, b"b", 1_500, [])]
    assert read_by_kafka_python(joined(from_pack(packed(columns), 0, TIME))) == list(
        enumerate(expected)
    )


def test_a_pack_of_several_record_batches_is_one_batch() -> None:
    one = envelope(pa.array([b"a"]), key=pa.array([b"k"]))
    two = envelope(pa.array([b"b", b"c"]), key=pa.array([None, b"l"], pa.binary()))
    pack = encode([one, two])
    found = read_by_kafka_python(joined(from_pack(decode(pack.headers, pack.payload), 3, TIME)))
    assert [(offset, row.key, row.value) for offset, row in found] == [
        (3, b"k", b"a"),
        (4, None, b"b"),
        (5, b"l", b"c"),
    ]


def test_typed_values_are_made_bytes_by_the_converter() -> None:
    pack = packed(envelope(pa.array([{"n": 1}, None, {"n": 3}], pa.struct([("n", pa.int64())]))))
    with pytest.raises(ValueError, match="typed"):
        from_pack(pack, 0, TIME)

    def values(column: pa.Array) -> list[bytes | None]:
        return [None if one is None else b"%d" % one["n"] for one in column.to_pylist()]

    found = read_by_kafka_python(joined(from_pack(pack, 0, TIME, values)))
    assert [row.value for _, row in found] == [b"1", None, b"3"]


def test_a_pack_without_events_is_no_batch() -> None:
    with pytest.raises(ValueError, match="without events"):
        from_pack(packed(envelope(pa.array([], pa.binary()))), 0, TIME)


@pytest.mark.parametrize("first", [-1, 0, -2, 5])
def test_times_around_1970_are_kept_but_the_one_that_means_none(first: int) -> None:
    times = pa.array([first * 1000, 7_000, -1, -1_001], pa.timestamp("us", "UTC"))
    pack = packed(envelope(pa.array([b""] * 4), timestamp=times))
    found = [row.time for _, row in read_by_kafka_python(joined(from_pack(pack, 0, TIME)))]
    assert found == [0 if first == -1 else first, 7, 0, -2]


def test_plain_events_keep_their_offsets_with_gaps() -> None:
    events = [
        (40, event("k", b"one", b"Mill-Time: 1700000000123000000\r\na: b\r\n")),
        (42, event("_", b"two", stored_ns=TIME * 1_000_000)),
        (50, event("=FF", b"", b"Mill-Null: 1\r\nX: \xfe\r\nN-\xff: v\r\nNats-Msg-Id: 7\r\n")),
    ]
    raw = bytes(from_events(events, leader_epoch=2))
    assert read_by_kafka_python(raw) == [
        (40, Row(b"k", b"one", TIME + 123, [("a", b"b")])),
        (42, Row(None, b"two", TIME, [])),
        (50, Row(b"\xff", None, 0, [("X", b"\xfe"), ("N-\ufffd", b"v")])),
    ]
    assert head_of(raw)["last_delta"] == 10
    assert head_of(raw)["leader_epoch"] == 2


def test_plain_events_of_a_typed_topic_are_made_bytes_by_the_converter() -> None:
    found = from_events(
        [(1, event("k", b"1")), (2, event("l", b"2"))],
        lambda events: [b"<" + one.data + b">" for one in events],
    )
    assert [row.value for _, row in read_by_kafka_python(bytes(found))] == [b"<1>", b"<2>"]


def test_events_that_cannot_be_one_batch_are_refused() -> None:
    with pytest.raises(ValueError, match="no events"):
        from_events([])
    with pytest.raises(ValueError, match="do not fit one batch"):
        from_events([(0, event("k", b"")), (2**31, event("k", b""))])


def test_an_empty_batch_moves_a_reader_over_a_gap() -> None:
    raw = empty_batch(46, 49, 3)
    records = MemoryRecords(raw)
    batch = records.next_batch()
    assert batch.validate_crc()
    assert list(batch) == []
    assert batch.next_offset == 50
    assert head_of(raw)["leader_epoch"] == 3
    assert head_of(empty_batch(0, 2**40))["last_delta"] == 2**31 - 1
    with pytest.raises(ValueError, match="no gap"):
        empty_batch(5, 4)


def test_a_batch_gets_its_offset_without_a_copy_of_its_records() -> None:
    raw = batch_of(ROWS, 1)
    head, rest = with_base_offset(raw, 2**40, 9)
    assert rest.obj is raw
    found = b"".join((head, rest))
    assert [offset for offset, _ in read_by_kafka_python(found)] == [2**40 + n for n in range(4)]
    assert head_of(found) == head_of(raw) | {"base_offset": 2**40, "leader_epoch": 9}


# -- both -------------------------------------------------------------------------------------

SIZES = st.sampled_from([0, 1, 63, 64, 8_191, 8_192, 20_000])
BYTES = st.one_of(st.binary(max_size=20), SIZES.map(bytes))
TIMES = st.one_of(
    st.integers(-62_135_596_800_000, 253_402_300_799_999), st.integers(TIME, TIME + 100)
).filter(lambda time: time != -1)
ROW = st.builds(
    Row,
    st.none() | BYTES,
    st.none() | BYTES,
    TIMES,
    st.lists(st.tuples(st.text(max_size=5), BYTES), max_size=3),
)


@settings(max_examples=150, deadline=None)
@given(rows=st.lists(ROW, min_size=1, max_size=12), codec=st.integers(0, 4), base=st.integers(0))
def test_any_records_come_back_as_they_were(rows: list[Row], codec: int, base: int) -> None:
    base %= 2**62
    found = read_records(batches(batch_of(rows, codec)))
    columns = found.columns
    assert found.same_as_sent
    assert rows_of(columns) == [row._replace(headers=row.headers or ()) for row in rows]
    raw = joined(from_pack(packed(columns), base, 0))
    assert read_by_kafka_python(raw) == list(enumerate(plain(rows), base))
    assert read_records(batches(raw)).columns.equals(columns)


def test_aiokafkas_private_classes_are_those_that_were_tried() -> None:
    """Another release may read or build otherwise: try records, hostile ones too, before."""
    from importlib.metadata import version

    found: Any = version("aiokafka")
    assert found.startswith("0.14."), found
