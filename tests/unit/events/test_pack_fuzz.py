"""Hostile packs: only PackError, no crash, no memory beyond the stated bound."""

from __future__ import annotations

import random
import struct
import subprocess
import sys
import tracemalloc
import zlib
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fuzz.pack_memory import mutate
from fuzz.pack_target import check, join, sound_seeds
from millstream.errors import PackError
from millstream.events.packs.pack import decode, empty

ROOT = Path(__file__).parents[3]
SEEDS = sound_seeds()


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(SEEDS), st.randoms(use_true_random=False))
def test_a_damaged_pack_is_refused_or_completely_usable(data: bytes, chance: random.Random) -> None:
    check(mutate(data, chance))


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32 - 1), st.binary(max_size=200))
def test_arbitrary_bytes_are_refused(count: int, payload: bytes) -> None:
    if payload or count:
        assert check(join(count, payload)) != "sound"


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.sampled_from(list(empty("x").headers)), st.binary(max_size=20)))
def test_arbitrary_headers_are_refused(headers: dict[str, bytes]) -> None:
    with pytest.raises(PackError):
        decode({name: value.decode("latin-1") for name, value in headers.items()}, b"")


def test_no_input_makes_a_process_outgrow_the_stated_bound() -> None:
    """Bombs and mutations, in a process that may grow by the bound only."""
    found = subprocess.run(
        [sys.executable, "-m", "fuzz.pack_memory", "2", "1"],
        cwd=ROOT,
        env={"ARROW_DEFAULT_MEMORY_POOL": "system"},  # the others reserve address space ahead
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-2000:]
    assert "'sound'" in found.stdout
    assert "'limit'" in found.stdout


# -- bombs that mutation does not find ----------------------------------------------------------


def sign(payload: bytes, count: int) -> dict[str, str]:
    checksum = f"{zlib.crc32(payload):08x}"
    return {**empty().headers, "Mill-Count": str(count), "Mill-Checksum": checksum}


def laughing_schema(levels: int, width: int) -> bytes:
    """A schema of few bytes and width ** levels fields: each level lists one field many times."""
    message, schema, field, kind = 4, 16, 24, 40
    data = bytearray(48)
    struct.pack_into("<5H", data, message, 10, 16, 4, 6, 8)  # version, header type, header
    struct.pack_into("<4H", data, schema, 8, 8, 0, 4)  # fields
    struct.pack_into("<8H", data, field, 16, 16, 0, 0, 4, 8, 0, 12)  # type tag, type, children
    struct.pack_into("<2H", data, kind, 4, 4)
    struct.pack_into("<I", data, 0, len(data))
    at = len(data)
    data += struct.pack("<ihBxIxxxx", at - message, 4, 1, 8)
    at = len(data)
    data += struct.pack("<iI", at - schema, 4)
    step = 4 + 4 * width + 16
    tables = len(data) + levels * step  # the position of the one type table
    for _ in range(levels):
        at = len(data)
        data += struct.pack("<I", width)
        first = at + 4 + 4 * width
        data += b"".join(struct.pack("<I", first - at - 4 - 4 * n) for n in range(width))
        data += struct.pack("<iB3xII", first - field, 13, tables - first - 8, 4)
    data += struct.pack("<i", len(data) - kind)
    data += bytes(-len(data) % 8)
    return struct.pack("<Ii", 0xFFFFFFFF, len(data)) + bytes(data) + empty_end()


def empty_end() -> bytes:
    return b"\xff\xff\xff\xff\x00\x00\x00\x00"


@pytest.mark.parametrize(("levels", "width"), [(20, 64), (2, 1000), (1, 100_000), (40, 1)])
def test_a_schema_that_multiplies_itself_is_refused_in_little_memory(
    levels: int, width: int
) -> None:
    payload = laughing_schema(levels, width)
    tracemalloc.start()
    try:
        with pytest.raises(PackError) as caught:
            decode(sign(payload, 0), payload)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert caught.value.reason == "limit"
    assert peak < 2_000_000


def test_custom_metadata_of_a_schema_is_not_even_read() -> None:
    field = pa.field("value", pa.binary(), metadata={"ARROW:extension:name": "x", "k": "v" * 9000})
    schema = pa.schema([field], metadata={"note": "n" * 9000})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays([pa.array([b"a"])], schema=schema))
    payload = bytes(sink.getvalue())
    found = decode(sign(payload, 1), payload)
    assert found.values() == [b"a"]
    assert found.schema.metadata is None
    assert found.schema.field("value").metadata is None


def test_many_record_batches_are_refused() -> None:
    batch = pa.RecordBatch.from_arrays([pa.array([b"a"])], names=["value"])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        for _ in range(257):
            writer.write_batch(batch)
    payload = bytes(sink.getvalue())
    with pytest.raises(PackError, match="more than 256 record batches"):
        decode(sign(payload, 257), payload)


def test_declared_sizes_are_summed_over_buffers_and_batches() -> None:
    """Eight batches of 9 MiB once decompressed: each is below the limit, together they are not."""
    zeros = pa.array([bytes(9 * 1024 * 1024)])
    batch = pa.RecordBatch.from_arrays([zeros], names=["value"])
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
        for _ in range(8):
            writer.write_batch(batch)
    payload = bytes(sink.getvalue())
    assert len(payload) < 50_000
    before = pa.total_allocated_bytes()
    with pytest.raises(PackError, match="max_decoded_bytes") as caught:
        decode(sign(payload, 8), payload)
    assert caught.value.reason == "limit"
    assert pa.total_allocated_bytes() <= before  # garbage of other tests may be freed meanwhile
