"""What Kafka's clients send: batches of records and requests, and what must hold for any bytes."""

from __future__ import annotations

import struct
from typing import Final

from aiokafka.record._crecords import DefaultRecordBatchBuilder
from crc32c import crc32c

from millstream.events.packs.pack import decode, encode
from millstream.gateways.kafka.protocol import BadRequest, read_request
from millstream.gateways.kafka.records import (
    BadBatch,
    from_pack,
    read_records,
    split_batches,
)

__all__ = ["MAX_BYTES", "MAX_RECORDS", "REQUESTS", "read_batches", "read_kafka_request", "seeds"]

MAX_BYTES: Final = 4 * 1024 * 1024
MAX_RECORDS: Final = 10_000
_CHECKED_FROM: Final = 21


def read_batches(data: bytes) -> str:
    """Read batches as they are, and with a checksum that is right: what is read can be stored and
    sent again, and is the same then. Returns "sound" or Kafka's word for the refusal."""
    try:
        _read(data)
    except BadBatch as error:
        if len(data) <= _CHECKED_FROM:
            return error.code.name
    try:
        return _read(_signed(data))
    except BadBatch as error:
        return error.code.name


def _read(data: bytes) -> str:
    batches = split_batches(data, MAX_BYTES)
    records = read_records(batches, max_bytes=MAX_BYTES, max_records=MAX_RECORDS)
    columns = records.columns
    columns.validate(full=True)
    count = sum(batch.head.count for batch in batches)
    if columns.num_rows != count:
        raise AssertionError(f"{columns.num_rows} rows of {count} records")
    stored = encode(columns)
    pack = decode(stored.headers, stored.payload)
    raw = b"".join(from_pack(pack, 7, 1))
    again = read_records(split_batches(raw, 2**31), max_bytes=2**31)
    if records.same_as_sent and not again.columns.equals(columns):
        raise AssertionError("the records changed on their way")
    return "sound"


def _signed(data: bytes) -> bytes:
    """The bytes as one batch whose length and checksum are right."""
    length = struct.pack(">i", len(data) - 12)
    checksum = struct.pack(">I", crc32c(data[_CHECKED_FROM:]))
    return data[:8] + length + data[12:16] + b"\2" + checksum + data[_CHECKED_FROM:]


def read_kafka_request(data: bytes) -> str:
    """Read a request: "sound" or "refused"."""
    try:
        read_request(data)
    except BadRequest:
        return "refused"
    return "sound"


def seeds() -> tuple[bytes, ...]:
    """Valid batches of all codecs."""
    found = []
    for codec in range(5):
        builder = DefaultRecordBatchBuilder(2, codec, 0, 5, 0, 7, 1 << 20)
        builder.append(0, 1_700_000_000_000, b"key", b"value", [("name", b"1"), ("more", None)])
        builder.append(1, 1_700_000_000_500, None, None, [])
        builder.append(2, 1_600_000_000_000, b"\xff", b"x" * 300, [])
        found.append(bytes(builder.build()))
    return tuple(found)


REQUESTS: Final = (
    b"\0\x12\0\3\0\0\0\1\0\4test\0\5test\0020\0",  # ApiVersions 3
    b"\0\3\0\1\0\0\0\1\0\1c\0\0\0\1\0\1t",  # Metadata 1
    b"\0\3\0\x09\0\0\0\1\xff\xff\0\xff\xff\xff\xff\x0f",  # Metadata 9 with billions of topics
    b"\0\3\0\1\0\0\0\1\xff\xff\x7f\xff\xff\xff",  # Metadata 1, the same
    b"\0\0\0\3\0\0\0\1\xff\xff\xff\xff\0\1\0\0\x03\xe8\0\0\0\1\0\1t\0\0\0\1\0\0\0\0\0\0\0\1x",
)
