"""How clients choose the partition of a key: CRC-32 or murmur2. Pure.

librdkafka chooses by CRC-32, as Millstream does. The Java client and most others use murmur2, so
their keys are in other partitions than the SDK's. What a client used shows in its batches: all keys
of a batch are in the partition that it was sent to.
"""

from __future__ import annotations

import zlib
from typing import Any, Final

import numpy as np
import pyarrow as pa

__all__ = ["ANY", "CRC32", "MURMUR2", "murmur2_partitions", "partitioner_after", "partitioner_of"]

CRC32: Final = "crc32"
MURMUR2: Final = "murmur2"
ANY: Final = "any"  # neither of them, or several

_SEED: Final = np.uint32(0x9747B28C)
_M: Final = np.uint32(0x5BD1E995)
_MASK: Final = np.uint32(0x7FFFFFFF)


def partitioner_after(
    recorded: str | None, keys: pa.Array, partition: int, partitions: int
) -> str | None:
    """What a topic has to record after keys were sent to a partition; None: CRC-32 so far.

    Once another way than CRC-32 was seen, keys are looked for in all partitions, so there is
    nothing more to find out. Until then every key is checked, at 100 ns each.
    """
    if partitions == 1 or recorded not in (None, CRC32) or len(keys) == keys.null_count:
        return recorded
    found = partitioner_of(keys, partition, partitions)
    return recorded if found == CRC32 else found


def partitioner_of(keys: pa.Array, partition: int, partitions: int) -> str:
    """CRC32 if that puts all these keys in this partition, else MURMUR2 if that does, else ANY.

    Null keys may be in any partition.
    """
    present = keys.drop_null() if keys.null_count else keys
    placed = np.fromiter(map(zlib.crc32, present.to_pylist()), np.uint32, len(present))
    if bool(np.all(placed % np.uint32(partitions) == partition)):
        return CRC32
    if bool(np.all(murmur2_partitions(present, partitions) == partition)):
        return MURMUR2
    return ANY


def murmur2_partitions(column: pa.Array, partitions: int) -> Any:
    """The partition of each key as the Java client chooses it; no key may be null."""
    column = column.cast(pa.large_binary())
    _, ends, data = column.buffers()
    count = len(column)
    if not count:
        return np.zeros(0, np.uint32)
    offsets = np.frombuffer(ends, np.int64, count + 1, column.offset * 8)
    # Four bytes more than needed, so that the last key can be read in words of four.
    payload = np.frombuffer(data, np.uint8) if data is not None else np.zeros(0, np.uint8)
    padded = np.concatenate((payload, np.zeros(4, np.uint8)))
    starts, sizes = offsets[:-1], np.diff(offsets)
    with np.errstate(over="ignore"):
        hashes = _murmur2(padded, starts, sizes)
    return (hashes & _MASK) % np.uint32(partitions)


def _murmur2(data: Any, starts: Any, sizes: Any) -> Any:
    hashes = _SEED ^ sizes.astype(np.uint32)
    words = sizes // 4
    for step in range(int(words.max())):
        # Keys that have ended are left out; mostly all have the same size, and none has.
        rows = np.flatnonzero(words > step)
        word = _word(data, starts[rows] + 4 * step) * _M
        word ^= word >> np.uint32(24)
        hashes[rows] = hashes[rows] * _M ^ word * _M
    rest = sizes - 4 * words
    rows = np.flatnonzero(rest)
    if len(rows):
        kept = (np.uint32(1) << (rest[rows] * 8).astype(np.uint32)) - np.uint32(1)
        tail = _word(data, starts[rows] + 4 * words[rows]) & kept
        hashes[rows] = (hashes[rows] ^ tail) * _M
    hashes ^= hashes >> np.uint32(13)
    hashes *= _M
    hashes ^= hashes >> np.uint32(15)
    return hashes


def _word(data: Any, at: Any) -> Any:
    """Four bytes as a number, the first one lowest."""
    word = data[at].astype(np.uint32)
    for number in (1, 2, 3):
        word |= data[at + number].astype(np.uint32) << np.uint32(8 * number)
    return word
