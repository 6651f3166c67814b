"""Many Python objects to Arrow columns, fast and strict.

`pa.array` alone would accept 1.5 as an int64, bytes as text, a number as a date and a datetime
without a zone as one with a zone, and rows as dicts cost 32 µs each. So values are gathered column
by column, their exact Python types are compared with what the column accepts (one pass in C), and
only then passed to Arrow. Everything else takes the slow path: every row goes through
`compile_fit`, which either names the misfit or returns plain values that pass. The slow path is the
definition; the fast path may only be a shortcut to the same result.
"""

from __future__ import annotations

import datetime as dt
import decimal
import keyword
import operator
import uuid
import zoneinfo
from collections.abc import Callable, Sequence
from itertools import accumulate, chain
from typing import Any, Final, TypeAlias

import pyarrow as pa

from millstream import errors
from millstream.schemas import types as t
from millstream.schemas.arrow_types import arrow_type
from millstream.schemas.values.fit import MAX_FLOAT32 as _MAX_FLOAT32
from millstream.schemas.values.fit import compile_fit, field_names, fresh
from millstream.schemas.values.instants import are_whole_ms, utc_instants

__all__ = ["ColumnBuilder", "builder_for"]

# Values of one column (no nulls among them) to an Arrow array.
_Build: TypeAlias = Callable[[list[Any]], Any]
# Rows to their columns.
_Gather: TypeAlias = Callable[[list[Any]], list[list[Any]]]
_None: Final = type(None)

_EXACT: Final[dict[type, frozenset[type]]] = {
    t.Bool: frozenset({bool}),
    t.Int: frozenset({int}),
    t.Float: frozenset({float, int}),
    t.String: frozenset({str}),
    t.Binary: frozenset({bytes, bytearray, memoryview}),
    t.Decimal: frozenset({decimal.Decimal}),
    t.Date: frozenset({dt.date}),
    t.Time: frozenset({dt.time}),
    t.Timestamp: frozenset({dt.datetime}),
    t.Duration: frozenset({dt.timedelta}),
    t.Uuid: frozenset({uuid.UUID}),
}
# Of types that take several: what most values are.
_USUAL: Final[dict[type, type]] = {t.Float: float, t.Binary: bytes}
# Zones that have an offset for every time, so that values need not be checked one by one.
_SOUND_ZONES: Final = (dt.timezone, zoneinfo.ZoneInfo)
_zone_of: Final = operator.attrgetter("tzinfo")
_micro_of: Final = operator.attrgetter("microsecond")
_INFINITY: Final = float("inf")


class _NotFast(Exception):
    """The fast path cannot be sure about a value of the column."""


class ColumnBuilder:
    """Builds struct arrays from values of one record; compiled once, used for every batch."""

    def __init__(self, record: t.Record) -> None:
        self.record = record
        self.type: pa.StructType = arrow_type(record)
        self._fit = compile_fit(record)
        self._build = _record_builder(record)
        # What the fast path may raise; the slow path then reports the cause.
        self._refusals = (
            _NotFast, pa.ArrowException, OverflowError, ValueError, TypeError, LookupError,
            AttributeError,
        )  # fmt: skip

    def build(self, values: Sequence[object]) -> pa.StructArray:
        """The values as one struct array; the first misfit is an `Unfit` with its row."""
        rows = values if isinstance(values, list) else list(values)
        try:
            return self._build(rows)
        except self._refusals:
            return self._build(self._plain(rows))

    def batch(self, values: Sequence[object]) -> pa.RecordBatch:
        """The values as a record batch of the record's columns."""
        return pa.RecordBatch.from_struct_array(self.build(values))

    def _plain(self, rows: Sequence[object]) -> list[Any]:
        fit, out = self._fit, []
        for index, row in enumerate(rows):
            try:
                out.append(fit(row))
            except errors.Unfit as error:
                raise errors.Unfit(error.field, error.expected, error.found, index) from None
        return out


# -- gathering ----------------------------------------------------------------------------


def _record_builder(record: t.Record) -> _Build:
    struct = arrow_type(record)
    fields = list(struct)
    names = tuple(field.name for field in record.fields)
    builders = [builder_for(field.type) for field in record.fields]
    items = _compiled([f"row[{name!r}]" for name in names])
    attributes = _attribute_gather(names)
    all_names, count = frozenset(names), len(names)
    defaults = [field.default for field in record.fields]

    def gather(rows: list[Any]) -> list[list[Any]]:
        kind: type = type(rows[0]) if rows else dict
        if operator.countOf(map(type, rows), kind) != len(rows):
            raise _NotFast
        if kind is dict:
            if operator.countOf(map(len, rows), count) == len(rows):
                return items(rows)
            return _gather_some(rows, names, defaults)
        if attributes is not None and frozenset(field_names(kind) or ()) == all_names:
            return attributes(rows)
        return _gather_attributes(rows, kind, names, defaults)

    def build(rows: list[Any]) -> Any:
        columns = gather(rows)
        arrays = [make(column) for make, column in zip(builders, columns, strict=True)]
        return pa.StructArray.from_arrays(arrays, fields=fields)

    return build


def _attribute_gather(names: Sequence[str]) -> _Gather | None:
    """Columns of objects that have all these attributes; None if one cannot be written as code."""
    # The compiler normalises other than ASCII identifiers: it might look up another name.
    if all(n.isascii() and n.isidentifier() and not keyword.iskeyword(n) for n in names):
        return _compiled([f"row.{name}" for name in names])
    return None


def _compiled(parts: Sequence[str]) -> _Gather:
    """Columns of the parts of every `row`: a comprehension takes half the time of a getter."""
    columns = ", ".join(f"[{part} for row in rows]" for part in parts)
    gather: _Gather = eval(f"lambda rows: [{columns}]", {"__builtins__": {}})
    return gather


def _gather_some(
    rows: list[dict[str, Any]], names: tuple[str, ...], defaults: list[object]
) -> list[list[Any]]:
    """Columns of dicts that leave out fields with a default."""
    columns, held = [], 0
    for name, default in zip(names, defaults, strict=True):
        column = [row.get(name, t.MISSING) for row in rows]
        missing = column.count(t.MISSING)
        held += len(column) - missing
        if missing:
            if default is t.MISSING:
                raise _NotFast
            column = [fresh(default) if value is t.MISSING else value for value in column]
        columns.append(column)
    # More keys than were taken: some row has an unknown field.
    if sum(map(len, rows)) != held:
        raise _NotFast
    return columns


def _gather_attributes(
    rows: list[Any], kind: type, names: tuple[str, ...], defaults: list[object]
) -> list[list[Any]]:
    known = field_names(kind)
    if known is None or not set(known) <= set(names):
        raise _NotFast
    columns = []
    for name, default in zip(names, defaults, strict=True):
        if name in known:
            columns.append(list(map(operator.attrgetter(name), rows)))
        elif default is t.MISSING:
            raise _NotFast
        else:
            columns.append([default] * len(rows))
    return columns


# -- building -----------------------------------------------------------------------------


def builder_for(type_: t.Type) -> _Build:
    """The builder of a field's column, which may hold None only if its type is nullable."""
    if not isinstance(type_, t.Nullable):
        return _solid_builder(type_)
    inner = type_.of
    if type(inner) in _EXACT:
        # Arrow accepts None in a flat column.
        return _leaf_builder(inner, nullable=True)
    solid = _solid_builder(inner)

    def build(values: list[Any]) -> Any:
        if None not in values:
            return solid(values)
        return _spread(solid([v for v in values if v is not None]), [v is not None for v in values])

    return build


def _spread(compact: Any, present: list[bool]) -> Any:
    """The compact array with nulls inserted where values are missing."""
    counts = accumulate(present, initial=-1)
    next(counts)
    indices = [count if here else None for count, here in zip(counts, present, strict=True)]
    return compact.take(pa.array(indices, pa.int64()))


def _solid_builder(type_: t.Type) -> _Build:
    match type_:
        case t.Record():
            return _record_builder(type_)
        case t.List():
            return _list_builder(type_)
        case t.Map():
            return _map_builder(type_)
        case t.Union():
            return _union_builder(type_)
        case t.Enum():
            return _enum_builder(type_)
        case _:
            return _leaf_builder(type_, nullable=False)


def _leaf_builder(type_: t.Type, *, nullable: bool) -> _Build:
    arrow = arrow_type(type_)
    exact = _EXACT[type(type_)]
    taken = exact | ({_None} if nullable else frozenset())
    usual = _USUAL.get(type(type_)) or next(iter(exact))
    check = _further_check(type_)
    array, count_of = pa.array, operator.countOf

    def check_types(values: list[Any]) -> None:
        # Counting one type is quicker than gathering the set of them, and nearly always enough.
        usually = count_of(map(type, values), usual) == len(values)
        if not usually and not set(map(type, values)) <= taken:
            raise _NotFast

    if isinstance(type_, t.Uuid):

        def build_text(values: list[Any]) -> Any:
            check_types(values)
            return array([None if v is None else str(v) for v in values], arrow)

        return build_text

    def build(values: list[Any]) -> Any:
        check_types(values)
        if check is not None:
            check(values)
        return array(values, arrow)

    if not (isinstance(type_, t.Timestamp) and type_.utc):
        return build
    whole_ms = type_.unit == "ms"

    def build_instants(values: list[Any]) -> Any:
        instants = utc_instants(values, arrow)
        if instants is None or (whole_ms and not are_whole_ms(instants)):
            return build(values)
        return instants

    return build_instants


def _further_check(type_: t.Type) -> Callable[[list[Any]], None] | None:
    """Checks beyond exact Python types; they raise if the slow path must decide."""
    match type_:
        case t.Timestamp(utc, unit):
            return lambda values: _check_times(values, utc, unit == "ms")
        case t.Time(unit):
            return lambda values: _check_times(values, False, unit == "ms")
        case t.Float(32):
            return _check_singles
        case _:
            return None


def _check_times(values: list[Any], utc: bool, whole_ms: bool) -> None:
    solid = [value for value in values if value is not None] if None in values else values
    zones = set(map(_zone_of, solid))
    if utc:
        # Times near the years 1 and 9999 may leave that range when they are converted to UTC.
        if not all(isinstance(zone, _SOUND_ZONES) for zone in zones):
            raise _NotFast
        # Arrow leaves out what an offset has below a second.
        if any(isinstance(z, dt.timezone) and z.utcoffset(None).microseconds for z in zones):
            raise _NotFast
        if zones - {dt.UTC} and any(value.year in (1, 9999) for value in solid):
            raise _NotFast
    elif zones - {None}:
        raise _NotFast
    if whole_ms and any(micro % 1000 for micro in set(map(_micro_of, solid))):
        raise _NotFast


def _check_singles(values: list[Any]) -> None:
    """Refuse numbers too large for 32 bits, which Arrow would round to infinity."""
    solid = [value for value in values if value is not None] if None in values else values
    if any(_MAX_FLOAT32 < abs(value) < _INFINITY for value in solid):
        raise _NotFast


def _enum_builder(type_: t.Enum) -> _Build:
    fit, symbols = compile_fit(type_), frozenset(type_.symbols)

    def build(values: list[Any]) -> Any:
        distinct = set(values)
        if set(map(type, distinct)) <= {str}:
            if not distinct <= symbols:
                raise _NotFast
        else:
            symbol_of = {value: fit(value) for value in distinct}
            values = [symbol_of[value] for value in values]
        return pa.array(values, pa.string())

    return build


def _list_builder(type_: t.List) -> _Build:
    arrow, item = arrow_type(type_), builder_for(type_.item)

    def build(values: list[Any]) -> Any:
        if not set(map(type, values)) <= {list, tuple}:
            raise _NotFast
        offsets = pa.array(list(accumulate(map(len, values), initial=0)), pa.int32())
        flat = item(list(chain.from_iterable(values)))
        return pa.ListArray.from_arrays(offsets, flat, type=arrow)

    return build


def _map_builder(type_: t.Map) -> _Build:
    arrow, key, value = arrow_type(type_), builder_for(type_.key), builder_for(type_.value)

    def build(values: list[Any]) -> Any:
        if not set(map(type, values)) <= {dict}:
            raise _NotFast
        offsets = pa.array(list(accumulate(map(len, values), initial=0)), pa.int32())
        keys = key(list(chain.from_iterable(values)))
        items = value(list(chain.from_iterable(entry.values() for entry in values)))
        return pa.MapArray.from_arrays(offsets, keys, items, type=arrow)

    return build


def _union_builder(type_: t.Union) -> _Build:
    fields = list(arrow_type(type_))
    fits = [compile_fit(option) for option in type_.options]
    builders = [_solid_builder(option) for option in type_.options]

    def build(values: list[Any]) -> Any:
        chosen: list[int] = []
        plain: list[Any] = []
        for value in values:
            index, fitted = _choose(fits, value)
            chosen.append(index)
            plain.append(fitted)
        arrays = []
        for index, make in enumerate(builders):
            present = [option == index for option in chosen]
            compact = make([v for v, here in zip(plain, present, strict=True) if here])
            arrays.append(_spread(compact, present))
        return pa.StructArray.from_arrays(arrays, fields=fields)

    return build


def _choose(fits: list[Callable[[Any], Any]], value: Any) -> tuple[int, Any]:
    for index, fit in enumerate(fits):
        try:
            return index, fit(value)
        except errors.Unfit:
            continue
    raise _NotFast
