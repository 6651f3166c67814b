"""Arrow data from outside, checked against a schema before it is stored.

Columns are matched by name and cast only where every value keeps its meaning (large or
dictionary-encoded text, narrower numbers, other units of time, each cast checked for loss); then
nulls, symbols and the like are checked column by column, so a clean batch costs microseconds.
"""

from __future__ import annotations

import datetime as dt
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as at

from millstream import errors
from millstream.schemas import types as t
from millstream.schemas.arrow_types import arrow_type
from millstream.schemas.values.columns import builder_for
from millstream.schemas.values.fit import compile_fit, fresh

__all__ = ["Conformer"]

_UUID: Final = "^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$"


# The smallest and largest number that Python's own types can hold: days, or microseconds.
_DAY: Final = 86_400_000_000
_FIRST_DAY: Final = dt.date.min.toordinal() - dt.date(1970, 1, 1).toordinal()
_LAST_DAY: Final = dt.date.max.toordinal() - dt.date(1970, 1, 1).toordinal()
_LIMITS: Final[dict[type, tuple[int, int]]] = {
    t.Date: (_FIRST_DAY, _LAST_DAY),
    t.Time: (0, _DAY - 1),
    t.Timestamp: (_FIRST_DAY * _DAY, (_LAST_DAY + 1) * _DAY - 1),
}


class Conformer:
    """Converts Arrow batches to struct arrays of one record, or reports why it cannot."""

    def __init__(self, record: t.Record) -> None:
        self.record = record
        self.type: pa.StructType = arrow_type(record)
        self._known = frozenset(field.name for field in record.fields)

    def conform(self, batch: pa.RecordBatch | pa.StructArray) -> pa.StructArray:
        """The batch as the record's struct array; columns of the right type are not copied."""
        array = batch.to_struct_array() if isinstance(batch, pa.RecordBatch) else batch
        if not isinstance(array, pa.StructArray):
            raise errors.Unfit("", t.kind(self.record), f"an Arrow array of {array.type}")
        if array.type != self.type:
            array = self._cast(array)
        _check(array, self.record, "", None)
        return array

    def _cast(self, array: pa.StructArray) -> pa.StructArray:
        names = [array.type.field(i).name for i in range(array.type.num_fields)]
        for name in names:
            if name not in self._known or names.count(name) > 1:
                raise errors.Unfit(name, f"no such column in {t.kind(self.record)}", "a column")
        columns = []
        for field, target in zip(self.record.fields, list(self.type), strict=True):
            if field.name in names:
                column = array.field(names.index(field.name))
                columns.append(_cast_column(column, field, target.type))
            elif field.required:
                raise errors.Unfit(field.name, t.kind(field.type), "no such column")
            else:
                one = builder_for(field.type)([fresh(field.default)])
                columns.append(one.take(pa.repeat(pa.scalar(0, pa.int64()), len(array))))
        mask = array.is_null() if array.null_count else None
        return pa.StructArray.from_arrays(columns, fields=list(self.type), mask=mask)


def _cast_column(column: Any, field: t.Field, target: Any) -> Any:
    if column.type == target:
        return column
    if isinstance(column, pa.DictionaryArray):
        column = column.dictionary_decode()
    if getattr(column.type, "extension_name", "") == "arrow.uuid":
        texts = [None if value is None else str(value) for value in column.to_pylist()]
        column = pa.array(texts, pa.string())
    if not _castable(column.type, field.type):
        raise errors.Unfit(field.name, str(target), f"a column of {column.type}")
    try:
        return _retyped(column.cast(_loosened(target)), target)
    except pa.ArrowException as error:
        for row, value in enumerate(column.to_pylist() if at.is_decimal(column.type) else ()):
            _refuse_value(field.type, value, field.name, row)
        raise errors.Unfit(field.name, str(target), f"a value that would change: {error}") from None


def _refuse_value(type_: t.Type, value: object, path: str, row: int | None) -> None:
    """Unfit, in the words that are used for single values, if the value does not fit."""
    try:
        compile_fit(type_)(value)
    except errors.Unfit as unfit:
        raise errors.Unfit(path, unfit.expected, unfit.found, row) from None


def _loosened(target: Any) -> Any:
    """The type with every field nullable: Arrow cannot cast to others. Nulls are checked later."""
    if at.is_struct(target):
        return pa.struct([(field.name, _loosened(field.type)) for field in target])
    if at.is_map(target):
        return pa.map_(target.key_type, pa.field("value", _loosened(target.item_type)))
    if at.is_list(target):
        return pa.list_(pa.field("item", _loosened(target.value_type)))
    return target


def _retyped(array: Any, target: Any) -> Any:
    """The same columns under a type that differs only in nullability."""
    if array.type == target:
        return array
    mask = array.is_null() if array.null_count else None
    if at.is_struct(target):
        children = [_retyped(array.field(i), field.type) for i, field in enumerate(target)]
        return pa.StructArray.from_arrays(children, fields=list(target), mask=mask)
    if mask is not None and array.offset:
        # Arrow refuses a mask with offsets that do not start at the buffer's start.
        array = array.take(pa.array(range(len(array)), pa.int64()))
    if at.is_map(target):
        items = _retyped(array.items, target.item_type)
        return pa.MapArray.from_arrays(array.offsets, array.keys, items, type=target, mask=mask)
    values = _retyped(array.values, target.value_type)
    return pa.ListArray.from_arrays(array.offsets, values, type=target, mask=mask)


def _castable(source: Any, type_: t.Type) -> bool:
    """Whether values of the Arrow type can keep their meaning as values of the type."""
    type_, _ = t.strip(type_)
    target = arrow_type(type_)
    match type_:
        case t.Record():
            if not at.is_struct(source):
                return False
            inner = {source.field(i).name: source.field(i).type for i in range(source.num_fields)}
            return list(inner) == [f.name for f in type_.fields] and all(
                _castable(inner[f.name], f.type) for f in type_.fields
            )
        case t.List():
            lists = at.is_list(source) or at.is_large_list(source)
            return bool(lists) and _castable(source.value_type, type_.item)
        case t.Map():
            return (
                at.is_map(source)
                and _castable(source.key_type, type_.key)
                and _castable(source.item_type, type_.value)
            )
        case t.Int():
            return bool(at.is_integer(source)) and _holds(source, type_)
        case t.Float(bits):
            return bool(at.is_floating(source) and source.bit_width <= bits)
        case t.String() | t.Enum() | t.Uuid():
            return (
                bool(at.is_string(source))
                or at.is_large_string(source)
                or at.is_string_view(source)
            )
        case t.Binary(size):
            any_size = at.is_large_binary(source) or at.is_binary_view(source)
            return (
                any_size
                or at.is_binary(source)
                or (size is None and at.is_fixed_size_binary(source))
            )
        case t.Timestamp(utc):
            return bool(at.is_timestamp(source)) and (source.tz is not None) is utc
        case t.Time():
            return bool(at.is_time(source))
        case t.Duration():
            return bool(at.is_duration(source))
        case t.Decimal():
            return bool(at.is_decimal(source)) and source.scale <= type_.scale
        case _:
            return bool(source == target)


def _holds(source: Any, type_: t.Int) -> bool:
    narrow = t.Int(source.bit_width, at.is_signed_integer(source))
    return type_.low <= narrow.low and narrow.high <= type_.high


# -- checks beyond the Arrow type ---------------------------------------------------------


def _first(mask: Any) -> int | None:
    """The first row where the mask is true."""
    row = pc.index(mask.fill_null(False), True).as_py()
    return None if row < 0 else int(row)


def _misfit(path: str, expected: str, found: str, row: int | None, nested: bool) -> errors.Unfit:
    return errors.Unfit(path, expected, found, None if nested else row)


def _check(array: Any, type_: t.Type, path: str, present: Any, nested: bool = False) -> None:
    """Refuse nulls and values that the type does not have; `present` masks the rows that count."""
    inner, nullable = t.strip(type_)
    if not nullable and array.null_count:
        nulls = array.is_null() if present is None else pc.and_(array.is_null(), present)
        row = _first(nulls)
        if row is not None:
            raise _misfit(path, t.kind(inner), "null", row, nested)
    match inner:
        case t.Record():
            here = array.is_valid() if array.null_count else None
            for field, child in zip(inner.fields, array.flatten(), strict=True):
                where = f"{path}.{field.name}" if path else field.name
                _check(child, field.type, where, here, nested)
        case t.List():
            if _needs_check(inner.item):
                _check(array.flatten(), inner.item, f"{path}[]", None, True)
        case t.Map():
            keys, items = _entries(array)
            _check(keys, inner.key, f"{path}{{}}", None, True)
            _check(items, inner.value, f"{path}{{}}", None, True)
        case t.Union():
            _check_members(array, inner, path, nested)
        case _:
            _check_leaf(array, inner, path, nested)


def _entries(array: Any) -> tuple[Any, Any]:
    """Keys and items of the maps that are not null."""
    array = array.drop_null() if array.null_count else array
    if not len(array):
        return array.keys.slice(0, 0), array.items.slice(0, 0)
    first, last = array.offsets[0].as_py(), array.offsets[-1].as_py()
    return array.keys.slice(first, last - first), array.items.slice(first, last - first)


def _needs_check(type_: t.Type) -> bool:
    return True if not isinstance(type_, t.Nullable) else not isinstance(type_.of, (t.Int, t.Float))


def _check_leaf(array: Any, type_: t.Type, path: str, nested: bool) -> None:
    bad: Any = None
    match type_:
        case t.Enum():
            known = pa.array(type_.symbols, pa.string())
            bad = pc.and_(pc.invert(pc.is_in(array, known)), array.is_valid())
        case t.Uuid():
            bad = pc.invert(pc.match_substring_regex(array, _UUID))
        case t.Date() | t.Time() | t.Timestamp():
            bad = _bad_times(array, type_)
        case t.String():
            # Arrow does not check text columns that are given to it as buffers.
            try:
                array.validate(full=True)
            except pa.ArrowInvalid as error:
                raise errors.Unfit(path, "string in Unicode", str(error)) from None
    row = None if bad is None else _first(bad)
    if row is not None:
        if isinstance(type_, (t.Date, t.Time, t.Timestamp)):
            # Python cannot hold some of them, and Arrow prints those wrongly.
            found = f"the number {_numbers(array)[row].as_py()}"
        else:
            value = array[row].as_py()
            _refuse_value(type_, value, path, None if nested else row)
            found = repr(value)[:60]
        raise _misfit(path, t.kind(type_), found, row, nested)


def _numbers(array: Any) -> Any:
    return array.view(pa.int32() if array.type == pa.date32() else pa.int64())


def _bad_times(array: Any, type_: t.Type) -> Any:
    """Times outside Python's years 1 to 9999, or finer than the type's unit."""
    numbers = _numbers(array)
    low, high = _LIMITS[type(type_)]
    bad = pc.or_(pc.less(numbers, low), pc.greater(numbers, high))
    if isinstance(type_, (t.Time, t.Timestamp)) and type_.unit == "ms":
        thousand = pa.scalar(1000, pa.int64())
        whole = pc.equal(pc.multiply(pc.divide(numbers, thousand), thousand), numbers)
        bad = pc.or_(bad, pc.invert(whole))
    return bad


def _check_members(array: Any, union: t.Union, path: str, nested: bool) -> None:
    """Exactly one member of a union is set in every row that is not null."""
    children = array.flatten()
    count = pa.repeat(pa.scalar(0, pa.int64()), len(array))
    for option, child in zip(union.options, children, strict=True):
        count = pc.add(count, child.is_valid().cast(pa.int64()))
        _check(child, t.Nullable(option), path, None, nested)
    wrong = pc.not_equal(count, pa.scalar(1, pa.int64()))
    row = _first(pc.and_(wrong, array.is_valid()) if array.null_count else wrong)
    if row is not None:
        raise _misfit(path, f"one option of {t.kind(union)}", "none or several", row, nested)
