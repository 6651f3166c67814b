"""Records of few sizes are read all at once: as one by one, or not at all."""

from __future__ import annotations

import pytest
from aiokafka.errors import CorruptRecordException
from aiokafka.record._crecords import DefaultRecordBatch
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.gateways.kafka.equal_records import RECORDS_MIN, read_equal
from millstream.gateways.kafka.records import BadBatch, read_records, split_batches
from tests.unit.gateways.kafka_batches import Row, batch_of, number, patched, record

HEAD_SIZE = 61
TIME = 1_700_000_000_000
PAD = bytes(32)
ONE = batch_of([Row()])

Records = list[tuple[bytes | None, bytes | None, int]]


def at_once(raw: bytes, count: int) -> Records | None:
    """The records as this module reads them."""
    found = read_equal(raw, HEAD_SIZE, count)
    if found is None:
        return None
    found.keys.validate(full=True)
    found.values.validate(full=True)
    keys, values = found.keys.to_pylist(), found.values.to_pylist()
    return list(zip(keys, values, found.time_deltas.tolist(), strict=True))


def one_by_one(raw: bytes, count: int) -> Records | None:
    """The same by aiokafka; None where it refuses them, or they have headers."""
    raw = patched(raw, count=count, last_delta=count - 1, first_time=0)
    found = []
    try:
        for offset, one in enumerate(DefaultRecordBatch(memoryview(raw + PAD)[: -len(PAD)])):
            if one.headers or one.offset != offset:
                return None
            found.append((one.key, one.value, one.timestamp))
    except (CorruptRecordException, ValueError, OverflowError):
        return None
    return found


def sensor(count: int) -> list[Row]:
    """Records of one size, but for numbers that grow."""
    return [Row(b"key-%02d" % (n % 7), b"%09d" % n, TIME + n // 3) for n in range(count)]


@pytest.mark.parametrize("count", [1, 2, 63, 64, 65, 200, 9_000])
def test_records_of_one_size_are_read_at_once(count: int) -> None:
    found = at_once(batch_of(sensor(count)), count)
    assert found == [(row.key, row.value, row.time - TIME) for row in sensor(count)]


@pytest.mark.parametrize("key", [None, b"", b"k"])
@pytest.mark.parametrize("value", [None, b"", b"v" * 70])
def test_null_and_empty_are_kept_apart(key: bytes | None, value: bytes | None) -> None:
    rows = [Row(key, value)] * 40
    assert at_once(batch_of(rows), 40) == [(key, value, 0)] * 40
    mixed = [*rows, Row(b"x", b"x"), *rows]
    assert at_once(batch_of(mixed), 81) == [(row.key, row.value, 0) for row in mixed]


@pytest.mark.parametrize(
    "rows",
    [
        [Row(value=bytes(n)) for n in range(60)],  # of too many sizes
        [*sensor(30), Row(headers=[("a", b"1")])],
        [Row(headers=[("a", b"1")])] * 30,
        [Row(value=bytes(9_000))] * 3,
        [Row(time=TIME), Row(time=TIME + 2**40)],
    ],
    ids=["sizes", "one header", "headers", "large", "times"],
)
def test_everything_unusual_is_left_to_the_other_way(rows: list[Row]) -> None:
    assert at_once(batch_of(rows), len(rows)) is None
    assert read_records(split_batches(batch_of(rows), 1 << 20)).columns.num_rows == len(rows)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x0e",
        record(offset=1),
        record() + b"\0",
        record(key_size=-2),
        record(value_size=-2, value=b""),
        record(key_size=100),
        record(value_size=2),
        record(value=b"vv"),
        record(header_count=-1),
        record(size=-1),
        record(time=b"\xff" * 9),
        record(offset=b"\x80" * 5 + b"\0"),
        number(1) + b"\0",
        b"\x80",
        b"\x80\x80\x80\x80\x80\x80\x80\x80",
    ],
)
def test_a_record_that_is_wrong_is_left_to_the_other_way(body: bytes) -> None:
    assert at_once(ONE[:HEAD_SIZE] + body, 1) is None


@settings(max_examples=200, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(0, 80), st.integers(1, 90)), min_size=1, max_size=5),
    keys=st.lists(st.none() | st.binary(max_size=6), min_size=1, max_size=5),
    step=st.integers(0, 9_000),
)
def test_runs_of_records_are_read_as_one_by_one(
    sizes: list[tuple[int, int]], keys: list[bytes | None], step: int
) -> None:
    values = [bytes([n % 256]) * size for size, times in sizes for n in range(times)]
    rows = [Row(keys[n % len(keys)], value, TIME - n * step) for n, value in enumerate(values)]
    raw = batch_of(rows)
    found = at_once(raw, len(rows))
    if found is not None:
        assert found == one_by_one(raw, len(rows))
    else:
        assert len(sizes) + len(set(map(repr, keys))) > 2 or step


@settings(max_examples=500, deadline=None)
@given(
    place=st.integers(HEAD_SIZE, 700),
    bits=st.integers(1, 255),
    count=st.sampled_from([30, 30, 30, 29, 31]),
    cut=st.sampled_from([0, 0, 0, 1, 5]),
)
def test_damaged_records_are_read_as_one_by_one_or_not(
    place: int, bits: int, count: int, cut: int
) -> None:
    raw = bytearray(batch_of(sensor(30)))
    raw[min(place, len(raw) - 1)] ^= bits
    damaged = bytes(raw[: len(raw) - cut])
    found = at_once(damaged, count)
    assert found is None or found == one_by_one(damaged, count)


@pytest.mark.parametrize("codec", [0, 1, 4])
def test_large_batches_are_the_same_columns_both_ways(
    codec: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = sensor(RECORDS_MIN)
    (batch,) = split_batches(batch_of(rows, codec), 1 << 20)
    columns = read_records([batch]).columns
    monkeypatch.setattr("millstream.gateways.kafka.records.RECORDS_MIN", RECORDS_MIN + 1)
    assert columns.equals(read_records([batch]).columns)
    assert columns.column("value").to_pylist() == [row.value for row in rows]


def test_times_that_are_no_times_are_refused_in_large_batches_too() -> None:
    rows = sensor(RECORDS_MIN)
    for first in (2**63 - 1, -(2**63), 253_402_300_799_999):
        raw = patched(batch_of(rows), first_time=first)
        with pytest.raises(BadBatch, match="not of the years 1 to 9999"):
            read_records(split_batches(raw, 1 << 20))
