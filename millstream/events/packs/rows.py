"""Convert Arrow columns to Python values, a column at a time.

Arrow's own conversion is fast for numbers and text and slow where it builds one scalar object per
value: for dates, times and structs this is 5 to 20 times faster. Values finer than a microsecond
are truncated to what Python's own types hold, with or without pandas installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import UTC, date, datetime, time, timedelta
from itertools import repeat
from typing import Any

import pyarrow as pa

from millstream.errors import PackError
from millstream.events.packs.types import time_zone

__all__ = ["headers_to_python", "keys_to_python", "to_python"]

_EPOCH_DAY = date(1970, 1, 1).toordinal()
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_NAIVE_EPOCH = _EPOCH.replace(tzinfo=None)
# Below 2^32 seconds (the year 2106) a float is off by a quarter of a microsecond at most.
_FLOAT_LIMIT = 2**32 * 1_000_000
_DAY_MS = 86_400_000
_PER_SECOND = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}


def to_python(array: pa.Array, path: str = "value") -> list[Any]:
    """The values of a validated array as Python objects; nulls are None, structs are dicts.

    Raises `PackError` that names `path` for a value Python cannot hold (a date after the year
    9999).
    """
    try:
        return _convert(array, path)
    except (OverflowError, ValueError, pa.ArrowException) as error:
        if isinstance(error, PackError):
            raise
        raise PackError(
            f"column {path} ({array.type}) has a value that Python cannot hold: {error}. "
            f"Read this pack as Arrow batches",
            "values",
        ) from error


def _convert(array: pa.Array, path: str) -> list[Any]:
    kind = array.type
    types = pa.types
    if types.is_struct(kind):
        return _structs(array, path)
    if types.is_map(kind):
        return _maps(array, path)
    if types.is_list(kind) or types.is_large_list(kind):
        return _lists(array, to_python(array.flatten(), f"{path}[]"))
    if types.is_fixed_size_list(kind):
        return _fixed_lists(array, path)
    if types.is_timestamp(kind):
        return _timestamps(array, kind)
    if types.is_date32(kind):
        days = array.view(pa.int32()).to_pylist()
        return _each(lambda day: date.fromordinal(day + _EPOCH_DAY), days, array.null_count)
    if types.is_date64(kind):
        days = array.view(pa.int64()).to_pylist()
        return _each(
            lambda ms: date.fromordinal(ms // _DAY_MS + _EPOCH_DAY), days, array.null_count
        )
    if types.is_duration(kind):
        return _each(lambda us: timedelta(0, 0, us), _microseconds(array, kind), array.null_count)
    if types.is_time(kind):
        return _each(_time_of_day, _microseconds(array, kind), array.null_count)
    values: list[Any] = array.to_pylist()
    return values


def _each(make: Callable[[int], Any], numbers: list[Any], nulls: int) -> list[Any]:
    if nulls:
        return [None if number is None else make(number) for number in numbers]
    return [make(number) for number in numbers]


def _microseconds(array: pa.Array, kind: pa.DataType) -> list[Any]:
    storage = pa.int32() if kind.bit_width == 32 else pa.int64()
    numbers: list[Any] = array.view(storage).to_pylist()
    per_second = _PER_SECOND[kind.unit]
    if per_second == 1_000_000:
        return numbers
    if per_second < 1_000_000:
        factor = 1_000_000 // per_second
        return _each(lambda number: number * factor, numbers, array.null_count)
    return _each(lambda number: number // 1_000, numbers, array.null_count)


def _time_of_day(us: int) -> time:
    seconds, micros = divmod(us, 1_000_000)
    minutes, second = divmod(seconds, 60)
    hour, minute = divmod(minutes, 60)
    return time(hour, minute, second, micros)


def _timestamps(array: pa.Array, kind: pa.DataType) -> list[Any]:
    zone = time_zone(kind.tz) if kind.tz else None
    numbers = _microseconds(array, kind)
    if zone is not None and _exact_as_float(numbers, array.null_count):
        # 3 times as fast as adding a timedelta; times take most of the time for typical events.
        moment = datetime.fromtimestamp
        if array.null_count:
            return [None if us is None else moment(us / 1_000_000, zone) for us in numbers]
        return [moment(us / 1_000_000, zone) for us in numbers]
    if zone is None:
        return _each(lambda us: _NAIVE_EPOCH + timedelta(0, 0, us), numbers, array.null_count)
    return _each(
        lambda us: (_EPOCH + timedelta(0, 0, us)).astimezone(zone), numbers, array.null_count
    )


def _exact_as_float(numbers: list[Any], nulls: int) -> bool:
    """Whether each time is after 1970 and early enough for a float to hold its microseconds."""
    present = [number for number in numbers if number is not None] if nulls else numbers
    return not present or (min(present) >= 0 and max(present) < _FLOAT_LIMIT)


def _validity(array: pa.Array) -> Iterable[bool]:
    valid: list[bool] = array.is_valid().to_pylist()
    return valid


def _structs(array: pa.Array, path: str) -> list[Any]:
    names = [array.type.field(number).name for number in range(array.type.num_fields)]
    # A struct's own nulls do not show in its children, whose values there are arbitrary and may
    # be ones that Python cannot hold; flatten() makes them null.
    children = array.flatten() if array.null_count else [array.field(n) for n in range(len(names))]
    columns = [
        to_python(child, f"{path}.{name}") for name, child in zip(names, children, strict=True)
    ]
    # Only C code in the loop: half the time of a comprehension.
    rows = map(dict, map(zip, repeat(names), zip(*columns, strict=True)))
    if array.null_count:
        return [row if valid else None for row, valid in zip(rows, _validity(array), strict=True)]
    return list(rows)


def _lists(array: pa.Array, items: list[Any]) -> list[Any]:
    """Split the items of a list array; flatten() leaves out those of null lists."""
    lengths = array.value_lengths().to_pylist()
    found: list[Any] = []
    start = 0
    for length in lengths:
        if length is None:
            found.append(None)
        else:
            found.append(items[start : start + length])
            start += length
    return found


def _fixed_lists(array: pa.Array, path: str) -> list[Any]:
    size = array.type.list_size
    items = to_python(array.flatten(), f"{path}[]")
    found: list[Any] = []
    start = 0
    for valid in _validity(array) if array.null_count else repeat(True, len(array)):
        found.append(items[start : start + size] if valid else None)
        start += size if valid else 0
    return found


def _maps(array: pa.Array, path: str) -> list[Any]:
    # A list view of the same buffers, so that null maps are left out as for lists.
    kind = array.type
    entry = pa.struct([pa.field("key", kind.key_type, nullable=False), kind.item_field])
    lists = array.cast(pa.list_(pa.field("entries", entry, nullable=False)))
    entries = lists.flatten()
    keys = to_python(entries.field(0), f"{path}.key")
    values = to_python(entries.field(1), f"{path}.value")
    found = _lists(lists, list(zip(keys, values, strict=True)))
    return [None if pairs is None else dict(pairs) for pairs in found]


# -- envelope columns -----------------------------------------------------------------------


def keys_to_python(array: pa.Array) -> list[str | None]:
    """Keys as text; bytes that are not UTF-8 survive as surrogate escapes."""
    try:
        keys: list[str | None] = array.cast(pa.string()).to_pylist()
    except pa.ArrowInvalid:
        return [
            None if key is None else key.decode("utf-8", "surrogateescape")
            for key in array.to_pylist()
        ]
    return keys


def headers_to_python(array: pa.Array) -> list[list[tuple[str, bytes]] | None]:
    """Headers of each event as (key, value) pairs in their order, repeated keys included."""
    entries = array.flatten()
    keys, values = (column.to_pylist() for column in entries.flatten())
    if None in keys or None in values:
        raise PackError("a header has no key or no value", "values")
    return _lists(array, list(zip(keys, values, strict=True)))
