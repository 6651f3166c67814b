"""What must hold for any bytes that claim to be a pack: refused with a reason, or usable.

Shared by the atheris harness (fuzz/pack.py) and the tests. An input is the count as 4 bytes and the
payload; the checksum is corrected, or nothing after its check would ever be reached.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from millstream.errors import PackError
from millstream.events.packs import pack

__all__ = ["LIMITS", "MEMORY", "check", "join", "seeds", "sound_seeds"]

VECTORS = Path(__file__).parents[1] / "tests" / "vectors" / "packs"
LIMITS = pack.ReadLimits(max_rows=10_000, max_decoded_bytes=4 * 1024 * 1024, max_values=100_000)
MEMORY = LIMITS.max_decoded_bytes + 16 * 1024 * 1024  # as ReadLimits promises


def join(count: int, payload: bytes) -> bytes:
    """The input for a payload."""
    return struct.pack("<I", count) + payload


def seeds() -> Iterator[tuple[str, bytes]]:
    """The test vectors, sound and broken, as inputs."""
    for file in sorted(VECTORS.glob("*.json")):
        text = json.loads(file.read_text("utf-8"))
        count = text["headers"]["Mill-Count"]
        if count.isdecimal():
            yield file.stem, join(int(count), file.with_suffix(".bin").read_bytes())


def sound_seeds() -> list[bytes]:
    """The inputs that are sound packs with a payload."""
    return [data for name, data in seeds() if not name.startswith("broken-") and len(data) > 4]


def check(data: bytes) -> str:
    """Decode an input and use all of it; returns the reason of its refusal or 'sound'.

    Raises other errors, or crashes the process, only if the decoder has a bug.
    """
    if len(data) < 4:
        return "short"
    usual = pa.default_memory_pool()
    # A separate pool: the default one reports the peak of everything the process ever did.
    pool = pa.proxy_memory_pool(usual)
    pa.set_memory_pool(pool)
    try:
        return _check(data, pool)
    finally:
        pa.set_memory_pool(usual)


def _check(data: bytes, pool: pa.MemoryPool) -> str:
    (count,) = struct.unpack_from("<I", data)
    payload = data[4:]
    headers = {
        "Content-Type": "application/vnd.apache.arrow.stream",
        "Mill-Pack": "1",
        "Mill-Count": str(count),
        "Mill-Checksum": f"{zlib.crc32(payload):08x}",
    }
    try:
        found = pack.decode(headers, payload, LIMITS)
    except PackError as error:
        return error.reason
    if found.count != count or found.complete().num_rows != count:
        raise RuntimeError(f"{count} events were announced, {found!r} was decoded")
    again = pack.encode(found.batches)
    if pack.decode(again.headers, again.payload, LIMITS).count != count:
        raise RuntimeError(f"{found!r} does not survive a second encoding")
    used = pool.max_memory()
    if used > MEMORY:
        raise RuntimeError(f"{used:,} bytes of Arrow memory were used; {MEMORY:,} are promised")
    try:
        events = found.events()
    except PackError as error:
        return f"{error.reason} in Python"
    if len(events) != count:
        raise RuntimeError(f"{count} events were announced, {len(events)} were made")
    return "sound"
