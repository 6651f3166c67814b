"""The pack format on its own: events to bytes and back, no broker.

Typed events of about 100 bytes: six columns, key, time and id. The peer is pyarrow's own stream
writer and reader with the same options, which check nothing.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from bench.harness import Result, Skipped, against
from millstream.events.packs import pack

__all__ = ["measure", "orders"]

PEER = "pyarrow, unchecked"
SIZES = (1_000, 5_000)
CODECS: tuple[pack.Compression, ...] = ("none", "lz4", "zstd")


def orders(count: int) -> pa.RecordBatch:
    """`count` orders with envelope columns, alike from run to run."""
    chance = random.Random(count)
    start = int(datetime(2026, 1, 1, tzinfo=UTC).timestamp()) * 1_000_000
    times = [start + chance.randrange(10**12) for _ in range(count)]
    customers = [f"customer-{chance.randrange(100_000)}" for _ in range(count)]
    value = pa.RecordBatch.from_pydict(
        {
            "order": [chance.randrange(1 << 40) for _ in range(count)],
            "customer": customers,
            "amount": [chance.random() * 100 for _ in range(count)],
            "quantity": pa.array([chance.randrange(100) for _ in range(count)], pa.int32()),
            "paid": [chance.random() < 0.5 for _ in range(count)],
            "at": pa.array(times).view(pa.timestamp("us", "UTC")),
        }
    )
    return pack.envelope(
        value,
        key=pa.array(customers),
        timestamp=pa.array(sorted(times)).view(pa.timestamp("us", "UTC")),
        id=pa.array([f"{chance.getrandbits(64):016x}" for _ in range(count)]),
    )


def rate(work: Callable[[], object], events: int, quick: bool) -> Callable[[], float]:
    """A contestant: events a second of a call that handles `events` of them."""
    seconds = 0.05 if quick else 0.2

    def round_() -> float:
        calls = 0
        begin = time.perf_counter()
        while (spent := time.perf_counter() - begin) < seconds:
            work()
            calls += 1
        return calls * events / spent

    return round_


def plain_write(batch: pa.RecordBatch, codec: str) -> pa.Buffer:
    """What pyarrow alone does."""
    sink = pa.BufferOutputStream()
    compression = None if codec == "none" else codec
    options = pa.ipc.IpcWriteOptions(compression=compression, use_threads=False)
    with pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
        writer.write_batch(batch)
    return sink.getvalue()


def plain_read(payload: pa.Buffer) -> pa.RecordBatch:
    """What pyarrow alone does: no checksum, no validation, no limit."""
    options = pa.ipc.IpcReadOptions(use_threads=False)
    with pa.ipc.open_stream(payload, options=options) as reader:
        return reader.read_next_batch()


def measure(quick: bool) -> Iterator[Result | Skipped]:
    """Encode, decode and Python objects; sizes and codecs."""
    for size in SIZES:
        batch = orders(size)
        for codec in CODECS:
            yield from _one_codec(batch, codec, quick)
        yield from _as_python(batch, quick)


def _one_codec(
    batch: pa.RecordBatch, codec: pack.Compression, quick: bool
) -> Iterator[Result | Skipped]:
    size = batch.num_rows
    label = f"packs of {size:,}, {codec}"
    made = pack.encode(batch, compression=codec)
    yield Result(f"{label}: bytes an event", made.size / size, "bytes")
    encode: Any = rate(lambda: pack.encode(batch, compression=codec), size, quick)
    write: Any = rate(lambda: plain_write(batch, codec), size, quick)
    yield from against(f"{label}: encode", "events/s", encode, {PEER: write}, quick=quick)
    decode: Any = rate(lambda: pack.decode(made.headers, made.payload), size, quick)
    read: Any = rate(lambda: plain_read(made.payload), size, quick)
    yield from against(f"{label}: decode", "events/s", decode, {PEER: read}, quick=quick)


def _as_python(batch: pa.RecordBatch, quick: bool) -> Iterator[Result | Skipped]:
    size = batch.num_rows
    made = pack.encode(batch)

    def read() -> pack.Pack:
        return pack.decode(made.headers, made.payload)

    label = f"packs of {size:,}"
    validate: Any = rate(lambda: batch.validate(full=True), size, quick)
    yield from against(f"{label}: full validation alone", "events/s", validate, {}, quick=quick)
    objects: Any = rate(lambda: read().events(), size, quick)
    slow: Any = rate(lambda: plain_read(made.payload).to_pylist(), size, quick)
    peers = {"pyarrow to_pylist, unchecked": slow}
    yield from against(f"{label}: decode to events", "events/s", objects, peers, quick=quick)
    columns: Any = rate(lambda: read().value_columns(), size, quick)
    yield from against(
        f"{label}: decode to columns of values", "events/s", columns, {}, quick=quick
    )
