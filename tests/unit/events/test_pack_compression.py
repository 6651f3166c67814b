"""When packs are compressed without being asked to."""

from __future__ import annotations

import os
from typing import Any

import pyarrow as pa
import pytest

from millstream.errors import ConfigError
from millstream.events.packs.encode import AUTO_BYTES_MIN
from millstream.events.packs.pack import decode, encode, envelope
from millstream.events.packs.packing import Packing
from millstream.messaging.publishing.target import PackTarget

TEXTS = envelope(pa.array([b"a text that repeats %d" % number for number in range(2_000)]))
NOISE = envelope(  # only its keys are worth it
    pa.array([os.urandom(100) for _ in range(2_000)]), key=pa.array(["key-1"] * 2_000)
)


def compression_of(batch: pa.RecordBatch, **about: Any) -> tuple[str | None, bool]:
    made = encode(batch, **about)
    found = decode(made.headers, made.payload)
    assert found.batch.equals(batch)
    return found.compression, made.incompressible


def test_a_large_pack_is_compressed_with_lz4() -> None:
    assert compression_of(TEXTS, compression="auto") == ("lz4", False)
    assert compression_of(TEXTS) == (None, False)
    plain, auto = encode(TEXTS), encode(TEXTS, compression="auto")
    assert plain.size > AUTO_BYTES_MIN
    assert auto.size < plain.size / 2


def test_a_small_pack_is_not_compressed_unless_requested() -> None:
    small = TEXTS.slice(0, 100)
    assert encode(small).payload.size < AUTO_BYTES_MIN
    assert compression_of(small, compression="auto") == (None, False)
    assert compression_of(small, compression="lz4") == ("lz4", False)


def test_a_pack_of_which_little_is_saved_is_not_compressed_unless_requested() -> None:
    assert compression_of(NOISE, compression="auto") == (None, True)
    assert compression_of(NOISE, compression="lz4") == ("lz4", False)


def test_what_is_not_worth_compressing_is_tried_now_and_then() -> None:
    nothing: Any = None
    target = PackTarget(nothing, nothing, nothing, [], None, nothing)

    def tried(batch: pa.RecordBatch, count: int) -> list[bool]:
        made = [target.encode(batch, Packing()) for _ in range(count)]
        return [m.incompressible or m.payload.size < encode(batch).payload.size for m in made]

    assert tried(TEXTS, 3) == [True] * 3
    assert tried(NOISE, 20) == [True, *[False] * 15, True, *[False] * 3]
    assert tried(TEXTS, 14) == [*[False] * 12, True, True]
    asked = [target.encode(NOISE, Packing(compression="lz4")) for _ in range(2)]
    assert [decode(pack.headers, pack.payload).compression for pack in asked] == ["lz4"] * 2


@pytest.mark.parametrize("compression", ["auto", "lz4", "zstd"])
def test_values_that_compression_hides_are_counted_too(compression: Any) -> None:
    bits = pa.array([[True] * 1_000_000] * 9)
    with pytest.raises(ConfigError, match="max_values"):
        encode(
            envelope(pa.RecordBatch.from_arrays([bits], names=["bits"])), compression=compression
        )
