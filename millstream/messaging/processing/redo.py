"""The redo of a commit: what other streams than the record's own have to store. Pure.

It is in messages beside the record. They are numbered from 0, so each commit replaces those of the
commit before, and a table does not grow with them.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec
import pyarrow as pa

from millstream.errors import ConfigError, DataLoss
from millstream.events.packs.pack import EncodedPack
from millstream.messaging.processing.record import CommitRecord
from millstream.wire.batch import BATCH_BYTES_MAX, BATCH_MESSAGES_MAX
from millstream.wire.message import OutgoingMessage

__all__ = [
    "HEADER_BYTES",
    "REDO_BYTES_MAX",
    "ROWS_MAX",
    "StreamUnits",
    "Unit",
    "chunks_of",
    "read_redo",
    "redo_subject",
    "units_of",
    "write_redo",
]

REDO_TOKEN: Final = "_redo"
ROWS_MAX: Final = BATCH_MESSAGES_MAX - 1  # of one unit: one message is the fence
UNIT_BYTES_MAX: Final = BATCH_BYTES_MAX // 4
# What one commit may have for other streams: it is stored in one atomic batch.
REDO_BYTES_MAX: Final = BATCH_BYTES_MAX // 2
CHUNK_BYTES: Final = 512 * 1024
HEADER_BYTES: Final = 512  # kept free in a message for its headers


class Unit(msgspec.Struct, array_like=True):
    """What is stored at once in one stream."""

    rows: list[tuple[bytes, bytes, bytes]]  # subject, headers, payload
    packs: list[tuple[dict[str, str], bytes, int]]  # headers, payload, number of events

    @classmethod
    def of_packs(cls, packs: Sequence[EncodedPack]) -> Unit:
        """A unit of packs."""
        return cls([], [(pack.headers, bytes(pack.payload), pack.count) for pack in packs])

    def messages(self) -> list[OutgoingMessage]:
        """Its rows, ready to be stored."""
        return [OutgoingMessage(*row) for row in self.rows]

    def encoded(self) -> list[EncodedPack]:
        """Its packs, ready to be stored."""
        return [EncodedPack(headers, pa.py_buffer(data), n) for headers, data, n in self.packs]


class StreamUnits(msgspec.Struct, array_like=True):
    """The units of one stream, in order."""

    stream: str
    units: list[Unit]


_writer: Final = msgspec.msgpack.Encoder()
_reader: Final = msgspec.msgpack.Decoder(list[StreamUnits])


def redo_subject(prefix: str, process: str, number: int) -> str:
    """Where a message of its redo is."""
    return f"{prefix}.{REDO_TOKEN}.{process}.{number}"


def units_of(rows: Sequence[OutgoingMessage]) -> list[Unit]:
    """Rows in groups that one atomic batch takes."""
    units: list[Unit] = []
    size = UNIT_BYTES_MAX
    for row in rows:
        bytes_ = len(row.headers) + len(row.payload)
        if not units or len(units[-1].rows) >= ROWS_MAX or size + bytes_ > UNIT_BYTES_MAX:
            units.append(Unit([], []))
            size = 0
        units[-1].rows.append((row.subject, row.headers, bytes(row.payload)))
        size += bytes_
    return units


def write_redo(streams: Sequence[StreamUnits]) -> bytes:
    """What other streams have to store, as bytes."""
    return zlib.compress(_writer.encode(streams), 1) if streams else b""


def chunks_of(data: bytes, message_max: int) -> Iterator[bytes]:
    """The redo in pieces that fit a message."""
    size = min(CHUNK_BYTES, message_max - HEADER_BYTES)
    if size <= 0 or len(data) > REDO_BYTES_MAX or len(data) // size >= BATCH_MESSAGES_MAX - 10:
        raise ConfigError(
            f"one commit has {len(data):,} bytes for other topics and tables, and one message of "
            f"its first table has at most {message_max:,}: they do not fit one atomic batch. "
            f"Return less for one event, set commit_events lower, or allow larger messages"
        )
    for start in range(0, len(data), size):
        yield data[start : start + size]


def read_redo(record: CommitRecord, chunks: Sequence[bytes]) -> list[StreamUnits]:
    """What other streams had to store in a commit; DataLoss when it is not complete."""
    data = b"".join(chunks)
    if len(data) != record.size or zlib.crc32(data) != record.checksum:
        raise DataLoss(
            f"commit {record.unit} of process '{record.process}' has {record.size:,} bytes for "
            f"other topics and tables, and {len(data):,} are stored or they are damaged: it cannot "
            f"be completed. Check the disk of the table that holds it"
        )
    found: Any = _reader.decode(zlib.decompress(data)) if data else []
    return [each for each in found if isinstance(each, StreamUnits)]
