"""Many Python objects at once: the collector rests meanwhile, and times are read in one go."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

__all__ = ["collector_rests", "moments"]

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
# Below this number the questions to Arrow cost more than they save.
_WORTH_IT: Final = 64
# MessagePack's short form of a time: 30 bits of nanoseconds, 34 bits of seconds since 1970.
_SECOND_BITS: Final = 34
_MICROSECONDS_END: Final = (1 << _SECOND_BITS) * 1_000_000
_RECORD: Final = b"\xd7\xff" + bytes(8)
_LIST: Final = b"\xdd"
_MILLION: Final = pa.scalar(1_000_000, pa.int64())
_THOUSAND: Final = pa.scalar(1_000, pa.int64())
_SHIFT: Final = pa.scalar(_SECOND_BITS, pa.int64())
_decode: Final = msgspec.msgpack.Decoder(list[datetime | None]).decode


@contextmanager
def collector_rests() -> Iterator[None]:
    """Make many objects that stay: the collector would walk through them again and again.

    Python counts new objects, and looks for cycles whenever there are 700 more. For a list of
    thousands that takes longer than to make them, and none of them can be garbage yet. It looks
    once when they are made. If a thread turns the collector off meanwhile, it is on again.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def moments(micros: Any) -> list[datetime | None]:
    """An int64 array of microseconds since 1970 as datetimes in UTC, None where it is null.

    OverflowError for a time outside the years 1 to 9999.
    """
    count = len(micros)
    if count >= _WORTH_IT:
        filled = micros.fill_null(0) if micros.null_count else micros
        span = pc.min_max(filled)
        if span["min"].as_py() >= 0 and span["max"].as_py() < _MICROSECONDS_END:
            found = _at_once(filled, count)
            if not micros.null_count:
                return found
            valid = micros.is_valid().to_pylist()
            return [at if here else None for at, here in zip(found, valid, strict=True)]
    span_of, numbers = timedelta, micros.to_pylist()
    return [None if n is None else _EPOCH + span_of(0, 0, n) for n in numbers]


def _at_once(micros: Any, count: int) -> list[datetime | None]:
    """Written as MessagePack, which msgspec reads: a seventh of the time of adding timedeltas."""
    seconds = pc.divide(micros, _MILLION)
    nanoseconds = pc.multiply(pc.subtract(micros, pc.multiply(seconds, _MILLION)), _THOUSAND)
    packed = pc.bit_wise_or(pc.shift_left(nanoseconds, _SHIFT), seconds)
    start = packed.offset * 8
    little = memoryview(packed.buffers()[1]).cast("B")[start : start + count * 8].tobytes()
    records = bytearray(_RECORD * count)
    for place in range(8):  # the highest byte comes first
        records[2 + place :: 10] = little[7 - place :: 8]
    return _decode(b"".join((_LIST, count.to_bytes(4, "big"), records)))
