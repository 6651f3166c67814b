"""Many records are written all at once: byte for byte what a client's library writes."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import cycle, islice

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.events.packs.envelope import envelope
from millstream.events.packs.pack import Pack, decode, encode
from millstream.gateways.kafka import bulk_records
from millstream.gateways.kafka.bulk_records import RECORDS_MIN
from millstream.gateways.kafka.records import from_pack
from tests.unit.gateways.kafka_batches import Row, batch_of, joined, patched

TIME = 1_700_000_000_000
STORED = TIME + 1


def pack_of(rows: list[Row]) -> Pack:
    """The pack of these records."""
    columns = envelope(
        pa.array([row.value for row in rows], pa.binary()),
        key=pa.array([row.key for row in rows], pa.binary()),
        timestamp=pa.array([row.time * 1000 for row in rows], pa.timestamp("us", "UTC")),
    )
    made = encode(columns)
    return decode(made.headers, made.payload)


def written(pack: Pack) -> bytes:
    """The batch of a pack, written at once: in more pieces than a builder returns."""
    pieces = from_pack(pack, 0, STORED)
    assert len(pieces) > 1
    return joined(pieces)


def numbered(rows: list[Row]) -> bytes:
    """The batch as a client builds it, and as a broker stores it."""
    return patched(batch_of(rows), leader_epoch=0)


def many(rows: list[Row], count: int = RECORDS_MIN) -> list[Row]:
    """As many records, of these."""
    return list(islice(cycle(rows), count))


@pytest.mark.parametrize("count", [RECORDS_MIN, 8_192, 8_193, 25_000])
def test_records_are_written_as_by_a_client(count: int) -> None:
    rows = [Row(b"key-%d" % n, b"%d" % n * (n % 30), TIME + n * n // 7) for n in range(count)]
    assert written(pack_of(rows)) == numbered(rows)


def test_numbers_of_every_width(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [0, 63, 64, 8_191, 8_192, 1_048_575, 1_048_576]
    times = [0, 63, 64, -64, -65, 2**20, 2**34, 2**41, -(2**34)]
    rows = many([Row(bytes(size), None, TIME) for size in sizes], 14)
    rows += many([Row(None, bytes(size), TIME) for size in sizes], 14)
    rows += many([Row(None, b"", TIME + time) for time in times], RECORDS_MIN)
    for at_once in (bulk_records._AT_ONCE, 7):
        monkeypatch.setattr(bulk_records, "_AT_ONCE", at_once)
        assert written(pack_of(rows)) == numbered(rows)


@pytest.mark.parametrize("key", [None, b"", b"k"])
@pytest.mark.parametrize("value", [None, b"", b"v" * 70])
def test_null_and_empty_are_kept_apart(key: bytes | None, value: bytes | None) -> None:
    for rows in (many([Row(key, value)]), many([Row(key, value), Row(b"x", None), Row(None)])):
        assert written(pack_of(rows)) == numbered(rows)


def test_a_pack_of_values_alone_has_the_time_of_storing() -> None:
    made = encode(envelope(pa.array([b"a", None] * RECORDS_MIN, pa.binary())))
    rows = [Row(None, b"a", STORED), Row(None, None, STORED)] * RECORDS_MIN
    assert written(decode(made.headers, made.payload)) == numbered(rows)


def test_events_without_a_time_have_that_of_storing() -> None:
    times = [None, datetime.fromtimestamp(5, UTC)] * RECORDS_MIN
    column = pa.array(times, pa.timestamp("us", "UTC"))
    made = encode(envelope(pa.array([b"a"] * len(times)), timestamp=column))
    rows = [Row(None, b"a", STORED), Row(None, b"a", 5_000)] * RECORDS_MIN
    assert written(decode(made.headers, made.payload)) == numbered(rows)


def test_headers_are_left_to_the_builder() -> None:
    rows: list[list[tuple[str, bytes]] | None] = [None] * RECORDS_MIN
    rows[-1] = [("a", b"1")]
    headers = pa.array(rows, pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])))
    made = encode(envelope(pa.array([b"v"] * RECORDS_MIN), headers=headers))
    expected = [Row(None, b"v", STORED)] * (RECORDS_MIN - 1)
    expected.append(Row(None, b"v", STORED, [("a", b"1")]))
    found = from_pack(decode(made.headers, made.payload), 0, STORED)
    assert joined(found) == numbered(expected)


BYTES = st.none() | st.binary(max_size=200)
ROWS = st.lists(
    st.builds(Row, BYTES, BYTES, st.integers(0, 2**45), st.just(())), min_size=1, max_size=40
)


@settings(max_examples=100, deadline=None)
@given(rows=ROWS, more=st.integers(0, 50))
def test_any_records(rows: list[Row], more: int) -> None:
    rows = many(rows, RECORDS_MIN + more)
    assert written(pack_of(rows)) == numbered(rows)
