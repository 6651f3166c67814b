"""Record batches for tests: built by the libraries of Kafka's clients, or byte by byte."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from aiokafka.record._crecords import DefaultRecordBatchBuilder
from crc32c import crc32c

from tests.kafka_python import DefaultRecordBatchBuilder as PythonBuilder
from tests.kafka_python import MemoryRecords

__all__ = [
    "CODECS",
    "MemoryRecords",
    "PythonBuilder",
    "Row",
    "batch_of",
    "checked",
    "head_of",
    "joined",
    "number",
    "patched",
    "record",
]

CODECS = {"none": 0, "gzip": 1, "snappy": 2, "lz4": 3, "zstd": 4}
HEAD = struct.Struct(">qiibIhiqqqhii")
FIELDS = (
    "base_offset",
    "length",
    "leader_epoch",
    "magic",
    "crc",
    "attributes",
    "last_delta",
    "first_time",
    "max_time",
    "producer_id",
    "epoch",
    "first_sequence",
    "count",
)


class Row(NamedTuple):
    """One record."""

    key: bytes | None = None
    value: bytes | None = b"v"
    time: int = 1_700_000_000_000
    headers: Sequence[tuple[str, bytes | None]] = ()


def batch_of(
    rows: Sequence[Row], codec: int = 0, producer: tuple[int, int, int] = (-1, -1, -1)
) -> bytes:
    """A batch as aiokafka's producer builds it."""
    builder = DefaultRecordBatchBuilder(2, codec, 0, *producer, 1 << 30)
    for offset, row in enumerate(rows):
        builder.append(offset, row.time, row.key, row.value, list(row.headers))
    return bytes(builder.build())


def head_of(raw: bytes) -> dict[str, int]:
    """The fields of a batch's head."""
    return dict(zip(FIELDS, HEAD.unpack_from(raw), strict=True))


def joined(pieces: Iterable[bytes | bytearray | memoryview]) -> bytes:
    """A batch that is in pieces."""
    return b"".join(pieces)


def checked(raw: bytes) -> bytes:
    """The batch with the right length and checksum."""
    sized = raw[:8] + struct.pack(">i", len(raw) - 12) + raw[12:]
    return sized[:17] + struct.pack(">I", crc32c(sized[21:])) + sized[21:]


def patched(raw: bytes, body: bytes | None = None, **fields: int) -> bytes:
    """The batch with some fields of its head, and its records, changed; its checksum is right."""
    head = HEAD.pack(*(head_of(raw) | fields).values())
    return checked(head + (raw[HEAD.size :] if body is None else body))


def number(value: int) -> bytes:
    """A number of variable length."""
    left = (value << 1) ^ (value >> 63)
    found = bytearray()
    while left > 0x7F:
        found.append(left & 0x7F | 0x80)
        left >>= 7
    return bytes([*found, left])


def record(**parts: Any) -> bytes:
    """A record of parts that may be wrong; each is bytes or a number."""
    usual: dict[str, bytes | int] = {
        "attributes": b"\0",
        "time": 0,
        "offset": 0,
        "key_size": -1,
        "key": b"",
        "value_size": 1,
        "value": b"v",
        "header_count": 0,
        "headers": b"",
    }
    size = parts.pop("size", None)
    body = b"".join(
        part if isinstance(part, bytes) else number(part) for part in (usual | parts).values()
    )
    return (number(len(body)) if size is None else number(size)) + body
