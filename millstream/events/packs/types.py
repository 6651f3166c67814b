"""Which Arrow types a pack may hold: read from metadata, and converted from a caller's types.

The list excludes every type whose values may need more memory than their bytes (null, views,
run-end encoding, dictionaries, dense unions, structs without columns), so memory follows
the payload's size.
"""

from __future__ import annotations

import re
import zoneinfo
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, timedelta, timezone, tzinfo
from functools import lru_cache

import pyarrow as pa

from millstream.errors import PackError, Unfit
from millstream.events.packs.flatbuffer import FlatTable

__all__ = ["MAX_DEPTH", "MAX_FIELDS", "Node", "Reading", "plain_type", "read_fields", "time_zone"]

MAX_FIELDS = 1024  # nodes of a schema, nested ones included: a few KB of Python objects each
MAX_DEPTH = 32  # half of what Arrow's readers allow; real events stay below 10
MAX_NAME_BYTES = 1024  # a schema of MAX_FIELDS names then stays below 1 MiB
MAX_WIDTH = 65_536  # items or bytes of a fixed-size type: far above vectors and hashes in use
MAX_ZONE_BYTES = 64  # the longest zone name of the tz database has 32

_UNITS = ("s", "ms", "us", "ns")
_FIXED_OFFSET = re.compile(r"([+-])([01][0-9]|2[0-3]):([0-5][0-9])")
_REFUSED = {
    1: "null",
    11: "interval",
    14: "union",
    22: "run_end_encoded",
    23: "binary_view",
    24: "string_view",
    25: "list_view",
    26: "large_list_view",
}


@dataclass(frozen=True, slots=True)
class Node:
    """One entry of a record batch's node list, as the schema prescribes it."""

    parent: int  # index of the enclosing node, -1 for a column
    factor: int  # length = parent's length x factor; 0: a list's items, any length
    buffers: int  # how many buffers the node has
    offset_bytes: int = 0  # size of an offset in its second buffer; 0: the type has none


@dataclass(slots=True)
class Reading:
    """What has been read of one schema so far: its nodes in pre-order, bounded by MAX_FIELDS."""

    nodes: list[Node]

    def add(self, node: Node) -> int:
        """Count one more node and return its index."""
        if len(self.nodes) >= MAX_FIELDS:
            raise PackError(f"the schema has more than {MAX_FIELDS:,} fields", "limit")
        self.nodes.append(node)
        return len(self.nodes) - 1


def read_fields(
    table: FlatTable,
    vector: int,
    reading: Reading,
    parent: tuple[int, int] = (-1, 1),
    depth: int = 1,
) -> list[pa.Field]:
    """The Arrow fields of a vector of Field tables; `parent` is (its node, length factor)."""
    if depth > MAX_DEPTH:
        raise PackError(f"the schema is nested deeper than {MAX_DEPTH} levels", "limit")
    if table.count(vector) > MAX_FIELDS:
        raise PackError(f"the schema has more than {MAX_FIELDS:,} fields", "limit")
    fields = [_read_field(child, reading, parent, depth) for child in table.tables(vector)]
    names = [field.name for field in fields]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise PackError(f"the schema has two fields named {twice!r} side by side", "schema")
    return fields


def _read_field(
    table: FlatTable, reading: Reading, parent: tuple[int, int], depth: int
) -> pa.Field:
    name = table.text(0, MAX_NAME_BYTES) or ""
    if table.table(4) is not None:
        raise PackError(f"field {name!r} is dictionary-encoded; packs hold plain values", "type")
    detail = table.table(3)
    if detail is None:
        raise PackError(f"field {name!r} has no type", "schema")
    tag = table.u8(2)
    children = table.count(5)
    if tag in _NESTED:
        wanted = _NESTED[tag]
        if (wanted and children != wanted) or children == 0:
            raise PackError(
                f"field {name!r} has {children} children, which its type forbids", "type"
            )
        kind = _read_nested(tag, (table, detail), reading, parent, depth)
    else:
        if children:
            raise PackError(f"field {name!r} has children, which its type forbids", "type")
        read = _FLAT.get(tag)
        if read is None:
            found = _REFUSED.get(tag, f"number {tag}")
            raise PackError(f"field {name!r} has the type {found}, which packs do not hold", "type")
        kind = read(detail)
        offset = _OFFSET_BYTES.get(tag, 0)
        reading.add(Node(*parent, buffers=3 if offset else 2, offset_bytes=offset))
    return pa.field(name, kind, nullable=bool(table.u8(1)))


def _read_nested(
    tag: int,
    tables: tuple[FlatTable, FlatTable],
    reading: Reading,
    parent: tuple[int, int],
    depth: int,
) -> pa.DataType:
    table, detail = tables
    if tag == 13:
        index = reading.add(Node(*parent, buffers=1))
        return pa.struct(read_fields(table, 5, reading, (index, 1), depth + 1))
    if tag == 16:
        size = detail.i32(0)
        if not 0 < size <= MAX_WIDTH:
            raise PackError(f"a fixed-size list of {size:,} items, not 1 to {MAX_WIDTH:,}", "type")
        index = reading.add(Node(*parent, buffers=1))
        return pa.list_(read_fields(table, 5, reading, (index, size), depth + 1)[0], size)
    index = reading.add(Node(*parent, buffers=2, offset_bytes=_OFFSET_BYTES[tag]))
    (item,) = read_fields(table, 5, reading, (index, 0), depth + 1)
    if tag == 12:
        return pa.list_(item)
    if tag == 21:
        return pa.large_list(item)
    if not pa.types.is_struct(item.type) or item.type.num_fields != 2:
        raise PackError("a map whose entries are not pairs of key and value", "type")
    if pa.types.is_nested(item.type.field(0).type):
        raise PackError("a map with nested keys, which most languages cannot hold", "type")
    return pa.map_(item.type.field(0).type, item.type.field(1), keys_sorted=bool(detail.u8(0)))


def _unit(number: int) -> str:
    if not 0 <= number < len(_UNITS):
        raise PackError(f"unknown time unit {number}", "type")
    return _UNITS[number]


def _int(detail: FlatTable) -> pa.DataType:
    width, signed = detail.i32(0), bool(detail.u8(1))
    if width not in (8, 16, 32, 64):
        raise PackError(f"integers of {width} bits", "type")
    return getattr(pa, f"{'' if signed else 'u'}int{width}")()


def _float(detail: FlatTable) -> pa.DataType:
    precision = detail.i16(0)
    if not 0 <= precision <= 2:
        raise PackError(f"unknown floating-point precision {precision}", "type")
    return (pa.float16(), pa.float32(), pa.float64())[precision]


def _decimal(detail: FlatTable) -> pa.DataType:
    precision, scale, width = detail.i32(0), detail.i32(1), detail.i32(2, 128)
    most = {32: 9, 64: 18, 128: 38, 256: 76}.get(width, 0)
    if not 1 <= precision <= most or not -most <= scale <= most:
        raise PackError(f"decimal({precision}, {scale}) in {width} bits", "type")
    return getattr(pa, f"decimal{width}")(precision, scale)


def _date(detail: FlatTable) -> pa.DataType:
    unit = detail.i16(0, 1)
    if unit not in (0, 1):
        raise PackError(f"unknown date unit {unit}", "type")
    return pa.date32() if unit == 0 else pa.date64()


def _time(detail: FlatTable) -> pa.DataType:
    unit, width = _unit(detail.i16(0, 1)), detail.i32(1, 32)
    if width != (32 if unit in ("s", "ms") else 64):
        raise PackError(f"time of day in {unit} with {width} bits", "type")
    return pa.time32(unit) if width == 32 else pa.time64(unit)


def _timestamp(detail: FlatTable) -> pa.DataType:
    unit, zone = _unit(detail.i16(0)), detail.text(1, MAX_ZONE_BYTES)
    if zone and time_zone(zone) is None:
        raise PackError(f"unknown time zone {zone!r}", "type")
    return pa.timestamp(unit, zone or None)


@lru_cache(maxsize=256)  # zones in use; each is read from disk once
def time_zone(name: str) -> tzinfo | None:
    """The zone a timestamp column names (`UTC`, `+hh:mm`, a tz database name); None if unknown."""
    if name == "UTC":
        return UTC
    offset = _FIXED_OFFSET.fullmatch(name)
    if offset is not None:
        sign, hours, minutes = offset.groups()
        shift = timedelta(hours=int(hours), minutes=int(minutes))
        return timezone(-shift if sign == "-" else shift)
    try:
        return zoneinfo.ZoneInfo(name)
    except (ValueError, OSError, LookupError):
        return None


def _fixed_binary(detail: FlatTable) -> pa.DataType:
    width = detail.i32(0)
    if not 0 < width <= MAX_WIDTH:
        raise PackError(f"fixed-size binary of {width:,} bytes, not 1 to {MAX_WIDTH:,}", "type")
    return pa.binary(width)


# Numbers are those of the union `Type` in Arrow's Schema.fbs.
_FLAT: dict[int, Callable[[FlatTable], pa.DataType]] = {
    2: _int,
    3: _float,
    4: lambda _: pa.binary(),
    5: lambda _: pa.string(),
    6: lambda _: pa.bool_(),
    7: _decimal,
    8: _date,
    9: _time,
    10: _timestamp,
    15: _fixed_binary,
    18: lambda detail: pa.duration(_unit(detail.i16(0, 1))),
    19: lambda _: pa.large_binary(),
    20: lambda _: pa.large_string(),
}
_OFFSET_BYTES = {4: 4, 5: 4, 12: 4, 17: 4, 19: 8, 20: 8, 21: 8}
_NESTED = {12: 1, 13: 0, 16: 1, 17: 1, 21: 1}  # tag: number of children, 0 = one or more


# -- a caller's types to types of a pack ----------------------------------------------------


def plain_type(kind: pa.DataType, path: str, depth: int = 1) -> pa.DataType:
    """The type in a pack; dictionaries, views and extensions become plain types.

    Raises `Unfit` with the field's path for a type that has no such form.
    """
    types = pa.types
    if depth > MAX_DEPTH:
        raise Unfit(path, f"at most {MAX_DEPTH} levels of nesting", "more")
    if isinstance(kind, pa.BaseExtensionType):
        return plain_type(kind.storage_type, path, depth)
    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        return plain_type(kind.value_type, path, depth)
    if types.is_struct(kind):
        return _plain_struct(kind, path, depth)
    if types.is_map(kind):
        key = plain_type(kind.key_type, f"{path}.key", depth + 2)
        if types.is_nested(key):
            raise Unfit(f"{path}.key", "a map key that is not nested", str(key))
        item = _plain_child(kind.item_field, f"{path}.value", depth + 1)
        return pa.map_(key, item, keys_sorted=kind.keys_sorted)
    if types.is_fixed_size_list(kind):
        if not 0 < kind.list_size <= MAX_WIDTH:
            raise Unfit(path, f"1 to {MAX_WIDTH:,} items in a fixed-size list", f"{kind.list_size}")
        return pa.list_(_plain_child(kind.value_field, f"{path}[]", depth), kind.list_size)
    if types.is_list(kind) or types.is_list_view(kind):
        return pa.list_(_plain_child(kind.value_field, f"{path}[]", depth))
    if types.is_large_list(kind) or types.is_large_list_view(kind):
        return pa.large_list(_plain_child(kind.value_field, f"{path}[]", depth))
    if types.is_string_view(kind):
        return pa.string()
    if types.is_binary_view(kind):
        return pa.binary()
    if types.is_fixed_size_binary(kind) and not 0 < kind.byte_width <= MAX_WIDTH:
        raise Unfit(path, f"1 to {MAX_WIDTH:,} bytes in a fixed-size binary", f"{kind.byte_width}")
    if types.is_timestamp(kind) and kind.tz and time_zone(kind.tz) is None:
        raise Unfit(path, "a time zone of the tz database, or +hh:mm", repr(kind.tz))
    if types.is_null(kind) or types.is_union(kind) or types.is_interval(kind):
        raise Unfit(path, "a type packs hold (docs/PACKS.md lists them)", f"{kind}; cast it first")
    return kind


def _plain_child(field: pa.Field, path: str, depth: int) -> pa.Field:
    return pa.field(field.name, plain_type(field.type, path, depth + 1), nullable=field.nullable)


def _plain_struct(kind: pa.DataType, path: str, depth: int) -> pa.DataType:
    fields = [kind.field(number) for number in range(kind.num_fields)]
    names = [field.name for field in fields]
    if not fields or len(set(names)) != len(names):
        found = "a name twice" if fields else "none"
        raise Unfit(path, "one or more columns, each with its own name", found)
    return pa.struct([_plain_child(field, f"{path}.{field.name}", depth) for field in fields])
