"""The broken and hostile test vectors of the pack format, and why each is refused."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa

from millstream.events.packs import pack
from tools.pack_samples import FULL, ORDER, orders

__all__ = ["Broken", "broken"]

HUGE = 1 << 40


@dataclass(frozen=True)
class Broken:
    """A payload that must be refused, for `reason`."""

    name: str
    about: str
    reason: str
    headers: dict[str, str]
    payload: bytes


def sign(payload: bytes, count: int, **changed: str) -> dict[str, str]:
    """Headers with the right checksum, so that the fault behind it is found."""
    headers = {
        "Content-Type": "application/vnd.apache.arrow.stream",
        "Mill-Pack": "1",
        "Mill-Count": str(count),
        "Mill-Checksum": f"{zlib.crc32(payload):08x}",
    }
    return headers | {name.replace("_", "-"): text for name, text in changed.items()}


def stream(
    batch: pa.RecordBatch, metadata: dict[str, str] | None = None, **options: object
) -> bytes:
    """What Arrow itself writes for a batch, without any check of ours."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_batch(batch, custom_metadata=metadata)
    return bytes(sink.getvalue())


def swap(payload: bytes, old: bytes, new: bytes) -> bytes:
    """Replace bytes that occur exactly once."""
    if payload.count(old) != 1 or len(old) != len(new):
        raise ValueError(f"{old.hex()} occurs {payload.count(old)} times")
    return payload.replace(old, new)


def q(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}q", *numbers)


def column(name: str, array: pa.Array) -> pa.RecordBatch:
    """A batch of three rows with one column beside the value."""
    return pa.RecordBatch.from_arrays([array, pa.array([b"a", b"b", b"c"])], names=[name, "value"])


def value(array: pa.Array) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([array], names=["value"])


def field(array: pa.Array) -> pa.RecordBatch:
    """A batch whose value is a struct of this one column."""
    return value(pa.StructArray.from_arrays([array], names=["x"]))


def typed() -> bytes:
    schema = pa.schema([*FULL, ("value", ORDER)])
    return stream(pa.RecordBatch.from_pylist(orders(3), schema=schema))


def header_faults(good: bytes) -> Iterator[Broken]:
    def wrong(name: str, about: str, reason: str, **changed: str) -> Broken:
        return Broken(name, about, reason, sign(good, 3, **changed), good)

    yield wrong("version", "a format version of the future", "version", Mill_Pack="2")
    yield wrong(
        "content-type", "another media type", "content-type", Content_Type="application/json"
    )
    yield wrong("checksum", "the checksum of other bytes", "checksum", Mill_Checksum="deadbeef")
    yield wrong("checksum-form", "a checksum in upper case", "checksum", Mill_Checksum="DEADBEEF")
    yield wrong("count-more", "one event more than there are", "count", Mill_Count="4")
    yield wrong("count-less", "one event less than there are", "count", Mill_Count="2")
    yield wrong("count-form", "a count that is no plain number", "count", Mill_Count="+3")
    yield wrong("count-huge", "more events than a reader takes", "limit", Mill_Count="999999999")
    yield wrong("schema-id", "a schema id with a space", "headers", Mill_Schema="a b")
    yield Broken("no-payload", "three events and no payload", "count", sign(b"", 3), b"")


def frame_faults(good: bytes) -> Iterator[Broken]:
    def wrong(name: str, about: str, payload: bytes, reason: str = "framing") -> Broken:
        return Broken(name, about, reason, sign(payload, 3), payload)

    schema_end = 8 + struct.unpack_from("<i", good, 4)[0]
    yield wrong("text", "no Arrow stream at all", b"hello, this is no pack" * 3)
    yield wrong("cut", "cut in the middle", good[: len(good) // 2 // 8 * 8])
    yield wrong("no-end", "without the end of stream", good[:-8])
    yield wrong("trailing", "bytes behind the end of stream", good + b"\x00" * 8)
    yield wrong("no-schema", "a record batch first", good[schema_end:])
    yield wrong("two-schemas", "the schema twice", good[:schema_end] + good)
    yield wrong("old-framing", "frames without the continuation marker", good[4:])
    length = struct.pack("<i", 0x7FFFFFF8)
    yield wrong("metadata-length", "2 GiB of metadata claimed", good[:4] + length + good[8:])
    yield wrong(
        "negative-length", "negative metadata length", good[:4] + b"\xf8\xff\xff\xff" + good[8:]
    )
    body = len(good) - 8 - schema_end - 8 - struct.unpack_from("<i", good, schema_end + 4)[0]
    bomb = good.replace(q(body), q(HUGE))
    yield wrong("body-length", "a body of 1 TiB claimed", bomb)
    zeroed = good[:8] + b"\xff" * 16 + good[24:]
    yield wrong("metadata-garbage", "flatbuffers offsets out of bounds", zeroed, "metadata")


def hollow() -> bytes:
    """Lists of no lists, whose one offset is not 0: valid for Arrow, and flatten() aborts."""
    items = pa.array([1, 2, 3, 4, 5, 6], pa.int8())
    inner = pa.Array.from_buffers(
        pa.list_(pa.int8()), 0, [None, pa.py_buffer(struct.pack("<i", 5))], children=[items]
    )
    outer = pa.Array.from_buffers(
        pa.list_(inner.type), 3, [None, pa.py_buffer(bytes(16))], children=[inner]
    )
    return stream(field(outer))


def batch_faults(good: bytes) -> Iterator[Broken]:
    def wrong(name: str, about: str, reason: str, payload: bytes) -> Broken:
        return Broken(name, about, reason, sign(payload, 3), payload)

    small = stream(value(pa.array([b"aaaa", b"bbbb", b"cccc"])))
    bounds = struct.pack("<4i", 0, 4, 8, 12)
    yield wrong(
        "offset-beyond",
        "a value that ends far outside its buffer",
        "values",
        swap(small, bounds, struct.pack("<4i", 0, 4, 8, 0x7FFFFFFF)),
    )
    yield wrong(
        "offset-back",
        "offsets that go back",
        "values",
        swap(small, bounds, struct.pack("<4i", 0, 8, 4, 12)),
    )
    yield wrong(
        "offset-negative",
        "a negative offset",
        "values",
        swap(small, bounds, struct.pack("<4i", -64, 4, 8, 12)),
    )
    data = q(16, 12)
    yield wrong(
        "buffer-outside", "a buffer outside the body", "bounds", swap(small, data, q(4096, 12))
    )
    yield wrong("buffer-length", "a buffer of 1 TiB", "bounds", swap(small, data, q(16, HUGE)))
    yield wrong(
        "buffer-negative", "a negative buffer length", "bounds", swap(small, data, q(16, -8))
    )
    yield wrong(
        "buffer-overlap", "two buffers over each other", "bounds", swap(small, data, q(8, 12))
    )
    yield wrong(
        "buffer-odd", "a buffer at no multiple of 8", "bounds", swap(small, data, q(17, 12))
    )
    yield wrong("buffer-short", "offsets cut to half", "values", swap(small, q(0, 16), q(0, 8)))
    node = b"\x01\x00\x00\x00" + q(3, 0)
    for name, about, reason, claim in (
        ("nulls", "more nulls than values", "bounds", q(3, 4)),
        ("nulls-unmarked", "nulls without validity", "values", q(3, 1)),
        ("node-length", "a column longer than the batch", "bounds", q(HUGE, 0)),
    ):
        yield wrong(name, about, reason, swap(small, node, node[:4] + claim))
    yield wrong("offset-of-nothing", "an empty list that begins at item 5", "values", hollow())
    text = stream(field(pa.array(["aaaa", "bbbb", "cccc"])))
    yield wrong(
        "utf-8", "text that is not UTF-8", "values", swap(text, b"bbbb", b"\xff\xfe\xfd\xfc")
    )
    late = stream(
        column("timestamp", pa.array([0, 1, 2**62], pa.int64()).cast(FULL[1][1], safe=False))
    )
    yield wrong("timestamp-range", "a timestamp after the year 9999", "values", late)
    entries = pa.array([[{"key": "a", "value": None}], None, []], FULL[2][1])
    yield wrong(
        "header-null", "a header without value", "values", stream(column("headers", entries))
    )
    laughs = stream(value(pa.array([b"a", b"b", b"c"])), metadata={"a": "b"})
    yield wrong("batch-metadata", "custom metadata on a record batch", "metadata", laughs)


def compression_faults() -> Iterator[Broken]:
    def wrong(name: str, about: str, reason: str, payload: bytes, rows: int) -> Broken:
        return Broken(name, about, reason, sign(payload, rows), payload)

    rows = 4000
    batch = value(pa.array([b"0123456789"] * rows))
    packed = stream(batch, compression="lz4")
    magic = bytes.fromhex("04224d18")
    declared = q(rows * 10) + magic
    about = "a buffer that declares %s once decompressed"
    for name, size, reason in (
        ("declared-huge", HUGE, "limit"),
        ("declared-more", rows * 10 + 1, "values"),
        ("declared-less", rows * 10 - 1, "values"),
        ("declared-negative", -2, "compression"),
    ):
        yield wrong(
            name, about % f"{size:,} bytes", reason, swap(packed, declared, q(size) + magic), rows
        )
    zeros = value(pa.array([bytes(1 << 20)] * 80))
    bomb = stream(zeros, compression="zstd")
    yield wrong("zstd-bomb", "80 MiB of zeros in a few KiB", "limit", bomb, 80)
    at = packed.rindex(magic)
    garbage = packed[:at] + b"\xee" * 16 + packed[at + 16 :]
    yield wrong("lz4-garbage", "a compressed buffer that is none", "values", garbage, rows)


def schema_faults() -> Iterator[Broken]:
    def wrong(name: str, about: str, reason: str, batch: pa.RecordBatch) -> Broken:
        payload = stream(batch)
        return Broken(name, about, reason, sign(payload, batch.num_rows), payload)

    numbers = pa.array([1, 2, 3])
    yield wrong(
        "no-value", "no column 'value'", "column", pa.RecordBatch.from_arrays([numbers], ["key"])
    )
    yield wrong("value-type", "values that are plain numbers", "column", value(numbers))
    yield wrong("key-type", "keys that are numbers", "column", column("key", numbers))
    naive = pa.array([1, 2, 3], pa.timestamp("us"))
    yield wrong("timestamp-zone", "timestamps without zone", "column", column("timestamp", naive))
    twice = pa.RecordBatch.from_arrays(
        [pa.array([b"a"]), pa.array([b"b"])], names=["value", "value"]
    )
    yield wrong("column-twice", "two columns of one name", "schema", twice)
    yield wrong(
        "type-null", "rows without bytes: a null column", "type", field(pa.nulls(1_000_000))
    )
    yield wrong(
        "type-dictionary",
        "dictionary encoding",
        "type",
        field(pa.array(["a"] * 3).dictionary_encode()),
    )
    yield wrong(
        "type-view", "views that may share bytes", "type", field(pa.array(["a"], pa.string_view()))
    )
    ends = pa.RunEndEncodedArray.from_arrays(pa.array([1_000_000], pa.int32()), pa.array([b"x"]))
    yield wrong("type-run-end", "a run-end encoded bomb", "type", field(ends))
    no_columns = pa.array([{}, {}, {}], pa.struct([]))
    yield wrong("struct-empty", "a struct without columns", "type", field(no_columns))
    yield wrong(
        "fixed-zero", "fixed-size binary of no bytes", "type", field(pa.array([b""], pa.binary(0)))
    )
    zone = pa.array([1], pa.timestamp("us", "Moon/Tycho"))
    yield wrong("time-zone", "a time zone nobody knows", "type", field(zone))
    deep = pa.int8()
    for _ in range(40):
        deep = pa.list_(deep)
    yield wrong("deep", "41 levels of nesting", "limit", field(pa.array([None], deep)))
    wide = pa.StructArray.from_arrays([pa.array([1])] * 1100, names=[f"c{n}" for n in range(1100)])
    yield wrong("wide", "more than 1,024 fields", "limit", value(wide))


def broken() -> Iterator[Broken]:
    """Every vector that must be refused."""
    good = typed()
    pack.decode(sign(good, 3), good)
    yield from header_faults(good)
    yield from frame_faults(good)
    yield from batch_faults(good)
    yield from compression_faults()
    yield from schema_faults()
