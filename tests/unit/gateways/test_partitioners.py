"""Which partitioner placed the keys of a batch."""

from __future__ import annotations

import zlib

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.gateways.kafka.partitioners import (
    ANY,
    CRC32,
    MURMUR2,
    murmur2_partitions,
    partitioner_after,
    partitioner_of,
)

PARTITIONS = 4


def _murmur2(data: bytes) -> int:
    """As in Java's `Utils.murmur2`, step by step."""
    word = 0xFFFFFFFF
    m, size = 0x5BD1E995, len(data)
    h = (0x9747B28C ^ size) & word
    for at in range(0, size - size % 4, 4):
        k = int.from_bytes(data[at : at + 4], "little") * m & word
        k = (k ^ k >> 24) * m & word
        h = (h * m & word) ^ k
    tail = data[size - size % 4 :]
    if tail:
        h = (h ^ int.from_bytes(tail, "little")) * m & word
    h = (h ^ h >> 13) * m & word
    return h ^ h >> 15


def _placed(way: str, partition: int, count: int = 50) -> pa.Array:
    """Keys that a client which uses one way would send to a partition."""
    place = zlib.crc32 if way == CRC32 else lambda key: _murmur2(key) & 0x7FFFFFFF
    keys = (b"key-%d" % number for number in range(10_000))
    found = [key for key in keys if place(key) % PARTITIONS == partition]
    return pa.array(found[:count], pa.binary())


# From the tests of the Java client (UtilsTest.testMurmur2).
@pytest.mark.parametrize(
    ("key", "expected"),
    [
        (b"21", -973932308),
        (b"foobar", -790332482),
        (b"a-little-bit-long-string", -985981536),
        (b"a-little-bit-longer-string", -1486304829),
        (b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58897971),
        (b"abc", 479470107),
    ],
)
def test_murmur2_is_that_of_the_java_client(key: bytes, expected: int) -> None:
    assert _murmur2(key) == expected & 0xFFFFFFFF
    places = murmur2_partitions(pa.array([key], pa.binary()), 1000)
    assert places.tolist() == [(expected & 0x7FFFFFFF) % 1000]


@given(st.lists(st.binary(max_size=40)), st.integers(0, 3), st.integers(1, 50))
def test_keys_of_any_sizes_are_placed_as_one_by_one(
    keys: list[bytes], before: int, partitions: int
) -> None:
    column = pa.array([*[b"other"] * before, *keys], pa.binary()).slice(before)
    expected = [(_murmur2(key) & 0x7FFFFFFF) % partitions for key in keys]
    assert murmur2_partitions(column, partitions).tolist() == expected


@pytest.mark.parametrize("way", [CRC32, MURMUR2])
@pytest.mark.parametrize("partition", range(PARTITIONS))
def test_the_partitioner_is_known_by_its_keys(way: str, partition: int) -> None:
    assert partitioner_of(_placed(way, partition), partition, PARTITIONS) == way


def test_keys_that_no_known_partitioner_placed_may_be_anywhere() -> None:
    assert partitioner_of(_placed(CRC32, 1), 2, PARTITIONS) == ANY
    mixed = pa.array(_placed(CRC32, 1).to_pylist() + _placed(MURMUR2, 1).to_pylist(), pa.binary())
    assert partitioner_of(mixed, 1, PARTITIONS) == ANY


def test_one_key_of_many_in_another_partition_is_noticed() -> None:
    keys = [*_placed(CRC32, 1, 1000).to_pylist(), _placed(CRC32, 2, 1).to_pylist()[0]]
    assert partitioner_after(None, pa.array(keys, pa.binary()), 1, PARTITIONS) == ANY


def test_rows_without_keys_say_nothing() -> None:
    none = pa.array([None, None], pa.binary())
    assert partitioner_after(None, none, 1, PARTITIONS) is None
    some = pa.array([None, *_placed(MURMUR2, 1).to_pylist(), None], pa.binary())
    assert partitioner_after(None, some, 1, PARTITIONS) == MURMUR2


def test_nothing_is_recorded_where_crc32_agrees_or_one_partition_has_all() -> None:
    assert partitioner_after(None, _placed(CRC32, 1), 1, PARTITIONS) is None
    assert partitioner_after(CRC32, _placed(CRC32, 1), 1, PARTITIONS) == CRC32
    assert partitioner_after(None, _placed(MURMUR2, 1), 0, 1) is None


@pytest.mark.parametrize("recorded", [MURMUR2, ANY])
def test_what_is_recorded_stays_whatever_comes_later(recorded: str) -> None:
    for way in (CRC32, MURMUR2):
        assert partitioner_after(recorded, _placed(way, 1), 1, PARTITIONS) == recorded
