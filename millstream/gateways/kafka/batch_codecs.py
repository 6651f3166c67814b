"""Decompress what clients sent, never beyond a limit. Pure.

The output is bounded while it is made: a few bytes of any codec may stand for gigabytes.
"""

from __future__ import annotations

from typing import Final

import pyarrow as pa

from millstream.gateways.kafka.batch_heads import BadBatch
from millstream.gateways.kafka.protocol import ErrorCode

__all__ = ["decompress"]

_GZIP, _SNAPPY, _LZ4, _ZSTD = 1, 2, 3, 4
_NAMES: Final = {_GZIP: "gzip", _SNAPPY: "snappy", _LZ4: "lz4", _ZSTD: "zstd"}
# Java's snappy: a magic, two version numbers, then blocks with their lengths before them.
_XERIAL: Final = b"\x82SNAPPY\x00"
_XERIAL_HEAD: Final = 16
_BLOCK_LENGTH: Final = 4
_SNAPPY_LENGTH_MAX: Final = 5  # bytes of a snappy block's own length
_USUAL_RATIO: Final = 8
_PIECE_MIN: Final = 64 * 1024


def decompress(codec: int, data: memoryview, limit: int) -> list[pa.Buffer]:
    """The decompressed bytes in pieces; BadBatch when there are more than `limit`."""
    try:
        if codec == _SNAPPY:
            return _snappy(data, limit)
        return _stream(_NAMES[codec], data, limit)
    except (OSError, pa.ArrowException) as error:
        raise BadBatch(
            ErrorCode.corrupt_message, f"the records are no {_NAMES[codec]} data: {error}"
        ) from error


def _too_large(limit: int) -> BadBatch:
    return BadBatch(
        ErrorCode.message_too_large,
        f"a batch decompresses to more than {limit:,} bytes; send smaller ones",
    )


def _stream(name: str, data: memoryview, limit: int) -> list[pa.Buffer]:
    stream = pa.CompressedInputStream(pa.BufferReader(pa.py_buffer(data)), name)
    pieces: list[pa.Buffer] = []
    left = limit
    while True:
        piece = stream.read_buffer(min(left + 1, _PIECE_MIN + _USUAL_RATIO * len(data)))
        if piece.size > left:
            raise _too_large(limit)
        if not piece.size:
            return pieces
        pieces.append(piece)
        left -= piece.size


def _snappy(data: memoryview, limit: int) -> list[pa.Buffer]:
    if bytes(data[: len(_XERIAL)]) != _XERIAL:
        return [_snappy_block(data, limit, limit)]
    pieces: list[pa.Buffer] = []
    left = limit
    at = _XERIAL_HEAD
    while at < len(data):
        size = int.from_bytes(data[at : at + _BLOCK_LENGTH], "big")
        at += _BLOCK_LENGTH
        if not 0 < size <= len(data) - at:
            raise BadBatch(
                ErrorCode.corrupt_message,
                f"a snappy block says {size:,} bytes, {max(len(data) - at, 0):,} are there",
            )
        pieces.append(_snappy_block(data[at : at + size], left, limit))
        left -= pieces[-1].size
        at += size
    return pieces


def _snappy_block(block: memoryview, left: int, limit: int) -> pa.Buffer:
    size = shift = 0
    for byte in block[:_SNAPPY_LENGTH_MAX]:
        size |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
    else:
        raise BadBatch(ErrorCode.corrupt_message, "a snappy block has no length")
    if size > left:
        raise _too_large(limit)
    return pa.decompress(pa.py_buffer(block), size, "snappy")
