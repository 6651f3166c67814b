"""Read hostile batches in a process with limited memory: python -m fuzz.kafka_memory SECONDS SEED

The process limits its own address space to what it has and a bound, so that any allocation beyond
it fails immediately. Exits with 0 and prints a line of counts.
"""

from __future__ import annotations

import random
import resource
import struct
import sys
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import cramjam

from fuzz.kafka_targets import read_batches, seeds
from fuzz.pack_memory import mutate

__all__ = ["bombs", "main"]

# The largest window of zstd is 128 MiB of address space, of which only what is used is memory.
MEMORY: Final = 128 * 1024 * 1024 + 192 * 1024 * 1024
_LARGE: Final = 256 * 1024 * 1024
_HEAD: Final = struct.Struct(">qiibIhiqqqhii")
_ONE_HEADER: Final = b"\0\1"  # without a name and a value


def _batch(codec: int, count: int, body: bytes) -> bytes:
    return _HEAD.pack(0, 0, 0, 2, 0, codec, count - 1, 0, 0, -1, -1, -1, count) + body


def _number(value: int) -> bytes:
    left, found = value << 1, bytearray()
    while left > 0x7F:
        found.append(left & 0x7F | 0x80)
        left >>= 7
    return bytes([*found, left])


def _many_headers(count: int) -> bytes:
    """A record with headers and nothing else."""
    body = b"\0\0\0\1\1" + _number(count) + _ONE_HEADER * count
    return _number(len(body)) + body


def bombs() -> Iterator[tuple[str, bytes]]:
    """Small inputs that stand for much, and Kafka's word for the refusal of each."""
    zeros = bytes(_LARGE)
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    yield "message_too_large", _batch(1, 9, packer.compress(zeros) + packer.flush())
    yield "message_too_large", _batch(2, 9, bytes(cramjam.snappy.compress_raw(zeros)))
    block = bytes(cramjam.snappy.compress_raw(zeros[: 1024 * 1024]))
    framed = b"\x82SNAPPY\0\0\0\0\1\0\0\0\1" + (len(block).to_bytes(4, "big") + block) * 50
    yield "message_too_large", _batch(2, 9, framed)
    yield "message_too_large", _batch(3, 9, bytes(cramjam.lz4.compress(zeros)))
    yield "message_too_large", _batch(4, 9, bytes(cramjam.zstd.compress(zeros)))
    snappy = b"\xff\xff\xff\xff\x0f" + b"\0" * 50  # says 4 GiB
    yield "message_too_large", _batch(2, 9, snappy)
    yield "message_too_large", _batch(4, 2**31 - 1, bytes(cramjam.zstd.compress(b"\0" * 70)))
    yield "invalid_record", _batch(4, 9_999, bytes(cramjam.zstd.compress(b"\0" * 70)))
    yield "invalid_record", _batch(0, 2**31 - 1, b"\0" * 70)
    headers = _many_headers(1_900_000)
    yield "invalid_record", _batch(0, 1, headers)
    yield "invalid_record", _batch(4, 1, bytes(cramjam.zstd.compress(headers)))
    several = b"".join(_many_headers(30_000) for _ in range(40))
    yield "invalid_record", _batch(4, 40, bytes(cramjam.zstd.compress(several)))
    yield "sound", _batch(0, 1, _many_headers(400_000))


def main() -> None:
    """Limit this process and read until the time is over."""
    seconds, seed = float(sys.argv[1]), int(sys.argv[2])
    known = list(bombs())
    inputs = [*seeds(), *(data for _, data in known if len(data) < 100_000)]
    for data in inputs[:5]:
        read_batches(data)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for expected, data in known:
        if (found := read_batches(data)) != expected:
            raise AssertionError(f"{data[:90]!r}...: {found}, not {expected}")
    chance = random.Random(seed)
    counts: Counter[str] = Counter()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        counts[read_batches(mutate(chance.choice(inputs), chance))] += 1
    sys.stdout.write(f"{counts.total():,} inputs: {dict(counts.most_common())}\n")


if __name__ == "__main__":
    main()
