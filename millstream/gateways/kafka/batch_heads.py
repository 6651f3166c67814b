"""The heads of Kafka's record batches (magic 2): read, checked, patched. Pure.

A batch is 61 bytes of head and its records, which are compressed together or not at all. Base
offset, length, leader epoch and magic are before the checksum and not covered by it, so that a
broker may number a batch without reading it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from crc32c import crc32c

from millstream.gateways.kafka.protocol import ErrorCode

__all__ = [
    "BEFORE_LENGTH",
    "HEAD_SIZE",
    "NO_TIME",
    "NUMBERED",
    "RECORD_SIZE_MIN",
    "BadBatch",
    "BatchHead",
    "RawBatch",
    "empty_batch",
    "head_of",
    "split_batches",
    "uncompressed_head",
    "with_base_offset",
]

# base offset, length, leader epoch, magic, crc; then what the checksum covers: attributes, last
# offset delta, first time, largest time, producer id, epoch, first sequence, number of records
_HEAD: Final = struct.Struct(">qiibIhiqqqhii")
_START: Final = struct.Struct(">qiibI")
_COVERED: Final = struct.Struct(">hiqqqhii")
NUMBERED: Final = struct.Struct(">qii")  # base offset, length, leader epoch
HEAD_SIZE: Final = _HEAD.size
BEFORE_LENGTH: Final = 12  # the length counts what follows it
_BEFORE_CHECKSUM: Final = 17
_MAGIC_AT: Final = 16
_MAGIC: Final = 2

_CODEC_MASK: Final = 0x07
_LOG_APPEND_TIME: Final = 0x08
_TRANSACTIONAL: Final = 0x10
_CONTROL: Final = 0x20
_KNOWN: Final = _CODEC_MASK | _LOG_APPEND_TIME | _TRANSACTIONAL | _CONTROL
_LAST_CODEC: Final = 4

RECORD_SIZE_MIN: Final = 7  # length, attributes, time, offset, two sizes, number of headers
_DELTA_MAX: Final = 2**31 - 1  # and the largest length
NO_TIME: Final = -1  # in Kafka: a record without a time


class BadBatch(ValueError):
    """Records that are refused. `code` is Kafka's; `index` the record in its batch, if one is;
    `batch` the batch among those that were read together."""

    def __init__(self, code: ErrorCode, text: str, index: int | None = None) -> None:
        super().__init__(text)
        self.code = code
        self.text = text
        self.index = index
        self.batch = 0

    def __str__(self) -> str:
        return self.text if self.index is None else f"record {self.index}: {self.text}"


@dataclass(frozen=True, slots=True)
class BatchHead:
    """What the head of a batch says; only what its checks are for is certain."""

    count: int
    producer_id: int  # -1: not an idempotent producer
    epoch: int
    first_sequence: int
    codec: int
    size: int  # of the whole batch as sent
    first_time_ms: int  # of the first record, not the smallest; -1: none
    max_time_ms: int  # as the client says: `read_records` has the true ones
    is_transactional: bool
    is_control: bool


class RawBatch(NamedTuple):
    """A batch as it was sent: `raw` is checked as far as it can be without reading records."""

    head: BatchHead
    raw: bytes | memoryview


def split_batches(records: bytes | memoryview, max_bytes: int) -> list[RawBatch]:
    """The batches that a client sent for one partition, with their heads and checksums checked.

    `max_bytes` is the largest batch. Nothing is decompressed and no memory is taken by what a
    count says. BadBatch for anything that is refused, control batches too; transactional ones
    are marked.
    """
    view = memoryview(records)
    batches = []
    at = 0
    while at < len(view):
        if len(view) - at < HEAD_SIZE:
            _refuse_short(view[at:])
        size = BEFORE_LENGTH + int.from_bytes(view[at + 8 : at + 12], "big", signed=True)
        magic = view[at + _MAGIC_AT]
        if magic != _MAGIC:
            _refuse_magic(magic)
        if size > max_bytes:
            raise BadBatch(
                ErrorCode.message_too_large,
                f"a batch of {size:,} bytes; this topic accepts {max_bytes:,} (max.message.bytes)",
            )
        if not HEAD_SIZE <= size <= len(view) - at:
            raise BadBatch(
                ErrorCode.corrupt_message,
                f"a batch says {size:,} bytes, {len(view) - at:,} are there",
            )
        raw = records if size == len(view) else bytes(view[at : at + size])
        batches.append(RawBatch(_checked_head(raw), raw))
        at += size
    if not batches:
        raise BadBatch(ErrorCode.invalid_record, "there is no record batch")
    return batches


def _refuse_short(rest: memoryview) -> None:
    if len(rest) > _MAGIC_AT and rest[_MAGIC_AT] != _MAGIC:
        _refuse_magic(rest[_MAGIC_AT])
    raise BadBatch(
        ErrorCode.corrupt_message, f"{len(rest)} bytes are no batch, whose head has {HEAD_SIZE}"
    )


def _refuse_magic(magic: int) -> None:
    if magic > _MAGIC:
        raise BadBatch(ErrorCode.corrupt_message, f"magic {magic} is not known, 2 is")
    raise BadBatch(
        ErrorCode.unsupported_for_message_format,
        f"records in the format {magic} of Kafka before 0.11; send format 2",
    )


def _checked_head(raw: bytes | memoryview) -> BatchHead:
    _, _, _, _, checksum, attributes, last_delta, first_time, max_time, producer, *rest = (
        _HEAD.unpack_from(raw)
    )
    epoch, sequence, count = rest
    found = crc32c(memoryview(raw)[_BEFORE_CHECKSUM + 4 :])
    if found != checksum:
        raise BadBatch(
            ErrorCode.corrupt_message,
            f"the checksum is {found:08x}, the batch says {checksum:08x}: it was damaged",
        )
    codec = attributes & _CODEC_MASK
    if codec > _LAST_CODEC:
        raise BadBatch(
            ErrorCode.unsupported_compression_type,
            f"compression {codec} is not known; none, gzip, snappy, lz4 and zstd are (0 to 4)",
        )
    if attributes & _CONTROL:
        raise BadBatch(ErrorCode.invalid_record, "control batches are not accepted from clients")
    if attributes & ~_KNOWN:
        raise BadBatch(ErrorCode.invalid_record, f"attributes {attributes:#x} are not known")
    if attributes & _LOG_APPEND_TIME:
        raise BadBatch(
            ErrorCode.invalid_timestamp, "the time of storing (LogAppendTime) is not a client's"
        )
    if count < 1 or (codec == 0 and count > (len(raw) - HEAD_SIZE) // RECORD_SIZE_MIN):
        raise BadBatch(
            ErrorCode.invalid_record, f"a batch of {len(raw):,} bytes says {count:,} records"
        )
    if last_delta != count - 1:
        raise BadBatch(
            ErrorCode.invalid_record,
            f"{count:,} records, and {last_delta:,} as the last one's offset delta",
        )
    if producer < -1 or (producer >= 0 and (epoch < 0 or sequence < 0)):
        raise BadBatch(
            ErrorCode.invalid_record,
            f"producer id {producer}, epoch {epoch}, first sequence {sequence}",
        )
    return BatchHead(
        count=count,
        producer_id=producer,
        epoch=epoch,
        first_sequence=sequence,
        codec=codec,
        size=len(raw),
        first_time_ms=first_time,
        max_time_ms=max_time,
        is_transactional=bool(attributes & _TRANSACTIONAL),
        is_control=False,
    )


def uncompressed_head(raw: bytes | memoryview) -> bytes:
    """The head of a batch whose records follow without compression; its checksum is not right."""
    head = bytearray(raw[:HEAD_SIZE])
    head[_BEFORE_CHECKSUM + 5] &= ~_CODEC_MASK & 0xFF
    return bytes(head)


def with_base_offset(
    raw: bytes | bytearray | memoryview, base_offset: int, leader_epoch: int
) -> tuple[bytes, memoryview]:
    """The batch with these numbers, as two pieces for `join`: the records are not copied."""
    view = memoryview(raw)
    length = int.from_bytes(view[8:12], "big")
    return NUMBERED.pack(base_offset, length, leader_epoch), view[NUMBERED.size :]


def head_of(
    pieces: Sequence[bytes | memoryview], times: Any, base_offset: int, leader_epoch: int
) -> bytes:
    """The head of a batch of these records, which are not compressed and have these times."""
    count = len(times)
    first, latest = int(times[0]), int(times.max())
    covered = _COVERED.pack(0, count - 1, first, latest, -1, -1, -1, count)
    checksum = crc32c(covered)
    for piece in pieces:
        checksum = crc32c(piece, checksum)
    length = HEAD_SIZE - BEFORE_LENGTH + sum(map(len, pieces))
    if length > _DELTA_MAX:
        raise ValueError(f"the events do not fit a batch of {_DELTA_MAX:,} bytes")
    return _START.pack(base_offset, length, leader_epoch, _MAGIC, checksum) + covered


def empty_batch(base_offset: int, last_offset: int, leader_epoch: int = 0) -> bytes:
    """A batch without records that moves a reader to the offset after `last_offset`.

    At most 2^31 offsets fit; a reader that gets there asks for what follows.
    """
    if not 0 <= base_offset <= last_offset:
        raise ValueError(f"offsets {base_offset} to {last_offset} are no gap")
    delta = min(last_offset - base_offset, _DELTA_MAX)
    covered = _COVERED.pack(0, delta, NO_TIME, NO_TIME, -1, -1, -1, 0)
    length = HEAD_SIZE - BEFORE_LENGTH
    return _START.pack(base_offset, length, leader_epoch, _MAGIC, crc32c(covered)) + covered
