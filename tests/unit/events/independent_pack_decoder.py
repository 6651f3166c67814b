"""A second reader of packs, written from docs/PACKS.md alone: no pyarrow, no code of Millstream.

It takes the sound packs of tests/vectors and is meant to be read beside the specification. It
checks only what it needs; a reader of untrusted packs has to check more (docs/PACKS.md, 'Reading').
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Mapping
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from itertools import pairwise
from typing import Any, NamedTuple

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
Decompress = Callable[[bytes, int], bytes]


def number(data: bytes, at: int, form: str) -> int:
    value: int = struct.unpack_from("<" + form, data, at)[0]
    return value


class Table:
    """A flatbuffers table."""

    def __init__(self, data: bytes, at: int) -> None:
        self.data, self.at = data, at
        self.vtable = at - number(data, at, "i")

    def place(self, field: int) -> int:
        slot = 4 + 2 * field
        if slot >= number(self.data, self.vtable, "H"):
            return 0
        offset = number(self.data, self.vtable + slot, "H")
        return self.at + offset if offset else 0

    def scalar(self, field: int, form: str, default: int = 0) -> int:
        place = self.place(field)
        return number(self.data, place, form) if place else default

    def target(self, field: int) -> int:
        place = self.place(field)
        return place + number(self.data, place, "I") if place else 0

    def table(self, field: int) -> Table | None:
        target = self.target(field)
        return Table(self.data, target) if target else None

    def need(self, field: int) -> Table:
        table = self.table(field)
        if table is None:
            raise ValueError(f"field {field} is missing")
        return table

    def text(self, field: int) -> str:
        target = self.target(field)
        if not target:
            return ""
        size = number(self.data, target, "I")
        return self.data[target + 4 : target + 4 + size].decode()

    def tables(self, field: int) -> list[Table]:
        target = self.target(field)
        if not target:
            return []
        places = [target + 4 + 4 * n for n in range(number(self.data, target, "I"))]
        return [Table(self.data, place + number(self.data, place, "I")) for place in places]

    def pairs(self, field: int) -> list[tuple[int, int]]:
        target = self.target(field)
        count = number(self.data, target, "I") if target else 0
        return [struct.unpack_from("<qq", self.data, target + 4 + 16 * n) for n in range(count)]


class Field(NamedTuple):
    """One column of the schema."""

    name: str
    tag: int  # Arrow's number of the type
    detail: Table
    children: list[Field]


def read_field(table: Table) -> Field:
    children = [read_field(child) for child in table.tables(5)]
    return Field(table.text(0), table.scalar(2, "B"), table.need(3), children)


class Body:
    """The buffers of one record batch, handed out in order."""

    def __init__(self, batch: Table, body: bytes, codecs: Mapping[int, Decompress]) -> None:
        self.nodes = iter(batch.pairs(1))
        self.buffers = iter(batch.pairs(2))
        self.body = body
        compression = batch.table(3)
        self.decompress = codecs[compression.scalar(0, "b")] if compression else None

    def buffer(self) -> bytes:
        offset, size = next(self.buffers)
        data = self.body[offset : offset + size]
        if not self.decompress or not data:
            return data
        declared = number(data, 0, "q")
        return data[8:] if declared == -1 else self.decompress(data[8:], declared)


def bit(data: bytes, index: int) -> bool:
    return bool(data[index // 8] >> (index % 8) & 1)


def read_column(field: Field, body: Body) -> list[Any]:
    """The values of one column, children included, in the form of the vectors' JSON files."""
    length, nulls = next(body.nodes)
    validity = body.buffer()
    values = (
        NESTED[field.tag](field, body, length) if field.tag in NESTED else flat(field, body, length)
    )
    if not nulls:
        return values
    return [value if bit(validity, index) else None for index, value in enumerate(values)]


def offsets(body: Body, length: int, form: str) -> list[int]:
    data = body.buffer()
    return list(struct.unpack_from(f"<{length + 1}{form}", data)) if data else [0]


def flat(field: Field, body: Body, length: int) -> list[Any]:
    if field.tag in (4, 5, 19, 20):
        bounds = offsets(body, length, "q" if field.tag in (19, 20) else "i")
        data = body.buffer()
        parts = [data[start:end] for start, end in pairwise(bounds)]
        return [part.decode() if field.tag in (5, 20) else {"$bytes": part.hex()} for part in parts]
    data = body.buffer()
    if field.tag == 6:
        return [bit(data, index) for index in range(length)]
    width, make = fixed(field)
    return [make(data[index * width : (index + 1) * width]) for index in range(length)]


def whole(data: bytes) -> int:
    return int.from_bytes(data, "little", signed=True)


def fixed(field: Field) -> tuple[int, Callable[[bytes], Any]]:
    """Bytes of one value of a fixed-size type, and how to read them."""
    detail = field.detail
    if field.tag == 2:
        signed = bool(detail.scalar(1, "B"))
        return detail.scalar(0, "i") // 8, lambda d: int.from_bytes(d, "little", signed=signed)
    if field.tag == 3:
        form = "efd"[detail.scalar(0, "h")]
        return struct.calcsize(form), lambda d: plain_float(struct.unpack("<" + form, d)[0])
    if field.tag == 7:
        scale, width = detail.scalar(1, "i"), detail.scalar(2, "i", 128)
        return width // 8, lambda d: {"$decimal": str(Decimal(whole(d)).scaleb(-scale))}
    if field.tag == 15:
        return detail.scalar(0, "i"), lambda d: {"$bytes": d.hex()}
    return temporal(field)


def plain_float(value: float) -> Any:
    return value if value - value == 0 else {"$float": repr(value)}


def temporal(field: Field) -> tuple[int, Callable[[bytes], Any]]:
    detail = field.detail
    unit = detail.scalar(0, "h", 0 if field.tag == 10 else 1)
    micros = (1_000_000, 1_000, 1)[unit] if unit < 3 else 0

    def span(data: bytes) -> timedelta:
        count = whole(data)
        return timedelta(microseconds=count * micros if micros else count // 1000)

    if field.tag == 8:
        if unit == 0:
            return 4, lambda d: {"$date": str(date(1970, 1, 1) + timedelta(days=whole(d)))}
        return 8, lambda d: {"$date": str((EPOCH + timedelta(0, 0, 0, whole(d))).date())}
    if field.tag == 9:
        width = detail.scalar(1, "i", 32) // 8
        return width, lambda d: {"$time": str((EPOCH + span(d)).time())}
    if field.tag == 10:
        start = EPOCH if detail.text(1) else EPOCH.replace(tzinfo=None)
        return 8, lambda d: {"$timestamp": (start + span(d)).isoformat()}
    if field.tag == 18:
        return 8, lambda d: {"$microseconds": span(d) // timedelta(microseconds=1)}
    raise ValueError(f"type {field.tag} is not one of a pack")


def read_struct(field: Field, body: Body, length: int) -> list[Any]:
    columns = [read_column(child, body) for child in field.children]
    names = [child.name for child in field.children]
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def read_list(field: Field, body: Body, length: int) -> list[Any]:
    bounds = offsets(body, length, "q" if field.tag == 21 else "i")
    items = read_column(field.children[0], body)
    return [items[start:end] for start, end in pairwise(bounds)]


def read_fixed_list(field: Field, body: Body, length: int) -> list[Any]:
    size = field.detail.scalar(0, "i")
    items = read_column(field.children[0], body)
    return [items[index * size : (index + 1) * size] for index in range(length)]


def read_map(field: Field, body: Body, length: int) -> list[Any]:
    key, value = (child.name for child in field.children[0].children)
    return [{pair[key]: pair[value] for pair in pairs} for pairs in read_list(field, body, length)]


NESTED = {12: read_list, 13: read_struct, 16: read_fixed_list, 17: read_map, 21: read_list}


def read_pack(
    headers: Mapping[str, str], payload: bytes, codecs: Mapping[int, Decompress]
) -> list[dict[str, Any]]:
    """The events of a pack. `codecs` maps Arrow's codec numbers (0 lz4, 1 zstd) to functions."""
    if headers["Mill-Pack"] != "1" or f"{zlib.crc32(payload):08x}" != headers["Mill-Checksum"]:
        raise ValueError("another version, or damaged")
    events: list[dict[str, Any]] = []
    schema: list[Field] = []
    at = 0
    while at < len(payload):
        marker, size = struct.unpack_from("<Ii", payload, at)
        if marker != 0xFFFFFFFF:
            raise ValueError(f"no message at {at}")
        if size == 0:
            break
        metadata = payload[at + 8 : at + 8 + size]
        message = Table(metadata, number(metadata, 0, "I"))
        body = payload[at + 8 + size :][: message.scalar(3, "q")]
        if message.scalar(1, "B") == 1:
            schema = [read_field(table) for table in message.need(2).tables(1)]
        else:
            events += read_batch(schema, message.need(2), body, codecs)
        at += 8 + size + len(body)
    if len(events) != int(headers["Mill-Count"]):
        raise ValueError("the count differs")
    return events


def read_batch(
    schema: list[Field], batch: Table, body: bytes, codecs: Mapping[int, Decompress]
) -> list[dict[str, Any]]:
    source = Body(batch, body, codecs)
    columns = {field.name: read_column(field, source) for field in schema}
    rows = batch.scalar(0, "q")
    absent = [None] * rows
    names = ("key", "timestamp", "headers", "id", "value")
    return [
        dict(zip(names, row, strict=True))
        for row in zip(*(columns.get(name, absent) for name in names), strict=True)
    ]


def lz4_frame(data: bytes, size: int) -> bytes:
    """Decompress an LZ4 frame (lz4_Frame_format.md), checksums not looked at."""
    if number(data, 0, "I") != 0x184D2204:
        raise ValueError("not an LZ4 frame")
    flags = data[4]
    at = 7 + (8 if flags & 0x08 else 0) + (4 if flags & 0x01 else 0)
    out = bytearray()
    while (block := number(data, at, "I")) != 0:
        at += 4
        length = block & 0x7FFFFFFF
        if block >> 31:
            out += data[at : at + length]
        else:
            lz4_block(data[at : at + length], out)
        at += length + (4 if flags & 0x10 else 0)
    if len(out) != size:
        raise ValueError(f"{len(out)} bytes, {size} were declared")
    return bytes(out)


def lz4_block(data: bytes, out: bytearray) -> None:
    """Append what one LZ4 block holds; matches refer to what was decoded before."""
    at = 0

    def length(start: int) -> int:
        nonlocal at
        total = start
        while start == 15 and (more := data[at]) is not None:
            total, at = total + more, at + 1
            if more != 255:
                break
        return total

    while True:
        token, at = data[at], at + 1
        literals = length(token >> 4)
        out += data[at : at + literals]
        at += literals
        if at >= len(data):
            return
        back, at = number(data, at, "H"), at + 2
        for _ in range(length(token & 15) + 4):
            out.append(out[-back])
