"""Records from strangers: read or refused with Kafka's code, within the limits of memory."""

from __future__ import annotations

import random
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import cramjam
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fuzz.kafka_targets import read_batches, seeds
from fuzz.pack_memory import mutate
from millstream.gateways.kafka.protocol import ErrorCode
from millstream.gateways.kafka.records import BadBatch, read_records, split_batches
from tests.unit.gateways.kafka_batches import Row, batch_of, checked, number, patched, record

ROOT = Path(__file__).parents[3]
ONE = batch_of([Row(b"k", b"v")])
THREE = batch_of([Row(b"k", b"v")] * 3)
LARGE = 2**31 - 1


def refusal(raw: bytes, max_bytes: int = 1 << 20, **limits: int) -> BadBatch:
    with pytest.raises(BadBatch) as refused:
        read_records(split_batches(raw, max_bytes), **limits)
    return refused.value


def of_records(*records: bytes, count: int | None = None) -> bytes:
    """A batch of records made by hand."""
    number_of = len(records) if count is None else count
    return patched(ONE, b"".join(records), count=number_of, last_delta=number_of - 1)


# -- heads ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (b"", "invalid_record"),
        (b"\0", "corrupt_message"),
        (ONE[:60], "corrupt_message"),
        (ONE[:-1], "corrupt_message"),
        (ONE + b"\0", "corrupt_message"),
        (ONE[:-1] + b"\1", "corrupt_message"),
        (ONE[:21] + b"\1" + ONE[22:], "corrupt_message"),
        (ONE[:8] + (-1).to_bytes(4, "big", signed=True) + ONE[12:], "corrupt_message"),
        (ONE[:8] + (-(2**31)).to_bytes(4, "big", signed=True) + ONE[12:], "corrupt_message"),
        (ONE[:8] + (48).to_bytes(4, "big") + ONE[12:], "corrupt_message"),
        (ONE[:8] + LARGE.to_bytes(4, "big") + ONE[12:], "message_too_large"),
        (patched(ONE, magic=0), "unsupported_for_message_format"),
        (patched(ONE, magic=1), "unsupported_for_message_format"),
        (patched(ONE, magic=1)[:34], "unsupported_for_message_format"),
        (patched(ONE, magic=3), "corrupt_message"),
        (patched(ONE, magic=-1), "corrupt_message"),
        (patched(ONE, attributes=5), "unsupported_compression_type"),
        (patched(ONE, attributes=7), "unsupported_compression_type"),
        (patched(ONE, attributes=0x20), "invalid_record"),
        (patched(ONE, attributes=0x30), "invalid_record"),
        (patched(ONE, attributes=0x40), "invalid_record"),
        (patched(ONE, attributes=-(2**15)), "invalid_record"),
        (patched(ONE, attributes=0x08), "invalid_timestamp"),
        (patched(ONE, count=0, last_delta=-1), "invalid_record"),
        (patched(ONE, count=-1, last_delta=-2), "invalid_record"),
        (patched(ONE, count=LARGE, last_delta=LARGE - 1), "invalid_record"),
        (patched(ONE, last_delta=1), "invalid_record"),
        (patched(THREE, last_delta=-1), "invalid_record"),
        (patched(ONE, producer_id=-2), "invalid_record"),
        (patched(ONE, producer_id=5, epoch=-1, first_sequence=0), "invalid_record"),
        (patched(ONE, producer_id=5, epoch=0, first_sequence=-1), "invalid_record"),
        (patched(ONE, first_time=2**63 - 1), "invalid_timestamp"),
        (patched(ONE, first_time=-(2**63)), "invalid_timestamp"),
        (patched(ONE, first_time=253_402_300_800_000), "invalid_timestamp"),
        (patched(ONE, first_time=-62_135_596_800_001), "invalid_timestamp"),
    ],
)
def test_a_head_that_is_wrong_is_refused_with_kafkas_code(raw: bytes, code: str) -> None:
    assert refusal(raw).code is ErrorCode[code]


def test_a_batch_larger_than_the_topic_takes_is_refused_with_both_numbers() -> None:
    refused = refusal(ONE, max_bytes=len(ONE) - 1)
    assert refused.code is ErrorCode.message_too_large
    assert f"{len(ONE)} bytes" in str(refused)
    assert f"accepts {len(ONE) - 1}" in str(refused)
    assert read_records(split_batches(ONE, len(ONE))).columns.num_rows == 1


def test_the_second_batch_is_checked_like_the_first() -> None:
    assert refusal(ONE + ONE[:-1]).code is ErrorCode.corrupt_message
    assert refusal(ONE + patched(ONE, attributes=0x20)).code is ErrorCode.invalid_record


# -- records ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parts", "code"),
    [
        ({"size": 3}, "corrupt_message"),
        ({"size": -1}, "corrupt_message"),
        ({"size": 2**62}, "corrupt_message"),
        ({"key_size": 100}, "corrupt_message"),
        ({"key_size": 2**31 - 1}, "corrupt_message"),
        ({"key_size": 2**63 - 1}, "corrupt_message"),
        ({"key_size": 2**63 - 100}, "corrupt_message"),
        ({"value_size": 2}, "corrupt_message"),
        ({"value_size": 2**40}, "corrupt_message"),
        ({"value_size": 2**63 - 1}, "corrupt_message"),
        ({"header_count": -1}, "corrupt_message"),
        ({"header_count": 1}, "corrupt_message"),
        ({"header_count": 2**31 - 1}, "corrupt_message"),
        ({"header_count": 2**63 - 1}, "corrupt_message"),
        ({"header_count": 1, "headers": number(-1) + number(0)}, "corrupt_message"),
        ({"header_count": 1, "headers": number(2**62) + number(0)}, "corrupt_message"),
        ({"header_count": 1, "headers": number(1) + b"a" + number(5)}, "corrupt_message"),
        ({"header_count": 1, "headers": number(1) + b"\xff" + number(0)}, "invalid_record"),
        ({"header_count": 9, "headers": (b"\0" + number(-1)) * 8}, "corrupt_message"),
        ({"offset": 0}, "invalid_record"),
        ({"offset": 2}, "invalid_record"),
        ({"offset": -1}, "invalid_record"),
        ({"offset": 2**63 - 1}, "invalid_record"),
        ({"time": 2**62}, "invalid_timestamp"),
        ({"time": b"\xff" * 10 + b"\1"}, "corrupt_message"),
        ({"offset": b"\x80" * 12}, "corrupt_message"),
        ({"value": b"v\0\0\0"}, "corrupt_message"),
    ],
)
def test_a_record_that_is_wrong_is_refused_with_its_index(parts: Any, code: str) -> None:
    refused = refusal(of_records(record(), record(**({"offset": 1} | parts))))
    assert refused.code is ErrorCode[code]
    assert refused.index == 1
    assert str(refused).startswith("record 1: ")


@pytest.mark.parametrize("end", [b"\xff", b"\x81", b"\x81" * 9, b"\xff" * 30])
def test_a_number_that_goes_on_after_the_end_is_refused(end: bytes) -> None:
    """What is after the end of the buffer is never read as if it were the client's."""
    for size in (60, 4_000, 131_000):
        body = b"\0\0\0\1" + number(size) + b"x" * size + number(40) + (b"\0" + number(-1)) * 5
        raw = of_records(number(len(body) + 20) + body + end)
        assert refusal(raw, max_bytes=1 << 22).code is ErrorCode.corrupt_message


def test_bytes_after_the_last_record_are_refused() -> None:
    assert refusal(of_records(record(), b"\0", count=1)).code is ErrorCode.corrupt_message
    assert refusal(of_records(record(), record(offset=1), count=1)).code is (
        ErrorCode.corrupt_message
    )


def test_fewer_records_than_the_head_says_are_refused() -> None:
    refused = refusal(
        of_records(record(), record(value=b"x" * 50, value_size=50, offset=1), count=3)
    )
    assert (refused.code, refused.index) == (ErrorCode.corrupt_message, 2)


def test_the_batch_at_fault_is_named_among_others() -> None:
    late = patched(THREE, first_time=2**61)
    for raw, index in ((late, 0), (of_records(record(), record(offset=7)), 1)):
        refused = refusal(THREE + ONE + raw + ONE)
        assert (refused.batch, refused.index) == (2, index)
    middle = of_records(record(), record(offset=1, time=2**60), record(offset=2))
    refused = refusal(THREE + middle + ONE)
    assert (refused.batch, refused.index) == (1, 1)
    assert refused.code is ErrorCode.invalid_timestamp


# -- compression and limits -------------------------------------------------------------------


@pytest.mark.parametrize("codec", [1, 2, 3, 4])
@pytest.mark.parametrize("body", [b"", b"\0", b"no such data" * 9, b"\x82SNAPPY\0", b"\xff" * 40])
def test_what_the_codec_cannot_read_is_refused(codec: int, body: bytes) -> None:
    assert refusal(patched(ONE, body, attributes=codec)).code in (
        ErrorCode.corrupt_message,
        ErrorCode.invalid_record,
        ErrorCode.message_too_large,
    )


@pytest.mark.parametrize("codec", [1, 2, 3, 4])
def test_compressed_records_that_are_cut_off_are_refused(codec: int) -> None:
    raw = batch_of([Row(b"k", bytes(range(256)) * 40)] * 9, codec)
    for size in range(61, len(raw), 7):
        assert refusal(checked(raw[:size])).code in (
            ErrorCode.corrupt_message,
            ErrorCode.invalid_record,
        )


@pytest.mark.parametrize(
    "blocks",
    [b"\0", b"\0\0\0\0", b"\xff\xff\xff\xff", b"\0\0\0\5abc", b"\x7f\xff\xff\xff" + b"a" * 9],
)
def test_javas_snappy_blocks_with_wrong_lengths_are_refused(blocks: bytes) -> None:
    framed = b"\x82SNAPPY\0\0\0\0\1\0\0\0\1" + blocks
    assert refusal(patched(ONE, framed, attributes=2)).code is ErrorCode.corrupt_message


@pytest.mark.parametrize("codec", [1, 2, 3, 4])
def test_the_decompressed_size_counts_against_the_limit(codec: int) -> None:
    raw = batch_of([Row(b"k", bytes(100_000))], codec)
    size = len(batch_of([Row(b"k", bytes(100_000))])) - 61
    (batch,) = split_batches(raw, 1 << 20)
    assert read_records([batch], max_bytes=size).columns.num_rows == 1
    with pytest.raises(BadBatch, match=f"more than {size - 1:,} bytes") as refused:
        read_records([batch], max_bytes=size - 1)
    assert refused.value.code is ErrorCode.message_too_large
    with pytest.raises(BadBatch) as second:  # of all batches together
        read_records([batch, batch], max_bytes=2 * size - 1)
    assert (second.value.batch, second.value.code) == (1, ErrorCode.message_too_large)


def test_the_number_of_records_counts_before_they_are_read() -> None:
    assert refusal(THREE + THREE, max_records=5).code is ErrorCode.message_too_large
    assert read_records(split_batches(THREE + THREE, 1 << 20), max_records=6).columns.num_rows == 6


@pytest.mark.parametrize("name", ["gzip", "lz4", "zstd", "snappy"])
def test_a_count_that_the_decompressed_bytes_cannot_hold_is_refused(name: str) -> None:
    codec = {"gzip": 1, "snappy": 2, "lz4": 3, "zstd": 4}[name]
    compress = cramjam.snappy.compress_raw if name == "snappy" else getattr(cramjam, name).compress
    raw = patched(ONE, bytes(compress(record())), attributes=codec, count=900, last_delta=899)
    assert refusal(raw).code is ErrorCode.invalid_record


def test_very_many_headers_are_refused_before_they_are_objects() -> None:
    headers = b"\0\1" * 800_000
    raw = of_records(record(header_count=800_000, headers=headers))
    tracemalloc.start()
    try:
        refused = refusal(raw, max_bytes=1 << 22)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (refused.code, refused.index) == (ErrorCode.invalid_record, 0)
    assert peak < 3 * len(raw)


def test_no_batch_makes_a_process_outgrow_its_bound() -> None:
    """Bombs of all kinds and mutations, in a process that may grow by the bound only."""
    found = subprocess.run(
        [sys.executable, "-m", "fuzz.kafka_memory", "2", "1"],
        cwd=ROOT,
        env={"ARROW_DEFAULT_MEMORY_POOL": "system"},  # the others reserve address space ahead
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-2000:]
    assert "'sound'" in found.stdout
    assert "'message_too_large'" in found.stdout


# -- anything ---------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(data=st.binary(max_size=300))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    read_batches(data)


@settings(max_examples=300, deadline=None)
@given(body=st.binary(max_size=200), codec=st.integers(0, 4), count=st.integers(1, 30))
def test_any_records_are_read_or_refused(body: bytes, codec: int, count: int) -> None:
    read_batches(patched(ONE, body, attributes=codec, count=count, last_delta=count - 1))


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.sampled_from(seeds()), chance=st.randoms(use_true_random=False))
def test_batches_with_faults_are_read_or_refused(seed: bytes, chance: random.Random) -> None:
    read_batches(mutate(seed, chance))
