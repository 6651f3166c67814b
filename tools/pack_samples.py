"""The events in the sound test vectors of the pack format."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

import pyarrow as pa

from millstream.events.packs import pack

__all__ = ["FULL", "Sample", "in_json", "sound"]

FULL = [
    ("key", pa.binary()),
    ("timestamp", pa.timestamp("us", "UTC")),
    ("headers", pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))),
    ("id", pa.string()),
]
ORDER = pa.struct(
    [
        ("order", pa.int64()),
        ("customer", pa.string()),
        ("amount", pa.float64()),
        ("quantity", pa.int32()),
        ("paid", pa.bool_()),
        ("at", pa.timestamp("us", "UTC")),
    ]
)
EVERY_TYPE = pa.struct(
    [
        *((f"int{bits}", getattr(pa, f"int{bits}")()) for bits in (8, 16, 32, 64)),
        *((f"uint{bits}", getattr(pa, f"uint{bits}")()) for bits in (8, 16, 32, 64)),
        *((f"float{bits}", getattr(pa, f"float{bits}")()) for bits in (16, 32, 64)),
        ("bool", pa.bool_()),
        ("decimal128", pa.decimal128(12, 2)),
        ("decimal256", pa.decimal256(60, 5)),
        ("date32", pa.date32()),
        ("date64", pa.date64()),
        ("time32_s", pa.time32("s")),
        ("time64_us", pa.time64("us")),
        *((f"timestamp_{unit}", pa.timestamp(unit)) for unit in ("s", "ms", "us", "ns")),
        ("duration", pa.duration("us")),
        ("string", pa.string()),
        ("large_string", pa.large_string()),
        ("binary", pa.binary()),
        ("large_binary", pa.large_binary()),
        ("fixed_binary", pa.binary(4)),
        ("list", pa.list_(pa.int16())),
        ("large_list", pa.large_list(pa.string())),
        ("fixed_list", pa.list_(pa.float32(), 2)),
        ("map", pa.map_(pa.string(), pa.int32())),
        ("struct", pa.struct([("x", pa.int32())])),
    ]
)
NESTED = pa.struct(
    [
        ("name", pa.string()),
        (
            "lines",
            pa.list_(
                pa.struct(
                    [
                        ("sku", pa.string()),
                        ("tags", pa.list_(pa.string())),
                        ("prices", pa.map_(pa.string(), pa.decimal128(8, 2))),
                    ]
                )
            ),
        ),
    ]
)
NOON = datetime(2026, 3, 1, 12, 0, 0, 123456, tzinfo=UTC)


@dataclass(frozen=True)
class Sample:
    """Rows of a vector and how they are written."""

    name: str
    about: str
    schema: pa.Schema
    batches: list[list[dict[str, Any]]]
    schema_id: str | None = None
    compression: pack.Compression = "none"


def orders(count: int) -> list[dict[str, Any]]:
    return [
        {
            "key": f"customer-{number % 3}".encode(),
            "timestamp": NOON + timedelta(milliseconds=number),
            "headers": [{"key": "trace", "value": f"{number:04x}".encode()}],
            "id": f"order-{number}",
            "value": {
                "order": 9_007_199_254_740_993 + number,
                "customer": f"customer-{number % 3}",
                "amount": number * 1.25,
                "quantity": -number,
                "paid": number % 2 == 0,
                "at": NOON - timedelta(days=number),
            },
        }
        for number in range(count)
    ]


def every_type() -> dict[str, Any]:
    whole = {f"int{bits}": -(2 ** (bits - 1)) for bits in (8, 16, 32, 64)}
    whole |= {f"uint{bits}": 2**bits - 1 for bits in (8, 16, 32, 64)}
    moment = datetime(2026, 3, 1, 12, 30, 15, tzinfo=UTC).replace(tzinfo=None)
    return {
        **whole,
        **{f"float{bits}": -0.5 for bits in (16, 32, 64)},
        "bool": True,
        "decimal128": Decimal("-1234567890.12"),
        "decimal256": Decimal("1.00001"),
        "date32": date(1969, 12, 31),
        "date64": date(2026, 3, 1),
        "time32_s": time(23, 59, 59),
        "time64_us": time(1, 2, 3, 456789),
        **{f"timestamp_{unit}": moment for unit in ("s", "ms", "us", "ns")},
        "duration": timedelta(days=-1, microseconds=1),
        "string": "text",
        "large_string": "large",
        "binary": b"\x00\xff",
        "large_binary": b"large",
        "fixed_binary": b"four",
        "list": [1, None, 3],
        "large_list": ["a", ""],
        "fixed_list": [0.5, None],
        "map": {"one": 1, "none": None},
        "struct": {"x": 7},
    }


def nested() -> list[dict[str, Any]]:
    line = {"sku": "a-1", "tags": ["new", "sale"], "prices": {"EUR": Decimal("9.99")}}
    bare: dict[str, Any] = {"sku": "b-2", "tags": [], "prices": None}
    return [
        {"value": {"name": "two lines", "lines": [line, bare]}},
        {"value": {"name": "none", "lines": []}},
        {"value": {"name": "unknown", "lines": None}},
        {"value": None},
        {"value": {"name": "holes", "lines": [None, {**bare, "tags": None, "prices": {}}]}},
    ]


def sound() -> Iterator[Sample]:
    """Every sound vector."""
    typed = pa.schema([*FULL, ("value", ORDER)])
    binary = pa.schema([*FULL, ("value", pa.binary())])
    only_bytes = pa.schema([("value", pa.binary())])
    one = {"key": b"k", "timestamp": NOON, "headers": [], "id": "1", "value": b"hello"}
    yield Sample("typed", "typed values, every envelope column", typed, [orders(3)], "orders-1")
    yield Sample("binary", "values as bytes", binary, [[one, {**one, "value": b"\x00" * 9}]])
    yield Sample("lz4", "lz4 by buffer", typed, [orders(40)], "orders-1", "lz4")
    yield Sample("zstd", "zstd by buffer", typed, [orders(40)], "orders-1", "zstd")
    yield Sample(
        "values-only",
        "no envelope column but the value",
        only_bytes,
        [[{"value": b"a"}, {"value": b"b"}]],
    )
    yield Sample(
        "some-columns",
        "key and value only, the value first",
        pa.schema([("value", pa.binary()), ("key", pa.binary())]),
        [[{"value": b"a", "key": b"x"}, {"value": b"b", "key": None}]],
    )
    blank = dict.fromkeys(("key", "timestamp", "headers", "id", "value"))
    hollow = {**blank, "value": dict.fromkeys(ORDER.names)}
    yield Sample(
        "nulls",
        "nulls in every column; a null value is a deletion",
        typed,
        [[*orders(2), blank, hollow]],
    )
    yield Sample(
        "empty-strings",
        "empty is not null: key, id, value, header key and value",
        binary,
        [
            [
                {**one, "key": b"", "id": "", "value": b"", "headers": [{"key": "", "value": b""}]},
                {**blank, "value": b"x"},
            ]
        ],
    )
    yield Sample(
        "several-batches",
        "three record batches, the second without rows",
        typed,
        [orders(2), [], orders(3)],
        "orders-1",
    )
    yield Sample("nested", "lists, structs and maps", pa.schema([("value", NESTED)]), [nested()])
    yield Sample(
        "unicode",
        "names and texts beyond ASCII; a key that is not UTF-8",
        pa.schema([*FULL, ("value", pa.struct([("größe", pa.string()), ("价格", pa.float64())]))]),
        [
            [
                {**one, "value": {"größe": "köln 🌾", "价格": 1.5}, "id": "été"},
                {**one, "key": b"\xff\xfe", "value": {"größe": "\u0000", "价格": -0.0}},
            ]
        ],
    )
    empty_row = {"value": dict.fromkeys(EVERY_TYPE.names)}
    yield Sample(
        "every-type",
        "one row of each type a pack may hold, one of nulls",
        pa.schema([("value", EVERY_TYPE)]),
        [[{"value": every_type()}, empty_row]],
    )
    yield Sample("no-rows", "a schema and no record batch", typed, [], "orders-1")


def in_json(value: Any) -> Any:
    """A Python value in the form of the vectors' JSON files."""
    if isinstance(value, dict):
        return {name: in_json(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [in_json(part) for part in value]
    if isinstance(value, bytes):
        return {"$bytes": value.hex()}
    if isinstance(value, datetime):
        return {"$timestamp": value.isoformat()}
    if isinstance(value, date):
        return {"$date": str(value)}
    if isinstance(value, time):
        return {"$time": str(value)}
    if isinstance(value, timedelta):
        return {"$microseconds": value // timedelta(microseconds=1)}
    if isinstance(value, Decimal):
        return {"$decimal": str(value)}
    return value
